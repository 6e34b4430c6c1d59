"""vLLM's outputs as calls and records.

Reads ``CompletionOutput.routed_experts`` of releases 0.22 and later: one slot per decoder layer, a row for every token
that was fed, which is all but the last one sampled. An output does not say which weights sampled, where a trimmed
prompt began, or what its log-probabilities mean: the caller does.

Axes: R rows, P prompt tokens, G generated tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from vllm import RequestOutput, SamplingParams

from routeplane.capture.choices import Choice, cached_rows, loss_of_rows, versions_of
from routeplane.capture.layers import rows_from_layers
from routeplane.capture.recorder import record_of_call
from routeplane.capture.vllm.interface import model_config_of
from routeplane.errors import CaptureError, DataError, ErrorKind, UsageError, refused
from routeplane.record.aligned import mask_columns
from routeplane.record.calls import ModelCall, RowLoss
from routeplane.record.checksum import CanonicalHash
from routeplane.record.spans import Sampling

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = ["LogprobsMode", "OutputOptions", "calls", "merge_deltas", "options_of", "records"]

#: vLLM's ``logprobs_mode``: before or after temperature and truncation. Its two modes of logits are refused.
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]

# What vLLM's finish reasons say of rows that are not there.
_LOSS_OF: Mapping[str, RowLoss] = MappingProxyType({"abort": "aborted", "error": "lost"})


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions:
    """What an output does not say of itself.

    Args:
        first_row: The request's ``SamplingParams.routed_experts_prompt_start``. The row count shows a wrong one.
        cached: Number of leading prompt rows that may come from a prefix cache, hence from weights of an unknown
            version. None takes what vLLM reports; with several choices it takes all prompt tokens but the last, because
            vLLM reports the number of one choice only. 0 is right for an engine without a prefix cache.
        logprobs_mode: The engine's ``logprobs_mode``.
        media: One digest per media item of the prompt.
        absent: What tokens without routes mean. None refuses them: the engine may capture nothing at all. ``lost``
            where capture is known to be on (up to 0.30 the array vanishes where DELTA outputs are merged for a slow
            consumer), ``not_captured`` where this request asked for none.
        version_numbers: The number of each weights version that the engine names by text (0.32 and later). Decimal text
            is its own number; a name without a number, as vLLM's ``default``, is a version that is not known.
        sampling_params: The request's; they become the sampling parameters of the generated tokens. Needed where
            outputs carry sampling masks.
        processors: Names of the engine's own logits processors; None where unknown.
        masks: Whether the ids of finite log-probability are the sampling mask. For engines without
            ``return_sampling_mask``; ``options_of`` checks that it is so.
        vocab_size: Ids of the model's logits. A mask of all of them is stored as ``full``.

    >>> [call] = calls(output, spec, weights_version=12, options=OutputOptions(cached=0))
    >>> call.cached
    0
    """

    first_row: int = 0
    cached: int | None = None
    logprobs_mode: str = "raw_logprobs"
    media: Sequence[str] = ()
    absent: RowLoss | None = None
    version_numbers: Mapping[str, int] | None = None
    sampling_params: SamplingParams | None = None
    processors: tuple[str, ...] | None = None
    masks: bool = False
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if self.masks and self.sampling_params is None:
            raise refused("sampling_params beside masks", "None")
        if self.absent is not None and self.absent not in get_args(RowLoss):
            raise refused(f"absent of {get_args(RowLoss)}, or None", repr(self.absent))


_DEFAULTS = OutputOptions()

# Under which conditions the ids of finite processed log-probability are those that could have been sampled: what to
# say, and whether it holds for the engine's ModelConfig, its SpeculativeConfig and the request's SamplingParams. All
# but the last are vLLM's own for ``return_sampling_mask`` (0.30, VllmConfig._verify_sampling_replay_config and
# InputProcessor._validate_params); its bound on top_k saves transfers and is not needed here.
_MASK_CONDITIONS: tuple[tuple[str, Callable[[Any, Any, Any], bool]], ...] = (
    ("logprobs_mode='processed_logprobs'", lambda model, draft, params: model.logprobs_mode == "processed_logprobs"),
    ("an engine without speculative decoding", lambda model, draft, params: draft is None),
    ("an engine without logits processors of its own", lambda model, draft, params: not model.logits_processors),
    ("a model that is not a diffusion model", lambda model, draft, params: not getattr(model, "is_diffusion", False)),
    ("a temperature above 0", lambda model, draft, params: params.temperature > 0),
    (
        "SamplingParams.logprobs of -1, or above top_k",
        lambda model, draft, params: params.logprobs == -1 or 0 < params.top_k < (params.logprobs or 0),
    ),
)


def options_of(engine: Any, sampling_params: SamplingParams, *, masks: bool = False) -> OutputOptions:
    """Read from an engine and a request what their outputs do not say.

    Args:
        engine: An ``LLM``, ``AsyncLLM`` or ``VllmConfig``.
        sampling_params: The request's.
        masks: Take sampling masks from the finite support of the log-probabilities, on engines that refuse
            ``return_sampling_mask``. Such an engine runs with ``logprobs_mode="processed_logprobs"`` and
            ``max_logprobs=-1`` and the request asks for ``logprobs=-1``, or for more than ``top_k``.

    Returns:
        Options for ``calls`` and ``records``. Raises UsageError (ARGUMENT) naming every condition that does not hold,
        and for masks of an engine with relaxed speculative acceptance, which no mask describes.

    >>> options_of(llm, SamplingParams(temperature=0.7)).logprobs_mode
    'raw_logprobs'
    """
    config: Any = getattr(getattr(engine, "llm_engine", engine), "vllm_config", engine)
    model, draft = model_config_of(engine), getattr(config, "speculative_config", None)
    broken = [said for said, holds in _MASK_CONDITIONS if masks and not holds(model, draft, sampling_params)]
    if broken:
        raise refused(f"masks from log-probabilities with {'; '.join(broken)}", "an engine or a request otherwise")
    if getattr(model, "return_sampling_mask", False) and getattr(draft, "rejection_sample_method", "") == "synthetic":
        # such a draft's tokens are accepted more often than the target would draw them; 0.32 does not refuse it
        raise refused("speculation that accepts what the target draws beside sampling masks", "'synthetic'")
    names = tuple(one if isinstance(one, str) else one.__name__ for one in model.logits_processors or ())
    return OutputOptions(
        logprobs_mode=model.logprobs_mode,
        sampling_params=sampling_params,
        processors=names,
        masks=masks,
        vocab_size=model.get_vocab_size(),
    )


def _sampling(options: OutputOptions) -> Sampling | None:
    """The parameters of the generated tokens. What only cuts ids (bad words, grammars) is part of the mask alone."""
    params = options.sampling_params
    if params is None:
        return None
    bias = None
    if params.logit_bias:
        tokens, values = zip(*sorted(params.logit_bias.items()), strict=True)
        digest = CanonicalHash(0)
        digest.array("tokens", np.asarray(tokens, dtype=np.int64))
        digest.array("values", np.asarray(values, dtype=np.float64))
        bias = f"{digest.value():016x}"
    return Sampling(
        temperature=float(params.temperature),
        top_p=float(params.top_p),
        top_k=int(params.top_k),
        min_p=float(params.min_p),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        repetition_penalty=float(params.repetition_penalty),
        logit_bias=bias,
        processors=options.processors,
        logprobs_mode=options.logprobs_mode.removesuffix("_logprobs"),
    )


def _masks(choice: Any, prompt: int, options: OutputOptions, sampling: Sampling | None, name: str) -> dict[str, Any]:
    """The columns of the sampling masks: the engine's field (0.30 and later), or the support of log-probabilities."""
    said = getattr(choice, "sampling_mask", None)
    capped: list[bool] | None = None
    if said is not None:
        kept: list[Any] = said.token_ids
    elif options.masks and choice.logprobs is not None:
        positions = [choice.logprobs[at] for at in range(len(choice.token_ids))]
        kept = [[token for token, one in position.items() if one.logprob > -math.inf] for position in positions]
        # ids that did not come could be finite too, unless one that came is not
        whole = options.vocab_size
        capped = [len(ids) == len(all_) != whole for ids, all_ in zip(kept, positions, strict=True)]
    else:
        return {}
    ids_G = np.asarray(choice.token_ids, dtype=np.int32)
    return mask_columns(
        kept, ids_G, prompt=prompt, sampling=sampling, call=name, vocab_size=options.vocab_size, capped=capped
    )


def calls(
    output: RequestOutput,
    spec: RouteSpec,
    *,
    weights_version: int | None,
    call_id: str | None = None,
    options: OutputOptions = _DEFAULTS,
) -> tuple[ModelCall, ...]:
    """Read one call per choice of a finished request.

    Args:
        output: A finished output of ``LLM.generate`` or ``AsyncLLM.generate``, whole.
        spec: The geometry of the engine's model.
        weights_version: Version of the policy that sampled; None where unknown.
        call_id: Name of the call, ``{call_id}/{index}`` where there are several choices. None takes the request's.
        options: What the output does not say.

    Returns:
        One call per choice. Rows are int16 in memory that the call owns or shares with the output, which must not be
        written to. Rows that an abort cut short are declared.

    Raises:
        CaptureError: No routes (CAPTURE_OFF), or no capture behind them (see ``rows_from_layers``).
        DataError: Rows or log-probabilities are not those of the tokens.
        UsageError: An unfinished output, or logits in the place of log-probabilities.

    >>> [call] = calls(output, spec, weights_version=12)
    >>> call.num_tokens - call.rows_stop
    1
    """
    if not isinstance(output, RequestOutput):
        raise UsageError(f"expected a vLLM RequestOutput, got {type(output).__name__}", kind=ErrorKind.ARGUMENT)
    choices, name = output.outputs, call_id or output.request_id
    if options.cached is None and len(choices) == 1:
        cached = output.num_cached_tokens
    else:
        cached = options.cached
    return tuple(
        _call(
            choice,
            spec,
            name=name if len(choices) == 1 else f"{name}/{choice.index}",
            prompt_ids=output.prompt_token_ids,
            cached=cached,
            weights_version=weights_version,
            options=options,
        )
        for choice in choices
    )


def records(
    output: RequestOutput,
    spec: RouteSpec,
    *,
    sample_id: str | None = None,
    attempt: int = 0,
    group: str | None = None,
    weights_version: int | None = None,
    call_id: str | None = None,
    options: OutputOptions = _DEFAULTS,
) -> list[RouteRecord]:
    """Read one single-call record per choice of a finished request.

    Args:
        output: A finished output, whole.
        spec: The geometry of the engine's model.
        sample_id: Name of the sample; None takes the request's. Several choices are ``{sample_id}/{index}``.
        attempt: The record's attempt.
        group: The record's group. None takes ``sample_id`` for several choices.
        weights_version: As in ``calls``.
        call_id: As in ``calls``.
        options: What the output does not say.

    Returns:
        Records that own their arrays. ``attributes["logprobs_mode"]`` is ``raw`` or ``processed`` where the output
        carries log-probabilities. Raises as ``calls``.

    >>> [record] = records(output, spec, sample_id="prompt-7", weights_version=12)
    >>> record.key
    RecordKey(sample_id='prompt-7', attempt=0, segment=0)
    """
    made = calls(output, spec, weights_version=weights_version, call_id=call_id, options=options)
    name = sample_id if sample_id is not None else output.request_id
    several = len(made) > 1
    mode = options.logprobs_mode.removesuffix("_logprobs")
    return [
        record_of_call(
            call,
            spec,
            sample_id=f"{name}/{choice.index}" if several else name,
            attempt=attempt,
            group=group if group is not None or not several else name,
            attributes={} if call.logprobs is None else {"logprobs_mode": mode},
        )
        for choice, call in zip(output.outputs, made, strict=True)
    ]


def merge_deltas(outputs: Iterable[RequestOutput]) -> RequestOutput:
    """Join the DELTA outputs of one request.

    Args:
        outputs: The outputs in the order in which they came. They stay as they are; arrays are shared.

    Returns:
        The output of the whole request. Raises UsageError for no output, or for outputs of two requests.

    >>> merge_deltas([output]).request_id == output.request_id
    True
    """
    parts = list(outputs)
    if not parts or len({part.request_id for part in parts}) != 1:
        raise refused("the outputs of one request", f"those of {len({part.request_id for part in parts})}")
    choices: dict[int, Any] = {}
    for choice in (choice for part in parts for choice in part.outputs):
        known = choices.get(choice.index)
        choices[choice.index] = copy(choice) if known is None else _extended(known, choice)
    whole = copy(parts[-1])
    whole.outputs = [choices[index] for index in sorted(choices)]
    # only the first part of a request tells what the prefix cache held
    whole.num_cached_tokens = max((part.num_cached_tokens or 0 for part in parts), default=0)
    return whole


def _extended(before: Any, choice: Any) -> Any:
    merged = copy(choice)
    merged.text = before.text + choice.text
    merged.token_ids = [*before.token_ids, *choice.token_ids]
    if before.logprobs is not None:
        merged.logprobs = [*before.logprobs, *(choice.logprobs or ())]
    if getattr(before, "sampling_mask", None) is not None:
        # 0.32 sends those of each piece, 0.30 all with the last
        more = [] if choice.sampling_mask is None else choice.sampling_mask.token_ids
        merged.sampling_mask = type(before.sampling_mask)([*before.sampling_mask.token_ids, *more])
    if choice.routed_experts is None:
        merged.routed_experts = before.routed_experts
    return merged


def _call(
    choice: Any,
    spec: RouteSpec,
    *,
    name: str,
    prompt_ids: Sequence[int],
    cached: int | None,
    weights_version: int | None,
    options: OutputOptions,
) -> ModelCall:
    if choice.finish_reason is None:
        raise UsageError(f"expected a finished output, got an unfinished one @ call {name}", kind=ErrorKind.ARGUMENT)
    first_row, absent = options.first_row, options.absent
    routes_RLK = _rows(choice, spec, first_row=first_row, name=name, absent=absent)
    declared = _LOSS_OF.get(choice.finish_reason)
    if routes_RLK is None:
        loss = declared if declared is not None and len(choice.token_ids) == 0 else absent
    else:
        loss = loss_of_rows(
            len(routes_RLK),
            prompt=len(prompt_ids),
            generated=len(choice.token_ids),
            first_row=first_row,
            declared=declared,
            call=name,
        )
    # The last prompt token is always computed: its logits are needed.
    bound = len(prompt_ids) - 1 if cached is None else cached
    said = _said(choice, prompt_ids, name=name)
    version, versions = versions_of(said, weights_version=weights_version, numbers=options.version_numbers)
    logprobs = _logprobs(choice, options.logprobs_mode, name)
    sampling = _sampling(options)
    return ModelCall(
        prompt_ids=np.asarray(prompt_ids),
        generation_ids=np.asarray(choice.token_ids, dtype=np.int64),
        routes=routes_RLK,
        first_row=first_row,
        layer_ids=spec.layer_ids,
        weights_version=version,
        versions=versions,
        call_id=name,
        logprobs=logprobs,
        media=tuple(options.media),
        cached=cached_rows(bound, routes_RLK, first_row=first_row),
        loss=loss,
        columns=_masks(choice, len(prompt_ids), options, sampling, name),
        sampling=sampling if len(choice.token_ids) else None,
    )


def _said(choice: Any, prompt_ids: Sequence[int], *, name: str) -> Choice:
    """What an output says of the weights: from 0.32 on, spans of its tokens, on the last output of a request."""
    spans = getattr(choice, "weight_versions", None)
    return Choice(
        call_id=name,
        prompt_ids=prompt_ids,
        generation_ids=choice.token_ids,
        finish_reason=choice.finish_reason,
        weight_versions=None
        if spans is None
        else [{"version": one.version, "start": one.start, "end": one.end} for one in spans],
    )


def _rows(
    choice: Any, spec: RouteSpec, *, first_row: int, name: str, absent: RowLoss | None
) -> NDArray[np.int16] | None:
    if choice.routed_experts is not None:
        return rows_from_layers(choice.routed_experts, spec, first_row=first_row, call=name)
    # A request that ended before its first token was sampled has no rows to give.
    if absent is not None or (len(choice.token_ids) == 0 and choice.finish_reason in _LOSS_OF):
        return None
    raise CaptureError(
        "expected routed_experts in the output, got None: start the engine with enable_return_routed_experts=True "
        "(--enable-return-routed-experts); up to 0.30 the routes also vanish where a slow consumer's DELTA outputs are "
        f"merged: absent='lost' says that this is so @ call {name}",
        kind=ErrorKind.CAPTURE_OFF,
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
