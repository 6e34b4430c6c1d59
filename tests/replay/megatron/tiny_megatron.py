"""Tiny Megatron-Core models, their inputs, and what their routers returned, put into the batch's order.

Axes: B sequences, S positions, N = B*S token rows (``b*S + s``; Megatron's own order is ``s*B + b``), E experts, K
top-k slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from routeplane.record.spec import RouteSpec
from routeplane.replay import megatron as gates
from routeplane.testing.contracts.replay_contract import Firing

if TYPE_CHECKING:
    from routeplane.testing.contracts.replay_contract import RowsBatch

__all__ = ["FAMILIES", "Family", "Inputs", "TokenBatch", "batch_order", "build", "inputs_of", "recorded"]

EXPERTS, TOP_K, HIDDEN, VOCABULARY = 8, 3, 32, 64
BATCH, WIDTH = 2, 6


@dataclass(frozen=True, kw_only=True)
class Family:
    """A way in which Megatron's routers score, and which decoder layers have one."""

    name: str
    options: Mapping[str, Any]
    layer_ids: tuple[int, ...] = (0, 1)
    grouped: bool = False

    @property
    def spec(self) -> RouteSpec:
        """The geometry, written down by hand."""
        return RouteSpec(num_experts=EXPERTS, top_k=TOP_K, layer_ids=self.layer_ids, model=self.name)

    def scores(self, logits_NE: torch.Tensor) -> torch.Tensor:
        """What an id is weighed by, before any normalisation over the chosen."""
        if self.options.get("moe_router_score_function") == "sigmoid":
            return logits_NE.float().sigmoid()
        return logits_NE.float().softmax(dim=-1)

    def weights(self, logits_NE: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
        """The weights ``[N, K]`` of ids, restated."""
        picked_NK = self.scores(logits_NE).gather(1, ids_NK)
        if self.options.get("moe_router_pre_softmax"):
            return picked_NK
        scale: float = self.options.get("moe_router_topk_scaling_factor") or 1.0
        return scale * picked_NK / picked_NK.sum(dim=-1, keepdim=True)


_AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
_GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}

FAMILIES = (
    Family(name="softmax of the chosen", options=_AUX),
    Family(
        name="softmax of all",
        options={**_AUX, "moe_router_pre_softmax": True, "moe_router_load_balancing_type": "seq_aux_loss"},
    ),
    Family(
        name="sigmoid, bias, groups",
        options={
            **_GROUPS,
            # what Megatron's losses count of such a router is its choice without bias and groups
            "moe_router_load_balancing_type": "none",
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_pre_softmax": False,
            "moe_router_topk_scaling_factor": 2.5,
            "moe_router_dtype": "fp32",
            "moe_layer_freq": [0, 1, 0, 1],
        },
        layer_ids=(1, 3),
        grouped=True,
    ),
)


def config_of(options: Mapping[str, Any]) -> TransformerConfig:
    """A small configuration; no dropout, the dispatcher and experts that a CPU can run."""
    base = {
        "num_layers": len(options.get("moe_layer_freq", (1, 1))),
        "hidden_size": HIDDEN,
        "ffn_hidden_size": 24,
        "num_attention_heads": 4,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOP_K,
        "moe_ffn_hidden_size": 16,
        "moe_token_dispatcher_type": "allgather",
        "activation_func": nn.functional.silu,
        "gated_linear_unit": True,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "init_method_std": 0.2,
    }
    return TransformerConfig(**{**base, **options})


class PlainNorm:
    """A norm for sequence-parallel models, whose gradient no hook adds up: Megatron's own refuses to be one."""

    def __new__(cls, *, config: TransformerConfig, hidden_size: int, eps: float) -> Any:
        """Torch's."""
        return nn.RMSNorm(hidden_size, eps=eps)


def build(options: Mapping[str, Any], *, seed: int = 0, **more: Any) -> Any:
    """A model in training mode with random weights, routers included; ``more`` goes to GPTModel."""
    config = config_of(options)
    layers = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=more.get("vp_stage")
    )
    if config.sequence_parallel:
        for layer in layers.layer_specs:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = PlainNorm
        layers.layer_norm = PlainNorm
    torch.manual_seed(seed)
    model = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        **more,
    )
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("router.weight", "expert_bias")):
                tensor.normal_(std=0.3)
    return model.train()


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """int64 ``[B, S]``."""

    tokens: torch.Tensor

    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, positions, and a mask that is True where a key is hidden."""
        count, width = self.tokens.shape
        positions = torch.arange(width).expand(count, -1)
        return self.tokens, positions, torch.ones(1, 1, width, width, dtype=torch.bool).triu(1)


def inputs_of(seed: int, *, count: int = BATCH, width: int = WIDTH) -> Inputs:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return Inputs(tokens=torch.randint(3, VOCABULARY, (count, width), generator=generator))


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Rows with the tokens whose shape says in which order they are."""

    rows: RowsBatch
    token_ids: torch.Tensor
    unexplained_missing: int = 0
    calls: list[int] = field(default_factory=list)

    @property
    def spec(self) -> RouteSpec:
        """That of the rows."""
        return self.rows.spec

    @property
    def num_rows(self) -> int:
        """N."""
        return self.rows.num_rows

    def layer(self, layer_id: int) -> torch.Tensor:
        """int16 ``[N, K]``."""
        return self.rows.layer(layer_id)


def batch_order(values: torch.Tensor, *, count: int) -> torch.Tensor:
    """Rows ``s*B + b`` as rows ``b*S + s``."""
    return values.view(-1, count, *values.shape[1:]).transpose(0, 1).reshape(values.shape)


@contextmanager
def recorded(model: nn.Module) -> Iterator[dict[int, list[Firing]]]:
    """Every complete router call, by layer, read from what the router was given and returned."""
    seen: dict[int, list[Firing]] = {}

    def record(layer_id: int, router: Any, hidden: torch.Tensor, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        weights_NE, map_NE = (part.detach() for part in output)
        logits_NE = (hidden.detach().flatten(0, 1) @ router.weight.detach().t()).to(weights_NE.dtype)
        # in the order of the choice: sums over the K are then added in that order too
        choice_NE = logits_NE if router.expert_bias is None else logits_NE.sigmoid() + router.expert_bias
        ids_NK = choice_NE.masked_fill(~map_NE, -torch.inf).topk(int(router.topk)).indices
        count = hidden.shape[1]
        firing = Firing(
            logits_NE=batch_order(logits_NE, count=count),
            weights_NK=batch_order(weights_NE.gather(1, ids_NK), count=count),
            ids_NK=batch_order(ids_NK, count=count),
        )
        seen.setdefault(layer_id, []).append(firing)

    hooks = [
        router.register_forward_hook(
            lambda module, args, output, layer_id=gate.layer_id: record(layer_id, module, args[0], output)
        )
        for gate, router in gates.find_gates(model)
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
