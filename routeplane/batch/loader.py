"""Batches ahead of the step: one thread reads and collates while the trainer computes.

Owns the thread, its bounds and its end. Knows batches by their tensors; neither streams nor models.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from routeplane.batch.slots import require_positive
from routeplane.errors import ErrorKind, UsageError

if TYPE_CHECKING:
    from types import TracebackType

    from routeplane.batch.batch import RouteBatch

__all__ = ["PrefetchReport", "Prefetcher", "prefetch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchReport:
    """What passed: ``batches`` and ``nbytes`` made, and the most bytes that waited at once."""

    batches: int = 0
    nbytes: int = 0
    peak_nbytes: int = 0

    def merge(self, other: PrefetchReport) -> PrefetchReport:
        """The counts of both, and the higher of the peaks."""
        return PrefetchReport(
            batches=self.batches + other.batches,
            nbytes=self.nbytes + other.nbytes,
            peak_nbytes=max(self.peak_nbytes, other.peak_nbytes),
        )

    def scalars(self, *, prefix: str = "routeplane/") -> dict[str, float]:
        """A flat dict with stable names for a metrics logger."""
        return {
            f"{prefix}prefetch_batches": float(self.batches),
            f"{prefix}prefetch_bytes": float(self.nbytes),
            f"{prefix}prefetch_peak_bytes": float(self.peak_nbytes),
        }


def prefetch(batches: Iterable[RouteBatch], *, depth: int = 2, max_bytes: int | None = None) -> Prefetcher:
    """The same batches in the same order, made in a thread while the caller is busy with those before.

    ``batches``: such as ``microbatches(...)``; iterated in that thread alone. ``depth``: batches that may wait or be in
    the making, besides the one that the caller has. ``max_bytes`` of tensors: no batch is begun while this much
    waits, so that at most one batch's bytes come on top. Raises UsageError (ARGUMENT).
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
        self._shelf = _Shelf(depth, max_bytes)
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[RouteBatch]:
        batches, self._batches = self._batches, None
        if batches is None:
            raise UsageError("expected one iteration, got another, or one after close", kind=ErrorKind.CLOSED)
        return self._handing_out(batches)

    def _handing_out(self, batches: Iterable[RouteBatch]) -> Generator[RouteBatch]:
        # a daemon: an iterator that is still around when the program ends must not keep it from ending
        self._thread = threading.Thread(
            target=_fill, args=(self._shelf, batches), name="routeplane-prefetch", daemon=True
        )
        self._thread.start()
        try:
            while (batch := self._shelf.take()) is not None:
                yield batch
        finally:
            self.close()

    def report(self) -> PrefetchReport:
        """What was made so far."""
        return self._shelf.report()

    def close(self) -> None:
        """Stop reading ahead and let go of what waits; the thread has ended on return. Idempotent."""
        self._batches = None
        self._shelf.stop()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _fill(shelf: _Shelf, batches: Iterable[RouteBatch]) -> None:
    """The thread: make batches while there is room for them."""
    with shelf:
        iterator = iter(batches)
        try:
            while shelf.has_room() and (batch := next(iterator, None)) is not None:
                shelf.put(batch)
        finally:
            if isinstance(iterator, Generator):
                iterator.close()  # in the thread that ran it


class _Shelf:
    """Where batches wait between two threads. As a context, it ends what is put: as whole, or by what was raised."""

    def __init__(self, depth: int, max_bytes: int | None) -> None:
        self._depth, self._max_bytes = depth, max_bytes
        self._changed = threading.Condition()
        self._waiting: deque[tuple[RouteBatch, int]] = deque()
        self._nbytes = 0
        self._ended = self._stopped = False
        self._error: BaseException | None = None
        self._report = PrefetchReport()

    def has_room(self) -> bool:
        """Wait until another batch may be begun; False once nobody wants one."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._is_open())
            return not self._stopped

    def _is_open(self) -> bool:
        return len(self._waiting) < self._depth and (self._max_bytes is None or self._nbytes < self._max_bytes)

    def put(self, batch: RouteBatch) -> None:
        """Add a batch, unless nobody wants it any more."""
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
    tensors = [value for value in vars(batch).values() if hasattr(value, "untyped_storage")]
    return sum(tensor.nbytes for tensor in (*tensors, *batch.columns.values()))
