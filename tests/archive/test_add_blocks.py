"""An archive takes blocks of a carrier whole, acknowledges what is committed, and holds each record once."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from routeplane.archive import AddReport, add_blocks, open_archive, verify
from routeplane.cli.main import main
from routeplane.errors import DataError, ErrorKind, UsageError
from routeplane.record.interfaces import Admission, BlockName, BlockSource, Position, RouteSource, admit
from routeplane.record.record import RouteRecord
from routeplane.record.spec import RouteSpec
from routeplane.stream import folder
from tests.archive.archives import SPEC, sized
from tests.archive.places import Place
from tests.archive.writers import start
from tests.stream.streams import contents


@dataclass
class Blocks:
    """A place of blocks in this process. ``fail_at``: the block whose reading fails; ``deaf``: acknowledgements are
    lost, as when the process dies before it sends one."""

    held: dict[BlockName, list[RouteRecord]]
    spec: RouteSpec = SPEC
    fail_at: int | None = None
    deaf: bool = False
    acknowledged: list[Position] = field(default_factory=list)
    opened: list[BlockName] = field(default_factory=list)

    def names(self, *, position: Position | None = None) -> Iterator[BlockName]:
        """Blocks behind a position."""
        start = position or self.position()
        return (name for name in sorted(self.held) if name.number >= start.number(name.producer))

    def open(self, name: BlockName) -> RouteSource:
        """The records of a block."""
        if len(self.opened) == self.fail_at:
            raise ConnectionError("the place is gone")
        self.opened.append(name)
        found: Any = self.held[name]
        return found  # type: ignore[no-any-return]

    def fetch(self, name: BlockName, **_: object) -> list[RouteRecord]:
        """Not asked for here."""
        return self.held[name]

    def admit(self, records: Sequence[RouteRecord]) -> Admission:
        """Admit all."""
        return admit(records, self.spec, max_missing=None)

    def position(self) -> Position:
        """What was acknowledged last."""
        return self.acknowledged[-1] if self.acknowledged else Position(place="here")

    def acknowledge(self, position: Position) -> None:
        """Remember it."""
        if not self.deaf:
            self.acknowledged.append(position)


def blocks(count: int, **changes: Any) -> Blocks:
    """One producer's blocks of two records each."""
    records = sized([5, 6] * count)
    held = {BlockName("engine-0", index): records[2 * index : 2 * index + 2] for index in range(count)}
    return Blocks(held=held, **changes)


def added(source: BlockSource, place: Place, *, blocks_per_run: int = 2) -> AddReport:
    """Add to a place."""
    return add_blocks(source, place.where, blocks_per_run=blocks_per_run, options=place.options)


def records_of(source: Blocks) -> Sequence[RouteRecord]:
    """All records, in order."""
    return [record for name in sorted(source.held) for record in source.held[name]]


def test_blocks_are_added_whole_and_acknowledged_once_committed(place: Place) -> None:
    """One run per group of blocks; the last has what is left; each acknowledged position is one that is committed."""
    source = blocks(5)
    report = added(source, place)

    assert AddReport(runs=3, blocks=5, records=10) == report
    assert contents(records_of(source)) == contents(place.open().values())
    assert [2, 4, 5] == [position.number("engine-0") for position in source.acknowledged]
    assert [4, 4, 2] == [run.records for run in place.open().runs]
    assert 5.0 == report.scalars()["routeplane/archive_added_blocks"]


def test_a_failure_keeps_what_was_committed_and_acknowledges_no_more(place: Place) -> None:
    """The place fails in the second run: one run is there, and the next call goes on behind it."""
    source = blocks(5, fail_at=3)
    with pytest.raises(ConnectionError):
        added(source, place)
    assert [2] == [position.number("engine-0") for position in source.acknowledged]
    assert 4 == len(place.open())
    source.fail_at = None

    assert 6 == added(source, place).records
    assert contents(records_of(source)) == contents(place.open().values())
    assert verify(place.where, options=place.options).intact


def test_a_lost_acknowledgement_adds_nothing_twice(place: Place) -> None:
    """Committed and not acknowledged: the archive itself says how far it is."""
    source = blocks(4, deaf=True)
    assert 8 == added(source, place).records
    assert [] == source.acknowledged
    source.deaf = False
    source.opened.clear()

    assert AddReport() == added(source, place)
    assert [] == source.opened
    assert [4] == [position.number("engine-0") for position in source.acknowledged]
    assert 8 == len(place.open())


def test_a_record_that_comes_again_is_kept_once(place: Place) -> None:
    """With the same checksum it is counted and left out, within a run and over runs; with another it is refused."""
    source = blocks(2)
    added(source, place)
    first = records_of(source)[0]
    source.held[BlockName("engine-1", 0)] = [first, *sized([9], first=50), *sized([9], first=50)]
    assert (1, 2) == (lambda report: (report.records, report.repeats))(added(source, place))
    source.held[BlockName("engine-1", 1)] = sized([77])
    with pytest.raises(DataError) as caught:
        added(source, place)

    assert ErrorKind.DUPLICATE_KEY == caught.value.kind
    assert 5 == len(place.open())


def test_another_place_is_read_from_its_beginning(place: Place) -> None:
    """Positions belong to a place: what was committed of one says nothing of another."""
    added(blocks(1), place)
    other = blocks(0)
    other.held[BlockName("engine-0", 0)] = sized([8], first=30)
    other.acknowledged.append(Position(place="there"))
    assert 1 == added(other, place).records
    assert 3 == len(place.open())


def test_a_run_holds_at_least_one_block(place: Place) -> None:
    """Anything else is the caller's mistake."""
    with pytest.raises(UsageError):
        added(blocks(1), place, blocks_per_run=0)
    with pytest.raises(FileNotFoundError):
        open_archive(place.where, options=place.options)


# ----------------------------------------------------------------------------------------------------------------------
# A real folder of blocks, and processes that are killed
# ----------------------------------------------------------------------------------------------------------------------


def written(where: Path, *, blocks: int) -> list[RouteRecord]:
    """A place of two producers that closed, each with that many blocks of one record; returns all records."""
    found = []
    for index in range(2):
        records = sized([6] * blocks, first=100 * index)
        producer = f"engine-{index}"
        with folder.open_writer(where, SPEC, run="r", producer=producer, groups=("archive", "trainer")) as writer:
            for record in records:
                writer.write(record)
                writer.flush()
        found += records
    return found


def add_by_command(place: Path, where: str, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, int]:
    """What ``routeplane archive add`` says."""
    capsys.readouterr()
    assert 0 == main(arguments=["archive", "add", str(place), where, "--json", *more])
    found: dict[str, int] = json.loads(capsys.readouterr().out)
    return found


def test_the_command_adds_a_folder_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All blocks of both producers; the second call finds nothing; another group of the place keeps its blocks."""
    records = written(tmp_path / "blocks", blocks=3)
    where = str(tmp_path / "a.zarr")
    done = add_by_command(tmp_path / "blocks", where, capsys, "--blocks-per-run", "4", "--follow", "--producers", "2")

    assert {"runs": 2, "blocks": 6, "records": 6, "repeats": 0} == done
    assert contents(records) == contents(open_archive(where)[record.key] for record in records)
    assert 0 == add_by_command(tmp_path / "blocks", where, capsys)["records"]
    with folder.open_reader(tmp_path / "blocks", group="trainer", producers=2, follow=False) as reader:
        assert 6 == len(list(reader))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--follow"], "--producers"),
        (["--group", "none"], "none"),
        (["--producers", "1"], "expected 1 producers"),
    ],
    ids=["an end that is unknown", "a group that is unknown", "a producer too many"],
)
def test_the_command_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    """Before anything is committed."""
    written(tmp_path / "blocks", blocks=1)
    assert 2 == main(arguments=["archive", "add", str(tmp_path / "blocks"), str(tmp_path / "a.zarr"), *arguments])
    assert said in capsys.readouterr().err
    assert not (tmp_path / "a.zarr").exists()
    assert 2 == main(arguments=["archive", "add", str(tmp_path / "nowhere"), str(tmp_path / "a.zarr")])


@pytest.mark.parametrize("dies_at", [0, 2])
def test_killed_between_a_commit_and_its_acknowledgement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dies_at: int
) -> None:
    """The next call acknowledges what is committed and goes on: no record twice, none lost."""
    records = written(tmp_path / "blocks", blocks=3)
    where = str(tmp_path / "a.zarr")
    process = start("add", where, tmp_path / "blocks", dies_at)
    out, _ = process.communicate(timeout=60)

    assert (-9, dies_at) == (process.returncode, out.count("acknowledged"))
    assert 2 * dies_at + 2 == len(open_archive(where))  # the commit that was not acknowledged is there
    done = add_by_command(tmp_path / "blocks", where, capsys)
    assert (6 - 2 * dies_at - 2, 0) == (done["records"], done["repeats"])
    assert contents(records) == contents(open_archive(where)[record.key] for record in records)
    assert 6 == len(open_archive(where))
    assert verify(where).intact


@pytest.mark.slow
def test_killed_at_any_time_adds_each_record_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten processes in a row, each killed at a random moment; the last call goes to the end."""
    records = written(tmp_path / "blocks", blocks=60)
    where, random = str(tmp_path / "a.zarr"), Random(0)
    for _ in range(10):
        process = start("add", where, tmp_path / "blocks", -1)
        assert process.stdout is not None
        process.stdout.readline()  # it has begun
        time.sleep(random.uniform(0, 0.2))
        process.kill()
        process.communicate()
    add_by_command(tmp_path / "blocks", where, capsys)

    assert 120 == len(open_archive(where)) == len(set(open_archive(where)))
    assert contents(records) == contents(open_archive(where)[record.key] for record in records)
    assert verify(where).intact
