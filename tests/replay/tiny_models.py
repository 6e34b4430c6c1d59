"""One tiny model per family that replay knows, with its weights restated by hand from the router's logits.

Axes: N token rows, E experts, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from routeplane.capture.selection import Gate
from routeplane.record.geometry import gate_paths
from routeplane.record.spec import RouteSpec
from routeplane.replay.transformers import attach
from routeplane.testing.contracts.replay_contract import Firing
from tests.replay.plain_batch import PlainBatch, plain_batch

__all__ = [
    "BY_NAME",
    "FAMILIES",
    "MAIN_FAMILIES",
    "NUM_ROWS",
    "Family",
    "checkpoint_layers",
    "listed_gates",
    "live_choice",
    "logits_of",
    "own_routes",
    "recorded",
    "replayed",
    "token_ids",
]

#: B=2 sequences of S=6 tokens
NUM_ROWS = 12
EXPERTS = 8
TOP_K = 3

Restate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to build a family's tiny model and which layers route; ``weights``: of logits ``[N, E]``, ids ``[N, K]``."""

    name: str
    config: str
    options: dict[str, Any]
    layer_ids: tuple[int, ...]
    weights: Restate
    #: of logits ``[N, E]``: what the choice is made by, before any bias
    scores: Callable[[torch.Tensor], torch.Tensor] = lambda logits_NE: logits_NE.softmax(dim=-1)
    #: of the choice's scores by group ``[N, G, E/G]``: which groups are the best
    group_scores: Callable[[torch.Tensor], torch.Tensor] = lambda groups_NGM: groups_NGM.topk(2).values.sum(dim=-1)
    #: where the number of experts stands in the configuration
    experts_key: str = "num_experts"
    top_k_key: str = "num_experts_per_tok"

    @property
    def spec(self) -> RouteSpec:
        """The geometry, written down by hand."""
        return RouteSpec(num_experts=EXPERTS, top_k=TOP_K, layer_ids=self.layer_ids, model=self.name)

    def build(self, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
        """A model in training mode with random weights (routers included) and no dropout."""
        base = {
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 24,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "use_cache": False,
            # large enough that another expert is another output
            "initializer_range": 0.2,
            self.experts_key: EXPERTS,
            self.top_k_key: TOP_K,
        }
        config = getattr(transformers, self.config)(**{**base, **self.options})
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for _, gate in listed_gates(model):
                for parameter in gate.parameters():
                    parameter.normal_(std=0.3)
            # a choice bias that is zero would leave open whether weights come from biased scores
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if name.endswith("e_score_correction_bias"):
                    tensor.normal_(std=0.3)
        return model.to(dtype).train()


def _renormalised(scores_NE: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
    picked_NK = scores_NE.gather(1, ids_NK)
    return picked_NK / picked_NK.sum(dim=-1, keepdim=True)


def _softmax(logits_NE: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits_NE.float(), dim=-1).gather(1, ids_NK)


def _softmax_scaled(logits_NE: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
    return 2.5 * _softmax(logits_NE, ids_NK)


def _softmax_renormalised(logits_NE: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
    return _renormalised(torch.softmax(logits_NE.float(), dim=-1), ids_NK)


def _sigmoid_renormalised(logits_NE: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
    return _renormalised(torch.sigmoid(logits_NE.float()), ids_NK)


def _sigmoid_scaled(logits_NE: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
    return 2.5 * _sigmoid_renormalised(logits_NE, ids_NK)


def _softmax_of_picked(logits_NE: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits_NE.gather(1, ids_NK), dim=-1)


_GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
_DENSE_FIRST = {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_shared_experts": 1}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_SHARED = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "mlp_only_layers": [0]}

MAIN_FAMILIES = (
    Family(
        name="qwen3_moe",
        config="Qwen3MoeConfig",
        options={"head_dim": 8, "moe_intermediate_size": 16, "mlp_only_layers": [0], "norm_topk_prob": True},
        layer_ids=(1, 2),
        weights=_softmax_renormalised,
    ),
    Family(
        name="mixtral",
        config="MixtralConfig",
        options={"head_dim": 8, "sliding_window": None},
        layer_ids=(0, 1, 2),
        weights=_softmax_renormalised,
        experts_key="num_local_experts",
    ),
    Family(
        name="olmoe",
        config="OlmoeConfig",
        options={"norm_topk_prob": False},
        layer_ids=(0, 1, 2),
        weights=_softmax,
    ),
    Family(
        name="deepseek_v3",
        config="DeepseekV3Config",
        options={
            **_GROUPS,
            **_DENSE_FIRST,
            **_MLA,
        },
        layer_ids=(1, 2),
        scores=torch.sigmoid,
        weights=_sigmoid_scaled,
        experts_key="n_routed_experts",
    ),
    Family(
        name="gpt_oss",
        config="GptOssConfig",
        options={"head_dim": 8, "sliding_window": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        layer_ids=(0, 1, 2),
        weights=_softmax_of_picked,
        experts_key="num_local_experts",
    ),
)

FAMILIES = (
    *MAIN_FAMILIES,
    Family(
        name="qwen2_moe",
        config="Qwen2MoeConfig",
        options={**_SHARED, "norm_topk_prob": False},
        layer_ids=(1, 2),
        weights=_softmax,
    ),
    Family(
        name="qwen3_next",
        config="Qwen3NextConfig",
        options={
            **_SHARED,
            "head_dim": 8,
            "norm_topk_prob": True,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        layer_ids=(1, 2),
        weights=_softmax_renormalised,
    ),
    Family(
        name="glm4_moe",
        config="Glm4MoeConfig",
        options={**_GROUPS, **_DENSE_FIRST, "head_dim": 8},
        layer_ids=(1, 2),
        scores=torch.sigmoid,
        weights=_sigmoid_scaled,
        experts_key="n_routed_experts",
    ),
    Family(
        name="minimax_m2",
        config="MiniMaxM2Config",
        options={"head_dim": 8, "rotary_dim": 8},
        layer_ids=(0, 1, 2),
        scores=torch.sigmoid,
        weights=_sigmoid_renormalised,
        experts_key="num_local_experts",
    ),
    Family(
        name="ernie4_5_moe",
        config="Ernie4_5_MoeConfig",
        options={"moe_intermediate_size": 16, "moe_layer_start_index": 1, "moe_num_shared_experts": 1},
        layer_ids=(1, 2),
        weights=_softmax_renormalised,
        experts_key="moe_num_experts",
        top_k_key="moe_k",
    ),
    Family(
        name="minimax",
        config="MiniMaxConfig",
        options={
            "head_dim": 8,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "block_size": 4,
        },
        layer_ids=(0, 1, 2),
        weights=_softmax_renormalised,
        experts_key="num_local_experts",
    ),
    Family(
        name="deepseek_v2",
        config="DeepseekV2Config",
        options={**_MLA, **_DENSE_FIRST, "topk_method": "greedy", "routed_scaling_factor": 2.5},
        layer_ids=(1, 2),
        weights=_softmax_scaled,
        experts_key="n_routed_experts",
    ),
    Family(
        name="deepseek_v2 in groups",
        config="DeepseekV2Config",
        options={**_MLA, **_DENSE_FIRST, **_GROUPS, "topk_method": "group_limited_greedy"},
        layer_ids=(1, 2),
        weights=_softmax_scaled,
        group_scores=lambda groups_NGM: groups_NGM.max(dim=-1).values,
        experts_key="n_routed_experts",
    ),
)


BY_NAME = {family.name: family for family in FAMILIES}


def checkpoint_layers(model: Any, *, reentrant: bool) -> None:
    """Checkpoint every layer, under whichever of the two names the release has for it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


def token_ids(seed: int) -> torch.Tensor:
    """int64 ``[B, S]``, NUM_ROWS in all."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 64, (2, NUM_ROWS // 2), generator=generator)


@contextmanager
def recorded(model: nn.Module) -> Iterator[dict[int, list[Firing]]]:
    """Every complete router call inside the ``with``, by layer, read from what the router returns."""
    seen: dict[int, list[Firing]] = {}

    def record(layer_id: int, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        logits_NE, weights_NK, ids_NK = (part.detach().clone() for part in output)
        seen.setdefault(layer_id, []).append(Firing(logits_NE=logits_NE, weights_NK=weights_NK, ids_NK=ids_NK))

    hooks = [
        router.register_forward_hook(lambda module, args, output, layer_id=gate.layer_id: record(layer_id, output))
        for gate, router in listed_gates(model)
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def logits_of(model: nn.Module, seed: int = 1) -> torch.Tensor:
    """One forward of the tokens of a seed."""
    output: torch.Tensor = model(input_ids=token_ids(seed)).logits
    return output


def own_routes(model: nn.Module, spec: RouteSpec, seed: int = 1) -> PlainBatch:
    """The routes that the model's routers choose by themselves."""
    with recorded(model) as seen, torch.no_grad():
        logits_of(model, seed)
    return plain_batch(spec, {layer: firings[0].ids_NK for layer, firings in seen.items()})


def replayed(model: nn.Module, spec: RouteSpec, batch: PlainBatch) -> torch.Tensor:
    """The logits under forced routes."""
    with attach(model, spec) as handle, handle.replaying(batch):
        return logits_of(model)


def listed_gates(model: Any) -> list[tuple[Gate, Any]]:
    """The gates by what their modules say of themselves, without a forward."""
    found = []
    for layer_id, path in gate_paths(model).items():
        router = model.get_submodule(path)
        gate = Gate(name=path, layer_id=layer_id, num_experts=router.num_experts, top_k=router.top_k)
        found.append((gate, router))
    return found


def live_choice(family: Family, block: nn.Module, logits_NE: torch.Tensor) -> torch.Tensor:
    """A MoE block's choice ``[N, K]`` restated: of biased scores, where groups limit it within the two best of four."""
    tensors = (*block.named_parameters(), *block.named_buffers())
    biases = [tensor for name, tensor in tensors if name.endswith("e_score_correction_bias")]
    choice_NE = family.scores(logits_NE.float()) + sum(bias.reshape(-1) for bias in biases)
    if "n_group" in family.options:
        groups_NGM = choice_NE.view(len(choice_NE), 4, -1)
        best_N2 = family.group_scores(groups_NGM).topk(2).indices
        outside_NG = torch.ones(groups_NGM.shape[:2], dtype=torch.bool).scatter(1, best_N2, value=False)
        choice_NE = groups_NGM.masked_fill(outside_NG[..., None], -torch.inf).flatten(1)
    return choice_NE.topk(TOP_K).indices
