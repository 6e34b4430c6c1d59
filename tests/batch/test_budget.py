"""Groups within a budget, against the plans that they become."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.batch.plan import Layout, PlanOptions, budget_groups
from routeplane.errors import ErrorKind, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

Rule = tuple[Layout, PlanOptions]
rules = st.sampled_from(
    (
        ("packed", PlanOptions()),
        ("packed", PlanOptions(pad_to_multiple_of=4)),
        ("padded", PlanOptions(pad_to_multiple_of=3)),
        ("padded", PlanOptions(seq_len=8, truncate="left")),
    )
)


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=20), tokens=st.integers(12, 40), rule=rules)
def test_sorted_groups_hold_each_sequence_once_within_the_budget(lengths: list[int], tokens: int, rule: Rule) -> None:
    """No group has too many rows, no sequence is lost, and no two groups could have been one."""
    layout, options = rule
    groups = budget_groups(lengths, tokens=tokens, layout=layout, options=options, sort=True)
    rows = [options.plan([lengths[index] for index in group], layout=layout).num_rows for group in groups]

    assert list(range(len(lengths))) == sorted(index for group in groups for index in group)
    assert all(list(group) == sorted(group) for group in groups)
    assert max(rows) <= tokens
    if layout == "packed":
        assert all(a + b > tokens for at, a in enumerate(rows) for b in rows[at + 1 :])


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=20), tokens=st.integers(12, 40), rule=rules)
def test_unsorted_groups_are_runs_as_full_as_the_next_allows(lengths: list[int], tokens: int, rule: Rule) -> None:
    """Groups are neighbours in order; the next sequence would not have fitted."""
    layout, options = rule
    groups = budget_groups(lengths, tokens=tokens, layout=layout, options=options)

    assert list(range(len(lengths))) == [index for group in groups for index in group]
    for group, after in pairwise(groups):
        wider = options.plan([lengths[index] for index in (*group, after[0])], layout=layout)
        assert wider.num_rows > tokens


def test_sorting_saves_padding() -> None:
    """Alternating lengths, padded: sorted, the short ones share a group and the long ones another."""
    lengths = [8, 1] * 4

    assert 4 == len(budget_groups(lengths, tokens=16, layout="padded"))
    assert [(0, 2), (4, 6), (1, 3, 5, 7)] == budget_groups(lengths, tokens=16, layout="padded", sort=True)


REFUSED: dict[str, tuple[Callable[[], object], ErrorKind, str]] = {
    "none": (lambda: budget_groups([], tokens=4), ErrorKind.ARGUMENT, "empty batch"),
    "budget": (lambda: budget_groups([1], tokens=0), ErrorKind.ARGUMENT, "tokens as a positive"),
    "layout": (lambda: budget_groups([1], tokens=4, layout="ragged"), ErrorKind.ARGUMENT, "ragged"),  # type: ignore[arg-type]
    "long": (lambda: budget_groups([1, 5], tokens=4), ErrorKind.TOO_LONG, "at most 4 rows, got 5 @ sequence 1"),
}


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_what_no_group_can_hold_is_refused(call: Callable[[], object], kind: ErrorKind, message: str) -> None:
    """The refusal says which sequence."""
    with pytest.raises(UsageError, match=message) as caught:
        call()

    assert kind == caught.value.kind


@pytest.mark.parametrize("sort", [False, True])
def test_a_sequence_of_the_whole_budget_fits(sort: bool) -> None:
    """The budget itself is allowed, and nothing joins it; one row more is refused."""
    assert [(0,), (1,)] == budget_groups([8, 1], tokens=8, sort=sort)
    with pytest.raises(UsageError):
        budget_groups([9], tokens=8, sort=sort)
