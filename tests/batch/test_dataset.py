"""Records of streams, split over ranks and workers and in order; ``test_feed_resume.py`` stops and goes on."""

from __future__ import annotations

import pickle
import subprocess
import sys
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from routeplane import open_stream
from routeplane.batch import microbatches
from routeplane.batch.dataset import RecordDataset
from routeplane.batch.slots import Shard
from routeplane.errors import DataError, ErrorKind, RouteplaneError, SpecError, TruncatedError, UsageError
from routeplane.stream import StreamReport
from routeplane.testing.builders import watermarked_record, watermarked_spec
from tests.feeding import (
    NUMBERS,
    RECORDS,
    SIZES,
    SPEC,
    TOTAL,
    MemoryOpener,
    indices,
    save,
    split,
    take,
    write,
    write_all,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from routeplane.record.interfaces import RouteSource


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """The streams as files, which a test may change."""
    return write_all(tmp_path)


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
# As a source
# ----------------------------------------------------------------------------------------------------------------------


def test_the_sources_policy_judges_batches(paths: list[str]) -> None:
    """What the opener's ``max_missing`` refuses, a batch over the dataset or its loader does not pass."""
    lossy = [watermarked_record(0, num_tokens=4, spec=SPEC, missing=[1, 2])]
    write(Path(paths[2]), lossy)
    dataset = RecordDataset(paths, partial(open_stream, max_missing=0.25))
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
    assert ([3, 5, 7, 9], TOTAL) == (counts, report.records)  # one record ahead within a stream


def test_an_iteration_that_was_given_up_counts_once() -> None:
    """An old iterator, as a kept traceback holds one, is dropped during the next iteration. The report and ``admit``
    still follow the next one."""
    opener = MemoryOpener()
    dataset = RecordDataset(NUMBERS, opener)
    old = iter(dataset)
    next(old)
    new = iter(dataset)
    next(new)
    del old
    admitted = dataset.admit(RECORDS[:1])
    rest = list(new)
    report = dataset.report()

    assert isinstance(report, StreamReport)
    assert (True, TOTAL - 1, 2 + TOTAL) == (admitted.admitted, len(rest), report.records)
    assert 1 + len(SIZES) == len(opener.opened)


def test_leaving_a_loop_closes_the_source() -> None:
    """``break`` closes the stream that is open."""
    opener = MemoryOpener()
    for _ in RecordDataset(NUMBERS, opener):
        break

    assert [True] == [source.closed for source in opener.opened]


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------


def test_a_stream_of_another_geometry_is_refused(paths: list[str]) -> None:
    """All streams of a dataset have the geometry of the first one that was opened."""
    other = watermarked_spec(layers=(1, 2, 6))
    write(Path(paths[3]), [watermarked_record(0, num_tokens=3, spec=other)], spec=other)

    with pytest.raises(SpecError, match=r"3\.arrows"):
        list(RecordDataset(paths, open_stream))


def test_a_damaged_stream_is_named(paths: list[str]) -> None:
    """Among many, the error says which one."""
    Path(paths[2]).write_bytes(Path(paths[2]).read_bytes()[:-8])

    with pytest.raises(TruncatedError, match=f"stream {paths[2]}"):
        list(RecordDataset(paths, open_stream))


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


@pytest.mark.parametrize("batches", [None, 3, "even"], ids=["any", "three", "even"])
def test_records_are_not_dealt_twice(batches: Any) -> None:
    """A dataset's rank and a shard's together would drop most records; refused before anything is read."""
    opener = MemoryOpener()
    dataset = RecordDataset(NUMBERS, opener, rank=0, world_size=2)
    loader = DataLoader(dataset, batch_size=None)
    for source in (dataset, dataset.through(loader)):
        with pytest.raises(UsageError, match="dealt to ranks once"):
            microbatches(source, tokens=8, spec=SPEC, batches=batches, shard=Shard(data_parallel=(0, 2)))

    assert [] == opener.opened


def test_errors_of_a_source_pass_through(paths: list[str]) -> None:
    """A cut stream is the reader's error, at the place where it is opened, after the records before it."""
    Path(paths[2]).write_bytes(Path(paths[2]).read_bytes()[:-60])
    records = iter(RecordDataset(paths, open_stream))

    assert [0, 1, 2] == take(records, 3)
    with pytest.raises(RouteplaneError) as caught:
        next(records)
    assert ErrorKind.TRUNCATED is caught.value.kind


def test_a_missing_torch_names_the_extra() -> None:
    """Importing the module where torch is not installed says what to install."""
    script = "import sys; sys.modules['torch'] = None; import routeplane.batch.dataset"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert 1 == done.returncode
    assert "MissingExtraError: routeplane.batch.dataset needs torch: install the extra routeplane[torch]" in done.stderr
