"""The corpus of real model configurations, and what the tests of geometries share.

``data/model-geometries.json`` holds the deciding keys of the config.json files of 43 real models, with the geometry
that is right for each. Knows no model library.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from routeplane.errors import ErrorKind, SpecError
from routeplane.record.geometry import Geometry, geometry_from_hf_config

if TYPE_CHECKING:
    from collections.abc import Callable

CORPUS: dict[str, dict[str, Any]] = {
    entry["name"]: entry
    for entry in json.loads((Path(__file__).parent / "data" / "model-geometries.json").read_text("utf-8"))["models"]
}
DENSE = sorted(name for name, entry in CORPUS.items() if entry["expected"] == "dense")
#: corpus entries without one right answer: the kind of the refusal, and the key that it must name
REFUSED = {
    "LongCat-Flash-Chat": (ErrorKind.UNKNOWN_ARCHITECTURE, "neither architectures nor model_type"),
    "JetMoE-8B": (ErrorKind.UNSUPPORTED_GEOMETRY, "model_type='jetmoe'"),
}
MOE = sorted(set(CORPUS) - set(DENSE) - set(REFUSED))


def config_of(name: str, /, **changes: object) -> dict[str, Any]:
    """A corpus configuration with keys changed; the value ``...`` takes a key away."""
    changed = {**CORPUS[name]["config"], **changes}
    return {key: value for key, value in changed.items() if value is not ...}


def shape_of(geometry: Geometry) -> tuple[object, int, tuple[int, ...]]:
    """All of a geometry but the model's name."""
    return geometry.num_experts, geometry.top_k, geometry.layer_ids


def expected_of(name: str) -> tuple[object, int, tuple[int, ...]]:
    """The corpus' answer, with the router's width where it is wider than the experts."""
    entry = CORPUS[name]
    answer = entry["expected"]
    return entry.get("router_width", answer["num_experts"]), answer["top_k"], tuple(answer["layer_ids"])


def check_refused(kind: ErrorKind, named: str, call: Callable[[], object]) -> None:
    """Assert a SpecError of a kind whose message names the key."""
    with pytest.raises(SpecError) as caught:
        call()
    assert (kind, True) == (caught.value.kind, named in caught.value.message), caught.value.message


def check_layers(expected: list[int], config: dict[str, Any]) -> None:
    """Assert the MoE layers of a configuration; where there are none it is a dense model."""
    if expected:
        assert tuple(expected) == geometry_from_hf_config(config).layer_ids
    else:
        check_refused(ErrorKind.DENSE_MODEL, "none of whose layers", lambda: geometry_from_hf_config(config))
