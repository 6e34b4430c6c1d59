"""The rules that turn a family's keys into MoE layers, against plain references and against keys made wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.errors import ErrorKind
from routeplane.record.families import FAMILIES
from routeplane.record.geometry import geometry_from_hf_config
from tests.geometries import CORPUS, check_layers, check_refused, config_of, shape_of


def test_no_name_belongs_to_two_families() -> None:
    """The table gives every name one meaning."""
    for names in ([family.architectures for family in FAMILIES], [family.model_types for family in FAMILIES]):
        flat = [name for group in names for name in group]
        assert sorted(set(flat)) == sorted(flat)


# ---- layer rules against plain references ----


@given(depth=st.integers(1, 40), step=st.integers(1, 6), dense=st.lists(st.integers(0, 45), max_size=5))
def test_sparse_step_rule(depth: int, step: int, dense: list[int]) -> None:
    """Qwen: every step-th layer, counted from 1, but those that are listed as dense."""
    config = config_of("Qwen3-30B-A3B", num_hidden_layers=depth, decoder_sparse_step=step, mlp_only_layers=dense)
    expected = [layer for layer in range(depth) if (layer + 1) % step == 0 and layer not in dense]
    check_layers(expected, config)


@given(depth=st.integers(1, 40), step=st.integers(1, 6), listed=st.none() | st.lists(st.integers(0, 45), max_size=5))
def test_interleaved_rule(depth: int, step: int, listed: list[int] | None) -> None:
    """Llama 4: the explicit list where there is one, else every step-th layer, counted from 1."""
    text = {**CORPUS["Llama-4-Maverick-17B-128E"]["config"]["text_config"], "num_hidden_layers": depth}
    text |= {"interleave_moe_layer_step": step, "moe_layers": listed}
    every = [layer for layer in range(depth) if (layer + 1) % step == 0]
    expected = every if listed is None else sorted({layer for layer in listed if layer < depth})
    check_layers(expected, config_of("Llama-4-Maverick-17B-128E", text_config=text))


@given(depth=st.integers(1, 40), period=st.integers(1, 6), data=st.data())
def test_period_and_offset_rule(depth: int, period: int, data: st.DataObject) -> None:
    """Jamba: the layers whose remainder by the period is the offset."""
    offset = data.draw(st.integers(0, period - 1))
    keys = {"num_hidden_layers": depth, "expert_layer_period": period, "expert_layer_offset": offset}
    expected = [layer for layer in range(depth) if (layer - offset) % period == 0]
    check_layers(expected, config_of("Jamba-v0.1", **keys))


@given(depth=st.integers(1, 40), interval=st.integers(1, 5), start=st.integers(0, 45), end=st.integers(-1, 45))
def test_start_to_end_rule(depth: int, interval: int, start: int, end: int) -> None:
    """ERNIE: from start to end, both inclusive, -1 being the last layer."""
    keys = {"moe_layer_interval": interval, "moe_layer_start_index": start, "moe_layer_end_index": end}
    last = depth - 1 if end == -1 else end
    expected = [layer for layer in range(depth) if (layer + 1) % interval == 0 and start <= layer <= last]
    check_layers(expected, config_of("ERNIE-4.5-21B-A3B", num_hidden_layers=depth, **keys))


@given(pattern=st.text("ME*-", min_size=1, max_size=40))
def test_hybrid_pattern_rule(pattern: str) -> None:
    """Nemotron-H: the places of E in the pattern, or of moe in the list that transformers makes of it, old or new."""
    expected = [layer for layer, block in enumerate(pattern) if block == "E"]
    name, depth = "Nemotron-3-Nano-30B-A3B", len(pattern)
    check_layers(expected, config_of(name, hybrid_override_pattern=pattern, num_hidden_layers=depth))
    for kinds in (
        {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"},
        {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"},
    ):
        blocks = [kinds[block] for block in pattern]
        check_layers(
            expected, config_of(name, hybrid_override_pattern=..., num_hidden_layers=..., layers_block_type=blocks)
        )


@given(depth=st.integers(1, 40), prefix=st.integers(0, 45), spelled=st.sampled_from(["prefix", "kinds", "both"]))
def test_dense_prefix_rule(depth: int, prefix: int, spelled: str) -> None:
    """DeepSeek-V3.2 and GLM-5: all but the first k, however that is spelled."""
    kinds = ["dense" if layer < prefix else "sparse" for layer in range(depth)]
    config = config_of(
        "DeepSeek-V3",
        architectures=["DeepseekV32ForCausalLM"],
        num_hidden_layers=depth,
        first_k_dense_replace=... if spelled == "kinds" else prefix,
        mlp_layer_types=... if spelled == "prefix" else kinds,
    )
    check_layers(list(range(prefix, depth)), config)


@given(widths=st.lists(st.integers(8, 64), min_size=1, max_size=12))
def test_width_per_layer(widths: list[int]) -> None:
    """Hunyuan: a list of widths stays a list unless all are one, and indexes layers."""
    depth = len(widths)
    config = config_of("Hunyuan-A13B-Instruct", num_hidden_layers=depth, num_experts=widths, moe_topk=[8] * depth)
    expected = widths[0] if len(set(widths)) == 1 else tuple(widths)
    assert (expected, 8, tuple(range(depth))) == shape_of(geometry_from_hf_config(config))


# ---- keys that are not understood ----


@dataclass(frozen=True, kw_only=True)
class Bad:
    """A real configuration made wrong, and the key that the refusal must name."""

    name: str
    named: str
    kind: ErrorKind = ErrorKind.UNSUPPORTED_GEOMETRY
    changes: dict[str, Any] = field(default_factory=dict)


BAD = [
    Bad(name="Hunyuan-A13B-Instruct", changes={"moe_topk": [8] * 31 + [4]}, named="moe_topk"),
    Bad(name="Hunyuan-A13B-Instruct", changes={"moe_topk": [8] * 31}, named="moe_topk"),
    Bad(name="Hunyuan-A13B-Instruct", changes={"num_experts": [64] * 31 + [1]}, named="num_experts"),
    Bad(name="Hunyuan-A13B-Instruct", changes={"moe_layer_num_skipped": 2}, named="moe_layer_num_skipped"),
    Bad(name="Qwen3-30B-A3B", changes={"num_experts": [128] * 48}, named="num_experts"),
    Bad(name="Qwen3-30B-A3B", changes={"num_experts": 128.0}, named="num_experts"),
    Bad(name="Qwen3-30B-A3B", changes={"num_experts": True}, named="num_experts"),
    Bad(name="Qwen3-30B-A3B", changes={"num_experts": -128}, named="num_experts"),
    Bad(name="Qwen3-30B-A3B", changes={"num_experts_per_tok": True}, named="num_experts_per_tok"),
    Bad(name="Qwen3-30B-A3B", changes={"num_experts_per_tok": "8"}, named="num_experts_per_tok"),
    Bad(name="Qwen3-30B-A3B", changes={"num_experts_per_tok": 0}, named="num_experts_per_tok"),
    Bad(name="Qwen3-30B-A3B", changes={"num_experts_per_tok": 129}, named="num_experts_per_tok"),
    Bad(name="Qwen3-30B-A3B", changes={"num_hidden_layers": 10**12}, named="num_hidden_layers"),
    Bad(name="Qwen3-30B-A3B", changes={"num_hidden_layers": 0}, named="num_hidden_layers"),
    Bad(name="Qwen3-30B-A3B", changes={"decoder_sparse_step": 0}, named="decoder_sparse_step"),
    Bad(name="Qwen3-30B-A3B", changes={"mlp_only_layers": [-1]}, named="mlp_only_layers"),
    Bad(name="Qwen3-30B-A3B", changes={"mlp_only_layers": 3}, named="mlp_only_layers"),
    Bad(name="Qwen3-30B-A3B", changes={"first_k_dense_replace": 3}, named="first_k_dense_replace"),
    Bad(name="Qwen3-30B-A3B", changes={"architectures": "Qwen3MoeForCausalLM"}, named="architectures"),
    Bad(name="Qwen3-VL-30B-A3B", changes={"text_config": 7}, named="text_config"),
    Bad(name="Mixtral-8x7B-v0.1", changes={"moe_layers": [1, 3]}, named="moe_layers"),
    Bad(name="DeepSeek-V3", changes={"moe_layer_freq": 2}, named="moe_layer_freq"),
    Bad(name="DeepSeek-V3", changes={"moe_layer_freq": [0] * 3 + [1] * 58}, named="moe_layer_freq"),
    Bad(name="DeepSeek-V3", changes={"first_k_dense_replace": -1}, named="first_k_dense_replace"),
    Bad(
        name="DeepSeek-V3",
        changes={"architectures": ["DeepseekV32ForCausalLM"], "mlp_layer_types": ["dense"] + ["sparse"] * 60},
        named="mlp_layer_types and first_k_dense_replace",
    ),
    Bad(name="ERNIE-4.5-21B-A3B", changes={"moe_layer_start_index": [1, 1]}, named="moe_layer_start_index"),
    Bad(name="Jamba-v0.1", changes={"expert_layer_offset": 2}, named="expert_layer_offset"),
    Bad(name="Nemotron-3-Nano-30B-A3B", changes={"hybrid_override_pattern": "MEX"}, named="hybrid_override_pattern"),
    Bad(name="DeepSeek-V4-Flash", changes={"mlp_layer_types": ["moe"]}, named="mlp_layer_types"),
    Bad(name="DeepSeek-V4-Flash", changes={"mlp_layer_types": ["dense"] * 43}, named="mlp_layer_types"),
    Bad(name="ZAYA1-8B", changes={"layer_types": ["hybrid", "moe"] * 20}, named="layer_types"),
    Bad(name="DBRX-instruct", changes={"ffn_config": {"moe_top_k": 4}}, named="ffn_config.moe_num_experts"),
    Bad(name="Llama-3.1-8B-Instruct", changes={"num_experts": 8}, named="num_experts"),
    Bad(
        name="LongCat-Flash-Chat",
        changes={"model_type": "longcat_flash", "num_hidden_layers": 28},
        named="num_hidden_layers",
    ),
    Bad(
        name="LongCat-Flash-Chat",
        changes={"model_type": "longcat_flash", "zero_expert_num": ...},
        named="zero_expert_num",
    ),
    Bad(name="Granite-4.0-H-Small", changes={"num_local_experts": 0}, named="null, 0 or 1", kind=ErrorKind.DENSE_MODEL),
    Bad(name="Mixtral-8x7B-v0.1", changes={"num_local_experts": 1}, named="null, 0 or 1", kind=ErrorKind.DENSE_MODEL),
    Bad(name="DeepSeek-V3", changes={"n_routed_experts": None}, named="null, 0 or 1", kind=ErrorKind.DENSE_MODEL),
    Bad(name="Qwen3-30B-A3B", changes={"mlp_only_layers": list(range(48))}, named="none", kind=ErrorKind.DENSE_MODEL),
    Bad(
        name="Nemotron-3-Nano-30B-A3B",
        changes={"hybrid_override_pattern": "M-*-", "num_hidden_layers": 4, "n_routed_experts": ...},
        named="none of whose layers",
        kind=ErrorKind.DENSE_MODEL,
    ),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: f"{bad.name}-{'-'.join(bad.changes)}")
def test_what_is_not_understood_is_refused_by_key(bad: Bad) -> None:
    """A value of another type, range or meaning is refused by the name of its key; no experts at all means dense."""
    check_refused(bad.kind, bad.named, lambda: geometry_from_hf_config(config_of(bad.name, **bad.changes)))
