"""Batches ahead of the step: one thread reads and collates while the trainer computes.

Owns the thread, its bounds and its end. Knows batches by their tensors; neither streams nor models.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

from routeplane.batch.slots import require_positive
from routeplane.errors import ErrorKind, UsageError
from routeplane.record.counts import Counts, rule

if TYPE_CHECKING:
    from types import TracebackType

    from routeplane.batch.batch import RouteBatch

__all__ = ["PrefetchReport", "Prefetcher", "prefetch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchReport(Counts):
    """What passed: ``batches`` and ``nbytes`` made, and the most bytes that waited at once."""

    SCOPE: ClassVar[str] = "prefetch_"
    batches: int = 0
    nbytes: int = field(default=0, metadata=rule(scalar="bytes"))
    peak_nbytes: int = field(default=0, metadata=rule(scalar="peak_bytes", merge=max))


def prefetch(batches: Iterable[RouteBatch], *, depth: int = 2, max_bytes: int | None = None) -> Prefetcher:
    """Make the same batches in the same order, in a thread, while the caller is busy with those before.

    ``batches``: such as ``microbatches(...)``; iterated in that thread alone. ``depth``: batches that may wait or be in
    the making, besides the one that the caller has. ``max_bytes`` of tensors: no batch is begun while this much
    waits, so that at most one batch's bytes come on top. Raises UsageError (ARGUMENT).

    >>> from routeplane.batch import microbatches
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec()
    >>> record = watermarked_record(0, num_tokens=3, spec=spec)
    >>> with prefetch(microbatches([record], tokens=8, spec=spec)) as batches:
    ...     [len(batch.keys) for batch in batches]
    [1]
    """
    limit = None if max_bytes is None else require_positive(max_bytes, "max_bytes")
    return Prefetcher(batches, depth=require_positive(depth, "depth"), max_bytes=limit)


class Prefetcher:
    """Iterate once; made by ``prefetch``.

    The thread starts with the first batch asked for, and has ended when the iteration has: by its last batch, an
    error, ``break``, or ``close()``. All but the first wait for the batch in the making. What ``batches`` raised is
    raised where the next batch would have come, the same exception; batches made before it come first.
    ``with prefetch(...) as ahead:`` closes also where the iterator is kept elsewhere.
    """

    def __init__(self, batches: Iterable[RouteBatch], *, depth: int, max_bytes: int | None) -> None:
        self._batches: Iterable[RouteBatch] | None = batches
        self._queue = _Queue(depth, max_bytes)
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[RouteBatch]:
        batches, self._batches = self._batches, None
        if batches is None:
            raise UsageError("expected one iteration, got another, or one after close", kind=ErrorKind.CLOSED)
        return self._handing_out(batches)

    def _handing_out(self, batches: Iterable[RouteBatch]) -> Generator[RouteBatch]:
        # a daemon: an iterator that is still around when the program ends must not keep it from ending
        self._thread = threading.Thread(
            target=_fill, args=(self._queue, batches), name="routeplane-prefetch", daemon=True
        )
        self._thread.start()
        try:
            while (batch := self._queue.take()) is not None:
                yield batch
        finally:
            self.close()

    def report(self) -> PrefetchReport:
        """What was made so far."""
        return self._queue.report()

    def close(self) -> None:
        """Stop reading ahead and drop what waits; the thread has ended on return. Idempotent."""
        self._batches = None
        self._queue.stop()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _fill(queue: _Queue, batches: Iterable[RouteBatch]) -> None:
    """The thread: make batches while more may wait."""
    with queue:
        iterator = iter(batches)
        try:
            while queue.may_begin() and (batch := next(iterator, None)) is not None:
                queue.put(batch)
        finally:
            if isinstance(iterator, Generator):
                iterator.close()  # in the thread that ran it


class _Queue:
    """The batches that wait between two threads. As a context, it ends what is put: as whole, or by what was raised."""

    def __init__(self, depth: int, max_bytes: int | None) -> None:
        self._depth, self._max_bytes = depth, max_bytes
        self._changed = threading.Condition()
        self._waiting: deque[tuple[RouteBatch, int]] = deque()
        self._nbytes = 0
        self._ended = self._stopped = False
        self._error: BaseException | None = None
        self._report = PrefetchReport()

    def may_begin(self) -> bool:
        """Wait until another batch may be begun; False once the consumer has stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._is_open())
            return not self._stopped

    def _is_open(self) -> bool:
        return len(self._waiting) < self._depth and (self._max_bytes is None or self._nbytes < self._max_bytes)

    def put(self, batch: RouteBatch) -> None:
        """Add a batch, unless the consumer has stopped."""
        size = _nbytes(batch)
        with self._changed:
            if self._stopped:
                return
            self._waiting.append((batch, size))
            self._nbytes += size
            once = PrefetchReport(batches=1, nbytes=size, peak_nbytes=self._nbytes)
            self._report = self._report.merge(once)
            self._changed.notify_all()

    def take(self) -> RouteBatch | None:
        """The next batch, or None at the end; waits for it. Raises what the making of it raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended or self._stopped)
            if self._waiting:
                batch, size = self._waiting.popleft()
                self._nbytes -= size
                self._changed.notify_all()
                return batch
            error, self._error = self._error, None  # raised once, and not kept with all that its frames hold
        if error is not None:
            raise error
        return None

    def stop(self) -> None:
        """No one will take a batch any more."""
        with self._changed:
            self._stopped = True
            self._waiting.clear()
            self._nbytes = 0
            self._changed.notify_all()

    def report(self) -> PrefetchReport:
        """The counts so far."""
        with self._changed:
            return self._report

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()
        return True  # every error crosses to the consumer, who raises it; the thread itself has no one to tell


def _nbytes(batch: RouteBatch) -> int:
    return sum(tensor.nbytes for tensor in batch.tensors())
