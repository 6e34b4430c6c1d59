"""Record streams as Arrow IPC: files, buffers, pipes and anything with ``write`` or ``read``.

Owns the trailer and the order of checks on the way in: frame, header, version, batch, record, checksum, count. Encoding
and decoding of batches is ``columns``; where bytes go and come from is ``files``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from routeplane.errors import ErrorKind, FormatError, TruncatedError
from routeplane.record.codec import column_types
from routeplane.record.policy import ReadPolicy
from routeplane.record.record import RouteRecord
from routeplane.record.schema import Encoding, StreamHeader, parse_schema
from routeplane.record.transfer import RecordReader
from routeplane.stream.batches import BatchRecords, decoded
from routeplane.stream.batching import DEFAULT_MAX_BYTES, TRAILER_KEY, BatchWriter, Trailer, TrailerCounter
from routeplane.stream.frames import Frame

if TYPE_CHECKING:
    from routeplane.record.spec import RouteSpec
    from routeplane.stream.files import Target

__all__ = ["IpcReader", "IpcWriter"]


class IpcWriter(BatchWriter):
    """Writes an Arrow IPC stream to a target that it owns until ``close`` or ``abort``.

    Records are held up to ``max_bytes`` of payload and written as one batch.
    """

    def __init__(
        self, target: Target, spec: RouteSpec, *, encoding: Encoding, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> None:
        super().__init__(spec, encoding=encoding, max_bytes=max_bytes)
        self._target = target
        self._ipc: Any = None

    def _send(self, batch: pa.RecordBatch) -> None:
        self._writer().write_batch(batch)

    def write_encoded(self, records: Sequence[RouteRecord], batch: pa.RecordBatch) -> None:
        """Records that were checked, and encoded by ``columns.write_batch``, as the one batch of this stream."""
        self._columns = column_types(records[0])
        self._write(records, batch)

    def _writer(self) -> Any:
        if self._ipc is None:
            self._ipc = pa.ipc.new_stream(self._target.file, self._schema())
        return self._ipc

    def _finish(self) -> None:
        self._flush()
        schema, writer = self._schema(), self._writer()
        # schema.empty_table() fails on large_list<fixed_shape_tensor> (pyarrow 26); nulls of length 0 do not
        empty = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)
        writer.write_batch(empty, custom_metadata={TRAILER_KEY: self._counter.trailer().to_json()})
        writer.close()
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

    def __init__(self, frames: Iterator[Frame], policy: ReadPolicy, *, walkable: bool) -> None:
        first = next(frames, None)
        if first is None:
            raise FormatError("expected an Arrow schema, got an empty stream", kind=ErrorKind.NOT_ARROW)
        if first.kind != "schema":
            raise FormatError(f"expected an Arrow schema first, got a {first.kind} message", kind=ErrorKind.NOT_ARROW)
        self._schema: pa.Schema = decoded(lambda: pa.ipc.read_schema(pa.ipc.read_message(first.data)), "schema")
        self._header = parse_schema(self._schema)
        super().__init__(self._header.spec, policy)
        # what the schema says comes first: a foreign stream, or one of another version, is not merely a cut one
        self._frames, self._declared = _known_whole(frames, policy) if walkable else (frames, None)
        self._counter = TrailerCounter(self._header.spec, self._header.encoding, version=self._header.version)
        self._checked = BatchRecords(self._header, policy)

    @property
    def header(self) -> StreamHeader:
        """Spec, encoding, version and token columns as the schema gives them."""
        return self._header

    @property
    def digest(self) -> str | None:
        """The trailer's digest as 16 hex digits, equal for equal content; None where only the end can tell.

        What the trailer says, before anything was read; that the records agree shows when the last one came. A pipe has
        its trailer at its end, and a cut stream has none. Raises FormatError for a damaged trailer.
        """
        return None if self._declared is None else f"{Trailer.from_json(self._declared).digest:016x}"

    @property
    def total_records(self) -> int | None:
        """Records of the whole stream, where its trailer can be seen before reading, as for ``digest``."""
        return None if self._declared is None else Trailer.from_json(self._declared).records

    def close(self) -> None:
        """Let go of the source. Records already yielded stay valid."""
        super().close()
        self._frames = iter(())

    def _arrive(self) -> Iterator[RouteRecord]:
        try:
            for frame in self._frames:
                if self._report.complete:
                    raise FormatError("expected the end after the trailer, got a message", kind=ErrorKind.TRAILER)
                batch = self._batch(frame)
                if TRAILER_KEY in frame.metadata:
                    self._accept_trailer(frame, batch)
                    continue
                self._counter.add_batch()
                self._report = replace(self._report, batches=self._report.batches + 1)
                yield from self._batch_records(batch)
            if not self._report.complete:
                raise TruncatedError("expected a trailer, got the end of the stream", kind=ErrorKind.TRUNCATED)
        except TruncatedError:
            if self._policy.on_truncated == "raise":
                raise
            self._report = replace(self._report, truncated=True, complete=False)

    def _batch(self, frame: Frame) -> pa.RecordBatch:
        if frame.kind != "batch":
            raise FormatError(f"expected a record batch, got a {frame.kind} message", kind=ErrorKind.SCHEMA)
        if frame.compressed:
            raise FormatError(
                "expected uncompressed bodies (format v1), got a compressed batch", kind=ErrorKind.COMPRESSED
            )

        def decode() -> pa.RecordBatch:
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(frame.data), self._schema)
            batch.validate(full=True)
            return batch

        return decoded(decode, "record batch")

    def _accept_trailer(self, frame: Frame, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            raise FormatError(f"expected a trailer without rows, got {batch.num_rows}", kind=ErrorKind.TRAILER)
        self._counter.check(Trailer.from_json(frame.metadata[TRAILER_KEY]))
        self._report = replace(self._report, complete=True)

    def _batch_records(self, batch: pa.RecordBatch) -> Iterator[RouteRecord]:
        select = None if self._policy.verify or self._layer_ids is None else self.spec
        for record in self._checked.records(batch, select=select, seen=self._counter.add_record):
            self._count_quarantined()
            yield record
        self._count_quarantined()

    def _count_quarantined(self) -> None:
        if len(self._report.quarantined) < len(self._checked.quarantined):
            self._report = replace(self._report, quarantined=self._checked.quarantined)


def _known_whole(frames: Iterator[Frame], policy: ReadPolicy) -> tuple[Iterator[Frame], str | None]:
    """Walk the frames of a source that can be walked, so that a cut shows before the first record; and its trailer.

    Headers alone are touched: their number, not their payload, is the cost.
    """
    walked: list[Frame] = []
    try:
        walked.extend(frames)
    except TruncatedError as error:
        if policy.on_truncated == "raise":
            raise
        return itertools.chain(walked, _raising(error)), None
    trailer = walked[-1].metadata.get(TRAILER_KEY) if walked else None
    if policy.on_truncated == "raise" and trailer is None:
        raise TruncatedError("expected a trailer, got the end of the stream", kind=ErrorKind.TRUNCATED)
    return iter(walked), trailer


def _raising(error: TruncatedError) -> Iterator[Frame]:
    yield from ()
    raise error
