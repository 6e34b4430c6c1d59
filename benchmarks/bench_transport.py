"""A hop between two processes of one host: a folder of blocks on disk and on /dev/shm, and TCP.

Payload: as in ``bench_read``. A hop begins when the producer opens its writer, and ends when the consumer, another
process, has read, checked (rows and checksums) and acknowledged every record; its ends run at once, as they do in use.
Compared with one copy of the routes, and with raw TCP under the same checks. Also whether cost grows linearly. What the
folder replaced was measured beside it before it went: ``measured_once.json``.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import xxhash

from benchmarks.bench_read import ROWS, SPEC, STAGE, lengths, record
from benchmarks.measure import Result, relative_rates
from routeplane.batch import BatchOptions, microbatches
from routeplane.batch.collation import BatchBuffers
from routeplane.record.policy import ReadPolicy
from routeplane.record.record import RouteRecord
from routeplane.record.spec import RouteSpec
from routeplane.record.validate import check_routes
from routeplane.stream import MemoryStream, flight, folder, listen, new_stream, open_stream
from routeplane.stream.blocks import ReadOptions

ROUNDS = 7
# ----------------------------------------------------------------------------------------------------------------------
# The other process
# ----------------------------------------------------------------------------------------------------------------------


def consume_sockets(pipe: Any) -> None:
    """Read stream after stream to its end."""
    with listen("tcp://127.0.0.1:0") as listener:
        pipe.send(listener.address)
        while True:
            with open_stream(listener, on_alarm="ignore") as reader:
                for _ in reader:
                    pass
            pipe.send("done")


def consume_folders(pipe: Any) -> None:
    """Read each place that is named to its end."""
    pipe.send("ready")
    while True:
        with folder.open_reader(pipe.recv(), producers=1, policy=ReadPolicy(on_alarm="ignore")) as reader:
            for _ in reader:
                pass
        pipe.send("done")


def swallow(pipe: Any, shapes: Sequence[tuple[int, ...]]) -> None:
    """Receive the rows of so many records into memory that is there, check each when it came, answer; again and again.

    The checks are those of a stream: every row is legal, and the hash of all of a record's bytes.
    """
    memory = [np.zeros(shape, np.int16) for shape in shapes]
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            while True:
                for routes in memory:
                    left = routes.data.cast("B")
                    while left:
                        size = connection.recv_into(left)
                        if size == 0:
                            return
                        left = left[size:]
                    check_routes(routes, SPEC)
                    xxhash.xxh3_64_intdigest(routes.data)
                connection.sendall(b".")


@contextlib.contextmanager
def beside(work: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, Any]]:
    """Run ``work`` in a process: the pipe to it, and what it says first."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    try:
        yield ours, ours.recv()
    finally:
        process.kill()
        process.join()


# ----------------------------------------------------------------------------------------------------------------------
# Hops
# ----------------------------------------------------------------------------------------------------------------------


def folder_hop(pipe: Any, base: str | None, records: Sequence[RouteRecord]) -> None:
    """One place of its own, from the first record to the reader's end."""
    place = tempfile.mkdtemp(dir=base)
    pipe.send(place)
    with folder.open_writer(place, SPEC, run="bench", producer="p", encoding="plain") as writer:
        for each in records:
            writer.write(each)
    pipe.recv()
    shutil.rmtree(place)


def socket_hop(pipe: Any, address: str, records: Sequence[RouteRecord]) -> None:
    """One stream over a connection of its own."""
    with new_stream(address, SPEC, encoding="plain") as sink:
        for each in records:
            sink.write(each)
    pipe.recv()


def hops(records: Sequence[RouteRecord]) -> list[Result]:
    """Rates of a hop, as shares of one copy of the routes and of raw TCP."""
    source = np.concatenate([each.routes for each in records])
    target = np.zeros_like(source)
    with contextlib.ExitStack() as stack:
        disk, _ = stack.enter_context(beside(consume_folders))
        memory, _ = stack.enter_context(beside(consume_folders))
        tcp, address = stack.enter_context(beside(consume_sockets))
        _, port = stack.enter_context(beside(swallow, [each.routes.shape for each in records]))
        raw = stack.enter_context(socket.create_connection(("127.0.0.1", port)))

        def raw_tcp() -> None:
            for each in records:
                xxhash.xxh3_64_intdigest(each.routes.data)
                raw.sendall(each.routes.data.cast("B"))
            raw.recv(1)

        rates = relative_rates(
            {
                "np.copyto": lambda: np.copyto(target, source),
                "raw TCP with the checks": raw_tcp,
                "TCP": lambda: socket_hop(tcp, address, records),
                "folder": lambda: folder_hop(disk, None, records),
                "/dev/shm": lambda: folder_hop(memory, "/dev/shm", records),
            },
            yardstick="np.copyto",
            rounds=ROUNDS,
        )
    times = {name: round(1 / rate, 3) for name, rate in rates.items()}
    return [
        Result(name="transport/folder_hop", value=times["folder"], unit="x np.copyto time", peers=times),
        Result(name="transport/dev_shm_hop", value=times["/dev/shm"], unit="x np.copyto time", peers=times),
        Result(
            name="transport/tcp",
            value=round(rates["TCP"] / rates["raw TCP with the checks"], 3),
            unit="x rate of raw TCP whose ends hash the rows and check that they are legal",
            bar=0.8,
        ),
    ]


# ----------------------------------------------------------------------------------------------------------------------
# A stage by fetch
# ----------------------------------------------------------------------------------------------------------------------


def relay(pipe: Any, place: str) -> None:
    """Serve a folder of blocks, cutting where they lie, until the process ends."""
    with flight.Server(place) as server:
        pipe.send(server.place)
        pipe.recv()


def fetched_stage(records: Sequence[RouteRecord]) -> Result:
    """Processor time in a rank's process: its stage by ``fetch``, over reading the folder's records with all layers."""
    places = [tempfile.mkdtemp() for _ in range(2)]  # one reader each
    for place in places:
        with folder.open_writer(place, SPEC, run="bench", producer="p", encoding="plain") as writer:
            for each in records:
                writer.write(each)
    pools = [BatchBuffers() for _ in range(3)]
    once = ReadOptions(acknowledge="call")

    def rows_of(parts: Iterable[RouteRecord], spec: RouteSpec, pool: BatchBuffers) -> int:
        made = microbatches(parts, spec=spec, tokens=ROWS, options=BatchOptions(buffers=pool))
        return sum(int(batch.lengths.sum()) for batch in pool.releasing(made))

    def read() -> int:
        with folder.open_reader(places[0], producers=1, options=once) as source:
            return rows_of(source, SPEC, pools[0])

    with beside(relay, places[1]) as (_, address), flight.open_reader(address, producers=1, options=once) as reader:
        names = list(reader.names())

        def fetch(layers: Sequence[int], pool: BatchBuffers) -> int:
            parts = (each for name in names for each in reader.fetch(name, layer_ids=layers))
            return rows_of(parts, SPEC.select(layers), pool)

        ways: dict[str, Callable[[], int]] = {
            "read all": read,
            "fetch the stage": lambda: fetch(STAGE, pools[1]),
            "fetch all": lambda: fetch(SPEC.layer_ids, pools[2]),
        }
        tokens = sum(each.num_tokens for each in records)
        if any(work() != tokens for work in ways.values()):
            raise RuntimeError("expected every token of the records, got others")
        rates = relative_rates(ways, yardstick="read all", rounds=ROUNDS, clock=process_time)
    for place in places:
        shutil.rmtree(place)
    times = {name: round(1 / rate, 3) for name, rate in rates.items()}
    return Result(
        name="transport/fetched_stage",
        value=times.pop("fetch the stage"),
        unit=f"CPU time of a rank, {len(STAGE)} layers by fetch over Flight, over reading {SPEC.num_layers} itself",
        bar=0.3,
        higher_is_better=False,
        peers=times,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Growth
# ----------------------------------------------------------------------------------------------------------------------


def growth() -> list[Result]:
    """Time of 100 times as much over 100 times the time of as much, through memory: records, and bytes of a record."""
    small = [replace(record(index, 16), attempt=index, checksum=None) for index in range(5_000)]
    few, many = _seconds([small[:50]] * 20), _seconds([small] * 3)
    short = [record(index, 40) for index in range(8)]
    long = [record(index, 4_000) for index in range(8)]
    shorter, longer = _seconds([short] * 20), _seconds([long] * 3)
    return [
        Result(
            name="transport/linear_in_records",
            value=round(many / (100 * few), 3),
            unit="time per record, 5,000 over 50 records",
            bar=1.5,
            higher_is_better=False,
        ),
        Result(
            name="transport/linear_in_bytes",
            value=round(longer / (100 * shorter), 3),
            unit="time per byte, 100x longer records over 1x",
            bar=1.5,
            higher_is_better=False,
        ),
    ]


def _seconds(rounds: Sequence[Sequence[RouteRecord]]) -> float:
    spent = []
    for records in rounds:
        stream = MemoryStream()
        start = perf_counter()
        with new_stream(stream, SPEC, max_bytes=2**40) as sink:
            for each in records:
                sink.write(each)
        with open_stream(stream, on_alarm="ignore") as reader:
            for _ in reader:
                pass
        spent.append(perf_counter() - start)
    return median(spent)


def main(*, full: bool = False) -> Iterator[Result]:
    """Measure on 201 MB, or on 50 MB."""
    tokens = 4_096 if full else 1_024
    records = [record(index, length) for index, length in enumerate(lengths(tokens))]
    yield from hops(records)
    yield fetched_stage(records)
    yield from growth()
