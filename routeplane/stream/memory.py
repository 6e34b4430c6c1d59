"""A stream inside one process: records by reference from one writer thread to one reader thread, bounded in bytes.

Nothing is encoded; everything else that ``new_stream`` and ``open_stream`` promise holds here too.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from routeplane.errors import ChecksumError, ErrorKind, TransportError, TruncatedError, refused
from routeplane.record.batches import one_row
from routeplane.record.codec import write_batch
from routeplane.record.record import RouteRecord
from routeplane.record.transfer import RecordReader, RecordWriter

if TYPE_CHECKING:
    from routeplane.record.policy import ReadPolicy
    from routeplane.record.spec import RouteSpec

__all__ = ["MemoryStream"]


class MemoryStream:
    """The place between ``new_stream(stream, spec)`` and ``open_stream(stream)``: one writer, one reader.

    ``write`` blocks while the records that wait reach ``max_bytes``. Opening the reader waits for the writer. A reader
    that closes before the end raises TransportError (CONNECTION) in the writer.

    >>> stream = MemoryStream()
    >>> stream.waiting_bytes
    0
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._spec: RouteSpec | None = None
        self._opened = False
        self.waiting: deque[RouteRecord] = deque()
        self.waiting_bytes = 0
        self.end: Literal["closed", "aborted", "left"] | None = None  # "left": by the reader

    def new_sink(self, spec: RouteSpec, *, max_bytes: int, timeout_s: float | None) -> RecordWriter:
        """Return the writer. Raises UsageError for a second one."""
        with self.once():
            if self._spec is not None:
                raise refused("one writer of a MemoryStream", "another")
            self._spec = spec
        return _Writer(self, spec, max_bytes=max_bytes, timeout_s=timeout_s)

    def open_source(self, policy: ReadPolicy, *, timeout_s: float | None) -> RecordReader:
        """Return the reader; waits for the writer. Raises UsageError for a second one."""
        with self.once():
            if self._opened:
                raise refused("one reader of a MemoryStream", "another")
            self._opened = True
        with self.once(ready=lambda: self._spec, timeout_s=timeout_s, what="a writer") as spec:
            return _Reader(self, spec, policy=policy, timeout_s=timeout_s)

    @contextmanager
    def once(
        self, *, ready: Callable[[], Any] = lambda: True, timeout_s: float | None = None, what: str = ""
    ) -> Iterator[Any]:
        """Hold the stream once it is ready, and tell the other side. Raises TransportError (TIMED_OUT)."""
        with self._changed:
            if not (found := self._changed.wait_for(ready, timeout_s)):
                raise TransportError(f"expected {what} within {timeout_s} s, got none", kind=ErrorKind.TIMED_OUT)
            yield found
            self._changed.notify_all()


class _Writer(RecordWriter):
    """The RouteSink of a MemoryStream."""

    def __init__(self, stream: MemoryStream, spec: RouteSpec, *, max_bytes: int, timeout_s: float | None) -> None:
        super().__init__(spec, max_bytes=max_bytes)
        self._stream, self._timeout_s = stream, timeout_s

    def _check(self, record: RouteRecord) -> None:
        del record

    def _put(self, record: RouteRecord) -> None:
        stream = self._stream

        def fits() -> bool:
            size = stream.waiting_bytes + record.nbytes
            return stream.end == "left" or not stream.waiting or size <= self._max_bytes

        with stream.once(ready=fits, timeout_s=self._timeout_s, what="a reader that takes records"):
            if stream.end == "left":
                raise TransportError("expected a reader, got one that closed the stream", kind=ErrorKind.CONNECTION)
            stream.waiting.append(record)
            stream.waiting_bytes += record.nbytes

    def _finish(self, how: Literal["closed", "aborted"] = "closed") -> None:
        with self._stream.once():
            self._stream.end = how

    def _discard(self) -> None:
        self._finish("aborted")


class _Reader(RecordReader):
    """The RouteSource of a MemoryStream: yields the writer's own (immutable) records, verified again."""

    def __init__(self, stream: MemoryStream, spec: RouteSpec, *, policy: ReadPolicy, timeout_s: float | None) -> None:
        super().__init__(spec, policy)
        self._stream, self._timeout_s = stream, timeout_s

    def close(self) -> None:
        super().close()
        with self._stream.once():
            self._stream.end = "left"
            self._stream.waiting.clear()
            self._stream.waiting_bytes = 0

    def _arrive(self) -> Iterator[RouteRecord]:
        stream = self._stream
        for index in itertools.count():
            with stream.once(ready=lambda: stream.waiting or stream.end, timeout_s=self._timeout_s, what="a record"):
                if not stream.waiting:
                    break
                record = stream.waiting.popleft()
                stream.waiting_bytes -= record.nbytes
            yield self._verified(record, index)
        if stream.end == "aborted" and self._policy.on_truncated == "raise":
            raise TruncatedError("expected the writer's close, got its abort", kind=ErrorKind.ABORTED)
        self._report = replace(self._report, truncated=stream.end == "aborted", complete=stream.end == "closed")

    def _verified(self, record: RouteRecord, index: int) -> RouteRecord:
        try:
            return record.verify() if self._policy.verify else record
        except ChecksumError as error:
            if self._policy.on_corrupt == "raise":
                raise
            raw = one_row(write_batch([record], record.spec, encoding="plain"), 0)
            self.quarantine.add(raw, index=index, key=record.key, error=error, yielded=True)
            bare = record.without_routes()
            return replace(bare, attributes={**bare.attributes, "quarantined": "true"}, checksum=None)
