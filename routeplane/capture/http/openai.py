"""Responses of OpenAI-compatible servers turned into calls and records: chat, completions, token in / token out.

Owns where servers put ids, log-probabilities and routes: vLLM on the choice and the response, NeMo RL on the message,
our middleware a ticket in the same place. A response is an object of a client, a mapping, or JSON text. Needs no client
library. Streamed responses are ``chunks``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from routeplane.capture import choices
from routeplane.capture.choices import DEFAULTS, CaptureOptions, Choice
from routeplane.errors import CaptureError, DataError, ErrorKind, UsageError

if TYPE_CHECKING:
    from routeplane.record.calls import ModelCall
    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = [
    "as_document",
    "as_list",
    "as_mapping",
    "calls",
    "choice_logprobs",
    "finish_reason",
    "records",
    "refuse_server_error",
]

_ASK_FOR_IDS = "ask for them: extra_body={'return_token_ids': True}"


def calls(
    response: object,
    spec: RouteSpec,
    *,
    weights_version: int | None,
    prompt_ids: Sequence[int] | None = None,
    call_id: str | None = None,
    first_row: int | None = None,
    options: CaptureOptions = DEFAULTS,
) -> tuple[ModelCall, ...]:
    """Read a response, one call per choice in the order of their indices.

    Args:
        response: What a client returned (an object with ``model_dump``), a mapping, or JSON text.
        spec: The geometry of the rows.
        weights_version: Of the policy that sampled; None where unknown.
        prompt_ids: Of the request, needed where the response does not repeat them (token in / token out); where it
            does, both must agree.
        call_id: None takes the response's; several choices are ``{call_id}/0``, ``{call_id}/1``, ...
        first_row: The request's ``routed_experts_prompt_start``. None takes what the form says, else 0.
        options: What the caller knows of the server.

    Returns:
        The calls. Raises CaptureError (CAPTURE_OFF) naming the flag or field that is missing, UsageError for an answer
        that is an error or goes on, and DataError for what contradicts itself: choices twice, ids, rows or
        log-probabilities that are not those of the tokens.

    >>> from routeplane import RouteSpec
    >>> choice = {"index": 0, "finish_reason": "stop", "token_ids": [7], "routed_experts": [[[3, 1]], [[0, 5]]]}
    >>> response = {"id": "r", "prompt_token_ids": [5, 6], "choices": [choice]}
    >>> [call] = calls(response, RouteSpec(num_experts=8, top_k=2, layer_ids=(0,)), weights_version=4)
    >>> call.call_id, call.routes.tolist()
    ('r', [[[3, 1]], [[0, 5]]])
    """
    document = as_document(response)
    refuse_server_error(document)
    found = _by_index(document)
    name = call_id or str(document.get("id") or document.get("request_id") or "call")
    several = len(found) > 1
    read = [_choice(document, choice, prompt_ids, name=name) for choice in found]
    if several:
        read = [replace(choice, call_id=f"{name}/{index}") for index, choice in enumerate(read)]
    else:
        # a server reports one number for the response, whatever the number of choices
        read = [replace(read[0], cached=_cached(document))]
    # The last ticket first: records come in the order of the choices, and where the last one has not come yet no other
    # ticket is spent.
    made = [
        choices.call_of_choice(choice, spec, weights_version=weights_version, options=options, first_row=first_row)
        for choice in reversed(read)
    ][::-1]
    for call in made:
        # the ids that a ticket's call brought must be the request's too
        if prompt_ids is not None and call.prompt_ids.tolist() != list(prompt_ids):
            raise _another_prompt(prompt_ids, call.prompt_ids.tolist(), call.call_id)
    return tuple(made)


def records(
    response: object,
    spec: RouteSpec,
    *,
    sample_id: str,
    weights_version: int | None,
    attempt: int = 0,
    group: str | None = None,
    prompt_ids: Sequence[int] | None = None,
    options: CaptureOptions = DEFAULTS,
) -> tuple[RouteRecord, ...]:
    """Read a response as one-call records, one per choice.

    Args:
        response: As ``calls``.
        spec: The geometry of the records.
        sample_id: The record's name; several choices are ``{sample_id}/0``, ``{sample_id}/1``, ...
        weights_version: Of the policy that sampled; None where unknown.
        attempt: Which attempt at the sample this is.
        group: Ties the samples of one prompt; several choices have ``sample_id`` where it is None.
        prompt_ids: Of the request, as ``calls``.
        options: What the caller knows of the server.

    Returns:
        The records, which own their arrays. Raises as ``calls``. The turns of a conversation are joined by
        ``routeplane.assemble`` instead.

    >>> from routeplane import RouteSpec
    >>> choice = {"index": 0, "finish_reason": "stop", "token_ids": [7], "routed_experts": [[[3, 1]], [[0, 5]]]}
    >>> response = {"id": "r", "prompt_token_ids": [5, 6], "choices": [choice]}
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0,))
    >>> records(response, spec, sample_id="s", weights_version=4)[0].num_tokens
    3
    """
    found = calls(response, spec, weights_version=weights_version, prompt_ids=prompt_ids, options=options)
    return choices.records_of_calls(found, spec, sample_id=sample_id, attempt=attempt, group=group, options=options)


def as_document(response: object) -> Mapping[str, Any]:
    """A response as a mapping: of a client's object, of JSON text, or itself. Raises DataError (ENCODING, DTYPE)."""
    dump = getattr(response, "model_dump", None)
    if dump is not None:
        # fields that the client's own class does not know are part of the dump
        response = dump()
    if isinstance(response, str | bytes):
        try:
            response = json.loads(response)
        except (ValueError, RecursionError) as error:
            raise DataError(f"expected a response as JSON, got {error}", kind=ErrorKind.ENCODING) from None
    if not isinstance(response, Mapping):
        raise DataError(f"expected a response as an object, got {type(response).__name__}", kind=ErrorKind.DTYPE)
    return response


def refuse_server_error(document: Mapping[str, Any]) -> None:
    """Raise UsageError with what the server said, where its answer is an error."""
    error = document.get("error")
    if error is not None:
        said = error.get("message") if isinstance(error, Mapping) else error
        raise UsageError(f"expected a completion, got the server's error: {str(said)[:400]}", kind=ErrorKind.ARGUMENT)


def _by_index(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The choices in order; their indices must be 0, 1, ... each once, before any is read."""
    found = document.get("choices")
    if not isinstance(found, list) or not found or not all(isinstance(one, Mapping) for one in found):
        raise DataError(
            f"expected a response with choices, got the keys {sorted(map(str, document))[:12]}", kind=ErrorKind.SHAPE
        )
    indices = [one.get("index", 0) for one in found]
    if sorted(map(str, indices)) != sorted(map(str, range(len(found)))):
        raise DataError(f"expected choices 0 to {len(found) - 1}, each once, got {indices}", kind=ErrorKind.SHAPE)
    return sorted(found, key=lambda one: int(one.get("index", 0)))


def _choice(
    document: Mapping[str, Any], choice: Mapping[str, Any], prompt_ids: Sequence[int] | None, *, name: str
) -> Choice:
    message = as_mapping(choice.get("message"), "a message")
    routes = choice.get("routed_experts")
    routes = message.get("routed_experts") if routes is None else routes
    routes = _engine_ticket(document, name) if routes is None and len(document["choices"]) == 1 else routes
    prompt = _ids((choice, message, document), "prompt_token_ids")
    generation = _ids((choice,), "token_ids")
    generation = _ids((message,), "generation_token_ids") if generation is None else generation
    if prompt is not None and prompt_ids is not None and list(prompt_ids) != prompt:
        raise _another_prompt(prompt_ids, prompt, name)
    if isinstance(routes, str) and routes.startswith("{") and prompt is None and generation is None:
        # a ticket's call brings its own ids and log-probabilities, so that hops need not carry them
        return Choice(
            call_id=name, prompt_ids=[], generation_ids=[], finish_reason=finish_reason(choice), routes=routes
        )
    prompt = list(prompt_ids) if prompt is None and prompt_ids is not None else prompt
    if prompt is None:
        raise _no_ids("prompt", f"{_ASK_FOR_IDS}, or pass prompt_ids", name)
    if generation is None:
        raise _no_ids("generated", _ASK_FOR_IDS, name)
    logprobs = message.get("generation_log_probs")
    if logprobs is None:
        logprobs = choice_logprobs(choice.get("logprobs"), generation, name=name)
    return Choice(
        call_id=name,
        prompt_ids=prompt,
        generation_ids=generation,
        finish_reason=finish_reason(choice),
        routes=routes,
        logprobs=logprobs,
    )


def _another_prompt(expected: Sequence[int], got: Sequence[int], name: str) -> DataError:
    return DataError(
        f"expected the request's {len(expected)} prompt ids in the response, got {len(got)} others @ call {name}",
        kind=ErrorKind.TOKEN_MISMATCH,
    )


def as_mapping(value: object, what: str) -> Mapping[str, Any]:
    """An object of a response; an absent one is empty. Raises DataError (DTYPE) for anything else."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"expected {what} as an object, got {type(value).__name__}", kind=ErrorKind.DTYPE)
    return value


def as_list(value: object, what: str) -> list[Any]:
    """A list of a response. Raises DataError (DTYPE) for anything else."""
    if not isinstance(value, list):
        raise DataError(f"expected {what} as a list, got {type(value).__name__}", kind=ErrorKind.DTYPE)
    return value


def finish_reason(choice: Mapping[str, Any]) -> str | None:
    """Why a choice ended; None where it goes on."""
    found = choice.get("finish_reason")
    if found is not None and not isinstance(found, str):
        raise DataError(f"expected a finish reason as text, got {type(found).__name__}", kind=ErrorKind.DTYPE)
    return found


def _engine_ticket(document: Mapping[str, Any], name: str) -> str | None:
    """The ticket that a writer inside the engine left (``capture.vllm.RouteScheduler``), for a single choice."""
    said = as_mapping(document.get("kv_transfer_params"), "kv_transfer_params")
    refusal, ticket = said.get("routeplane_error"), said.get("routeplane")
    if refusal is not None:
        raise CaptureError(f"the engine's writer made no record: {refusal} @ call {name}", kind=ErrorKind.CAPTURE_OFF)
    if ticket is not None and not isinstance(ticket, str):
        raise DataError(f"expected a ticket as text, got {type(ticket).__name__} @ call {name}", kind=ErrorKind.DTYPE)
    return ticket


def _ids(places: Sequence[Mapping[str, Any]], key: str) -> list[int] | None:
    for place in places:
        found = place.get(key)
        if found is not None:
            return as_list(found, key)
    return None


def _no_ids(which: str, remedy: str, name: str) -> CaptureError:
    return CaptureError(
        f"expected the {which} token ids in the response, got none: {remedy} (a second tokenisation need not be the "
        f"engine's) @ call {name}",
        kind=ErrorKind.CAPTURE_OFF,
    )


def choice_logprobs(logprobs: object, generation: Sequence[int], *, name: str) -> list[Any] | None:
    """The log-probabilities of a choice's tokens, in the form of chat or of completions; None where there are none.

    Where the tokens are named by their ids (``return_tokens_as_token_ids``), they must be those of the choice. The
    values are as they came.
    """
    said = as_mapping(logprobs, "logprobs")
    content, values = said.get("content"), said.get("token_logprobs")
    if content is not None:
        entries = [as_mapping(one, "a log-probability") for one in as_list(content, "logprobs.content")]
        pairs = [(one.get("token"), one.get("logprob")) for one in entries]
    elif values is not None:
        tokens = said.get("tokens")
        values = as_list(values, "logprobs.token_logprobs")
        pairs = list(itertools.zip_longest(as_list(tokens, "logprobs.tokens") if tokens else (), values))
    else:
        return None
    for at, named in _named_ids(pairs):
        if at >= len(generation) or named != generation[at]:
            raise DataError(
                f"expected log-probabilities of the sampled tokens, got one of token {named} "
                f"@ call {name}, generated token {at}",
                kind=ErrorKind.TOKEN_MISMATCH,
            )
    return [value for _, value in pairs]


def _named_ids(pairs: Sequence[tuple[Any, Any]]) -> Iterator[tuple[int, int]]:
    for at, (token, _) in enumerate(pairs):
        if isinstance(token, str) and token.startswith("token_id:") and token[9:].isdecimal():
            yield at, int(token[9:])


def _cached(document: Mapping[str, Any]) -> int | None:
    """Prompt tokens that came from the prefix cache, where the server says (``--enable-prompt-tokens-details``)."""
    details = as_mapping(document.get("usage"), "usage").get("prompt_tokens_details")
    found = as_mapping(details, "prompt_tokens_details").get("cached_tokens")
    return found if isinstance(found, int) and not isinstance(found, bool) else None
