"""Geometries read from configurations, against the files of 43 real models.

Which keys decide, and what each rule makes of them, is ``test_families``; what transformers writes and builds is
``test_geometry_models``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from routeplane.errors import ErrorKind, SpecError, UsageError
from routeplane.record.geometry import geometry_from_hf_config
from tests.geometries import CORPUS, DENSE, MOE, REFUSED, check_refused, config_of, expected_of, shape_of

if TYPE_CHECKING:
    from collections.abc import Iterator


# ---- the corpus ----


def test_corpus_is_whole() -> None:
    """The corpus that the other tests walk holds 39 MoE models and 4 dense ones."""
    assert (37, 2, 4) == (len(MOE), len(REFUSED), len(DENSE))


@pytest.mark.parametrize("name", MOE)
def test_real_config_gives_the_right_geometry(name: str) -> None:
    """A real config.json gives the geometry that its model has."""
    assert expected_of(name) == shape_of(geometry_from_hf_config(CORPUS[name]["config"]))


@pytest.mark.parametrize("name", DENSE)
def test_dense_config_is_refused_as_dense(name: str) -> None:
    """A dense model is told apart from an unknown one."""
    check_refused(ErrorKind.DENSE_MODEL, "", lambda: geometry_from_hf_config(CORPUS[name]["config"]))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_ambiguous_config_is_refused_by_key(name: str) -> None:
    """A configuration with no single right answer is refused, and the refusal names the key."""
    kind, named = REFUSED[name]
    check_refused(kind, named, lambda: geometry_from_hf_config(CORPUS[name]["config"]))


def test_longcat_is_wider_than_its_experts_and_counts_num_layers() -> None:
    """Once LongCat's file says what it is, identity experts are ids and each of num_layers units has one router."""
    config = config_of("LongCat-Flash-Chat", model_type="longcat_flash")
    assert (768, 12, tuple(range(28))) == shape_of(geometry_from_hf_config(config))
    config |= {"num_hidden_layers": 56}
    assert (768, 12, tuple(range(28))) == shape_of(geometry_from_hf_config(config))


def key_paths(config: dict[str, Any], parents: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every key of a configuration, nested ones too."""
    for key, value in config.items():
        yield (*parents, key)
        if isinstance(value, dict):
            yield from key_paths(value, (*parents, key))


def without(config: dict[str, Any], path: tuple[str, ...], *, null: bool) -> dict[str, Any]:
    """A deep copy with one key taken away, or null."""
    copy: dict[str, Any] = json.loads(json.dumps(config))
    *parents, leaf = path
    scope = copy
    for parent in parents:
        scope = scope[parent]
    scope[leaf] = None
    if not null:
        del scope[leaf]
    return copy


def answer_to(config: dict[str, Any]) -> object:
    """The geometry's shape, or the refusal."""
    try:
        return shape_of(geometry_from_hf_config(config))
    except SpecError as error:
        return error


def may_refuse(error: SpecError, leaf: str, *, null: bool) -> bool:
    """Whether a refusal is about the key that was taken away."""
    if leaf in ("architectures", "model_type"):
        return error.kind is ErrorKind.UNKNOWN_ARCHITECTURE
    if leaf == "text_config":  # then the top level is read as the text model, and has no counts
        return "expected the key" in error.message
    if null and "experts" in leaf and error.kind is ErrorKind.DENSE_MODEL:  # how some files say so
        return True
    return error.kind is ErrorKind.UNSUPPORTED_GEOMETRY and leaf in error.message


@pytest.mark.parametrize("null", [False, True], ids=["absent", "null"])
@pytest.mark.parametrize("name", MOE)
def test_a_key_that_is_taken_away_is_never_replaced_by_a_default(name: str, null: bool) -> None:
    """Without any one of its keys, or with null there, a file gives the same geometry or a refusal by that key."""
    for path in key_paths(CORPUS[name]["config"]):
        answer = answer_to(without(CORPUS[name]["config"], path, null=null))
        if isinstance(answer, SpecError):
            assert may_refuse(answer, path[-1], null=null), answer.message
        else:
            assert expected_of(name) == answer, path


#: keys that their file cannot do without
DECIDING = {
    "Qwen3-30B-A3B": ("num_hidden_layers", "num_experts", "num_experts_per_tok", "decoder_sparse_step"),
    "DeepSeek-V3": ("num_hidden_layers", "n_routed_experts", "num_experts_per_tok", "first_k_dense_replace"),
    "ERNIE-4.5-21B-A3B": ("moe_k", "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
    "Jamba-v0.1": ("expert_layer_period", "expert_layer_offset"),
    "Nemotron-3-Nano-30B-A3B": ("hybrid_override_pattern", "n_routed_experts"),
    "ZAYA1-8B": ("layer_types",),
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in DECIDING.items() for key in keys])
def test_a_deciding_key_is_missed(name: str, key: str) -> None:
    """The absence of a count or of a layer key is refused by name, whatever default the library's class has for it."""
    check_refused(ErrorKind.UNSUPPORTED_GEOMETRY, key, lambda: geometry_from_hf_config(config_of(name, **{key: ...})))


# ---- spellings ----


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("Qwen3-30B-A3B", {"num_local_experts": 64}, "num_experts=128, num_local_experts=64"),
        ("gpt-oss-20b", {"experts_per_token": 2}, "num_experts_per_tok=4, experts_per_token=2"),
        ("DeepSeek-V3", {"num_local_experts": 8}, "n_routed_experts=256, num_local_experts=8"),
        ("ERNIE-4.5-21B-A3B", {"num_experts_per_tok": 8}, "moe_k=6, num_experts_per_tok=8"),
        ("Nemotron-3-Nano-30B-A3B", {"layers_block_type": ["moe"] * 52}, "hybrid_override_pattern, layers_block_type"),
        ("Nemotron-3-Nano-30B-A3B", {"num_hidden_layers": 51}, "num_hidden_layers=51"),
        ("Qwen3-VL-30B-A3B", {"num_experts": 60}, "num_experts and text_config.num_experts"),
    ],
)
def test_contradictory_spellings_are_refused(name: str, changes: dict[str, Any], named: str) -> None:
    """Two spellings of one key with two values are refused by both names; with one value they are one key."""
    check_refused(ErrorKind.UNSUPPORTED_GEOMETRY, named, lambda: geometry_from_hf_config(config_of(name, **changes)))


def test_agreeing_spellings_are_one_key() -> None:
    """A file that repeats a value under another name of its key is read."""
    config = config_of("Qwen3-30B-A3B", num_local_experts=128)
    assert expected_of("Qwen3-30B-A3B") == shape_of(geometry_from_hf_config(config))


# ---- who the model is ----


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["NeverSeenForCausalLM"], "model_type": "never_seen"}, "NeverSeenForCausalLM"),
        ({"architectures": ..., "model_type": "never_seen"}, "never_seen"),
        ({"architectures": ["NeverSeenForCausalLM"]}, "NeverSeenForCausalLM"),
        ({"architectures": ["Qwen3MoeForCausalLMEagle3"]}, "Eagle3"),
        ({"architectures": [], "model_type": ...}, "neither architectures nor model_type"),
    ],
    ids=["neither-known", "type-alone", "borrowed-type", "draft-head", "nameless"],
)
def test_unknown_architecture_is_never_guessed(changes: dict[str, Any], named: str) -> None:
    """However familiar the keys look, a name that was never seen is refused, and the refusal says what to do."""
    config = config_of("Qwen3-30B-A3B", **changes)
    check_refused(ErrorKind.UNKNOWN_ARCHITECTURE, named, lambda: geometry_from_hf_config(config))
    check_refused(ErrorKind.UNKNOWN_ARCHITECTURE, "RouteSpec.from_model", lambda: geometry_from_hf_config(config))


def test_unknown_text_model_in_a_known_wrapper_is_refused() -> None:
    """Both levels of a multimodal file must be known."""
    text = {**CORPUS["Qwen3-VL-30B-A3B"]["config"]["text_config"], "model_type": "never_seen"}
    config = config_of("Qwen3-VL-30B-A3B", text_config=text)
    check_refused(ErrorKind.UNKNOWN_ARCHITECTURE, "never_seen", lambda: geometry_from_hf_config(config))
    config = config_of("Qwen3-VL-30B-A3B", architectures=["NeverSeenForConditionalGeneration"])
    check_refused(ErrorKind.UNKNOWN_ARCHITECTURE, "NeverSeen", lambda: geometry_from_hf_config(config))


@pytest.mark.parametrize("model_type", ["git", "mixtral", "llama", ...], ids=str)
def test_architecture_outweighs_a_borrowed_model_type(model_type: object) -> None:
    """Grok files bear the model_type of other models, dense ones too."""
    config = config_of("Grok-2", model_type=model_type)
    assert expected_of("Grok-2") == shape_of(geometry_from_hf_config(config))


@pytest.mark.parametrize("task", ["ForSequenceClassification", "ForTokenClassification", "Model", "ForCausalLM"])
def test_head_of_a_model_does_not_matter(task: str) -> None:
    """Reward models and bare trunks have the geometry of their language model."""
    config = config_of("Qwen3-30B-A3B", architectures=[f"Qwen3Moe{task}"])
    assert expected_of("Qwen3-30B-A3B") == shape_of(geometry_from_hf_config(config))


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("Qwen3-30B-A3B", {}, "Qwen3MoeForCausalLM"),
        ("Qwen3-30B-A3B", {"architectures": ...}, "qwen3_moe"),
        ("Kimi-K2.5", {}, "DeepseekV3ForCausalLM"),
        ("Qwen3-VL-30B-A3B", {}, "qwen3_vl_moe_text"),
    ],
)
def test_name_is_that_of_the_text_model(name: str, changes: dict[str, Any], expected: str) -> None:
    """A geometry is named by architectures[0], else model_type, of the text model."""
    assert expected == geometry_from_hf_config(config_of(name, **changes)).model


def test_name_is_the_same_without_the_wrapper() -> None:
    """A trainer that loads the text model alone names it as the engine does that loads it all."""
    config = CORPUS["Kimi-K2.5"]["config"]
    assert geometry_from_hf_config(config) == geometry_from_hf_config(config["text_config"])


@pytest.mark.parametrize(
    "config", [None, 7, "qwen3_moe", object(), [("num_experts", 8)]], ids=["none", "int", "str", "object", "list"]
)
def test_another_object_than_a_configuration_is_a_usage_error(config: object) -> None:
    """Neither a mapping nor to_dict: the call is wrong, not the model."""
    with pytest.raises(UsageError, match="to_dict"):
        geometry_from_hf_config(config)
