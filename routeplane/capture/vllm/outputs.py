"""vLLM's outputs turned into calls and records.

Reads ``CompletionOutput.routed_experts`` of releases 0.22 and later: one slot per decoder layer, a row for every token
that was fed, which is all but the last one sampled. Which weights sampled, where a trimmed prompt began and what the
log-probabilities mean does not stand in an output: the caller says so.

Axes: R rows, P prompt tokens, G generated tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from vllm import RequestOutput

from routeplane.capture.layers import rows_from_layers
from routeplane.capture.recorder import record_of_call
from routeplane.capture.requests import cached_rows
from routeplane.errors import CaptureError, DataError, ErrorKind, UsageError, refused
from routeplane.record.calls import ModelCall, RowLoss

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = ["LogprobsMode", "calls_from_output", "merge_deltas", "record_output"]

#: vLLM's ``logprobs_mode``: before or after temperature and truncation. Its two modes of logits are refused.
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]

# What vLLM's finish reasons say of rows that are not there.
_LOSS_OF: Mapping[str, RowLoss] = MappingProxyType({"abort": "aborted", "error": "lost"})


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
    absent: RowLoss | None = None,
) -> tuple[ModelCall, ...]:
    """One call per choice of a finished request, ``{call_id}/{index}`` where there are several.

    ``weights_version``: of the policy that sampled. ``call_id``: None takes the request's. ``first_row``: what
    ``SamplingParams.routed_experts_prompt_start`` was; an output does not tell, but the row count does. ``cached``:
    prompt rows that may come from a prefix cache, hence from weights of an unknown version; None takes what vLLM
    reports, and for several choices all but the last prompt token, since vLLM reports the number of one choice only (0
    is right where the engine runs without a prefix cache). ``logprobs_mode``: the engine's. ``media``: one digest per
    media item of the prompt. ``absent``: what it means where tokens came without routes: None refuses, for the engine
    may capture nothing at all; ``lost`` where capture is known to be on (up to 0.30 the array vanishes where DELTA
    outputs are merged for a slow consumer), ``not_captured`` where this request asked for none.

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
            absent=absent,
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
    absent: RowLoss | None = None,
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
        absent=absent,
    )
    name = sample_id if sample_id is not None else request_output.request_id
    several = len(calls) > 1
    records: list[RouteRecord] = []
    for choice, call in zip(request_output.outputs, calls, strict=True):
        mode = {} if call.logprobs is None else {"logprobs_mode": logprobs_mode.removesuffix("_logprobs")}
        record = record_of_call(
            call,
            spec,
            sample_id=f"{name}/{choice.index}" if several else name,
            attempt=attempt,
            group=group if group is not None or not several else name,
            attributes=mode,
        )
        records.append(record)
    return records


def merge_deltas(outputs: Iterable[RequestOutput]) -> RequestOutput:
    """The DELTA outputs of one request, in the order in which they came, as the output of the whole.

    The parts stay as they are; arrays are shared. Raises UsageError for none at all, or for outputs of two requests.
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
    if choice.routed_experts is None:
        merged.routed_experts = before.routed_experts
    return merged


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
    absent: RowLoss | None,
) -> ModelCall:
    if choice.finish_reason is None:
        raise UsageError(f"expected a finished output, got one that goes on @ call {name}", kind=ErrorKind.ARGUMENT)
    if absent is not None and absent not in get_args(RowLoss):
        raise refused(f"absent of {get_args(RowLoss)}, or None", repr(absent))
    routes_RLK = _rows(choice, spec, first_row=first_row, name=name, absent=absent)
    fed = len(prompt_ids) + max(len(choice.token_ids) - 1, 0)
    if routes_RLK is None and absent is not None and len(choice.token_ids):
        loss: RowLoss | None = absent
    else:
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
        cached=cached_rows(bound, routes_RLK, first_row=first_row),
        loss=loss,
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
