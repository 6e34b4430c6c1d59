"""Routes in HTTP bodies: decoding each form, and what a hop costs that parses a body and writes it again.

Payload: one call of 30,000 tokens, 48 layers, K=8, 256 experts. The yardstick is NeMo RL's envelope in int16, which its
own rule picks for that many experts (and its default), decoded as its codec does: base64 of the standard library, a
copy that may be written to, the configured type. All ways give the same ids; the inline form checks its checksum
besides. Up to 128 experts the envelope is int8, half as long: a peer.
"""

from __future__ import annotations

import base64
import json
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.bench_rules import EXPERTS, LAYERS, legal_routes
from benchmarks.measure import Result, relative_rates
from routeplane.capture.envelopes import decode_lists, encode_lists, encode_nrlre1
from routeplane.capture.forms import read_routes
from routeplane.capture.inline import decode_inline, encode_inline
from routeplane.capture.shipping import Asked, ship_routes
from routeplane.capture.tickets import TicketDesk, record_of_call, ticket_for
from routeplane.capture.wire import encode_npy
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
        "routed_experts": encode_npy(routes_RLK.astype(np.uint8)),
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
    tokens = np.arange(len(routes_RLK) + 1)
    inline = encode_inline(routes_RLK, SPEC, token_ids=tokens)
    narrow, wide = encode_nrlre1(routes_RLK, dtype="int8"), encode_nrlre1(routes_RLK)
    npy = encode_npy(routes_RLK.astype(np.uint8))
    ways: dict[str, Callable[[], Any]] = {
        "inline": partial(decode_inline, inline, SPEC, token_ids=tokens),
        "nrlre1": partial(nemo_decode, wide, "int16"),
        "nrlre1 int8": partial(nemo_decode, narrow, "int8"),
        "nrlre1, read strictly here": partial(read_routes, wide, SPEC, token_ids=tokens),
        "vLLM's npy, read strictly here": partial(read_routes, npy, SPEC, token_ids=tokens),
    }
    for name, way in ways.items():
        made = way()
        if not np.array_equal(made[0] if isinstance(made, tuple) else made, routes_RLK):
            raise ValueError(f"{name} gives other ids")
    rates = relative_rates(ways, yardstick="nrlre1", rounds=rounds)
    listed = encode_lists(routes_RLK[:LISTED_TOKENS])
    part = encode_nrlre1(routes_RLK[:LISTED_TOKENS])
    lists = relative_rates(
        {"lists": partial(decode_lists, listed), "nrlre1": partial(nemo_decode, part, "int16")},
        yardstick="nrlre1",
        rounds=3,
    )
    value = rates.pop("inline")
    return [
        Result(
            name="http/inline_decode",
            value=value,
            unit="x rate of nrlre1",
            bar=15.0,
            peers={**rates, "nested lists": lists["lists"]},
        ),
        Result(
            name="http/inline_bytes",
            value=round(len(inline) / len(wide), 4),
            unit="x bytes of nrlre1 int16",
            peers={"nrlre1 int8": round(len(narrow) / len(wide), 4), "npy": round(len(npy) / len(wide), 4)},
            higher_is_better=False,
        ),
    ]


def hops(routes_RLK: NDArray[np.int16], *, rounds: int) -> list[Result]:
    """Bodies by form: their bytes, and the rate at which a hop passes them on."""
    desk = TicketDesk(SPEC, stream="routes")

    def issue(calls: Sequence[ModelCall]) -> list[str]:
        for call in calls:
            desk.write(record_of_call(call, SPEC))
        return [ticket_for(call, stream="routes").to_json() for call in calls]

    bodies: dict[str, bytes] = {}
    for form in ("ticket", "inline", "nemo"):
        document = response(routes_RLK)
        if form == "nemo":
            # its messages must have them
            [choice] = document["choices"]
            choice["message"]["generation_log_probs"] = [-0.5] * len(choice["token_ids"])
        ship_routes(document, Asked(form=form, keep_ids=form == "inline"), spec=SPEC, issue=issue, cached=0)
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
            peers={"inline": rates["inline"]},
        ),
    ]


def main(*, full: bool) -> list[Result]:
    """Every result."""
    routes_RLK = legal_routes(TOKENS, top_k=TOP_K, seed=0)
    rounds = 15 if full else 7
    return [*decoding(routes_RLK, rounds=rounds), *hops(routes_RLK, rounds=rounds)]
