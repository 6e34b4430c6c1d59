"""What routeplane reads of a vLLM engine: the geometry of its model, and the private names that the writer rests on.

The geometry comes from the configuration that the engine itself runs with; ``routeplane.record.geometry`` reads the
Hugging Face configuration inside, and what vLLM itself believes of the same model must agree with it. The names are one
table, checked in two ways: ``RouteScheduler`` compares it with the vLLM that runs, at start, and a test compares it
with the sources of released wheels. A release that renames one of them is refused at start, and never records other
rows. Imports no vLLM but by a name of the table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any

from routeplane.errors import CaptureError, ErrorKind, SpecError, UsageError
from routeplane.record.spec import RouteSpec

__all__ = [
    "FIELDS",
    "FOLLOWING_FIELDS",
    "FOLLOWING_FUNCTIONS",
    "FOLLOWING_RUNNER",
    "FUNCTIONS",
    "captures_routes",
    "find_drift",
    "model_config_of",
    "require_moe",
    "require_running",
    "spec_from_vllm",
]

# ---- geometry -------------------------------------------------------------------------------------------------------


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


# ---- private names --------------------------------------------------------------------------------------------------

#: Module and qualified name -> the parameters that are used, beyond which others may stand.
FUNCTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "vllm.v1.core.sched.scheduler:Scheduler._update_request_with_output": ("request", "new_token_ids"),
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": ("scheduler_output", "model_runner_output"),
        "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": ("request_ids", "finished_status"),
        "vllm.v1.core.sched.scheduler:Scheduler.set_pause_state": ("pause_state",),
        "vllm.v1.core.sched.scheduler:Scheduler.add_request": ("request",),
        "vllm.v1.core.sched.scheduler:Scheduler.schedule": (),
        "vllm.v1.core.sched.scheduler:Scheduler.has_requests": (),
        "vllm.v1.core.sched.scheduler:Scheduler.get_grammar_bitmask": ("scheduler_output",),
        "vllm.v1.core.sched.scheduler:Scheduler.shutdown": (),
        "vllm.v1.executor.abstract:Executor.execute_model": ("scheduler_output", "non_block"),
        "vllm.v1.executor.abstract:Executor.sample_tokens": ("grammar_output",),
        "vllm.v1.engine.core:EngineCore.collective_rpc": ("method", "timeout", "args", "kwargs"),
        # how the middleware asks each data-parallel rank (``http.engine_answers``)
        "vllm.v1.engine.core_client:AsyncMPClient._call_utility_async": ("method", "engine"),
        "vllm.v1.engine.detokenizer:IncrementalDetokenizer.from_new_request": ("tokenizer", "request"),
        "vllm.v1.engine.detokenizer:IncrementalDetokenizer.update": ("new_token_ids", "stop_terminated"),
        "vllm.v1.request:Request.__init__": (
            "request_id",
            "prompt_token_ids",
            "sampling_params",
            "pooling_params",
            "resumable",
        ),
        "vllm.v1.request:RequestStatus.get_finished_reason": ("status",),
    }
)
#: Module and class -> attributes that are read.
FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "vllm.v1.engine:EngineCoreOutput": (
            "request_id",
            "new_token_ids",
            "new_logprobs",
            "finish_reason",
            "kv_transfer_params",
            "prefill_stats",
            "routed_experts",
        ),
        "vllm.v1.engine:EngineCoreOutputs": ("outputs",),
        "vllm.v1.engine.core_client:MPClient": ("core_engines",),
        "vllm.sampling_params:SamplingParams": ("routed_experts_prompt_start", "extra_args", "stop"),
        "vllm.v1.core.sched.interface:PauseState": ("UNPAUSED", "PAUSED_ALL"),
        "vllm.v1.request:RequestStatus": ("FINISHED_LENGTH_CAPPED",),
        "vllm.v1.request:Request": (
            "mm_features",
            "num_computed_tokens",
            "num_output_placeholders",
            "num_output_tokens",
            "prompt_embeds",
            "prompt_token_ids",
            "resumable",
            "sampling_params",
        ),
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler": ("__init__",),
    }
)


#: What following recorded routes rests on, in the worker's process (``forcing``), as of 0.30.
FOLLOWING_FUNCTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs": ("scheduler_output", "num_scheduled_tokens"),
        "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter._compute_routing": (
            "hidden_states",
            "router_logits",
            "indices_type",
            "input_ids",
        ),
    }
)
#: Likewise.
FOLLOWING_FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "vllm.v1.worker.gpu_input_batch:CachedRequestState": ("block_ids", "sampling_params"),
        "vllm.v1.worker.gpu_input_batch:InputBatch": ("num_computed_tokens_cpu", "req_ids"),
        "vllm.v1.core.sched.output:SchedulerOutput": ("finished_req_ids", "total_num_scheduled_tokens"),
        "vllm.v1.kv_cache_interface:KVCacheConfig": ("kv_cache_groups", "num_blocks"),
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner": ("router", "is_monolithic", "layer_id"),
        "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter": ("top_k", "global_num_experts"),
        "vllm.sampling_params:SamplingParams": ("extra_args",),
    }
)

#: What a worker's ``model_runner`` must have; its constructor is wrapped, so the instance is asked.
FOLLOWING_RUNNER = ("device", "input_batch", "kv_cache_config", "model", "requests")


def find_drift(
    parameters_of: Callable[[str], Sequence[str] | None],
    fields_of: Callable[[str], Sequence[str] | None],
    *,
    functions: Mapping[str, tuple[str, ...]] = FUNCTIONS,
    fields: Mapping[str, tuple[str, ...]] = FIELDS,
) -> list[str]:
    """Compare a table with one vLLM.

    Args:
        parameters_of: Names the parameters of a function of ``functions``; None where there is none.
        fields_of: Names the attributes of a class of ``fields``; None where there is none.
        functions: What is used of functions.
        fields: What is used of classes.

    Returns:
        What differs, one line each.

    >>> find_drift(lambda name: None, lambda name: ("outputs",))[0]
    'vllm.v1.core.sched.scheduler:Scheduler._update_request_with_output is gone'
    """
    found = []
    for table, lookup in ((functions, parameters_of), (fields, fields_of)):
        for name, expected in table.items():
            there = lookup(name)
            if there is None:
                found.append(f"{name} is gone")
            elif absent := [item for item in expected if item not in there]:
                found.append(f"{name} has no {', '.join(absent)}")
    return found


def require_running(functions: Mapping[str, tuple[str, ...]], fields: Mapping[str, tuple[str, ...]], /) -> None:
    """Raise CaptureError (CAPTURE_OFF) for a vLLM of this process whose names have changed: at start, not with wrong
    rows."""
    drift = find_drift(_parameters_of, _fields_of, functions=functions, fields=fields)
    if drift:
        raise CaptureError(
            "expected the names of vLLM that routeplane was tested with, got " + "; ".join(drift),
            kind=ErrorKind.CAPTURE_OFF,
        )


def _object_of(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return found


def _parameters_of(name: str) -> Sequence[str] | None:
    found = _object_of(name)
    return None if found is None else list(inspect.signature(found).parameters)


def _fields_of(name: str) -> Sequence[str] | None:
    found = _object_of(name)
    if found is None:
        return None
    constructor = getattr(found.__init__, "__code__", None)
    set_by_it = () if constructor is None else constructor.co_names
    return [*getattr(found, "__struct_fields__", ()), *getattr(found, "__annotations__", ()), *set_by_it, *dir(found)]
