"""A server whose routes are wrong on purpose, over a router that is a hash of what stands before a token.

The router obeys what real ones obey: a row follows its token, later tokens never change it, and the deeper a layer, the
more of its slots follow the tokens before. Every fault of ``FAULTS`` draws its place, size and variant from a seed.
``WrongServer`` answers the bodies of ``/v1/completions`` as vLLM does; ``serving`` puts it behind HTTP on loopback.

Axes: S tokens, R rows, D decoder layers, K slots.
"""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeplane.record.spec import RouteSpec

__all__ = ["FAULTS", "SPEC", "VOCABULARY", "WrongServer", "serving"]

VOCABULARY = 500
#: Layers 0, 1 and 3 are dense: turned around, the axis is not the same axis moved.
SPEC = RouteSpec(num_experts=160, top_k=4, layer_ids=(2, 4, 5, 6), model="hash-moe", decoder_layers=7)
BLOCK = 16

#: Fault -> the kind that must be named.
FAULTS: Mapping[str, str] = {
    "no routes": "no_routes",
    "rows shifted by one": "rows_shifted",
    "rows shifted by one while decoding": "rows_shifted",
    "layers shifted": "layers_shifted",
    "layer axis reversed": "layers_reversed",
    "last row missing": "row_missing",
    "a row too many": "row_extra",
    "rows of the slot's last request": "rows_foreign",
    "a buffer that is not refreshed": "rows_stale",
    "ids wrapped in int8": "ids_wrapped",
    "zeros where a kernel wrote nothing": "rows_unwritten",
    "rows of the cached prefix lost": "cache_rows",
    "choices share rows": "choice_rows",
    "stop strings cut tokens and not rows": "stop_rows",
    "a chunk's rows dropped": "stream_rows",
    "an abort leaves its rows behind": "abort_rows",
    "trims at the wrong end": "trim_rows",
    "requests at once mixed": "concurrent_rows",
    "rows or version of the old weights": "stale_weights",
}


def _mix(values: Any) -> NDArray[np.uint64]:
    """splitmix64."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(values, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(mixed ^ (mixed >> np.uint64(31)))


@dataclass(frozen=True, kw_only=True)
class _Made:
    """What a choice was made from. ``cut``: what the prompt lost; ``first``: the rows of choice 0, behind it."""

    tokens: list[int]
    prompt: int
    cached: int
    reason: str
    cut: list[int]
    first: NDArray[np.int64] | None


class WrongServer:
    """One server. ``fault``: a name of FAULTS; None is honest. ``spec``: of its router."""

    def __init__(self, fault: str | None = None, *, seed: int = 0, spec: RouteSpec = SPEC) -> None:
        self.fault, self.spec, self.version = fault, spec, 1
        self._random = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._variant, self._by = int(self._random.integers(2)), int(self._random.choice([-2, -1, 1, 2]))
        self._layer = int(self._random.choice(spec.layer_ids))
        self._every = int(self._random.integers(1, 3))
        self._requests = 0
        self._blocks: dict[tuple[Any, ...], int] = {}
        self._slot: NDArray[np.int64] | None = None
        self._aborted: NDArray[np.int64] | None = None
        self._flying: list[NDArray[np.int64]] = []

    # -- the model ---------------------------------------------------------------------------------------------------

    def contexts(self, token_ids: list[int], *, version: int) -> NDArray[np.uint64]:
        """A hash of all tokens up to each one, ``[S]``."""
        found, state = [], version
        for token in token_ids:
            state = (state * 1_000_003 ^ (token + 1)) & (2**64 - 1)
            found.append(state)
        return _mix(np.asarray(found, dtype=np.uint64))

    def rows(self, token_ids: list[int], *, version: int | None = None) -> NDArray[np.int64]:
        """The true rows, ``[S, D, K]``; dense layers are zero."""
        version = self.version if version is None else version
        context_S = self.contexts(token_ids, version=version)
        top_k, width = self.spec.top_k, min(self.spec.experts_per_layer) // self.spec.top_k
        token_S = _mix(np.asarray(token_ids, dtype=np.uint64) + np.uint64(1_000 * version))
        depth = self.spec.decoder_layers or self.spec.layer_ids[-1] + 1
        rows_SDK = np.zeros((len(token_ids), depth, top_k), dtype=np.int64)
        for at, layer in enumerate(self.spec.layer_ids):
            following = round(top_k * at / self.spec.num_layers)
            for slot in range(top_k):
                source_S = context_S if slot < following else token_S
                drawn_S = _mix(source_S ^ np.uint64(7_919 * layer + slot)) % np.uint64(width)
                rows_SDK[:, layer, slot] = drawn_S.astype(np.int64) + slot * width
        return rows_SDK

    def update(self) -> int:
        """Other weights."""
        self.version += 1
        return self.version

    def _generate(self, prompt: list[int], *, seed: int, count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            drawn = int(_mix(self.contexts(tokens, version=self.version)[-1:] ^ np.uint64(seed))[0])
            tokens.append(20 + drawn % (VOCABULARY - 20))
        return tokens[len(prompt) :]

    # -- answers -----------------------------------------------------------------------------------------------------

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A whole answer."""
        kept = body.get("truncate_prompt_tokens", len(body["prompt"]))
        cut, prompt = body["prompt"][:-kept], body["prompt"][-kept:]
        cached = self._cached(prompt, body.get("cache_salt"))
        choices: list[dict[str, Any]] = []
        first_rows: NDArray[np.int64] | None = None
        for index in range(body.get("n", 1)):
            seed = body.get("seed", 0) + 100_003 * index
            tokens = self._generate(prompt, seed=seed, count=body.get("max_tokens", 16))
            tokens, reason = self._stopped(tokens, body)
            made = _Made(
                tokens=[*prompt, *tokens], prompt=len(prompt), cached=cached, reason=reason, cut=cut, first=first_rows
            )
            rows_RDK = self._damaged(self.rows(made.tokens)[:-1], made)
            if first_rows is None:
                first_rows = rows_RDK
            if reason == "stop" and self.fault == "stop strings cut tokens and not rows":
                tokens = tokens[: -(1 + self._every)] if self._variant else tokens
            start = body.get("routed_experts_prompt_start", 0)
            rows_RDK = (
                rows_RDK[:-start]
                if start and self._is("trims at the wrong end") and not self._variant
                else rows_RDK[start:]
            )
            choice = {"index": index, "finish_reason": reason, "token_ids": tokens}
            choice |= {"text": " ".join(f"w{token}" for token in tokens), "routed_experts": self._encoded(rows_RDK)}
            choices.append(choice)
        usage = {"prompt_tokens_details": {"cached_tokens": cached}}
        said = self.version - (
            self._is("rows or version of the old weights") and not self._variant and self.version > 1
        )
        return {"id": "r", "prompt_token_ids": prompt, "choices": choices, "usage": usage, "weight_version": str(said)}

    def stream(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The same in chunks: the prompt's rows with the first token, then a row with each."""
        whole = self.complete({**body, "stream": False})
        choice, prompt = whole["choices"][0], whole["prompt_token_ids"]
        rows = None if choice["routed_experts"] is None else _decoded(choice["routed_experts"])
        tokens, count = choice["token_ids"], len(choice["token_ids"])
        dropped = int(self._random.integers(0, max(1, count - 1)))
        if rows is not None:
            self._aborted = rows
        for at, token in enumerate(tokens):
            part = (
                None
                if rows is None
                else rows[: len(prompt)]
                if at == 0
                else rows[len(prompt) + at - 1 : len(prompt) + at]
            )
            if at == dropped and self._is("a chunk's rows dropped"):
                part = None
            one = {"index": 0, "token_ids": [token], "text": f" w{token}"}
            one["finish_reason"] = choice["finish_reason"] if at == count - 1 else None
            one["routed_experts"] = None if part is None or not len(part) else self._encoded(part)
            yield {"id": "r", "choices": [one], **({"prompt_token_ids": prompt} if at == 0 else {})}
        self._aborted = None

    def _cached(self, prompt: list[int], salt: str | None) -> int:
        """Prompt tokens whose blocks an earlier request filled; fills those of this one."""
        found = 0
        with self._lock:
            for stop in range(BLOCK, len(prompt), BLOCK):
                key = (salt, *prompt[:stop])
                if key in self._blocks and found == stop - BLOCK:
                    found = stop
                self._blocks.setdefault(key, self.version)
        return found

    def _stopped(self, tokens: list[int], body: Mapping[str, Any]) -> tuple[list[int], str]:
        for at, token in enumerate(tokens):
            if token in body.get("stop_token_ids", ()) or (body.get("stop") or "\0") in f"w{token}":
                return tokens[: at + 1], "stop"
        return tokens, "length"

    def _encoded(self, rows_RDK: NDArray[np.int64]) -> str | None:
        if self._is("no routes"):
            return None
        kind = np.int8 if self._is("ids wrapped in int8") else np.uint8
        file = io.BytesIO()
        np.save(file, rows_RDK.astype(kind))
        return base64.b64encode(file.getvalue()).decode()

    # -- faults ------------------------------------------------------------------------------------------------------

    def _is(self, fault: str) -> bool:
        return self.fault == fault

    def _damaged(self, rows_RDK: NDArray[np.int64], made: _Made) -> NDArray[np.int64]:
        with self._lock:
            self._requests += 1
            now = self._requests % self._every == 0
            before, self._slot = self._slot, rows_RDK.copy()
        count, by, prompt, cached, first = len(rows_RDK), self._by, made.prompt, made.cached, made.first
        match self.fault:
            case "rows shifted by one":
                edge = rows_RDK[:1] if by > 0 else rows_RDK[-1:]
                return np.concatenate([edge, rows_RDK[:-1]] if by > 0 else [rows_RDK[1:], edge])
            case "rows shifted by one while decoding" if count > prompt:
                return np.concatenate([rows_RDK[:prompt], rows_RDK[prompt - 1 : -1]])
            case "layers shifted":
                return np.roll(rows_RDK, by, axis=1)
            case "layer axis reversed":
                return rows_RDK[:, ::-1]
            case "last row missing" if now:
                return rows_RDK[:-1]
            case "a row too many" if now:
                more = rows_RDK[-1:] if self._variant else np.zeros_like(rows_RDK[:1])
                return np.concatenate([rows_RDK, more])
            case "rows of the slot's last request" if now and before is not None:
                at = int(self._random.integers(0, max(1, min(count, len(before)) - 3)))
                stop = min(len(before), count, at + 3 + 3 * self._variant)
                rows_RDK[at:stop] = before[at:stop]
            case "a buffer that is not refreshed" if count > prompt:
                rows_RDK[prompt:] = rows_RDK[prompt - 1]
            case "zeros where a kernel wrote nothing" if now:
                at = int(self._random.integers(0, count))
                rows_RDK[at : at + 1 + self._variant, self._layer if self._variant else slice(None)] = 0
            case "rows of the cached prefix lost" if cached:
                return (
                    rows_RDK[cached:] if self._variant else np.concatenate([0 * rows_RDK[:cached], rows_RDK[cached:]])
                )
            case "choices share rows" if first is not None:
                return first[: len(rows_RDK)].copy()
            case "stop strings cut tokens and not rows" if made.reason == "stop" and not self._variant:
                return rows_RDK[self._every :]
            case "trims at the wrong end" if self._variant and made.cut:
                return self.rows([*made.cut, *made.tokens])[:count]
            case "an abort leaves its rows behind" if self._aborted is not None:
                left, self._aborted = self._aborted, None
                shared = min(len(left), count)
                rows_RDK[:shared] = left[:shared]
            case "requests at once mixed":
                self._mix_requests(rows_RDK)
            case "rows or version of the old weights" if self.version > 1 and self._variant and cached:
                old_RDK = self.rows(made.tokens[:cached], version=self.version - 1)
                return np.concatenate([old_RDK, rows_RDK[cached:]])
            case _:
                pass
        return rows_RDK

    def _mix_requests(self, rows_RDK: NDArray[np.int64]) -> None:
        """Take rows of a request that is in flight; some time must pass for one to be."""
        mine = rows_RDK.copy()
        with self._lock:
            self._flying.append(mine)
        time.sleep(0.003)
        with self._lock:
            others = [rows for rows in self._flying if rows is not mine]
            self._flying = [rows for rows in self._flying if rows is not mine]
        if others:
            stop = min(len(rows_RDK), len(others[0]))
            at = int(self._random.integers(0, stop - 3))
            rows_RDK[at:stop] = others[0][at:stop]


def _decoded(text: str) -> NDArray[np.int64]:
    found: NDArray[np.int64] = np.load(io.BytesIO(base64.b64decode(text))).astype(np.int64)
    return found


@contextmanager
def serving(server: WrongServer) -> Iterator[str]:
    """The server behind HTTP on loopback; its URL."""

    class Handler(BaseHTTPRequestHandler):
        """vLLM's two paths."""

        def log_message(self, *args: object) -> None:
            """Nothing on stderr."""

        def do_GET(self) -> None:
            """The models."""
            self._send({"data": [{"id": "hash-moe"}]})

        def do_POST(self) -> None:
            """A completion, whole or in chunks."""
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if not body.get("stream"):
                self._send(server.complete(body))
                return
            self.send_response(200)
            self.end_headers()
            try:
                for chunk in server.stream(body):
                    self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
                    if server.fault == "an abort leaves its rows behind":
                        time.sleep(0.002)  # else all is sent before the client hangs up
                self.wfile.write(b"data: [DONE]\n\n")
            except OSError:
                pass  # the client left

        def _send(self, document: dict[str, Any]) -> None:
            data = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.server_address[1]}"
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()
