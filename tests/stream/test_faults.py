"""What happens when something dies: no acknowledged record is lost, none comes twice, none comes in part.

Producers and consumers are real processes, killed with SIGKILL; connections are cut by a proxy that stops after so many
bytes. Each error must say what to do.
"""

from __future__ import annotations

import contextlib
import io
import random
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from routeplane.errors import ErrorKind, RouteplaneError, TransportError, TruncatedError
from routeplane.record.record import RouteRecord
from routeplane.stream import MemoryStream, new_stream, open_stream
from routeplane.stream.frames import frames_of_buffer
from routeplane.stream.spooled import SpoolStream
from routeplane.testing.contracts.samples import SPEC, beside, facts, sample
from tests.stream.processes import (
    RECORDS,
    child,
    consume,
    consume_spool,
    listen,
    produce,
    produce_spool,
)

ROOT = Path(__file__).parents[2]
SMALL = [sample(index) for index in range(6)]


@pytest.fixture(params=["tcp", "unix", "shm"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a consumer listens."""
    return {
        "tcp": "tcp://127.0.0.1:0",
        "unix": f"unix://{tmp_path}/socket",
        "shm": f"shm://fault-{uuid.uuid4().hex}",
    }[str(request.param)]


# ----------------------------------------------------------------------------------------------------------------------
# Killed
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [4])
def test_a_producer_is_killed(address: str, read: int) -> None:
    """Whole records come, then an error that says what to do; one that starts over completes them, nothing twice."""
    came: list[RouteRecord] = []
    with listen(address) as listener:
        with child(produce, listener.address, 0) as (process, _):
            with open_stream(listener, timeout_s=60) as first:
                records = iter(first)
                came.extend(next(records) for _ in range(read))
                process.kill()
                process.join()
                with pytest.raises(TruncatedError, match="Let it write again") as caught:
                    came.extend(records)
        assert caught.value.kind is ErrorKind.PRODUCER_LOST
        assert facts(RECORDS[: len(came)]) == facts(came)
        assert len(came) < len(RECORDS)
        with child(produce, listener.address, 0) as (process, pipe):
            with open_stream(listener, timeout_s=60) as again:
                came.extend(again)
            assert [*range(len(RECORDS)), "closed"] == [pipe.recv() for _ in range(len(RECORDS) + 1)]
    assert facts(RECORDS) == facts(came)
    # acknowledged is what was yielded when the next was asked for
    assert again.repeated >= read - 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("acknowledged", [3])
def test_a_consumer_is_killed_before_it_acknowledged(address: str, acknowledged: int) -> None:
    """The producer hears of it, and still has what was not acknowledged: exactly that goes to the next consumer."""
    with child(consume, address, acknowledged) as (process, pipe):
        reached = pipe.recv()
        sink: Any = new_stream(reached, SPEC, max_bytes=4 * RECORDS[0].nbytes, timeout_s=60)
        written = []
        for record in RECORDS[: acknowledged + 2]:
            sink.write(record)
            written.append(record)
        assert "read" == pipe.recv()
        process.kill()
        process.join()
        with pytest.raises(TransportError, match="unacknowledged") as caught:
            sink.close()
    assert caught.value.kind is ErrorKind.CONNECTION
    # an acknowledgement that was on its way may be lost with its sender: hence `have`
    assert facts(RECORDS[acknowledged : acknowledged + 2]) == facts(sink.unacknowledged[-2:])

    came: list[RouteRecord] = []
    with listen(address, {record.key: record.checksum for record in RECORDS[:acknowledged]}) as listener:

        def read() -> None:
            with open_stream(listener, timeout_s=60) as reader:
                came.extend(reader)

        with beside(read) as raised:
            with new_stream(listener.address, SPEC, timeout_s=60) as again:
                for record in [*sink.unacknowledged, *RECORDS[len(written) :]]:
                    again.write(record)
    assert [] == raised
    assert facts(RECORDS[acknowledged:]) == facts(came)


@pytest.mark.parametrize("after", [0, 5])
def test_a_spools_producer_is_killed(tmp_path: Path, after: int) -> None:
    """All that was acknowledged is there for whoever opens the folder next, and the next producer goes on behind it."""
    folder = tmp_path / "spool"
    acknowledged = -1
    with child(produce_spool, folder) as (process, pipe):
        while acknowledged < after:
            acknowledged = pipe.recv()
        process.kill()
        process.join()
        with contextlib.suppress(EOFError):
            while True:
                acknowledged = pipe.recv()
    kept = len(list(folder.glob("p-*/*.arrows")))
    assert acknowledged + 1 <= kept <= acknowledged + 2
    with child(produce_spool, folder) as (process, pipe):
        said = [pipe.recv()]
        while said[-1] != "closed":
            said.append(pipe.recv())
    # a block on its way when the producer died is known, or comes again: never neither
    assert acknowledged + 1 <= said[0] <= acknowledged + 2
    with SpoolStream(folder) as stream, open_stream(stream) as reader:
        assert facts(RECORDS) == facts(list(reader))
        assert reader.report().complete


@pytest.mark.parametrize("acknowledged", [4])
def test_a_spools_consumer_is_killed(tmp_path: Path, acknowledged: int) -> None:
    """What it read and did not acknowledge comes again, what it acknowledged never; nothing is left in the end."""
    folder = tmp_path / "spool"
    with SpoolStream(folder) as stream, new_stream(stream, SPEC) as sink:
        for record in RECORDS:
            sink.write(record)
    with child(consume_spool, folder, acknowledged) as (process, pipe):
        assert "read" == pipe.recv()
        process.kill()
        process.join()
    with SpoolStream(folder) as stream, open_stream(stream) as reader:
        assert facts(RECORDS[acknowledged:]) == facts(list(reader))
    assert [] == list(folder.glob("p-*/*"))
    with SpoolStream(folder) as stream, open_stream(stream) as reader:
        assert [] == list(reader)
        assert reader.report().complete


def test_a_spool_has_one_owner(tmp_path: Path) -> None:
    """A second process, or thread, that opens the folder is refused, and a dead owner is none."""
    with SpoolStream(tmp_path):
        with pytest.raises(RouteplaneError, match="stop the other") as caught:
            SpoolStream(tmp_path)
        assert caught.value.kind is ErrorKind.PRODUCER_TAKEN
    SpoolStream(tmp_path).close()


# ----------------------------------------------------------------------------------------------------------------------
# Cut
# ----------------------------------------------------------------------------------------------------------------------


def whole_stream() -> bytes:
    """What a producer of SMALL sends, one record a batch."""
    sink = io.BytesIO()
    with new_stream(sink, SPEC, max_bytes=1, encoding="narrow") as writer:
        for record in SMALL:
            writer.write(record)
    return sink.getvalue()


def boundaries(stream: bytes) -> list[int]:
    """Where messages begin and end."""
    found = [0]
    for frame in frames_of_buffer(pa.py_buffer(stream)):
        found.append(found[-1] + frame.data.size)
    return [*found, len(stream)]


@contextlib.contextmanager
def cut_after(target: str, nbytes: int) -> Iterator[str]:
    """A proxy to a consumer that hangs up on both sides after so many bytes of the producer; its address."""
    family = socket.AF_INET if target.startswith("tcp") else socket.AF_UNIX
    host, _, port = target.removeprefix("tcp://").rpartition(":")
    proxy = f"shm://{Path(target).name.removeprefix('routeplane-')}-proxy"
    to: Any = (host, int(port)) if family == socket.AF_INET else target
    server = socket.socket(family)
    server.bind(("127.0.0.1", 0) if family == socket.AF_INET else f"{target}-proxy")
    server.listen()

    def forward() -> None:
        producer, _ = server.accept()
        with producer, socket.socket(family) as consumer:
            consumer.connect(to)
            back = threading.Thread(target=_pump_back, args=(consumer, producer), daemon=True)
            back.start()
            left = nbytes
            first = True
            while left:
                data, files, _, _ = socket.recv_fds(producer, min(left, 4096), 1 if first else 0)
                if not data:
                    break
                socket.send_fds(consumer, [data], list(files)) if files else consumer.sendall(data)
                for file in files:
                    socket.close(file)
                first, left = False, left - len(data)
            for side in (producer, consumer):
                with contextlib.suppress(OSError):
                    side.shutdown(socket.SHUT_RDWR)
            back.join()

    with server, beside(forward):
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}" if family == socket.AF_INET else proxy
    Path(f"{target}-proxy").unlink(missing_ok=True)


def _pump_back(consumer: socket.socket, producer: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := consumer.recv(4096):
            producer.sendall(data)


def read_into(came: list[RouteRecord], listener: Any, errors: list[RouteplaneError]) -> None:
    """Read one connection's stream."""
    try:
        with open_stream(listener, timeout_s=30) as reader:
            for record in reader:
                came.append(record)
    except RouteplaneError as error:
        errors.append(error)


def check_cut(listener: Any, target: str, *, nbytes: int) -> None:
    """Send through a proxy that cuts, then what is unacknowledged once more: each record comes once, in order."""
    came: list[RouteRecord] = []
    errors: list[RouteplaneError] = []
    unacknowledged: tuple[RouteRecord, ...] = ()
    with cut_after(target, nbytes) as proxy:
        with beside(lambda: read_into(came, listener, errors)):
            sink: Any = None
            try:
                sink = new_stream(proxy, SPEC, max_bytes=1, encoding="narrow", timeout_s=30)
                for record in SMALL:
                    sink.write(record)
                sink.close()
            except TransportError as error:
                errors.append(error)
            unacknowledged = () if sink is None else tuple(sink.unacknowledged)
    sent = SMALL if sink is None else [*unacknowledged, *SMALL[_position(unacknowledged) :]]
    if errors:
        assert {ErrorKind.CONNECTION} >= {error.kind for error in errors if isinstance(error, TransportError)}
    again: list[RouteplaneError] = []
    with beside(lambda: read_into(came, listener, again)):
        with new_stream(listener.address, SPEC, timeout_s=30) as sink:
            for record in sent:
                sink.write(record)
    assert [] == again
    assert facts(SMALL) == facts(came)


def _position(unacknowledged: tuple[RouteRecord, ...]) -> int:
    """How many of SMALL were written when the connection broke; everything, where none is outstanding."""
    keys = [record.key for record in SMALL]
    return keys.index(unacknowledged[-1].key) + 1 if unacknowledged else len(SMALL)


CUTS = [*boundaries(whole_stream()), *random.Random(7).sample(range(len(whole_stream())), 24)]


@pytest.mark.parametrize("nbytes", CUTS)
def test_a_connection_is_cut(nbytes: int) -> None:
    """At every message boundary and at random bytes: nothing is lost, nothing comes twice, nothing in part."""
    with listen("tcp://127.0.0.1:0") as listener:
        check_cut(listener, listener.address, nbytes=nbytes)


@pytest.mark.parametrize("nbytes", [*range(0, 8 + 16 * (len(SMALL) + 3) + 1, 8), 5, 9, 23, 101])
def test_a_segments_connection_is_cut(nbytes: int) -> None:
    """The socket beside a segment says where messages lie: cut anywhere, the same holds."""
    name = f"cut-{uuid.uuid4().hex}"
    with listen(f"shm://{name}") as listener:
        check_cut(listener, f"/dev/shm/routeplane-{name}", nbytes=nbytes)


# ----------------------------------------------------------------------------------------------------------------------
# Full, slow, and out of time
# ----------------------------------------------------------------------------------------------------------------------


def test_a_segment_that_is_too_large() -> None:
    """Memory that is not there is an error at the start, not a signal in the middle."""
    with listen(f"shm://large-{uuid.uuid4().hex}") as listener:
        with pytest.raises(TransportError, match="smaller max_bytes") as caught:
            new_stream(listener.address, SPEC, max_bytes=2**50, timeout_s=30)
    assert caught.value.kind is ErrorKind.NO_ROOM


def test_a_producer_waits_no_longer_than_told(address: str) -> None:
    """A consumer that does not acknowledge is an error in the time that was given, and nothing is lost."""
    with listen(address) as listener:
        sink: Any = new_stream(listener.address, SPEC, max_bytes=SMALL[0].nbytes, timeout_s=0.5)
        sink.write(SMALL[0])
        with open_stream(listener, acknowledge="manual", timeout_s=30) as reader:
            next(iter(reader))
            with pytest.raises(TransportError, match="still yours") as caught:
                _write_all(sink, SMALL[1:])
    assert caught.value.kind is ErrorKind.TIMED_OUT
    assert facts(SMALL[: len(sink.unacknowledged)]) == facts(sink.unacknowledged)


def _write_all(sink: Any, records: list[RouteRecord]) -> None:
    for record in records:
        sink.write(record)


def test_nobody_listens(tmp_path: Path) -> None:
    """A producer without a consumer is told where it looked."""
    with pytest.raises(TransportError, match="start it") as caught:
        new_stream(f"unix://{tmp_path}/nobody", SPEC, timeout_s=0.2)
    assert caught.value.kind is ErrorKind.TIMED_OUT


@pytest.mark.parametrize("kind", ["memory", "spool"])
@pytest.mark.parametrize("jump", [61.0, 3_600.0, -1e6, 1e9])
def test_a_slow_consumer_and_a_clock_that_jumps(tmp_path: Path, kind: str, jump: float) -> None:
    """A consumer that takes a minute for a record, or a clock that is set, loses nothing and repeats nothing."""
    now = [5_000.0]

    def clock() -> float:
        return now[0]

    stream: Any = (
        MemoryStream(groups=["default"], lease_s=30.0, clock=clock)
        if kind == "memory"
        else SpoolStream(tmp_path / "spool", lease_s=30.0, clock=clock)
    )
    sink = new_stream(stream, SPEC)
    came = []
    for record in SMALL[:3]:
        sink.write(record)
    with open_stream(stream) as reader:
        for record in reader:
            came.append(record)
            now[0] += jump
            if len(came) == 1:
                sink.write(SMALL[3])  # a producer that is as late goes on
            if len(came) == 2:
                sink.close()
    assert facts(SMALL[:4]) == facts(came)
    assert reader.report().complete
    if kind == "spool":
        stream.close()
