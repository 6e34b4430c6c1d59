"""The contract of replay, on tiny Megatron-Core models of every way of scoring.

Axes: N token rows in the batch's order, E experts, K top-k slots.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

from routeplane.replay import megatron as gates
from routeplane.testing.contracts.replay_contract import Firing, ReplayContract
from tests.replay.megatron.tiny_megatron import (
    BATCH,
    FAMILIES,
    HIDDEN,
    WIDTH,
    Family,
    Inputs,
    TokenBatch,
    build,
    inputs_of,
    recorded,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from routeplane.record.spec import RouteSpec
    from routeplane.replay.handle import ReplayBatch, ReplayHandle
    from routeplane.testing.contracts.replay_contract import RowsBatch

pytestmark = pytest.mark.megatron

BY_NAME = {family.name: family for family in FAMILIES}

RECOMPUTE: dict[str, dict[str, Any]] = {
    "full, every layer": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "full, two layers": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


class MegatronContract(ReplayContract):
    """The hooks for a family of ``tiny_megatron``."""

    adapter = "megatron"
    recompute_variants = tuple(RECOMPUTE)
    num_rows = BATCH * WIDTH

    @property
    def tiny(self) -> Family:
        """The family."""
        return BY_NAME[self.family]

    @property
    def spec(self) -> RouteSpec:
        """Written down by hand."""
        return self.tiny.spec

    def make_model(self, *, seed: int = 0) -> Any:
        """Random weights, single precision."""
        return build(self.tiny.options, seed=seed)

    def copy_model(self, model: nn.Module) -> nn.Module:
        """Process groups are shared, as no copy of one exists; what a dispatcher kept of a forward loses its graph."""
        shared = {
            torch.distributed.ProcessGroup: lambda group, memo: group,
            torch.Tensor: lambda kept, memo: kept.detach(),
        }
        with mock.patch.dict(copy._deepcopy_dispatch, shared):  # type: ignore[attr-defined]
            return copy.deepcopy(model)

    def make_difference_model(self) -> Any:
        """Without the load-balancing loss, which is left out of the loss."""
        return build({**self.tiny.options, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0})

    def make_inputs(self, *, seed: int) -> Inputs:
        """int64 ``[B, S]``."""
        return inputs_of(seed)

    def forward(self, model: nn.Module, inputs: Inputs) -> torch.Tensor:
        """The logits ``[B, S, V]``."""
        found: torch.Tensor = model(*inputs.arguments())
        return found

    def attach(self, model: nn.Module, spec: RouteSpec, **options: Any) -> ReplayHandle:
        """The adapter's."""
        return gates.attach(model, spec, **options)

    def make_batch(self, rows: RowsBatch, *, inputs: Inputs) -> ReplayBatch:
        """Rows with their tokens, whose shape says the order."""
        return TokenBatch(rows=rows, token_ids=inputs.tokens)

    def gate_names(self, model: nn.Module) -> Mapping[int, str]:
        """Module paths."""
        return {gate.layer_id: gate.name for gate, _ in gates.find_gates(model)}

    def router(self, model: nn.Module, layer_id: int) -> Any:
        """The router of a layer."""
        return {gate.layer_id: router for gate, router in gates.find_gates(model)}[layer_id]

    def gate_weight(self, model: nn.Module, layer_id: int) -> nn.Parameter:
        """``[E, H]``."""
        weight: nn.Parameter = self.router(model, layer_id).weight
        return weight

    def observe(self, model: nn.Module) -> AbstractContextManager[Mapping[int, list[Firing]]]:
        """Read from what routers return."""
        return recorded(model)

    def expected_weights(self, firing: Firing, ids_NK: torch.Tensor) -> torch.Tensor:
        """The family's rule."""
        return self.tiny.weights(firing.logits_NE, ids_NK)

    def live_ids(self, model: nn.Module, *, layer_id: int, logits_NE: torch.Tensor) -> torch.Tensor:
        """Of logits, or of biased sigmoids within the two best of four groups (by their best expert)."""
        if not self.tiny.grouped:
            return logits_NE.topk(self.spec.top_k).indices
        choice_NE = logits_NE.sigmoid() + self.router(model, layer_id).expert_bias
        groups_NGM = choice_NE.view(len(choice_NE), 4, -1)
        # the sum of a group's K / group_topk best
        best_N2 = groups_NGM.topk(self.spec.top_k // 2, dim=-1).values.sum(dim=-1).topk(2).indices
        outside_NG = torch.ones(groups_NGM.shape[:2], dtype=torch.bool).scatter(1, best_N2, value=False)
        masked_NE: torch.Tensor = groups_NGM.masked_fill(outside_NG[..., None], -torch.inf).flatten(1)
        return masked_NE.topk(self.spec.top_k).indices

    def skip_gate(self, model: Any, layer_id: int) -> None:
        """The MoE layer answers with its input, and no bias."""
        model.decoder.layers[layer_id].mlp.forward = lambda hidden, *args, **kwargs: (hidden, None)

    def fire_gate(self, model: nn.Module, layer_id: int, *, num_rows: int) -> None:
        """On zeros ``[S, B, H]``."""
        self.router(model, layer_id)(torch.zeros(num_rows, 1, HIDDEN))

    def enable_recompute(self, model: Any, variant: str) -> None:
        """The model reads its configuration in each forward, but for what its MoE layers took from it."""
        for name, value in RECOMPUTE[variant].items():
            setattr(model.config, name, value)
        for layer in model.decoder.layers:
            if hasattr(layer.mlp, "moe_layer_recompute"):
                layer.mlp.moe_layer_recompute = variant == "selective"

    def aux_loss(self, model: nn.Module, inputs: Inputs) -> torch.Tensor | None:
        """The sum over layers, as Megatron logs it."""
        if self.tiny.options["moe_router_load_balancing_type"] == "none":
            return None
        tracker = get_moe_layer_wise_logging_tracker()
        tracker.clear()
        self.forward(model, inputs)
        (logged,) = tracker.values()
        total: torch.Tensor = logged["values"].sum()
        return total

    def expected_aux(self, firings: Mapping[int, Firing], ids: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """``E / (K T^2) * sum_e tokens_e * sum_t p_te``, over all tokens, or the mean of that over sequences."""
        by_sequence = self.tiny.options["moe_router_load_balancing_type"] == "seq_aux_loss"
        total = torch.zeros(())
        for layer, firing in firings.items():
            scores_NE = self.tiny.scores(firing.logits_NE)
            scores_NE = scores_NE / scores_NE.sum(dim=-1, keepdim=True)
            counted_NE = torch.zeros_like(scores_NE).scatter(1, ids[layer], 1.0)
            parts = BATCH if by_sequence else 1
            for scores_TE, counted_TE in zip(scores_NE.chunk(parts), counted_NE.chunk(parts), strict=True):
                width = len(scores_TE)
                product = (counted_TE.sum(dim=0) * scores_TE.sum(dim=0)).sum()
                total += product * scores_TE.shape[1] / (self.spec.top_k * width**2) / parts
        return total


class TestSoftmaxOfTheChosen(MegatronContract):
    """Topk of logits, softmax over the K (Qwen3-MoE, Mixtral)."""

    family = "softmax of the chosen"


class TestSoftmaxOfAll(MegatronContract):
    """Softmax, then topk; a loss for each sequence."""

    family = "softmax of all"


class TestSigmoidBiasGroups(MegatronContract):
    """DeepSeek-V3: sigmoid, a bias for the choice, groups, renormalise, scale; the first layer dense; no loss."""

    family = "sigmoid, bias, groups"
