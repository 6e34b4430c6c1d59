"""A hop between two processes of one host: shared memory and TCP, against copying the routes once and raw TCP.

Payload: as in ``bench_read``. A hop ends when the consumer, another process, has read, checked (rows and checksums) and
acknowledged every record; its ends run at once, as they do in use. Streams stay open over all rounds, so that memory is
mapped once. Also whether cost grows linearly, over two decades of records and of bytes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.bench_read import SPEC, lengths, record
from benchmarks.measure import Result, relative_rates
from routeplane.record.record import RouteRecord
from routeplane.stream import MemoryStream, new_stream, open_stream, shared, sockets

ROUNDS = 7
RATE = "x np.copyto rate"

# ----------------------------------------------------------------------------------------------------------------------
# The other process
# ----------------------------------------------------------------------------------------------------------------------


def consume(pipe: Any, address: str, alarms: str) -> None:
    """Listen, and read to the end."""
    listener = (shared if address.startswith("shm") else sockets).listen(address)
    with listener:
        pipe.send(listener.address)
        with open_stream(listener, on_alarm=alarms) as reader:  # type: ignore[arg-type]
            for _ in reader:
                pass
    pipe.send("done")


def swallow(pipe: Any, nbytes: int) -> None:
    """Receive so many bytes into the same memory, answer with one, again and again."""
    memory = memoryview(bytearray(nbytes))
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        connection, _ = server.accept()
        with connection:
            came = 0
            while size := connection.recv_into(memory[came:]):
                came += size
                if came == nbytes:
                    connection.sendall(b".")
                    came = 0


@contextlib.contextmanager
def beside(work: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """Run ``work`` in a process; what it says first."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    yield ours.recv()
    process.join(60)
    process.kill()


# ----------------------------------------------------------------------------------------------------------------------
# Hops
# ----------------------------------------------------------------------------------------------------------------------


class Rounds:
    """The same records under another attempt each round, made beforehand: a key goes through a stream once."""

    def __init__(self, records: Sequence[RouteRecord], rounds: int) -> None:
        self._rounds = iter(
            [[replace(each, attempt=number, checksum=None) for each in records] for number in range(rounds)]
        )

    def send(self, sink: Any) -> None:
        """One round, to the last acknowledgement."""
        for each in next(self._rounds):
            sink.write(each)
        sink.drain()


def hops(records: Sequence[RouteRecord]) -> list[Result]:
    """Rates of a hop, as shares of one copy of the routes and of raw TCP."""
    source = np.concatenate([each.routes for each in records])
    target = np.zeros_like(source)
    payload = source.data.cast("B")
    with contextlib.ExitStack() as stack:
        sinks = {}
        for name, address, alarms in (
            ("shared memory", f"shm://bench-{uuid.uuid4().hex}", "ignore"),
            ("shared memory, alarms too", f"shm://bench-{uuid.uuid4().hex}", "count"),
            ("TCP", "tcp://127.0.0.1:0", "ignore"),
        ):
            reached = stack.enter_context(beside(consume, address, alarms))
            sinks[name] = stack.enter_context(new_stream(reached, SPEC, encoding="plain"))
        port = stack.enter_context(beside(swallow, len(payload)))
        raw = stack.enter_context(socket.create_connection(("127.0.0.1", port)))

        def raw_tcp() -> None:
            raw.sendall(payload)
            raw.recv(1)

        ways: dict[str, Callable[[], object]] = {"np.copyto": lambda: np.copyto(target, source), "raw TCP": raw_tcp}
        for name, sink in sinks.items():
            rounds = Rounds(records, ROUNDS + 1)
            ways[name] = lambda rounds=rounds, sink=sink: rounds.send(sink)  # type: ignore[misc]
        rates = relative_rates(ways, yardstick="np.copyto", rounds=ROUNDS)
    others = {name: rates[name] for name in ("np.copyto", "raw TCP", "TCP", "shared memory, alarms too")}
    return [
        Result(
            name="transport/shared_memory_hop",
            value=round(1 / rates["shared memory"], 3),
            unit="x np.copyto time",
            bar=2.0,
            higher_is_better=False,
            peers={name: round(1 / rate, 3) for name, rate in others.items()},
        ),
        Result(
            name="transport/tcp",
            value=round(rates["TCP"] / rates["raw TCP"], 3),
            unit="x raw TCP rate",
            bar=0.8,
        ),
    ]


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


def main(*, full: bool = False) -> list[Result]:
    """Measure on 201 MB, or on 50 MB."""
    tokens = 4_096 if full else 1_024
    records = [record(index, length) for index, length in enumerate(lengths(tokens))]
    return hops(records) + growth()
