"""The contract of replay, on one tiny Transformers model of every known family.

Axes: N token rows, E experts, K top-k slots.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from routeplane.replay.transformers import attach
from routeplane.testing.contracts.replay_contract import Firing, ReplayContract
from tests.replay.tiny_models import (
    BY_NAME,
    NUM_ROWS,
    Family,
    checkpoint_layers,
    listed_gates,
    live_choice,
    recorded,
    token_ids,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from routeplane.record.spec import RouteSpec
    from routeplane.replay.handle import ReplayHandle


def rms_norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The norm in the precision of what comes, instead of single precision."""
    return nn.functional.rms_norm(hidden, hidden.shape[-1:], module.weight, module.variance_epsilon)


class TransformersContract(ReplayContract):
    """The hooks for a family of ``tiny_models``."""

    adapter = "transformers"
    recompute_variants = ("non-reentrant", "reentrant")
    num_rows = NUM_ROWS
    # routers of most families compute in single precision whatever the model's
    difference_step = 1e-3
    difference_rtol = 0.02

    @property
    def tiny(self) -> Family:
        """The family's tiny model."""
        return BY_NAME[self.family]

    @property
    def spec(self) -> RouteSpec:
        """Written down by hand in ``tiny_models``."""
        return self.tiny.spec

    def make_model(self, *, seed: int = 0) -> Any:
        """Random weights, single precision."""
        return self.tiny.build(seed=seed)

    def make_inputs(self, *, seed: int) -> torch.Tensor:
        """int64 ``[B, S]``."""
        return token_ids(seed)

    def forward(self, model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
        """The logits."""
        output: torch.Tensor = model(input_ids=inputs).logits
        return output

    def attach(self, model: nn.Module, spec: RouteSpec, **options: Any) -> ReplayHandle:
        """The adapter's."""
        return attach(model, spec, **options)

    def gate_names(self, model: nn.Module) -> Mapping[int, str]:
        """Module paths."""
        return {gate.layer_id: gate.name for gate, _ in listed_gates(model)}

    def router(self, model: nn.Module, layer_id: int) -> Any:
        """The router of a layer."""
        return {gate.layer_id: router for gate, router in listed_gates(model)}[layer_id]

    def block(self, model: Any, layer_id: int) -> nn.Module:
        """The MoE block of a layer, router included."""
        block: nn.Module = model.get_submodule(self.gate_names(model)[layer_id].rpartition(".")[0])
        return block

    def gate_weight(self, model: nn.Module, layer_id: int) -> nn.Parameter:
        """Every family calls it ``weight``."""
        weight: nn.Parameter = self.router(model, layer_id).get_parameter("weight")
        return weight

    def observe(self, model: nn.Module) -> AbstractContextManager[Mapping[int, list[Firing]]]:
        """Read from what routers return."""
        return recorded(model)

    def expected_weights(self, firing: Firing, ids_NK: torch.Tensor) -> torch.Tensor:
        """The family's rule."""
        return self.tiny.weights(firing.logits_NE, ids_NK)

    def live_ids(self, model: nn.Module, *, layer_id: int, logits_NE: torch.Tensor) -> torch.Tensor:
        """The family's choice."""
        return live_choice(self.tiny, self.block(model, layer_id), logits_NE)

    def skip_gate(self, model: Any, layer_id: int) -> None:
        """The MoE block answers with its input."""
        self.block(model, layer_id).forward = lambda hidden, *args, **kwargs: hidden

    def fire_gate(self, model: nn.Module, layer_id: int, *, num_rows: int) -> None:
        """On zeros."""
        self.router(model, layer_id)(torch.zeros(num_rows, 32))

    def aux_loss(self, model: Any, inputs: torch.Tensor) -> torch.Tensor | None:
        """The load-balancing loss, where the family has one."""
        if not hasattr(model, "router_aux_loss_coef"):
            return None
        loss: torch.Tensor = model(input_ids=inputs, output_router_logits=True).aux_loss
        return loss

    def aux_live_ids(self, model: nn.Module, *, layer_id: int, logits_NE: torch.Tensor) -> torch.Tensor:
        """Plain topk of the logits, for every family."""
        return logits_NE.topk(3, dim=-1).indices

    def expected_aux(self, firings: Mapping[int, Firing], ids: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """E times the sum over experts of the share of tokens by the mean probability, over all layers' rows."""
        probabilities_NE = torch.cat([firing.logits_NE.float().softmax(-1) for _, firing in sorted(firings.items())])
        chosen_N = torch.cat([each.reshape(-1) for _, each in sorted(ids.items())])
        counts_E = torch.bincount(chosen_N, minlength=8) / len(probabilities_NE)
        return 8 * (counts_E * probabilities_NE.mean(0)).sum()

    def enable_recompute(self, model: Any, variant: str) -> None:
        """Every layer."""
        checkpoint_layers(model, reentrant=variant == "reentrant")


class TestQwen3Moe(TransformersContract):
    """Softmax, topk, renormalise."""

    family = "qwen3_moe"


class TestMixtral(TransformersContract):
    """Softmax, topk, renormalise, in every layer."""

    family = "mixtral"


class TestOlmoe(TransformersContract):
    """Softmax, topk."""

    family = "olmoe"


class TestDeepseekV3(TransformersContract):
    """Sigmoid, a bias for the choice, groups, renormalise, scale."""

    family = "deepseek_v3"


class TestGptOss(TransformersContract):
    """Topk of logits, softmax over the K; the one family whose router keeps double precision."""

    family = "gpt_oss"
    difference_step = 1e-5
    difference_rtol = 1e-6

    def make_difference_model(self) -> Any:
        """In double precision throughout."""
        model = self.tiny.build(dtype=torch.float64)
        model.set_experts_implementation("eager")
        for module in model.modules():
            if "RMSNorm" in type(module).__name__:
                module.forward = partial(rms_norm, module)
        return model


class TestQwen2Moe(TransformersContract):
    """Softmax, topk; shared experts beside."""

    family = "qwen2_moe"


class TestQwen3Next(TransformersContract):
    """As Qwen3-MoE, with linear attention in between."""

    family = "qwen3_next"


class TestGlm4Moe(TransformersContract):
    """As DeepSeek-V3."""

    family = "glm4_moe"


class TestMiniMaxM2(TransformersContract):
    """Sigmoid, a bias that the block passes in, renormalise."""

    family = "minimax_m2"

    def fire_gate(self, model: nn.Module, layer_id: int, *, num_rows: int) -> None:
        """The block passes the bias in."""
        self.router(model, layer_id)(torch.zeros(num_rows, 32), torch.zeros(8))


class TestErnie45Moe(TransformersContract):
    """Softmax, a bias for the choice, renormalise."""

    family = "ernie4_5_moe"


class TestMiniMax(TransformersContract):
    """As Mixtral, with lightning attention in between."""

    family = "minimax"


class TestDeepseekV2(TransformersContract):
    """Softmax, topk, scale."""

    family = "deepseek_v2"


class TestDeepseekV2InGroups(TransformersContract):
    """Weights are what topk returns of scores that are zero outside the best groups: forced ids get their own."""

    family = "deepseek_v2 in groups"
