"""Differences: what is compared is the same token in the same layer, and nothing that differs goes unseen."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.errors import DataError, ErrorKind, SpecError, UsageError
from routeplane.inspect.compare import MAX_NAMED, RouteDiff, compare, compare_records
from routeplane.record.aligned import AlignedColumn
from routeplane.record.record import RouteRecord
from routeplane.record.spans import Capture
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.record.validate import WeightsMeaning
from routeplane.testing import strategies
from routeplane.testing.builders import watermarked_record, watermarked_spec

SPEC = watermarked_spec()


def changed(record: RouteRecord, places: list[tuple[int, int]], *, token_at: int | None = None) -> RouteRecord:
    """The record with one expert of each ``(token, slot of layer)`` exchanged, and maybe another token."""
    routes = record.routes.copy()
    for token, slot in places:
        row = set(routes[token, slot].tolist())
        routes[token, slot, 0] = next(
            expert for expert in range(record.spec.experts_per_layer[slot]) if expert not in row
        )
    tokens = record.token_ids.copy()
    if token_at is not None:
        tokens[token_at] += 1
    return replace(record, routes=routes, token_ids=tokens, checksum=None)


def records(count: int, *, num_tokens: int = 9) -> list[RouteRecord]:
    """Watermarked records."""
    return [watermarked_record(index, num_tokens=num_tokens, spec=SPEC) for index in range(count)]


# ----------------------------------------------------------------------------------------------------------------------
# Against comparing row by row
# ----------------------------------------------------------------------------------------------------------------------


@st.composite
def pairs(draw: st.DrawFn) -> tuple[RouteRecord, RouteRecord]:
    """Two records of one spec, of their own or of common tokens, rows independent."""
    spec = draw(strategies.specs(max_experts=8, max_top_k=3))
    left, right = draw(strategies.records(spec=spec)), draw(strategies.records(spec=spec))
    shortest = min(left.num_tokens, right.num_tokens)
    if draw(st.booleans()):
        tokens = right.token_ids.copy()
        tokens[:shortest] = left.token_ids[:shortest]
        right = replace(right, token_ids=tokens, checksum=None)
    return left, replace(right, sample_id=left.sample_id, attempt=left.attempt, segment=left.segment, checksum=None)


@given(pair=pairs())
def test_counts_are_those_of_comparing_row_by_row(pair: tuple[RouteRecord, RouteRecord]) -> None:
    """Up to the first token that differs, rows that both have, as sets."""
    left, right = pair
    stop = 0
    while stop < min(left.num_tokens, right.num_tokens) and left.token_ids[stop] == right.token_ids[stop]:
        stop += 1
    flips, compared, one_sided, shared = [], 0, 0, 0
    for token in range(max(left.routes_start, right.routes_start), stop):
        rows = [record.routes[token - record.routes_start].tolist() for record in pair]
        for slot, (mine, theirs) in enumerate(zip(*rows, strict=True)):
            if mine[0] >= 0 and theirs[0] >= 0:
                compared += 1
                shared += len(set(mine) & set(theirs))
                if set(mine) != set(theirs):
                    flips.append((token, left.spec.layer_ids[slot]))
            else:
                one_sided += (mine[0] >= 0) != (theirs[0] >= 0)
    found = compare_records(left, right)
    assert compared == found.compared_L.sum() == found.positions_P2[:, 0].sum()
    assert len(flips) == compared - found.equal_L.sum() == found.positions_P2[:, 1].sum()
    assert (one_sided, shared) == (found.one_sided_rows, found.shared_L.sum())
    assert 2 * left.spec.top_k * compared - shared == found.union_L.sum()
    mismatch = None if stop == left.num_tokens == right.num_tokens else stop
    if not flips and not one_sided and mismatch is None:
        assert found.same
    else:
        (worst,) = found.worst
        assert (len(flips), mismatch) == (worst.flipped, worst.token_mismatch)
        assert (flips[0] if flips else (None, None)) == (worst.token, worst.layer)


@given(cut=st.integers(0, 4), order=st.permutations(range(4)))
def test_neither_order_nor_cutting_shows(cut: int, order: list[int]) -> None:
    """Streams in different orders, parts that are merged, an archive that is looked up: the same numbers."""
    left = records(4)
    right = [changed(left[0], [(2, 1)]), left[1], changed(left[2], [(0, 0), (3, 2)]), left[3]]
    shuffled = [right[index] for index in order]
    whole = compare(left, right, specs=(SPEC, SPEC)).to_dict()
    assert whole == compare(left, shuffled, specs=(SPEC, SPEC)).to_dict()
    assert whole == compare(left, {record.key: record for record in shuffled}, specs=(SPEC, SPEC)).to_dict()
    parts = [compare(left[part], right[part], specs=(SPEC, SPEC)) for part in (slice(cut), slice(cut, None))]
    assert whole == pickle.loads(pickle.dumps(parts[0])).merge(parts[1]).to_dict()


# ----------------------------------------------------------------------------------------------------------------------
# What is found
# ----------------------------------------------------------------------------------------------------------------------


def test_the_order_within_a_row_is_not_compared() -> None:
    """Rows are sets."""
    record = records(1)[0]
    turned = replace(record, routes=record.routes[:, :, ::-1].copy(), checksum=None)
    assert compare_records(record, turned).same


def test_flips_behind_an_update_are_kept_apart() -> None:
    """Rows that new weights computed over a cache of old ones: their flips are counted, and not as numerics."""
    [record] = records(1)
    captures = [
        Capture(start=start, stop=stop, call="call-0", weights_version=version, state="captured")
        for start, stop, version in ((0, 5, 1), (5, 8, 2))
    ]
    updated = replace(record, captures=(*captures, record.captures[-1]), checksum=None)
    for sides in (
        (updated, changed(record, [(1, 0), (6, 0), (7, 0)])),
        (changed(record, [(1, 0), (6, 0), (7, 0)]), updated),
    ):
        found = compare_records(*sides)
        layers = len(found.layer_ids)
        assert (3 * layers, 2) == (found.stale_kv_rows, found.stale_kv_flipped)
        assert 1 / (5 * layers) == pytest.approx(found.fresh_flipped_share)
        assert 3 / (8 * layers) == pytest.approx(found.flipped_share)
    assert 0 == compare_records(record, record).stale_kv_rows


def test_the_first_row_that_differs_is_named() -> None:
    """By token, then by layer id."""
    record = records(1)[0]
    found = compare_records(record, changed(record, [(5, 0), (3, 2), (3, 1)]))
    (worst,) = found.worst
    assert (3, 3, SPEC.layer_ids[1]) == (worst.flipped, worst.token, worst.layer)
    assert 3 / 24 == found.flipped_share


def test_rows_after_another_token_are_not_compared() -> None:
    """From there on the sequences are others; the sample counts as different."""
    record = records(1)[0]
    found = compare_records(record, changed(record, [(6, 0)], token_at=4))
    assert (4 * 3, 0.0) == (found.compared_L.sum(), found.flipped_share)
    assert 4 == found.worst[0].token_mismatch
    assert not found.same


def test_samples_of_one_side_are_counted_and_named() -> None:
    """On either side, with at most MAX_NAMED names."""
    everything = records(MAX_NAMED + 4, num_tokens=2)
    for lookup in (False, True):
        right = everything[:1]
        found = compare(
            everything[1:], {record.key: record for record in right} if lookup else right, specs=(SPEC, SPEC)
        )
        assert (MAX_NAMED + 3, 1) == (found.left_only, found.right_only)
        assert MAX_NAMED == len(found.left_only_keys)
        assert (everything[0].key,) == found.right_only_keys
        assert not found.same


def test_layers_of_one_side_are_named_and_the_common_ones_compared() -> None:
    """By layer id, whatever slot they stand in."""
    record = records(1)[0]
    found = compare_records(record.select([5, 2]) if SPEC.layer_ids == (5, 2) else record.select([2, 5]), record)
    assert ((2, 5), (), (1,)) == (found.layer_ids, found.layers_left_only, found.layers_right_only)
    assert 1.0 == found.layers()[0]["equal_share"]
    assert not found.same


def test_a_row_that_one_side_misses_is_one_sided_not_flipped() -> None:
    """A MISSING row is not compared."""
    left, right = (watermarked_record(0, num_tokens=9, spec=SPEC, missing=missing) for missing in ((), (2, (4, 5))))
    found = compare_records(left, right)
    assert (4, 0.0) == (found.one_sided_rows, found.flipped_share)
    assert not found.same


# ----------------------------------------------------------------------------------------------------------------------
# Refusals
# ----------------------------------------------------------------------------------------------------------------------


def test_sides_without_a_common_layer_or_of_other_widths_are_refused() -> None:
    """Ids of another router say nothing about this one."""
    with pytest.raises(SpecError, match="layer that both have"):
        RouteDiff.empty(SPEC, watermarked_spec(layers=(9,)))
    with pytest.raises(SpecError):
        RouteDiff.empty(SPEC, RouteSpec(num_experts=16, top_k=4, layer_ids=SPEC.layer_ids))


def test_too_many_samples_without_partner_end_with_advice() -> None:
    """Memory stays bounded; the error says what to do."""
    everything = records(4)
    with pytest.raises(UsageError, match="archive") as caught:
        compare(everything, everything[::-1], specs=(SPEC, SPEC), max_held_bytes=everything[0].routes.nbytes)
    assert ErrorKind.TOO_LONG == caught.value.kind


def test_a_key_that_comes_twice_is_refused() -> None:
    """Two records of one key are ambiguous."""
    one = records(1)[0]
    with pytest.raises(DataError) as caught:
        compare([one, one], [], specs=(SPEC, SPEC))
    assert ErrorKind.DUPLICATE_KEY == caught.value.kind


def test_differences_of_other_layers_do_not_merge() -> None:
    """Tables are by layer."""
    other = watermarked_spec(layers=(1,))
    with pytest.raises(UsageError):
        RouteDiff.empty(SPEC, SPEC).merge(RouteDiff.empty(other, other))


def test_nothing_compared_is_the_same_and_has_no_share() -> None:
    """No division by nothing."""
    nothing = compare([], [], specs=(SPEC, SPEC))
    assert (True, 0.0) == (nothing.same, nothing.flipped_share)
    assert 0.0 == nothing.scalars()["routeplane/diff_jaccard"]
    np.testing.assert_array_equal(0, nothing.compared_L)


@pytest.mark.parametrize("side", [0, 1], ids=["left", "right"])
def test_a_key_that_comes_again_is_refused(side: int) -> None:
    """Also when its partner was compared before: counted again it would be a difference, or count twice."""
    once, twice = records(2), [*records(2), records(1)[0]]
    sides = (twice, once) if side == 0 else (once, twice)
    with pytest.raises(DataError, match="twice") as caught:
        compare(*sides, specs=(SPEC, SPEC))
    assert caught.value.kind == ErrorKind.DUPLICATE_KEY
    with pytest.raises(DataError, match="twice"):
        compare(twice, {record.key: record for record in once}, specs=(SPEC, SPEC))


@pytest.mark.parametrize("side", [0, 1], ids=["left", "right"])
def test_what_comes_after_the_other_side_ended_is_not_held(side: int) -> None:
    """Nothing can match it any more, so no bound is passed."""
    few, many = records(1), records(5)
    limit = few[0].routes.nbytes
    sides = (many, few) if side == 0 else (few, many)
    found = compare(*sides, specs=(SPEC, SPEC), max_held_bytes=limit)
    assert ((4, 0) if side == 0 else (0, 4)) == (found.left_only, found.right_only)
    assert 1 == found.equal_samples


PROBABILITIES = WeightsMeaning(score="softmax", renormalised=True, scaling="none", multiplied="after", dtype="float32")


def weighted(record: RouteRecord, weights_SLK: Any, **changes: Any) -> RouteRecord:
    """The record with routing weights, NaN where it has no row."""
    values = np.where(record.routes == MISSING, np.nan, weights_SLK).astype(np.float32)
    column = AlignedColumn.of(values, aligned="fed", axes=("layers", "topk"))
    changes.setdefault("attributes", {"weights_meaning": PROBABILITIES.to_text()})
    return replace(record, columns={"route_weights": column}, checksum=None, **changes)


def test_weights_are_compared_by_expert() -> None:
    """The same weights in another order of the row's experts are equal; one expert's other weight is counted."""
    record = watermarked_record(0, num_tokens=6, spec=SPEC)
    top_k = SPEC.top_k
    weights_SLK = np.random.default_rng(0).dirichlet(np.ones(top_k), size=record.routes.shape[:2])
    left = weighted(record, weights_SLK)
    turned = weighted(replace(record, routes=record.routes[..., ::-1], checksum=None), weights_SLK[..., ::-1])
    rows = int((record.routes[..., 0] != MISSING).sum())

    found = compare_records(left, turned)
    assert (True, rows, rows, 0.0) == (found.same, found.weighted_rows, found.weighted_equal, found.weights_apart)
    unturned = compare_records(left, weighted(record, weights_SLK[..., ::-1]))
    assert unturned.same
    assert unturned.weighted_equal < unturned.weighted_rows == rows
    moved = weights_SLK.copy()
    moved[1, 0, :2] += (-0.5 * moved[1, 0, 0], 0.5 * moved[1, 0, 0])
    one = compare_records(left, weighted(record, moved))
    assert (rows, rows - 1) == (one.weighted_rows, one.weighted_equal)
    assert one.weights_apart == pytest.approx(0.5 * weights_SLK[1, 0, 0], rel=1e-5)
    assert 2 * rows == one.merge(found).weighted_rows
    assert one.weights_apart == one.merge(found).weights_apart


def test_weights_of_another_meaning_are_not_compared() -> None:
    """Numbers that mean other things have no difference."""
    record = watermarked_record(0, num_tokens=6, spec=SPEC)
    weights_SLK = np.full(record.routes.shape, 1 / SPEC.top_k)
    other = {"weights_meaning": replace(PROBABILITIES, score="sigmoid").to_text()}
    for right in (weighted(record, weights_SLK, attributes=other), record):
        assert 0 == compare_records(weighted(record, weights_SLK), right).weighted_rows
