"""Stopping and going on: a dataset with a loaded state gives exactly the rest, or refuses the state."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane import open_stream
from routeplane.batch import microbatches
from routeplane.batch.dataset import RecordDataset
from routeplane.batch.loader import prefetch
from routeplane.batch.slots import Shard
from routeplane.errors import ChecksumError, ErrorKind, UsageError
from tests.feeding import (
    NUMBERS,
    RECORDS,
    SIZES,
    TOTAL,
    MemoryOpener,
    groups,
    indices,
    save,
    split,
    take,
    worker,
    write,
    write_all,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from routeplane.batch import RouteBatch


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """The streams as files, which a test may change."""
    return write_all(tmp_path)


# ----------------------------------------------------------------------------------------------------------------------
# Resuming
# ----------------------------------------------------------------------------------------------------------------------


@given(world_size=st.integers(1, 4), stops=st.lists(st.integers(0, 4), max_size=4), data=st.data())
def test_exactly_the_rest_comes(world_size: int, stops: list[int], data: st.DataObject) -> None:
    """However often a run is stopped, its parts are the whole; the iteration after the last is whole again."""
    rank = data.draw(st.integers(0, world_size - 1))
    whole = split(rank, world_size)
    seen: list[int] = []
    dataset = RecordDataset(NUMBERS, MemoryOpener(), rank=rank, world_size=world_size)
    for stop in stops:
        seen += take(iter(dataset), min(stop, len(whole) - len(seen)))
        state = save(dataset)
        dataset = RecordDataset(NUMBERS, MemoryOpener(), rank=rank, world_size=world_size)
        dataset.load_state_dict(state)
        assert state == save(dataset)

    assert whole == seen + indices(dataset)
    assert len(whole) == dataset.state_dict()["taken"]
    assert whole == indices(dataset)


@given(world_size=st.integers(1, 4), data=st.data())
def test_a_position_may_lie_behind_what_was_handed_out(world_size: int, data: st.DataObject) -> None:
    """``consumed`` names a record of this iteration, in whichever stream it stands."""
    rank = data.draw(st.integers(0, world_size - 1))
    whole = split(rank, world_size)
    consumed = data.draw(st.integers(0, len(whole)))
    dataset, rest = (RecordDataset(NUMBERS, MemoryOpener(), rank=rank, world_size=world_size) for _ in range(2))
    assert whole == indices(dataset)
    rest.load_state_dict(save(dataset, consumed=consumed))

    assert whole[consumed:] == indices(rest)


def test_training_resumes_behind_the_last_batch(paths: list[str]) -> None:
    """Batches read ahead of the step are read again by the run that goes on."""
    dataset = RecordDataset(paths, open_stream)
    trained: list[str] = []
    for batch in prefetch(microbatches(dataset, tokens=9), depth=3):
        trained += [key.sample_id for key in batch.keys]
        if len(trained) >= 4:
            break
    rest = RecordDataset(paths, open_stream)
    rest.load_state_dict(save(dataset, consumed=len(trained)))

    assert len(trained) < TOTAL
    assert list(range(len(trained), TOTAL)) == indices(rest)


@pytest.mark.parametrize("held", [2, 4])
def test_sorted_batches_resume_at_whole_windows(held: int) -> None:
    """Wherever training stops, counting down to a whole window leaves out no record; behind a window's last batch,
    exactly the rest comes."""
    whole = list(microbatches(RecordDataset(NUMBERS, MemoryOpener()), tokens=6, sort_within=held))
    for stop in range(len(whole) + 1):
        dataset, rest = (RecordDataset(NUMBERS, MemoryOpener()) for _ in range(2))
        batches = microbatches(dataset, tokens=6, sort_within=held)
        trained = [key.sample_id for batch in islice(batches, stop) for key in batch.keys]
        position = len(trained) if len(trained) == TOTAL else len(trained) // held * held
        rest.load_state_dict(save(dataset, consumed=position))
        coming = [record.sample_id for record in rest]

        assert TOTAL == len({*trained, *coming})
        assert len(trained) - position == len(trained) + len(coming) - TOTAL


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_that_deals_records_resumes_at_its_own(rank: int) -> None:
    """The dataset hands out the records of all ranks, so that the position counts all of them: the rank's own times
    the world."""
    shard = Shard(data_parallel=(rank, 2))

    def keys(batches: Iterable[RouteBatch]) -> list[str]:
        return [key.sample_id for batch in batches for key in batch.keys]

    def dealt(dataset: RecordDataset) -> Iterator[RouteBatch]:
        return microbatches(dataset, tokens=6, batches="even", shard=shard)

    whole = list(dealt(RecordDataset(NUMBERS, MemoryOpener())))
    for stop in range(len(whole) - 1):
        dataset, rest = (RecordDataset(NUMBERS, MemoryOpener()) for _ in range(2))
        trained = keys(islice(dealt(dataset), stop))
        rest.load_state_dict(save(dataset, consumed=2 * len(trained)))

        assert keys(whole) == trained + keys(dealt(rest))


def test_streams_before_the_position_are_not_read() -> None:
    """They are opened once, for their digests; of the stream of the position all is read; all are closed."""
    first, opener = MemoryOpener(), MemoryOpener()
    dataset, rest = RecordDataset(NUMBERS, first), RecordDataset(NUMBERS, opener)
    take(iter(dataset), 5)
    rest.load_state_dict(dataset.state_dict())
    at_load = len(opener.opened)

    assert [5, 6, 7, 8] == indices(rest)
    assert [0] * len(SIZES) == [source.read for source in opener.opened[:at_load]]
    assert [4, 2] == [source.read for source in opener.opened[at_load:]]
    assert {True} == {source.closed for source in (*first.opened, *opener.opened)}


def test_a_workers_own_state_is_its_own() -> None:
    """A loader that saves in its workers resumes each of them exactly; no other worker takes their states."""
    states, rests = [], []
    for at in range(2):
        with worker(at, 2):
            dataset = RecordDataset(NUMBERS, MemoryOpener())
            taken = take(iter(dataset), 1 + at)
            states.append(save(dataset))
            with pytest.raises(UsageError, match="in the trainer's process"):
                dataset.state_dict(consumed=1)
            again = RecordDataset(NUMBERS, MemoryOpener())
            again.load_state_dict(states[at])
            rests.append(taken + indices(again))
    assert [[0, 2, 4, 6, 8], [1, 3, 5, 7]] == rests

    for place in ((0, 0), (0, 2), (1, 3)):
        other = RecordDataset(NUMBERS, MemoryOpener())
        other.load_state_dict(states[1])
        with worker(*place), pytest.raises(UsageError, match="worker 1 of 2, whose state was loaded"):
            iter(other)


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------


def test_a_stream_that_changed_is_refused(paths: list[str]) -> None:
    """A stream rewritten with other records is refused by a saved state, and by a dataset that opened it before."""
    dataset = RecordDataset(paths, open_stream)
    state = save(dataset)
    write(Path(paths[2]), RECORDS[3:6])

    for act in (lambda: list(dataset), lambda: RecordDataset(paths, open_stream).load_state_dict(state)):
        with pytest.raises(ChecksumError, match=r"digest .*2\.arrows") as caught:
            act()
        assert ErrorKind.CHECKSUM is caught.value.kind


def test_the_same_records_written_again_are_the_same_stream(paths: list[str]) -> None:
    """It is content that counts."""
    state = save(RecordDataset(paths, open_stream))
    write(Path(paths[2]), groups()[2])
    rest = RecordDataset(paths, open_stream)
    rest.load_state_dict(state)

    assert list(range(TOTAL)) == indices(rest)


def test_a_source_without_a_digest_has_no_state() -> None:
    """A stream that cannot be told from another cannot be resumed; it can be read."""
    dataset = RecordDataset(NUMBERS, MemoryOpener(digest=None))

    assert list(range(TOTAL)) == indices(dataset)
    with pytest.raises(UsageError, match="a whole stream, whose trailer"):
        dataset.state_dict()


def resumed(**changes: Any) -> None:
    """Load a state of this dataset in which something else stands."""
    dataset = RecordDataset(NUMBERS, MemoryOpener())
    dataset.load_state_dict({**dataset.state_dict(), **changes})


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "consumed": (lambda: RecordDataset(NUMBERS, MemoryOpener()).state_dict(consumed=1), "at most the 0 records"),
    "state_version": (lambda: resumed(version=1), "version 3, got 1"),
    "state_rank": (lambda: resumed(rank=1), "rank 0, got 1"),
    "state_world": (lambda: resumed(world_size=2), "world_size 1, got 2"),
    "state_paths": (lambda: resumed(source=[["0", "0" * 16]]), r"paths \['0', '1', '2', '3'\], got \['0'\]"),
    "state_stream": (lambda: resumed(cursor=5), "within 4 streams"),
    "state_taken": (lambda: resumed(taken=-1), "what state_dict"),
    "state_taken_type": (lambda: resumed(taken="1"), "what state_dict"),
    "state_streams": (lambda: resumed(source=7), "what state_dict"),
    "state_digest": (lambda: resumed(source=[["0", None]]), "what state_dict"),
    "state_worker": (lambda: resumed(worker=[1]), "what state_dict"),
    "state_empty": (lambda: RecordDataset("0", MemoryOpener()).load_state_dict({}), "what state_dict"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_served_is_refused(call: Callable[[], object], message: str) -> None:
    """Each refusal is a UsageError that says what was expected."""
    with pytest.raises(UsageError, match=message) as caught:
        call()

    assert ErrorKind.ARGUMENT is caught.value.kind
