"""What a second and a fourth thread bring to the checking of records: compiled loops and hashes leave the lock.

Threads are the caller's: each reads streams of its own, as data-loader workers and a relay's readers do. ``check``: the
row rule and xxh3-64 of the rows alone, which is what can run side by side. ``read``: a whole verified read, whose
Python does not. Wall time, so the machine must be quiet; a run on a busy one says little. ``value``: how many times as
fast as one thread does the same streams one after the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import process_time

import xxhash

from benchmarks.bench_read import SPEC, read, record, stream_of
from benchmarks.measure import Result, relative_rates
from routeplane.record.validate import all_legal
from routeplane.stream import open_stream

PARTS, THREADS = 8, (2, 4)
#: On two cores: what two threads must reach.
CHECK_BAR, READ_BAR = 1.7, 1.7


def check(stream: bytes) -> int:
    """Rule and hash of all rows of a stream; the same for every thread that does it."""
    with open_stream(stream, verify=False, on_alarm="ignore") as source:
        rows = [each.routes for each in source]
    return _check_rows(rows)


def _check_rows(rows: Sequence[object]) -> int:
    found = 0
    for each in rows:
        if not all_legal(each, SPEC):  # type: ignore[arg-type]
            raise RuntimeError("expected legal rows, got others")
        found ^= xxhash.xxh3_64_intdigest(each.data)  # type: ignore[attr-defined]
    return found


def speed_up(parts: Sequence[Callable[[], object]], *, rounds: int) -> dict[int, float]:
    """Threads -> rate over that of one thread, for work that comes in parts."""
    ways: dict[str, Callable[[], object]] = {"1": lambda: [part() for part in parts]}
    pools = [ThreadPoolExecutor(count) for count in THREADS]
    for count, pool in zip(THREADS, pools, strict=True):
        ways[str(count)] = partial(_run, pool, parts)
    rates = relative_rates(ways, yardstick="1", rounds=rounds)
    for pool in pools:
        pool.shutdown()
    return {count: rates[str(count)] for count in THREADS}


def _run(pool: ThreadPoolExecutor, parts: Sequence[Callable[[], object]]) -> list[object]:
    return [each.result() for each in [pool.submit(part) for part in parts]]


def _require_same(parts: Sequence[Callable[[], object]]) -> None:
    """Threads give what one thread gives."""
    with ThreadPoolExecutor(THREADS[0]) as pool:
        if _run(pool, parts) != [part() for part in parts]:
            raise RuntimeError("expected threads to find what one finds, got something else")


def tree(rows: Sequence[object], piece: int) -> list[int]:
    """Of each record a digest of the digests of its pieces, which threads could share: for a later format."""
    found = []
    for each in rows:
        data = memoryview(each).cast("B")  # type: ignore[arg-type]
        top = xxhash.xxh3_64()
        for start in range(0, len(data), piece):
            top.update(xxhash.xxh3_64_digest(data[start : start + piece]))
        found.append(top.intdigest())
    return found


def tree_cost(rows: Sequence[object], *, rounds: int) -> Result:
    """CPU time of a tree of hashes over that of one hash a record, one thread."""
    ways: dict[str, Callable[[], object]] = {
        "one": lambda: [xxhash.xxh3_64_intdigest(each.data) for each in rows],  # type: ignore[attr-defined]
        **{f"{size} KiB pieces": partial(tree, rows, size * 1024) for size in (16, 64, 256)},
    }
    rates = relative_rates(ways, yardstick="one", rounds=rounds, clock=process_time)
    peers = {name: round(1 / rate, 3) for name, rate in rates.items()}
    return Result(
        name="threads/tree_of_hashes",
        value=peers["64 KiB pieces"],
        unit="x CPU time of one xxh3-64 a record, 2,048-token records, pieces of 64 KiB, one thread",
        higher_is_better=False,
        peers=peers,
    )


def main(*, full: bool = False) -> Iterator[Result]:
    """Measure; 50 MB or 200 MB of 2,048-token records."""
    rounds, records = (15, 16) if full else (7, 4)
    streams = [
        stream_of([record(at * records + each, 2_048) for each in range(records)], encoding="plain")
        for at in range(PARTS)
    ]
    rows = [read(stream) for stream in streams]
    checks = [partial(_check_rows, each) for each in rows]
    reads = [partial(read, stream) for stream in streams]
    yield tree_cost([each for part in rows for each in part], rounds=3 * rounds)
    _require_same(checks)
    _require_same([partial(check, stream) for stream in streams])
    for name, parts, bar in (("check", checks, CHECK_BAR), ("read", reads, READ_BAR)):
        found = speed_up(parts, rounds=rounds)
        yield Result(
            name=f"threads/{name}",
            value=round(found[2], 3),
            unit=f"x rate of one thread, two threads, {os.cpu_count()} cores",
            bar=bar if (os.cpu_count() or 1) >= 2 else None,
            peers={"4 threads": round(found[4], 3)},
        )
