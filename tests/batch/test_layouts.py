"""Filler for padding: distinct, spread over experts and ranks from the first row on.

Axes: P padding rows, L layers, K top-k slots, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.batch.layouts import balanced_rows
from routeplane.errors import ErrorKind, UsageError
from routeplane.record.spec import RouteSpec
from routeplane.record.validate import check_routes

if TYPE_CHECKING:
    from collections.abc import Callable

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
