"""Records of streams, split, ordered and resumed; every record says by its watermark which one it is."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from routeplane import new_stream, open_stream
from routeplane.admission import Admission, admit
from routeplane.batch import microbatches
from routeplane.errors import ChecksumError, DataError, ErrorKind, RouteplaneError, SpecError, UsageError
from routeplane.feed import RecordDataset
from routeplane.prefetch import prefetch
from routeplane.stream import StreamReport
from routeplane.testing.builders import watermarked_record, watermarked_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from routeplane.ports import RouteSource
    from routeplane.record import RouteRecord
    from routeplane.spec import RouteSpec

SPEC = watermarked_spec()
#: records of each stream; one has none
SIZES = (3, 0, 4, 2)
TOTAL = sum(SIZES)
RECORDS = [watermarked_record(sample, num_tokens=3 + sample % 4, spec=SPEC) for sample in range(TOTAL)]

# ----------------------------------------------------------------------------------------------------------------------
# What the tests share
# ----------------------------------------------------------------------------------------------------------------------


def groups() -> list[list[RouteRecord]]:
    """The records of each stream."""
    edges = [sum(SIZES[:at]) for at in range(len(SIZES) + 1)]
    return [RECORDS[start:stop] for start, stop in pairwise(edges)]


def write(path: Path, records: Iterable[RouteRecord], *, spec: RouteSpec = SPEC) -> str:
    """A stream of these records."""
    with new_stream(path, spec) as sink:
        for record in records:
            sink.write(record)
    return str(path)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The streams, read by all tests and changed by none."""
    folder = tmp_path_factory.mktemp("streams")
    return [write(folder / f"{at}.arrows", records) for at, records in enumerate(groups())]


@pytest.fixture
def copies(paths: list[str], tmp_path: Path) -> list[str]:
    """The same streams, to be changed."""
    return [shutil.copy(path, str(tmp_path)) for path in paths]


@dataclass
class MemorySource:
    """A source without files, so that properties can try many splits. Says whether it was closed."""

    records: list[RouteRecord]
    digest: str | None
    spec: RouteSpec = SPEC
    read: int = 0
    closed: bool = False

    def __iter__(self) -> Iterator[RouteRecord]:
        for record in self.records:
            self.read += 1
            yield record

    def select(self, *, layer_ids: Sequence[int] | None = None, tokens: tuple[int, int] | None = None) -> MemorySource:
        """Not asked for here."""
        raise NotImplementedError

    def admit(self, records: Sequence[RouteRecord]) -> Admission:
        """Admit all."""
        return admit(records, self.spec, max_missing=None)

    def report(self) -> StreamReport:
        """What was read."""
        return StreamReport(records=self.read)

    def close(self) -> None:
        """Close."""
        self.closed = True


@dataclass
class MemoryOpener:
    """Opens the streams by their number, and keeps every source that it opened."""

    digest: str | None = "0" * 16
    opened: list[MemorySource] = field(default_factory=list)

    def __call__(self, path: str) -> MemorySource:
        """The source of that number."""
        self.opened.append(MemorySource(groups()[int(path)], self.digest))
        return self.opened[-1]


NUMBERS = [str(at) for at in range(len(SIZES))]


@contextmanager
def worker(at: int, count: int) -> Iterator[None]:
    """As inside worker ``at`` of ``count`` of a DataLoader; with none, as outside. A real loader has a test below."""
    with pytest.MonkeyPatch.context() as patch:
        info = SimpleNamespace(id=at, num_workers=count) if count else None
        patch.setattr("routeplane.feed.get_worker_info", lambda: info)
        yield


def indices(records: Iterable[RouteRecord]) -> list[int]:
    """Which of RECORDS these are; by content, not by name alone."""
    found = []
    for record in records:
        index = int(record.sample_id.removeprefix("sample-"))
        assert record.equals(RECORDS[index])
        found.append(index)
    return found


def split(
    rank: int, world_size: int, *, place: tuple[int, int] = (0, 0), state: dict[str, Any] | None = None
) -> list[int]:
    """What a rank reads, or one of its workers; from a state on."""
    dataset = RecordDataset(NUMBERS, MemoryOpener(), rank=rank, world_size=world_size)
    if state is not None:
        dataset.load_state_dict(state)
    with worker(*place):
        return indices(dataset)


def save(dataset: RecordDataset, *, consumed: int | None = None) -> dict[str, Any]:
    """A state as it comes back from a JSON file."""
    state: dict[str, Any] = json.loads(json.dumps(dataset.state_dict(consumed=consumed)))
    return state


def take(records: Iterator[RouteRecord], count: int) -> list[int]:
    """The next few, and no further."""
    return indices(next(records) for _ in range(count))


# ----------------------------------------------------------------------------------------------------------------------
# Split and order
# ----------------------------------------------------------------------------------------------------------------------


def test_all_streams_come_in_order(paths: list[str]) -> None:
    """One process reads every record of every stream, in the order of the paths; again when asked again."""
    dataset = RecordDataset([Path(path) for path in paths], open_stream)

    assert list(range(TOTAL)) == indices(dataset) == indices(dataset)
    assert list(range(3)) == indices(RecordDataset(paths[0], open_stream))
    assert [] == indices(RecordDataset(paths[1], open_stream))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 11])
def test_ranks_share_the_records(world_size: int) -> None:
    """Each record goes to exactly one rank, in order."""
    by_rank = [split(rank, world_size) for rank in range(world_size)]

    assert [list(range(rank, TOTAL, world_size)) for rank in range(world_size)] == by_rank


@given(world_size=st.integers(1, 4), count=st.integers(1, 6), stop=st.integers(0, TOTAL), data=st.data())
def test_workers_taking_turns_give_the_order_of_their_rank(
    world_size: int, count: int, stop: int, data: st.DataObject
) -> None:
    """Each record of a rank goes to one worker; worker 0 first and in turn, from any position, they keep the order."""
    rank = data.draw(st.integers(0, world_size - 1))
    expected = split(rank, world_size)
    dataset = RecordDataset(NUMBERS, MemoryOpener(), rank=rank, world_size=world_size)
    seen = take(iter(dataset), min(stop, len(expected)))
    by_worker = [split(rank, world_size, place=(at, count), state=save(dataset)) for at in range(count)]
    turns = chain.from_iterable(zip_longest(*by_worker))

    assert expected == seen + [index for index in turns if index is not None]


def test_real_workers_give_the_same_order_and_resume(paths: list[str]) -> None:
    """Two spawned workers, from a loaded position on: the rank's order, and a position that is exact and portable."""
    first = RecordDataset(paths, open_stream, rank=1, world_size=2)
    expected = indices(first)
    records = iter(first)
    assert expected[:1] == take(records, 1)
    dataset = RecordDataset(paths, open_stream, rank=1, world_size=2)
    dataset.load_state_dict(save(first))

    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    arriving = iter(dataset.through(loader))
    assert expected[1:3] == take(arriving, 2)
    rest = RecordDataset(paths, open_stream, rank=1, world_size=2)
    rest.load_state_dict(save(dataset))
    assert expected[3:] == indices(rest)
    rest.load_state_dict(save(dataset, consumed=1))
    assert expected[2:] == indices(rest)
    assert expected[3:] == indices(arriving)
    # loaded once, begun once
    assert expected == indices(dataset)


def test_a_dataset_pickles_while_it_is_read(paths: list[str]) -> None:
    """A copy for a worker takes no open source along; it opens its own."""
    dataset = RecordDataset(paths, open_stream)
    records = iter(dataset)
    take(records, 1)
    copy: RecordDataset = pickle.loads(pickle.dumps(dataset))

    assert list(range(TOTAL)) == indices(copy)
    assert list(range(1, TOTAL)) == indices(records)


def test_a_loader_without_workers_counts_once(paths: list[str]) -> None:
    """Through a loader in this process the dataset counts by itself."""
    dataset = RecordDataset(paths, open_stream)
    arriving = iter(dataset.through(DataLoader(dataset, batch_size=None)))

    assert [0, 1, 2, 3] == take(arriving, 4)
    assert 4 == dataset.state_dict()["taken"]


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
    """A loader that saves in its workers resumes each of them exactly; nobody else takes their states."""
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
# As a source
# ----------------------------------------------------------------------------------------------------------------------


def test_the_sources_policy_judges_batches(copies: list[str]) -> None:
    """What the opener's ``max_missing`` refuses, a batch over the dataset or its loader does not pass."""
    lossy = [watermarked_record(0, num_tokens=4, spec=SPEC, missing=[1, 2])]
    write(Path(copies[2]), lossy)
    dataset = RecordDataset(copies, partial(open_stream, max_missing=0.25))
    loader = DataLoader(dataset, batch_size=None)

    assert SPEC == dataset.spec
    for source in (dataset, dataset.through(loader)):
        with pytest.raises(DataError, match="missing"):
            list(microbatches(source, tokens=7, spec=SPEC))
    assert not dataset.admit(lossy).admitted
    assert dataset.admit(RECORDS[:2]).admitted


def test_reports_of_all_streams_add_up() -> None:
    """What was read counts, of other ranks too, while reading as well as after; before, there is no report."""
    dataset = RecordDataset(NUMBERS, MemoryOpener(), rank=1, world_size=2)
    assert dataset.report() is None
    counts = []
    for _ in dataset:
        report = dataset.report()
        assert isinstance(report, StreamReport)
        counts.append(report.records)
    report = dataset.report()

    assert isinstance(report, StreamReport)
    assert ([2, 4, 6, 8], TOTAL) == (counts, report.records)


def test_leaving_a_loop_closes_the_source() -> None:
    """``break`` lets go of the stream that is open."""
    opener = MemoryOpener()
    for _ in RecordDataset(NUMBERS, opener):
        break

    assert [True] == [source.closed for source in opener.opened]


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------


def test_a_stream_that_changed_is_refused(copies: list[str]) -> None:
    """Written anew with other records, a stream is refused by a saved state, and by a dataset that opened it before."""
    dataset = RecordDataset(copies, open_stream)
    state = save(dataset)
    write(Path(copies[2]), RECORDS[3:6])

    for act in (lambda: list(dataset), lambda: RecordDataset(copies, open_stream).load_state_dict(state)):
        with pytest.raises(ChecksumError, match=r"digest .*2\.arrows") as caught:
            act()
        assert ErrorKind.CHECKSUM is caught.value.kind


def test_the_same_records_written_again_are_the_same_stream(copies: list[str]) -> None:
    """It is content that counts."""
    state = save(RecordDataset(copies, open_stream))
    write(Path(copies[2]), groups()[2])
    rest = RecordDataset(copies, open_stream)
    rest.load_state_dict(state)

    assert list(range(TOTAL)) == indices(rest)


def test_a_stream_of_another_geometry_is_refused(copies: list[str]) -> None:
    """All streams of a dataset have the geometry of the first one that was opened."""
    other = watermarked_spec(layers=(1, 2, 6))
    write(Path(copies[3]), [watermarked_record(0, num_tokens=3, spec=other)], spec=other)

    with pytest.raises(SpecError, match=r"3\.arrows"):
        list(RecordDataset(copies, open_stream))


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


def through(**options: Any) -> None:
    """Read through a loader with these options."""
    dataset = RecordDataset(NUMBERS, MemoryOpener())
    dataset.through(DataLoader(options.pop("dataset", dataset), **{"batch_size": None, **options}))


def source(path: str) -> RouteSource:
    """An opener that is never called."""
    raise NotImplementedError(path)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no_path": (lambda: RecordDataset([], source), "at least one path"),
    "path_twice": (lambda: RecordDataset(["a", "b", "a"], source), "each once"),
    "rank": (lambda: RecordDataset("a", source, rank=2, world_size=2), "rank 2 of 2"),
    "negative_rank": (lambda: RecordDataset("a", source, rank=-1), "rank -1 of 1"),
    "no_rank": (lambda: RecordDataset("a", source, world_size=0), "rank 0 of 0"),
    "consumed": (lambda: RecordDataset(NUMBERS, MemoryOpener()).state_dict(consumed=1), "at most the 0 records"),
    "state_version": (lambda: resumed(version=2), "version 1, got 2"),
    "state_rank": (lambda: resumed(rank=1), "rank 0, got 1"),
    "state_world": (lambda: resumed(world_size=2), "world_size 1, got 2"),
    "state_paths": (lambda: resumed(streams=[["0", "0" * 16]]), r"paths \['0', '1', '2', '3'\], got \['0'\]"),
    "state_stream": (lambda: resumed(stream=4), "within 4 streams"),
    "state_taken": (lambda: resumed(taken=-1), "what state_dict"),
    "state_taken_type": (lambda: resumed(taken="1"), "what state_dict"),
    "state_streams": (lambda: resumed(streams=7), "what state_dict"),
    "state_digest": (lambda: resumed(streams=[["0", None]]), "what state_dict"),
    "state_worker": (lambda: resumed(worker=[1]), "what state_dict"),
    "state_empty": (lambda: RecordDataset("0", MemoryOpener()).load_state_dict({}), "what state_dict"),
    "loader_of_another": (lambda: through(dataset=RecordDataset("0", MemoryOpener())), "loader of this dataset"),
    "loader_batches": (lambda: through(batch_size=2), "batch_size=None"),
    "loader_order": (lambda: through(num_workers=1, in_order=False), "keeps the order"),
    "loader_workers": (lambda: through(num_workers=1, persistent_workers=True), "without persistent_workers"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_served_is_refused(call: Callable[[], object], message: str) -> None:
    """Each refusal is a UsageError that says what was expected."""
    with pytest.raises(UsageError, match=message) as caught:
        call()

    assert ErrorKind.ARGUMENT is caught.value.kind


def test_errors_of_a_source_pass_through(copies: list[str]) -> None:
    """A cut stream is the reader's error, at the place where it is opened, after the records before it."""
    Path(copies[2]).write_bytes(Path(copies[2]).read_bytes()[:-60])
    records = iter(RecordDataset(copies, open_stream))

    assert [0, 1, 2] == take(records, 3)
    with pytest.raises(RouteplaneError) as caught:
        next(records)
    assert ErrorKind.TRUNCATED is caught.value.kind


def test_a_missing_torch_names_the_extra() -> None:
    """Importing the module where torch is not installed says what to install."""
    script = "import sys; sys.modules['torch'] = None; import routeplane.feed"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert 1 == done.returncode
    assert "MissingExtraError: routeplane.feed needs torch: pip install 'routeplane[torch]'" in done.stderr
