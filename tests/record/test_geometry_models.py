"""What transformers writes and builds, against the corpus: saved configurations, and gates counted in live models.

Models are built on the meta device: real modules and real shapes, and no memory.
"""

from __future__ import annotations

import json
import sys
from typing import Any, ClassVar

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM

from routeplane.errors import ErrorKind, UsageError
from routeplane.record.geometry import Geometry, gate_paths, geometry_from_hf_config, geometry_from_model
from routeplane.record.meta_model import build_without_weights
from tests.geometries import CORPUS, MOE, check_refused, expected_of, shape_of


def hf_config(model_type: str, keys: dict[str, Any]) -> Any:
    """The transformers configuration object made of a config.json."""
    return CONFIG_MAPPING[model_type](**{key: value for key, value in keys.items() if key != "model_type"})


def build(config: Any) -> torch.nn.Module:
    """The transformers model of a configuration, without weights."""
    causal: Any = AutoModelForCausalLM
    trunk: Any = AutoModel
    with torch.device("meta"):
        try:
            model: torch.nn.Module = causal.from_config(config)
        except ValueError:  # a multimodal model has no causal-LM class
            model = trunk.from_config(config)
    return model


# ---- spellings ----


def model_type_of(name: str) -> str:
    """The model_type under which transformers 5.24 knows a corpus entry; empty where it does not."""
    known = {"LongCat-Flash-Chat": "longcat_flash", "Kimi-K2-Base": "deepseek_v3", "MiniMax-Text-01": "minimax"}
    model_type = known.get(name, CORPUS[name]["config"].get("model_type", ""))
    return model_type if model_type in CONFIG_MAPPING and model_type != "git" else ""


BUILDABLE = sorted(name for name in [*MOE, "LongCat-Flash-Chat"] if model_type_of(name))


def saved_by_transformers(name: str) -> Any:
    """A corpus entry as a transformers configuration object, which may spell its keys otherwise."""
    extra: dict[str, Any] = {"head_dim": 128} if model_type_of(name) == "hunyuan_v1_moe" else {}
    return hf_config(model_type_of(name), {**CORPUS[name]["config"], **extra})


@pytest.mark.parametrize("name", BUILDABLE)
def test_saving_with_transformers_changes_no_geometry(name: str) -> None:
    """The object, its full JSON and the JSON that save_pretrained writes agree with the original file."""
    config = saved_by_transformers(name)
    assert expected_of(name) == shape_of(geometry_from_hf_config(config))
    for use_diff in (False, True):
        assert expected_of(name) == shape_of(geometry_from_hf_config(json.loads(config.to_json_string(use_diff))))


def test_transformers_does_respell_the_keys() -> None:
    """The test above can fail: transformers renames, drops and adds deciding keys."""
    qwen = saved_by_transformers("Qwen3-30B-A3B").to_dict()
    assert (None, 128) == (qwen.get("num_experts"), qwen.get("num_local_experts"))
    nemotron = saved_by_transformers("Nemotron-3-Nano-30B-A3B").to_dict()
    assert {"hybrid_override_pattern", "num_hidden_layers"}.isdisjoint(nemotron)
    assert "moe_layers" in saved_by_transformers("Llama-4-Maverick-17B-128E").to_dict()["text_config"]


# ---- live models ----


@pytest.mark.parametrize("name", [name for name in BUILDABLE if name != "DBRX-instruct"])
def test_counting_a_real_model_agrees_with_reading_its_config(name: str) -> None:
    """The gates of the model that transformers builds are those that its file announces."""
    config = saved_by_transformers(name)
    counted = geometry_from_model(build(config))
    assert expected_of(name) == shape_of(counted)
    assert geometry_from_hf_config(config) == counted


SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 3,
    "pad_token_id": 0,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
}
#: family -> keys of a tiny model, and the geometry that they mean
TINY: dict[str, tuple[dict[str, Any], tuple[int, tuple[int, ...]]]] = {
    "mixtral": ({"num_local_experts": 12}, (12, (0, 1, 2, 3, 4))),
    "minimax": ({"num_local_experts": 12, "head_dim": 8}, (12, (0, 1, 2, 3, 4))),
    "minimax_m2": ({"num_local_experts": 12, "head_dim": 8}, (12, (0, 1, 2, 3, 4))),
    "phimoe": ({"num_local_experts": 12}, (12, (0, 1, 2, 3, 4))),
    "olmoe": ({"num_experts": 12}, (12, (0, 1, 2, 3, 4))),
    "granitemoe": ({"num_local_experts": 12}, (12, (0, 1, 2, 3, 4))),
    "granitemoeshared": ({"num_local_experts": 12}, (12, (0, 1, 2, 3, 4))),
    "gpt_oss": ({"num_local_experts": 12, "head_dim": 8}, (12, (0, 1, 2, 3, 4))),
    "qwen2_moe": ({"num_experts": 12, "decoder_sparse_step": 2}, (12, (1, 3))),
    "qwen3_moe": ({"num_experts": 12, "mlp_only_layers": [0, 3]}, (12, (1, 2, 4))),
    "qwen3_next": ({"num_experts": 12, "mlp_only_layers": [4]}, (12, (0, 1, 2, 3))),
    "qwen3_5_moe_text": ({"num_experts": 12}, (12, (0, 1, 2, 3, 4))),
    "deepseek_v2": ({**LATENT, "n_routed_experts": 12, "first_k_dense_replace": 2}, (12, (2, 3, 4))),
    "deepseek_v3": ({**LATENT, "n_routed_experts": 12, "first_k_dense_replace": 1}, (12, (1, 2, 3, 4))),
    "deepseek_v32": ({**LATENT, "n_routed_experts": 12, "first_k_dense_replace": 2}, (12, (2, 3, 4))),
    "glm4_moe": ({"n_routed_experts": 12, "first_k_dense_replace": 2}, (12, (2, 3, 4))),
    "glm4_moe_lite": ({**LATENT, "n_routed_experts": 12}, (12, (1, 2, 3, 4))),
    "glm_moe_dsa": ({**LATENT, "n_routed_experts": 12, "first_k_dense_replace": 4}, (12, (4,))),
    "dots1": ({"n_routed_experts": 12, "n_shared_experts": 1, "first_k_dense_replace": 3}, (12, (3, 4))),
    "llama4_text": ({"num_local_experts": 12, "interleave_moe_layer_step": 2}, (12, (1, 3))),
    "ernie4_5_moe": ({"moe_num_experts": 12, "moe_k": 3, "moe_layer_end_index": 3}, (12, (1, 2, 3))),
    "nemotron_h": ({"hybrid_override_pattern": "ME*E-", "n_routed_experts": 12}, (12, (1, 3))),
    "jamba": ({"num_experts": 12, "expert_layer_period": 3, "expert_layer_offset": 1}, (12, (1, 4))),
    "longcat_flash": (
        {
            **LATENT,
            "num_layers": 3,
            "num_hidden_layers": 6,
            "n_routed_experts": 12,
            "zero_expert_num": 6,
            "moe_topk": 3,
        },
        (18, (0, 1, 2)),
    ),
    "zaya": ({"num_experts": 12, "num_experts_per_tok": 1, "router_hidden_size": 12}, (13, (0, 1, 2, 3, 4))),
    "hunyuan_v1_moe": ({"num_experts": 12, "moe_topk": [3] * 5, "head_dim": 8}, (12, (0, 1, 2, 3, 4))),
}


@pytest.mark.parametrize("model_type", sorted(TINY))
def test_tiny_model_agrees_with_its_config(model_type: str) -> None:
    """Every family that transformers builds has the gates that its rule says, under keys that are not the defaults."""
    keys, (width, layer_ids) = TINY[model_type]
    config = hf_config(model_type, {**SMALL, **keys})
    counted = geometry_from_model(build(config))
    assert (width, keys.get("num_experts_per_tok", 3), layer_ids) == shape_of(counted)
    assert geometry_from_hf_config(config) == counted


def test_dbrx_counts_its_experts_apart_from_its_top_k() -> None:
    """DBRX's block holds the top-k and its experts their number."""
    parts = {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4}, "ffn_config": {"moe_num_experts": 12, "moe_top_k": 3}}
    config = hf_config("dbrx", {"d_model": 32, "n_heads": 4, "n_layers": 3, "vocab_size": 64, **parts})
    assert (12, 3, (0, 1, 2)) == shape_of(geometry_from_model(build(config)))
    assert geometry_from_hf_config(config) == geometry_from_model(build(config))


def test_multimodal_model_is_counted_in_its_text_model() -> None:
    """The vision tower has no gates and the language model's path is deeper."""
    config = hf_config("qwen3_vl_moe", CORPUS["Qwen3-VL-30B-A3B"]["config"])
    model = torch.nn.ModuleDict({"module": build(config)})
    assert expected_of("Qwen3-VL-30B-A3B") == shape_of(geometry_from_model(model))


def test_router_that_scores_shared_experts_is_as_wide_as_its_choice() -> None:
    """Inkling's router has rows for shared experts, which it never chooses; building it reads them."""
    config = hf_config("inkling_text", {"n_routed_experts": 12, "n_shared_experts": 2, "num_hidden_layers": 4})
    assert 12 == geometry_from_model(build(config)).num_experts
    assert 12 == geometry_from_hf_config(config).num_experts


def test_gate_paths_are_those_that_are_counted() -> None:
    """Each layer's path leads to the innermost module that chooses; a dense model has none."""
    block = Stack(gate=gate())
    for name, number in {"num_experts": 8, "top_k": 2}.items():
        setattr(block, name, number)
    model = Stack(layers__11__mlp=block, layers__2__router=gate(), layers__3__mlp=torch.nn.Linear(4, 8))
    assert [(2, "layers.2.router"), (11, "layers.11.mlp.gate")] == list(gate_paths(model).items())
    assert {} == gate_paths(torch.nn.Linear(4, 8))


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_dense_model_has_no_gate(model_type: str) -> None:
    """A model without anything like an expert is dense."""
    small = {key: value for key, value in SMALL.items() if "expert" not in key and "moe" not in key}
    model = build(hf_config(model_type, small))
    check_refused(ErrorKind.DENSE_MODEL, "no gate", lambda: geometry_from_model(model))


def test_two_routers_in_a_layer_are_refused() -> None:
    """JetMoE routes attention heads and MLP experts."""
    model = build(hf_config("jetmoe", {**SMALL, "num_local_experts": 8, "kv_channels": 8, "num_experts_per_tok": 2}))
    check_refused(ErrorKind.UNSUPPORTED_GEOMETRY, "one gate in layer 0", lambda: geometry_from_model(model))


# ---- gates in odd places ----


class Gate(torch.nn.Module):
    """A router with any numbers under any names."""

    def __init__(self, rows: int, **numbers: int) -> None:
        """Hold a weight of ``rows`` rows."""
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(rows, 4, device="meta"))
        for name, number in numbers.items():
            setattr(self, name, number)


class Stack(torch.nn.Module):
    """Modules at dotted paths."""

    def __init__(self, **at: torch.nn.Module) -> None:
        """Place each module at its keyword, in which ``__`` is a dot."""
        super().__init__()
        for path, module in at.items():
            *parents, leaf = path.split("__")
            scope: torch.nn.Module = self
            for parent in parents:
                if parent not in dict(scope.named_children()):
                    scope.add_module(parent, torch.nn.Module())
                scope = scope.get_submodule(parent)
            scope.add_module(leaf, module)


def gate(rows: int = 8, **numbers: int) -> Gate:
    """A plain gate of 8 experts and top-2, with numbers changed."""
    return Gate(rows, **{"top_k": 2, "num_experts": rows, **numbers})


def test_pruned_layers_give_a_width_each() -> None:
    """Layers with fewer experts make the width a tuple in layer order."""
    model = Stack(layers__4__gate=gate(6), layers__2__gate=gate(8), layers__3__gate=gate(7))
    assert Geometry(num_experts=(8, 7, 6), top_k=2, layer_ids=(2, 3, 4), model="Stack") == geometry_from_model(model)


@pytest.mark.parametrize("draft", ["mtp__layers__0__gate", "layers__0__nextn__gate", "MTP__layers__9__gate"])
def test_draft_layers_are_not_counted(draft: str) -> None:
    """A gate under mtp or nextn belongs to no decoder layer."""
    model = Stack(**{"layers__0__gate": gate(8), draft: gate(16)})
    assert (8, 2, (0,)) == shape_of(geometry_from_model(model))


def test_a_hybrid_with_draft_layers_is_counted() -> None:
    """Nemotron-H with MTP: Mamba, attention and MoE layers in turn, then draft layers with a router of their own, under
    the numbers of the decoder's first ones. Configuration and model agree; drafts are in neither."""
    kinds = ["mamba", "moe", "full_attention", "moe", "mamba", "mlp"]
    keys = {"layers_block_type": kinds, "num_hidden_layers": 6, "n_routed_experts": 12, "num_experts_per_tok": 3}
    config = hf_config("nemotron_h", {**keys, "num_nextn_predict_layers": 2, "mtp_layers_block_type": ["moe", "moe"]})
    model = build(config)
    bare = build(hf_config("nemotron_h", keys))
    [decoder] = [path.rpartition(".")[0] for path, _ in bare.named_modules() if path.endswith("layers.1")]
    layers: Any = bare.get_submodule(decoder)
    # as serving engines and Megatron hold the draft layers
    model.mtp = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layers[1], layers[3]])})

    assert (12, 3, (1, 3)) == shape_of(geometry_from_hf_config(config)) == shape_of(geometry_from_model(model))
    assert {1, 3} == gate_paths(model).keys()


def test_block_around_a_bare_linear_is_the_gate() -> None:
    """Transformers 4 keeps the numbers on the block and makes the gate a plain linear layer."""
    block = Stack(gate=torch.nn.Linear(4, 8), shared_expert_gate=torch.nn.Linear(4, 1))
    for name, number in {"num_experts": 8, "top_k": 2}.items():
        setattr(block, name, number)
    assert (8, 2, (5,)) == shape_of(geometry_from_model(Stack(layers__5__mlp=block)))


def test_zero_computation_experts_widen_a_router_that_says_so() -> None:
    """Rows beyond the experts are ids where the module counts identity experts."""
    model = Stack(layers__0__gate=gate(12, num_experts=8, zero_expert_num=4))
    assert (12, 2, (0,)) == shape_of(geometry_from_model(model))


@pytest.mark.parametrize(
    ("at", "named"),
    [
        ({"layers__0__a": gate(), "layers__0__b": gate()}, "one gate in layer 0, got layers.0.a and layers.0.b"),
        ({"layers__0__gate": gate(), "layers__1__gate": gate(top_k=3)}, "3 at layers.1.gate"),
        ({"layers__0__gate": gate(topk=3)}, "layers.0.gate"),
        ({"router": gate()}, "a row has a slot for each decoder layer, got router"),
        (
            {"talker__layers__0__gate": gate(), "thinker__layers__0__gate": gate()},
            "two that each have a layer 0 (talker.layers.0.gate and thinker.layers.0.gate)",
        ),
        ({"layers__0__gate": gate(), "vision__layers__0__gate": gate()}, "RouteSpec.from_model(model.vision)"),
        ({"layers__0__layers__1__gate": gate()}, "layers.0.layers.1.gate"),
        ({"layers__0__gate": gate(), "layers__1__gate": gate(12, num_experts=8)}, "layers.1.gate"),
        ({"layers__0__gate": gate(), "layers__1__gate": gate(4, num_experts=8)}, "layers.1.gate"),
        ({"layers__0__gate": gate(layer_number=5)}, "layer_number"),
        ({"layers__0__experts": torch.nn.Linear(4, 8)}, "layers.0.experts"),
    ],
    ids=[
        "two",
        "top-k",
        "top-k-twice",
        "no-layer",
        "towers",
        "tower",
        "nested",
        "wider",
        "sharded",
        "pipeline-stage",
        "no-numbers",
    ],
)
def test_gates_that_cannot_be_told_are_refused(at: dict[str, torch.nn.Module], named: str) -> None:
    """Whatever leaves a layer, a width or a top-k open is refused by path."""
    check_refused(ErrorKind.UNSUPPORTED_GEOMETRY, named, lambda: geometry_from_model(Stack(**at)))


def test_gate_beyond_the_decoder_is_refused() -> None:
    """A gate past num_hidden_layers is a draft layer that bears no name."""

    class Config:
        def to_dict(self) -> dict[str, object]:
            return {"model_type": "deepseek_v3", "num_hidden_layers": 2}

    model = Stack(layers__1__gate=gate(), layers__2__gate=gate())
    model.config = Config()  # type: ignore[assignment]
    check_refused(ErrorKind.UNSUPPORTED_GEOMETRY, "layer 2", lambda: geometry_from_model(model))


@pytest.mark.parametrize("model", [None, {"layers": 1}, object()], ids=["none", "dict", "object"])
def test_another_object_than_a_model_is_a_usage_error(model: object) -> None:
    """Nothing to walk: the call is wrong."""
    with pytest.raises(UsageError, match="named_modules"):
        geometry_from_model(model)


def test_a_layer_at_two_places_is_refused() -> None:
    """It runs twice in one forward, and a row has one choice."""
    model = Stack(layers__0__gate=gate())
    model.get_submodule("layers").add_module("1", model.get_submodule("layers.0"))
    check_refused(
        ErrorKind.UNSUPPORTED_GEOMETRY,
        "the gate layers.0.gate at layers.1.gate too",
        lambda: geometry_from_model(model),
    )


def test_a_model_of_another_class_than_torchs_is_counted() -> None:
    """``named_modules`` without torch's options, and a configuration that names no architecture."""

    class Walk:
        config: ClassVar[dict[str, object]] = {"num_hidden_layers": 4}

        def named_modules(self) -> list[tuple[str, object]]:
            return [("", self), ("layers.3.gate", gate())]

    assert Geometry(num_experts=8, top_k=2, layer_ids=(3,), model="Walk") == geometry_from_model(Walk())


# ---- what the environment has ----

UNKNOWN = {"architectures": ["OursForCausalLM"], "model_type": "ours", "num_experts": 8}


def test_without_transformers_an_unknown_architecture_stays_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal of the table is what the user sees, not a missing package."""
    monkeypatch.delitem(sys.modules, "routeplane.record.meta_model", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)

    check_refused(ErrorKind.UNKNOWN_ARCHITECTURE, "OursForCausalLM", lambda: geometry_from_hf_config(UNKNOWN))


def test_a_broken_installation_is_not_taken_for_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another module that is gone is the error."""
    monkeypatch.setitem(sys.modules, "routeplane.record.meta_model", None)

    with pytest.raises(ModuleNotFoundError, match=r"routeplane\.record\.meta_model"):
        geometry_from_hf_config(UNKNOWN)


def test_a_model_that_was_built_and_has_two_routers_is_refused_for_that() -> None:
    """The reason is the count's, not that the table does not know the name."""
    config = CONFIG_MAPPING["ernie4_5_vl_moe"]()
    check_refused(ErrorKind.UNSUPPORTED_GEOMETRY, "one gate in layer 1", lambda: geometry_from_hf_config(config))


def test_a_configuration_that_cannot_be_built_is_unknown_with_the_reason() -> None:
    """Transformers knows its name and fails to build it."""
    config = hf_config("lfm2_moe", {"num_hidden_layers": 2})
    del config.layer_types
    check_refused(ErrorKind.UNKNOWN_ARCHITECTURE, "write the RouteSpec by hand", lambda: build_without_weights(config))
