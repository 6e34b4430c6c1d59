"""Routes in HTTP bodies: decoding each form, what a hop costs that parses a body and writes it again, and what plain
requests pay where tickets wait for a stuck sink.

Payload: one call of 30,000 tokens, 48 layers, K=8, 256 experts. The yardstick is NeMo RL's envelope in int16, which its
own rule picks for that many experts (and its default), decoded as its codec does: base64 of the standard library, a
copy that may be written to, the configured type. All decoders give the same ids. Up to 128 experts the envelope is
int8, half as long: a peer.
"""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from contextlib import suppress
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from benchmarks.bench_rules import EXPERTS, LAYERS, legal_routes
from benchmarks.measure import Result, relative_rates
from routeplane.capture import CaptureOptions
from routeplane.capture.choices import read_rows
from routeplane.capture.http import RouteMiddleware, TicketStore, issue_ticket
from routeplane.capture.http.middleware import RouteRequest, ShippingForm, ship_routes
from routeplane.capture.wire import decode, encode
from routeplane.errors import DataError
from routeplane.record.spec import RouteSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from routeplane.record.calls import ModelCall
    from routeplane.record.record import RouteRecord

TOKENS, LISTED_TOKENS, TOP_K = 30_000, 3_000, 8
SPEC = RouteSpec(num_experts=2 * EXPERTS, top_k=TOP_K, layer_ids=tuple(range(LAYERS)))


def response(routes_RLK: NDArray[np.int16]) -> dict[str, Any]:
    """A chat completion as vLLM's server writes it, ids and all."""
    tokens = np.arange(len(routes_RLK) + 1) * 7 % 150_000
    half = len(tokens) // 2
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "an answer " * 50, "tool_calls": []},
        "logprobs": None,
        "finish_reason": "stop",
        "token_ids": tokens[half:].tolist(),
        "routed_experts": encode(routes_RLK.astype(np.uint8), form="npy"),
    }
    return {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "prompt_token_ids": tokens[:half].tolist(),
        "choices": [choice],
    }


def nemo_decode(payload: str, dtype: str) -> NDArray[Any]:
    """What NeMo RL does with its envelope."""
    _, sent, shape, text = payload.split(":", 3)
    content = bytearray(base64.b64decode(text, validate=True))
    return (
        np.frombuffer(content, dtype=sent).reshape([int(side) for side in shape.split("x")]).astype(dtype, copy=False)
    )


def hop(body: bytes) -> bytes:
    """What each proxy, agent or environment server does with a body."""
    return json.dumps(json.loads(body)).encode()


# ----------------------------------------------------------------------------------------------------------------------
# Results
# ----------------------------------------------------------------------------------------------------------------------


def decoding(routes_RLK: NDArray[np.int16], *, rounds: int) -> list[Result]:
    """From the text in a body to ids in an array."""
    narrow, wide = encode(routes_RLK, form="nrlre1", dtype="int8"), encode(routes_RLK, form="nrlre1")
    npy = encode(routes_RLK.astype(np.uint8), form="npy")
    options = CaptureOptions()
    decoders: dict[str, Callable[[], Any]] = {
        "npy": partial(read_rows, npy, SPEC, options=options),
        "nrlre1": partial(nemo_decode, wide, "int16"),
        "nrlre1 int8": partial(nemo_decode, narrow, "int8"),
        "nrlre1, read strictly here": partial(read_rows, wide, SPEC, options=options),
    }
    for name, decoder in decoders.items():
        made = decoder()
        if not np.array_equal(made[0] if isinstance(made, tuple) else made, routes_RLK):
            raise ValueError(f"{name} gives other ids")
    rates = relative_rates(decoders, yardstick="nrlre1", rounds=rounds)
    listed = encode(routes_RLK[:LISTED_TOKENS], form="lists")
    part = encode(routes_RLK[:LISTED_TOKENS], form="nrlre1")
    lists = relative_rates(
        {"lists": partial(decode, listed, form="lists"), "nrlre1": partial(nemo_decode, part, "int16")},
        yardstick="nrlre1",
        rounds=3,
    )
    value = rates.pop("npy")
    return [
        Result(
            name="http/npy_decode",
            value=value,
            unit="x rate of nrlre1",
            bar=2.0,
            peers={**rates, "nested lists": lists["lists"]},
        ),
    ]


def hops(routes_RLK: NDArray[np.int16], *, rounds: int) -> list[Result]:
    """Bodies by form: their bytes, and the rate at which a hop passes them on."""
    store = TicketStore(SPEC, stream="routes")

    def issue(calls: Sequence[ModelCall]) -> list[str]:
        pairs = [issue_ticket(call, SPEC, stream="routes") for call in calls]
        for record, _ in pairs:
            store.write(record)
        return [ticket.to_json() for _, ticket in pairs]

    bodies = {"npy": json.dumps(response(routes_RLK)).encode()}
    forms: tuple[ShippingForm, ...] = ("ticket", "nemo")
    for form in forms:
        document = response(routes_RLK)
        if form == "nemo":
            # its messages must have them
            [choice] = document["choices"]
            choice["message"]["generation_log_probs"] = [-0.5] * len(choice["token_ids"])
        request = RouteRequest(form=form, keep_ids=False)
        ship_routes(document, request, spec=SPEC, issue=issue, options=CaptureOptions(cached=0))
        bodies[form] = json.dumps(document).encode()
    document = response(routes_RLK)
    document["choices"][0].update(routed_experts=None, token_ids=None)
    bare = len(json.dumps({**document, "prompt_token_ids": None}).encode())
    rates = relative_rates({name: partial(hop, body) for name, body in bodies.items()}, yardstick="nemo", rounds=rounds)
    ticket = len(bodies["ticket"]) - bare
    return [
        Result(
            name="http/ticket_bytes",
            value=float(ticket),
            unit="bytes more than a body without routes and ids",
            bar=1_024.0,
            higher_is_better=False,
            peers={name: float(len(body) - bare) for name, body in bodies.items() if name != "ticket"},
        ),
        Result(
            name="http/ticket_hop",
            value=rates["ticket"],
            unit="x rate of a hop with nrlre1",
            peers={"npy": rates["npy"]},
        ),
    ]


class _Stuck(TicketStore):
    """A store that takes no record until it is told to."""

    def __init__(self) -> None:
        super().__init__(SPEC, stream="routes")
        self.free = threading.Event()

    def write(self, record: RouteRecord) -> None:
        """Wait, then take it."""
        self.free.wait()
        with suppress(DataError):  # 40 answers are one
            super().write(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def plain_behind_a_stuck_sink(routes_RLK: NDArray[np.int16], *, rounds: int) -> Result:
    """Requests without tickets while tickets of 40 others wait for a sink that takes no record.

    Each round measures as many requests with the sink free as with it stuck, one after the other, through the
    middleware of one application.
    """
    body = json.dumps(response(routes_RLK)).encode()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def ask(middleware: RouteMiddleware, form: str) -> int:
        said: list[Any] = []
        headers = [(b"x-routeplane-form", form.encode()), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}

        async def receive() -> Any:
            return {"type": "http.request", "body": b'{"prompt": "p"}', "more_body": False}

        async def send(message: Any) -> None:
            said.append(message)

        await middleware(scope, receive, send)
        return int(said[0]["status"])

    async def measured(middleware: RouteMiddleware) -> list[float]:
        spent = []
        for _ in range(10):  # threads start with the first
            await ask(middleware, "none")
        for _ in range(100):
            start = time.perf_counter()
            if await ask(middleware, "none") != 200:
                raise ValueError("expected a plain request to be answered")
            spent.append(time.perf_counter() - start)
        return spent

    async def all_rounds() -> tuple[list[float], list[float]]:
        free, stuck = [], []
        for _ in range(rounds):
            sink = _Stuck()
            middleware = RouteMiddleware(app, spec=SPEC, sink=sink, options=CaptureOptions(cached=0))
            free += await measured(middleware)
            waiting = [asyncio.create_task(ask(middleware, "ticket")) for _ in range(40)]
            await asyncio.sleep(1.0)  # their bodies are rewritten by now
            stuck += await measured(middleware)
            if any(task.done() for task in waiting):
                raise ValueError("expected tickets to wait for the sink")
            sink.free.set()
            if set(await asyncio.gather(*waiting)) != {200}:
                raise ValueError("expected every ticket behind a sink that is free again")
        return free, stuck

    free, stuck = asyncio.run(all_rounds())
    p99 = {"free": float(np.percentile(free, 99)), "stuck": float(np.percentile(stuck, 99))}
    return Result(
        name="http/plain_behind_stuck_sink",
        value=round(p99["stuck"] / p99["free"], 3),
        unit="x p99 of plain requests with the sink free",
        bar=1.5,
        higher_is_better=False,
        peers={
            "median": round(median(stuck) / median(free), 3),
            "p99, milliseconds": round(1e3 * p99["stuck"], 3),
            "requests": float(len(stuck)),
        },
    )


def main(*, full: bool) -> Iterator[Result]:
    """Every result."""
    routes_RLK = legal_routes(TOKENS, top_k=TOP_K, seed=0)
    rounds = 15 if full else 7
    yield from decoding(routes_RLK, rounds=rounds)
    yield from hops(routes_RLK, rounds=rounds)
    yield plain_behind_a_stuck_sink(routes_RLK[:512], rounds=rounds)
