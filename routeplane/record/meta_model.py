"""The model of a configuration, built without weights where the installed Transformers knows its architecture.

Real modules and real shapes on the meta device, so that gates can be counted where no table has the family. The only
file of the record stage that imports torch and transformers; it is loaded where the table does not know an
architecture, and only where both are installed. Downloads nothing and runs no code that comes with a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, PretrainedConfig

from routeplane.errors import ErrorKind, SpecError

__all__ = ["build_without_weights"]

# What constructors raise for configurations that they cannot serve.
_UNBUILDABLE = (
    AttributeError,
    ImportError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


def build_without_weights(config: object) -> torch.nn.Module | None:
    """Build the model of a configuration on the meta device.

    Args:
        config: A configuration of Transformers, or the mapping of a config.json.

    Returns:
        The model, which holds no weights; None where Transformers does not know the architecture. Raises SpecError
        (UNKNOWN_ARCHITECTURE) where it does and cannot build it.

    >>> build_without_weights({"model_type": "not-a-model"}) is None
    True
    """
    try:
        known = _known(config)
        return None if known is None else _build(known)
    except _UNBUILDABLE as error:
        raise SpecError(
            f"expected a configuration that Transformers can build, got {type(error).__name__}: {str(error)[:200]}; "
            "write the RouteSpec by hand",
            kind=ErrorKind.UNKNOWN_ARCHITECTURE,
        ) from error


def _known(config: object) -> PretrainedConfig | None:
    written = config.to_dict() if isinstance(config, PretrainedConfig) else config
    if not isinstance(written, Mapping) or not _has(written):
        return None
    text = written.get("text_config")
    if isinstance(text, Mapping) and text.get("model_type") is not None and not _has(text):
        return None
    if isinstance(config, PretrainedConfig):
        return config
    made: PretrainedConfig = CONFIG_MAPPING[written["model_type"]](
        **{key: value for key, value in written.items() if key != "model_type"}
    )
    return made


def _has(level: Mapping[Any, Any]) -> bool:
    """Whether Transformers has what one level of a configuration names.

    An architecture that it does not have is not looked up by its ``model_type``: what derives from a known model (a
    draft head, a pruned variant) keeps that and not the geometry.
    """
    model_type, architectures = level.get("model_type"), level.get("architectures")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return False
    if not architectures:
        return True
    model = getattr(transformers, str(architectures[0]), None) if isinstance(architectures, list | tuple) else None
    return getattr(getattr(model, "config_class", None), "model_type", None) == model_type


def _build(config: PretrainedConfig) -> torch.nn.Module:
    causal: Any = AutoModelForCausalLM
    trunk: Any = AutoModel
    with torch.device("meta"):
        try:
            model: torch.nn.Module = causal.from_config(config)
        except ValueError:  # a multimodal model has no causal-LM class
            model = trunk.from_config(config)
    return model
