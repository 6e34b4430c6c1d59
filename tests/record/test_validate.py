"""The row rule against a plain statement of it, and findings at their exact places."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from routeplane.errors import DataError, ErrorKind, RouteplaneError, UsageError
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.record.validate import all_legal, check_routes, find_problems, missing_rows
from routeplane.testing.strategies import CORRUPTIONS, corruptions, routes, specs

if TYPE_CHECKING:
    from numpy.typing import NDArray

# ----------------------------------------------------------------------------------------------------------------------
# The rule
# ----------------------------------------------------------------------------------------------------------------------


def plain_kind(ids: list[int], width: int) -> ErrorKind | None:
    """The rule for one row, as the format words it; None where it is legal."""
    if all(expert == MISSING for expert in ids):
        return None
    if any(expert >= width for expert in ids):
        return ErrorKind.ID_OUT_OF_RANGE
    if any(expert < 0 for expert in ids):
        return ErrorKind.PARTIAL_ROW
    return None if len(set(ids)) == len(ids) else ErrorKind.DUPLICATE_ID


def plain_findings(routes_SLK: NDArray[Any], spec: RouteSpec) -> list[tuple[int, int, ErrorKind]]:
    """Token, layer id and kind of every illegal row, by a loop."""
    found = []
    for token, rows_LK in enumerate(routes_SLK.tolist()):
        for layer, width, ids in zip(spec.layer_ids, spec.experts_per_layer, rows_LK, strict=True):
            kind = plain_kind(ids, width)
            if kind is not None:
                found.append((token, layer, kind))
    return found


@st.composite
def any_routes(draw: st.DrawFn) -> tuple[NDArray[Any], RouteSpec]:
    """Arrays near the edge of legality, in every integer type and several memory layouts."""
    spec = draw(specs(max_top_k=3, max_experts=130))
    kind: np.dtype[Any] = np.dtype(draw(st.sampled_from(["i1", "u1", "<i2", ">i2", "<u2", "<i4", "<u4", "<i8", "<u8"])))
    edges = [-2, -1, 0, 1, 2, 127, 128, *spec.experts_per_layer]
    values = st.sampled_from([value for value in edges if np.iinfo(kind).min <= value <= np.iinfo(kind).max])
    routes_SLK = draw(arrays(kind, (draw(st.integers(0, 5)), *spec.row_shape), elements=values, fill=st.nothing()))
    layout = draw(st.sampled_from(["C", "F", "reversed", "strided", "read_only"]))
    if layout == "F":
        routes_SLK = np.asfortranarray(routes_SLK)
    elif layout == "reversed":
        routes_SLK = routes_SLK[::-1, :, ::-1]
    elif layout == "strided":
        routes_SLK = np.repeat(routes_SLK, 2, axis=2)[:, :, ::2]
    elif layout == "read_only":
        routes_SLK.flags.writeable = False
    return routes_SLK, spec


@settings(max_examples=2 * settings().max_examples)
@given(any_routes())
def test_the_rule_is_the_plain_rule(case: tuple[NDArray[Any], RouteSpec]) -> None:
    """Findings are exactly those of a loop over rows, in token order; the fast verdict agrees; nothing is modified."""
    routes_SLK, spec = case
    before_SLK = routes_SLK.copy()
    found = find_problems(routes_SLK, spec, limit=1_000)
    expected = plain_findings(routes_SLK, spec)

    assert expected == [(problem.token, problem.layer, problem.kind) for problem in found]
    assert (not expected) == all_legal(routes_SLK, spec)
    np.testing.assert_array_equal(before_SLK, routes_SLK)


@given(st.data())
def test_legal_routes_have_no_problems(data: st.DataObject) -> None:
    """Whatever is legal passes all three verbs, in any type that holds it."""
    spec = data.draw(specs())
    routes_SLK = data.draw(routes(spec))
    for values in (routes_SLK, routes_SLK.astype(np.int64), routes_SLK.astype(">i4")):
        check_routes(values, spec)

        assert [] == find_problems(values, spec)
        assert all_legal(values, spec)


@given(corruptions(), st.integers(0, 10**9))
def test_a_corruption_is_located(bad: Any, first_token: int) -> None:
    """One illegal row gives one finding, with its absolute token, decoder layer, sample and kind."""
    found = find_problems(bad.routes, bad.spec, first_token=first_token, sample="s")
    token = None if bad.token is None else first_token + bad.token

    assert [(bad.kind, token, bad.layer, "s", "error")] == [
        (problem.kind, problem.token, problem.layer, problem.sample, problem.severity) for problem in found
    ]
    assert not all_legal(bad.routes, bad.spec)


@pytest.mark.parametrize("name", CORRUPTIONS)
@settings(max_examples=settings().max_examples // 5)
@given(data=st.data())
def test_checking_raises_what_finding_finds(name: str, data: st.DataObject) -> None:
    """``check_routes`` raises with the findings of ``find_problems``; the first gives the kind."""
    bad = data.draw(corruptions(which=(name,)))
    with pytest.raises(DataError, match=r"^illegal routes: expected .*, got ") as caught:
        check_routes(bad.routes, bad.spec, first_token=5, sample="s")

    assert bad.kind == caught.value.kind
    assert tuple(find_problems(bad.routes, bad.spec, first_token=5, sample="s")) == caught.value.problems


# blocks are of 32,768 rows: with two layers, 16,384 tokens
@pytest.mark.parametrize("token", [0, 16_383, 16_384, 32_767, 32_768, 40_000])
def test_every_block_is_looked_at(token: int) -> None:
    """A long array has no seam: one bad row anywhere is found where it is, among MISSING rows too."""
    spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(3, 9))
    routes_SLK = np.tile(np.asarray([1, 0], dtype=np.int16), (40_001, 2, 1))
    routes_SLK[::3] = MISSING
    routes_SLK[token, 1] = [5, 5]
    found = find_problems(routes_SLK, spec)

    assert [(token, 9, ErrorKind.DUPLICATE_ID)] == [(problem.token, problem.layer, problem.kind) for problem in found]
    assert not all_legal(routes_SLK, spec)


def test_findings_are_limited_in_token_order() -> None:
    """The first ``limit`` findings come, sixteen where nothing is said, across blocks."""
    spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(3, 9))
    routes_SLK = np.zeros((20_000, 2, 2), dtype=np.uint8)
    expected = [(token, layer) for token in range(20_000) for layer in (3, 9)]
    for limit in (1, 3, 35_000):
        found = find_problems(routes_SLK, spec, limit=limit)
        assert expected[:limit] == [(problem.token, problem.layer) for problem in found]

    assert 16 == len(find_problems(routes_SLK, spec))


@pytest.mark.parametrize("limit", [0, -1])
def test_no_findings_means_legal(limit: int) -> None:
    """A limit that would hide every finding is refused: an empty list must mean that the routes are legal."""
    spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(3,))
    with pytest.raises(RouteplaneError) as caught:
        find_problems(np.zeros((1, 1, 2), dtype=np.int16), spec, limit=limit)

    assert ErrorKind.ARGUMENT == caught.value.kind


def test_no_tokens_are_legal() -> None:
    """An array of no tokens is legal where its other axes are right."""
    spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(3,))

    assert [] == find_problems(np.empty((0, 1, 2), dtype=np.int16), spec)
    assert all_legal(np.empty((0, 1, 2), dtype=np.int16), spec)
    assert [ErrorKind.SHAPE] == [problem.kind for problem in find_problems(np.empty((0, 2, 2), dtype=np.int16), spec)]


@given(st.data())
def test_missing_rows_are_those_of_minus_one(data: st.DataObject) -> None:
    """``missing_rows`` says for each token and layer whether the row is all -1."""
    spec = data.draw(specs())
    routes_SLK = data.draw(routes(spec))

    np.testing.assert_array_equal((routes_SLK == MISSING).all(axis=2), missing_rows(routes_SLK))


# ----------------------------------------------------------------------------------------------------------------------
# Reports from the field
# ----------------------------------------------------------------------------------------------------------------------


def _places(routes_SLK: NDArray[Any], spec: RouteSpec, *, kind: ErrorKind) -> set[tuple[int | None, int | None]]:
    found = find_problems(routes_SLK, spec, limit=10**6)
    assert {kind} == {problem.kind for problem in found}
    return {(problem.token, problem.layer) for problem in found}


def test_a_partly_padded_row_is_refused() -> None:
    """Kind of report 27: some slots of a row are -1 (partly padded); a row that is all -1 is padding."""
    spec = RouteSpec(num_experts=8, top_k=3, layer_ids=(0,))
    routes_SLK = np.asarray([[[2, -1, -1]], [[-1, -1, -1]], [[2, 1, 0]]], dtype=np.int16)

    assert {(0, 0)} == _places(routes_SLK, spec, kind=ErrorKind.PARTIAL_ROW)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64])
def test_an_all_zero_capture_is_refused(dtype: type[np.integer[Any]]) -> None:
    """Kind of reports 31, 59, 60: a buffer never written, zeros in the right shape and any type; every row is found."""
    spec = RouteSpec(num_experts=256, top_k=8, layer_ids=tuple(range(40)))
    routes_SLK = np.zeros((546, 40, 8), dtype=dtype)
    every = {(token, layer) for token in range(546) for layer in range(40)}

    assert every == _places(routes_SLK, spec, kind=ErrorKind.DUPLICATE_ID)


@pytest.mark.parametrize(
    ("zero", "tokens"), [(slice(0, 3), 5), (slice(2, 8), 8)], ids=["prompt_rows", "rows_of_other_ranks"]
)
def test_zero_rows_among_good_ones_are_located(zero: slice, tokens: int) -> None:
    """Kind of reports 52, 62: only the prompt's rows, or only those of other ranks, are zero; these and no others."""
    spec = RouteSpec(num_experts=64, top_k=4, layer_ids=(1, 4))
    routes_SLK = (np.arange(tokens * 8).reshape(tokens, 2, 4) % 64).astype(np.uint8)
    routes_SLK[zero] = 0
    expected = {(token, layer) for token in range(tokens)[zero] for layer in (1, 4)}

    assert expected == _places(routes_SLK, spec, kind=ErrorKind.DUPLICATE_ID)


def test_physical_ids_are_refused() -> None:
    """Kind of report 61: ids from after a load balancer's map; with 64 logical of 80 physical, 64 and more show it."""
    spec = RouteSpec(num_experts=64, top_k=4, layer_ids=(0,))
    routes_SLK = np.asarray([[[3, 9, 63, 0]], [[3, 9, 64, 0]], [[79, 1, 2, 3]]], dtype=np.int32)

    assert {(1, 0), (2, 0)} == _places(routes_SLK, spec, kind=ErrorKind.ID_OUT_OF_RANGE)


def test_a_filler_inside_the_type_is_refused() -> None:
    """Kind of report 63: slots that keep a buffer's 255 (an unrecorded shared expert) are out of range, not padding."""
    spec = RouteSpec(num_experts=64, top_k=4, layer_ids=(0,))
    routes_SLK = np.asarray([[[3, 9, 255, 255]], [[255, 255, 255, 255]]], dtype=np.uint8)

    assert {(0, 0), (1, 0)} == _places(routes_SLK, spec, kind=ErrorKind.ID_OUT_OF_RANGE)


def test_a_duplicate_is_refused() -> None:
    """Kind of report 64: one expert twice in a row, anywhere in it."""
    spec = RouteSpec(num_experts=8, top_k=4, layer_ids=(0,))
    rows = [[1, 1, 2, 3], [1, 2, 3, 1], [0, 2, 3, 3], [0, 1, 2, 3]]
    routes_SLK = np.asarray(rows, dtype=np.int16)[:, None]

    assert {(0, 0), (1, 0), (2, 0)} == _places(routes_SLK, spec, kind=ErrorKind.DUPLICATE_ID)


def test_types_keep_their_values() -> None:
    """Kind of reports 35, 39: 200 is 200 as uint8, refused as the int8 -56; of 128 experts 127 is legal, 128 is not."""
    wide = RouteSpec(num_experts=256, top_k=2, layer_ids=(0,))
    ids = np.asarray([[[200, 255]]], dtype=np.uint8)
    edge = RouteSpec(num_experts=128, top_k=2, layer_ids=(0,))

    assert [] == find_problems(ids, wide)
    assert {(0, 0)} == _places(ids.view(np.int8), wide, kind=ErrorKind.PARTIAL_ROW)
    assert [] == find_problems(np.asarray([[[127, 0]]], dtype=np.int8), edge)
    assert {(0, 0)} == _places(np.asarray([[[128, 0]]], dtype=np.uint8), edge, kind=ErrorKind.ID_OUT_OF_RANGE)


@pytest.mark.parametrize("layers", [6, 2, 4], ids=["all_transformer_layers", "fewer", "one_mtp_layer_more"])
def test_another_layer_axis_is_refused(layers: int) -> None:
    """Kind of reports 43, 49, 54, 58: an axis of all layers, or too few or many, has another length; both are named."""
    spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(3, 4, 5))
    routes_SLK = np.tile(np.asarray([1, 0], dtype=np.int16), (2, layers, 1))
    (problem,) = find_problems(routes_SLK, spec)

    assert ErrorKind.SHAPE == problem.kind
    assert f"expected routes [tokens, 3 layers, 2 top-k], got [2, {layers}, 2]" == problem.message


def test_what_is_not_an_array_is_refused() -> None:
    """Not an AttributeError of ours."""
    with pytest.raises(UsageError, match="numpy array, got list"):
        find_problems([[[1, 2]]], RouteSpec(num_experts=4, top_k=2, layer_ids=(0,)))  # type: ignore[arg-type]
