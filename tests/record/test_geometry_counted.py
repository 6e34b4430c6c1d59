"""Geometry of every architecture with experts that the installed Transformers has: right, or refused with the reason.

Each is built from its default configuration on the meta device. What a gate's count is held against does not look at
gates: which decoder layers hold a module of experts, how many experts it holds, and the top-k under the names that
configurations have for it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from routeplane.errors import ErrorKind, SpecError
from routeplane.record.geometry import Geometry, geometry_from_hf_config, geometry_from_model
from routeplane.record.meta_model import build_without_weights
from tests.geometries import shape_of

MODELS = Path(transformers.__file__).parent / "models"
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k", "moe_top_k", "top_k")
#: why a default configuration has no geometry, where that is not a model without experts
REFUSED = {
    "deepseek_v2": "its default configuration names no top-k",
    "diffusion_gemma": "its default configuration cannot be built",
    "deepseek_ocr2": "its default configuration cannot be built",
    "dots1": "its default configuration has no expert count",
    "ernie4_5_vl_moe": "it has a router for text and one for images in a layer",
    "hunyuan_v1_moe": "its default configuration has one expert",
    "jetmoe": "it has two routers in a layer",
}
#: the layers in the order in which they run, where some run several times
ORDERS = {"inkling2_loop": [*range(6), *[*range(6, 18)] * 3, *range(18, 24)]}


def _folders() -> list[str]:
    """Folders whose configuration names experts."""
    return sorted(
        folder.name
        for folder in MODELS.iterdir()
        if any("expert" in file.read_text(errors="ignore") for file in folder.glob("configuration_*.py"))
    )


def _types() -> Iterator[str]:
    """The model types of these folders that stand for a whole model or its text model."""
    folders = set(_folders())
    for model_type in CONFIG_MAPPING.keys():  # noqa: SIM118  a lazy mapping
        folder = CONFIG_MAPPING[model_type].__module__.split(".")[2]
        if folder in folders and not re.search("vision|audio|encoder", model_type):
            yield model_type


TYPES = sorted(_types())


@cache
def built(model_type: str) -> torch.nn.Module | None:
    """The default model without weights; None where it cannot be built."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return build_without_weights(CONFIG_MAPPING[model_type]())
        except SpecError:
            return None


def expert_layers(model: torch.nn.Module) -> dict[int, int]:
    """How many experts each decoder layer holds: a list of them, or a parameter with a matrix for each."""
    found: dict[int, int] = {}
    for path, module in model.named_modules():
        place = re.search(r"(?:layers|blocks|h)\.(\d+)\.(?:.*\.)?(?:experts|routed_experts)$", path)
        if place is None or re.search("mtp|nextn|vision|visual|audio", path):
            continue
        if isinstance(module, torch.nn.ModuleList):
            count = len(module)
        else:
            sides = [parameter.shape[0] for parameter in module.parameters(recurse=False) if parameter.ndim == 3]
            count = min(sides) if sides else 0
        if count:
            found[int(place[1])] = count
    return found


def top_k_of(model: torch.nn.Module) -> set[int]:
    """What the configuration says of top-k."""
    config: Any = model.config
    text = config.get_text_config()
    return {value for name in TOP_K if isinstance(value := getattr(text, name, None), int)}


def counted(model_type: str) -> Geometry | SpecError:
    """The geometry, or the refusal."""
    try:
        return geometry_from_hf_config(CONFIG_MAPPING[model_type]())
    except SpecError as error:
        return error


def test_there_are_as_many_architectures_as_are_known_of() -> None:
    """Transformers 5.24 has 79 folders whose configuration names experts: none is left out."""
    assert 79 <= len(_folders())
    assert 79 <= len(TYPES)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_every_architecture_is_right_or_refused_with_the_reason(model_type: str) -> None:
    """The layers with experts, their number and the top-k of the configuration; the table agrees wherever it speaks."""
    folder = CONFIG_MAPPING[model_type].__module__.split(".")[2]
    found, model = counted(model_type), built(model_type)
    if isinstance(found, SpecError):
        if model is not None and expert_layers(model):
            assert folder in REFUSED, found
        else:
            assert found.kind in (ErrorKind.DENSE_MODEL, ErrorKind.UNKNOWN_ARCHITECTURE, ErrorKind.UNSUPPORTED_GEOMETRY)
        assert found.message.startswith("expected ")
        return
    assert folder not in REFUSED
    if model is None:
        return  # the table speaks for a default that cannot be built
    layers = expert_layers(model)
    if folder in ORDERS:
        layers = {at: layers[layer] for at, layer in enumerate(ORDERS[folder]) if layer in layers}
    widths = (found.num_experts,) * len(found.layer_ids) if isinstance(found.num_experts, int) else found.num_experts
    assert sorted(layers) == list(found.layer_ids)
    # a router may be wider than its experts: identity experts are legal ids
    assert all(width >= layers[layer] for width, layer in zip(widths, found.layer_ids, strict=True))
    if folder not in ("longcat_flash", "zaya"):
        assert [layers[layer] for layer in found.layer_ids] == list(widths)
    assert not top_k_of(model) or found.top_k in top_k_of(model)
    assert shape_of(found) == shape_of(geometry_from_model(model))


_INDEXER = ("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio")
#: what a default configuration lacks for its model to be built, as public checkpoints have it
COMPLETED: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500_000.0},
        "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4, "ffn_hidden_size": 64},
        "n_layers": 4,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "qwen4_exp_text": {f"indexer_{name}": value for name, value in zip(_INDEXER, (4, 1, 256, 64, 8), strict=True)},
}


@pytest.mark.parametrize("model_type", COMPLETED)
def test_a_configuration_that_can_be_built_is_counted(model_type: str) -> None:
    """Their defaults are refused, or taken from the table alone; as checkpoints have them, count and table agree."""
    config = CONFIG_MAPPING[model_type](**COMPLETED[model_type])
    model = build_without_weights(config)

    assert shape_of(geometry_from_model(model)) == shape_of(geometry_from_hf_config(config))


def test_gemma_4_is_counted_where_it_has_experts() -> None:
    """Its router hangs beside the layer's feed-forward, and keeps its numbers in the configuration."""
    make: Any = CONFIG_MAPPING["gemma4_text"]
    config = make(enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=16, num_hidden_layers=3)
    found = geometry_from_hf_config(config)

    assert (8, 2, (0, 1, 2)) == (found.num_experts, found.top_k, found.layer_ids)


def test_layers_that_run_several_times_have_a_number_for_each_pass() -> None:
    """In the order in which they run; a loop of layers that the configuration does not name is refused."""
    found = counted("inkling2_loop")

    assert isinstance(found, Geometry)
    assert [at for at, layer in enumerate(ORDERS["inkling2_loop"]) if layer >= 2] == list(found.layer_ids)[-46:]
    make: Any = CONFIG_MAPPING["olmoe"]
    with pytest.raises(SpecError, match=r"num_loops=1\), got 2; the forward numbers such layers"):
        geometry_from_model(build_without_weights(make(num_loops=2)))
    with pytest.raises(SpecError, match=r"num_loops=1\), got 2"):
        geometry_from_hf_config({**make().to_dict(), "num_loops": 2})


def test_a_saved_configuration_is_counted_like_its_object() -> None:
    """The mapping of a config.json gives what its object gives."""
    config = CONFIG_MAPPING["kimi_linear"]()

    assert shape_of(geometry_from_hf_config(config)) == shape_of(geometry_from_hf_config(config.to_dict()))
    assert (256, 8) == (geometry_from_hf_config(config).num_experts, geometry_from_hf_config(config).top_k)
