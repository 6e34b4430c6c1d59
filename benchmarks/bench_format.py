"""Format 1.1: what a writer does to a record, and what a rollout costs that is stored turn by turn, as deltas.

Deltas: against the same rollout stored once, in bytes. 30 turns that come to 32,768 tokens; every turn the environment
adds as many tokens as the policy samples. 16 layers, K=8, narrow. Each record has log-probabilities, a loss mask and
the ids that sampling kept. Writer: 48 layers, K=8, in CPU time of one thread.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from time import process_time

import numpy as np
import xxhash

from benchmarks.bench_read import SPEC as LARGE
from benchmarks.bench_read import record as sample
from benchmarks.bench_rules import EXPERTS, legal_routes
from benchmarks.measure import Result, relative_rates
from routeplane import AlignedColumn, ModelCall, RouteRecord, RouteSpec, assemble, new_stream, open_stream
from routeplane.record.codec import write_batch
from routeplane.record.prefixes import as_delta, resolve
from routeplane.record.validate import all_legal

TURNS, TOKENS, LAYERS, TOP_K = 30, 32_768, 16, 8
SPEC = RouteSpec(num_experts=EXPERTS, top_k=TOP_K, layer_ids=tuple(range(LAYERS)))


def rollout(*, turns: int = TURNS, tokens: int = TOKENS) -> list[RouteRecord]:
    """The whole record after each turn; segment n is the one after n + 1 turns."""
    rows = legal_routes(tokens, top_k=TOP_K)[:, :LAYERS]
    ids = np.random.default_rng(0).integers(0, 100_000, tokens).astype(np.int32)
    kept = AlignedColumn.of_lists(
        [[int(token)] * (at % 3) for at, token in enumerate(ids)], dtype="int32", aligned="sampled"
    )
    edges = np.linspace(0, tokens, 2 * turns + 1).astype(int).tolist()
    calls, records = [], []
    for turn in range(turns):
        before, prompt, stop = edges[2 * turn : 2 * turn + 3]
        first = max(before - 1, 0)
        mask = np.zeros(stop, dtype=np.uint8)
        mask[prompt:] = 1
        calls.append(
            ModelCall(
                prompt_ids=ids[:prompt],
                generation_ids=ids[prompt:stop],
                routes=rows[first : stop - 1],
                first_row=first,
                weights_version=turn // 8,
                call_id=f"turn-{turn}",
                logprobs=np.full(stop - prompt, -0.5, dtype=np.float32),
                columns={"loss_mask": mask, "kept": kept[:stop]},
            )
        )
        (record,) = assemble(calls, SPEC, sample_id=f"turn-{turn}").records
        records.append(record)
    return records


def as_chain(records: list[RouteRecord]) -> list[RouteRecord]:
    """Each record as a delta of the one before it."""
    stored = records[:1]
    for base, record in pairwise(records):
        stored.append(as_delta(record, base, stored=stored[-1]))
    return stored


def stream_bytes(records: Iterable[RouteRecord]) -> bytes:
    """A stream of them."""
    sink = io.BytesIO()
    with new_stream(sink, SPEC) as writer:
        for record in records:
            writer.write(record)
    return sink.getvalue()


def shares(*, turns: int = TURNS, tokens: int = TOKENS) -> tuple[float, float]:
    """Route bytes, and all bytes, of the chain of deltas over those of the last record; the chain is read back."""
    records = rollout(turns=turns, tokens=tokens)
    chain = as_chain(records)
    sent, whole = stream_bytes(chain), stream_bytes(records[-1:])
    if [record.checksum for record in resolve(open_stream(sent))] != [record.checksum for record in records]:
        raise RuntimeError("expected the records of every turn from their deltas, got others")
    routes = sum(record.routes.nbytes for record in chain) / records[-1].routes.nbytes
    return routes, len(sent) / len(whole)


def encoding(*, rounds: int) -> Result:
    """Records of 2,048 tokens as one Arrow batch, which copies their arrays once, against that copy."""
    records = [sample(at, 2_048) for at in range(32)]
    source = np.concatenate([each.routes for each in records])
    target = np.zeros_like(source)
    rates = relative_rates(
        {
            "np.copyto": lambda: np.copyto(target, source),
            "plain": lambda: write_batch(records, LARGE, encoding="plain"),
            "narrow": lambda: write_batch(records, LARGE, encoding="narrow"),
        },
        yardstick="np.copyto",
        rounds=rounds,
        clock=process_time,
    )
    peers = {name: rates[name] for name in ("np.copyto", "narrow")}
    return Result(name="format/encode", value=rates["plain"], unit="x np.copyto rate", bar=0.8, peers=peers)


def finishing(*, rounds: int) -> Result:
    """A record of 32,768 tokens of rows that an engine gave: every check, and its checksum."""
    made = sample(0, 32_768)
    rows_SLK, target = made.routes, np.zeros_like(made.routes)
    times = relative_rates(
        {
            "np.copyto": lambda: np.copyto(target, rows_SLK),
            "fresh copy": lambda: rows_SLK.copy(),
            "row rule": lambda: all_legal(rows_SLK, LARGE),
            "xxh3-64": lambda: xxhash.xxh3_64_intdigest(rows_SLK.data),
            "finish": lambda: replace(made, checksum=None),
        },
        yardstick="np.copyto",
        rounds=rounds,
        clock=process_time,
    )
    spent = {name: round(1 / rate, 3) for name, rate in times.items()}
    return Result(
        name="format/finish_32k",
        value=spent.pop("finish"),
        unit="x time of copying its rows into touched memory",
        bar=2.0,
        higher_is_better=False,
        peers=spent,
    )


def main(*, full: bool = False) -> list[Result]:
    """Shares of bytes, whose payload is the same with ``full``; and what a writer does, in more rounds."""
    routes, everything = shares()
    unit, rounds = "x one record of all turns", 25 if full else 9
    return [
        encoding(rounds=rounds),
        finishing(rounds=rounds),
        Result(name="format/deltas_all_bytes", value=round(everything, 4), unit=unit, bar=1.1, higher_is_better=False),
        Result(name="format/deltas_route_bytes", value=round(routes, 4), unit=unit, bar=1.02, higher_is_better=False),
    ]
