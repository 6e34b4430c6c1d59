"""The demo with Megatron-Core as the trainer: its map of the engine's weights, against a plain forward of the same.

Axes: S positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from routeplane.batch import collate
from routeplane.cli.demo import DemoOptions
from routeplane.cli.demo.megatron_trainer import convert_weights, load
from routeplane.record.spec import RouteSpec
from routeplane.replay.handle import ReplayHandle
from routeplane.testing.builders import watermarked_record, watermarked_spec

pytestmark = pytest.mark.megatron

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
}
SPEC = RouteSpec(num_experts=8, top_k=2, layer_ids=(0, 1), model="Qwen3MoeForCausalLM")


def checkpoint() -> dict[str, torch.Tensor]:
    """A Qwen3-MoE under its own names, norms included."""
    wide, narrow, small = 4 * 8, 2 * 8, 16
    shapes = {"model.embed_tokens.weight": (64, 32), "model.norm.weight": (32,), "lm_head.weight": (64, 32)}
    for layer in range(2):
        path = f"model.layers.{layer}."
        shapes |= {
            f"{path}input_layernorm.weight": (32,),
            f"{path}post_attention_layernorm.weight": (32,),
            f"{path}self_attn.q_proj.weight": (wide, 32),
            f"{path}self_attn.k_proj.weight": (narrow, 32),
            f"{path}self_attn.v_proj.weight": (narrow, 32),
            f"{path}self_attn.o_proj.weight": (32, wide),
            f"{path}self_attn.q_norm.weight": (8,),
            f"{path}self_attn.k_norm.weight": (8,),
            f"{path}mlp.gate.weight": (8, 32),
        }
        for expert in range(8):
            for name, size in (("gate", (small, 32)), ("up", (small, 32)), ("down", (32, small))):
                shapes[f"{path}mlp.experts.{expert}.{name}_proj.weight"] = size
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(size, generator=generator) * 0.3 + (1.0 if len(size) == 1 else 0.0)
        for name, size in shapes.items()
    }


def rotated(values_SAD: torch.Tensor) -> torch.Tensor:
    """Rotary positions on ``[S, heads, D]``: pairs are i and i + D/2."""
    length, _, width = values_SAD.shape
    angles = torch.outer(torch.arange(length).float(), 10_000.0 ** (-torch.arange(0, width, 2) / width))
    cos, sin = (part.repeat(1, 2)[:, None] for part in (angles.cos(), angles.sin()))
    first, second = values_SAD.chunk(2, dim=-1)
    return values_SAD * cos + torch.cat([-second, first], dim=-1) * sin


def plain_logits(weights: Mapping[str, torch.Tensor], tokens_S: torch.Tensor, routes_SLK: torch.Tensor) -> torch.Tensor:
    """``[S, V]`` of one sequence: the model written out; MISSING rows choose for themselves."""

    def norm(values: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(values, values.shape[-1:], weights[name], 1e-6)

    hidden = weights["model.embed_tokens.weight"][tokens_S]
    length = len(tokens_S)
    for layer in range(2):
        path = f"model.layers.{layer}."
        given = norm(hidden, f"{path}input_layernorm.weight")
        query, key, value = (
            (given @ weights[f"{path}self_attn.{part}_proj.weight"].t()).view(length, -1, 8) for part in "qkv"
        )
        query = rotated(norm(query, f"{path}self_attn.q_norm.weight"))
        key = rotated(norm(key, f"{path}self_attn.k_norm.weight")).repeat_interleave(2, dim=1)
        mixed = functional.scaled_dot_product_attention(
            query.transpose(0, 1),
            key.transpose(0, 1),
            value.repeat_interleave(2, dim=1).transpose(0, 1),
            is_causal=True,
        )
        hidden = hidden + mixed.transpose(0, 1).reshape(length, -1) @ weights[f"{path}self_attn.o_proj.weight"].t()
        given = norm(hidden, f"{path}post_attention_layernorm.weight")
        scores = (given @ weights[f"{path}mlp.gate.weight"].t()).softmax(dim=-1)
        routes = routes_SLK[:, layer].long()
        chosen = torch.where(routes < 0, scores.topk(2).indices, routes)
        shares = scores.gather(1, chosen)
        shares = shares / shares.sum(dim=-1, keepdim=True)
        hidden = hidden + torch.stack([mixture(weights, path, *row) for row in zip(given, chosen, shares, strict=True)])
    return norm(hidden, "model.norm.weight") @ weights["lm_head.weight"].t()


def mixture(
    weights: Mapping[str, torch.Tensor], path: str, given: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """What the chosen experts make of one token."""
    total = torch.zeros_like(given)
    for expert, share in zip(chosen.tolist(), shares, strict=True):
        gate, up, down = (weights[f"{path}mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        total = total + share * (down @ (functional.silu(gate @ given) * (up @ given)))
    return total


@pytest.mark.parametrize("replayed", [False, True], ids=["live", "replayed"])
def test_the_loaded_model_is_the_engines(tmp_path: Path, replayed: bool) -> None:
    """Logits of a padded batch equal the plain forward of each sequence, live and with rows forced, unpadded."""
    options = DemoOptions(out=str(tmp_path), trainer="megatron")
    folder = Path(options.model_dir)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    save_file(checkpoint(), folder / "model.safetensors")
    wide = watermarked_spec(layers=(0, 1), top_k=2)
    rng = np.random.default_rng(3)
    batch = collate(
        [watermarked_record(sample, num_tokens=length, spec=wide) for sample, length in enumerate((7, 5, 6))], wide
    )
    routes = torch.from_numpy(np.stack([[rng.permutation(8)[:2] for _ in range(2)] for _ in range(21)]))
    batch = batch_of(batch, routes if replayed else torch.full_like(routes, -1))
    trainer = load(options)
    handle: ReplayHandle = trainer.attach(SPEC)
    with torch.no_grad(), handle, handle.replaying(batch):
        found_BSV = trainer.logits(batch)
    routes_BSLK = batch.routes.view(3, 7, 2, 2)
    for sequence, length in enumerate((7, 5, 6)):
        expected_SV = plain_logits(checkpoint(), batch.token_ids[sequence, :length], routes_BSLK[sequence, :length])
        torch.testing.assert_close(found_BSV[sequence, :length], expected_SV, rtol=1e-4, atol=1e-4)


def batch_of(batch: Any, routes_NLK: torch.Tensor) -> Any:
    """The batch with a small vocabulary and other rows."""
    shape = (*batch.token_ids.shape, 2, 2)
    return replace(batch, spec=SPEC, token_ids=batch.token_ids % 64, routes=routes_NLK.to(torch.int16).view(shape))


def test_the_map_is_strict() -> None:
    """A weight too many or too few is an error; none is dropped or made up."""
    weights = checkpoint()
    converted = convert_weights(weights, SHAPE)
    assert sum(tensor.numel() for tensor in weights.values()) == sum(tensor.numel() for tensor in converted.values())
    with pytest.raises(ValueError, match=r"got \['model.mtp.weight'\] besides"):
        convert_weights({**weights, "model.mtp.weight": torch.zeros(1)}, SHAPE)
    weights.pop("model.layers.1.mlp.experts.7.up_proj.weight")
    with pytest.raises(KeyError, match=r"experts\.7\.up_proj"):
        convert_weights(weights, SHAPE)
