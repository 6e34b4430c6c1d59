"""Which keys of a model's configuration decide its routing geometry, family by family.

Owns the table of known architectures and the pure rules that turn one family's keys into the ids of its MoE layers;
``geometry`` decides which family a configuration belongs to. Knows no model library: a configuration is a mapping of
JSON values. Reading never falls back to
the defaults of a configuration class (for Qwen3-VL-MoE they are 24 layers, 60 experts and top-4, where the checkpoint
has 48, 128 and top-8): a key that is absent, contradictory or not understood is a refusal that names the key.

Every rule was compared with the routers of the model that transformers 5.24 builds, where it builds one, and with the
model definitions of vLLM 0.30.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from routeplane.errors import ErrorKind, SpecError

__all__ = ["FAMILIES", "MOST", "NEUTRAL", "Config", "Family", "LayerRule", "find", "pick", "refusal", "whole"]

Config: TypeAlias = Mapping[str, object]

_ROUTED = ("n_routed_experts", "num_experts", "num_local_experts")

#: Largest count accepted under any key: far above every known model, and a bound on what a foreign file makes us build.
MOST = 32_767
MOST_LAYERS = 4_096


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRule:
    """``ids`` gives the 0-based MoE layers of a configuration; ``reads`` names the layer keys it understands."""

    ids: Callable[[Config], tuple[int, ...]]
    reads: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Architectures that spell one geometry with the same keys.

    ``architectures``: ``architectures[0]`` less its task suffix (ForCausalLM, Model, ...). ``experts``, ``top_k``: all
    spellings of one key, the original first; a dot descends into a nested mapping. ``wider_by``: keys whose values,
    and ``extra_width``: a number no key announces, that the router is wider than its experts. ``per_layer``: whether
    a list of one value per layer may stand under those keys. ``refused``: why the family has no geometry.
    """

    architectures: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    experts: tuple[str, ...] = ("num_experts", "num_local_experts")
    top_k: tuple[str, ...] = ("num_experts_per_tok",)
    rule: LayerRule
    wider_by: tuple[str, ...] = ()
    extra_width: int = 0
    per_layer: bool = False
    refused: str = ""


# ---- reading one key ----


def refusal(expected: str, got: str) -> SpecError:
    """The error for a configuration that cannot be understood; both texts name the key."""
    return SpecError(f"expected {expected}, got {got}", kind=ErrorKind.UNSUPPORTED_GEOMETRY)


def find(config: Config, key: str) -> object:
    """The value under a key, dots descending; None where it is absent. JSON null and absence mean the same."""
    value: object = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def pick(config: Config, keys: tuple[str, ...]) -> tuple[str, object]:
    """The one key of several spellings that is present, and its value. Absent or contradictory: SpecError."""
    found = [(key, value) for key in keys if (value := find(config, key)) is not None]
    if not found:
        raise refusal(f"the key {' or '.join(keys)}", "a configuration without it")
    if any(value != found[0][1] for _, value in found):
        raise refusal(f"{' and '.join(keys)} to agree", ", ".join(f"{key}={value!r}" for key, value in found))
    return found[0]


def whole(config: Config, key: str, *, least: int = 0, most: int = MOST) -> int:
    """The integer in ``[least, most]`` under a key. Absent, of another type or out of range: SpecError."""
    _, value = pick(config, (key,))
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise refusal(f"{key} as an integer in [{least}, {most}]", repr(value))
    return value


def _listed(config: Config, key: str) -> tuple[object, ...]:
    _, value = pick(config, (key,))
    if not isinstance(value, list | tuple):
        raise refusal(f"{key} as a list", repr(value))
    return tuple(value)


def _layer_list(config: Config, key: str, num_layers: int) -> tuple[int, ...]:
    """Layer ids under a key. Those past the last layer change nothing in any engine (a model cut short keeps them)."""
    layers: list[int] = []
    for layer in _listed(config, key):
        if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
            raise refusal(f"{key} as non-negative layer ids", repr(layer))
        layers.append(layer)
    return tuple(sorted(layer for layer in set(layers) if layer < num_layers))


def _kinds(config: Config, key: str, known: tuple[str, ...]) -> tuple[str, ...]:
    kinds = _listed(config, key)
    if not all(isinstance(kind, str) and kind in known for kind in kinds):
        raise refusal(f"{key} made of {list(known)}", f"{sorted({str(kind) for kind in kinds})}")
    return tuple(str(kind) for kind in kinds)


def _kind_per_layer(config: Config, key: str, known: tuple[str, ...]) -> tuple[str, ...]:
    kinds = _kinds(config, key, known)
    num_layers = _depth(config)
    if len(kinds) != num_layers:
        raise refusal(f"{key} of length num_hidden_layers={num_layers}", f"{len(kinds)} entries")
    return kinds


def _depth(config: Config, key: str = "num_hidden_layers") -> int:
    return whole(config, key, least=1, most=MOST_LAYERS)


# ---- layer rules ----


def _every(config: Config, key: str = "num_hidden_layers") -> tuple[int, ...]:
    return tuple(range(_depth(config, key)))


def _sparse_step(config: Config) -> tuple[int, ...]:
    # mlp_only_layers lists exceptions and came after Qwen1.5-MoE and Qwen2-57B, whose files lack it: absent is empty
    num_layers = _depth(config)
    step = whole(config, "decoder_sparse_step", least=1)
    dense = _layer_list(config, "mlp_only_layers", num_layers) if find(config, "mlp_only_layers") is not None else ()
    return tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)


def _dense_prefix(config: Config) -> tuple[int, ...]:
    return tuple(range(whole(config, "first_k_dense_replace"), _depth(config)))


def _dense_prefix_or_kinds(config: Config) -> tuple[int, ...]:
    """``mlp_layer_types`` where transformers wrote it, the dense prefix of the original file otherwise, or both."""
    if find(config, "mlp_layer_types") is None:
        return _dense_prefix(config)
    kinds = _kind_per_layer(config, "mlp_layer_types", ("dense", "sparse"))
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    if find(config, "first_k_dense_replace") is not None and layers != _dense_prefix(config):
        prefix = whole(config, "first_k_dense_replace")
        raise refusal("mlp_layer_types and first_k_dense_replace to agree", f"sparse layers {layers} against {prefix}")
    return layers


def _interleaved(config: Config) -> tuple[int, ...]:
    # transformers writes moe_layers into every file that it saves, and then builds from that list alone
    num_layers = _depth(config)
    if find(config, "moe_layers") is not None:
        return _layer_list(config, "moe_layers", num_layers)
    step = whole(config, "interleave_moe_layer_step", least=1)
    return tuple(range(step - 1, num_layers, step))


def _period_and_offset(config: Config) -> tuple[int, ...]:
    period = whole(config, "expert_layer_period", least=1)
    offset = whole(config, "expert_layer_offset", most=period - 1)
    return tuple(layer for layer in range(_depth(config)) if layer % period == offset)


def _start_to_end(config: Config) -> tuple[int, ...]:
    # the end is inclusive, and -1 is the last layer
    num_layers = _depth(config)
    interval = whole(config, "moe_layer_interval", least=1)
    start = whole(config, "moe_layer_start_index")
    end = whole(config, "moe_layer_end_index", least=-1)
    last = num_layers - 1 if end == -1 else min(end, num_layers - 1)
    return tuple(layer for layer in range(start, last + 1) if (layer + 1) % interval == 0)


def _hybrid_pattern(config: Config) -> tuple[int, ...]:
    """Blocks of a Nemotron-H: a MoE block is a layer of its own. The list is what transformers makes of the pattern."""
    found: list[tuple[bool, ...]] = []
    if find(config, "hybrid_override_pattern") is not None:
        _, pattern = pick(config, ("hybrid_override_pattern",))
        if not isinstance(pattern, str) or set(pattern) - set("ME*-"):
            raise refusal("hybrid_override_pattern made of M, E, * and -", repr(pattern))
        found.append(tuple(block == "E" for block in pattern))
    for key in ("layers_block_type", "layer_types"):
        if find(config, key) is not None:
            known = ("linear_attention", "mamba", "full_attention", "attention", "mlp", "moe")
            found.append(tuple(kind == "moe" for kind in _kinds(config, key, known)))
    if not found:
        raise refusal("the key hybrid_override_pattern or layers_block_type", "a configuration without it")
    if any(blocks != found[0] for blocks in found):
        raise refusal("hybrid_override_pattern, layers_block_type and layer_types to agree", "different MoE blocks")
    if find(config, "num_hidden_layers") is not None and _depth(config) != len(found[0]):
        raise refusal(f"num_hidden_layers={_depth(config)} blocks in the pattern", f"{len(found[0])}")
    return tuple(layer for layer, is_moe in enumerate(found[0]) if is_moe)


def _hashed_or_learned(config: Config) -> tuple[int, ...]:
    # the first layers of DeepSeek-V4 choose by a table of token ids: chosen experts all the same, and recorded as such
    if find(config, "mlp_layer_types") is not None:
        _kind_per_layer(config, "mlp_layer_types", ("hash_moe", "moe"))
    return _every(config)


def _double_layers(config: Config) -> tuple[int, ...]:
    # LongCat: a layer has two attention sublayers and one router. Where a file gives the sublayers too, transformers
    # takes the number of layers from them.
    layers = _every(config, "num_layers")
    if find(config, "num_hidden_layers") is not None and _depth(config) != 2 * len(layers):
        raise refusal(f"num_hidden_layers absent or twice num_layers={len(layers)}", f"{_depth(config)}")
    return layers


def _hybrid_units(config: Config) -> tuple[int, ...]:
    # the kinds are required: only a layer that is attention and MoE in one makes the layer count the router count
    return tuple(range(len(_kind_per_layer(config, "layer_types", ("hybrid", "hybrid_sliding")))))


def _none(config: Config) -> tuple[int, ...]:
    for key in _ROUTED:
        if find(config, key) is not None:
            raise refusal(f"no {key} in a dense architecture", repr(find(config, key)))
    return ()


EVERY = LayerRule(ids=_every)
SPARSE_STEP = LayerRule(ids=_sparse_step, reads=("decoder_sparse_step", "mlp_only_layers"))
DENSE_PREFIX = LayerRule(ids=_dense_prefix, reads=("first_k_dense_replace",))
DENSE_PREFIX_OR_KINDS = LayerRule(ids=_dense_prefix_or_kinds, reads=("first_k_dense_replace", "mlp_layer_types"))
INTERLEAVED = LayerRule(ids=_interleaved, reads=("moe_layers", "interleave_moe_layer_step"))
PERIOD_AND_OFFSET = LayerRule(ids=_period_and_offset, reads=("expert_layer_period", "expert_layer_offset"))
START_TO_END = LayerRule(
    ids=_start_to_end, reads=("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
)
HYBRID_PATTERN = LayerRule(ids=_hybrid_pattern)
HASHED_OR_LEARNED = LayerRule(ids=_hashed_or_learned, reads=("mlp_layer_types",))

#: Keys that say, in some family, which layers route, with the value under which they say nothing. ``moe_layer_freq``
#: is read by no rule: for a value other than 1 vLLM skips layers that transformers builds, so neither is right.
NEUTRAL: tuple[tuple[str, object], ...] = (
    ("decoder_sparse_step", 1),
    ("expert_layer_offset", 0),
    ("expert_layer_period", 1),
    ("first_k_dense_replace", 0),
    ("interleave_moe_layer_step", 1),
    ("mlp_layer_types", None),
    ("mlp_only_layers", []),
    ("moe_layer_end_index", -1),
    ("moe_layer_freq", 1),
    ("moe_layer_interval", 1),
    ("moe_layer_num_skipped", 0),
    ("moe_layer_start_index", 0),
    ("moe_layers", None),
    ("moe_layers_enum", None),
    ("num_dense_layers", 0),
    ("use_moe", True),
)


# ---- the table ----

FAMILIES: tuple[Family, ...] = (
    Family(
        architectures=("Mixtral", "MiniMaxText01", "MiniMaxM1", "MiniMax", "MiniMaxM2", "Phimoe", "PhiMoE", "Olmoe"),
        model_types=("mixtral", "minimax_text_01", "minimax_m1", "minimax", "minimax_m2", "phimoe", "olmoe"),
        rule=EVERY,
    ),
    Family(
        architectures=("GraniteMoe", "GraniteMoeShared", "GraniteMoeHybrid"),
        model_types=("granitemoe", "granitemoeshared", "granitemoehybrid"),
        rule=EVERY,
    ),
    Family(
        architectures=("Qwen2Moe", "Qwen3Moe", "Qwen3Next", "Qwen3VLMoe"),
        model_types=("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe", "qwen3_vl_moe_text"),
        rule=SPARSE_STEP,
    ),
    Family(architectures=("Qwen3_5Moe",), model_types=("qwen3_5_moe", "qwen3_5_moe_text"), rule=EVERY),
    Family(
        architectures=("Deepseek", "DeepseekV2", "DeepseekV3", "KimiK2", "KimiK25", "Glm4Moe", "Glm4vMoe", "Dots1"),
        model_types=(
            *("deepseek", "deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "glm4_moe", "dots1"),
            *("glm4v_moe", "glm4v_moe_text"),
        ),
        experts=_ROUTED,
        rule=DENSE_PREFIX,
    ),
    Family(
        architectures=("DeepseekV32", "GlmMoeDsa", "Glm4MoeLite"),
        model_types=("deepseek_v32", "glm_moe_dsa", "glm4_moe_lite"),
        experts=_ROUTED,
        rule=DENSE_PREFIX_OR_KINDS,
    ),
    Family(architectures=("DeepseekV4",), model_types=("deepseek_v4",), experts=_ROUTED, rule=HASHED_OR_LEARNED),
    Family(
        architectures=("GptOss",),
        model_types=("gpt_oss",),
        top_k=("num_experts_per_tok", "experts_per_token"),
        rule=EVERY,
    ),
    Family(architectures=("Llama4",), model_types=("llama4", "llama4_text"), rule=INTERLEAVED),
    Family(
        architectures=("Ernie4_5_Moe",),
        model_types=("ernie4_5_moe",),
        experts=("moe_num_experts", "num_experts"),
        top_k=("moe_k", "num_experts_per_tok"),
        rule=START_TO_END,
    ),
    Family(architectures=("NemotronH",), model_types=("nemotron_h",), experts=_ROUTED, rule=HYBRID_PATTERN),
    Family(architectures=("Jamba",), model_types=("jamba",), rule=PERIOD_AND_OFFSET),
    Family(
        architectures=("Dbrx",),
        model_types=("dbrx",),
        experts=("ffn_config.moe_num_experts",),
        top_k=("ffn_config.moe_top_k",),
        rule=LayerRule(ids=partial(_every, key="n_layers")),
    ),
    Family(
        # dense and MoE models share the names "HunYuan" and "hunyuan"; the expert count tells them apart
        architectures=("HunYuanMoEV1", "HunYuan"),
        model_types=("hunyuan_v1_moe", "hunyuan"),
        top_k=("moe_topk", "num_experts_per_tok"),
        per_layer=True,
        rule=EVERY,
    ),
    Family(
        architectures=("LongcatFlash",),
        model_types=("longcat_flash",),
        experts=_ROUTED,
        top_k=("moe_topk", "num_experts_per_tok"),
        wider_by=("zero_expert_num",),
        rule=LayerRule(ids=_double_layers),
    ),
    Family(
        # by architecture alone: Grok-2's model_type is "git", that of an image captioner
        architectures=("Grok1", "Grok1Model"),
        rule=EVERY,
    ),
    Family(
        # the router's last class skips the layer; no key announces it
        architectures=("Zaya",),
        model_types=("zaya",),
        extra_width=1,
        rule=LayerRule(ids=_hybrid_units),
    ),
    Family(
        architectures=("JetMoe",),
        model_types=("jetmoe",),
        rule=EVERY,
        refused="two routers per layer (one for attention heads, one for MLP experts): a row has no single meaning",
    ),
    Family(
        architectures=(
            *("Llama", "Mistral", "Mistral3", "Qwen2", "Qwen2_5_VL", "Qwen2VL", "Qwen3", "Qwen3VL", "Qwen3_5"),
            *("Gemma", "Gemma2", "Gemma3", "Phi", "Phi3", "Olmo", "Olmo2", "Olmo3", "Glm", "Glm4", "Granite"),
            *("Cohere", "Cohere2", "Starcoder2", "HunYuanDenseV1"),
        ),
        model_types=(
            *("llama", "mistral", "mistral3", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text"),
            *("qwen3", "qwen3_vl", "qwen3_vl_text", "qwen3_5", "qwen3_5_text", "gemma", "gemma2", "gemma3"),
            *("gemma3_text", "phi", "phi3", "olmo", "olmo2", "olmo3", "glm", "glm4", "granite"),
            *("cohere", "cohere2", "starcoder2", "hunyuan_v1_dense"),
        ),
        experts=_ROUTED,
        rule=LayerRule(ids=_none),
    ),
)
