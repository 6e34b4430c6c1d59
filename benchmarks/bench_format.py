"""Format 1.1: what a rollout costs that is stored turn by turn, as deltas, against the same rollout stored once.

Payload: 30 turns that come to 32,768 tokens; every turn the environment adds as many tokens as the policy samples. 16
layers, K=8, narrow. Each record has log-probabilities, a loss mask and the ids that sampling kept. Bytes, not times.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from benchmarks.bench_rules import EXPERTS, legal_routes
from benchmarks.measure import Result
from routeplane import AlignedColumn, ModelCall, RouteRecord, RouteSpec, assemble, new_stream, open_stream
from routeplane.record.prefixes import as_delta, resolve

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


def main(*, full: bool = False) -> list[Result]:
    """Both shares; the payload is the same with ``full``."""
    routes, everything = shares()
    unit = "x one record of all turns"
    return [
        Result(name="format/deltas_all_bytes", value=round(everything, 4), unit=unit, bar=1.1, higher_is_better=False),
        Result(name="format/deltas_route_bytes", value=round(routes, 4), unit=unit, bar=1.02, higher_is_better=False),
    ]
