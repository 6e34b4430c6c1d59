"""What carriers cost beside what they cannot avoid: bytes of turns, silent peers, one producer or two hundred.

Turns and peers: 12 layers, top-k 8. Producers: 48 layers, top-k 8, 4,096 tokens, 3.1 MB a record; their limit is one
copy of the records' bytes and xxh3 over them, measured in the same run, on one core.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import numpy as np
import xxhash

from benchmarks.measure import Result
from routeplane.record.record import RouteRecord
from routeplane.stream import folder, listen, new_stream, open_stream
from routeplane.stream.blocks import BlockLimits
from routeplane.testing.builders import watermarked_record, watermarked_spec

SPEC = watermarked_spec(layers=tuple(range(12)), top_k=8)
LARGE = watermarked_spec(layers=tuple(range(48)), top_k=8)
_LIMITS = BlockLimits(block_bytes=2**22, sync=False)


def turns_bytes(tokens: int) -> Result:
    """Bytes that 30 turns of one rollout take in a place, over those of the last record alone."""
    last = watermarked_record(0, num_tokens=tokens, spec=SPEC)
    place = Path(tempfile.mkdtemp())
    sizes = {}
    for name, stops in (("turns", range(1, 31)), ("alone", [30])):
        with folder.open_writer(place / name, SPEC, run="bench", producer="p", limits=_LIMITS) as writer:
            for at in stops:
                part = last.slice(0, tokens * at // 30)
                writer.write(replace(part, sample_id=f"turn-{at}", group="g", attributes={}, checksum=None))
        sizes[name] = sum(path.stat().st_size for path in (place / name).rglob("*.arrows"))
    shutil.rmtree(place)
    return Result(
        name="carriers/thirty_turns_bytes",
        value=round(sizes["turns"] / sizes["alone"], 4),
        unit="of the bytes of one whole record",
        bar=1.1,
        higher_is_better=False,
    )


def silent_peers() -> Result:
    """Seconds that 40 silent peers add to a producer's stream over TCP."""
    record = watermarked_record(0, num_tokens=400, spec=SPEC)

    def once(listener: object) -> float:
        address = str(listener.address)  # type: ignore[attr-defined]

        def consume() -> None:
            with open_stream(listener) as reader:
                list(reader)

        consumer = threading.Thread(target=consume)
        start = perf_counter()
        consumer.start()
        with new_stream(address, SPEC) as sink:
            sink.write(record)
        consumer.join()
        return perf_counter() - start

    with listen("tcp://127.0.0.1:0", handshake_s=60.0) as listener:
        before = median(once(listener) for _ in range(5))
        port = int(listener.address.rpartition(":")[2])
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        after = median(once(listener) for _ in range(5))
        for each in silent:
            each.close()
    return Result(
        name="carriers/silent_peers_delay",
        value=round(max(after - before, 0.0), 4),
        unit="s",
        bar=0.1,
        higher_is_better=False,
        peers={"without": round(before, 4), "with 40": round(after, 4)},
    )


def producers(count: int, total: int) -> Result:
    """Records a second of one core, as a share of the limit; several producers take turns on that core."""
    one = watermarked_record(0, num_tokens=4_096, spec=LARGE)
    records = [  # memory of their own: a limit within the caches is not one
        replace(one, sample_id=f"sample-{index}", group=None, routes=one.routes.copy(), checksum=None)
        for index in range(total)
    ]
    shares = []
    for _ in range(3):
        limit = _limit(records)
        place = tempfile.mkdtemp(dir="/dev/shm")
        writers = [
            folder.open_writer(place, LARGE, run="bench", producer=f"p{at}", encoding="plain", limits=_LIMITS)
            for at in range(count)
        ]
        start = process_time()
        for index, record in enumerate(records):
            writers[index % count].write(record)
        for writer in writers:
            writer.close()
        shares.append(limit / (process_time() - start))
        shutil.rmtree(place)
    return Result(
        name=f"carriers/producers_{count}",
        value=round(median(shares), 3),
        unit="of the limit (copy + xxh3 of the same records)",
        bar=0.5,
    )


def _limit(records: Sequence[RouteRecord]) -> float:
    """Processor seconds of one copy and one hash of every record's bytes."""
    target = np.empty_like(records[0].routes)
    start = process_time()
    for record in records:
        np.copyto(target, record.routes)
        xxhash.xxh3_64_intdigest(record.routes.data)
        xxhash.xxh3_64_intdigest(record.token_ids.data)
    return process_time() - start


def main(*, full: bool = False) -> list[Result]:
    """Measure; ``full`` changes nothing."""
    del full
    return [
        turns_bytes(32_768),
        silent_peers(),
        producers(1, 60),
        producers(200, 200),
    ]
