"""Reading ahead: the same batches in the same order, bounded, and no thread left behind."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routeplane.batch import BatchOptions, RouteBatch, collate, microbatches
from routeplane.batch.collation import BatchBuffers
from routeplane.batch.loader import PrefetchReport, prefetch
from routeplane.errors import DataError, ErrorKind, UsageError
from routeplane.testing.builders import watermarked_record, watermarked_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SPEC = watermarked_spec()
#: Seconds after which a thread that should come does not; never waited for where the code is right.
PATIENCE = 30.0


def make(sample: int) -> RouteBatch:
    """A batch of one record of four tokens."""
    return collate([watermarked_record(sample, num_tokens=4, spec=SPEC)], SPEC)


NBYTES = sum(value.nbytes for value in vars(make(0)).values() if isinstance(value, torch.Tensor))


class Made:
    """Yields batches, then raises ``error`` if there is one. Counts what was made, and tells when ``wanted`` were."""

    def __init__(self, count: int, *, error: BaseException | None = None, wanted: int = 0) -> None:
        self.count, self.error, self.wanted = count, error, wanted
        self.made = 0
        self.reached, self.closed = threading.Event(), threading.Event()
        self.threads: set[str] = set()

    def __iter__(self) -> Iterator[RouteBatch]:
        try:
            for sample in range(self.count):
                self.threads.add(threading.current_thread().name)
                self.made += 1
                if self.made == self.wanted:
                    self.reached.set()
                yield make(sample)
            if self.error is not None:
                raise self.error
        finally:
            self.threads.add(threading.current_thread().name)
            self.closed.set()


def prefetching_threads() -> list[str]:
    """Threads of ours that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("routeplane")]


def names(batches: Any) -> list[str]:
    """The samples of batches, in order."""
    return [key.sample_id for batch in batches for key in batch.keys]


# ----------------------------------------------------------------------------------------------------------------------
# What comes
# ----------------------------------------------------------------------------------------------------------------------


@given(count=st.integers(0, 8), depth=st.integers(1, 4), max_bytes=st.none() | st.integers(1, 5 * NBYTES))
def test_all_batches_come_in_order_within_the_bounds(count: int, depth: int, max_bytes: int | None) -> None:
    """Nothing is lost, repeated or exchanged; what waited stayed within depth and bytes; the thread has ended."""
    ahead = prefetch(Made(count), depth=depth, max_bytes=max_bytes)

    assert [f"sample-{sample}" for sample in range(count)] == names(ahead)
    report = ahead.report()
    assert (count, count * NBYTES) == (report.batches, report.nbytes)
    assert report.peak_nbytes <= depth * NBYTES
    assert max_bytes is None or report.peak_nbytes < max_bytes + NBYTES
    assert [] == prefetching_threads()


def test_batches_are_made_while_the_caller_is_busy() -> None:
    """With one batch in hand and no other asked for, as many as ``depth`` allows are made, by one other thread."""
    source = Made(9, wanted=4)
    batches = iter(prefetch(source, depth=3))
    next(batches)

    assert source.reached.wait(PATIENCE)
    assert {"routeplane-prefetch"} == source.threads
    assert [f"sample-{sample}" for sample in range(1, 9)] == names(batches)


@pytest.mark.parametrize("bound", [{"depth": 2}, {"depth": 9, "max_bytes": NBYTES + 1}], ids=["depth", "bytes"])
def test_no_more_is_made_than_allowed(bound: dict[str, int]) -> None:
    """The bound is reached and then kept until the next batch is taken."""
    source = Made(9, wanted=4)
    ahead = prefetch(source, **bound)
    batches = iter(ahead)
    taken = [next(batches)]

    while len(taken) < 7:
        # one in the caller's hands, two waiting or in the making
        assert source.made <= len(taken) + 2
        taken.append(next(batches))
    assert 2 * NBYTES >= ahead.report().peak_nbytes
    ahead.close()


def test_nothing_is_read_before_a_batch_is_asked_for() -> None:
    """Making a prefetcher starts no thread, nor does asking for its iterator."""
    source = Made(3)
    batches = iter(prefetch(source))

    assert (0, []) == (source.made, prefetching_threads())
    assert 3 == len(list(batches))


def test_prefetched_batches_take_turns_in_a_pool() -> None:
    """Read ahead into pooled memory, each batch holds its own records while the caller has it."""
    pool = BatchBuffers()
    records = [watermarked_record(sample, num_tokens=4 + sample % 3, spec=SPEC) for sample in range(12)]
    fresh = list(microbatches(records, tokens=10, spec=SPEC))
    ahead = prefetch(microbatches(records, tokens=10, spec=SPEC, options=BatchOptions(buffers=pool)))

    for expected, got in zip(fresh, pool.releasing(ahead), strict=True):
        assert expected.keys == got.keys
        assert torch.equal(expected.routes, got.routes)
    # one in the caller's hands, two waiting or in the making
    assert pool.nbytes <= 3 * max(batch.num_rows for batch in fresh) * (NBYTES // 4)
    assert [] == prefetching_threads()


# ----------------------------------------------------------------------------------------------------------------------
# How it ends
# ----------------------------------------------------------------------------------------------------------------------

ERRORS: dict[str, BaseException] = {
    "ours": DataError("bad record", kind=ErrorKind.CHECKSUM),
    "foreign": OSError(5, "disk"),
    "not_an_exception": KeyboardInterrupt("worker"),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_an_error_comes_in_its_place(error: BaseException) -> None:
    """The batches made before it come first; then the very exception is raised to the caller; no thread is left."""
    batches = iter(prefetch(Made(3, error=error), depth=5))
    assert ["sample-0", "sample-1", "sample-2"] == names(next(batches) for _ in range(3))
    with pytest.raises(type(error)) as caught:
        next(batches)

    assert error is caught.value
    assert [] == prefetching_threads()


def breaks(source: Iterator[RouteBatch]) -> None:
    """Leave the loop by ``break``."""
    for _ in prefetch(source):
        break


def raises(source: Iterator[RouteBatch]) -> None:
    """Leave the loop by an error of the step."""

    def step() -> None:
        for batch in prefetch(source):
            raise LookupError(str(batch.keys))

    with pytest.raises(LookupError):
        step()


def closes(source: Iterator[RouteBatch]) -> None:
    """Keep the iterator, and close the prefetcher."""
    ahead = prefetch(source)
    batches = iter(ahead)
    next(batches)
    ahead.close()
    ahead.close()
    assert [] == list(batches)


def leaves(source: Iterator[RouteBatch]) -> None:
    """Leave the ``with``, the iterator still at hand."""
    with prefetch(source, max_bytes=1) as ahead:
        batches = iter(ahead)
        next(batches)
    assert [] == list(batches)


@pytest.mark.parametrize("leave", [breaks, raises, closes, leaves])
def test_leaving_early_ends_the_thread_and_its_source(leave: Callable[[Iterator[RouteBatch]], None]) -> None:
    """The thread has ended, and the source was closed in the thread that iterated it."""
    source = Made(1_000)
    kept = iter(source)  # so that it is closed by the thread, and not for want of anyone who holds it
    leave(kept)

    assert [] == prefetching_threads()
    assert source.closed.is_set()
    assert {"routeplane-prefetch"} == source.threads
    assert source.made < 1_000


def test_an_iteration_cannot_be_had_twice() -> None:
    """A second iteration, and one after close, are refused."""
    used, closed = prefetch(Made(1)), prefetch(Made(1))
    list(used)
    closed.close()
    for ahead in (used, closed):
        with pytest.raises(UsageError) as caught:
            iter(ahead)
        assert ErrorKind.CLOSED is caught.value.kind


@pytest.mark.parametrize("bounds", [{"depth": 0}, {"depth": True}, {"max_bytes": 0}, {"max_bytes": 1.5}])
def test_bounds_that_hold_nothing_are_refused(bounds: dict[str, Any]) -> None:
    """Bounds are positive whole numbers, and refused at the call."""
    with pytest.raises(UsageError, match=next(iter(bounds))):
        prefetch([], **bounds)


def test_reports_merge() -> None:
    """Counts add up, the peak is the higher one."""
    one = PrefetchReport(batches=1, nbytes=10, peak_nbytes=10)
    two = PrefetchReport(batches=2, nbytes=12, peak_nbytes=6)

    assert PrefetchReport(batches=3, nbytes=22, peak_nbytes=10) == one.merge(two)
    assert {"prefetch_batches": 3.0, "prefetch_bytes": 22.0, "prefetch_peak_bytes": 10.0} == one.merge(two).scalars(
        prefix=""
    )
