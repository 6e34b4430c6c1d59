"""Loops that filter groups: a state names the records that are done with by key, and exactly the others come again."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from itertools import product, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from routeplane import open_stream
from routeplane.batch import RecordDataset, Shuffle
from routeplane.errors import UsageError
from routeplane.record.record import RecordKey
from routeplane.stream import folder
from routeplane.stream.blocks import BlockLimits
from routeplane.testing.builders import SPEC, sample
from tests.feeding import NUMBERS, RECORDS, MemoryOpener, indices, take, worker, write_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def key(index: int) -> RecordKey:
    """The key of one of RECORDS."""
    return RECORDS[index].key


def saved(dataset: RecordDataset, *, consumed: Any = None) -> dict[str, Any]:
    """A state as a checkpoint holds it."""
    state: dict[str, Any] = json.loads(json.dumps(dataset.state_dict(consumed=consumed)))
    return state


# ----------------------------------------------------------------------------------------------------------------------
# The rule
# ----------------------------------------------------------------------------------------------------------------------


@given(world_size=st.integers(1, 3), window=st.sampled_from((None, 1, 4, 20)), data=st.data())
def test_what_is_not_done_with_comes_again(world_size: int, window: int | None, data: st.DataObject) -> None:
    """Whatever is done with, in whatever order, and however often a run is stopped: the rest comes, in order, and each
    record is done with once. A state of a state is the state."""
    rank = data.draw(st.integers(0, world_size - 1))
    shuffle = None if window is None else Shuffle(seed=1, window=window)

    def fresh() -> RecordDataset:
        return RecordDataset(NUMBERS, MemoryOpener(), rank=rank, world_size=world_size, shuffle=shuffle)

    dataset, rest = fresh(), indices(fresh())
    for _ in range(data.draw(st.integers(1, 4))):
        seen = take(iter(dataset), data.draw(st.integers(0, len(rest))))
        assert rest[: len(seen)] == seen
        consumed = data.draw(st.sets(st.sampled_from(seen))) if seen else set[int]()
        state = saved(dataset, consumed=[key(index) for index in consumed])
        rest = [index for index in rest if index not in consumed]
        dataset = fresh()
        dataset.load_state_dict(state)
        assert state == saved(dataset)

    assert rest == indices(dataset)


@given(workers=st.integers(1, 4), data=st.data())
def test_workers_leave_out_what_is_done_with(workers: int, data: st.DataObject) -> None:
    """Workers take turns at the records that come, so that a loader keeps the order."""
    dataset = RecordDataset(NUMBERS, MemoryOpener())
    seen = take(iter(dataset), data.draw(st.integers(1, len(RECORDS))))
    state = saved(dataset, consumed=[key(index) for index in data.draw(st.sets(st.sampled_from(seen)))])
    parts = []
    for at in range(workers):
        part = RecordDataset(NUMBERS, MemoryOpener())
        part.load_state_dict(state)
        with worker(at, workers):
            parts.append(indices(part))
    plain = RecordDataset(NUMBERS, MemoryOpener())
    plain.load_state_dict(state)

    assert indices(plain) == [index for turn in zip_longest(*parts) for index in turn if index is not None]


def test_a_loaders_arrivals_are_named_by_key(tmp_path: Path) -> None:
    """Records that came through worker processes count as they arrive, also behind a state with gaps."""
    paths = write_all(tmp_path)
    state: dict[str, Any] | None = None
    left = list(range(len(RECORDS)))
    for done in ([1, 3], [0, 4]):
        dataset = RecordDataset(paths, open_stream)
        if state is not None:
            dataset.load_state_dict(state)
        loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
        arrived = take(iter(dataset.through(loader)), 4)
        assert left[:4] == arrived
        state = saved(dataset, consumed=[key(index) for index in done])
        left = [index for index in left if index not in done]

    assert state is not None
    rest = RecordDataset(paths, open_stream)
    rest.load_state_dict(state)
    assert left == indices(rest)


def test_a_commit_remembers_for_the_loop() -> None:
    """After a commit, a loop names what it was done with since; keys from before, or of records that never came, are
    refused."""
    dataset = RecordDataset(NUMBERS, MemoryOpener())
    records = iter(dataset)
    take(records, 4)
    dataset.commit(saved(dataset, consumed=[key(0), key(2)]))
    take(records, 1)
    state = saved(dataset, consumed=[key(4)])
    with pytest.raises(UsageError, match=r"the 4 records handed out since the last commit, got 1 others, .*sample-0"):
        dataset.state_dict(consumed=[key(0)])
    with pytest.raises(UsageError, match="sample-8"):
        dataset.state_dict(consumed=[key(8)])

    rest = RecordDataset(NUMBERS, MemoryOpener())
    rest.load_state_dict(state)
    assert [1, 3, 5, 6, 7, 8] == indices(rest)


# ----------------------------------------------------------------------------------------------------------------------
# A DAPO-like loop that is killed
# ----------------------------------------------------------------------------------------------------------------------

GROUPS, SAMPLES, PER_STEP = 9, 3, 2
#: Groups whose rewards are all the same, which the loop drops.
FLAT = {"g-1", "g-4", "g-5"}


def fill(place: Path) -> None:
    """Two producers, which share the samples of every group; each record is a block."""
    limits = BlockLimits(block_bytes=1, sync=False)
    for at, producer in enumerate("pq"):
        with folder.open_writer(place, SPEC, run="run", producer=producer, limits=limits) as writer:
            for group, member in product(range(GROUPS), range(SAMPLES)):
                if (group + member) % 2 == at:
                    name = f"g-{group}"
                    writer.write(sample(group, sample_id=f"{name}-{member}", tokens=3, group=name))


def train(place: Path, checkpoint: Path, event: Callable[[], None]) -> None:
    """Drop flat groups, keep the others until a step is full, train, save, commit."""
    held = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"trained": [], "dataset": None}
    groups: dict[str, list[RecordKey]] = {}
    kept: list[str] = []
    consumed: set[RecordKey] = set()
    with folder.open_reader(place, producers=["p", "q"]) as reader:
        dataset = RecordDataset(reader, reader.open, shuffle=Shuffle(seed=0, window=5))
        if held["dataset"] is not None:
            dataset.load_state_dict(held["dataset"])

        def step(names: Iterable[str]) -> None:
            for name in names:
                held["trained"].append(name)
                consumed.update(groups.pop(name))
            event()
            held["dataset"] = dataset.state_dict(consumed=consumed)
            fresh = checkpoint.with_suffix(".new")
            fresh.write_text(json.dumps(held))
            os.replace(fresh, checkpoint)
            event()
            dataset.commit(held["dataset"])
            consumed.clear()
            event()

        for record in dataset:
            event()
            name = str(record.group)
            groups.setdefault(name, []).append(record.key)
            if len(groups[name]) < SAMPLES:
                continue
            if name in FLAT:
                consumed.update(groups.pop(name))
                continue
            kept.append(name)
            if len(kept) == PER_STEP:
                step(kept)
                kept.clear()
        step(kept)


def train_until_killed(place: Path, checkpoint: Path, last: int) -> None:
    """Train in this process, which kills itself at an event."""
    count = 0

    def event() -> None:
        nonlocal count
        count += 1
        if count > last:
            os.kill(os.getpid(), signal.SIGKILL)

    train(place, checkpoint, event)


@pytest.mark.parametrize("life", range(3, 9))
def test_a_killed_loop_trains_every_kept_group_once(tmp_path: Path, life: int) -> None:
    """Killed in the middle of a group, between training and saving, between saving and committing, each time a few
    events later: the checkpoints hold every kept group exactly once, and no dropped one."""
    fill(tmp_path / "place")
    checkpoint = tmp_path / "checkpoint.json"
    lives = 0
    while True:
        process = multiprocessing.get_context("fork").Process(
            target=train_until_killed, args=(tmp_path / "place", checkpoint, (lives + 1) * life)
        )
        process.start()
        process.join()
        lives += 1
        if process.exitcode == 0:
            break
        assert (-signal.SIGKILL, True) == (process.exitcode, lives < 20)

    trained = json.loads(checkpoint.read_text())["trained"]
    assert sorted({f"g-{at}" for at in range(GROUPS)} - FLAT) == sorted(trained)
    assert lives > 1
