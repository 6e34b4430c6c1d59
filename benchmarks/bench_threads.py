"""What threads that read ahead bring: ``open_stream(...).ahead(threads=2)`` against one thread, the same records.

Compiled loops and hashes run without the interpreter's lock; the Python around them does not. ``check``: records of
32,768 tokens, nearly all of whose time is rule and hash. ``read``: records of 2,048 tokens in blocks of 32 MiB, as
writers make them. ``limit``: two threads that hash half of the bytes each, in one call. Wall time, so the machine must
be quiet; a run on a busy one says little. ``value``: how many times as fast as one thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import process_time

import numpy as np
import xxhash

from benchmarks.bench_read import record, stream_of
from benchmarks.measure import Result, relative_rates
from routeplane.record.batches import DEFAULT_MAX_BYTES
from routeplane.stream import open_stream

THREADS = (2, 4)
#: On two cores: what two threads must reach.
BAR = 1.7


def read(stream: bytes, threads: int) -> int:
    """A verified read; what all records say of themselves, joined."""
    found = 0
    with open_stream(stream).ahead(threads=threads) as source:
        for each in source:
            found = (found * 3 + each.checksum) % 2**64
    return found


def hash_parts(data: memoryview, threads: int) -> None:
    """So many threads hash a part of the bytes each."""
    step = len(data) // threads
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda at: xxhash.xxh3_64_intdigest(data[at * step : (at + 1) * step]), range(threads)))


def speed_up(stream: bytes, *, rounds: int) -> dict[str, float]:
    """Rates over that of one thread, in wall time; and the CPU time over that of one thread."""
    expected = read(stream, 1)
    if any(read(stream, count) != expected for count in THREADS):
        raise RuntimeError("expected threads to find what one finds, got something else")
    data = memoryview(stream)
    own = {str(count): partial(read, stream, count) for count in (1, *THREADS)}
    hashes = {f"limit, {count}": partial(hash_parts, data, count) for count in (1, 2)}
    rates = relative_rates({**own, **hashes}, yardstick="1", rounds=rounds)
    spent = relative_rates({name: own[name] for name in ("1", "2")}, yardstick="1", rounds=rounds, clock=process_time)
    return {
        "2": rates["2"],
        "4 threads": rates["4"],
        "xxh3 alone, 2 threads": round(rates["limit, 2"] / rates["limit, 1"], 3),
        "CPU time of 2 threads over that of one": round(1 / spent["2"], 3),
    }


def tree(rows: Sequence[np.ndarray], piece: int) -> list[int]:
    """Of each record a digest of the digests of its pieces, which threads could share: for a later format."""
    found = []
    for each in rows:
        data = each.data.cast("B")
        top = xxhash.xxh3_64()
        for start in range(0, len(data), piece):
            top.update(xxhash.xxh3_64_digest(data[start : start + piece]))
        found.append(top.intdigest())
    return found


def tree_cost(rows: Sequence[np.ndarray], *, rounds: int) -> Result:
    """CPU time of a tree of hashes over that of one hash a record, one thread."""
    ways: dict[str, Callable[[], object]] = {
        "one": lambda: [xxhash.xxh3_64_intdigest(each.data) for each in rows],
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
    """Measure; 100 MB or 200 MB of records."""
    rounds, megabytes = (15, 201) if full else (9, 101)
    for name, tokens in (("check", 32_768), ("read", 2_048)):
        records = [record(at, tokens) for at in range(megabytes * 10**6 // (tokens * 768))]
        if name == "read":
            yield tree_cost([each.routes for each in records], rounds=2 * rounds)
        stream = stream_of(records, encoding="plain", max_bytes=DEFAULT_MAX_BYTES)
        del records
        found = speed_up(stream, rounds=rounds)
        yield Result(
            name=f"threads/{name}",
            value=found.pop("2"),
            unit=f"x rate of one thread, two threads, {tokens}-token records, {os.cpu_count()} cores",
            bar=BAR if (os.cpu_count() or 1) >= 2 else None,
            peers=found,
        )
