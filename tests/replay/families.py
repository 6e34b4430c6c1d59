"""Tiny configurations of the MoE families of Transformers 5.24, and what each needs beyond its geometry.

``FAMILIES`` is the list that replay is held to: a family that cannot be built counts as failed. ``build`` makes a model
of three layers or so, with random weights and no dropout.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

__all__ = ["FAMILIES", "FamilyCase", "build"]

#: What a tiny model has wherever its configuration knows the name.
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "max_position_embeddings": 64,
    "shared_expert_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "initializer_range": 0.2,
    "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 32,
    "num_layers": 3,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "moe_layer_start_index": 1,
    "moe_layer_interval": 1,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 8,
    "use_mamba_kernels": False,
    "shared_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "num_dense_layers": 1,
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 8,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "width": 32,
    "layers": 2,
    "heads": 4,
    "num_heads": 4,
    "intermediate_size": 32,
    "out_hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}


#: what stands for a vision tower of any kind
PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class FamilyCase:
    """One family: ``model_type`` and what its tiny configuration sets; ``leave_live``: routers that do not follow."""

    #: its table in ``docs/reference/replay.md``
    adapter: ClassVar[str] = "families"
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    leave_live: tuple[str, ...] = ()
    #: configuration of the whole model, as given, where the general rule does not fit
    whole: bool = False
    #: selections of a router left live that come before each gate's
    before: int = 0


def _case(name: str, *leave_live: str, before: int = 0, **options: Any) -> FamilyCase:
    return FamilyCase(name=name, options=options, leave_live=leave_live, before=before)


_NAMES = (
    "afmoe",
    "aria_text",
    "axk1",
    "axk2",
    "bailing_hybrid",
    "cohere2_moe",
    "dbrx",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "doge",
    "dots1",
    "dots3_note_text",
    "ernie4_5_moe",
    "ernie4_5_vl_moe",
    "exaone_moe",
    "flex_olmo",
    "flint",
    "gemma4",
    "gemma4_text",
    "glm4_moe",
    "glm4_moe_lite",
    "glm4v_moe",
    "glm5_next",
    "glm_moe_dsa",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "hy_v3",
    "hy_v4",
    "inkling_text",
    "inkling2_text",
    "inkling2_loop_text",
    "jamba",
    "jetmoe",
    "kimi_linear",
    "kolibri1",
    "laguna",
    "lara_mini",
    "lfm2_moe",
    "llama4",
    "llama4_text",
    "longcat_flash",
    "mellum",
    "mimo_v2_flash",
    "minimax",
    "minimax_m2",
    "minimax_m3_vl",
    "mistral4",
    "mistral_large4",
    "mixtral",
    "nemotron_h",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl_moe",
    "qwen4_exp_text",
    "solar_open",
    "step3p7",
    "zaya",
)
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_DBRX = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 64,
    "vocab_size": 64,
    "initializer_range": 0.2,
    "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 2},
    "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
    "pad_token_id": 0,
}
_SPECIAL = {
    case.name: case
    for case in (
        FamilyCase(name="dbrx", whole=True, options=_DBRX),
        # the first layers choose by token id
        _case("deepseek_v4", "model.layers.0.mlp.gate", mlp_layer_types=["hash_moe", "moe", "moe"]),
        # refused: its positions in a table of key pairs are not its experts' numbers
        _case("doge", is_moe=True, num_experts=16),
        _case(
            "dots3_note_text",
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            mlp_layer_types=["dense", "sparse", "sparse"],
        ),
        # a second router beside, for images
        _case(
            "ernie4_5_vl_moe",
            "*.vision_moe.gate",
            moe_intermediate_size=[16, 16],
            rope_parameters={**_ROPE, "mrope_section": [1, 1, 2]},
        ),
        _case("glm4v_moe", rope_parameters={**_ROPE, "mrope_section": [1, 1, 0]}),
        _case("glm5_next", index_topk=16, qk_rope_head_dim=0),
        # its second layer runs twice for each token
        _case(
            "inkling2_loop_text",
            loop_layer_index_start=1,
            loop_layer_index_end=2,
            loop_num_passes=2,
            n_layers_per_attn_res_block=1,
            unpadded_vocab_size=64,
        ),
        # a second router in attention
        _case("jetmoe", "*.self_attention.experts.router", before=1),
        _case("lfm2_moe", layer_types=["conv", "full_attention", "full_attention"]),
        _case("mistral4", num_key_value_heads=4, head_dim=16),
        _case("nemotron_h", layers_block_type=["mamba", "moe", "full_attention", "moe"], num_hidden_layers=4),
        _case(
            "qwen4_exp_text",
            indexer_budget=16,
            indexer_compress_ratio=4,
            indexer_n_heads=2,
            indexer_kv_heads=1,
            indexer_head_dim=8,
        ),
        _case("longcat_flash", zero_expert_num=4),
        _case("zaya", num_experts_per_tok=1),
    )
}
FAMILIES: tuple[FamilyCase, ...] = tuple(_SPECIAL.get(name, FamilyCase(name=name)) for name in _NAMES)


def _shrunk(config_class: Any, options: dict[str, Any]) -> Any:
    base = config_class()
    given = {key: value for key, value in SMALL.items() if _has(base, key)}
    if "num_key_value_heads" in given and _has(base, "kv_lora_rank"):
        given["num_key_value_heads"] = 4
    for key in ("layer_types", "mlp_layer_types"):
        kinds = getattr(base, key, None)
        if isinstance(kinds, list | tuple) and kinds and key not in _properties(config_class) and not _given(options):
            own = list(dict.fromkeys(kinds))
            given[key] = (
                [kinds[0], own[-1], own[-1]]
                if key == "layer_types"
                else (["dense", "sparse", "sparse"] if "dense" in own else list(kinds[:3]))
            )
    given.update(options)
    parts: dict[str, Any] = getattr(config_class, "sub_configs", {}) or {}
    if any("text" in name for name in parts):
        given = {}
    for name, part in parts.items():
        if "text" in name:
            given[name] = _shrunk(part, options).to_dict()
        elif part is AutoConfig:
            given[name] = PIXTRAL
        elif "vision" in name:
            tiny = part()
            given[name] = part(**{key: value for key, value in VISION.items() if _has(tiny, key)}).to_dict()
    if "text_config" not in parts:
        given.update(TOKENS)
    return config_class(**given)


def _given(options: dict[str, Any]) -> bool:
    return any("layer" in key and "type" in key for key in options)


def _has(config: Any, key: str) -> bool:
    try:
        return hasattr(config, key)
    except (AttributeError, RuntimeError, ValueError):
        return True  # per layer: hasattr raises for it


def _properties(config_class: Any) -> set[str]:
    return {name for base in config_class.__mro__ for name, value in vars(base).items() if isinstance(value, property)}


def build(case: FamilyCase, *, seed: int = 0) -> Any:
    """A model in evaluation mode with random weights, float32."""
    config_class = CONFIG_MAPPING[case.name]
    config = config_class(**case.options) if case.whole else _shrunk(config_class, case.options)
    torch.manual_seed(seed)
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto.from_config(config).eval()  # type: ignore[no-untyped-call]
    raise ValueError(f"no model with a language head for {case.name}")
