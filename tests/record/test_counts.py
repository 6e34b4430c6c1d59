"""The base of reports: merging and scalars follow from the fields, for every rule that a field can declare."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import and_, or_
from types import MappingProxyType
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.errors import ErrorKind, UsageError
from routeplane.record.assembly import AssemblyReport
from routeplane.record.counts import Counts, add_by_key, first_of, rule
from routeplane.record.prefixes import PromptReport
from routeplane.record.spans import Coverage


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkReport(Counts):
    """A report with a field of every kind."""

    SCOPE: ClassVar[str] = "link_"

    frames: int = 0
    waits: int = field(default=0, metadata=rule(scalar="stalls"))
    hidden: int = field(default=0, metadata=rule(scalar=None))
    peak: int = field(default=0, metadata=rule(merge=max))
    broken: bool = field(default=False, metadata=rule(merge=or_))
    closed: bool = field(default=True, metadata=rule(merge=and_))
    notes: tuple[str, ...] = field(default=(), metadata=rule(merge=first_of(3)))
    refusals: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}), metadata=rule(merge=add_by_key))
    coverage: Coverage = field(default_factory=Coverage)

    def derived(self) -> dict[str, float]:
        """One scalar of two fields."""
        return {"stall_share": self.waits / self.frames if self.frames else 0.0}


counts = st.integers(0, 2**40)
reports = st.builds(
    LinkReport,
    frames=counts,
    waits=counts,
    hidden=counts,
    peak=counts,
    broken=st.booleans(),
    closed=st.booleans(),
    notes=st.lists(st.text(max_size=2), max_size=4).map(lambda found: tuple(found[:3])),
    refusals=st.dictionaries(st.sampled_from("abc"), counts).map(MappingProxyType),
    coverage=st.builds(Coverage, records=counts, rows=st.just(MappingProxyType({"lost": 2}))),
)


def test_every_rule_of_merging_and_naming() -> None:
    """Sums, maxima, either, both, the first notes, counts by key, and a report inside."""
    left = LinkReport(
        frames=4,
        waits=1,
        hidden=9,
        peak=7,
        closed=True,
        notes=("a", "b"),
        refusals=MappingProxyType({"late": 1}),
        coverage=Coverage(records=1, rows=MappingProxyType({"captured": 3})),
    )
    right = LinkReport(
        frames=6,
        waits=2,
        hidden=1,
        peak=5,
        broken=True,
        closed=False,
        notes=("c", "d"),
        refusals=MappingProxyType({"late": 2, "lost": 5}),
        coverage=Coverage(records=1, rows=MappingProxyType({"lost": 1})),
    )

    both = left.merge(right)

    assert (10, 3, 10, 7, True, False) == (
        both.frames,
        both.waits,
        both.hidden,
        both.peak,
        both.broken,
        both.closed,
    )
    assert (("a", "b", "c"), {"late": 3, "lost": 5}) == (both.notes, dict(both.refusals))
    found = both.scalars(prefix="x/")
    own = {name: value for name, value in found.items() if not name.startswith("x/link_rows")}
    assert {
        "x/link_frames": 10.0,
        "x/link_stalls": 3.0,
        "x/link_peak": 7.0,
        "x/link_broken": 1.0,
        "x/link_closed": 0.0,
        "x/link_notes": 3.0,
        "x/link_refusals": 8.0,
        "x/link_records": 2.0,
        "x/link_missing_share": 0.25,
        "x/link_stall_share": 0.3,
    } == own
    assert 4.0 == found["x/link_rows"]


@given(reports, reports, reports)
def test_merging_is_associative_and_an_empty_report_changes_nothing(
    first: LinkReport, second: LinkReport, third: LinkReport
) -> None:
    """Steps and ranks may be merged in any grouping."""
    assert first.merge(second).merge(third) == first.merge(second.merge(third))
    assert LinkReport().merge(first) == first.merge(LinkReport()) == first
    assert first == pickle.loads(pickle.dumps(first))
    assert isinstance(pickle.loads(pickle.dumps(first)).refusals, MappingProxyType)


@pytest.mark.parametrize("kind", [Coverage, AssemblyReport, PromptReport, LinkReport])
def test_every_integer_field_adds_up(kind: type[Counts]) -> None:
    """A field of ones merges to twos, so that no field is left out."""
    names = [item.name for item in fields(kind) if item.type == "int" and item.name != "peak"]  # type: ignore[arg-type]
    ones = kind(**dict.fromkeys(names, 1))

    assert [2] * len(names) == [getattr(ones.merge(ones), name) for name in names]


def test_reports_of_two_classes_do_not_merge() -> None:
    """A mix-up names both classes."""
    with pytest.raises(UsageError, match="expected another Coverage to merge, got PromptReport") as caught:
        Coverage().merge(PromptReport())  # type: ignore[arg-type]

    assert caught.value.kind is ErrorKind.ARGUMENT
