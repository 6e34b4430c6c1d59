"""The model of a configuration, built without weights where the installed Transformers knows its architecture.

Real modules and real shapes on the meta device, so that gates can be counted where no table has the family. The only
file of the record stage that imports torch and transformers; it is loaded where the table does not know an
architecture, and only where both are installed. Downloads nothing and runs no code that comes with a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
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
    if isinstance(config, PretrainedConfig):
        return config
    if not isinstance(config, Mapping) or config.get("model_type") not in CONFIG_MAPPING:
        return None
    made: PretrainedConfig = CONFIG_MAPPING[config["model_type"]](
        **{key: value for key, value in config.items() if key != "model_type"}
    )
    return made


def _build(config: PretrainedConfig) -> torch.nn.Module:
    causal: Any = AutoModelForCausalLM
    trunk: Any = AutoModel
    with torch.device("meta"):
        try:
            model: torch.nn.Module = causal.from_config(config)
        except ValueError:  # a multimodal model has no causal-LM class
            model = trunk.from_config(config)
    return model
