"""Alarms: what a stale, unbound or collapsed capture shows, and honest data does not."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.errors import ErrorKind, Problem, UsageError
from routeplane.record import validate
from routeplane.record.alarms import find_alarms
from routeplane.record.kernels import shows_enough
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.record.validate import check_routes
from routeplane.testing.strategies import routes, specs

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

SPEC = RouteSpec(num_experts=32, top_k=4, layer_ids=(1, 5, 9))


WAYS = ("kernels", "numpy")
ways = pytest.mark.parametrize("way", WAYS)


def asked(way: str) -> AbstractContextManager[object]:
    """Rows of any size get the compiled look, or none do."""
    return mock.patch.object(validate, "_KERNEL_BYTES", 0 if way == "kernels" else 2**62)


def healthy(tokens: int, *, spec: RouteSpec = SPEC, seed: int = 0) -> NDArray[np.int16]:
    """Rows of a router that prefers some experts: legal, varied, int16 ``[tokens, L, K]``."""
    rng = np.random.default_rng(seed)
    width = max(spec.experts_per_layer)
    liking_LE = rng.gumbel(size=(spec.num_layers, width))
    scores_SLE = liking_LE + rng.gumbel(size=(tokens, spec.num_layers, width))
    return np.argsort(-scores_SLE, axis=2)[:, :, : spec.top_k].astype(np.int16)


def _kinds(found: list[Problem]) -> list[tuple[ErrorKind, int | None, int | None]]:
    assert all("alarm" == problem.severity for problem in found)
    return [(problem.kind, problem.token, problem.layer) for problem in found]


# ----------------------------------------------------------------------------------------------------------------------
# Honest data
# ----------------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1), st.integers(0, 300))
def test_a_healthy_router_raises_no_alarm(seed: int, tokens: int) -> None:
    """Varied rows of any number raise none."""
    assert [] == find_alarms(healthy(tokens, seed=seed), SPEC)


@given(st.data())
def test_any_legal_routes_are_looked_at(data: st.DataObject) -> None:
    """Few rows, no rows, MISSING rows: too little for an alarm, never an error."""
    spec = data.draw(specs())
    assert [] == find_alarms(data.draw(routes(spec)), spec)


def test_a_repeated_token_repeats_its_rows_honestly() -> None:
    """64 equal tokens give 64 equal rows in every layer; token ids tell them from a stale buffer."""
    token_ids = np.concatenate([np.arange(40), np.full(64, 7), np.arange(40)]).astype(np.int32)
    routes_SLK = healthy(144)
    routes_SLK[40:104] = routes_SLK[40]

    assert [] == find_alarms(routes_SLK, SPEC, token_ids=token_ids)
    assert [(ErrorKind.IDENTICAL_ROWS, 40, None)] == _kinds(find_alarms(routes_SLK, SPEC))


def test_a_run_in_one_layer_is_honest() -> None:
    """Greedy decoding repeats rows in one layer for dozens of tokens, not in all."""
    routes_SLK = healthy(200)
    routes_SLK[10:70, 1] = routes_SLK[10, 1]

    assert [] == find_alarms(routes_SLK, SPEC)


def test_a_layer_as_wide_as_its_slots_is_constant_honestly() -> None:
    """Where E == K every token chooses all experts; sorted, each row is the same, and no alarm is raised."""
    spec = RouteSpec(num_experts=(32, 4), top_k=4, layer_ids=(1, 5))
    routes_SLK = healthy(100, spec=RouteSpec(num_experts=32, top_k=4, layer_ids=(1, 5)))
    routes_SLK[:, 1] = np.arange(4)
    all_alike = RouteSpec(num_experts=4, top_k=4, layer_ids=(1, 5))
    check_routes(routes_SLK, spec)

    assert [] == find_alarms(routes_SLK, spec)
    assert [] == find_alarms(np.tile(np.arange(4, dtype=np.int16), (100, 2, 1)), all_alike)


def test_a_router_one_wider_than_its_slots_cannot_spread() -> None:
    """With E == K + 1 there are never more than K + 1 effective experts, and mostly fewer: no entropy alarm."""
    spec = RouteSpec(num_experts=5, top_k=4, layer_ids=(1,))
    left_out_S = np.where(np.arange(100) % 10, 4, np.arange(100) // 10 % 5)
    rows = [[expert for expert in range(5) if expert != left_out] for left_out in left_out_S]

    assert [] == find_alarms(np.asarray(rows, dtype=np.int16)[:, None], spec)


@pytest.mark.parametrize(("width", "collapsed"), [(6, False), (7, False), (8, True)])
def test_a_router_as_wide_as_the_bound_cannot_show_more(width: int, collapsed: bool) -> None:
    """K + K // 2 + 1 experts used evenly are as many effective ones: no wider router, no entropy alarm."""
    spec = RouteSpec(num_experts=width, top_k=4, layer_ids=(1,))
    rows_SK = np.tile(np.asarray([0, 1, 2, width - 1], dtype=np.int16), (100, 1))
    rows_SK[5::20, 0] = 3

    assert collapsed == (ErrorKind.ENTROPY_COLLAPSE in {each.kind for each in find_alarms(rows_SK[:, None], spec)})


def test_a_router_that_collapsed_honestly_reorders_its_experts() -> None:
    """Four experts for nearly all tokens, by scores that differ: the order changes, and no alarm is raised."""
    rng = np.random.default_rng(0)
    routes_SLK = healthy(300)
    routes_SLK[:, 1] = np.argsort(rng.random((300, 4)), axis=1)
    routes_SLK[::40, 1, 0] = 9

    assert [] == find_alarms(routes_SLK, SPEC)


def test_few_different_tokens_are_little_evidence() -> None:
    """Sixty tokens that take turns are sixty observations, however long the sequence: no collapse is told from them."""
    routes_SLK = healthy(600)
    routes_SLK[:, 0] = [0, 1, 2, 3]
    routes_SLK[::20, 0, 3] = 4
    few, enough = (np.arange(600, dtype=np.int32) % count for count in (60, 64))

    assert [] == find_alarms(routes_SLK, SPEC, token_ids=few)
    assert [(ErrorKind.ENTROPY_COLLAPSE, None, 1)] == _kinds(find_alarms(routes_SLK, SPEC, token_ids=enough))


def test_a_single_choice_may_be_constant_honestly() -> None:
    """With K = 1 there is no order: a layer that gives one expert is left alone, one of zeros is not."""
    spec = RouteSpec(num_experts=32, top_k=1, layer_ids=(1, 5, 9))
    routes_SLK = healthy(100, spec=spec)
    routes_SLK[:, 1] = 7
    honest = find_alarms(routes_SLK, spec)
    routes_SLK[:, 1] = 0

    assert [] == honest
    assert [(ErrorKind.CONSTANT_LAYER, None, 5)] == _kinds(find_alarms(routes_SLK, spec))
    few = np.arange(100, dtype=np.int32) % 60
    assert [] == find_alarms(routes_SLK, spec, token_ids=few)


def test_a_narrow_choice_is_honest_where_chance_may_give_it() -> None:
    """Nine experts of 18 in use are the lower half once in 48,620 layers; in three layers at once, hardly ever."""
    rows_SK = np.tile(np.asarray([0, 1, 2, 3], dtype=np.int16), (100, 1))
    rows_SK[:, 0] = np.asarray([0, 4, 5, 6, 7, 8])[np.arange(100) % 6]
    one, three = (RouteSpec(num_experts=18, top_k=4, layer_ids=layers) for layers in ((1,), (1, 5, 9)))

    assert [] == find_alarms(rows_SK[:, None], one)
    assert [ErrorKind.UNUSED_EXPERTS] == [
        found.kind for found in find_alarms(np.repeat(rows_SK[:, None], 3, axis=1), three)
    ]


# ----------------------------------------------------------------------------------------------------------------------
# Broken captures
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("run", "alarms"), [(32, 0), (33, 1), (67, 1)])
@pytest.mark.parametrize("start", [0, 50, 133], ids=["at_the_start", "inside", "to_the_end"])
def test_a_stale_buffer_is_an_alarm(run: int, alarms: int, start: int) -> None:
    """Kind of report 2: one row repeated in all layers, longer than honest data does, where tokens differ."""
    routes_SLK = healthy(200)
    routes_SLK[start : start + run] = routes_SLK[start]
    found = find_alarms(routes_SLK, SPEC, token_ids=np.arange(200, dtype=np.int32), first_token=1_000, sample="s")

    assert [(ErrorKind.IDENTICAL_ROWS, 1_000 + start, None)] * alarms == _kinds(found)
    assert ["s"] * alarms == [problem.sample for problem in found]


def test_the_length_of_an_honest_run_is_an_argument() -> None:
    """Kind of report 2, its tiny input: eight generated tokens with the rows of the first, by a stricter bound."""
    routes_SLK = np.repeat(healthy(1), 8, axis=0)

    assert [] == find_alarms(routes_SLK, SPEC)
    assert [(ErrorKind.IDENTICAL_ROWS, 0, None)] == _kinds(find_alarms(routes_SLK, SPEC, longest_run=7))
    assert [] == find_alarms(routes_SLK, SPEC, longest_run=8)


def test_the_longest_of_two_runs_is_named() -> None:
    """Two runs that one layer cannot tell apart: 50 tokens, then 40."""
    routes_SLK = healthy(200)
    routes_SLK[20:110, 0] = routes_SLK[20, 0]
    routes_SLK[20:70, 1:] = routes_SLK[20, 1:]
    routes_SLK[70:110, 1:] = routes_SLK[70, 1:]
    [found] = find_alarms(routes_SLK, SPEC)

    assert (20, True) == (found.token, found.message.endswith("got 50"))


@pytest.mark.parametrize(("rows", "alarms"), [(63, 0), (64, 1), (200, 1)])
def test_a_constant_layer_is_an_alarm(rows: int, alarms: int) -> None:
    """Kind of report 59, with ids that pass as legal: one layer whose kernel is unbound gives one row throughout."""
    routes_SLK = healthy(rows)
    routes_SLK[:, 1] = [3, 2, 1, 0]
    check_routes(routes_SLK, SPEC)

    assert [(ErrorKind.CONSTANT_LAYER, None, 5)] * alarms == _kinds(find_alarms(routes_SLK, SPEC))


def test_constant_rows_hide_behind_no_missing_row() -> None:
    """Tokens without rows are left out; the others are still compared."""
    routes_SLK = healthy(130)
    routes_SLK[:, 2] = [3, 2, 1, 0]
    routes_SLK[::2] = MISSING

    assert [(ErrorKind.CONSTANT_LAYER, None, 9)] == _kinds(find_alarms(routes_SLK, SPEC))


def test_a_collapsed_layer_is_an_alarm() -> None:
    """A layer that hardly uses more experts than one token does, and is not constant, has collapsed."""
    routes_SLK = healthy(200)
    routes_SLK[:, 0] = [0, 1, 2, 3]
    routes_SLK[::20, 0, 3] = 4

    assert [(ErrorKind.ENTROPY_COLLAPSE, None, 1)] == _kinds(find_alarms(routes_SLK, SPEC))


@ways
def test_a_layer_that_varies_between_the_rows_of_the_first_look_is_honest(way: str) -> None:
    """The 16 rows that are looked at first are alike by chance; the others are not."""
    routes_SLK = healthy(151)
    routes_SLK[::10, 1] = routes_SLK[0, 1]
    with asked(way):
        assert [] == find_alarms(routes_SLK, SPEC)


@ways
@pytest.mark.parametrize("experts", [32, 33, (32, 64, 40)], ids=str)
def test_a_router_half_as_wide_is_an_alarm(way: str, experts: int | tuple[int, ...]) -> None:
    """Rows of a model with 16 experts under a spec with twice as many: no layer uses an expert of the upper half."""
    narrow_SLK = healthy(80, spec=RouteSpec(num_experts=16, top_k=4, layer_ids=(1, 5, 9)))
    spec = RouteSpec(num_experts=experts, top_k=4, layer_ids=(1, 5, 9))
    one_SLK = narrow_SLK.copy()
    one_SLK[41, 2, 0] = 31
    with asked(way):
        assert [(ErrorKind.UNUSED_EXPERTS, None, None)] == _kinds(find_alarms(narrow_SLK, spec))
        assert [] == find_alarms(narrow_SLK[:63], spec)
        assert [] == find_alarms(one_SLK, spec)
        wide = RouteSpec(num_experts=128, top_k=4, layer_ids=(1, 5, 9))
        assert len(np.unique(narrow_SLK)) < 32
        assert [] == find_alarms(narrow_SLK, wide)


@ways
@pytest.mark.parametrize("top_k", [2, 8])
def test_a_collapsed_layer_is_found_behind_odd_rows(way: str, top_k: int) -> None:
    """One token in a hundred has another row: found in 99 records of 100, whichever rows the first look is at."""
    spec = RouteSpec(num_experts=64, top_k=top_k, layer_ids=(1, 5))
    rng = np.random.default_rng(0)
    found = 0
    for seed in range(100):
        routes_SLK = healthy(150, spec=spec, seed=seed)
        routes_SLK[rng.random(150) >= 0.01, 1] = np.arange(top_k) + seed % 40
        with asked(way):
            found += bool(find_alarms(routes_SLK, spec))

    assert found >= 99


@pytest.mark.parametrize("top_k", [2, 3])
def test_as_many_effective_experts_as_a_layer_must_show_are_no_collapse(top_k: int) -> None:
    """Nine rows of ten are one row, and the others show few experts or many: the bound is K + K // 2 + 1."""
    spec = RouteSpec(num_experts=8_192, top_k=top_k, layer_ids=(0,))
    found = {}
    for odd in (3, 10, 30, 50, 75, 100):
        rows_SK = np.tile(np.arange(top_k), (1_000, 1))
        others = top_k + np.arange(100 * top_k) % (odd * top_k)
        rows_SK[5:1_000:10] = 8_000 - others.reshape(-1, top_k)
        share = np.unique(rows_SK, return_counts=True)[1] / rows_SK.size
        effective = float(np.exp(-(share * np.log(share)).sum()))
        kinds = {kind for kind, _, _ in _kinds(find_alarms(rows_SK[:, None].astype(np.int16), spec))}
        found[effective] = ErrorKind.ENTROPY_COLLAPSE in kinds

    assert {True, False} == set(found.values())
    least = top_k + top_k // 2 + 1
    assert {effective: effective < least for effective in found} == found


@pytest.mark.parametrize("width", [18, 31, 32, 33, 64])
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_unused_experts_are_told_by_what_chance_allows(width: int, layers: int) -> None:
    """With any number of the lower experts in use, the verdict is the one of the binomials written out."""
    spec = RouteSpec(num_experts=width, top_k=2, layer_ids=tuple(range(layers)))
    found, expected = [], []
    for used in range(2, width // 2 + 3):
        rows_SK = np.stack([np.arange(70), np.arange(70) + 1], axis=1) % used
        rows_SLK = np.repeat(rows_SK[:, None].astype(np.int16), layers, axis=1)
        plain = plain_alarms(rows_SLK, spec, token_ids=list(range(70)), longest_run=32, least_rows=64)
        found.append((ErrorKind.UNUSED_EXPERTS, None, None) in _kinds(find_alarms(rows_SLK, spec)))
        expected.append((ErrorKind.UNUSED_EXPERTS, None, None) in plain)

    assert expected == found


def test_constant_everywhere_is_named_in_every_way() -> None:
    """A whole capture of one legal row: the run, and each layer."""
    routes_SLK = np.repeat(healthy(1, seed=3), 100, axis=0)
    assert routes_SLK.max() >= 16
    expected = [(ErrorKind.IDENTICAL_ROWS, 0, None), *((ErrorKind.CONSTANT_LAYER, None, layer) for layer in (1, 5, 9))]

    assert expected == _kinds(find_alarms(routes_SLK, SPEC))


def test_token_ids_of_another_sequence_are_refused() -> None:
    """Positions that repeat their predecessor are told by the tokens of these very rows."""
    with pytest.raises(UsageError, match="token id for each of 70 rows, got 69"):
        find_alarms(healthy(70), SPEC, token_ids=np.zeros(69, dtype=np.int32))


# ----------------------------------------------------------------------------------------------------------------------
# The first look leaves out work, and nothing else
# ----------------------------------------------------------------------------------------------------------------------


def plain_alarms(
    rows_SLK: NDArray[np.int16], spec: RouteSpec, *, token_ids: list[int], longest_run: int, least_rows: int
) -> set[tuple[ErrorKind, int | None, int | None]]:
    """Kind, token and layer of each alarm, by looking at every row of every layer."""
    kept = [
        token
        for token in range(len(rows_SLK))
        if (rows_SLK[token, :, 0] != MISSING).all() and (token == 0 or token_ids[token] != token_ids[token - 1])
    ]
    choosing = [slot for slot, width in enumerate(spec.experts_per_layer) if width > spec.top_k]
    found: set[tuple[ErrorKind, int | None, int | None]] = set()
    best, run = (0, -1), 0
    for at, token in enumerate(kept):
        same = at > 0 and np.array_equal(rows_SLK[token, choosing], rows_SLK[kept[at - 1], choosing])
        run = run + 1 if same else 1
        if run > best[0]:
            best = (run, kept[at - run + 1])
    if choosing and best[0] > longest_run:
        found.add((ErrorKind.IDENTICAL_ROWS, best[1], None))
    first = [token for at, token in enumerate(kept) if token_ids[token] not in {token_ids[each] for each in kept[:at]}]
    chance = 1.0
    for slot in choosing if len(kept) >= least_rows else ():
        rows_NK, layer, width = rows_SLK[kept, slot], spec.layer_ids[slot], spec.experts_per_layer[slot]
        counts = np.unique(rows_NK, return_counts=True)[1] / rows_NK.size
        effective = float(np.exp(-(counts * np.log(counts)).sum()))
        common = Counter(map(tuple, rows_SLK[first, slot].tolist())).most_common(1)[0][1]
        if len({tuple(row) for row in rows_NK.tolist()}) == 1:
            if spec.top_k > 1 or (rows_NK[0, 0] == 0 and len(first) >= least_rows):
                found.add((ErrorKind.CONSTANT_LAYER, None, layer))
        elif effective < spec.top_k + spec.top_k // 2 + 1 < width and spec.top_k > 1 and len(first) >= least_rows:
            if common >= 0.9 * len(first):
                found.add((ErrorKind.ENTROPY_COLLAPSE, None, layer))
    if choosing and len(kept) >= least_rows:
        for slot, width in enumerate(spec.experts_per_layer):
            used, half = set(rows_SLK[kept, slot].ravel().tolist()), math.ceil(width / 2)
            lower = math.comb(half, len(used)) / math.comb(width, len(used))
            chance *= lower if max(used) < half else np.inf
        if chance < 1e-6 and len(set(rows_SLK[kept].ravel().tolist())) >= max(spec.experts_per_layer) / 4:
            found.add((ErrorKind.UNUSED_EXPERTS, None, None))
    return found


@st.composite
def suspicious(draw: st.DrawFn) -> tuple[NDArray[np.int16], RouteSpec, list[int]]:
    """Rows of which many repeat, in some layers or all, with a few missing; and tokens of which some repeat."""
    spec = draw(specs(max_top_k=3, max_experts=6))
    few_NLK = draw(routes(spec, tokens=st.integers(2, 4)))
    length = draw(st.integers(1, 90))
    pick_SL = draw(st.lists(st.integers(0, len(few_NLK) - 1), min_size=length, max_size=length))
    rows_SLK = few_NLK[np.asarray(pick_SL)].copy()
    for slot in draw(st.sets(st.integers(0, spec.num_layers - 1))):
        rows_SLK[:, slot] = rows_SLK[0, slot]
    start = draw(st.integers(0, length - 1))
    rows_SLK[start : start + draw(st.integers(0, 40))] = rows_SLK[start]
    if draw(st.booleans()):
        rows_SLK[-1] = MISSING
    token_ids = draw(st.lists(st.integers(0, 9), min_size=length, max_size=length))
    return rows_SLK, spec, token_ids


@ways
@given(case=suspicious(), longest_run=st.integers(1, 20), least_rows=st.integers(1, 30))
def test_the_first_look_finds_what_a_full_look_finds(
    way: str, case: tuple[NDArray[np.int16], RouteSpec, list[int]], longest_run: int, least_rows: int
) -> None:
    """Runs and constant layers are exactly those of every row; so is a collapse in sequences of up to 16 rows."""
    rows_SLK, spec, token_ids = case
    with asked(way):
        found = find_alarms(
            rows_SLK,
            spec,
            token_ids=np.asarray(token_ids, dtype=np.int32),
            longest_run=longest_run,
            least_rows=least_rows,
        )
    seen = {(problem.kind, problem.token, problem.layer) for problem in found}
    expected = plain_alarms(rows_SLK, spec, token_ids=token_ids, longest_run=longest_run, least_rows=least_rows)

    assert len(found) == len(seen)
    assert seen <= expected
    assert all(kind is ErrorKind.ENTROPY_COLLAPSE and len(rows_SLK) > 16 for kind, _, _ in expected - seen)


@given(
    seed=st.integers(0, 2**32 - 1),
    liking=st.sampled_from((0.0, 1.0, 2.0, 4.0)),
    tokens=st.integers(1, 200),
    narrow=st.booleans(),
    repeating=st.booleans(),
)
def test_the_compiled_look_changes_no_answer(
    seed: int, liking: float, tokens: int, narrow: bool, repeating: bool
) -> None:
    """Layers of which some collapse, in either form of rows, with tokens that repeat or none: numpy's own findings."""
    rng = np.random.default_rng(seed)
    scores_SLE = liking * rng.gumbel(size=(3, 32)) + rng.gumbel(size=(tokens, 3, 32)) / (1 + liking)
    rows_SLK = np.argsort(-scores_SLE, axis=2)[:, :, :4].astype(np.int16)
    rows_SLK[rng.random(tokens) < 0.1, rng.integers(3)] = MISSING
    stored_SLK = rows_SLK.astype(np.uint8) if narrow else rows_SLK
    token_ids = rng.integers(0, 3, tokens).astype(np.int32) if repeating else None
    found = {}
    for way in WAYS:
        with asked(way):
            found[way] = find_alarms(stored_SLK, SPEC, token_ids=token_ids, longest_run=4, least_rows=20)

    assert found["numpy"] == found["kernels"]


def test_the_compiled_look_sees_enough_in_healthy_rows() -> None:
    """It is what answers for them; a layer that shows little, and a pair of equal rows, are left to numpy."""
    rows_SLK = healthy(400)
    asking = {"token_ids": np.arange(400, dtype=np.int32), "layer": 0, "width": 32, "step": 16, "least_rows": 64}
    few_SLK, twice_SLK = rows_SLK.copy(), rows_SLK.copy()
    few_SLK[:, 1] = np.arange(4)
    twice_SLK[32, 0] = twice_SLK[16, 0]
    looks = [
        shows_enough(each, absent=np.empty(0, dtype=np.int64), looks=16, **asking)  # type: ignore[arg-type]
        for each in (rows_SLK, few_SLK, twice_SLK)
    ]

    assert [True, False, False] == looks


def test_a_collapse_of_a_long_sequence_is_found() -> None:
    """The first look is at 16 rows among thousands, and finds the one layer that collapsed."""
    rows_SLK = healthy(3_000)
    rows_SLK[:, 1] = np.arange(4)
    rows_SLK[7, 1] = [9, 10, 11, 12]
    rows_SLK[2_001, 1] = [20, 21, 22, 23]
    assert [(ErrorKind.ENTROPY_COLLAPSE, 5)] == [(alarm.kind, alarm.layer) for alarm in find_alarms(rows_SLK, SPEC)]
