"""Record streams as Arrow IPC: files, buffers, pipes and anything with ``write`` or ``read``.

Owns the order of checks on the way in: frame, header, version, batch, record, checksum, count. Records to batches and
back is ``batches``; where bytes go and come from is ``files``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from routeplane.errors import ErrorKind, FormatError, TruncatedError
from routeplane.record.batches import (
    DEFAULT_MAX_BYTES,
    TRAILER_KEY,
    BatchRecords,
    BatchWriter,
    Trailer,
    TrailerCounter,
    decoded,
    trailer_batch,
)
from routeplane.record.policy import Quarantine, ReadPolicy
from routeplane.record.record import RouteRecord
from routeplane.record.schema import FORMAT_VERSION, Encoding, StreamHeader, parse_schema
from routeplane.record.transfer import RecordReader
from routeplane.stream.frames import Frame

if TYPE_CHECKING:
    from routeplane.record.spec import RouteSpec
    from routeplane.stream.files import WholeWrites

__all__ = ["IpcReader", "IpcWriter", "parse_schema_frame", "read_batch"]


class IpcWriter(BatchWriter):
    """Writes an Arrow IPC stream to a target that it owns until ``close`` or ``abort``.

    Records are held up to ``max_bytes`` of payload and written as one batch.
    """

    def __init__(
        self,
        target: WholeWrites,
        spec: RouteSpec,
        *,
        encoding: Encoding,
        max_bytes: int = DEFAULT_MAX_BYTES,
        version: str = FORMAT_VERSION,
    ) -> None:
        super().__init__(spec, encoding=encoding, max_bytes=max_bytes, version=version)
        self._target = target
        self._scattered = target.scattered

    @cached_property
    def _ipc(self) -> Any:
        return pa.ipc.new_stream(self._target, self._schema())  # the first record says the columns

    def _send(self, batch: pa.RecordBatch) -> None:
        self._ipc.write_batch(batch)
        self._target.scattered.clear()

    def _finish(self) -> None:
        self._flush()
        trailer = self._counter.trailer().to_json()
        self._ipc.write_batch(trailer_batch(self._schema()), custom_metadata={TRAILER_KEY: trailer})
        self._ipc.close()
        self._target.publish()

    def _discard(self) -> None:
        # What went down a pipe already stays there without a trailer. The Arrow writer is dropped, not closed: closing
        # would add an end-of-stream mark.
        self._held = []
        self._target.discard()


class IpcReader(RecordReader):
    """Reads Arrow IPC frames.

    Records of a ``plain`` stream are read-only views of the source's memory and keep it alive after ``close``.
    """

    def __init__(
        self,
        frames: Iterator[Frame],
        policy: ReadPolicy,
        *,
        walkable: bool,
        quarantine: Quarantine | None = None,
        name: str | None = None,
    ) -> None:
        first = next(frames, None)
        if first is None:
            raise FormatError("expected an Arrow schema, got an empty stream", kind=ErrorKind.NOT_ARROW)
        #: ``header``: spec, encoding, version and token columns as the schema gives them.
        self._schema, self.header = parse_schema_frame(first)
        super().__init__(self.header.spec, policy, quarantine=quarantine, name=name)
        self._frames, self._is_cut = frames, False
        self._last: Frame | None = None
        if walkable:  # what the schema says comes first: a foreign stream is not merely a cut one
            self._walk()
        # one batch that is not compressed says that the stream is not: another that claims to be is damaged
        self._uncompressed = self._last is not None and self._last.kind == "batch" and not self._last.compressed
        self._counter = TrailerCounter(self.header.spec, self.header.encoding, version=self.header.version)
        self._checked = BatchRecords(self.header, policy=policy, quarantine=self.quarantine)

    @property
    def digest(self) -> str | None:
        """The trailer's digest as 16 hex digits, equal for equal content; None where only the end can tell.

        What the trailer says, before anything was read; that the records agree shows when the last one came. A pipe has
        its trailer at its end, and a cut stream has none. Raises FormatError for a damaged trailer.
        """
        return None if (declared := self._declared()) is None else f"{declared.digest:016x}"

    @property
    def total_records(self) -> int | None:
        """Records of the whole stream, where its trailer can be seen before reading, as for ``digest``."""
        return None if (declared := self._declared()) is None else declared.records

    @property
    def trailer_metadata(self) -> Mapping[str, str]:
        """The metadata that the trailer's batch carries, where it can be seen before reading; else empty."""
        return {} if self._last is None else self._last.metadata

    def _declared(self) -> Trailer | None:
        text = self.trailer_metadata.get(TRAILER_KEY)
        return None if text is None else Trailer.from_json(text)

    def _walk(self) -> None:
        """Walk all frames, so that a cut shows before the first record. Headers alone are touched, and are the cost."""
        walked: list[Frame] = []
        try:
            walked.extend(self._frames)
            self._last = walked[-1] if walked else None
            if TRAILER_KEY not in self.trailer_metadata:
                raise _no_trailer()
        except TruncatedError:
            if self._policy.on_truncated == "raise":
                raise
            self._is_cut = True
        self._frames = iter(walked)

    def close(self) -> None:
        """Close the source. Records already yielded stay valid."""
        super().close()
        self._frames = iter(())

    def _arrive(self) -> Iterator[RouteRecord]:
        ended = False
        try:
            for frame in self._frames:
                if ended:
                    raise FormatError("expected the end after the trailer, got a message", kind=ErrorKind.TRAILER)
                batch = self._batch(frame)
                if batch is None:
                    continue
                if TRAILER_KEY in frame.metadata:
                    self._accept_trailer(frame, batch)
                    ended = True
                    continue
                self._counter.add_batch()
                self._count(batches=1)
                yield from self._checked.records(
                    batch,
                    select=self._early_selection(),
                    seen=self._counter.add_record,
                    threads=self._policy.threads,
                )
            if self._is_cut or not ended:
                raise _no_trailer()
        except TruncatedError:
            if self._policy.on_truncated == "raise":
                raise
            self._report = replace(self._report, truncated=True, complete=False)

    def _batch(self, frame: Frame) -> pa.RecordBatch | None:
        """The frame as a validated batch; None for a damaged one that is passed over."""
        try:
            batch = read_batch(frame, self._schema)
        except FormatError:
            # a compressed stream is refused as a whole; it is not damaged
            if self._policy.on_corrupt == "raise" or (frame.compressed and not self._uncompressed):
                raise
            self._count(skipped_batches=1, skipped_records=frame.rows)
            return None
        self._uncompressed = True
        return batch

    def _accept_trailer(self, frame: Frame, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            raise FormatError(f"expected a trailer without rows, got {batch.num_rows}", kind=ErrorKind.TRAILER)
        declared, found = Trailer.from_json(frame.metadata[TRAILER_KEY]), self._counter.trailer()
        if self._report.skipped_batches:
            # the digest covers what was passed over, so only the trailer's count remains to be compared
            self._report = replace(self._report, skipped_records=max(declared.records - found.records, 0))
        elif self.quarantine.count and found.records == declared.records:
            # the digest covers what a quarantined record's columns said, which may be what is damaged
            self._report = replace(self._report, complete=found == declared)
        else:
            self._counter.check(declared)
            self._report = replace(self._report, complete=True)

    def _early_selection(self) -> RouteSpec | None:
        """The layers that are taken before any row is looked at: where whole records are not to be verified."""
        return None if self._policy.verify or self._layer_ids is None else self.spec


def parse_schema_frame(frame: Frame) -> tuple[pa.Schema, StreamHeader]:
    """The schema in the first frame of a stream, and what it says. Raises FormatError."""
    if frame.kind != "schema":
        raise FormatError(f"expected an Arrow schema first, got a {frame.kind} message", kind=ErrorKind.NOT_ARROW)
    schema: pa.Schema = decoded(lambda: pa.ipc.read_schema(pa.ipc.read_message(frame.data)), "schema")
    return schema, parse_schema(schema)


def read_batch(frame: Frame, schema: pa.Schema) -> pa.RecordBatch:
    """A batch, validated in full before a buffer of it is viewed. Raises FormatError for any other frame."""
    if frame.kind != "batch":
        raise FormatError(f"expected a record batch, got a {frame.kind} message", kind=ErrorKind.SCHEMA)
    if frame.compressed:
        raise FormatError("expected uncompressed bodies (format v1), got a compressed batch", kind=ErrorKind.COMPRESSED)

    def decode() -> pa.RecordBatch:
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(frame.data), schema)
        batch.validate(full=True)
        return batch

    return decoded(decode, "record batch")


def _no_trailer() -> TruncatedError:
    return TruncatedError("expected a trailer, got the end of the stream", kind=ErrorKind.TRUNCATED)
