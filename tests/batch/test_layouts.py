"""Rows that a batch is filled with: those of other arrays, copied and checked in one pass; and balanced filler.

Axes: R rows, D layers of another array, P padding rows, L layers, K top-k slots, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.batch.layouts import balanced_rows, take_rows
from routeplane.errors import DataError, ErrorKind, UsageError
from routeplane.record.spec import RouteSpec
from routeplane.record.validate import all_legal, check_routes

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

FIELD = RouteSpec(num_experts=128, top_k=8, layer_ids=(0, 1, 2))


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, RouteSpec, int]:
    """Rows, a geometry whose layers may differ in width, and ranks that divide every width."""
    ranks = draw(st.integers(1, 8))
    layers = sorted(draw(st.sets(st.integers(0, 60), min_size=1, max_size=3)))
    widths = [ranks * draw(st.integers(1, 12)) for _ in layers]
    top_k = draw(st.integers(1, min(8, *widths)))
    spec = RouteSpec(num_experts=tuple(widths), top_k=top_k, layer_ids=tuple(layers))
    return draw(st.integers(0, 40)), spec, ranks


@given(case=cases())
def test_filler_is_legal_and_even(case: tuple[int, RouteSpec, int]) -> None:
    """Rows keep the row rule; experts and ranks of a layer differ by at most one assignment."""
    count, spec, ranks = case
    rows_PLK = balanced_rows(count, spec, expert_parallel=ranks)

    check_routes(rows_PLK, spec)
    assert (count, *spec.row_shape) == rows_PLK.shape
    for slot, width in enumerate(spec.experts_per_layer):
        by_expert = np.bincount(rows_PLK[:, slot].reshape(-1), minlength=width)
        by_rank = by_expert.reshape(ranks, -1).sum(axis=1)
        assert by_expert.max() - by_expert.min() <= 1
        assert by_rank.max() - by_rank.min() <= 1


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_a_few_rows_hit_every_rank_alike(count: int) -> None:
    """128 experts on 8 ranks, top-8: each row gives each rank one assignment, so 4 rows give none more than 4."""
    rows_PLK = balanced_rows(count, FIELD, expert_parallel=8)

    for slot in range(3):
        assert [count] * 8 == np.bincount(rows_PLK[:, slot].reshape(-1) // 16, minlength=8).tolist()


def test_ids_above_one_byte_are_written_whole() -> None:
    """512 experts, all of them hit by 64 rows of 8: no id wraps into a narrower type."""
    spec = RouteSpec(num_experts=512, top_k=8, layer_ids=(0,))

    assert list(range(512)) == sorted(balanced_rows(64, spec, expert_parallel=8).reshape(-1).tolist())


def test_layers_begin_at_different_experts_and_a_stage_fills_as_the_whole_does() -> None:
    """No expert of a rank is hit first in every layer; selecting layers selects their filler."""
    whole = balanced_rows(3, FIELD, expert_parallel=8)

    assert 3 == len({tuple(row) for row in whole[0].tolist()})
    assert whole[:, 1:].tolist() == balanced_rows(3, FIELD.select([1, 2]), expert_parallel=8).tolist()


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "ranks": (lambda: balanced_rows(1, FIELD, expert_parallel=3), "expert_parallel=3 divides, got 128 @ layer 0"),
    "zero": (lambda: balanced_rows(1, FIELD, expert_parallel=0), "positive"),
    "bool": (lambda: balanced_rows(1, FIELD, expert_parallel=True), "positive"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_filler_that_cannot_be_even_is_refused(call: Callable[[], object], message: str) -> None:
    """Ranks own equally many experts, or nothing is written."""
    with pytest.raises(UsageError, match=message) as caught:
        call()

    assert ErrorKind.ARGUMENT == caught.value.kind


# ----------------------------------------------------------------------------------------------------------------------
# Rows of other arrays
# ----------------------------------------------------------------------------------------------------------------------

DEPTH = 26
TYPES = (np.int16, np.int32, np.int64, np.uint8, np.uint16)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layers", [tuple(range(DEPTH)), tuple(range(3, DEPTH)), (1, 2, 5, 25)])
@pytest.mark.parametrize("rows", [0, 5, 4_000])
def test_rows_are_taken_as_a_plain_copy_and_check_would(rows: int, layers: tuple[int, ...], dtype: type) -> None:
    """Any type, layers, gaps and MISSING rows: the copy, what is absent and the verdict are those of numpy alone.

    4,000 rows are several blocks, and more than the compiled check asks for.
    """
    spec = RouteSpec(num_experts=128, top_k=8, layer_ids=layers)
    rng = np.random.default_rng(rows + len(layers))
    base = rng.permuted(np.tile(np.arange(128), (64, 1)), axis=1)[:, :8]
    for fault in (None, "duplicate", "large"):
        given_RDK: NDArray[Any] = base[rng.integers(0, 64, (rows, DEPTH))].astype(dtype)
        kept = rng.random(rows) < rng.choice([0.5, 0.999])
        kept[rows // 4 : rows // 2] = False  # a gap that is too wide to be copied
        if np.issubdtype(dtype, np.signedinteger):
            given_RDK[rng.random(rows) < 0.01] = -1
            given_RDK[rng.random(rows) < 0.01, layers[0]] = -1
        given_RDK[~kept] = 99  # illegal, and nothing that counts
        if fault is not None and kept.any():
            given_RDK[rng.choice(np.flatnonzero(kept)), layers[-1], :2] = 7 if fault == "duplicate" else 130
        out = np.empty((rows, *spec.row_shape), dtype=np.int16)
        first, last = layers[0], layers[-1]
        slots = slice(first, last + 1) if last + 1 - first == len(layers) else list(layers)
        absent = take_rows(given_RDK, spec, out=out, slots=slots, kept=kept)

        plain = given_RDK[:, list(layers)].astype(np.int16)
        plain[~kept] = -1
        assert np.array_equal(plain, out)
        expected = np.flatnonzero((plain[:, :, 0] == -1).any(axis=1)).tolist() if all_legal(plain, spec) else None
        assert expected == (None if absent is None else absent.tolist())


def test_an_id_that_int16_does_not_hold_is_refused_where_it_counts() -> None:
    """A large id in a row that is taken is an error, and in a gap nothing."""
    spec = RouteSpec(num_experts=8, top_k=1, layer_ids=(0,))
    rows_R11 = np.asarray([1, 65_535, 2], dtype=np.uint16).reshape(3, 1, 1)
    out = np.empty((3, 1, 1), dtype=np.int16)

    with pytest.raises(DataError, match="ids that int16 holds, got 1 to 65535") as caught:
        take_rows(rows_R11, spec, out=out)
    absent = take_rows(rows_R11, spec, out=out, kept=np.asarray([True, False, True]))

    assert ErrorKind.VALUE_RANGE == caught.value.kind
    assert ([1, -1, 2], [1]) == (out.reshape(-1).tolist(), [] if absent is None else absent.tolist())
