"""SGLang's answers (``/generate`` with ``return_routed_experts``) turned into calls and records.

``meta_info["routed_experts"]`` is base64 of int32, little endian, without a header: rows of the tokens
``[routed_experts_start_len, prompt + completion - 1)``, each with a slot for every decoder layer, dense ones zero
(srt/state_capturer/routed_experts.py). A server that fuses shared experts into the routed ones appends their slots,
whose ids are E and above. ``meta_info["output_token_sampling_mask"]`` (``return_sampling_mask``; read in 0.5.23) is a
list of kept ids for each generated token, most likely first; a list longer than the server's cap aborts the request.
Its OpenAI endpoints are ``http.openai``. Knows no SGLang package; nothing here opens a connection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from routeplane.capture import choices
from routeplane.capture.choices import DEFAULTS, CaptureOptions, Choice
from routeplane.errors import DataError, ErrorKind, UsageError, refused

if TYPE_CHECKING:
    from routeplane.record.calls import ModelCall
    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = ["calls", "records"]

_WHY_ABSENT = (
    "start the server with --enable-return-routed-experts and ask with return_routed_experts (a gateway may drop the "
    "field)"
)
_OPTIONS = (
    "absent",
    "cached",
    "decoder_layers",
    "fused_shared",
    "logprobs_mode",
    "max_missing_share",
    "media",
    "sampling",
    "version_numbers",
    "vocab_size",
)


def calls(
    answer: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    spec: RouteSpec,
    *,
    prompt_ids: Sequence[int],
    weights_version: int | None,
    call_id: str | None = None,
    first_row: int = 0,
    options: CaptureOptions = DEFAULTS,
) -> tuple[ModelCall, ...]:
    """Read an answer of ``/generate``, whole and not streamed.

    Args:
        answer: A mapping with ``meta_info``, or the list of them that ``n`` above 1 gives.
        spec: The geometry of the rows.
        prompt_ids: What was fed, after placeholders were expanded.
        weights_version: Of the policy that sampled; None where unknown.
        call_id: None takes the answer's id; several answers are ``{call_id}/0``, ``{call_id}/1``, ...
        first_row: The request's ``routed_experts_start_len``.
        options: ``decoder_layers`` is D of the model, needed where layers behind the last captured one are dense;
            ``fused_shared`` the slots of fused shared experts.

    Returns:
        One call per answer, whose rows are int16. Raises CaptureError where there are no routes (CAPTURE_OFF) or no
        capture behind them, DataError where text, rows, tokens or log-probabilities are not what they should be,
        UsageError for other answers.

    >>> from routeplane import RouteSpec
    >>> info = {"id": "r", "finish_reason": {"type": "stop"}, "routed_experts": "AwAAAAEAAAAAAAAABQAAAA=="}
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0,))
    >>> [call] = calls({"output_ids": [7], "meta_info": info}, spec, prompt_ids=[5, 6], weights_version=4)
    >>> call.routes.tolist()
    [[[3, 1]], [[0, 5]]]
    """
    options.only(_OPTIONS, reader="sglang")
    answers = [answer] if isinstance(answer, Mapping) else list(answer) if isinstance(answer, Sequence) else []
    found = [_choice(one, prompt_ids, call_id=call_id) for one in answers]
    if not found:
        raise refused("an answer of SGLang with meta_info, or several", type(answer).__name__)
    if len(found) > 1:
        name = call_id or found[0].call_id
        found = [replace(choice, call_id=f"{name}/{index}") for index, choice in enumerate(found)]
    how = replace(options, form="sglang")
    return tuple(
        choices.call_of_choice(choice, spec, weights_version=weights_version, options=how, first_row=first_row)
        for choice in found
    )


def records(
    answer: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    spec: RouteSpec,
    *,
    sample_id: str,
    prompt_ids: Sequence[int],
    weights_version: int | None,
    attempt: int = 0,
    group: str | None = None,
    options: CaptureOptions = DEFAULTS,
) -> tuple[RouteRecord, ...]:
    """Read an answer of ``/generate`` as one-call records.

    Args:
        answer: As ``calls``.
        spec: The geometry of the records.
        sample_id: The record's name; several answers are ``{sample_id}/0``, ``{sample_id}/1``, ...
        prompt_ids: What was fed.
        weights_version: Of the policy that sampled; None where unknown.
        attempt: Which attempt at the sample this is.
        group: Ties the samples of one prompt; several answers have ``sample_id`` where it is None.
        options: As ``calls``.

    Returns:
        One record per answer; records own their arrays. Raises as ``calls``.

    >>> from routeplane import RouteSpec
    >>> info = {"id": "r", "finish_reason": {"type": "stop"}, "routed_experts": "AwAAAAEAAAAAAAAABQAAAA=="}
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0,))
    >>> answer = {"output_ids": [7], "meta_info": info}
    >>> records(answer, spec, sample_id="s", prompt_ids=[5, 6], weights_version=4)[0].num_tokens
    3
    """
    found = calls(answer, spec, prompt_ids=prompt_ids, weights_version=weights_version, options=options)
    return choices.records_of_calls(found, spec, sample_id=sample_id, attempt=attempt, group=group, options=options)


def _choice(answer: object, prompt_ids: Sequence[int], *, call_id: str | None) -> Choice:
    info = answer.get("meta_info") if isinstance(answer, Mapping) else None
    if not isinstance(answer, Mapping) or not isinstance(info, Mapping):
        raise refused("an answer of SGLang with meta_info", type(answer).__name__)
    name = str(call_id if call_id is not None else info.get("id", ""))
    tokens, logprobs = _generated(answer, info, name)
    if info.get("prompt_tokens", len(prompt_ids)) != len(prompt_ids):
        raise DataError(
            f"expected {info['prompt_tokens']} prompt tokens, as the answer says, got {len(prompt_ids)} @ call {name}",
            kind=ErrorKind.TOKEN_MISMATCH,
        )
    reason = info.get("finish_reason")
    if reason is None:
        raise UsageError(f"expected a finished answer, got one that goes on @ call {name}", kind=ErrorKind.ARGUMENT)
    return Choice(
        call_id=name,
        prompt_ids=prompt_ids,
        generation_ids=tokens,
        # a retracted or disconnected request ends as "abort" (srt/managers/schedule_batch.py, FINISH_ABORT)
        finish_reason=str(reason.get("type")) if isinstance(reason, Mapping) else str(reason),
        routes=info.get("routed_experts"),
        logprobs=_sampling_logprobs(info, tokens, name) or logprobs,
        kept=info.get("output_token_sampling_mask"),
        cached=_count(info, "cached_tokens", name),
        weight_version=_unset_is_none(info.get("weight_version")),
        weight_versions=info.get("weight_versions"),
        retractions=_count(info, "num_retractions", name) or 0,
        # the server slices [:seqlen - 1] also where nothing was sampled (sglang#20964)
        short_prefill=True,
        why_absent=_WHY_ABSENT,
    )


def _sampling_logprobs(info: Mapping[str, Any], tokens: Sequence[Any], name: str) -> list[Any] | None:
    """What sampling from the kept ids gave the tokens: log-probabilities over these ids, beside masks alone.

    ``output_token_logprobs`` are over the whole vocabulary. With ``sampling_logprobs_mode="support"`` each entry has
    the value of every kept id, in the order of the mask.
    """
    masks, values = info.get("output_token_sampling_mask"), info.get("output_token_sampling_logprobs")
    if masks is None:
        return None
    if not all(isinstance(one, list) and len(one) == len(tokens) for one in (masks, values)):
        raise DataError(
            f"expected a sampling mask and a log-probability for each of {len(tokens)} tokens @ call {name}",
            kind=ErrorKind.TOKEN_COLUMN,
        )
    return [
        value[mask.index(token)] if isinstance(value, list) and token in mask[: len(value)] else value
        for token, mask, value in zip(tokens, masks, values or (), strict=True)
    ]


def _count(info: Mapping[str, Any], key: str, name: str) -> int | None:
    """A count of the answer; None where it does not say."""
    found = info.get(key)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int):
        raise DataError(f"expected {key} as an int, got {found!r} @ call {name}", kind=ErrorKind.DTYPE)
    return max(found, 0)


def _unset_is_none(version: object) -> object:
    """SGLang calls weights that were never given a version ``default``."""
    return None if version == "default" else version


def _generated(answer: Mapping[str, Any], info: Mapping[str, Any], name: str) -> tuple[list[Any], list[Any] | None]:
    """Sampled tokens, from ``output_ids`` or from the log-probabilities beside which they stand; the two must agree."""
    pairs, given = info.get("output_token_logprobs"), answer.get("output_ids")
    if pairs is None and given is None:
        raise DataError(
            f"expected output_ids, or log-probabilities with their tokens, got neither @ call {name}",
            kind=ErrorKind.TOKEN_MISMATCH,
        )
    for what, value in (("output_ids", given), ("output_token_logprobs", pairs)):
        if value is not None and not isinstance(value, list):
            raise DataError(
                f"expected {what} as a list, got {type(value).__name__} @ call {name}", kind=ErrorKind.DTYPE
            )
    if pairs is None:
        return given or [], None
    if not all(isinstance(pair, list | tuple) and len(pair) >= 2 for pair in pairs):
        raise DataError(f"expected (log-probability, token, ...) for each token @ call {name}", kind=ErrorKind.DTYPE)
    tokens = [pair[1] for pair in pairs]
    if given is not None and tokens != given:
        raise DataError(
            f"expected log-probabilities of the tokens {given[:8]}, got those of {tokens[:8]} @ call {name}",
            kind=ErrorKind.TOKEN_MISMATCH,
        )
    return tokens, [pair[0] for pair in pairs]
