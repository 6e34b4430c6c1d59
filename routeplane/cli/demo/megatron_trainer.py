"""Stage two of the demo with Megatron-Core as the trainer: one rank, on a CPU where there is no GPU.

Megatron has its own names and layouts for the engine's weights; ``convert_weights`` is the map, and it is strict on
both sides. Its code asks for the current CUDA device and for CUDA's random state; where torch has none,
``cpu_stand_ins`` answers. Nothing of this is needed on a GPU, and nothing of it is in the library.

Run as ``python -m routeplane.cli.demo.megatron_trainer OPTIONS_JSON``; what it prints is ``demo_scoring``'s.

Axes: B sequences, S positions, H hidden size.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import random as tensor_random
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file

from routeplane.cli.demo.scoring import TrainerModel, run_stage
from routeplane.replay import megatron as gates

if TYPE_CHECKING:
    from routeplane.batch.batch import RouteBatch
    from routeplane.cli.demo import DemoOptions

__all__ = ["convert_weights", "cpu_stand_ins", "load", "main", "one_rank"]


@contextmanager
def cpu_stand_ins() -> Iterator[None]:
    """Let Megatron run where torch has no CUDA: its device is the CPU, its CUDA random state is nothing."""
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            for module, name, stand_in in (
                (torch.cuda, "current_device", lambda: torch.device("cpu")),
                (torch.cuda, "get_rng_state", lambda *args: None),
                (tensor_random, "_get_cuda_rng_state", lambda *args, **kwargs: None),
                (tensor_random, "_set_cuda_rng_state", lambda *args, **kwargs: None),
            ):
                stack.enter_context(mock.patch.object(module, name, stand_in))
            # of 0.16.1: named in router_gating_linear, defined where Transformer Engine is
            stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        yield


def one_rank() -> None:
    """Process groups of this process alone, over gloo; without a port, since there is no other process."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_random.get_cuda_rng_tracker().add("model-parallel-rng", 0)


def load(options: DemoOptions) -> TrainerModel:
    """The model that the engine used, in float32."""
    folder = Path(options.model_dir)
    shape = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = _config(shape)
    gates.check_setup(config, engine=options.engine.partition("-")[0])
    model: Any = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
        ),
        vocab_size=shape["vocab_size"],
        max_sequence_length=shape["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_base=shape["rope_parameters"]["rope_theta"],
        share_embeddings_and_output_weights=False,
    )
    weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    missing, unexpected = model.load_state_dict(convert_weights(weights, shape), strict=False)
    # what Megatron keeps besides weights
    if unexpected or any(not name.endswith("_extra_state") for name in missing):
        raise RuntimeError(f"expected all weights and no others, got {missing} missing and {unexpected} besides")
    model.train(False)

    def logits(micro: RouteBatch) -> torch.Tensor:
        # padding stands on the right, where a causal mask hides it
        width = micro.token_ids.shape[1]
        hidden = torch.ones(1, 1, width, width, dtype=torch.bool).triu(1)
        found: torch.Tensor = model(micro.token_ids, micro.position_ids, hidden)
        return found

    return TrainerModel(layout="padded", logits=logits, attach=partial(gates.attach, model))


def _config(shape: Mapping[str, Any]) -> TransformerConfig:
    return TransformerConfig(
        num_layers=shape["num_hidden_layers"],
        hidden_size=shape["hidden_size"],
        ffn_hidden_size=shape["intermediate_size"],
        num_attention_heads=shape["num_attention_heads"],
        num_query_groups=shape["num_key_value_heads"],
        kv_channels=shape["head_dim"],
        num_moe_experts=shape.get("num_local_experts", shape.get("num_experts")),
        moe_router_topk=shape["num_experts_per_tok"],
        moe_ffn_hidden_size=shape["moe_intermediate_size"],
        # softmax over the chosen logits is what norm_topk_prob makes of a softmax over all
        moe_router_pre_softmax=not shape["norm_topk_prob"],
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        moe_router_dtype="fp32",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        normalization="RMSNorm",
        layernorm_epsilon=shape["rms_norm_eps"],
        qk_layernorm=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )


_PLAIN = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
_PLAIN_OF_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "mlp.gate.weight": "mlp.router.weight",
}


def convert_weights(weights: Mapping[str, torch.Tensor], shape: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A Qwen3-MoE checkpoint under Megatron's names: fused q, k, v by query group, and gate above up.

    Tensors that only change their name are shared. Raises KeyError for a weight that the checkpoint lacks, and
    ValueError for one that is not known.
    """
    left = dict(weights)
    found = {ours: left.pop(theirs) for theirs, ours in _PLAIN.items()}
    experts = shape.get("num_local_experts", shape.get("num_experts"))
    for layer in range(shape["num_hidden_layers"]):
        theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        found |= {ours + name: left.pop(theirs + other) for other, name in _PLAIN_OF_LAYER.items()}
        query, key, value = (left.pop(f"{theirs}self_attn.{part}_proj.weight") for part in "qkv")
        found[f"{ours}self_attention.linear_qkv.weight"] = _by_group(query, key, value, width=shape["head_dim"])
        for expert in range(experts):
            source, target = f"{theirs}mlp.experts.{expert}.", f"{ours}mlp.experts.local_experts.{expert}."
            gate, up = (left.pop(f"{source}{part}_proj.weight") for part in ("gate", "up"))
            found[f"{target}linear_fc1.weight"] = torch.cat([gate, up])
            found[f"{target}linear_fc2.weight"] = left.pop(f"{source}down_proj.weight")
    if left:
        raise ValueError(f"expected the weights of a Qwen3-MoE, got {sorted(left)[:4]} besides")
    return found


def _by_group(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, width: int) -> torch.Tensor:
    """Rows of each query group together: its queries, its key, its value."""
    groups = key.shape[0] // width
    parts = [part.view(groups, -1, part.shape[-1]) for part in (query, key, value)]
    return torch.cat(parts, dim=1).reshape(-1, query.shape[-1])


def main(arguments: Sequence[str]) -> None:
    """Run the stage with the options given as JSON."""
    with cpu_stand_ins():
        one_rank()
        try:
            run_stage(arguments, load)
        finally:
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
