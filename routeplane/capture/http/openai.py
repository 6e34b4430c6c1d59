"""Responses of OpenAI-compatible servers turned into calls and records: chat, completions, token in / token out.

Owns where servers put ids, log-probabilities and routes: vLLM on the choice and the response, NeMo RL on the message,
SGLang and NVIDIA Dynamo in an extension of either, our middleware a ticket in the same place. A response is an object
of a client, a mapping, or JSON text. Needs no client library. Streamed responses are ``chunks``. ``HttpEngine`` asks a
server, for those who check one.
"""

from __future__ import annotations

import itertools
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from routeplane.capture import choices, wire
from routeplane.capture.choices import DEFAULTS, CaptureOptions, Choice
from routeplane.errors import CaptureError, DataError, ErrorKind, TransportError, UsageError, refused

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.capture.layers import LayerAxis
    from routeplane.capture.wire import WireForm
    from routeplane.record.calls import ModelCall
    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = [
    "Engine",
    "EngineAnswer",
    "EngineChoice",
    "EngineRequest",
    "HttpEngine",
    "Places",
    "as_document",
    "as_list",
    "as_mapping",
    "calls",
    "choice_logprobs",
    "finish_reason",
    "ids_of_logprobs",
    "records",
    "refuse_server_error",
    "why_absent",
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
    """A response as a mapping: of a client's object, of JSON text, or itself. Raises DataError (ENCODING, DTYPE).

    >>> as_document('{"choices": []}')
    {'choices': []}
    """
    dump = getattr(response, "model_dump", None)
    if dump is not None:
        # fields that the client's own class does not know are part of the dump
        response = dump()
    if isinstance(response, str | bytes):
        try:
            response = json.loads(response)
        except (ValueError, RecursionError) as error:
            raise DataError(f"expected a response as JSON, got {error}", kind=ErrorKind.ENCODING) from None
    if isinstance(response, list):
        raise DataError(
            f"expected one response as an object, got a list of {len(response)}: read them one by one",
            kind=ErrorKind.DTYPE,
        )
    if not isinstance(response, Mapping):
        raise DataError(f"expected a response as an object, got {type(response).__name__}", kind=ErrorKind.DTYPE)
    return response


def refuse_server_error(document: Mapping[str, Any]) -> None:
    """Raise UsageError with what the server said, where its answer is an error.

    >>> refuse_server_error({"choices": []})
    >>> refuse_server_error({"error": {"message": "too long"}})
    Traceback (most recent call last):
    routeplane.errors.UsageError: expected a completion, got the server's error: too long
    """
    error = document.get("error")
    if error is not None:
        said = error.get("message") if isinstance(error, Mapping) else error
        raise UsageError(f"expected a completion, got the server's error: {str(said)[:400]}", kind=ErrorKind.ARGUMENT)


def _by_index(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The choices in order; their indices must be 0, 1, ... each once, before any is read."""
    found = document.get("choices")
    if not isinstance(found, list) or not found or not all(isinstance(one, Mapping) for one in found):
        got = repr(found)[:40] if "choices" in document else f"the keys {sorted(map(str, document))[:12]}"
        raise DataError(f"expected a response with choices, got {got}", kind=ErrorKind.SHAPE)
    indices = [one.get("index", 0) for one in found]
    if sorted(map(str, indices)) != sorted(map(str, range(len(found)))):
        raise DataError(f"expected choices 0 to {len(found) - 1}, each once, got {indices}", kind=ErrorKind.SHAPE)
    return sorted(found, key=lambda one: int(one.get("index", 0)))


# Where servers put what belongs to a choice. vLLM: on the choice, and the prompt on the response. NeMo RL: on the
# message. SGLang's OpenAI endpoints: in ``sgl_ext`` or ``sglext``, of the choice or of the response. NVIDIA Dynamo: in
# ``nvext`` and ``nvext.engine_data``. LMDeploy: ``gen_tokens``. SGLang moves all of it to ``meta_info`` of the choice
# where ``return_meta_info`` asks for that, as sampling masks do.
_EXTENSIONS = ("sgl_ext", "sglext", "nvext", "meta_info")
_MASK_KEYS = ("sampling_mask", "output_token_sampling_mask")
_ROUTE_KEYS = ("routed_experts",)
_PROMPT_KEYS = ("prompt_token_ids", "input_ids")
_GENERATION_KEYS = ("token_ids", "generation_token_ids", "completion_token_ids", "output_ids", "gen_tokens")
_LOGPROB_KEYS = ("generation_log_probs", "completion_logprobs")


@dataclass(frozen=True, kw_only=True)
class Places:
    """The objects in which a server may have put what belongs to one choice, nearest first.

    ``extensions``: those of servers that write SGLang's base64 without a header.

    >>> choice = {"index": 0, "sglext": {"output_ids": [7]}}
    >>> Places.of({"choices": [choice]}, choice, alone=True).ids(["output_ids"])
    [7]
    """

    choice: Mapping[str, Any]
    message: Mapping[str, Any]
    extensions: tuple[Mapping[str, Any], ...]
    response: Mapping[str, Any]

    @classmethod
    def of(cls, document: Mapping[str, Any], choice: Mapping[str, Any], *, alone: bool) -> Places:
        """The places of a choice. ``alone``: whether what a response holds for all of its choices is this one's."""
        extensions = [*_extensions(choice), *(_extensions(document) if alone else ())]
        message = as_mapping(choice.get("message"), "a message")
        return cls(choice=choice, message=message, extensions=tuple(extensions), response=document)

    def first(self, keys: Sequence[str], *, response: bool = False) -> Any:
        """The first value under one of the keys; of the response itself only where that is asked for."""
        for place in (self.choice, self.message, *self.extensions, *((self.response,) if response else ())):
            for key in keys:
                if place.get(key) is not None:
                    return place[key]
        return None

    def ids(self, keys: Sequence[str], *, response: bool = False) -> list[Any] | None:
        """Token ids under one of the keys."""
        found = self.first(keys, response=response)
        return None if found is None else as_list(found, " or ".join(keys))

    def prompt_ids(self) -> list[Any] | None:
        """Token ids of the prompt."""
        return self.ids(_PROMPT_KEYS, response=True)

    def generation_ids(self) -> list[Any] | None:
        """Token ids that were generated."""
        return self.ids(_GENERATION_KEYS)

    def weights_version(self) -> Any:
        """What the server calls the weights; SGLang says it of the whole response, in ``metadata``."""
        said = self.first(["weight_version"], response=True)
        return as_mapping(self.response.get("metadata"), "metadata").get("weight_version") if said is None else said

    def routes(self) -> tuple[Any, WireForm | None]:
        """The routes, and their form where the place alone tells it."""
        found = self.first(_ROUTE_KEYS)
        bare = isinstance(found, str) and any(found is place.get("routed_experts") for place in self.extensions)
        return found, "sglang" if bare and wire.has_no_mark(found) else None


def _extensions(holder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for key in _EXTENSIONS:
        extension = as_mapping(holder.get(key), key)
        if extension:
            yield extension
            engine = as_mapping(extension.get("engine_data"), "engine_data")
            if engine:
                yield engine


def _choice(
    document: Mapping[str, Any], choice: Mapping[str, Any], prompt_ids: Sequence[int] | None, *, name: str
) -> Choice:
    alone = len(document["choices"]) == 1
    places = Places.of(document, choice, alone=alone)
    routes, form = places.routes()
    routes = _engine_ticket(document, name) if routes is None and alone else routes
    prompt = places.prompt_ids()
    logprobs = places.first(_LOGPROB_KEYS)
    said = choice.get("logprobs")
    generation = places.generation_ids()
    if prompt is not None and prompt_ids is not None and list(prompt_ids) != prompt:
        raise _another_prompt(prompt_ids, prompt, name)
    if isinstance(routes, str) and routes.startswith("{") and prompt is None and generation is None:
        # a ticket's call brings its own ids and log-probabilities, so that hops need not carry them
        return Choice(
            call_id=name, prompt_ids=[], generation_ids=[], finish_reason=finish_reason(choice), routes=routes
        )
    prompt = list(prompt_ids) if prompt is None and prompt_ids is not None else prompt
    generation = ids_of_logprobs(said) if generation is None else generation
    for which, ids, more in (("prompt", prompt, ", or pass prompt_ids"), ("generated", generation, "")):
        if ids is None:
            raise _no_ids(which, _how_to_get_ids(places) + more, name)
    return Choice(
        call_id=name,
        prompt_ids=prompt or [],
        generation_ids=generation or [],
        finish_reason=finish_reason(choice),
        routes=routes,
        prompt_routes=places.first(["prompt_routed_experts"], response=True),
        form=form,
        logprobs=choice_logprobs(said, generation or [], name=name) if logprobs is None else logprobs,
        weight_version=places.weights_version(),
        weight_versions=places.first(["weight_versions"]),
        kept=places.first(_MASK_KEYS),
        why_absent=why_absent(document),
    )


def _how_to_get_ids(places: Places) -> str:
    if any(as_mapping(holder.get(key), key) for holder in (places.choice, places.response) for key in _EXTENSIONS[:2]):
        return "SGLang's OpenAI endpoints put them into sglext (input_ids, output_ids) where asked; /generate has them"
    if any(as_mapping(holder.get("nvext"), "nvext") for holder in (places.choice, places.response)):
        return "ask Dynamo for them: nvext.extra_fields=['engine_data']"
    return _ASK_FOR_IDS


def why_absent(document: Mapping[str, Any]) -> str:
    """Say why a response has no routes: keys that hold something like them in a place that is not read, else the flag.

    >>> why_absent({"choices": [{"moe": {"expert_ids": [1]}}]})
    'no reader knows the place choices[0].moe.expert_ids, where something like them was seen'
    """
    found = (path for path in _route_like(document, "", depth=5) if not _READ_PLACES.fullmatch(path))
    seen = list(itertools.islice(found, 4))
    if not seen:
        return choices.WHY_ABSENT
    return f"no reader knows the place {', '.join(seen)}, where something like them was seen"


def _route_like(value: object, path: str, *, depth: int) -> Iterator[str]:
    if depth == 0:
        return
    if isinstance(value, list):
        for index, item in enumerate(value[:8]):
            if isinstance(item, Mapping):
                yield from _route_like(item, f"{path}[{index}]", depth=depth)
        return
    for key, item in value.items() if isinstance(value, Mapping) else ():
        here = f"{path}.{key}" if path else str(key)
        if isinstance(key, str) and _ROUTE_LIKE.search(key) and isinstance(item, str | list | Mapping) and item:
            yield here
        elif isinstance(item, list | Mapping):
            yield from _route_like(item, here, depth=depth - 1)


_ROUTE_LIKE = re.compile("expert|routing|route_|routes", re.IGNORECASE)
# those of another choice
_READ_PLACES = re.compile(r"choices\[\d+\]\.(?:\w+\.)*routed_experts")


def ids_of_logprobs(logprobs: object) -> list[int] | None:
    """Token ids out of log-probabilities that name every token by its id (``return_tokens_as_token_ids``).

    >>> ids_of_logprobs({"tokens": ["token_id:8", "token_id:9"], "token_logprobs": [-1.0, -2.0]})
    [8, 9]
    """
    pairs = _logprob_pairs(as_mapping(logprobs, "logprobs"))
    found = dict(_named_ids(pairs or ()))
    return [found[at] for at in range(len(found))] if pairs and len(found) == len(pairs) else None


def _another_prompt(expected: Sequence[int], got: Sequence[int], name: str) -> DataError:
    return DataError(
        f"expected the request's {len(expected)} prompt ids in the response, got {len(got)} others @ call {name}",
        kind=ErrorKind.TOKEN_MISMATCH,
    )


def as_mapping(value: object, what: str) -> Mapping[str, Any]:
    """An object of a response; an absent one is empty. Raises DataError (DTYPE) for anything else.

    >>> as_mapping(None, "a message"), as_mapping({"a": 1}, "a message")
    ({}, {'a': 1})
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise DataError(f"expected {what} as an object, got {type(value).__name__}", kind=ErrorKind.DTYPE)
    return value


def as_list(value: object, what: str) -> list[Any]:
    """A list of a response. Raises DataError (DTYPE) for anything else.

    >>> as_list([7], "token_ids")
    [7]
    """
    if not isinstance(value, list):
        raise DataError(f"expected {what} as a list, got {type(value).__name__}", kind=ErrorKind.DTYPE)
    return value


def finish_reason(choice: Mapping[str, Any]) -> str | None:
    """Why a choice ended; None where it goes on.

    >>> finish_reason({"finish_reason": "stop"}), finish_reason({})
    ('stop', None)
    """
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

    >>> choice_logprobs({"tokens": ["token_id:7"], "token_logprobs": [-0.5]}, [7], name="c")
    [-0.5]
    """
    pairs = _logprob_pairs(as_mapping(logprobs, "logprobs"))
    if pairs is None:
        return None
    for at, named in _named_ids(pairs):
        if at >= len(generation) or named != generation[at]:
            raise DataError(
                f"expected log-probabilities of the sampled tokens, got one of token {named} "
                f"@ call {name}, generated token {at}",
                kind=ErrorKind.TOKEN_MISMATCH,
            )
    return [value for _, value in pairs]


def _logprob_pairs(said: Mapping[str, Any]) -> list[tuple[Any, Any]] | None:
    """Tokens and values in the form of chat or of completions; None where there are none."""
    content, values = said.get("content"), said.get("token_logprobs")
    if content is not None:
        entries = [as_mapping(one, "a log-probability") for one in as_list(content, "logprobs.content")]
        return [(one.get("token"), one.get("logprob")) for one in entries]
    if values is None:
        return None
    tokens = said.get("tokens")
    values = as_list(values, "logprobs.token_logprobs")
    return list(itertools.zip_longest(as_list(tokens, "logprobs.tokens") if tokens else (), values))


def _named_ids(pairs: Sequence[tuple[Any, Any]]) -> Iterator[tuple[int, int]]:
    for at, (token, _) in enumerate(pairs):
        if isinstance(token, str) and token.startswith("token_id:") and token[9:].isdecimal():
            yield at, int(token[9:])


def _cached(document: Mapping[str, Any]) -> int | None:
    """Prompt tokens that came from the prefix cache, where the server says (``--enable-prompt-tokens-details``)."""
    details = as_mapping(document.get("usage"), "usage").get("prompt_tokens_details")
    found = as_mapping(details, "prompt_tokens_details").get("cached_tokens")
    return found if isinstance(found, int) and not isinstance(found, bool) else None


# ----------------------------------------------------------------------------------------------------------------------
# A server that is asked
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRequest:
    """What a check asks of an engine: token ids in, sampled at temperature 1.

    ``salt``: keeps the request apart from the prefix cache of others; None shares it. ``stop``, ``stop_ids``: text and
    tokens that end the answer. ``hang_up_after``: leave a streamed answer after so many chunks. ``first_row``: leave
    out the rows before it. ``keep_prompt``: cut the prompt to its last tokens.

    >>> EngineRequest(prompt_ids=(5, 6), max_tokens=3).choices
    1
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int = 1
    choices: int = 1
    seed: int = 0
    salt: str | None = None
    stop: str | None = None
    stop_ids: tuple[int, ...] = ()
    stream: bool = False
    hang_up_after: int | None = None
    first_row: int = 0
    keep_prompt: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EngineChoice:
    """One choice: the tokens, and the rows ``[R, D, K]`` as they came, or None.

    >>> EngineChoice(generation_ids=(7,), routes=None).finish_reason is None
    True
    """

    generation_ids: tuple[int, ...]
    routes: NDArray[Any] | None
    text: str = ""
    finish_reason: str | None = None
    weights_version: object = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EngineAnswer:
    """What came: the prompt as the engine fed it, and the choices in order. ``cached``: prompt tokens that the engine
    says came from its prefix cache.

    >>> EngineAnswer(prompt_ids=(5, 6), choices=()).cached is None
    True
    """

    prompt_ids: tuple[int, ...]
    choices: tuple[EngineChoice, ...]
    cached: int | None = None


class Engine(Protocol):
    """What an engine's contract (``testing.contracts``) asks. ``ask`` raises UsageError for what is not offered."""

    def ask(self, request: EngineRequest) -> EngineAnswer:
        """Answer one request; may be called from several threads at once."""
        ...

    def update(self) -> object:
        """Load other weights; the version that answers name from then on. None: cannot be tried."""
        ...

    def reference(self, token_ids: Sequence[int]) -> NDArray[Any] | None:
        """The true rows of these tokens, ``[S, L, K]`` in the spec's layers; None: there is no reference."""
        ...


class HttpEngine:
    """The client of an OpenAI-compatible server (``/v1/completions`` with token ids).

    Args:
        url: The server, without a path.
        spec: The geometry of the rows.
        model: The name that it serves; None asks ``/v1/models``.
        axis: What its layer axis counts.
        headers: Sent with every request.
        body: Fields of every request's body; None leaves a field out.
        timeout_s: How long an answer may take.

    Answers are read as ``capture.http.openai`` reads them. Raises TransportError where the server does not answer or
    fails, UsageError where it refuses a request.

    Example:
        ``HttpEngine("http://127.0.0.1:8000", spec).ask(EngineRequest(prompt_ids=(5, 6, 7)))``
    """

    def __init__(
        self,
        url: str,
        spec: RouteSpec,
        *,
        model: str | None = None,
        axis: LayerAxis = "decoder",
        headers: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise refused("a URL of http or https", repr(url))
        self._url, self._model, self._timeout_s = url.rstrip("/"), model, timeout_s
        self.spec = spec
        self._headers = {"content-type": "application/json", **(headers or {})}
        self._extra = dict(body or {})
        self._depth = spec.num_layers if axis == "captured" else spec.decoder_layers or spec.layer_ids[-1] + 1
        self._slots = spec.top_k

    def ask(self, request: EngineRequest) -> EngineAnswer:
        """Ask the server."""
        with self._open("/v1/completions", self.body(request)) as response:
            if not request.stream:
                return self.read(_json(response.read()), request)
            chunks = itertools.islice(_events(response), request.hang_up_after)
            return self.read_chunks(list(chunks), request)

    def update(self) -> object:
        """There is no common way to have a server load weights."""
        return None

    def reference(self, token_ids: Sequence[int]) -> NDArray[Any] | None:
        """A server is its own reference."""
        del token_ids
        return None

    def body(self, request: EngineRequest) -> dict[str, Any]:
        """The request as the server's JSON."""
        if self._model is None:
            with self._open("/v1/models", None) as response:
                found = _json(response.read()).get("data") or [{}]
            self._model = str(found[0].get("id", ""))
        optional = {
            "cache_salt": request.salt,
            "stop": request.stop,
            "stop_token_ids": list(request.stop_ids) or None,
            "routed_experts_prompt_start": request.first_row or None,
            "truncate_prompt_tokens": request.keep_prompt,
            "stream": request.stream or None,
        }
        fields = {
            "model": self._model,
            "prompt": list(request.prompt_ids),
            "max_tokens": request.max_tokens,
            "n": request.choices,
            "seed": request.seed,
            "temperature": 1.0,
            "return_token_ids": True,
            "ignore_eos": True,
            **{name: value for name, value in optional.items() if value is not None},
            **self._extra,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def read(self, response: object, request: EngineRequest) -> EngineAnswer:
        """Read a whole answer. Raises DataError for what is not in the form that it claims."""
        document = as_document(response)
        refuse_server_error(document)
        found = sorted(document.get("choices") or (), key=lambda one: int(one.get("index", 0)))
        places = [Places.of(document, choice, alone=len(found) == 1) for choice in found]
        prompt = next((ids for place in places if (ids := place.prompt_ids()) is not None), request.prompt_ids)
        details = (document.get("usage") or {}).get("prompt_tokens_details") or {}
        return EngineAnswer(
            prompt_ids=tuple(prompt),
            choices=tuple(self._choice(place) for place in places),
            cached=details.get("cached_tokens"),
        )

    def read_chunks(self, chunks: Sequence[object], request: EngineRequest) -> EngineAnswer:
        """Join the chunks of a stream of one choice; rows that grow are the whole so far, others are what is new."""
        answers = [self.read(chunk, request) for chunk in chunks]
        parts = [choice for answer in answers for choice in answer.choices]
        rows = [choice.routes for choice in parts if choice.routes is not None]
        whole = len(rows) > 1 and all(len(after) > len(rows[0]) for after in rows[1:])
        joined = EngineChoice(
            generation_ids=tuple(itertools.chain.from_iterable(choice.generation_ids for choice in parts)),
            routes=None if not rows else rows[-1] if whole else np.concatenate(rows),
            text="".join(choice.text for choice in parts),
            finish_reason=next((choice.finish_reason for choice in parts if choice.finish_reason), None),
        )
        prompt = answers[0].prompt_ids if answers else request.prompt_ids
        return EngineAnswer(prompt_ids=prompt, choices=(joined,))

    def _choice(self, places: Places) -> EngineChoice:
        routes, form = places.routes()
        decoded = None if routes is None else wire.decode(routes, form=form, layers=self._depth, slots=self._slots)
        return EngineChoice(
            generation_ids=tuple(places.generation_ids() or ()),
            routes=None if decoded is None else decoded.routes,
            text=str(places.choice.get("text") or ""),
            finish_reason=finish_reason(places.choice),
            weights_version=places.weights_version(),
        )

    def _open(self, path: str, body: Mapping[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self._url + path, data=data, headers=self._headers)
        try:
            return urllib.request.urlopen(asked, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            said = error.read(400).decode("utf-8", "replace")
            if error.code in (401, 403) or (error.code >= 500 and error.code != 501):
                raise TransportError(
                    f"expected an answer of {self._url}{path}, got status {error.code}: {said}",
                    kind=ErrorKind.CONNECTION,
                ) from None
            raise refused(f"a request that {self._url}{path} takes", f"status {error.code}: {said}") from None
        except OSError as error:
            raise TransportError(f"expected {self._url} to answer, got: {error}", kind=ErrorKind.CONNECTION) from error


def _json(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"expected an answer as JSON, got {error}", kind=ErrorKind.ENCODING) from None
    return found if isinstance(found, dict) else {}


def _events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
            yield _json(line[5:])
