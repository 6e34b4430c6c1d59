"""A stream inside one process: records by reference from one writer thread to one reader thread, bounded in bytes.

Nothing is encoded; everything else that ``new_stream`` and ``open_stream`` promise holds here too.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from routeplane.errors import ChecksumError, ErrorKind, TransportError, TruncatedError, refused
from routeplane.record.codec import write_batch
from routeplane.record.record import RouteRecord
from routeplane.record.transfer import RecordReader, RecordWriter
from routeplane.stream.batches import one_row

if TYPE_CHECKING:
    from routeplane.record.policy import ReadPolicy
    from routeplane.record.spec import RouteSpec

__all__ = ["MemoryReader", "MemoryStream", "MemoryWriter"]


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
        self._waiting: deque[RouteRecord] = deque()
        self._spec: RouteSpec | None = None
        self._end: str | None = None  # "closed" or "aborted"
        self._opened = self._left = False
        self.waiting_bytes = 0

    def new_sink(self, spec: RouteSpec, *, max_bytes: int, timeout_s: float | None) -> MemoryWriter:
        """Return the writer. Raises UsageError for a second one."""
        with self._changed:
            if self._spec is not None:
                raise refused("one writer of a MemoryStream", "another")
            found = MemoryWriter(self, spec, max_bytes=max_bytes, timeout_s=timeout_s)
            self._spec = spec
            self._changed.notify_all()
        return found

    def open_source(self, policy: ReadPolicy, *, timeout_s: float | None) -> MemoryReader:
        """Return the reader; waits for the writer. Raises UsageError for a second one."""
        with self._changed:
            if self._opened:
                raise refused("one reader of a MemoryStream", "another")
            self._opened = True
            self._wait(lambda: self._spec is not None, timeout_s, what="a writer")
            if self._spec is None:
                raise RuntimeError("the wait ends with a writer")
            return MemoryReader(self, self._spec, policy=policy, timeout_s=timeout_s)

    def put(self, record: RouteRecord, *, max_bytes: int, timeout_s: float | None) -> None:
        """Hand over one record; waits at the bound. Raises TransportError where the reader left."""
        with self._changed:

            def fits() -> bool:
                return self._left or not self._waiting or self.waiting_bytes + record.nbytes <= max_bytes

            self._wait(fits, timeout_s, what="a reader that takes records")
            if self._left:
                raise TransportError("expected a reader, got one that closed the stream", kind=ErrorKind.CONNECTION)
            self._waiting.append(record)
            self.waiting_bytes += record.nbytes
            self._changed.notify_all()

    def end(self, how: str) -> None:
        """End the stream, ``closed`` or ``aborted``."""
        with self._changed:
            self._end = how
            self._changed.notify_all()

    def get(self, *, timeout_s: float | None) -> RouteRecord | None:
        """The next record; None at the end. Raises TruncatedError (ABORTED), TransportError (TIMED_OUT)."""
        with self._changed:
            self._wait(lambda: bool(self._waiting) or self._end is not None, timeout_s, what="a record")
            if self._waiting:
                record = self._waiting.popleft()
                self.waiting_bytes -= record.nbytes
                self._changed.notify_all()
                return record
            if self._end == "aborted":
                raise TruncatedError("expected the writer's close, got its abort", kind=ErrorKind.ABORTED)
            return None

    def leave(self) -> None:
        """The reader is closed."""
        with self._changed:
            self._left = True
            self._waiting.clear()
            self.waiting_bytes = 0
            self._changed.notify_all()

    def _wait(self, until: Callable[[], bool], timeout_s: float | None, *, what: str) -> None:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not until():
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise TransportError(f"expected {what} within {timeout_s} s, got none", kind=ErrorKind.TIMED_OUT)
            self._changed.wait(left)


class MemoryWriter(RecordWriter):
    """The RouteSink of a MemoryStream."""

    def __init__(self, stream: MemoryStream, spec: RouteSpec, *, max_bytes: int, timeout_s: float | None) -> None:
        super().__init__(spec, max_bytes=max_bytes)
        self._stream, self._timeout_s = stream, timeout_s

    def _check(self, record: RouteRecord) -> None:
        del record

    def _put(self, record: RouteRecord) -> None:
        self._stream.put(record, max_bytes=self._max_bytes, timeout_s=self._timeout_s)

    def _finish(self) -> None:
        self._stream.end("closed")

    def _discard(self) -> None:
        self._stream.end("aborted")


class MemoryReader(RecordReader):
    """The RouteSource of a MemoryStream: yields the writer's own (immutable) records, verified again."""

    def __init__(self, stream: MemoryStream, spec: RouteSpec, *, policy: ReadPolicy, timeout_s: float | None) -> None:
        super().__init__(spec, policy)
        self._stream, self._timeout_s = stream, timeout_s

    def close(self) -> None:
        """Close the stream; a writer that goes on raises TransportError."""
        super().close()
        self._stream.leave()

    def _arrive(self) -> Iterator[RouteRecord]:
        try:
            index = 0
            while (record := self._stream.get(timeout_s=self._timeout_s)) is not None:
                yield self._verified(record, index)
                index += 1
            self._report = replace(self._report, complete=True)
        except TruncatedError:
            if self._policy.on_truncated == "raise":
                raise
            self._report = replace(self._report, truncated=True)

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
