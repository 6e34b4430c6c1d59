"""The contract of replay, on tiny NeMo Automodel models of every way of scoring.

Axes: N token rows, E experts, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from nemo_automodel.components.moe.parallelizer import apply_ac

from routeplane.replay import automodel as gates
from routeplane.testing.contracts.replay_contract import Firing, ReplayContract
from tests.replay.automodel.tiny_automodel import FAMILIES, HIDDEN, NUM_ROWS, Family, gate_modules, recorded, tokens_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from routeplane.record.spec import RouteSpec
    from routeplane.replay.handle import ReplayHandle

pytestmark = pytest.mark.automodel

BY_NAME = {family.name: family for family in FAMILIES}

RECOMPUTE: dict[str, dict[str, Any]] = {
    "router saved": {"ignore_router": True},
    "router recomputed": {"ignore_router": False},
    "selective": {"selective": True},
}


class AutomodelContract(ReplayContract):
    """The hooks for a family of ``tiny_automodel``."""

    adapter = "automodel"
    recompute_variants = tuple(RECOMPUTE)
    num_rows = NUM_ROWS

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
        return self.tiny.build(seed=seed)

    def make_difference_model(self) -> Any:
        """Without the load-balancing loss, which is left out of the loss."""
        return self.tiny.build(aux=0.0)

    def make_inputs(self, *, seed: int) -> torch.Tensor:
        """int64 ``[B, S]``."""
        return tokens_of(seed)

    def forward(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """The logits."""
        found: torch.Tensor = model(inputs).logits
        return found

    def attach(self, model: nn.Module, spec: RouteSpec, **options: Any) -> ReplayHandle:
        """The adapter's."""
        return gates.attach(model, spec, **options)

    def gate_names(self, model: nn.Module) -> Mapping[int, str]:
        """Module paths, without those of wrappers."""
        return {gate.layer_id: gate.name for gate, _ in gates.find_gates(model)}

    def weights(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Automodel wraps what it checkpoints."""
        for name, weight in model.named_parameters():
            yield name.replace("_checkpoint_wrapped_module.", ""), weight

    def gate(self, model: nn.Module, layer_id: int) -> Any:
        """The gate of a layer."""
        return gate_modules(model)[layer_id]

    def gate_weight(self, model: nn.Module, layer_id: int) -> nn.Parameter:
        """``[E, H]``."""
        weight: nn.Parameter = self.gate(model, layer_id).weight
        return weight

    def observe(self, model: nn.Module) -> AbstractContextManager[Mapping[int, list[Firing]]]:
        """Read from what gates return."""
        return recorded(model)

    def expected_weights(self, firing: Firing, ids_NK: torch.Tensor) -> torch.Tensor:
        """The family's rule."""
        return self.tiny.weights(firing.logits_NE, ids_NK)

    def live_ids(self, model: nn.Module, *, layer_id: int, logits_NE: torch.Tensor) -> torch.Tensor:
        """The family's choice."""
        return self.tiny.choice(logits_NE, self.gate(model, layer_id).e_score_correction_bias)

    def skip_gate(self, model: Any, layer_id: int) -> None:
        """The MoE answers with its input."""
        model.model.layers[str(layer_id)].mlp.forward = lambda hidden, *args, **kwargs: hidden

    def fire_gate(self, model: nn.Module, layer_id: int, *, num_rows: int) -> None:
        """On zeros."""
        self.gate(model, layer_id)(torch.zeros(num_rows, HIDDEN), torch.ones(num_rows, dtype=torch.bool), None)

    def enable_recompute(self, model: Any, variant: str) -> None:
        """Automodel's own, as its recipes apply it."""
        apply_ac(model, **RECOMPUTE[variant])

    def traces(self, model: nn.Module) -> Iterator[tuple[str, object]]:
        """All but the load that a gate with a bias counts in every forward, with replay or without."""
        for name, value in super().traces(model):
            if not name.endswith("._cumulative_expert_load"):
                yield name, value

    def aux_loss(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor | None:
        """The sum over gates, as they return it."""
        if not self.tiny.aux:
            return None
        found: list[torch.Tensor] = []
        hooks = [
            module.register_forward_hook(lambda gate, args, output: found.append(output[2].detach()))
            for module in gate_modules(model).values()
        ]
        self.forward(model, inputs)
        for hook in hooks:
            hook.remove()
        return torch.stack(found).sum()

    def expected_aux(self, firings: Mapping[int, Firing], ids: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """``E / (K T^2) * sum_e tokens_e * sum_t p_te``."""
        total = torch.zeros(())
        for layer, firing in firings.items():
            scores_NE = firing.logits_NE.softmax(dim=-1)
            counted_NE = torch.zeros_like(scores_NE).scatter(1, ids[layer], 1.0)
            product = (counted_NE.sum(dim=0) * scores_NE.sum(dim=0)).sum()
            total += product * scores_NE.shape[1] / (self.spec.top_k * self.num_rows**2)
        return total


class TestQwen3Moe(AutomodelContract):
    """Softmax, topk, renormalise; a load-balancing loss."""

    family = "qwen3_moe"


class TestSoftmaxOfTheChosen(AutomodelContract):
    """Topk of logits, softmax over the K (GPT-OSS)."""

    family = "softmax of the chosen"


class TestSigmoidWithBias(AutomodelContract):
    """Sigmoid, a bias for the choice, groups, renormalise."""

    family = "sigmoid with bias"


class TestGlm4Moe(AutomodelContract):
    """Sigmoid, a bias for the choice, groups, renormalise, scale; the first layer dense, a shared expert."""

    family = "glm4_moe"
