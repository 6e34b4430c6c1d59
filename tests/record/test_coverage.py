"""Coverage: rows by state against a count token by token, and rows that contradict their captures."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.errors import ErrorKind, UsageError
from routeplane.record.record import RouteRecord
from routeplane.record.spans import (
    STATES,
    Capture,
    CaptureState,
    Coverage,
    Span,
    SpanKind,
    check_cover,
    coverage_problems,
    lose_rows,
    settle_partial,
    stale_kv,
    suffix_problems,
)
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.testing.strategies import records, specs

if TYPE_CHECKING:
    from collections.abc import Iterable

SPEC = RouteSpec(num_experts=8, top_k=2, layer_ids=(1, 4))


def states_of(captures: Iterable[Capture]) -> list[CaptureState]:
    """The state of every token."""
    return [capture.state for capture in captures for _ in range(capture.start, capture.stop)]


def captures_of(states: Iterable[CaptureState]) -> tuple[Capture, ...]:
    """One capture per token."""
    return tuple(
        Capture(start=token, stop=token + 1, call="c", weights_version=None, state=state)
        for token, state in enumerate(states)
    )


# ----------------------------------------------------------------------------------------------------------------------
# Counts
# ----------------------------------------------------------------------------------------------------------------------


@given(st.lists(records(max_tokens=4), max_size=3))
def test_counts_are_those_of_the_tokens(found: list[RouteRecord]) -> None:
    """Every count is that of a loop over tokens, for one record and merged over many, in any order."""
    merged = Coverage()
    for record in found:
        merged = record.coverage().merge(merged)
    states = [state for record in found for state in states_of(record.captures)]
    fed = [state for state in states if state != "not_fed"]
    missing = [state for state in fed if state not in ("captured", "cached")]

    assert merged == Coverage.of_records(record.captures for record in found)
    assert len(found) == merged.records
    assert [states.count(state) for state in STATES] == [merged.count(state) for state in STATES]
    assert (len(states), len(fed), len(missing)) == (merged.total, merged.fed, merged.missing)
    assert merged.missing_share == (len(missing) / len(fed) if fed else 0.0)
    assert merged == pickle.loads(pickle.dumps(merged))


def test_scalars_have_stable_names() -> None:
    """Every state has its name, seen or not; missing rows and their share are always there. Kind of report 30."""
    many: list[CaptureState] = ["captured"]
    scalars = Coverage.of(captures_of(["partial", "lost", "not_captured", "cached", *many * 96, "not_fed"])).scalars()

    assert {
        "routeplane/records": 1.0,
        "routeplane/rows": 101.0,
        "routeplane/rows_captured": 96.0,
        "routeplane/rows_cached": 1.0,
        "routeplane/rows_partial": 1.0,
        "routeplane/rows_not_fed": 1.0,
        "routeplane/rows_aborted": 0.0,
        "routeplane/rows_lost": 1.0,
        "routeplane/rows_not_captured": 1.0,
        "routeplane/missing_share": 0.03,
    } == scalars
    assert set(scalars) == set(Coverage().scalars())
    assert {name.replace("routeplane/", "x.") for name in scalars} == set(Coverage().scalars(prefix="x."))


def test_an_empty_completion_misses_nothing() -> None:
    """Kind of report 23: nothing fed, nothing missing; all of what was fed missing is a share of one."""
    absent: list[CaptureState] = ["not_captured"]

    assert 0.0 == Coverage().missing_share
    assert 0.0 == Coverage.of(captures_of(["not_fed"])).missing_share
    assert 1.0 == Coverage.of(captures_of([*absent * 4, "not_fed"])).missing_share


def test_counts_of_unknown_states_are_refused() -> None:
    """Counts whose states are none of the format's do not become coverage, in a pickle neither."""
    rebuild, _ = Coverage().__reduce__()
    assert callable(rebuild)
    with pytest.raises(UsageError, match="padded"):
        Coverage(rows={"padded": 3})
    with pytest.raises(UsageError, match="padded"):
        rebuild(Coverage, {"records": 1, "rows": {"padded": 3}})


# ----------------------------------------------------------------------------------------------------------------------
# Rows against captures
# ----------------------------------------------------------------------------------------------------------------------

# what the rows of one token show, and the states that may say so
SHOWN: dict[str, tuple[tuple[int, ...], set[CaptureState]]] = {
    "whole": ((), {"captured", "cached"}),
    "some": ((1,), {"partial"}),
    "none": ((0, 1), {"not_fed", "aborted", "lost", "not_captured"}),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("shown", SHOWN)
def test_a_state_is_what_its_rows_show(state: CaptureState, shown: str) -> None:
    """For every state and every kind of row: agreement is silent, contradiction is located."""
    slots, states = SHOWN[shown]
    routes_SLK = np.tile(np.asarray([1, 0], dtype=np.int16), (3, 2, 1))
    routes_SLK[2, list(slots)] = MISSING
    captures = captures_of(["captured", "captured", state])
    found = list(coverage_problems(captures, routes_SLK, routes_start=0, sample="s"))
    expected = [] if state in states else [(ErrorKind.COVERAGE, 2, "s")]

    assert expected == [(problem.kind, problem.token, problem.sample) for problem in found]


@given(records(max_tokens=5), st.data())
def test_a_changed_row_contradicts_its_capture(record: RouteRecord, data: st.DataObject) -> None:
    """A record's rows agree with its captures; one row lost, or one too many, is found at its token."""
    spec, start = record.spec, record.routes_start
    assert [] == list(coverage_problems(record.captures, record.routes, routes_start=start, sample="s"))
    if not len(record.routes):
        return
    routes_SLK = record.routes.copy()
    row = data.draw(st.integers(0, len(routes_SLK) - 1))
    was_missing = bool((routes_SLK[row] == MISSING).all())
    routes_SLK[row] = np.arange(spec.top_k) if was_missing else MISSING
    found = list(coverage_problems(record.captures, routes_SLK, routes_start=start, sample="s"))

    assert [start + row] == [problem.token for problem in found]


UNFED = {
    # spans as (kind, tokens), states, whether the record is a slice, whether it is refused
    "last_sampled": ("p2 g2", "c3 n1", False, False),
    "last_token_of_a_prompt": ("p4", "c3 n1", False, False),
    "observation_behind_the_last_call": ("p2 g2 p3", "c3 n4", False, False),
    "observation_behind_a_fed_generation": ("p2 g2 p3", "c4 n3", False, False),
    "a_template_before_the_observation": ("p1 g1 p1 p2", "c1 n4", False, False),
    "several_captures": ("p1 g1 p3", "c1 n1 n3", False, False),
    "cut_out_of_an_observation": ("p3", "n3", True, False),
    "all_of_a_prompt": ("p3", "n3", False, True),
    "first_token_alone": ("p1 g2", "n1 c2", False, True),
    "two_sampled_tokens": ("p1 g2", "c1 n2", False, True),
    "from_before_the_last_sampled_token": ("p2 g1 p1", "c1 n3", False, True),
    "a_generation_behind": ("p1 g1 p1 g1", "c1 n3", False, True),
    "fed_behind": ("p1 g1 p2", "c1 n1 c2", False, True),
}


@pytest.mark.parametrize("case", UNFED)
def test_not_fed_rows_are_a_suffix_from_the_last_sampled_token_on(case: str) -> None:
    """Absent rows cannot hide from the count of missing ones as not fed."""
    kinds, states, cut, refused = UNFED[case]
    spans: list[Span] = []
    for kind, count in ((word[0], int(word[1:])) for word in kinds.split()):
        at = spans[-1].stop if spans else 0
        name: SpanKind = "generation" if kind == "g" else "prompt"
        spans.append(Span(start=at, stop=at + count, kind=name, call="c", weights_version=None))
    captures: list[Capture] = []
    for letter, count in ((word[0], int(word[1:])) for word in states.split()):
        at = captures[-1].stop if captures else 0
        state: CaptureState = "not_fed" if letter == "n" else "captured"
        captures.append(Capture(start=at, stop=at + count, call="c", weights_version=None, state=state))
    found = list(suffix_problems(captures, spans, cut=cut, sample="s"))

    assert refused == bool(found)
    assert {ErrorKind.COVERAGE} >= {problem.kind for problem in found}


# ----------------------------------------------------------------------------------------------------------------------
# Captures of changed rows
# ----------------------------------------------------------------------------------------------------------------------


@given(st.data())
def test_settled_captures_say_what_is_left(data: st.DataObject) -> None:
    """After layers were dropped, a partial token is whole, partial or not captured, as its rows show; others stay."""
    spec = data.draw(specs(min_layers=2))
    record = data.draw(records(spec=spec))
    kept = data.draw(st.sets(st.integers(0, spec.num_layers - 1), min_size=1))
    routes_SLK, start = record.routes[:, sorted(kept)], record.routes_start
    settled = settle_partial(record.captures, routes_SLK, routes_start=start)
    check_cover(settled, record.num_tokens, what="settled")

    assert [] == list(coverage_problems(settled, routes_SLK, routes_start=start, sample="s"))
    for token, (before, after) in enumerate(zip(states_of(record.captures), states_of(settled), strict=True)):
        may_change = before == "partial" and token >= start
        assert may_change or before == after
        assert after in ("captured", "partial", "not_captured") or not may_change


@given(st.data())
def test_a_settled_capture_keeps_who_captured(data: st.DataObject) -> None:
    """Call stays; the version of the weights stays where rows are left, and goes with the rows."""
    record = data.draw(records(spec=data.draw(specs(min_layers=2)), prefixes=False))
    for capture in settle_partial(record.captures, record.routes[:, :1], routes_start=0):
        (origin,) = [before for before in record.captures if before.start <= capture.start < before.stop]

        assert origin.call == capture.call
        expected = None if origin.state == "partial" and capture.state == "not_captured" else origin.weights_version
        assert expected == capture.weights_version


@given(records())
def test_lost_captures_cover_and_keep_what_stands_elsewhere(record: RouteRecord) -> None:
    """All that was fed from ``routes_start`` on is lost, by no known weights; the rest stays as declared."""
    start = record.routes_start
    lost = lose_rows(record.captures, start=start)
    before, after = states_of(record.captures), states_of(lost)
    check_cover(lost, record.num_tokens, what="lost")

    assert before[:start] == after[:start]
    assert ["not_fed" if state == "not_fed" else "lost" for state in before[start:]] == after[start:]
    assert {None} >= {capture.weights_version for capture in lost if capture.state == "lost" and capture.start >= start}


@st.composite
def any_captures(draw: st.DrawFn, *, states: tuple[CaptureState, ...] = STATES) -> tuple[Capture, ...]:
    """Runs of one call and version of the weights, in any order."""
    runs = st.tuples(
        st.integers(1, 2), st.sampled_from(["a", "b"]), st.sampled_from([1, 2, None]), st.sampled_from(states)
    )
    found, at = [], 0
    for length, call, version, state in draw(st.lists(runs, min_size=1, max_size=8)):
        found.append(Capture(start=at, stop=at + length, call=call, weights_version=version, state=state))
        at += length
    return tuple(found)


@given(captures=any_captures(), stop=st.integers(0, 20))
def test_rows_that_another_record_lost_are_lost_here(captures: tuple[Capture, ...], stop: int) -> None:
    """Token by token: what was fed before ``stop`` is lost, by no known weights; the rest stays as declared."""
    told = [capture for capture in captures for _ in range(capture.start, capture.stop)]
    lost = lose_rows(captures, stop=stop)
    check_cover(lost, len(told), what="lost")
    found = [(each.call, each.state, each.weights_version) for each in lost for _ in range(each.start, each.stop)]

    assert found == [
        (before.call, "lost", None)
        if token < stop and before.state != "not_fed"
        else (before.call, before.state, before.weights_version)
        for token, before in enumerate(told)
    ]


@given(captures=any_captures(states=("captured", "partial")) | any_captures())
def test_rows_are_stale_from_the_first_of_other_weights_on(captures: tuple[Capture, ...]) -> None:
    """Token by token: captured rows of a call, of known weights, once one of other weights than its first was seen."""
    known: dict[str, list[int]] = {}
    expected = set()
    for capture in captures:
        if capture.state in ("captured", "partial") and capture.weights_version is not None:
            seen = known.setdefault(capture.call, [])
            seen.append(capture.weights_version)
            expected |= set(range(capture.start, capture.stop)) if len(set(seen)) > 1 else set()
    found = stale_kv(captures)

    assert sorted(expected) == [token for start, stop in found for token in range(start, stop)]
    assert all(stop < start for (_, stop), (start, _) in pairwise(found))


def test_stale_rows_that_follow_one_another_are_one_piece() -> None:
    """Two calls were updated; a call of one version stands between their rows."""
    told = [("a", 1, 0, 2), ("a", 2, 2, 3), ("a", 3, 3, 5), ("b", 2, 5, 6), ("b", 3, 6, 8), ("a", 3, 8, 9)]
    captures = [
        Capture(start=start, stop=stop, call=call, weights_version=version, state="captured")
        for call, version, start, stop in told
    ]

    assert [(2, 5), (6, 9)] == stale_kv(captures)


def test_a_contradiction_is_located_where_it_begins() -> None:
    """The first row that is not what its capture says, counted from the start of the record."""
    routes_SLK = np.zeros((6, 2, 2), dtype=np.int16)
    routes_SLK[3, 1] = MISSING
    captures = (*captures_of(["lost"] * 2), Capture(start=2, stop=8, call="c", weights_version=1, state="captured"))
    [problem] = coverage_problems(captures, routes_SLK, routes_start=2, sample="s")

    assert (5, ErrorKind.COVERAGE) == (problem.token, problem.kind)
    assert "got 1 rows otherwise" in problem.message
