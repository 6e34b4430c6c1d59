"""The rule alone: what a forced selection returns, on plain tensors, against a restatement row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routeplane.capture.selection import Gate
from routeplane.errors import ErrorKind, ReplayError
from routeplane.replay.gate import ForcedTopK, GateRows

GATE = Gate(name="model.layers.3.mlp.gate", layer_id=3, num_experts=6, top_k=2)


def forced(gate: Gate, rows: GateRows | torch.Tensor, select: Callable[[], Any]) -> Any:
    """What ``select`` returns while the gate is forced; it must have selected once."""
    mode = ForcedTopK(rows if isinstance(rows, GateRows) else GateRows(gate, rows))
    with mode:
        result = select()
    mode.require_hit()
    return result


@dataclass(frozen=True, kw_only=True)
class Case:
    """Scores ``[N, E]`` (multiples of 1/4, so ties abound), and routes ``[N, K]`` of legal and MISSING rows."""

    gate: Gate
    scores_NE: torch.Tensor
    routes_NK: torch.Tensor


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any small geometry, any share of MISSING rows, N = 0 included."""
    num_experts = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, num_experts))
    num_rows = draw(st.integers(0, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    routes_NK = np.array([rng.permutation(num_experts)[:top_k] for _ in range(num_rows)]).reshape(num_rows, top_k)
    routes_NK[draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows))] = -1
    return Case(
        gate=Gate(name="gate", layer_id=0, num_experts=num_experts, top_k=top_k),
        scores_NE=torch.from_numpy(rng.integers(-4, 5, (num_rows, num_experts)) / 4.0),
        routes_NK=torch.from_numpy(routes_NK.astype(np.int16)),
    )


# ---- the rule -------------------------------------------------------------------------------------------------------


@given(case=cases())
def test_each_row_is_the_recorded_one_or_where_missing_the_live_one(case: Case) -> None:
    """Ids, values, counts and the gradient of the scores equal a restatement with Python lists and sets."""
    scores_NE = case.scores_NE.clone().requires_grad_()
    live_NK = torch.topk(case.scores_NE, case.gate.top_k, dim=-1).indices.tolist()
    rows = GateRows(case.gate, case.routes_NK)
    values, indices = forced(case.gate, rows, lambda: torch.topk(scores_NE, case.gate.top_k, dim=-1))

    expected = [live if route[0] == -1 else route for route, live in zip(case.routes_NK.tolist(), live_NK, strict=True)]
    assert expected == indices.tolist()
    assert torch.int64 == indices.dtype
    assert [
        [row[i] for i in ids] for row, ids in zip(case.scores_NE.tolist(), expected, strict=True)
    ] == values.tolist()

    assert rows.tally is not None
    flipped = sum(set(ids) != set(live) for ids, live in zip(expected, live_NK, strict=True))
    assert [sum(route[0] != -1 for route in case.routes_NK.tolist()), flipped] == rows.tally.tolist()

    weights_NK = torch.arange(1.0, values.numel() + 1, dtype=values.dtype).reshape(values.shape)
    (values * weights_NK).sum().backward()
    gradient = [[0.0] * case.gate.num_experts for _ in expected]
    for n, ids in enumerate(expected):
        for k, expert in enumerate(ids):
            gradient[n][expert] = float(weights_NK[n, k])
    assert scores_NE.grad is not None
    assert gradient == scores_NE.grad.tolist()


@pytest.mark.parametrize(
    "select",
    [
        lambda scores: torch.topk(scores, 2),
        lambda scores: torch.topk(scores, k=2, dim=1, sorted=False),
        lambda scores: torch.topk(input=scores, k=2, dim=-1, largest=True),
        lambda scores: scores.topk(2),
        lambda scores: scores.topk(k=2, dim=-1),
    ],
)
def test_every_spelling_of_the_selection_is_forced(select: Callable[[torch.Tensor], Any]) -> None:
    """Function or method, positional or keyword: all are the selection, and return fields as topk does."""
    scores_NE = torch.rand(3, 6)
    found = forced(GATE, torch.tensor([[5, 0], [1, 4], [2, 3]], dtype=torch.int16), lambda: select(scores_NE))
    assert [[5, 0], [1, 4], [2, 3]] == found.indices.tolist()
    assert found.values is found[0]
    assert found.indices is found[1]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: torch.rand(3, 2, 6).topk(2, dim=-1), id="group scores [N, G, E/G]"),
        pytest.param(lambda: torch.rand(3, 4).topk(2, dim=-1), id="groups [N, G]"),
        pytest.param(lambda: torch.rand(3, 6).topk(3, dim=-1), id="another k"),
        pytest.param(lambda: torch.rand(3, 6).topk(2, dim=0), id="over tokens"),
        pytest.param(lambda: torch.rand(3, 6).topk(2, largest=False), id="the smallest"),
        pytest.param(lambda: torch.rand(6).topk(2), id="one dimension"),
    ],
)
def test_other_selections_pass_through(other: Callable[[], Any]) -> None:
    """A topk of another shape, k, dimension or direction answers as without replay, and does not count as a hit."""
    torch.manual_seed(1)
    expected = other()
    mode = ForcedTopK(GateRows(GATE, torch.tensor([[5, 0]] * 3, dtype=torch.int16)))
    torch.manual_seed(1)
    with mode:
        found = other()
    assert torch.equal(expected.values, found.values)
    assert torch.equal(expected.indices, found.indices)
    with pytest.raises(ReplayError, match=r"got none.*model\.layers\.3\.mlp\.gate \(layer 3\)") as caught:
        mode.require_hit()
    assert ErrorKind.NO_SEAM == caught.value.kind


# ---- what is remembered ---------------------------------------------------------------------------------------------


def test_a_missing_row_keeps_the_choice_of_the_first_firing() -> None:
    """Later firings of the same rows repeat it, whatever the scores have become; the counts stay those of the first."""
    rows = GateRows(GATE, torch.tensor([[-1, -1], [4, 5]], dtype=torch.int16))
    first_NE = torch.tensor([[9.0, 8, 1, 1, 1, 1]] * 2)
    again_NE = -first_NE
    assert [[0, 1], [4, 5]] == forced(GATE, rows, lambda: first_NE.topk(2)).indices.tolist()
    values, indices = forced(GATE, rows, lambda: again_NE.topk(2))
    assert [[0, 1], [4, 5]] == indices.tolist()
    assert [[-9.0, -8.0], [-1.0, -1.0]] == values.tolist()
    assert rows.tally is not None
    assert [1, 1] == rows.tally.tolist()


def test_a_first_firing_under_inference_mode_does_not_spoil_later_gradients() -> None:
    """Rows resolved while computing old log-probabilities serve a training forward of the same binding."""
    rows = GateRows(GATE, torch.tensor([[-1, -1], [4, 5]], dtype=torch.int16))
    scores_NE = torch.rand(2, 6).requires_grad_()
    with torch.inference_mode():
        first = forced(GATE, rows, lambda: (scores_NE + 0).topk(2)).indices.tolist()
    values, indices = forced(GATE, rows, lambda: scores_NE.topk(2))
    values.sum().backward()
    assert first == indices.tolist()
    assert scores_NE.grad is not None
    assert 4.0 == scores_NE.grad.sum().item()


def test_the_batch_keeps_its_rows() -> None:
    """Neither resolving nor what a gate does with its weights writes into the int16 rows."""
    routes_NK = torch.tensor([[-1, -1], [4, 5]], dtype=torch.int16)
    values, indices = forced(GATE, routes_NK, lambda: torch.rand(2, 6).topk(2))
    values /= 2
    indices += 1
    assert [[-1, -1], [4, 5]] == routes_NK.tolist()


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_a_second_selection_in_one_call_is_refused() -> None:
    """Which of two the recorded ids belong to is not for replay to guess."""
    with pytest.raises(ReplayError, match=r"second one @ gate model\.layers\.3") as caught:
        forced(
            GATE,
            torch.tensor([[1, 2]], dtype=torch.int16),
            lambda: (torch.rand(1, 6).topk(2), torch.rand(1, 6).topk(2)),
        )
    assert ErrorKind.GATE_FIRED == caught.value.kind


def test_another_number_of_rows_is_refused_before_anything_is_selected() -> None:
    """Half a batch of rows must not be stretched over the tokens, nor a longer one cut."""
    rows = GateRows(GATE, torch.tensor([[1, 2]] * 3, dtype=torch.int16))
    for count in (2, 4):
        with pytest.raises(ReplayError, match=rf"expected 3 token rows.*got {count} @ gate") as caught:
            forced(GATE, rows, lambda count=count: torch.rand(count, 6).topk(2))  # type: ignore[misc]
        assert ErrorKind.ROW_COUNT == caught.value.kind
    assert rows.tally is None
