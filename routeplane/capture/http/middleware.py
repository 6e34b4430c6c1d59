"""An ASGI middleware that takes routes out of JSON bodies: a server ships them in the form that a request names.

Works as vLLM's ``--middleware`` and on any ASGI application, FastAPI's among them; needs no web framework. Owns which
bodies are read and which pass untouched, what is counted, and where each form stands in a response: on the choice
(``ticket``, ``npy``, ``engine-ticket``) or on the message, with ids and log-probabilities beside it, as NeMo Gym reads
it (``nemo``: the ``nrlre1`` envelope, ``nemo-lists``: nested lists for release 0.4). A ticket's call goes into the
``RouteSink`` that the middleware is given; an engine's ticket is that of the writer inside the engine, for every choice
and in streams too. Responses are rewritten in threads of the middleware's own, and one more writes to the sink: a sink
that is stuck holds up the responses that carry its tickets, and no others.

Axes: S token positions, L captured layers, K top-k slots.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from routeplane.capture import wire
from routeplane.capture.choices import DEFAULTS, WHY_ABSENT, CaptureOptions
from routeplane.capture.http import openai
from routeplane.capture.http.engine_answers import EngineAnswers, EventStream
from routeplane.capture.http.tickets import issue_ticket
from routeplane.errors import CaptureError, ErrorKind, RouteplaneError, TransportError, UsageError, refused
from routeplane.record.counts import Counts, metrics_text
from routeplane.record.spec import RouteSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from routeplane.record.calls import ModelCall
    from routeplane.record.interfaces import RouteSink
    from routeplane.record.record import RouteRecord

__all__ = [
    "HEADER",
    "PATHS",
    "MiddlewareReport",
    "RouteMiddleware",
    "RouteRequest",
    "ShippingForm",
    "parse_form",
    "ship_routes",
]

#: The request header that names a form; the response repeats it where routes were shipped.
HEADER = "x-routeplane-form"
#: The endpoints whose responses may carry routes.
PATHS = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate")
#: How a response carries routes: a ticket for them, the ticket of the engine's own writer, what vLLM wrote, NeMo's
#: envelope or lists; none.
ShippingForm = Literal["ticket", "engine-ticket", "npy", "nemo", "nemo-lists", "none"]

_MESSAGE_FORMS = ("nemo", "nemo-lists")
# Threads that rewrite responses; each takes a core while it works.
_REWRITERS = 4
# Requests whose records may wait for the sink, and for how long.
_MAX_WAITING, _SINK_TIMEOUT_S = 64, 30.0

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# ----------------------------------------------------------------------------------------------------------------------
# Documents
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RouteRequest:
    """What a client's request says of its routes, and what of the answer is there for the middleware alone.

    >>> RouteRequest(form="ticket", choices=2).keep_ids
    True
    """

    form: ShippingForm
    first_row: int | None = None
    prompt_ids: Sequence[int] | None = None
    keep_ids: bool = True
    keep_logprobs: bool = True
    choices: int = 1


def parse_form(text: str) -> ShippingForm:
    """Parse the name of a form. Raises UsageError for any other.

    >>> parse_form("ticket")
    'ticket'
    """
    for form in get_args(ShippingForm):
        if text == form:
            known: ShippingForm = form
            return known
    raise refused(f"a form of routes of {get_args(ShippingForm)}", repr(text[:40]))


def _prepare_request(body: Mapping[str, Any], form: ShippingForm, *, chat: bool) -> tuple[dict[str, Any], RouteRequest]:
    """The request that the engine gets, and what the client wants of its answer.

    Ids are asked for where routes are shipped, log-probabilities where the message must have them. Routes that a
    harness sends back inside its messages are dropped: the engine has no use for them, and they are most of the bytes.
    """
    changed = dict(body)
    messages = body.get("messages")
    if isinstance(messages, list):
        changed["messages"] = [
            {name: value for name, value in one.items() if name != "routed_experts"}
            if isinstance(one, Mapping)
            else one
            for one in messages
        ]
    tokens = body.get("token_ids")
    # token in / token out has all that it samples by one level below
    place = body if tokens is None else body.get("sampling_params")
    start = place.get("routed_experts_prompt_start") if isinstance(place, Mapping) else None
    request = RouteRequest(
        form=form,
        first_row=start if isinstance(start, int) else None,
        prompt_ids=tokens if isinstance(tokens, list) else None,
        # a client that sends token ids is answered in token ids
        keep_ids=form in ("npy", "none", "engine-ticket") or tokens is not None or bool(body.get("return_token_ids")),
        keep_logprobs=form not in _MESSAGE_FORMS or bool(body.get("logprobs")),
        choices=body["n"] if isinstance(body.get("n"), int) else 1,
    )
    if form not in ("none", "npy", "engine-ticket") and tokens is None:
        changed["return_token_ids"] = True
    if form in _MESSAGE_FORMS and chat and not body.get("logprobs"):
        changed["logprobs"] = True
    return changed, request


def _strip_routes(document: dict[str, Any]) -> int:
    """Take the routes out of a response whose client did not ask for them; from how many choices.

    Whatever else a server answered is not the middleware's to refuse.
    """
    count = 0
    choices = document.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, dict):
            continue
        found = [choice.get("routed_experts"), _take_off_message(choice)]
        if found[0] is not None:
            choice["routed_experts"] = None
        count += any(routes is not None for routes in found)
    return count


def _take_off_message(choice: Mapping[str, Any]) -> Any:
    """The routes that some servers (NeMo RL's) put on the message, which has them no longer."""
    message = choice.get("message")
    return message.pop("routed_experts", None) if isinstance(message, dict) else None


def _require_routes(document: Mapping[str, Any]) -> int:
    """How many choices have routes, in the form that the server writes.

    Raises CaptureError (CAPTURE_OFF) for a choice without them, unless it was aborted, or a writer inside the engine
    says in its place what became of them; DataError for choices of another kind.
    """
    said = openai.as_mapping(document.get("kv_transfer_params"), "kv_transfer_params")
    count = 0
    for one in openai.as_list(document.get("choices"), "choices"):
        choice = openai.as_mapping(one, "a choice")
        message = openai.as_mapping(choice.get("message"), "a message")
        if any(place.get("routed_experts") is not None for place in (choice, message)):
            count += 1
        elif choice.get("finish_reason") not in ("abort", "error") and "routeplane" not in said:
            raise CaptureError(
                f"expected routes in choice {choice.get('index', 0)}, got none: {WHY_ABSENT} @ call "
                f"{document.get('id')}",
                kind=ErrorKind.CAPTURE_OFF,
            )
    return count


def ship_routes(
    document: dict[str, Any],
    request: RouteRequest,
    *,
    spec: RouteSpec,
    issue: Callable[[Sequence[ModelCall]], Sequence[str]],
    weights_version: int | None = None,
    options: CaptureOptions = DEFAULTS,
) -> int:
    """Replace the routes of a response by the form asked for (``ticket``, ``nemo`` or ``nemo-lists``), in place.

    Every choice is read, and so checked, before the first is changed. An aborted choice without routes has no ticket;
    then the response's ids stay, which are all that there is to read of it.

    Args:
        document: The response; it is changed.
        request: What the client asked for.
        spec: The geometry of the rows.
        issue: Takes calls into a stream, all or none, and gives the text of their tickets.
        weights_version: Of the policy that sampled; None where unknown.
        options: What is known of the engine.

    Returns:
        How many choices have routes. Raises as ``openai.calls``, UsageError for a form on the message where there is
        none, and CaptureError (CAPTURE_OFF) for a message without log-probabilities.

    >>> choice = {"index": 0, "finish_reason": "stop", "token_ids": [7], "routed_experts": [[[3, 1]], [[0, 5]]]}
    >>> response = {"id": "r", "prompt_token_ids": [5, 6], "choices": [choice]}
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0,))
    >>> ship_routes(response, RouteRequest(form="ticket"), spec=spec, issue=lambda calls: ["a ticket"])
    1
    >>> response["choices"][0]["routed_experts"]
    'a ticket'
    """
    if request.form not in ("ticket", *_MESSAGE_FORMS):
        raise refused(f"a form of {('ticket', *_MESSAGE_FORMS)}", repr(request.form))
    calls = openai.calls(
        document,
        spec,
        weights_version=weights_version,
        prompt_ids=request.prompt_ids,
        first_row=request.first_row,
        options=options,
    )
    choices = sorted(document["choices"], key=lambda one: int(one.get("index", 0)))
    shipped = [call for call in calls if call.routes is not None]
    tickets = iter(issue(shipped) if request.form == "ticket" else ())
    for choice, call in zip(choices, calls, strict=True):
        if request.form in _MESSAGE_FORMS:
            _put_on_message(choice, call, spec, lists=request.form == "nemo-lists")
            continue
        _take_off_message(choice)
        if call.routes is None:
            choice["routed_experts"] = None
        else:
            choice["routed_experts"] = next(tickets)
    _tidy(document, request, keep_ids=request.keep_ids or (request.form == "ticket" and len(shipped) < len(calls)))
    return len(shipped)


def _put_on_message(choice: dict[str, Any], call: ModelCall, spec: RouteSpec, *, lists: bool) -> None:
    message = choice.get("message")
    if not isinstance(message, dict):
        raise refused("a chat completion for routes on the message", "a choice without a message")
    if call.logprobs is None and len(call.generation_ids):
        raise CaptureError(
            f"expected log-probabilities of the {len(call.generation_ids)} generated tokens, which a message has for "
            f"NeMo Gym, got none @ call {call.call_id}",
            kind=ErrorKind.CAPTURE_OFF,
        )
    rows_SLK = _one_row_per_token(call, spec)
    choice["routed_experts"] = None
    message["prompt_token_ids"] = call.prompt_ids.tolist()
    message["generation_token_ids"] = call.generation_ids.tolist()
    message["generation_log_probs"] = [] if call.logprobs is None else call.logprobs.tolist()
    message["routed_experts"] = wire.encode(rows_SLK, form="lists" if lists else "nrlre1")


def _one_row_per_token(call: ModelCall, spec: RouteSpec) -> NDArray[np.int16]:
    """A row for each of the call's tokens: NeMo's readers want P + G. What was not captured is -1, which they leave to
    the live router; never ids that no router chose."""
    rows_SLK = spec.missing_rows(call.num_tokens)
    if call.routes is not None:
        rows_SLK[call.first_row : call.rows_stop] = call.routes
    return rows_SLK


def _tidy(document: dict[str, Any], request: RouteRequest, *, keep_ids: bool) -> None:
    """Take out of the answer what only the middleware asked for."""
    if not keep_ids:
        document.pop("prompt_token_ids", None)
    for choice in document["choices"]:
        if not keep_ids:
            choice.pop("prompt_token_ids", None)
            choice.pop("token_ids", None)
        if not request.keep_logprobs:
            choice["logprobs"] = None


# ----------------------------------------------------------------------------------------------------------------------
# Bytes
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class MiddlewareReport(Counts):
    """What a middleware did. ``shipped`` and ``stripped`` count choices, the rest requests.

    >>> MiddlewareReport(requests=2).scalars()["routeplane/middleware_requests"]
    2.0
    """

    SCOPE: ClassVar[str] = "middleware_"

    requests: int = 0
    shipped: int = 0
    stripped: int = 0
    streams: int = 0  # answered as a stream: passed on untouched, but for the engine's tickets
    untouched: int = 0  # other bodies: errors, compressed, not JSON, without choices, or not whole
    refused: int = 0  # answered with an error, since their routes could not be shipped
    stuck: int = 0  # of these: the sink took no record in time, or too many wait for it


class RouteMiddleware:
    """Ship the routes of an ASGI application's responses.

    Responses that are streams, errors, compressed or not JSON pass untouched, and are counted. Routes that a request
    asked for and that cannot be shipped are an error (HTTP 502 with the reason; 503 where the sink takes no record),
    never a response without them. On vLLM's server, ``/metrics`` has the counts of this middleware and of a writer
    inside the engine too.

    Args:
        app: The application.
        spec: The geometry of the routes. None takes it from vLLM's own configuration.
        sink: Where calls go whose tickets are asked for: a RouteSink, which its maker closes, or the dotted name of a
            function that makes one of a spec (``"package.module:function"``), called when the first ticket is due;
            that one is closed when the server shuts down, or by ``close()``.
        stream: The name in the tickets.
        form: What a request without the header gets.
        weights_version: Called for each request before it is passed on, since its first rows are of those weights
            whatever update comes meanwhile; None where unknown, then the reader that redeems says.
        paths: The endpoints, by the end of their path.
        options: What is known of the engine: ``axis``, ``cached``, ``decoder_layers``, ``fused_shared``.

    >>> async def app(scope, receive, send): ...
    >>> RouteMiddleware(app, form="npy").report().requests
    0
    """

    def __init__(
        self,
        app: App,
        *,
        spec: RouteSpec | None = None,
        sink: RouteSink | str | None = None,
        stream: str = "routes",
        form: ShippingForm = "none",
        weights_version: Callable[[], int | None] | None = None,
        paths: Iterable[str] = PATHS,
        options: CaptureOptions = DEFAULTS,
    ) -> None:
        options.only(("axis", "cached", "decoder_layers", "form", "fused_shared"), reader="the middleware")
        self._app = app
        self._spec = spec
        self._sink = sink
        self._made_sink: RouteSink | None = None
        self._stream = stream
        self._form = parse_form(form)
        self._weights_version = weights_version or (lambda: None)
        self._options = options
        if isinstance(paths, str):
            raise refused("paths as a sequence of text", f"one text {paths!r}")
        self._paths = tuple(paths)
        self._rewriters = ThreadPoolExecutor(_REWRITERS, thread_name_prefix="routeplane-rewriter")
        # a sink takes one record at a time; one that is stuck must not hold up what does not need it
        self._sink_thread = _SinkThread()
        self._waiting = 0
        self._counts = dict.fromkeys(MiddlewareReport.__slots__, 0)

    def report(self) -> MiddlewareReport:
        """What was done so far."""
        return MiddlewareReport(**self._counts)

    def close(self) -> None:
        """Close the sink that this middleware made by name, behind the records that wait for it.

        Raises TimeoutError where the sink is stuck.
        """
        self._sink_thread.submit(self._close_sink).result(_SINK_TIMEOUT_S)

    def _close_sink(self) -> None:
        if self._made_sink is not None:
            self._made_sink.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, self._closing(send))
        if scope["type"] == "http" and scope.get("method") == "GET" and scope["path"].rstrip("/").endswith("/metrics"):
            return await self._metrics(scope, receive, send)
        if scope["type"] != "http" or scope.get("method") != "POST" or not scope["path"].endswith(self._paths):
            return await self._app(scope, receive, send)
        self._counts["requests"] += 1
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            form = parse_form(headers[HEADER]) if HEADER in headers else self._form
        except UsageError as error:
            return await self._refuse(send, error, status=400)
        content, more = await _read_body(receive)
        document = None if more or "content-encoding" in headers else _json_object(content)
        if document is None:
            self._counts["untouched"] += 1
            return await self._app(scope, _replay(content, more, receive), send)
        return await self._serve(document, form, scope, receive, send)

    async def _serve(
        self, document: Mapping[str, Any], form: ShippingForm, scope: Scope, receive: Receive, send: Send
    ) -> None:
        streams = _is_yes(document.get("stream"))
        if streams and form != "engine-ticket":
            form = "none"
        changed, asked = _prepare_request(document, form, chat=scope["path"].endswith("/chat/completions"))
        body = _compact(changed)
        scope = {**scope, "headers": _with_length(scope["headers"], len(body))}
        if streams:
            self._counts["streams"] += 1
            return await self._app(scope, _replay(body, [], receive), self._streaming(asked, scope, send))
        # a compressed response would pass untouched, so the server is not told that the client takes one
        scope["headers"] = [pair for pair in scope["headers"] if pair[0].lower() != b"accept-encoding"]
        request = _Exchange(routes=asked, scope=scope, weights_version=self._weights_version())
        reply = _Reply(send, lambda start, content: self._answer(start, content, request, send))
        try:
            await self._app(scope, _replay(body, [], receive), reply.take)
        finally:
            self._counts["untouched"] += reply.passed
        return None

    def _closing(self, send: Send) -> Send:
        """Closes the sink that was made by name once the application has shut down."""

        async def closed(message: Message) -> None:
            if message["type"] in ("lifespan.shutdown.complete", "lifespan.shutdown.failed"):
                await asyncio.to_thread(self.close)
            await send(message)

        return closed

    def _streaming(self, asked: RouteRequest, scope: Scope, send: Send) -> Send:
        """Puts the engine's tickets into the last chunk of each choice; any other stream passes untouched."""
        if asked.form != "engine-ticket":
            return send
        events = EventStream(lambda chunk: self._ticket_chunk(chunk, asked, scope))

        async def changed(message: Message) -> None:
            if message["type"] == "http.response.body":
                last = not message.get("more_body", False)
                message = {**message, "body": await events.feed(message.get("body", b""), last=last)}
            await send(message)

        return changed

    async def _ticket_chunk(self, chunk: dict[str, Any], asked: RouteRequest, scope: Scope) -> None:
        """The answer has begun, so that a refusal stands in its place, and is counted."""
        try:
            self._counts["shipped"] += await EngineAnswers(scope.get("app")).put_tickets(chunk, choices=asked.choices)
        except RouteplaneError as error:
            self._counts["refused"] += 1
            chunk["routeplane_error"] = error.message

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application's own metrics, and the counts behind them."""
        lines = metrics_text(self.report().scalars())
        with suppress(UsageError):  # no writer inside this engine
            lines += metrics_text(await EngineAnswers(scope.get("app")).scalars())
        # in the plain format, whose end is the end of the body
        kept = [pair for pair in scope["headers"] if pair[0].lower() not in (b"accept", b"accept-encoding")]

        async def extended(message: Message) -> None:
            if message["type"] == "http.response.start":
                rest = [pair for pair in message["headers"] if pair[0].lower() != b"content-length"]
                message = {**message, "headers": rest}
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                message = {**message, "body": message.get("body", b"") + lines.encode()}
            await send(message)

        await self._app({**scope, "headers": kept}, receive, extended)

    async def _answer(self, start: Message, content: bytes, exchange: _Exchange, send: Send) -> None:
        loop = asyncio.get_running_loop()
        try:
            if exchange.routes.form == "engine-ticket":
                content, counts = await self._engine_tickets(content, exchange)
            else:
                content, counts = await loop.run_in_executor(self._rewriters, self._rewrite, content, exchange)
            await self._write(exchange)
        except _StuckSinkError as error:
            self._counts["stuck"] += 1
            return await self._refuse(send, error, status=503)
        except RouteplaneError as error:
            return await self._refuse(send, error, status=502)
        for name, count in counts.items():
            self._counts[name] += count
        headers = _with_length(start["headers"], len(content))
        if counts.get("shipped"):
            headers.append((HEADER.encode(), exchange.routes.form.encode()))
        await send({**start, "headers": headers})
        await send({"type": "http.response.body", "body": content, "more_body": False})
        return None

    async def _engine_tickets(self, content: bytes, exchange: _Exchange) -> tuple[bytes, dict[str, int]]:
        document = _json_object(content)
        if document is None or "choices" not in document:
            return content, {"untouched": 1}
        answers = EngineAnswers(exchange.scope.get("app"))
        shipped = await answers.put_tickets(document, choices=exchange.routes.choices)
        return _compact(document), {"shipped": shipped}

    def _rewrite(self, content: bytes, exchange: _Exchange) -> tuple[bytes, dict[str, int]]:
        """The body to send, and what to count of it."""
        asked, scope = exchange.routes, exchange.scope
        document = _json_object(content)
        if document is None or "choices" not in document:
            return content, {"untouched": 1}
        if asked.form == "npy":
            return content, {"shipped": _require_routes(document)}
        if asked.form == "none":
            stripped = _strip_routes(document)
            return _compact(document) if stripped else content, {"stripped": stripped}
        shipped = ship_routes(
            document,
            asked,
            spec=self._spec_of(scope),
            issue=lambda calls: self._issue(calls, exchange),
            weights_version=exchange.weights_version,
            options=self._options,
        )
        return _compact(document), {"shipped": shipped}

    def _issue(self, calls: Sequence[ModelCall], exchange: _Exchange) -> list[str]:
        """The tickets of calls. Their records are written when the whole response is there, and before it is sent: a
        record whose response is refused has no owner."""
        if self._sink is None:
            raise refused("a sink for the form 'ticket' (sink=)", "none")
        pairs = [issue_ticket(call, self._spec_of(exchange.scope), stream=self._stream) for call in calls]
        exchange.records.extend(record for record, _ in pairs)
        return [ticket.to_json() for _, ticket in pairs]

    async def _write(self, exchange: _Exchange) -> None:
        """Write a response's records. Raises _StuckSinkError where that takes too long, or too many wait."""
        if not exchange.records:
            return
        if self._waiting >= _MAX_WAITING:
            raise _StuckSinkError(
                f"expected a sink that takes records, got one for which {self._waiting} responses wait",
                kind=ErrorKind.TIMED_OUT,
            )
        self._waiting += 1
        writing = asyncio.wrap_future(self._sink_thread.submit(lambda: self._write_records(exchange)))
        writing.add_done_callback(self._written)
        done, _ = await asyncio.wait([writing], timeout=_SINK_TIMEOUT_S)
        if not done:
            raise _StuckSinkError(
                f"expected the sink to take a record within {_SINK_TIMEOUT_S:g} s, got no answer: is its reader there?",
                kind=ErrorKind.TIMED_OUT,
            )
        writing.result()

    def _written(self, writing: asyncio.Future[None]) -> None:
        self._waiting -= 1
        if not writing.cancelled():
            writing.exception()  # of a response that was refused before: no one else asks for it

    def _write_records(self, exchange: _Exchange) -> None:
        try:
            for record in exchange.records:
                self._sink_of(exchange.scope).write(record)
        except OSError as error:
            if isinstance(error, RouteplaneError):
                raise
            # a file's or a pipe's own: the client must hear of it as of any other refusal
            raise TransportError(
                f"expected the sink to take record {exchange.records[0].key}, got {error}", kind=ErrorKind.CONNECTION
            ) from error

    def _sink_of(self, scope: Scope) -> RouteSink:
        if self._sink is None:
            raise refused("a sink for the form 'ticket' (sink=)", "none")
        if not isinstance(self._sink, str):
            return self._sink
        if self._made_sink is None:
            self._made_sink = _factory(self._sink)(self._spec_of(scope))
        return self._made_sink

    def _spec_of(self, scope: Scope) -> RouteSpec:
        if self._spec is None:
            # vLLM's server keeps its configuration at its application
            config = getattr(getattr(scope.get("app"), "state", None), "vllm_config", None)
            if config is None:
                raise refused("a spec (spec=), or vLLM's server", "an application without vllm_config")
            self._spec = RouteSpec.from_hf_config(config.model_config.hf_config)
        return self._spec

    async def _refuse(self, send: Send, error: RouteplaneError, *, status: int) -> None:
        self._counts["refused"] += 1
        said = {
            "message": error.message,
            "type": type(error).__name__,
            "param": None,
            "code": status,
            "kind": error.kind,
        }
        body = json.dumps({"error": said}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})


@dataclass(frozen=True, kw_only=True)
class _Exchange:
    """What an answer is made for, and the weights that its request found."""

    routes: RouteRequest
    scope: Scope
    weights_version: int | None
    records: list[RouteRecord] = field(default_factory=list)


class _StuckSinkError(TransportError):
    """The sink takes no record: a response with its ticket would promise what may never be there."""


class _SinkThread:
    """One thread that does what it is given, in order. A daemon: a stuck sink must not keep the server alive."""

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()
        threading.Thread(target=self._run, name="routeplane-sink", daemon=True).start()

    def submit(self, work: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._work.put((work, future))
        return future

    def _run(self) -> None:
        while True:
            work, future = self._work.get()
            with _Outcome(future):
                work()


class _Outcome:
    """Hands what a ``with`` body raises, or that it ended, to a future."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(error)
        return True


class _Reply:
    """Holds a JSON response back until it is whole, and has it answered then; passes any other on as it comes."""

    def __init__(self, send: Send, answer: Callable[[Message, bytes], Awaitable[None]]) -> None:
        self._send = send
        self._answer = answer
        self._start: Message | None = None
        self._body = bytearray()
        self.passed = False

    async def take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            is_json = headers.get(b"content-type", b"").split(b";")[0].strip().lower() == b"application/json"
            if message["status"] == 200 and is_json and b"content-encoding" not in headers:
                self._start = message
                return
            self.passed = True
        elif message["type"] == "http.response.body" and self._start is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                # not when the application returns: it may have work of its own behind its answer
                start, self._start = self._start, None
                await self._answer(start, bytes(self._body))
            return
        await self._send(message)


async def _read_body(receive: Receive) -> tuple[bytes, list[Message]]:
    """The whole body, and what came instead of its end where the client left."""
    content = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return bytes(content), [message]
        content += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(content), []


def _replay(content: bytes, more: list[Message], receive: Receive) -> Receive:
    pending = [{"type": "http.request", "body": content, "more_body": bool(more)}, *more]

    async def replayed() -> Message:
        return pending.pop(0) if pending else await receive()

    return replayed


def _json_object(content: bytes) -> dict[str, Any] | None:
    """The object that a body holds; None for anything else."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _is_yes(value: object) -> bool:
    """Whether a server takes a field for true. Where it is not a bool, vLLM's reader (pydantic) takes these words for
    false."""
    return bool(value) and str(value).lower() not in ("0", "f", "false", "n", "no", "off")


def _factory(name: str) -> Callable[[RouteSpec], RouteSink]:
    """What a dotted name leads to. Raises UsageError where that cannot be called."""
    module, _, attribute = name.replace(":", ".").rpartition(".")
    found: Callable[[RouteSpec], RouteSink] | None = None
    try:
        found = getattr(import_module(module), attribute, None) if module else None
    except ModuleNotFoundError as error:
        # what a module that is there fails to import is its own matter
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
    if not callable(found):
        raise refused("sink as the dotted name of a factory", f"{name!r}, which is none")
    return found


def _compact(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def _with_length(headers: Iterable[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name.lower() not in (b"content-length", b"transfer-encoding")]
    return [*kept, (b"content-length", str(length).encode())]
