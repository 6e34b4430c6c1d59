"""What carriers cost beside what they cannot avoid: bytes of turns, silent peers, one producer or two hundred.

Turns and peers: 12 layers, top-k 8. Producers: 48 layers, top-k 8, 768 bytes a token. A record cannot reach readers
without one write of its bytes into new pages and one hash of them: that is the limit, measured in the same run.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import xxhash

from benchmarks.measure import Result
from routeplane.record.record import RouteRecord
from routeplane.stream import folder, listen, new_stream, open_stream
from routeplane.stream.blocks import BlockLimits
from routeplane.testing.builders import watermarked_record, watermarked_spec

SPEC = watermarked_spec(layers=tuple(range(12)), top_k=8)
LARGE = watermarked_spec(layers=tuple(range(48)), top_k=8)
_ROOT = Path(__file__).parents[1]
_QUEUE = _ROOT / ".venv-transfer-queue" / "bin" / "python"
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


def records_of(tokens: int, total: int) -> list[RouteRecord]:
    """So many records of one length; 200 MB of rows, which no cache holds, are used again and again."""
    one = watermarked_record(0, num_tokens=tokens, spec=LARGE)
    rows = [one.routes.copy() for _ in range(min(total, 2 * 10**8 // one.routes.nbytes))]
    return [
        replace(one, sample_id=f"sample-{index}", group=None, routes=rows[index % len(rows)], checksum=None)
        for index in range(total)
    ]


def producers(count: int, *, tokens: int, total: int, limits: BlockLimits) -> tuple[float, float]:
    """Records a second of one core as shares of two limits; several producers take turns on that core.

    The limits: xxh3 over the same rows, and one write of them to new files of the same file system; or one copy of them
    into memory that is there. Opening a writer is start-up, and not counted; sealing all that was written is.
    """
    records = records_of(tokens, total)
    shares: list[tuple[float, float]] = []
    for counted in [False] + [True] * 5:  # the first round touches the memory
        written, copied = _limits(records)
        place = tempfile.mkdtemp(dir="/dev/shm")
        writers = [
            folder.open_writer(place, LARGE, run="bench", producer=f"p{at}", encoding="plain", limits=limits)
            for at in range(count)
        ]
        start = process_time()
        for index, record in enumerate(records):
            writers[index % count].write(record)
        for writer in writers:
            writer.flush()
        spent = process_time() - start
        if counted:
            shares.append((written / spent, copied / spent))
        for writer in writers:
            writer.close()
        shutil.rmtree(place)
    return median(share for share, _ in shares), median(share for _, share in shares)


def _limits(records: Sequence[RouteRecord]) -> tuple[float, float]:
    """Processor seconds of one write, or one copy, and one hash of every record's rows."""
    target, place = np.empty_like(records[0].routes), Path(tempfile.mkdtemp(dir="/dev/shm"))
    spent: list[float] = []
    for work in (_write, lambda record, _: np.copyto(target, record.routes)):
        start = process_time()
        with open(place / f"{len(spent)}", "wb", buffering=0) as file:
            for record in records:
                work(record, file)
                xxhash.xxh3_64_intdigest(record.routes.data)
        spent.append(process_time() - start)
    shutil.rmtree(place)
    return spent[0], spent[1]


def _write(record: RouteRecord, file: Any) -> None:
    file.write(record.routes.data)


def all_producers() -> list[Result]:
    """One producer, 200, and one producer of shorter records."""
    found, peers = [], {}
    limits = BlockLimits(sync=False)
    for count, total in ((1, 120), (200, 400)):
        share, of_copy = producers(count, tokens=4_096, total=total, limits=limits)
        found.append(
            Result(
                name=f"carriers/producers_{count}",
                value=round(share, 3),
                unit="of write + xxh3 of the same records, 4,096 tokens x 48 layers x 8, on one core",
                bar=0.5,
                peers={"of a copy in memory + xxh3": round(of_copy, 3)},
            )
        )
    for tokens in (16, 64, 256, 1_024, 4_096):
        peers[f"{tokens} tokens"] = round(
            producers(1, tokens=tokens, total=min(3_000, 480_000 // tokens), limits=limits)[0], 3
        )
    long_enough = min((int(name.split()[0]) for name, share in peers.items() if share >= 0.5), default=0)
    found.append(
        Result(
            name="carriers/shortest_record_at_half_the_limit",
            value=long_enough,
            unit="tokens x 48 layers x 8 from which one producer reaches 0.5 of write + xxh3 (0: none)",
            peers=peers,
        )
    )
    return found


def beside_transfer_queue() -> list[Result]:
    """Put, get and verify over Ray beside TransferQueue's put and get; nothing where its environment is not there."""
    if not _QUEUE.exists():
        return []
    command = [str(_QUEUE), "-m", "benchmarks.queue_rounds"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=_ROOT)
    found = json.loads(done.stdout.splitlines()[-1])
    return [
        Result(
            name="carriers/ray_over_transfer_queue",
            value=round(found["ratio"], 3),
            unit="x TransferQueue's time, 32 records of 1,024 tokens x 48 layers x 8; ours is verified",
            bar=0.5,
            higher_is_better=False,
            peers={"Ray, s": round(found["ray"], 4), "TransferQueue, s": round(found["queue"], 4)},
        )
    ]


def main(*, full: bool = False) -> Iterator[Result]:
    """Measure; ``full`` changes nothing."""
    del full
    yield turns_bytes(32_768)
    yield silent_peers()
    yield from all_producers()
    yield from beside_transfer_queue()
