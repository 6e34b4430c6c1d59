"""A stream inside one process: records handed from writer threads to a reader thread, bounded in bytes.

The plainest transport, and the reference that the others are compared with: no bytes are encoded, everything else is
promised alike. One writer thread and one reader thread at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from routeplane.errors import ErrorKind, TruncatedError, UsageError
from routeplane.record import RouteRecord
from routeplane.stream.endpoints import RecordReader, RecordWriter
from routeplane.stream.protocol import ReadPolicy

if TYPE_CHECKING:
    from routeplane.spec import RouteSpec

__all__ = ["MemoryReader", "MemoryStream", "MemoryWriter"]


class MemoryStream:
    """The place between ``new_stream(stream, spec)`` and ``open_stream(stream)``; holds records by reference."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._records: deque[RouteRecord] = deque()
        self._bytes = 0
        self._spec: RouteSpec | None = None
        self._end: str | None = None  # "closed", "aborted" or "left by its reader"

    def writer(self, spec: RouteSpec, *, max_bytes: int) -> MemoryWriter:
        """The one sink of this stream. Raises UsageError for a second."""
        with self._changed:
            if self._spec is not None:
                raise UsageError("expected one writer of a MemoryStream, got another", kind=ErrorKind.ARGUMENT)
            self._spec = spec
            self._changed.notify_all()
        return MemoryWriter(self, spec, max_bytes=max_bytes)

    def reader(self, policy: ReadPolicy) -> MemoryReader:
        """A source; waits for the writer to appear."""
        with self._changed:
            self._changed.wait_for(lambda: self._spec is not None)
            spec = self._spec
        if spec is None:
            raise UsageError("expected a writer, got none", kind=ErrorKind.ARGUMENT)
        return MemoryReader(self, spec, policy=policy)

    def put(self, record: RouteRecord, max_bytes: int) -> None:
        """Add a record; blocks while the stream holds ``max_bytes`` or more."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes < max_bytes or self._end is not None)
            if self._end is not None:
                raise UsageError(f"expected an open stream, got one that was {self._end}", kind=ErrorKind.CLOSED)
            self._records.append(record)
            self._bytes += record.nbytes
            self._changed.notify_all()

    def take(self) -> RouteRecord | str:
        """The next record, or how the stream ended; blocks until there is one or the other."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._records) or self._end is not None)
            if not self._records:
                return self._end or "closed"
            record = self._records.popleft()
            self._bytes -= record.nbytes
            self._changed.notify_all()
            return record

    def end(self, how: str) -> None:
        """Close, abort, or leave as its reader; the first one counts. Only a close keeps what was not taken yet."""
        with self._changed:
            if self._end is None:
                self._end = how
                if how != "closed":
                    self._records.clear()
                    self._bytes = 0
            self._changed.notify_all()


class MemoryWriter(RecordWriter):
    """The RouteSink of a MemoryStream."""

    def __init__(self, stream: MemoryStream, spec: RouteSpec, *, max_bytes: int) -> None:
        super().__init__(spec, max_bytes=max_bytes)
        self._stream = stream

    def _check(self, record: RouteRecord) -> None:
        """Nothing beyond the rest."""

    def _put(self, record: RouteRecord) -> None:
        self._stream.put(record, self._max_bytes)

    def _finish(self) -> None:
        self._stream.end("closed")

    def _discard(self) -> None:
        self._stream.end("aborted")


class MemoryReader(RecordReader):
    """The RouteSource of a MemoryStream. Yields the writer's own (immutable) records, verified again."""

    def __init__(self, stream: MemoryStream, spec: RouteSpec, *, policy: ReadPolicy) -> None:
        super().__init__(spec, policy)
        self._stream = stream

    def close(self) -> None:
        """End the stream: a writer that waits for room is told that no one will read."""
        super().close()
        self._stream.end("left by its reader")

    def _arrive(self) -> Iterator[RouteRecord]:
        while isinstance(taken := self._stream.take(), RouteRecord):
            yield taken.verify() if self._policy.verify else taken
        if taken == "closed":
            self._report = replace(self._report, complete=True)
        elif self._policy.on_truncated == "raise":
            raise TruncatedError(f"expected the writer to close, got a stream {taken}", kind=ErrorKind.TRUNCATED)
        else:
            self._report = replace(self._report, truncated=True)
