"""Producers and consumers in processes of their own, to be killed. They say over a pipe how far they are.

Top-level functions, for a fork server that has imported what they need.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from routeplane.record.record import RecordKey, RouteRecord
from routeplane.stream import new_stream, open_stream, shared, sockets
from routeplane.stream.sockets import Listener
from routeplane.stream.spooled import SpoolStream
from routeplane.testing.contracts.samples import SPEC, sample

__all__ = ["RECORDS", "child", "consume", "consume_spool", "listen", "produce", "produce_spool"]

#: What is sent: large enough that a batch takes several writes of a socket.
RECORDS: list[RouteRecord] = [sample(index, tokens=3_000) for index in range(12)]

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.stream.processes"])


def listen(address: str, have: dict[RecordKey, int] | None = None) -> Listener:
    """A listener at a tcp, unix or shm address."""
    if address.startswith("shm:"):
        return shared.listen(address, have=have)
    return sockets.listen(address, have=have)


@contextlib.contextmanager
def child(work: Callable[..., None], *arguments: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """Run ``work(pipe, *arguments)`` in a process; it is killed in the end, if not before."""
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=work, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()


def produce(pipe: Connection, address: str, first: int) -> None:
    """Send the records from ``first`` on, one a batch, saying after each that it was written."""
    with new_stream(address, SPEC, max_bytes=RECORDS[0].nbytes, timeout_s=60) as sink:
        for index in range(first, len(RECORDS)):
            sink.write(RECORDS[index])
            pipe.send(index)
    pipe.send("closed")


def consume(pipe: Connection, address: str, acknowledged: int) -> None:
    """Read and acknowledge some records, read one more, say so, and wait to be killed."""
    with listen(address) as listener:
        pipe.send(listener.address)
        reader = open_stream(listener, acknowledge="manual", timeout_s=60)
        records = iter(reader)
        for _ in range(acknowledged):
            next(records)
            reader.acknowledge()  # type: ignore[attr-defined]
        next(records)
        pipe.send("read")
        pipe.recv()


def produce_spool(pipe: Connection, folder: Path) -> None:
    """Write records to a spool, from where it stands, saying after each that it is acknowledged."""
    with SpoolStream(folder) as stream:
        sink: Any = new_stream(stream, SPEC, producer="p")
        for index in range(sink.session.next_sequence, len(RECORDS)):
            sink.write(RECORDS[index])
            pipe.send(index)
        sink.close()
    pipe.send("closed")


def consume_spool(pipe: Connection, folder: Path, acknowledged: int) -> None:
    """Read and acknowledge some blocks of a spool, read one more, say so, and wait to be killed."""
    with SpoolStream(folder) as stream:
        reader: Any = open_stream(stream, acknowledge="manual")
        records = iter(reader)
        for _ in range(acknowledged + 1):
            next(records)
        reader.acknowledge()  # the block of the last is not read to its end, as far as the reader knows
        pipe.send("read")
        pipe.recv()
