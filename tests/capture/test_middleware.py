"""The middleware between a server and its clients: forms, what passes untouched, and what is refused.

The application answers with recorded responses of a real vLLM server. A real server is in ``test_vllm_server.py``.

Axes: S tokens, L captured layers, K top-k slots.
"""

from __future__ import annotations

import asyncio
import copy
import gzip
import itertools
import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI, Request
from fastapi.middleware.gzip import GZipMiddleware
from fastapi.responses import JSONResponse, Response, StreamingResponse
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from routeplane import new_stream
from routeplane.capture import CaptureOptions
from routeplane.capture.http import TicketStore
from routeplane.capture.http.middleware import HEADER, RouteMiddleware, parse_form
from routeplane.capture.wire import decode, encode
from routeplane.errors import UsageError
from routeplane.record.interfaces import RouteSink
from routeplane.record.record import RouteRecord
from routeplane.record.spec import MISSING, RouteSpec
from tests.capture.reading import gym_calls, response_calls
from tests.capture.recorded import DATA, Exchange, exchange

CHAT = exchange("0.30", "chat")
TWO = exchange("0.30", "chat, two choices")
TRIMMED = exchange("0.30", "whole prompt trimmed")
GENERATE = exchange("0.30", "token in, token out")
SPEC = CHAT.spec


def server(one: Exchange, **options: Any) -> tuple[FastAPI, list[dict[str, Any]]]:
    """An application that answers with a recorded response, and the requests that it saw."""
    app = FastAPI()
    seen: list[dict[str, Any]] = []

    @app.post("/v1/chat/completions")
    @app.post("/v1/completions")
    @app.post("/inference/v1/generate")
    async def answer(request: Request) -> Response:
        seen.append(await request.json())
        if seen[-1].get("stream"):
            return StreamingResponse(iter([b"data: {}\n\n", b"data: [DONE]\n\n"]), media_type="text/event-stream")
        return JSONResponse(copy.deepcopy(one.response))

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"routed_experts": "ok"}

    app.add_middleware(RouteMiddleware, **{"spec": SPEC, "options": CaptureOptions(cached=0), **options})
    return app, seen


def post(
    app: Callable[..., Any], body: Any, *, form: str | None = None, path: str = "/v1/chat/completions", **more: Any
) -> httpx.Response:
    """One request."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {**({} if form is None else {HEADER: form}), **more.pop("headers", {})}
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.post(path, content=content, headers=headers, **more)

    return asyncio.run(send())


def middleware_of(app: FastAPI) -> RouteMiddleware:
    """The instance that serves."""
    found: Any = app.middleware_stack
    while not isinstance(found, RouteMiddleware):
        found = found.app
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Forms
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", [CHAT, TWO], ids=["one choice", "two choices"])
def test_a_ticket_gives_the_call(one: Exchange) -> None:
    """The body holds a ticket for each choice and no id of a token; redeemed, they are the calls of the whole
    response."""
    store = TicketStore(SPEC, stream="routes")
    app, _ = server(one, sink=store)
    request = {name: value for name, value in one.request.items() if name != "return_token_ids"}
    reply = post(app, request, form="ticket")

    calls = response_calls(reply.content, SPEC, weights_version=3, redeem=store.redeem)
    expected = response_calls(one.response, SPEC, weights_version=3, cached=0)
    assert [call.checksum for call in expected] == [call.checksum for call in calls]
    assert "ticket" == reply.headers[HEADER]
    for choice in reply.json()["choices"]:
        assert len(choice["routed_experts"]) <= 256
        assert "token_ids" not in choice
    assert "prompt_token_ids" not in reply.json()
    assert len(expected) == store.report().redeemed == middleware_of(app).report().shipped


def test_a_record_that_has_not_come_spends_no_ticket() -> None:
    """Of several choices none is redeemed before the last record is there: asked again, all calls come."""
    written: list[RouteRecord] = []
    sink = SimpleNamespace(write=written.append)
    app, _ = server(TWO, sink=sink)
    document = post(app, TWO.request, form="ticket").json()
    store = TicketStore(SPEC, stream="routes")
    for count in range(len(written)):
        store.write(written[count])
        if count + 1 < len(written):
            with pytest.raises(UsageError):
                response_calls(document, SPEC, weights_version=3, redeem=store.redeem)

    calls = response_calls(document, SPEC, weights_version=3, redeem=store.redeem)
    assert [record.token_ids.tolist() for record in written] == [call.token_ids.tolist() for call in calls]


def test_ids_that_were_asked_for_stay() -> None:
    """A request with return_token_ids keeps them beside its ticket, and the redeemed call must have the same."""
    store = TicketStore(SPEC, stream="routes")
    app, _ = server(CHAT, sink=store)
    document = post(app, CHAT.request, form="ticket").json()

    assert CHAT.response["prompt_token_ids"] == document["prompt_token_ids"]
    document["choices"][0]["token_ids"][0] += 1
    with pytest.raises(ValueError, match="ticket's call"):
        response_calls(document, SPEC, weights_version=3, redeem=store.redeem)


def read_by(form: str) -> dict[str, Any]:
    """How a reader is told of a form: NeMo's have the captured layers alone, and a row per token."""
    return {"axis": "captured", "final_row": "filler"} if form == "nemo" else {}


def changed(one: Exchange, *, choice: int = 0, **fields: Any) -> Exchange:
    """The same exchange, answered with other fields of one choice."""
    response = copy.deepcopy(one.response)
    response["choices"][choice].update(fields)
    return replace(one, response=response)


def test_token_in_token_out_is_trimmed_by_its_sampling_parameters() -> None:
    """``/inference/v1/generate`` takes the first row among the sampling parameters; and token ids, the whole of its
    answer, stay in it."""
    store = TicketStore(SPEC, stream="routes")
    rows_RDK = decode(GENERATE.response["choices"][0]["routed_experts"], form="npy").routes
    request = copy.deepcopy(GENERATE.request)
    request["sampling_params"]["routed_experts_prompt_start"] = 4
    app, _ = server(changed(GENERATE, routed_experts=encode(rows_RDK[4:], form="npy")), sink=store)
    document = post(app, request, form="ticket", path="/inference/v1/generate").json()

    assert GENERATE.response["choices"][0]["token_ids"] == document["choices"][0]["token_ids"]
    given: dict[str, Any] = {"weights_version": 3, "cached": 0, "prompt_ids": GENERATE.prompt_ids}
    [call] = response_calls(document, SPEC, redeem=store.redeem, **given)
    [whole] = response_calls(GENERATE.response, SPEC, **given)
    assert (4, whole.num_tokens - 1) == (call.first_row, call.rows_stop)
    np.testing.assert_array_equal(whole.routes[4:], call.routes)  # type: ignore[index]


@pytest.mark.parametrize("form", ["ticket", "npy"])
def test_an_aborted_choice_without_routes_can_be_read(form: str) -> None:
    """What was aborted before its first token has no routes and no ticket, and is read with its sibling: its ids stay.
    It is not counted as shipped."""
    store = TicketStore(SPEC, stream="routes")
    one = changed(TWO, choice=1, finish_reason="abort", token_ids=[], routed_experts=None, logprobs=None)
    app, _ = server(one, sink=store)
    request = {name: value for name, value in TWO.request.items() if name != "return_token_ids" or form == "npy"}
    reply = post(app, request, form=form)

    whole, aborted = response_calls(reply.content, SPEC, weights_version=3, redeem=store.redeem)
    assert ("aborted", None) == (aborted.loss, aborted.routes)
    assert TWO.reference(0) == np.sort(whole.routes, axis=2).tolist()  # type: ignore[arg-type]
    assert (form, 1) == (reply.headers[HEADER], middleware_of(app).report().shipped)


def test_choices_are_written_when_all_of_them_can_be() -> None:
    """Illegal rows in the last choice: the sink got nothing of the first, since no client has its ticket."""
    store = TicketStore(SPEC, stream="routes")
    rows_RDK = decode(TWO.response["choices"][1]["routed_experts"], form="npy").routes.copy()
    rows_RDK[3, SPEC.layer_ids[0], :] = 5
    app, _ = server(changed(TWO, choice=1, routed_experts=encode(rows_RDK, form="npy")), sink=store)

    assert (502, 0) == (post(app, TWO.request, form="ticket").status_code, store.report().received)


@pytest.mark.parametrize("form", ["ticket", "nemo", "none"])
def test_routes_on_the_message_are_moved_too(form: str) -> None:
    """A server that has them there, as NeMo RL's: they do not stay beside the form that was asked for."""
    store = TicketStore(SPEC, stream="routes")
    text = CHAT.response["choices"][0]["routed_experts"]
    message = {**CHAT.response["choices"][0]["message"], "routed_experts": text}
    app, _ = server(changed(CHAT, routed_experts=None, message=message), sink=store)
    reply = post(app, CHAT.request, form=form)

    assert text not in reply.text
    if form == "none":
        assert 1 == middleware_of(app).report().stripped
    else:
        given: dict[str, Any] = {"redeem": store.redeem, **read_by(form)}
        [call] = response_calls(reply.content, SPEC, weights_version=3, **given)
        assert CHAT.reference(0) == np.sort(call.routes, axis=2).tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["nemo", "nemo-lists"])
def test_nemo_forms_stand_on_the_message(form: str) -> None:
    """Fact C-008: ids, log-probabilities and one row per token on the message, matched by index; the choice's own field
    is null (C-020). The row that nothing fed is -1, where upstream has a legal dummy."""
    app, seen = server(TWO)
    request = {name: value for name, value in TWO.request.items() if name not in ("return_token_ids", "logprobs")}
    document = post(app, request, form=form).json()

    assert (True, True) == (seen[0]["return_token_ids"], seen[0]["logprobs"])
    for index, choice in enumerate(document["choices"]):
        message, tokens = choice["message"], TWO.sequences[index]["token_ids"]
        assert (None, None) == (choice["routed_experts"], choice["logprobs"])
        assert tokens == message["prompt_token_ids"] + message["generation_token_ids"]
        assert len(message["generation_token_ids"]) == len(message["generation_log_probs"])
        rows_SLK = decode(message["routed_experts"]).routes
        assert (len(tokens), *SPEC.row_shape) == rows_SLK.shape
        assert TWO.reference(index) == np.sort(rows_SLK[:-1], axis=2).tolist()
        assert (rows_SLK[-1] == MISSING).all()
        # and what an environment keeps of it is read back
        [call] = gym_calls([message], SPEC, weights_version=3, axis="captured", cached=0)
        assert tokens == call.token_ids.tolist()


def test_vllms_own_form_passes_by_name() -> None:
    """The form npy is the response as vLLM made it."""
    app, _ = server(CHAT)
    reply = post(app, CHAT.request, form="npy")

    assert (CHAT.response, "npy", 1) == (reply.json(), reply.headers[HEADER], middleware_of(app).report().shipped)


def test_routes_are_shipped_only_where_they_are_asked_for() -> None:
    """Without the header the routes are taken out (fact W27: validation and judge calls need not pay for them); a
    default form is an argument."""
    app, seen = server(CHAT)
    document = post(app, CHAT.request).json()

    assert [None] == [choice.pop("routed_experts") for choice in document["choices"]]
    expected = copy.deepcopy(CHAT.response)
    del expected["choices"][0]["routed_experts"]
    assert expected == document
    assert CHAT.request == seen[0]
    assert (1, 0, 1) == tuple(
        getattr(middleware_of(app).report(), name) for name in ("stripped", "shipped", "requests")
    )
    by_default, _ = server(CHAT, form="nemo")
    assert post(by_default, CHAT.request).json()["choices"][0]["message"]["routed_experts"].startswith("nrlre1:")


def test_routes_in_a_harness_messages_do_not_reach_the_engine() -> None:
    """What NeMo Gym sends back inside the history is dropped from the request, and nothing else."""
    app, seen = server(CHAT)
    past = {"role": "assistant", "content": "a", "prompt_token_ids": [1], "routed_experts": [[[1, 2]]] * 9}
    request = {**CHAT.request, "messages": [*CHAT.request["messages"], past]}
    post(app, request, form="nemo")
    post(app, {**request, "stream": True})

    assert [{"role": "assistant", "content": "a", "prompt_token_ids": [1]}] * 2 == [one["messages"][1] for one in seen]


@pytest.mark.parametrize("stream", [False, None, 0, "false", "no", "Off", "0"], ids=repr)
def test_who_says_no_to_a_stream_gets_routes(stream: Any) -> None:
    """In every word that the server's own reader of requests takes for no."""
    assert not TypeAdapter(bool | None).validate_python(stream)
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def answer() -> Response:
        return JSONResponse(CHAT.response)

    app.add_middleware(RouteMiddleware, spec=SPEC)
    reply = post(app, {**CHAT.request, "stream": stream}, form="nemo")

    assert "nemo" == reply.headers.get(HEADER)


def test_a_server_that_could_compress_its_response_does_not() -> None:
    """Where compression stands inside the middleware, a client that takes it must not lose its ticket for it: the
    server is not told."""
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def answer() -> Response:
        return JSONResponse(CHAT.response)

    app.add_middleware(GZipMiddleware, minimum_size=10)
    app.add_middleware(RouteMiddleware, spec=SPEC)
    reply = post(app, CHAT.request, form="nemo", headers={"accept-encoding": "gzip, deflate"})

    assert ("nemo", None) == (reply.headers.get(HEADER), reply.headers.get("content-encoding"))


# ----------------------------------------------------------------------------------------------------------------------
# Untouched
# ----------------------------------------------------------------------------------------------------------------------


def test_streams_pass_untouched_and_are_counted() -> None:
    """A streamed response is passed on as it comes."""
    app, seen = server(CHAT)
    reply = post(app, {**CHAT.request, "stream": True}, form="ticket")

    assert b"data: {}\n\ndata: [DONE]\n\n" == reply.content
    assert {**CHAT.request, "stream": True} == seen[0]
    assert (1, 0) == (middleware_of(app).report().streams, middleware_of(app).report().shipped)


def test_other_paths_and_methods_are_not_looked_at() -> None:
    """A health check is none of ours."""
    app, _ = server(CHAT)

    async def get() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            return await client.get("/health", headers={HEADER: "nonsense"})

    assert {"routed_experts": "ok"} == asyncio.run(get()).json()
    assert 0 == middleware_of(app).report().requests


RAW: dict[str, tuple[int, list[tuple[bytes, bytes]], bytes]] = {
    "an error": (400, [(b"content-type", b"application/json")], b'{"error": {"message": "no"}}'),
    "compressed": (
        200,
        [(b"content-type", b"application/json"), (b"content-encoding", b"gzip")],
        gzip.compress(json.dumps(CHAT.response).encode()),
    ),
    "text": (200, [(b"content-type", b"text/plain")], b'{"choices": [{"routed_experts": "x"}]}'),
    "no content type": (200, [], b"{}"),
}


@pytest.mark.parametrize("name", RAW)
def test_other_bodies_pass_untouched_and_are_counted(name: str) -> None:
    """Errors, compressed bodies and anything but JSON: byte by byte, headers too."""
    status, headers, content = RAW[name]

    async def plain(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for at in range(0, len(content), 10):
            await send({"type": "http.response.body", "body": content[at : at + 10], "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    app = RouteMiddleware(plain, spec=SPEC)
    sent = asyncio.run(_raw(app, json.dumps(CHAT.request).encode()))

    assert (status, headers) == (sent[0]["status"], list(sent[0]["headers"]))
    assert content == b"".join(message["body"] for message in sent[1:])
    assert (1, 0) == (app.report().untouched, app.report().refused)


async def _raw(
    app: RouteMiddleware, content: bytes, *, leave: bool = False, sent: list[Any] | None = None
) -> list[Any]:
    """Every message that the application sent; the body comes in pieces of 7 bytes."""
    pieces = [content[at : at + 7] for at in range(0, len(content), 7)] or [b""]
    incoming: list[Any] = [
        {"type": "http.request", "body": piece, "more_body": leave or index + 1 < len(pieces)}
        for index, piece in enumerate(pieces)
    ]
    incoming.append({"type": "http.disconnect"})
    sent = [] if sent is None else sent

    async def receive() -> Any:
        return incoming.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-length", str(len(content)).encode()), (HEADER.encode(), b"nemo")]
    await app({"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}, receive, send)
    return sent


def test_lengths_are_those_of_what_is_sent() -> None:
    """Request and response are rewritten, so their lengths are too; bodies may come in pieces."""
    seen: list[Any] = []

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        seen.append((dict(scope["headers"])[b"content-length"], len(message["body"]), message["more_body"]))
        content = json.dumps(CHAT.response).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content[:50], "more_body": True})
        await send({"type": "http.response.body", "body": content[50:]})
        assert {"type": "http.disconnect"} == await receive()

    sent = asyncio.run(_raw(RouteMiddleware(echo, spec=SPEC), json.dumps({"prompt": "x"}).encode()))

    [(declared, length, more)] = seen
    assert (str(length).encode(), False) == (declared, more)
    assert str(len(sent[1]["body"])).encode() == dict(sent[0]["headers"])[b"content-length"]
    assert 2 == len(sent)


@pytest.mark.parametrize("content", [b"", b"[1]", b"not json", b"\xff"], ids=["empty", "a list", "text", "bytes"])
def test_other_requests_pass_untouched(content: bytes) -> None:
    """A request that is not a JSON object reaches the server, which refuses it."""
    got: list[bytes] = []

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        got.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 422, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})

    app = RouteMiddleware(echo, spec=SPEC)
    asyncio.run(_raw(app, content))

    assert ([content], 1) == (got, app.report().untouched)


def test_a_client_that_left_is_passed_on() -> None:
    """Where a client goes away within its request, the server is told, with what had come, which is not passed for all
    of it; also where that happens to be a whole document."""
    for content in (b"partial", b'{"prompt":"x"}'):
        got: list[Any] = []

        async def echo(scope: Any, receive: Any, send: Any, got: list[Any] = got) -> None:
            got.extend([await receive(), await receive()])

        asyncio.run(_raw(RouteMiddleware(echo, spec=SPEC), content, leave=True))

        assert (content, True) == (got[0]["body"], got[0]["more_body"])
        assert "http.disconnect" == got[1]["type"]


def answering(content: bytes, *more: Any, headers: list[tuple[bytes, bytes]] | None = None) -> Callable[..., Any]:
    """An application that reads the request, sends so much of a JSON response, and ends as ``more`` says: a message to
    send besides, an error to raise, a future to wait for."""
    typed = [(b"content-type", b"application/json")] if headers is None else headers

    async def plain(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": typed})
        await send({"type": "http.response.body", "body": content, "more_body": bool(more)})
        for one in more:
            if isinstance(one, Exception):
                raise one
            await (one() if callable(one) else send(one))

    return plain


LAST: dict[str, Any] = {"type": "http.response.body", "body": b"", "more_body": False}


def test_an_answer_leaves_before_what_the_server_does_behind_it() -> None:
    """Background tasks run when the client has its answer, as without the middleware; one that fails takes nothing
    back."""
    content = json.dumps(CHAT.response).encode()
    sent: list[Any] = []

    async def later() -> None:
        # what the client does with its answer may be what the task waits for
        assert ["http.response.start", "http.response.body"] == [message["type"] for message in sent]
        sent.append({"type": "later"})

    app = RouteMiddleware(answering(content, LAST, later, OSError("behind the answer")), spec=SPEC)
    with pytest.raises(OSError, match="behind the answer"):
        asyncio.run(_raw(app, json.dumps(CHAT.request).encode(), sent=sent))

    assert ["http.response.start", "http.response.body", "later"] == [message["type"] for message in sent]
    assert json.loads(sent[1]["body"])["choices"][0]["message"]["routed_experts"].startswith("nrlre1:")
    assert 1 == app.report().shipped


def test_a_response_that_does_not_end_is_not_passed_for_a_whole_one() -> None:
    """Where the application stops within its body nothing was answered, and its server says so: half a body with a
    length of its own would look like all of it."""
    half = json.dumps(CHAT.response).encode()[:100]
    more = {"type": "http.response.body", "body": b"", "more_body": True}

    assert [] == asyncio.run(_raw(RouteMiddleware(answering(half, more), spec=SPEC), b"{}"))


def test_a_response_start_need_not_have_headers() -> None:
    """In ASGI they are optional."""

    async def plain(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    app = RouteMiddleware(plain, spec=SPEC)

    assert [204, None] == [message.get("status") for message in asyncio.run(_raw(app, b"{}"))]
    assert 1 == app.report().untouched


@pytest.mark.parametrize("form", ["nemo", "npy", "none"])
@pytest.mark.parametrize("content", [b"no json", b"[]", b'{"error": {"message": "full"}}'])
def test_documents_of_another_kind_pass_untouched_and_are_counted(content: bytes, form: str) -> None:
    """A server may answer with status 200 and no choices; that is the client's to read."""
    app = RouteMiddleware(answering(content), spec=SPEC)
    reply = post(app, CHAT.request, form=form)

    assert (200, content, None) == (reply.status_code, reply.content, reply.headers.get(HEADER))
    assert (1, 0) == (app.report().untouched, app.report().refused)


@pytest.mark.parametrize(
    "content", [b'{"choices": null}', b'{"choices": [1]}', b'{"choices": [null]}', b'{"choices": {"index": 0}}']
)
def test_who_asks_for_no_routes_is_not_refused_for_choices_of_another_kind(content: bytes) -> None:
    """Only who asked for routes is told that there is nothing to ship them in."""
    app = RouteMiddleware(answering(content), spec=SPEC)

    assert (200, content) == (post(app, CHAT.request).status_code, post(app, CHAT.request).content)
    assert [502, 502] == [post(app, CHAT.request, form=form).status_code for form in ("nemo", "npy")]


# ----------------------------------------------------------------------------------------------------------------------
# Refused
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["ticket", "npy", "nemo"])
def test_routes_that_cannot_be_shipped_are_an_error(form: str) -> None:
    """A response without routes, to a request that asked for them, is refused (fact W17): 502 with the reason."""
    app, _ = server(changed(CHAT, routed_experts=None))
    reply = post(app, CHAT.request, form=form)

    assert (502, "capture_off") == (reply.status_code, reply.json()["error"]["kind"])
    assert "--enable-return-routed-experts" in reply.json()["error"]["message"]
    assert 1 == middleware_of(app).report().refused


def test_the_ticket_of_the_engines_own_writer_passes_as_it_is() -> None:
    """Where the engine wrote the routes itself, its ticket is what it has to say, and ``npy`` asks for just that."""
    one = changed(CHAT, routed_experts=None)
    one.response["kv_transfer_params"] = {"routeplane": "{}"}
    app, _ = server(one)

    assert one.response == post(app, CHAT.request, form="npy").json()


@pytest.mark.parametrize("form", ["nemo", "nemo-lists"])
def test_a_message_for_nemo_is_not_made_without_log_probabilities(form: str) -> None:
    """NeMo Gym trains on them: none for tokens that were sampled would be a list of another length."""
    app, _ = server(changed(CHAT, logprobs=None))
    reply = post(app, CHAT.request, form=form)

    assert (502, "capture_off") == (reply.status_code, reply.json()["error"]["kind"])
    assert "log-probabilities" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("form", "path", "says"),
    [("ticket", "/v1/chat/completions", "a sink"), ("nemo", "/v1/completions", "without a message")],
)
def test_forms_that_this_server_cannot_give(form: str, path: str, says: str) -> None:
    """No sink for tickets; no message for NeMo's forms."""
    app, _ = server(CHAT if form == "ticket" else exchange("0.30", "completion"))
    reply = post(app, CHAT.request, form=form, path=path)

    assert 502 == reply.status_code
    assert says in reply.json()["error"]["message"]


def test_an_unknown_form_is_a_bad_request() -> None:
    """A misspelt header is refused before the engine works."""
    app, seen = server(CHAT)
    reply = post(app, CHAT.request, form="tickets")

    assert (400, []) == (reply.status_code, seen)
    with pytest.raises(UsageError):
        parse_form("Ticket")


def test_a_sink_whose_reader_is_gone_is_an_error_with_its_reason() -> None:
    """A FIFO's reader ended: the ticket is refused with what the system said, later ones since the stream closed; each
    is counted, and none is a bare 500."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as file:
        app, _ = server(CHAT, sink=new_stream(file, SPEC, max_bytes=1))
        for count, kind, says in ((1, "connection", "Broken pipe"), (2, "closed", "open")):
            reply = post(app, CHAT.request, form="ticket")

            assert (502, kind) == (reply.status_code, reply.json()["error"]["kind"])
            assert says in reply.json()["error"]["message"]
            assert (count, 0) == (middleware_of(app).report().refused, middleware_of(app).report().shipped)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tests.capture.test_middleware.open_nowhere", "No such file"),
        ("tests.capture.no_such_module.sink", "dotted name"),
        ("tests.capture.test_middleware.no_such_name", "dotted name"),
        ("tests.capture.test_middleware.HEADER", "dotted name"),
        ("sink", "dotted name"),
    ],
)
def test_a_sink_that_cannot_be_made_is_an_error_with_its_reason(name: str, says: str) -> None:
    """Every request gets the reason, and the report counts each."""
    app, _ = server(CHAT, sink=name)
    for count in (1, 2):
        reply = post(app, CHAT.request, form="ticket")

        assert (502, count) == (reply.status_code, middleware_of(app).report().refused)
        assert says in reply.json()["error"]["message"]


def open_nowhere(spec: RouteSpec) -> RouteSink:
    """A factory whose target is not there."""
    return new_stream(open("/no/such/folder/stream", "wb"), spec)


# ----------------------------------------------------------------------------------------------------------------------
# Sinks and specs
# ----------------------------------------------------------------------------------------------------------------------


def make_desk(spec: RouteSpec) -> RouteSink:
    """What a dotted name may lead to."""
    return TicketStore(spec, stream="routes")


@pytest.mark.parametrize("name", ["tests.capture.test_middleware:make_desk", "tests.capture.test_middleware.make_desk"])
def test_a_sink_is_made_by_name_when_it_is_needed(name: str) -> None:
    """The factory is called with the spec at the first ticket, and the sink is closed with the middleware."""
    app, _ = server(CHAT, sink=name)
    post(app, CHAT.request, form="nemo")
    middleware = middleware_of(app)
    assert middleware._made_sink is None

    assert 200 == post(app, CHAT.request, form="ticket").status_code
    made = middleware._made_sink
    # of another import of this module, since a name is all that was given
    assert made is not None
    middleware.close()
    assert 502 == post(app, CHAT.request, form="ticket").status_code


def test_a_sink_made_by_name_is_closed_with_the_server() -> None:
    """The end of the server's lifespan closes it, after the application's own end, so that a stream gets its
    trailer."""
    app, _ = server(CHAT, sink="tests.capture.test_middleware:make_desk")
    incoming: list[Any] = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent: list[str] = []

    async def receive() -> Any:
        if len(incoming) == 1:
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                reply = await client.post("/v1/chat/completions", json=CHAT.request, headers={HEADER: "ticket"})
            sent.append(str(reply.status_code))
        return incoming.pop(0)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    asyncio.run(app({"type": "lifespan", "asgi": {"version": "3.0"}}, receive, send))

    assert ["lifespan.startup.complete", "200", "lifespan.shutdown.complete"] == sent
    assert 502 == post(app, CHAT.request, form="ticket").status_code


def test_one_path_is_not_its_letters() -> None:
    """Text is an iterable too, whose every character ends some path."""
    with pytest.raises(UsageError, match="paths"):
        RouteMiddleware(answering(b"{}"), spec=SPEC, paths="/v1/completions")


def test_the_spec_of_a_vllm_server_is_its_own() -> None:
    """Without a spec, the configuration that vLLM keeps at its application is read."""
    app, _ = server(CHAT, spec=None)
    assert 502 == post(app, CHAT.request, form="nemo").status_code
    config = json.loads((DATA / "vllm-0.30-http.json").read_text(encoding="utf-8"))["model"]
    app.state.vllm_config = SimpleNamespace(model_config=SimpleNamespace(hf_config=config))

    text = post(app, CHAT.request, form="nemo").json()
    [call] = response_calls(text, SPEC, weights_version=1, **read_by("nemo"))
    assert SPEC.layer_ids == call.layer_ids


def test_the_weights_version_of_the_server_is_the_calls() -> None:
    """The server's version is taken where it knows one, otherwise that of the caller that redeems."""
    for known, expected in ((7, 7), (None, 3)):
        store = TicketStore(SPEC, stream="routes")
        app, _ = server(CHAT, sink=store, weights_version=lambda version=known: version)
        document = post(app, CHAT.request, form="ticket").json()

        [call] = response_calls(document, SPEC, weights_version=3, redeem=store.redeem)
        assert expected == call.weights_version


def test_a_call_is_of_the_weights_that_its_request_found() -> None:
    """An update while it ran changes no label: its first rows are of the older weights."""
    version, store = [7], TicketStore(SPEC, stream="routes")
    app, _ = server(CHAT, sink=store, weights_version=lambda: version[0])

    @app.middleware("http")
    async def updating(request: Request, passed_on: Callable[[Request], Any]) -> Any:
        reply = await passed_on(request)
        version[0] += 1
        return reply

    inner = app.user_middleware
    inner.append(inner.pop(0))  # the update happens behind the routes' middleware
    document = post(app, CHAT.request, form="ticket").json()
    [call] = response_calls(document, SPEC, weights_version=3, redeem=store.redeem)

    assert (7, [8]) == (call.weights_version, version)


# ----------------------------------------------------------------------------------------------------------------------
# Sinks that are stuck, and the engine's own tickets
# ----------------------------------------------------------------------------------------------------------------------


class StuckSink:
    """A sink whose reader has hung up without a word."""

    spec = SPEC

    def __init__(self) -> None:
        self.released = threading.Event()
        self.written: list[RouteRecord] = []

    def write(self, record: RouteRecord) -> None:
        """Wait until the reader is back."""
        assert self.released.wait(30)
        self.written.append(record)


def test_a_stuck_sink_refuses_its_tickets_and_holds_up_no_other_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty ticket requests are answered 503 with a reason; plain requests between them pass; the sink comes back."""
    monkeypatch.setattr("routeplane.capture.http.middleware._SINK_TIMEOUT_S", 0.5)
    monkeypatch.setattr("routeplane.capture.http.middleware._MAX_WAITING", 8)
    sink = StuckSink()
    app, _ = server(CHAT, sink=sink)

    async def job() -> tuple[list[httpx.Response], list[httpx.Response], httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:

            async def ask(form: str) -> httpx.Response:
                return await client.post("/v1/chat/completions", json=CHAT.request, headers={HEADER: form})

            asked = [asyncio.create_task(ask("ticket")) for _ in range(40)]
            plain = await asyncio.gather(*(ask("none") for _ in range(20)))
            assert not all(task.done() for task in asked)
            refused = await asyncio.gather(*asked)
            sink.released.set()
            while len(sink.written) < 8:
                await asyncio.sleep(0.01)
            return refused, plain, await ask("npy")

    refused, plain, after = asyncio.run(job())

    assert {503} == {response.status_code for response in refused}
    assert {"timed_out"} == {response.json()["error"]["kind"] for response in refused}
    assert {200} == {response.status_code for response in [*plain, after]}
    assert (40, 8) == (middleware_of(app).report().stuck, len(sink.written))


class EngineClient:
    """The engine client of a server whose engine writes, as far as the middleware asks it."""

    def __init__(self, tickets: dict[str, str]) -> None:
        self.tickets, self.asked = tickets, []  # type: ignore[var-annotated]

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """What ``RouteScheduler`` answers."""
        self.asked.append((method, args, kwargs))
        return [self.tickets if method == "routeplane_tickets" else {"routeplane/engine_lost": 3.0}]


class RanksClient:
    """The client of several data-parallel ranks: vLLM's own call returns what the first one says."""

    def __init__(self, *tickets: dict[str, str]) -> None:
        self._ranks = [EngineClient(one) for one in tickets]
        self.engine_core = self
        self.core_engines = list(range(len(tickets)))

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The first rank's answer."""
        return await self._ranks[0].collective_rpc(method, args=args, kwargs=kwargs)

    async def _call_utility_async(self, name: str, *arguments: Any, engine: int) -> list[Any]:
        method, timeout, args, kwargs = arguments
        assert ("collective_rpc", None) == (name, timeout)
        return await self._ranks[engine].collective_rpc(method, args=args, kwargs=kwargs)


def writing_server(pieces: list[bytes], client: EngineClient | RanksClient) -> FastAPI:
    """A server of an engine with a writer, which streams these pieces."""
    app = FastAPI()

    @app.post("/v1/completions")
    async def answer(request: Request) -> Response:
        if (await request.json()).get("stream"):
            return StreamingResponse(iter(pieces), media_type="text/event-stream")
        choices = [{"index": at, "finish_reason": "stop"} for at in range(2)]
        return JSONResponse({"id": "cmpl-7", "choices": choices, "kv_transfer_params": {"routeplane": "one of them"}})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response("vllm:up 1\n", media_type="text/plain")

    app.state.engine_client = client
    app.state.vllm_config = SimpleNamespace(additional_config={"routeplane": {"place": "x", "run": "r"}})
    app.add_middleware(RouteMiddleware, spec=SPEC)
    return app


EVENTS = [
    b'data: {"id":"cmpl-7","choices":[{"index":0,"text":"a","finish_reason":null}]}',
    b'data: {"id":"cmpl-7","choices":[{"index":1,"text":"b","finish_reason":"stop"}]}',
    b": a comment",
    b'data: {"id":"cmpl-7","choices":[{"index":0,"text":"c","finish_reason":"length"}]}',
    b"data: [DONE]",
]


@given(st.lists(st.integers(0, 280), max_size=6))
@settings(max_examples=25)
def test_the_last_chunk_of_each_choice_has_its_ticket(cuts: list[int]) -> None:
    """However the stream is cut into pieces; all other events pass byte for byte."""
    whole = b"\n\n".join([*EVENTS, b""])
    edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    pieces = [whole[start:stop] for start, stop in itertools.pairwise(edges)]
    app = writing_server(pieces, EngineClient({"0": "zero", "1": "one"}))
    response = post(app, {"stream": True, "n": 2, "prompt": "x"}, form="engine-ticket", path="/v1/completions")
    found = response.content.split(b"\n\n")

    assert [EVENTS[0], EVENTS[2], EVENTS[4], b""] == [found[at] for at in (0, 2, 4, 5)]
    assert ["one", "zero"] == [json.loads(found[at][6:])["choices"][0]["routed_experts"] for at in (1, 3)]


def test_every_choice_of_a_whole_response_has_its_ticket() -> None:
    """Also those that vLLM does not pass on; a choice of the second prompt counts behind those of the first."""
    client = EngineClient({"0.0": "first", "1.0": "second"})
    response = post(writing_server([], client), {"prompt": ["x", "y"]}, form="engine-ticket", path="/v1/completions")

    assert ["first", "second"] == [choice["routed_experts"] for choice in response.json()["choices"]]
    assert [("routeplane_tickets", ("cmpl-7",), {"prompts": 2})] == client.asked


def test_tickets_come_from_every_data_parallel_rank() -> None:
    """Whichever rank had the request, or one of its prompts; in a stream too."""
    of_prompts = RanksClient({"1.0": "second"}, {"0.0": "first"})
    whole = post(writing_server([], of_prompts), {"prompt": ["x", "y"]}, form="engine-ticket", path="/v1/completions")
    of_choices = RanksClient({}, {"0": "zero", "1": "one"})
    app = writing_server([b"\n\n".join([*EVENTS, b""])], of_choices)
    streamed = post(app, {"stream": True, "n": 2, "prompt": "x"}, form="engine-ticket", path="/v1/completions")

    assert ["first", "second"] == [choice["routed_experts"] for choice in whole.json()["choices"]]
    assert [b'"zero"', b'"one"'] == [name for name in (b'"zero"', b'"one"') if name in streamed.content]


def test_a_choice_without_a_ticket_is_refused() -> None:
    """Never a response without what was asked for; and a server whose engine does not write is told apart."""
    missing = post(writing_server([], EngineClient({})), {"n": 2}, form="engine-ticket", path="/v1/completions")
    bare = post(server(CHAT)[0], CHAT.request, form="engine-ticket")

    assert (502, 502) == (missing.status_code, bare.status_code)
    assert "choice 0, got none" in missing.json()["error"]["message"]
    assert "engine writes" in bare.json()["error"]["message"]


def test_the_metrics_have_the_counts_of_engines_and_middleware() -> None:
    """Behind the server's own, in Prometheus' text format, by data-parallel rank."""
    app = writing_server([], RanksClient({}, {}))

    async def get() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            return await client.get("/metrics")

    lines = asyncio.run(get()).text.splitlines()
    assert "vllm:up 1" == lines[0]
    ranks = {f'routeplane_engine_lost{{engine="{rank}"}} 3.0' for rank in range(2)}
    assert {*ranks, "routeplane_middleware_stuck 0.0"} <= set(lines)
