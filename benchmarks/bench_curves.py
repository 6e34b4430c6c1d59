"""How cost grows over two decades: tokens, layers and records of a verified read, ranks of a cut.

A point is a share of its own limit, in CPU time of one thread, in the same rounds; a cost that grows faster than the
work shows as a curve that falls. Read: 1 / (1 / rule + 1 / xxh3) of the same rows. Cut: one copy of all batches of all
ranks. K=8, E=128, int16. ``value``: the last point over the best one.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import xxhash

from benchmarks.bench_rules import EXPERTS, legal_routes
from benchmarks.measure import Result, relative_rates
from routeplane.batch import Shard, microbatches
from routeplane.record.record import RouteRecord
from routeplane.record.spans import Capture, Span
from routeplane.record.spec import RouteSpec
from routeplane.record.validate import all_legal
from routeplane.stream import new_stream, open_stream

TOP_K = 8


def spec_of(layers: int) -> RouteSpec:
    """A geometry of so many layers."""
    return RouteSpec(num_experts=EXPERTS, top_k=TOP_K, layer_ids=tuple(range(layers)))


def records_of(count: int, *, tokens: int, layers: int) -> list[RouteRecord]:
    """Records of one length; all rows are there."""
    spec, rows = spec_of(layers), legal_routes(-(-tokens * layers // 48), top_k=TOP_K)
    rows_SLK = rows.reshape(-1, TOP_K)[: tokens * layers].reshape(tokens, layers, TOP_K)
    return [
        RouteRecord(
            sample_id=f"sample-{at}",
            token_ids=np.arange(tokens, dtype=np.int32),
            routes=np.roll(rows_SLK, at, axis=0),
            spans=(Span(start=0, stop=tokens, kind="generation", role=None, call="call", weights_version=1),),
            captures=(Capture(start=0, stop=tokens, call="call", weights_version=1, state="captured"),),
            spec=spec,
        )
        for at in range(count)
    ]


def share_of_the_read_limit(records: Sequence[RouteRecord], *, rounds: int) -> float:
    """Of rule and xxh3, one after the other over the same rows, how much a verified read reaches."""
    spec = records[0].spec
    sink = io.BytesIO()
    with new_stream(sink, spec, encoding="plain", max_bytes=2**40) as out:
        for record in records:
            out.write(record)
    stream, rows = sink.getvalue(), [record.routes for record in records]
    together = np.concatenate(rows)

    def limit() -> None:
        if not all_legal(together, spec):
            raise RuntimeError("expected legal rows, got others")
        for each in rows:
            xxhash.xxh3_64_intdigest(each.data)

    def read() -> list[RouteRecord]:
        with open_stream(stream) as source:
            return list(source)

    if [record.checksum for record in read()] != [record.checksum for record in records]:
        raise RuntimeError("expected the records that were written, got others")
    ways: dict[str, Callable[[], object]] = {"limit": limit, "read": read}
    return relative_rates(ways, yardstick="limit", rounds=rounds, clock=time.process_time)["read"]


def share_of_the_copy(records: Sequence[RouteRecord], *, ranks: int, rounds: int) -> float:
    """Of one copy of their batches, how much cutting them for all ranks reaches: half stages, half context parallel."""
    spec = records[0].spec
    stages = max(1, 2 ** (ranks.bit_length() // 2))
    width, contexts = spec.num_layers // stages, ranks // stages
    shards = [
        Shard(context_parallel=(context, contexts), layers=spec.layer_ids[width * stage : width * (stage + 1)])
        for stage in range(stages)
        for context in range(contexts)
    ]

    def cut() -> list[Any]:
        return [
            batch.routes for shard in shards for batch in microbatches(records, spec=spec, tokens=16_384, shard=shard)
        ]

    whole = [each.numpy() for each in cut()]
    targets = [np.empty_like(each) for each in whole]

    def copy() -> None:
        for target, source in zip(targets, whole, strict=True):
            np.copyto(target, source)

    ways: dict[str, Callable[[], object]] = {"copy": copy, "cut": cut}
    return relative_rates(ways, yardstick="copy", rounds=rounds, clock=time.process_time)["cut"]


def curve(name: str, points: Sequence[int], share: Callable[[int], float], *, unit: str) -> Result:
    """One curve; its points stand in ``peers``."""
    found = {str(point): round(share(point), 3) for point in points}
    last = found[str(points[-1])]
    return Result(name=f"curves/{name}", value=round(last / max(found.values()), 3), unit=unit, peers=found)


def main(*, full: bool = False) -> Iterator[Result]:
    """Measure; 4 MB to 80 MB a point."""
    rounds = 15 if full else 5
    read = partial(share_of_the_read_limit, rounds=rounds)
    unit = "of rule + xxh3, a verified read; value: last point over the best"
    yield curve(
        "tokens",
        (64, 256, 1_024, 6_400),
        lambda tokens: read(records_of(max(4, 25_600 // tokens), tokens=tokens, layers=48)),
        unit=unit,
    )
    yield curve(
        "layers", (1, 4, 16, 48, 100), lambda layers: read(records_of(16, tokens=1_024, layers=layers)), unit=unit
    )
    yield curve(
        "records", (10, 30, 100, 300, 1_000), lambda count: read(records_of(count, tokens=128, layers=48)), unit=unit
    )
    cut = records_of(8, tokens=4_096, layers=48)
    yield curve(
        "ranks",
        (1, 4, 16, 128),
        lambda ranks: share_of_the_copy(cut, ranks=ranks, rounds=rounds),
        unit="of one copy of all ranks' batches, cut for each; value: last point over the best",
    )
