"""Between routeplane and a vLLM engine: the geometry of its model, private names that are used, and what it is told.

The geometry comes from the configuration that the engine itself runs with; ``routeplane.record.geometry`` reads the
Hugging Face configuration inside, and what vLLM itself believes of the same model must agree with it. The names are one
table, checked in two ways: ``RouteScheduler`` compares it with the vLLM that runs, at start, and a test compares it
with the sources of released wheels. A release that renames one of them is refused at start, and never records other
rows. Imports no vLLM but by a name of the table.

``additional_config={"routeplane": {...}}`` of the engine becomes a ``WriterConfig``;
``SamplingParams.extra_args={"routeplane": {...}}`` of a request, which HTTP clients send as ``vllm_xargs``, becomes
``RequestOptions``.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from routeplane.capture.recorder import FollowedRows
from routeplane.errors import CaptureError, DataError, ErrorKind, SpecError, UsageError, refused
from routeplane.record.parse import check_count, check_optional_int64, check_text
from routeplane.record.spec import RouteSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.record import RouteRecord

__all__ = [
    "FOLLOWING_NAMES",
    "FOLLOWING_RUNNER",
    "KEY",
    "NAMES",
    "WEIGHTS_NAMES",
    "WEIGHTS_RUNNER",
    "RequestOptions",
    "WriterConfig",
    "captures_routes",
    "choice_of",
    "find_drift",
    "ids_of",
    "model_config_of",
    "record_weights",
    "request_args",
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
        raise refused("a vLLM engine or one of its configurations", type(engine).__name__)
    return config


def captures_routes(engine: object) -> bool:
    """Whether an ``LLM``, ``AsyncLLM`` or ``VllmConfig`` was started with ``enable_return_routed_experts``."""
    config: Any = getattr(getattr(engine, "llm_engine", engine), "vllm_config", engine)
    # 0.31 moved the flag from the model's configuration to one of its own
    home = getattr(config, "aux_output_config", None) or getattr(config, "model_config", config)
    return bool(getattr(home, "enable_return_routed_experts", False))


def ids_of(rows_RDK: NDArray[Any]) -> NDArray[Any]:
    """The expert ids of rows as the scheduler keeps them: these themselves, or the field beside ``weights``; a view."""
    ids_RDK: NDArray[Any] = rows_RDK if rows_RDK.dtype.names is None else rows_RDK["ids"]
    return ids_RDK


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

#: Module and class -> attributes that are read; module, class and method -> parameters that are used. Others may stand
#: beside them.
NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
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
FOLLOWING_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs": ("scheduler_output", "num_scheduled_tokens"),
        "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter._compute_routing": (
            "hidden_states",
            "router_logits",
            "indices_type",
            "input_ids",
        ),
        "vllm.v1.worker.gpu_input_batch:CachedRequestState": ("block_ids", "sampling_params"),
        "vllm.v1.worker.gpu_input_batch:InputBatch": ("num_computed_tokens_cpu", "req_ids"),
        "vllm.v1.core.sched.output:SchedulerOutput": ("finished_req_ids", "total_num_scheduled_tokens"),
        "vllm.v1.kv_cache_interface:KVCacheConfig": ("kv_cache_groups", "num_blocks"),
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner": ("router", "is_monolithic", "layer_id"),
        "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter": ("top_k", "global_num_experts"),
        "vllm.sampling_params:SamplingParams": ("extra_args",),
    }
)

#: What recording routing weights rests on, beside following: the pipe by which rows reach the scheduler, as of 0.30.
WEIGHTS_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_routed_experts": ("num_tokens",),
        "vllm.model_executor.layers.fused_moe.routed_experts_capturer:RoutedExpertsCapturer.capture": (
            "layer_id",
            "topk_ids",
        ),
        "vllm.model_executor.layers.fused_moe.routed_experts_capturer:RoutedExpertsCapturer.get_device_buffer": (),
        "vllm.model_executor.layers.fused_moe.routed_experts_capturer:RoutedExpertsManager.store_batch": (
            "data",
            "slot_mapping",
        ),
        "vllm.model_executor.layers.fused_moe.routed_experts_capturer:RoutedExpertsManager.get": (
            "block_ids",
            "num_tokens",
            "token_start",
        ),
        "vllm.model_executor.layers.fused_moe.router.base_router:BaseRouter._select_experts": (
            "hidden_states",
            "router_logits",
        ),
        "vllm.v1.outputs:RoutedExpertsLists": ("routing_data", "slot_mapping"),
        "vllm.v1.outputs:ModelRunnerOutput": ("routed_experts",),
        "vllm.model_executor.layers.fused_moe.routed_experts_capturer:RoutedExpertsManager": (
            "routed_experts_by_slot",
        ),
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner": (
            "moe_config",
            "routed_experts",
            "routed_scaling_factor",
        ),
        "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts": ("apply_router_weight_on_input",),
    }
)

#: What a worker's ``model_runner`` must have; its constructor is wrapped, so the instance is asked.
FOLLOWING_RUNNER = ("device", "input_batch", "kv_cache_config", "model", "requests")
WEIGHTS_RUNNER = (*FOLLOWING_RUNNER, "routed_experts_capturer", "routed_experts_cpu")


def find_drift(
    names_of: Callable[[str], Sequence[str] | None], *, table: Mapping[str, tuple[str, ...]] = NAMES
) -> list[str]:
    """Compare a table with one vLLM.

    Args:
        names_of: Lists the parameters of a method of the table, or the attributes of a class; None where there is none.
        table: What is used.

    Returns:
        What differs, one line each.

    >>> find_drift(lambda name: None)[0]
    'vllm.v1.core.sched.scheduler:Scheduler._update_request_with_output is gone'
    """
    found = []
    for name, expected in table.items():
        there = names_of(name)
        if there is None:
            found.append(f"{name} is gone")
        elif absent := [item for item in expected if item not in there]:
            found.append(f"{name} has no {', '.join(absent)}")
    return found


def require_running(table: Mapping[str, tuple[str, ...]], /) -> None:
    """Raise CaptureError (CAPTURE_OFF) for a vLLM of this process whose names have changed: at start, not with wrong
    rows."""
    drift = find_drift(_names_of, table=table)
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


def _names_of(name: str) -> Sequence[str] | None:
    found = _object_of(name)
    if found is None:
        return None
    if "." in name.partition(":")[2]:
        return list(inspect.signature(found).parameters)
    constructor = getattr(found.__init__, "__code__", None)
    set_by_it = () if constructor is None else constructor.co_names
    return [*getattr(found, "__struct_fields__", ()), *getattr(found, "__annotations__", ()), *set_by_it, *dir(found)]


def record_weights(worker: Any, kept: str) -> str:
    """``forcing.record_weights``, loaded in the worker that runs it: other releases have no such routers."""
    found = _object_of("routeplane.capture.vllm.forcing:record_weights")
    if found is None:
        raise CaptureError("expected a vLLM whose routers are objects (0.30), got another", kind=ErrorKind.CAPTURE_OFF)
    return str(found(worker, kept))


# ---- what an engine and a request are told --------------------------------------------------------------------------

#: Where both stand: in ``additional_config``, in ``extra_args``, and in the answer's ``kv_transfer_params``.
KEY = "routeplane"

# vLLM's ids: `{id}-{8 hex digits}`, and before it `{index}_` for each of several choices
# (v1/engine/input_processor.py, assign_request_id; v1/engine/parallel_sampling.py, ParentRequest.get_child_info)
_INTERNAL = re.compile(r"(?:(?P<choice>[0-9]+)_)?(?P<external>.+)-[0-9a-f]{8}", re.DOTALL)
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def choice_of(request_id: str) -> tuple[str, int | None]:
    """Split the id that an engine runs a sequence under.

    Args:
        request_id: The engine's id.

    Returns:
        The id that the request came with, and the index of the choice where the request has several.

    >>> choice_of("2_cmpl-7-0-0123abcd")
    ('cmpl-7-0', 2)
    >>> choice_of("cmpl-7-0-0123abcd")
    ('cmpl-7-0', None)
    """
    found = _INTERNAL.fullmatch(request_id)
    if found is None:
        return request_id, None
    return found["external"], None if found["choice"] is None else int(found["choice"])


def _no_options() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterConfig:
    """Where an engine's records go, and what happens when they cannot.

    Args:
        place: Where blocks go: a folder for the default carrier.
        run: Name of the training run. A place that holds another run refuses the start.
        carrier: Dotted name of what opens the place, called as ``carrier(place, spec, run=, producer=, **options)``.
        options: Further arguments of the carrier (``groups``, ``encoding``).
        limits: Bounds of the carrier by name, as in its ``BlockLimits``: ``max_bytes``, ``timeout_s``, ``sync``.
        producer: Name of this server among those that write to the place. Its data-parallel ranks are
            ``{producer}-{rank}``, each a producer of its own.
        block_bytes: A block is sealed at this payload,
        block_age_s: or when its first record is this old,
        wait_s: or at once while an answer waits for its ticket. An answer that waited this long leaves without one; its
            ``routeplane_pending`` names the record that is still to come.
        queue_bytes: Rows that may wait for the writer thread.
        on_full: What a sequence does that finds the queue full: ``wait`` holds up the engine, ``lose`` stores its rows
            as ``lost``.
        retry_s: How long a carrier that fails is opened again and again before its records count as lost.
        on_loss: ``count`` goes on, ``fail`` ends the engine.
        default: What becomes of requests that say nothing: ``ship`` or ``skip``.
        weights_version: Version of the weights at the start.
        probe_every_s: How often the engine's rows are compared with those of a second pass; None: at the start only.
        route_weights: What records keep of the weights that the chosen experts got: None nothing; ``float32``, or
            ``bfloat16``, their upper 16 bits rounded. The start is refused where their meaning cannot be told.

    >>> WriterConfig.from_additional({"routeplane": {"place": "/data/routes", "run": "run-7"}}).producer_of(rank=1)
    'engine-1'
    """

    place: str
    run: str
    carrier: str = "routeplane.stream.folder.open_writer"
    options: Mapping[str, Any] = field(default_factory=_no_options, repr=False)
    limits: Mapping[str, Any] = field(default_factory=_no_options)
    producer: str = "engine"
    block_bytes: int = 2**26
    block_age_s: float = 1.0
    wait_s: float = 30.0
    queue_bytes: int = 2**28
    on_full: Literal["wait", "lose"] = "wait"
    retry_s: float = 60.0
    on_loss: Literal["count", "fail"] = "count"
    default: Literal["ship", "skip"] = "ship"
    weights_version: int | None = None
    probe_every_s: float | None = None
    route_weights: Literal["float32", "bfloat16"] | None = None

    def __post_init__(self) -> None:
        for name in ("place", "run", "producer"):
            _checked(check_text, getattr(self, name), name)
        if not isinstance(self.carrier, str) or not _DOTTED.fullmatch(self.carrier):
            raise refused("carrier as the dotted name of a function", repr(self.carrier))
        for name in ("options", "limits"):
            if not isinstance(getattr(self, name), Mapping):
                raise refused(f"{name} as a mapping", repr(getattr(self, name)))
        for name in ("block_bytes", "queue_bytes"):
            _checked(check_count, getattr(self, name), name, below=2**63)
        for name in ("block_age_s", "wait_s", "retry_s", "probe_every_s"):
            _check_seconds(name, getattr(self, name), optional=name == "probe_every_s")
        for name, choices in (
            ("on_full", ("wait", "lose")),
            ("on_loss", ("count", "fail")),
            ("default", _DEFAULTS),
            ("route_weights", (None, "float32", "bfloat16")),
        ):
            if getattr(self, name) not in choices:
                raise refused(f"{name} of {choices}", repr(getattr(self, name)))
        _checked(check_optional_int64, self.weights_version, "weights_version")

    @classmethod
    def from_additional(cls, additional_config: object) -> WriterConfig:
        """Read the part of vLLM's ``additional_config`` that is ours.

        Args:
            additional_config: What the engine was started with.

        Returns:
            The configuration. Raises UsageError naming what is absent or unknown.
        """
        given = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
        if given is None:
            raise refused(f"additional_config={{{KEY!r}: {{'place': ..., 'run': ...}}}}", _keys_of(additional_config))
        return cls(**_known(cls, given, "additional_config", required={"place", "run"}))

    def producer_of(self, *, rank: int) -> str:
        """Name the producer of one data-parallel rank."""
        return f"{self.producer}-{rank}"


_DEFAULTS = ("ship", "skip")


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """What one request asks of the writer.

    Args:
        capture: Whether its rows are recorded at all; validation and judge traffic says False.
        inline: Leave the rows in the answer, as an engine without a writer does, and write no record (a probe).
        sample_id: Name of the sample; None takes the id that the request came with. Each of several choices is recorded
            as ``{sample_id}/{index}`` in one group.
        attempt: The record's attempt.
        group: The record's group; None takes ``sample_id`` where there are several choices.
        weights_version: Version of the weights when it was sent.
        follow: Rows for the gates to follow, as ``FollowedRows.to_json`` writes them (``forcing``); the writer leaves
            them alone.

    >>> RequestOptions(sample_id="prompt-7").name_of("1_cmpl-7-0-0123abcd")
    ('prompt-7/1', 'prompt-7')
    """

    capture: bool = True
    inline: bool = False
    sample_id: str | None = None
    attempt: int = 0
    group: str | None = None
    weights_version: int | None = None
    follow: Mapping[str, Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.follow is not None and not isinstance(self.follow, Mapping):
            raise refused("follow as an object", repr(self.follow)[:80])
        for name in ("capture", "inline"):
            if not isinstance(getattr(self, name), bool):
                raise refused(f"{name} as true or false", repr(getattr(self, name)))
        for name in ("sample_id", "group"):
            if getattr(self, name) is not None:
                _checked(check_text, getattr(self, name), name)
        _checked(check_count, self.attempt, "attempt", below=2**31)
        _checked(check_optional_int64, self.weights_version, "weights_version")

    @classmethod
    def from_extra_args(cls, extra_args: Mapping[str, Any] | None, *, default: str = "ship") -> RequestOptions:
        """Read what a request's ``extra_args`` say.

        HTTP carries scalars only (``vllm_xargs``): there the object travels as its JSON text.

        Args:
            extra_args: The request's ``SamplingParams.extra_args``.
            default: ``ship`` or ``skip``: what becomes of requests that say nothing.

        Returns:
            The options. Raises UsageError naming what is unknown.
        """
        given = (extra_args or {}).get(KEY)
        if given is None:
            return cls(capture=default == "ship")
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except (ValueError, RecursionError):
                raise refused(f"extra_args[{KEY!r}] as JSON", repr(given[:80])) from None
        return cls(**_known(cls, given, "extra_args", required=set()))

    def name_of(self, request_id: str) -> tuple[str, str | None]:
        """Name one of the request's sequences: ``(sample_id, group)``, by the id that the engine runs it under."""
        external, choice = choice_of(request_id)
        stem = self.sample_id if self.sample_id is not None else (request_id if choice is None else external)
        if choice is None:
            return stem, self.group
        return f"{stem}/{choice}", self.group if self.group is not None else stem


def request_args(
    *,
    capture: bool = True,
    inline: bool = False,
    sample_id: str | None = None,
    attempt: int = 0,
    group: str | None = None,
    weights_version: int | None = None,
    follow: RouteRecord | None = None,
) -> dict[str, Any]:
    """Build ``SamplingParams.extra_args`` for one request.

    Args:
        capture: As all arguments, a field of ``RequestOptions``.
        inline: ...
        sample_id: ...
        attempt: ...
        group: ...
        weights_version: ...
        follow: A record whose tokens begin the prompt, and whose rows the gates are to follow (``forcing``). The prompt
            must then be sent with ``cache_salt=`` what stands in ``["routeplane"]["follow"]["salt"]``.

    Returns:
        A dict that also travels as JSON. Raises UsageError for values that the engine would refuse.

    >>> request_args(sample_id="prompt-7", weights_version=12)
    {'routeplane': {'capture': True, 'sample_id': 'prompt-7', 'attempt': 0, 'weights_version': 12}}
    """
    made = RequestOptions(
        capture=capture,
        inline=inline,
        sample_id=sample_id,
        attempt=attempt,
        group=group,
        weights_version=weights_version,
        follow=None if follow is None else FollowedRows.of(follow, weights_version=weights_version).to_json(),
    )
    content = {item.name: getattr(made, item.name) for item in fields(made)}
    return {
        KEY: {
            name: value
            for name, value in content.items()
            if (value is not None and value is not False) or name == "capture"
        }
    }


def _known(
    cls: type[WriterConfig] | type[RequestOptions], given: object, where: str, *, required: set[str]
) -> dict[str, Any]:
    names = [item.name for item in fields(cls)]
    unknown = sorted(set(given) - set(names)) if isinstance(given, Mapping) else [given]
    if not isinstance(given, Mapping) or unknown or not required <= set(given):
        raise refused(f"{where}[{KEY!r}] with keys of {names}", _keys_of(given))
    return dict(given)


def _keys_of(given: object) -> str:
    """Names and no values: a carrier's options may hold secrets, and errors are logged."""
    return f"the keys {sorted(map(str, given))}"[:200] if isinstance(given, Mapping) else repr(given)[:80]


def _check_seconds(name: str, value: object, *, optional: bool) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise refused(f"{name} as a number of seconds above 0", repr(value))


def _checked(check: Any, value: object, name: str, **limits: Any) -> None:
    try:
        check(value, name, **limits)
    except DataError as error:
        raise UsageError(f"{KEY}: {error}", kind=error.kind) from None
