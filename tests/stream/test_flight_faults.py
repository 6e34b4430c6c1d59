"""Faults of streams over Flight: processes that are killed and wires that are cut. Nothing acknowledged is lost.

Each test really kills or cuts, and then looks at what the consumers got: every record once, whole, in order.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from routeplane.errors import ErrorKind, TransportError, TruncatedError
from routeplane.record.record import RouteRecord
from routeplane.stream import new_stream, open_stream
from routeplane.stream.flight import FlightPlane
from routeplane.stream.flight_service import FlightService, ServiceOptions
from routeplane.testing.contracts.samples import SPEC, beside, facts, sample
from tests.stream.peers import CuttingWire, consume, killed, produce, start


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Now."""
        return self.now


@pytest.fixture
def clock() -> Clock:
    """The service's clock."""
    return Clock()


@pytest.fixture
def service(clock: Clock) -> Iterator[FlightService]:
    """A service for one producer and one group."""
    with FlightService(ServiceOptions(), clock=clock) as running:
        yield running


def read_all(place: Any) -> list[RouteRecord]:
    """All records, through as many connections as it takes, as a consumer that keeps what it read, block by block, and
    says so when it comes back. ``produce`` writes two to a block."""
    came: list[RouteRecord] = []
    for _ in range(64):
        del came[len(came) // 2 * 2 :]  # half of a block comes again
        try:
            with open_stream(place, consumer="c", cursor={"p": len(came) // 2}) as reader:
                for record in reader:
                    came.append(record)
                return came
        except TransportError as error:
            if error.kind != ErrorKind.CONNECTION:
                raise
    raise AssertionError("expected an end within 64 connections")


# ----------------------------------------------------------------------------------------------------------------------
# Processes
# ----------------------------------------------------------------------------------------------------------------------


def test_a_killed_producer(service: FlightService, clock: Clock) -> None:
    """What it was answered for arrives; its loss is told; under its name another goes on behind that, nothing twice."""
    plane = FlightPlane(service.location, linger=False)
    assert killed(start(produce, plane, range(7), producer="p", die_before=5))

    came: list[RouteRecord] = []
    opened: Any = open_stream(plane, acknowledge="manual", consumer="c")
    with opened as reader:
        records = iter(reader)
        came = [next(records) for _ in range(4)]  # two blocks; the fifth record was held, and never sent
        clock.now += 1_800
        service.tick()
        with pytest.raises(TruncatedError) as caught:
            next(records)
        assert ErrorKind.PRODUCER_LOST == caught.value.kind
        reader.acknowledge()

    with new_stream(plane, SPEC, producer="p") as sink:
        accepted = sink.session.totals.records  # type: ignore[attr-defined]
        assert 4 == accepted
        for index in range(accepted, 7):
            sink.write(sample(index))
    with open_stream(plane, consumer="c") as reader:
        came += reader
    assert facts([sample(index) for index in range(7)]) == facts(came)
    assert reader.report().complete


def test_a_killed_consumer(service: FlightService, tmp_path: Path) -> None:
    """What it read and did not acknowledge comes to the next one; what it did acknowledge does not."""
    plane = FlightPlane(service.location, linger=False)
    produce(plane, range(9), producer="p")

    log = tmp_path / "log"
    assert killed(start(consume, plane, log, consumer="c", acknowledge_after=5, die_after=8))
    done = log.read_text().split()
    with open_stream(plane, consumer="c") as reader:
        rest = [record.sample_id for record in reader]

    assert [f"sample-{index}" for index in range(9)] == done + rest
    assert 4 == len(done)


def test_a_slow_consumer_keeps_what_it_has(service: FlightService, clock: Clock) -> None:
    """A consumer that is busy for an hour is not taken for dead where nobody stands in for it."""
    plane = FlightPlane(service.location, linger=False)
    produce(plane, range(6), producer="p")

    came: list[RouteRecord] = []
    with open_stream(plane) as reader:
        for record in reader:
            came.append(record)
            clock.now += 3_600
            service.tick()
    assert facts([sample(index) for index in range(6)]) == facts(came)


class Served:
    """``routeplane serve`` in a process of its own, always on the same port."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._process: subprocess.Popen[str] | None = None
        self.plane = FlightPlane(f"grpc://127.0.0.1:{self._port}")

    def start(self, *options: str) -> None:
        """Start it, and wait until it serves."""
        program = "import sys; from routeplane.cli.main import main; sys.exit(main())"
        command = [sys.executable, "-c", program, "serve", "--json", "--port", str(self._port), "--producers", "1"]
        self._process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self.plane.location == json.loads(self._process.stdout.readline())["location"]

    def end(self, how: signal.Signals) -> int:
        """End it by a signal; its exit status."""
        assert self._process is not None
        self._process.send_signal(how)
        status = self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return status


def test_a_killed_service_without_a_spool() -> None:
    """Producers hold what was not acknowledged, and send it again to the service that comes after; consumers go on by
    their cursor. Nothing is lost and nothing comes twice."""
    served = Served()
    served.start()
    sent = [sample(index) for index in range(12)]
    came: list[RouteRecord] = []

    with beside(lambda: produce(served.plane, range(12), producer="p")) as raised:
        reader: Any = open_stream(served.plane, acknowledge="manual", consumer="c")
        records = iter(reader)
        came = [next(records) for _ in range(5)]
        reader.acknowledge()  # two blocks of two: the fifth record's is not all read
        came = came[:4]
        assert -signal.SIGKILL == served.end(signal.SIGKILL)
        with pytest.raises(TransportError) as caught:
            list(records)
        assert ErrorKind.CONNECTION == caught.value.kind
        served.start()
        with open_stream(served.plane, consumer="c", cursor=reader.cursor) as again:
            came += again
    assert [] == raised
    assert facts(sent) == facts(came)
    assert 0 == served.end(signal.SIGTERM)


def test_a_killed_service_with_a_spool(tmp_path: Path) -> None:
    """Producers were answered once it was on disk, and are gone; the service that comes after has all of it."""
    served = Served()
    options = ("--spool", str(tmp_path / "spool"))
    served.start(*options)
    produce(served.plane, range(9), producer="p")  # its close does not wait for any consumer
    reader: Any = open_stream(served.plane, acknowledge="manual", consumer="c")
    records = iter(reader)
    came = [next(records) for _ in range(5)][:4]
    reader.acknowledge()
    assert -signal.SIGKILL == served.end(signal.SIGKILL)

    served.start(*options)
    with open_stream(served.plane, consumer="c") as again:
        came += again
    assert facts([sample(index) for index in range(9)]) == facts(came)
    assert again.report().complete
    assert 0 == served.end(signal.SIGTERM)


@pytest.mark.parametrize("durability", ["memory", "spool"])
def test_a_service_that_is_stopped_and_started(durability: str, tmp_path: Path) -> None:
    """It is no worse than one that is killed: a producer that waits for room goes on with the next one."""
    spool = str(tmp_path / "spool") if durability == "spool" else None
    options = ServiceOptions(max_bytes=1, spool=spool)
    first = FlightService(options)
    plane = FlightPlane(first.location)
    # the last one stays until the producer has heard its answer
    with contextlib.ExitStack() as last, beside(lambda: produce(plane, range(6), producer="p")) as raised:
        reader: Any = open_stream(plane, acknowledge="manual", consumer="c")
        records = iter(reader)
        assert facts([sample(0)]) == facts([next(records)])  # nothing is acknowledged, and there is no room
        first.stop()
        first.stop()
        with pytest.raises(TransportError) as caught:
            list(records)
        assert ErrorKind.CONNECTION == caught.value.kind
        last.enter_context(FlightService(options, port=int(plane.location.rpartition(":")[2])))
        with open_stream(plane, consumer="c") as again:
            came = list(again)
    assert [] == raised
    assert facts([sample(index) for index in range(6)]) == facts(came)


# ----------------------------------------------------------------------------------------------------------------------
# Wires
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_a_producers_wire_is_cut_at_random(service: FlightService, seed: int) -> None:
    """Cut at bytes anywhere in anything that it says, a producer comes back and sends what did not arrive, once."""
    random = Random(seed)
    port = int(service.location.rpartition(":")[2])
    sent = [sample(index) for index in range(8)]
    with CuttingWire(port, [random.randrange(1, 6_000) for _ in range(4)]) as wire:
        with beside(lambda: produce(FlightPlane(f"grpc://127.0.0.1:{wire.port}"), range(8), producer="p")) as raised:
            with open_stream(FlightPlane(service.location)) as reader:
                came = list(reader)
        assert [] == raised
        assert wire.made > 1
    assert facts(sent) == facts(came)
    assert reader.report().complete


@pytest.mark.parametrize("seed", range(6))
def test_a_consumers_wire_is_cut_at_random(service: FlightService, seed: int) -> None:
    """Cut anywhere, a consumer opens again under its name and is given what it had not acknowledged."""
    random = Random(seed)
    port = int(service.location.rpartition(":")[2])
    produce(FlightPlane(service.location, linger=False), range(8), producer="p")
    with CuttingWire(port, [random.randrange(1, 4_000) for _ in range(4)]) as wire:
        came = read_all(FlightPlane(f"grpc://127.0.0.1:{wire.port}"))
        assert wire.made > 1
    assert facts([sample(index) for index in range(8)]) == facts(came)


@contextlib.contextmanager
def serving() -> Iterator[tuple[FlightPlane, int]]:
    """A service of its own for each cut, and its port."""
    with FlightService(ServiceOptions(groups=("default",), producers=1)) as service:
        yield FlightPlane(service.location), int(service.location.rpartition(":")[2])


def produced_through(cuts: list[int]) -> int:
    """Produce through a wire that is cut after so many messages of the producer, and check what came; the messages of
    its first connection."""
    with serving() as (plane, port), CuttingWire(port, cuts, frames="client") as wire:
        through = FlightPlane(f"grpc://127.0.0.1:{wire.port}")
        with beside(lambda: produce(through, range(4), producer="p")) as raised:
            with open_stream(plane) as reader:
                came = list(reader)
        assert [] == raised
        assert facts([sample(index) for index in range(4)]) == facts(came)
        assert reader.report().complete
        return wire.counted


def consumed_through(cuts: list[int]) -> int:
    """The same for a consumer, whose messages are the service's answers."""
    with serving() as (plane, port), CuttingWire(port, cuts, frames="server") as wire:
        produce(FlightPlane(plane.location, linger=False), range(4), producer="p")
        came = read_all(FlightPlane(f"grpc://127.0.0.1:{wire.port}"))
        assert facts([sample(index) for index in range(4)]) == facts(came)
        return wire.counted


@pytest.mark.parametrize("through", [produced_through, consumed_through])
def test_a_wire_is_cut_at_every_message_boundary(through: Callable[[list[int]], int]) -> None:
    """After each HTTP/2 frame of an undisturbed connection in turn: everything comes, once, whole, in order."""
    messages = through([])
    assert messages > 8
    for boundary in range(messages):
        through([boundary])
