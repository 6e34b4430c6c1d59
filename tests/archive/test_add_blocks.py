"""An archive takes blocks of a carrier whole, acknowledges what is committed, and holds each record once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from routeplane.archive import AddReport, add_blocks, open_archive, verify
from routeplane.errors import DataError, ErrorKind, UsageError
from routeplane.record.interfaces import Admission, BlockName, BlockSource, Position, RouteSource, admit
from routeplane.record.record import RouteRecord
from routeplane.record.spec import RouteSpec
from tests.archive.archives import SPEC, sized
from tests.archive.places import Place
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
