"""Tiny NeMo Automodel models on a CPU, and what their gates returned.

Every way of scoring is a model: GLM-4's own, and Qwen3-MoE with other settings of its MoE.

Axes: B sequences, S positions, N = B*S token rows, E experts, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.glm4_moe.model import Glm4MoeForCausalLM
from nemo_automodel.components.models.qwen3_moe.model import Qwen3MoeForCausalLM
from torch import nn
from torch.nn import functional
from transformers import Glm4MoeConfig, Qwen3MoeConfig

from routeplane.record.spec import RouteSpec
from routeplane.testing.contracts.replay_contract import Firing

__all__ = [
    "EXPERTS",
    "FAMILIES",
    "HIDDEN",
    "NUM_ROWS",
    "TOP_K",
    "Family",
    "backend",
    "drawn",
    "gate_modules",
    "recorded",
    "tokens_of",
]

EXPERTS, TOP_K, HIDDEN = 8, 3, 32
NUM_ROWS = 12

Restate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def softmax(logits_NE: torch.Tensor, bias_E: torch.Tensor) -> torch.Tensor:
    """Over all experts."""
    return logits_NE.softmax(dim=-1)


def sigmoid(logits_NE: torch.Tensor, bias_E: torch.Tensor) -> torch.Tensor:
    """Each expert by itself."""
    return logits_NE.sigmoid()


def square_root(logits_NE: torch.Tensor, bias_E: torch.Tensor) -> torch.Tensor:
    """Of softplus (DeepSeek-V4)."""
    return functional.softplus(logits_NE).sqrt()


@dataclass(frozen=True, kw_only=True)
class Family:
    """A way of scoring. ``outside``: what a score outside the best groups becomes."""

    name: str
    scores: Restate
    moe: Mapping[str, Any] = field(default_factory=dict)
    glm: bool = False
    normalised: bool = True
    scale: float = 1.0
    grouped: bool = False
    outside: float = 0.0
    aux: float = 0.0
    layer_ids: tuple[int, ...] = (0, 1)

    @property
    def spec(self) -> RouteSpec:
        """The geometry, written down by hand."""
        return RouteSpec(num_experts=EXPERTS, top_k=TOP_K, layer_ids=self.layer_ids, model=self.name)

    def build(self, *, seed: int = 0, aux: float | None = None, replay: bool = True, experts: str = "torch") -> Any:
        """A model in training mode with random weights, gates and their biases included.

        ``replay``: whether gates have handles of Automodel's own.
        """
        overrides = {
            **self.moe,
            "aux_loss_coeff": self.aux if aux is None else aux,
            "enable_routing_replay": replay,
        }
        kind, config = (Glm4MoeForCausalLM, glm4_config()) if self.glm else (Qwen3MoeForCausalLM, qwen3_config())
        with mock.patch.object(torch.cuda, "current_device", return_value=0):
            model: Any = kind(config, backend=backend(experts), moe_overrides=overrides)
        model.model.rotary_emb.device = torch.device("cpu")
        return drawn(model, seed=seed).train()

    def choice(self, logits_NE: torch.Tensor, bias_E: torch.Tensor | None) -> torch.Tensor:
        """The ids that the gate chooses by itself, restated."""
        scores_NE = self.scores(logits_NE, logits_NE) + (0.0 if bias_E is None else bias_E)
        if not self.grouped:
            return scores_NE.topk(TOP_K).indices
        groups_NGM = scores_NE.view(len(scores_NE), 4, -1)
        best_N2 = groups_NGM.topk(2, dim=-1).values.sum(dim=-1).topk(2).indices
        outside_NG = torch.ones(groups_NGM.shape[:2], dtype=torch.bool).scatter(1, best_N2, value=False)
        return groups_NGM.masked_fill(outside_NG[..., None], self.outside).flatten(1).topk(TOP_K).indices

    def weights(self, logits_NE: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
        """The weights of ids, restated."""
        picked_NK = self.scores(logits_NE, logits_NE).gather(1, ids_NK)
        return self.scale * (picked_NK / picked_NK.sum(dim=-1, keepdim=True) if self.normalised else picked_NK)


def backend(experts: str = "torch") -> BackendConfig:
    """Plain torch."""
    return BackendConfig(
        attn="sdpa", linear="torch", rms_norm="torch", rope_fusion=False, experts=experts, dispatcher="torch"
    )


def drawn(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """Random weights, gates, biases and tables of experts included."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("norm.weight"):
                tensor.fill_(1.0)
            elif tensor.is_floating_point():
                tensor.normal_(std=0.3 if "gate." in name else 0.2)
            elif name.endswith("tid2eid"):
                tensor.copy_(torch.rand(len(tensor), EXPERTS).argsort(dim=-1)[:, : tensor.shape[1]])
    return model


_GROUPS = {"n_expert_groups": 4, "n_limited_groups": 2, "force_e_score_correction_bias": True}

FAMILIES = (
    Family(name="qwen3_moe", scores=softmax, aux=0.01),
    Family(name="softmax of the chosen", scores=softmax, moe={"softmax_before_topk": False}),
    Family(
        name="softmax with bias",
        scores=softmax,
        moe={**_GROUPS, "score_func": "softmax_with_bias", "norm_topk_prob": False},
        normalised=False,
        grouped=True,
    ),
    Family(
        name="sigmoid with bias",
        scores=sigmoid,
        moe={**_GROUPS, "score_func": "sigmoid_with_bias"},
        grouped=True,
        outside=-torch.inf,
    ),
    Family(name="square root of softplus", scores=square_root, moe={"score_func": "sqrtsoftplus"}),
    Family(name="glm4_moe", scores=sigmoid, glm=True, scale=2.5, grouped=True, layer_ids=(1, 2)),
)


_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": TOP_K,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "dtype": torch.float32,
}
_GLM: dict[str, Any] = {
    "num_hidden_layers": 3,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}


def qwen3_config() -> Qwen3MoeConfig:
    """Two layers, both with experts."""
    return Qwen3MoeConfig(**_COMMON, num_hidden_layers=2, num_experts=EXPERTS)


def glm4_config() -> Glm4MoeConfig:
    """A dense layer, then two with experts in four groups."""
    return Glm4MoeConfig(**_COMMON, **_GLM)


def tokens_of(seed: int, *, count: int = 2, width: int = 6) -> torch.Tensor:
    """int64 ``[B, S]``."""
    return torch.randint(3, 64, (count, width), generator=torch.Generator().manual_seed(seed))


def gate_modules(model: nn.Module) -> dict[int, Any]:
    """The gates by layer, as the tiny models name them."""
    found = [(path, module) for path, module in model.named_modules() if path.endswith("mlp.gate")]
    return {int(path.split("layers.")[1].split(".")[0]): module for path, module in found}


@contextmanager
def recorded(model: nn.Module) -> Iterator[dict[int, list[Firing]]]:
    """Every complete gate call, by layer, read from what the gate was given and returned."""
    seen: dict[int, list[Firing]] = {}

    def record(layer_id: int, gate: Any, hidden_NH: torch.Tensor, output: tuple[torch.Tensor, ...]) -> None:
        firing = Firing(
            logits_NE=functional.linear(hidden_NH.detach(), gate.weight.detach()),
            weights_NK=output[0].detach().clone(),
            ids_NK=output[1].detach().clone(),
        )
        seen.setdefault(layer_id, []).append(firing)

    hooks = [
        module.register_forward_hook(
            lambda gate, args, output, layer_id=layer_id: record(layer_id, gate, args[0], output)
        )
        for layer_id, module in gate_modules(model).items()
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
