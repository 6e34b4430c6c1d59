"""A dataset over places of blocks and over shuffled sources: one state, exact under workers; only ``commit``
acknowledges."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from routeplane import new_stream, open_stream
from routeplane.archive import open_archive, save_archive
from routeplane.batch import RecordDataset, microbatches
from routeplane.batch.dataset import Shuffle
from routeplane.errors import ErrorKind, RouteplaneError, UsageError
from routeplane.record.interfaces import BlockName
from routeplane.record.record import RouteRecord
from routeplane.stream import StreamReport, folder
from routeplane.stream.block_reader import BlockReader
from routeplane.stream.blocks import BlockLimits
from routeplane.testing.builders import SPEC, facts, sample
from tests.feeding import NUMBERS, TOTAL, MemoryOpener, indices, save, take, worker, write_all

EACH = BlockLimits(block_bytes=1, sync=False)
PER_BLOCK = BlockLimits(block_bytes=400, sync=False)


def fill(place: Path, count: int, *, producers: str = "pq", limits: BlockLimits = PER_BLOCK) -> list[str]:
    """A place whose producers wrote ``count`` records each, and closed."""
    for name in producers:
        with folder.open_writer(place, SPEC, run="run", producer=name, limits=limits) as writer:
            for index in range(count):
                writer.write(sample(index, sample_id=f"{name}-{index}", tokens=3 + index % 3))
    return [f"{name}-{index}" for name in producers for index in range(count)]


def reader(place: Path, *, producers: str = "pq", **options: Any) -> BlockReader:
    """The group's reader."""
    return folder.open_reader(place, producers=list(producers), **options)


def ids(records: Iterable[RouteRecord]) -> list[str]:
    """Names, in order; the records are what they were."""
    return [record.verify().sample_id for record in records]


def saved(dataset: RecordDataset, **options: Any) -> dict[str, Any]:
    """A state as a checkpoint holds it."""
    state: dict[str, Any] = json.loads(json.dumps(dataset.state_dict(**options)))
    return state


def first_of(records: Iterator[RouteRecord], count: int) -> list[str]:
    """The next few."""
    return ids(next(records) for _ in range(count))


# ----------------------------------------------------------------------------------------------------------------------
# Places
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [None, Shuffle(seed=3, window=5)], ids=["in order", "shuffled"])
@pytest.mark.parametrize("stop", [0, 1, 4, 9, 16])
def test_exactly_the_rest_comes(tmp_path: Path, stop: int, shuffle: Shuffle | None) -> None:
    """A position in a place: another process with the same group goes on at the exact record, wherever it stopped."""
    expected = fill(tmp_path / "place", 8)
    with reader(tmp_path / "place") as source:
        whole = ids(RecordDataset(source, source.open, shuffle=shuffle))
        dataset = RecordDataset(source, source.open, shuffle=shuffle)
        seen = first_of(iter(dataset), stop)
        state = saved(dataset)
    with reader(tmp_path / "place") as again:
        rest = RecordDataset(again, again.open, shuffle=shuffle)
        rest.load_state_dict(state)
        assert state == saved(rest)
        assert whole == seen + ids(rest)
    assert sorted(expected) == sorted(whole)


def test_only_commit_acknowledges(tmp_path: Path) -> None:
    """Reading leaves the group where it stood; a state that was committed moves it behind the blocks before."""
    fill(tmp_path / "place", 6, producers="p", limits=EACH)
    with reader(tmp_path / "place", producers="p") as source:
        dataset = RecordDataset(source, source.open)
        records = iter(dataset)
        first_of(records, 4)
        state = saved(dataset)
        assert 0 == source.position().number("p")
        dataset.commit(state)
        assert 4 == source.position().number("p")
        first_of(records, 1)
        dataset.commit(saved(dataset))
        with pytest.raises(UsageError):
            dataset.commit(state)  # before what was committed
    with reader(tmp_path / "place", producers="p") as again:
        assert ["p-5"] == ids(RecordDataset(again, again.open))


def test_commits_let_a_producer_at_its_bound_go_on(tmp_path: Path) -> None:
    """A bound of one block, twenty records: without commits the producer would wait for ever."""
    limits = BlockLimits(block_bytes=1, max_bytes=24_000, sync=False, timeout_s=20.0)
    place = tmp_path / "place"
    with folder.open_writer(place, SPEC, run="run", producer="p", limits=limits) as writer:
        source = reader(place, producers="p")
        dataset = RecordDataset(source, source.open)
        records = iter(dataset)
        came = []
        for index in range(20):
            writer.write(sample(index, tokens=300))
            came += first_of(records, 1)
            dataset.commit(saved(dataset))
    assert [sample(index).sample_id for index in range(20)] == came
    assert [] == ids(records)
    source.close()


def test_a_growing_place_is_followed(tmp_path: Path) -> None:
    """Blocks that are sealed while the dataset is read come in their turn; a state taken before is good after."""
    place = tmp_path / "place"
    writer = folder.open_writer(place, SPEC, run="run", producer="p", limits=EACH)
    writer.write(sample(0))
    with reader(place, producers="p") as source:
        dataset = RecordDataset(source, source.open)
        records = iter(dataset)
        assert ["sample-0"] == first_of(records, 1)
        state = saved(dataset)
        writer.write(sample(1))
        assert ["sample-1"] == first_of(records, 1)
        writer.close()
        rest = RecordDataset(source, source.open)
        rest.load_state_dict(state)
        assert ["sample-1"] == ids(rest)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place that is read again and again."""
    place = tmp_path_factory.mktemp("dataset") / "place"
    fill(place, 8)
    return place


@given(count=st.integers(1, 4), stop=st.integers(0, 8), window=st.none() | st.integers(1, 9), data=st.data())
def test_workers_taking_turns_keep_the_order(
    filled: Path, count: int, stop: int, window: int | None, data: st.DataObject
) -> None:
    """Of two ranks, each record goes to one worker; in turn they keep the order, from any state, shuffled or not."""
    rank = data.draw(st.integers(0, 1))
    shuffle = None if window is None else Shuffle(seed=1, window=window)
    make = partial(RecordDataset, rank=rank, world_size=2, shuffle=shuffle)
    with reader(filled) as source:
        whole = ids(make(source, source.open))
        dataset = make(source, source.open)
        seen = first_of(iter(dataset), stop)
        by_worker = []
        for at in range(count):
            copied = pickle.loads(pickle.dumps(source))
            copy = make(copied, copied.open)
            copy.load_state_dict(saved(dataset))
            with worker(at, count):
                by_worker.append(ids(copy))
    assert whole == seen + [name for turn in zip_longest(*by_worker) for name in turn if name is not None]


def test_real_workers_commit(tmp_path: Path) -> None:
    """Two forked workers: the trainer's process learns where blocks began, so that a commit frees them."""
    fill(tmp_path / "place", 9, producers="p", limits=EACH)
    with reader(tmp_path / "place", producers="p") as source:
        dataset = RecordDataset(source, source.open)
        whole = ids(RecordDataset(source, source.open))
        loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork")
        arriving = iter(dataset.through(loader))
        seen = first_of(arriving, 5)
        state = saved(dataset)
        dataset.commit(state)
        assert 5 == source.position().number("p")
        assert whole == seen + ids(arriving)
    with reader(tmp_path / "place", producers="p") as again:
        rest = RecordDataset(again, again.open)
        rest.load_state_dict(state)
        assert whole == seen + ids(rest)


def test_repeats_of_a_restarted_producer_are_dropped_and_counted(tmp_path: Path) -> None:
    """Also behind a state: the keys that were read before it stand in it."""
    place = tmp_path / "place"
    first = folder.open_writer(place, SPEC, run="run", producer="p", limits=EACH)
    for index in (0, 1):
        first.write(sample(index))
    first._slot.release()
    with folder.open_writer(place, SPEC, run="run", producer="p", limits=EACH) as second:
        for index in (1, 0, 2):
            second.write(sample(index))
    with reader(place, producers="p") as source:
        dataset = RecordDataset(source, source.open)
        records = iter(dataset)
        seen = first_of(records, 2)
        state = saved(dataset)
        assert ["sample-2"] == ids(records)
        report = dataset.report()
        assert isinstance(report, StreamReport)
        assert (2, 5) == (report.repeats, report.records)
        rest = RecordDataset(source, source.open)
        rest.load_state_dict(state)
        assert ["sample-0", "sample-1", "sample-2"] == seen + ids(rest)


def test_deltas_are_joined_in_workers_and_windows(tmp_path: Path) -> None:
    """Records of one group, a block each, lean on the first: copies of the reader and shuffles yield them whole."""
    place = tmp_path / "place"
    whole = turns(5)
    with folder.open_writer(place, SPEC, run="run", producer="p", limits=EACH) as writer:
        for record in whole:
            writer.write(record)
    with reader(place, producers="p") as source:
        copy = pickle.loads(pickle.dumps(source))
        for dataset in (
            RecordDataset(copy, copy.open),
            RecordDataset(source, source.open, shuffle=Shuffle(seed=0, window=3)),
        ):
            assert sorted(facts(whole)) == sorted(facts(list(dataset)))
        assert facts(whole[3:4]) == facts(source.fetch(BlockName("p", 3)))


def turns(count: int, *, tokens: int = 40) -> list[RouteRecord]:
    """A conversation, recorded again after each turn: each record begins with the rows of the one before."""
    last = sample(0, tokens=tokens * count)
    found = []
    for at in range(count):
        part = last.slice(0, tokens * (at + 1))
        found.append(sample_like(part, f"turn-{at}"))
    return found


def sample_like(record: RouteRecord, name: str) -> RouteRecord:
    """The same content under another name, in one group."""
    return replace(record, sample_id=name, group="conversation", attributes={}, checksum=None)


def test_one_state_over_every_source(tmp_path: Path) -> None:
    """Files, an archive and a place: the same lines of code stop and go on."""
    records = [sample(index) for index in range(6)]
    paths = []
    for at in range(2):
        with folder.open_writer(tmp_path / "place", SPEC, run="run", producer=f"p{at}", limits=EACH) as writer:
            for record in records[3 * at : 3 * at + 3]:
                writer.write(record)
        paths.append(str(tmp_path / f"{at}.arrows"))
        with new_stream(paths[-1], SPEC) as sink:
            for record in records[3 * at : 3 * at + 3]:
                sink.write(record)
    save_archive(records, str(tmp_path / "archive"), spec=SPEC)
    with folder.open_reader(tmp_path / "place", producers=["p0", "p1"]) as source:
        makers: list[Callable[[], RecordDataset]] = [
            lambda: RecordDataset(paths, open_stream),
            lambda: RecordDataset(str(tmp_path / "archive"), lambda where: open_archive(where).select()),
            lambda: RecordDataset(source, source.open),
        ]
        for make in makers:
            dataset, rest = make(), make()
            seen = first_of(iter(dataset), 4)
            state = saved(dataset)
            rest.load_state_dict(state)
            assert sorted(record.sample_id for record in records) == sorted(seen + ids(rest))
            rest.commit(state)


def test_batches_are_judged_by_the_readers_policy(tmp_path: Path) -> None:
    """``admit`` is the reader's; layers are selected by the opener of blocks."""
    fill(tmp_path / "place", 4, producers="p")
    with reader(tmp_path / "place", producers="p") as source:
        dataset = RecordDataset(source, lambda name: source.open(name).select(layer_ids=[4]))
        assert (4,) == dataset.spec.layer_ids
        (batch,) = microbatches(dataset, tokens=64)
        assert 1 == batch.routes.shape[1]
        assert dataset.admit([sample(0)]).admitted is False


# ----------------------------------------------------------------------------------------------------------------------
# Orders
# ----------------------------------------------------------------------------------------------------------------------


@given(
    window=st.integers(1, 12),
    seed=st.integers(0, 9),
    world_size=st.integers(1, 3),
    stops=st.lists(st.integers(0, 4), max_size=3),
)
def test_a_shuffle_resumes_exactly(window: int, seed: int, world_size: int, stops: list[int]) -> None:
    """Every rank's parts are the whole; the ranks share all records; the same seed gives the same order."""
    shuffle = Shuffle(seed=seed, window=window)
    all_ranks: list[int] = []
    for rank in range(world_size):
        make = partial(RecordDataset, NUMBERS, rank=rank, world_size=world_size, shuffle=shuffle)
        whole, seen, dataset = indices(make(MemoryOpener())), list[int](), make(MemoryOpener())
        for stop in stops:
            seen += take(iter(dataset), min(stop, len(whole) - len(seen)))
            state = save(dataset)
            dataset = make(MemoryOpener())
            dataset.load_state_dict(state)
        assert whole == seen + indices(dataset)
        all_ranks += whole
    assert list(range(TOTAL)) == sorted(all_ranks)


def test_another_seed_is_another_order(tmp_path: Path) -> None:
    """And a window mixes no further than its records."""
    paths = write_all(tmp_path)
    orders = [indices(RecordDataset(paths, open_stream, shuffle=Shuffle(seed=seed, window=TOTAL))) for seed in (0, 1)]
    assert orders[0] != orders[1]
    near = indices(RecordDataset(paths, open_stream, shuffle=Shuffle(seed=0, window=3)))
    assert [set(near[at : at + 3]) for at in (0, 3, 6)] == [{0, 1, 2}, {3, 4, 5}, {6, 7, 8}]


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------


def test_a_state_of_another_source_is_refused(tmp_path: Path) -> None:
    """Another place, another order, another kind of source, or no opener for paths."""
    for name in ("a", "b"):
        fill(tmp_path / name, 3, producers="p")
    with reader(tmp_path / "a", producers="p") as a, reader(tmp_path / "b", producers="p") as b:
        state = saved(RecordDataset(a, a.open))
        other = {**state, "cursor": saved(RecordDataset(b, b.open))["cursor"]}
        for dataset, wrong in (
            (RecordDataset(b, b.open), state),
            (RecordDataset(a, a.open), other),
            (RecordDataset(a, a.open), {**state, "cursor": "{}"}),
            (RecordDataset(a, a.open, shuffle=Shuffle(seed=0, window=2)), state),
            (RecordDataset(NUMBERS, MemoryOpener()), state),
            (RecordDataset(a, a.open), save(RecordDataset(NUMBERS, MemoryOpener()))),
        ):
            for use in (dataset.load_state_dict, dataset.commit):
                with pytest.raises(UsageError) as caught:
                    use(wrong)
                assert ErrorKind.ARGUMENT is caught.value.kind
    for seed, window in ((-1, 2), (0, 0), (0, True)):
        with pytest.raises(RouteplaneError):
            Shuffle(seed=seed, window=window)
