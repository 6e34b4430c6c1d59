"""admit: one verdict per batch, in a form that ranks can reduce."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.errors import DataError, ErrorKind, RouteplaneError
from routeplane.record.interfaces import Admission, admit
from routeplane.record.record import RouteRecord
from routeplane.record.spans import Coverage
from routeplane.testing.builders import watermarked_record, watermarked_spec
from routeplane.testing.strategies import records

SPEC = watermarked_spec(layers=(1, 4), top_k=2)
OTHER = watermarked_spec(layers=(1, 5), top_k=2)


def _place(kind: ErrorKind) -> int:
    return 1 + list(ErrorKind).index(kind)


@st.composite
def batches(draw: st.DrawFn) -> list[RouteRecord]:
    """Some records of one spec, at times one of another, at times one twice."""
    found = draw(st.lists(records(spec=SPEC, max_tokens=3), max_size=3))
    if draw(st.booleans()):
        found.append(draw(records(spec=OTHER, max_tokens=3)))
    twice = draw(st.booleans())
    if found and twice:
        found.append(draw(st.sampled_from(found)))
    return found


@given(batches(), st.none() | st.floats(0, 1))
def test_the_verdict_is_the_plain_one(batch: list[RouteRecord], max_missing: float | None) -> None:
    """A batch is admitted exactly where geometry, keys and the share of missing rows are right; counts always come."""
    verdict = admit(batch, SPEC, max_missing=max_missing)
    coverage = Coverage()
    for record in batch:
        coverage = coverage.merge(record.coverage())
    expected = set()
    if any(record.spec.layer_ids != SPEC.layer_ids for record in batch):
        expected.add(ErrorKind.SPEC_MISMATCH)
    if len({record.key for record in batch}) < len(batch):
        expected.add(ErrorKind.DUPLICATE_KEY)
    if max_missing is not None and coverage.fed and coverage.missing / coverage.fed > max_missing:
        expected.add(ErrorKind.ROUTES_MISSING)

    assert expected == {problem.kind for problem in verdict.problems}
    assert (not expected) == verdict.admitted
    assert coverage == verdict.coverage
    assert verdict.code == (_place(verdict.problems[0].kind) if expected else 0)
    assert verdict == pickle.loads(pickle.dumps(verdict))


def test_codes_reduce_by_max() -> None:
    """Zero only where all ranks admit; any refusal anywhere shows, with a kind that can be looked up."""
    good = admit([watermarked_record(1, num_tokens=4, spec=SPEC)], SPEC, max_missing=0.0)
    bad = admit([watermarked_record(1, num_tokens=4, spec=OTHER)], SPEC, max_missing=0.0)
    code = max(good.code, bad.code)

    assert (0, True) == (good.code, good.admitted)
    assert ErrorKind.SPEC_MISMATCH == list(ErrorKind)[code - 1]


def test_requiring_raises_with_all_problems() -> None:
    """``require`` passes an admitted batch and raises with every finding of a refused one."""
    record = watermarked_record(1, num_tokens=4, spec=OTHER, missing=[0])
    verdict = admit([record, record], SPEC, max_missing=0.1)
    admit([], SPEC, max_missing=0.0).require()
    with pytest.raises(DataError, match="batch refused: layer_ids") as caught:
        verdict.require()

    assert verdict.problems == caught.value.problems
    assert [
        ErrorKind.SPEC_MISMATCH,
        ErrorKind.SPEC_MISMATCH,
        ErrorKind.DUPLICATE_KEY,
        ErrorKind.ROUTES_MISSING,
    ] == [problem.kind for problem in caught.value.problems]
    assert ["sample-1"] * 3 == [problem.sample for problem in caught.value.problems[:3]]


def test_the_name_of_a_model_is_not_compared() -> None:
    """A stream written under another name of the same geometry is admitted."""
    record = replace(watermarked_record(1, num_tokens=4, spec=SPEC), spec=replace(SPEC, model="x"), checksum=None)

    assert admit([record], SPEC, max_missing=0.0).admitted


# ----------------------------------------------------------------------------------------------------------------------
# The share of missing rows
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_missing", "admitted"), [(0.02, False), (0.03, True), (1.0, True), (None, True)])
def test_missing_rows_are_a_share_of_those_fed(max_missing: float | None, admitted: bool) -> None:
    """Kind of report 30: 3 of 100 fed rows missing are 0.03, reported whatever the verdict; the bound itself passes."""
    record = watermarked_record(1, num_tokens=101, spec=SPEC, missing=[3, (50, 4), 99])
    verdict = admit([record], SPEC, max_missing=max_missing)

    expected = [] if admitted else ["expected at most 0.0200 of fed rows missing, got 0.0300 (3 of 100)"]

    assert admitted == verdict.admitted
    assert 0.03 == verdict.coverage.missing_share
    assert expected == [problem.message for problem in verdict.problems]


def test_routes_that_never_came_fail_and_an_empty_completion_does_not() -> None:
    """Kind of report 23: no rows for fed tokens is a share of 1.0 and fails; a lone prompt with its rows is fine."""
    silent = watermarked_record(1, num_tokens=9, prompt_tokens=5, spec=SPEC, missing=range(8))
    empty = watermarked_record(2, num_tokens=5, prompt_tokens=5, spec=SPEC, last_token_fed=True)
    verdict = admit([silent], SPEC, max_missing=0.5)

    assert 1.0 == verdict.coverage.missing_share
    assert _place(ErrorKind.ROUTES_MISSING) == verdict.code
    assert admit([empty], SPEC, max_missing=0.0).admitted


@pytest.mark.parametrize("max_missing", [float("nan"), -0.1, 1.1, float("inf")])
def test_a_bound_that_bounds_nothing_is_refused(max_missing: float) -> None:
    """A share lies in [0, 1]; NaN would admit every batch."""
    with pytest.raises(RouteplaneError) as caught:
        admit([watermarked_record(1, num_tokens=3, spec=SPEC)], SPEC, max_missing=max_missing)

    assert ErrorKind.ARGUMENT == caught.value.kind


def test_a_verdict_holds_no_records() -> None:
    """A verdict crosses ranks: it pickles small, however large the batch."""
    batch = [watermarked_record(index, num_tokens=500, spec=SPEC) for index in range(4)]

    assert len(pickle.dumps(admit(batch, SPEC, max_missing=None))) < 2_000
    assert Admission(admitted=True, code=0, coverage=Coverage()).problems == ()
