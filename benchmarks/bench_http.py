"""Routes in HTTP bodies: decoding each form, and what a hop costs that parses a body and writes it again.

Payload: one call of 30,000 tokens, 48 layers, K=8, 256 experts. The yardstick is NeMo RL's envelope in int16, which its
own rule picks for that many experts (and its default), decoded as its codec does: base64 of the standard library, a
copy that may be written to, the configured type. All decoders give the same ids. Up to 128 experts the envelope is
int8, half as long: a peer.
"""

from __future__ import annotations

import base64
import json
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.bench_rules import EXPERTS, LAYERS, legal_routes
from benchmarks.measure import Result, relative_rates
from routeplane.capture import CaptureOptions
from routeplane.capture.choices import read_rows
from routeplane.capture.http import TicketStore, issue_ticket
from routeplane.capture.http.middleware import RouteRequest, ShippingForm, ship_routes
from routeplane.capture.wire import decode, encode
from routeplane.record.spec import RouteSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from routeplane.record.calls import ModelCall

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


def main(*, full: bool) -> list[Result]:
    """Every result."""
    routes_RLK = legal_routes(TOKENS, top_k=TOP_K, seed=0)
    rounds = 15 if full else 7
    return [*decoding(routes_RLK, rounds=rounds), *hops(routes_RLK, rounds=rounds)]
