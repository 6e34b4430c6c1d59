"""An ASGI middleware that takes routes out of JSON bodies: a server ships them in the form that a request asks for.

Pure ASGI; works as vLLM's ``--middleware`` and on any ASGI application, FastAPI's among them. Owns the bytes of a
request and its response: which are read, which are passed on untouched, what is counted. What happens to a document is
``shipping``; a ticket's call goes into the ``RouteSink`` that the middleware is given. Needs no web framework.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from routeplane.capture.shipping import (
    Asked,
    ShippingForm,
    parse_form,
    prepare_request,
    require_routes,
    ship_routes,
    strip_routes,
)
from routeplane.capture.tickets import issued
from routeplane.errors import ErrorKind, RouteplaneError, TransportError, UsageError, refused
from routeplane.record.spec import RouteSpec

if TYPE_CHECKING:
    from routeplane.capture.wire import LayerAxis
    from routeplane.record.calls import ModelCall
    from routeplane.record.interfaces import RouteSink

__all__ = ["HEADER", "PATHS", "MiddlewareReport", "RouteMiddleware"]

#: The request header that names a form; the response repeats it where routes were shipped.
HEADER = "x-routeplane-form"
#: The endpoints whose responses may carry routes.
PATHS = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class MiddlewareReport:
    """What a middleware did. ``shipped`` and ``stripped`` count choices, the rest requests."""

    requests: int = 0
    shipped: int = 0
    stripped: int = 0
    streams: int = 0  # answered as a stream: passed on untouched
    untouched: int = 0  # other bodies: errors, compressed, not JSON, without choices, or not whole
    refused: int = 0  # answered with an error, since their routes could not be shipped

    def scalars(self, *, prefix: str = "routeplane/") -> dict[str, float]:
        """A flat dict with stable names for a metrics logger."""
        return {f"{prefix}middleware_{name}": float(getattr(self, name)) for name in self.__slots__}


class RouteMiddleware:
    """Wraps ``app``; its spec comes from vLLM's own configuration where none is given.

    ``sink``: where calls go whose tickets are asked for: a RouteSink, which whoever made it closes, or the dotted name
    of a function that makes one of a spec (``"package.module:function"``), called when the first ticket is due; that
    one is closed when the server shuts down, or by ``close()``. ``stream``: the name in the tickets. ``form``: what a
    request without the header gets. ``axis``: what the engine's layer axis counts. ``weights_version``: asked for each
    request before it is passed on, since its first rows are of those weights whatever comes meanwhile; None where
    unknown, then whoever redeems says. ``cached``: as ``openai.calls_from_response``.

    Responses that are streams, errors, compressed or no JSON pass untouched, and are counted. Routes that a request
    asked for and that cannot be shipped are an error (HTTP 502 with the reason), never a response without them.
    """

    def __init__(
        self,
        app: App,
        *,
        spec: RouteSpec | None = None,
        sink: RouteSink | str | None = None,
        stream: str = "routes",
        form: ShippingForm = "none",
        axis: LayerAxis = "decoder",
        weights_version: Callable[[], int | None] | None = None,
        cached: int | None = None,
        paths: Iterable[str] = PATHS,
    ) -> None:
        self._app = app
        self._spec = spec
        self._sink = sink
        self._made_sink: RouteSink | None = None
        self._stream = stream
        self._form = parse_form(form)
        self._axis = axis
        self._weights_version = weights_version or (lambda: None)
        self._cached = cached
        if isinstance(paths, str):
            raise refused("paths as a sequence of text", f"one text {paths!r}")
        self._paths = tuple(paths)
        self._lock = threading.Lock()  # responses are rewritten in threads, and a sink takes one record at a time
        self._counts = dict.fromkeys(MiddlewareReport.__slots__, 0)

    def report(self) -> MiddlewareReport:
        """What was done so far."""
        return MiddlewareReport(**self._counts)

    def close(self) -> None:
        """Close the sink that this middleware made by name."""
        with self._lock:
            if self._made_sink is not None:
                self._made_sink.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, self._closing(send))
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
        changed, asked = prepare_request(
            document, "none" if streams else form, chat=scope["path"].endswith("/chat/completions")
        )
        body = _compact(changed)
        scope = {**scope, "headers": _with_length(scope["headers"], len(body))}
        if streams:
            self._counts["streams"] += 1
            return await self._app(scope, _replay(body, [], receive), send)
        # a compressed response would pass untouched, so the server is not told that the client takes one
        scope["headers"] = [pair for pair in scope["headers"] if pair[0].lower() != b"accept-encoding"]
        request = _Request(asked=asked, scope=scope, weights_version=self._weights_version())
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

    async def _answer(self, start: Message, content: bytes, request: _Request, send: Send) -> None:
        try:
            content, counts = await asyncio.to_thread(self._rewrite, content, request)
        except RouteplaneError as error:
            return await self._refuse(send, error, status=502)
        for name, count in counts.items():
            self._counts[name] += count
        headers = _with_length(start["headers"], len(content))
        if counts.get("shipped"):
            headers.append((HEADER.encode(), request.asked.form.encode()))
        await send({**start, "headers": headers})
        await send({"type": "http.response.body", "body": content, "more_body": False})
        return None

    def _rewrite(self, content: bytes, request: _Request) -> tuple[bytes, dict[str, int]]:
        """The body to send, and what to count of it."""
        asked, scope = request.asked, request.scope
        document = _json_object(content)
        if document is None or "choices" not in document:
            return content, {"untouched": 1}
        if asked.form == "npy":
            return content, {"shipped": require_routes(document)}
        if asked.form == "none":
            stripped = strip_routes(document)
            return _compact(document) if stripped else content, {"stripped": stripped}
        shipped = ship_routes(
            document,
            asked,
            spec=self._spec_of(scope),
            issue=lambda calls: self._issue(calls, scope),
            axis=self._axis,
            weights_version=request.weights_version,
            cached=self._cached,
        )
        return _compact(document), {"shipped": shipped}

    def _issue(self, calls: Sequence[ModelCall], scope: Scope) -> list[str]:
        """The tickets of calls whose records were written; all are made before the first is, since a record whose
        response is refused has no owner."""
        pairs = [issued(call, self._spec_of(scope), stream=self._stream) for call in calls]
        try:
            with self._lock:
                for record, _ in pairs:
                    self._sink_of(scope).write(record)
        except OSError as error:
            if isinstance(error, RouteplaneError):
                raise
            # a file's or a pipe's own: who asked must hear of it as of any other refusal
            raise TransportError(
                f"expected the sink to take call {calls[0].call_id}, got {error}", kind=ErrorKind.CONNECTION
            ) from error
        return [ticket.to_json() for _, ticket in pairs]

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
class _Request:
    """What an answer is made for, and the weights that its request found."""

    asked: Asked
    scope: Scope
    weights_version: int | None


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
    """Whether a server takes a field for true: of what is no bool, vLLM's reader (pydantic) takes these words for
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
