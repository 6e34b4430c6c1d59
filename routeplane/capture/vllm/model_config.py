"""The geometry of an engine's model, read from the configuration that the engine itself runs with.

Reads attributes only, so it needs no vLLM; ``routeplane.record.geometry`` reads the Hugging Face configuration inside,
and what vLLM itself believes of the same model must agree with it.
"""

from __future__ import annotations

from typing import Any

from routeplane.errors import ErrorKind, SpecError, UsageError
from routeplane.record.spec import RouteSpec

__all__ = ["captures_routes", "model_config_of", "require_moe", "spec_from_vllm"]


def spec_from_vllm(engine: object) -> RouteSpec:
    """Read the geometry of an engine's model from the configuration that the engine itself runs with.

    Compares what ``RouteSpec.from_hf_config`` reads with what vLLM sizes its capture by: decoder layers, experts,
    experts per token.

    Args:
        engine: An ``LLM``, ``AsyncLLM``, ``VllmConfig`` or ``ModelConfig``.

    Returns:
        The spec of the engine's routes.

    Raises:
        SpecError: A dense model (DENSE_MODEL), a geometry that ``from_hf_config`` refuses, or one in which vLLM and it
            disagree (SPEC_MISMATCH).
        UsageError: Anything else than an engine or its configuration.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(
    ...     hf_config={
    ...         "model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2
    ...     },
    ...     is_moe=True,
    ...     get_total_num_hidden_layers=lambda: 2,
    ...     get_num_experts=lambda: 8,
    ...     get_num_experts_per_tok=lambda: 2,
    ... )
    >>> spec_from_vllm(config).layer_ids
    (0, 1)
    """
    config = model_config_of(engine)
    require_moe(config)
    spec = RouteSpec.from_hf_config(config.hf_config)
    _compare(spec, config)
    return spec


def model_config_of(engine: object) -> Any:
    """vLLM's ``ModelConfig`` of an engine or one of its configurations. Raises UsageError for anything else."""
    config = getattr(engine, "model_config", engine)
    if not hasattr(config, "hf_config"):
        raise UsageError(
            f"expected a vLLM engine or one of its configurations, got {type(engine).__name__}", kind=ErrorKind.ARGUMENT
        )
    return config


def captures_routes(engine: object) -> bool:
    """Whether an ``LLM``, ``AsyncLLM`` or ``VllmConfig`` was started with ``enable_return_routed_experts``."""
    config: Any = getattr(getattr(engine, "llm_engine", engine), "vllm_config", engine)
    # 0.31 moved the flag from the model's configuration to one of its own
    home = getattr(config, "aux_output_config", None) or getattr(config, "model_config", config)
    return bool(getattr(home, "enable_return_routed_experts", False))


def require_moe(config: Any) -> None:
    """Raise SpecError (DENSE_MODEL) for a ``ModelConfig`` in which vLLM finds no experts."""
    if not config.is_moe:
        names = getattr(config.hf_config, "architectures", None) or [type(config.hf_config).__name__]
        raise SpecError(
            f"expected a mixture-of-experts model, got {names[0]} of {config.model}, in which vLLM finds no experts",
            kind=ErrorKind.DENSE_MODEL,
        )


def _compare(spec: RouteSpec, config: Any) -> None:
    """What the engine's capture buffer is sized by (``_get_routed_experts_shape``), against the spec."""
    depth = config.get_total_num_hidden_layers()
    experts, top_k = config.get_num_experts(), config.get_num_experts_per_tok()
    found = [
        f"{name}: {ours} of the spec against {theirs} of the engine"
        for name, ours, theirs, wrong in (
            ("last MoE layer and decoder layers", spec.layer_ids[-1], depth, spec.layer_ids[-1] >= depth),
            # vLLM counts experts with weights; a router may be wider (zero-computation experts), never narrower
            ("experts", max(spec.experts_per_layer), experts, max(spec.experts_per_layer) < experts),
            ("experts per token", spec.top_k, top_k, spec.top_k != top_k),
        )
        if wrong
    ]
    if found:
        raise SpecError(
            f"expected vLLM and the model's configuration to agree on {spec.model or 'the model'}, got "
            + "; ".join(found),
            kind=ErrorKind.SPEC_MISMATCH,
        )
