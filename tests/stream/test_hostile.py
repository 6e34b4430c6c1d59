"""Random requests and files beside honest traffic: the honest side gets everything once, and nothing raises untyped.

Short here; ``-m slow`` runs 20,000. One process holds the honest producer and reader, the server and the attacker.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl
import pytest

from routeplane.errors import RouteplaneError
from routeplane.stream import flight, folder, listen, new_stream, open_stream
from routeplane.stream.blocks import BlockLimits, ReadOptions
from routeplane.testing.builders import SPEC, facts, sample

#: Bytes that one block, or one body, may have.
MAX_BYTES = 2**20
COUNTS = [pytest.param(400, id="short"), pytest.param(20_000, id="whole", marks=pytest.mark.slow)]


def memory() -> int:
    """Resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


@contextlib.contextmanager
def within_bounds() -> Iterator[Callable[[], None]]:
    """Resident memory grows by at most twice MAX_BYTES and 64 MB; the caller looks now and then."""
    before, most = memory(), 0

    def look() -> None:
        nonlocal most
        most = max(most, memory() - before)

    yield look
    look()
    assert most <= 2 * MAX_BYTES + 64 * 2**20, f"{most / 2**20:.1f} MB"


def values(dice: random.Random) -> Any:
    """Anything that JSON holds."""
    plain = [None, True, -1, 0, 2**63, 1e308, "", "p", "../../etc", "default", "x" * 1000]
    return dice.choice([*plain, [], ["p", 0], ["p", -1], ["q", 2**70], {}, {"p": 1}, [[["a"]]]])


def request(dice: random.Random) -> bytes:
    """A request with the right names and wrong values, damaged, or noise."""
    names = ("block", "part", "group", "manifest", "producer", "limits", "run", "place", "next", "last", "keys")
    data = json.dumps({name: values(dice) for name in dice.sample(names, dice.randrange(len(names)))}).encode()
    kind = dice.randrange(3)
    if kind == 1:
        at = dice.randrange(len(data))
        data = data[:at] + bytes([dice.randrange(256)]) + data[at + 1 :]
    return dice.randbytes(dice.randrange(200)) if kind == 2 else data


def attack(client: Any, dice: random.Random) -> None:
    """One call of Flight that no honest client makes."""
    data = request(dice)
    descriptor = fl.FlightDescriptor.for_command(data)
    match dice.randrange(5):
        case 0:
            list(client.do_action(fl.Action(dice.choice(["state", "producers", "last_number", "?"]), data)))
        case 1:
            client.do_get(fl.Ticket(data)).read_all()
        case 2:
            call, answers = client.do_put(descriptor, flight._CHUNKS)
            for _ in range(dice.randrange(3)):
                chunk = pa.array([dice.randbytes(dice.randrange(1_000))], pa.binary())
                call.write_batch(pa.record_batch([chunk], schema=flight._CHUNKS))
            call.write_metadata(dice.choice([b"block", b"closed", data]))
            answers.read()
            call.close()
        case 3:
            call, answers = client.do_exchange(descriptor)
            call.write_metadata(data)
            answers.read_chunk()
            call.close()
        case 4:
            list(client.list_flights(data))


@pytest.mark.parametrize("count", COUNTS)
def test_requests_beside_honest_traffic_over_flight(tmp_path: Path, count: int) -> None:
    """Every call of the attacker fails as Flight's error with ours inside, or does nothing."""
    sent = [sample(index, tokens=50) for index in range(60)]
    untyped: list[str] = []
    with flight.Server(tmp_path / "place", max_block_bytes=MAX_BYTES) as server:
        limits = BlockLimits(block_bytes=1, max_bytes=MAX_BYTES, sync=False, timeout_s=60.0)
        writer = flight.open_writer(server.place, SPEC, run="run", producer="p", limits=limits)
        reader = flight.open_reader(server.place, producers=["p"], options=ReadOptions(timeout_s=60.0))
        records, client, dice = iter(reader), fl.connect(server.place), random.Random(0)
        with within_bounds() as look:
            came: list[Any] = []
            for index in range(count):
                try:
                    attack(client, dice)
                except (pa.ArrowException, fl.FlightError, StopIteration) as error:
                    if "Traceback" in str(error) or "Python exception" in str(error):
                        untyped.append(str(error)[:300])
                if index % (count // len(sent)) == 0 and len(came) < len(sent):
                    writer.write(sent[len(came)])
                    came.append(next(records))
                    look()
            writer.close()
            came += records
        client.close()
        reader.close()
    assert [] == untyped[:3]
    assert facts(sent) == facts(came)


def damaged(data: bytes, dice: random.Random) -> bytes:
    """One file, changed."""
    out, kind = bytearray(data), dice.randrange(4)
    at = dice.randrange(len(out))
    if kind == 0:
        out[at] ^= 1 << dice.randrange(8)
    elif kind == 1:
        del out[at:]
    elif kind == 2:
        out[at : at + 8] = dice.randbytes(8)
    else:
        out = bytearray(dice.randbytes(dice.randrange(2_000)))
    return bytes(out)


@pytest.mark.parametrize("count", COUNTS)
def test_damaged_files_of_a_place_are_typed_errors(tmp_path: Path, count: int) -> None:
    """Any file of a place, changed anywhere: all records, or an error of ours; never fewer as complete."""
    place = tmp_path / "place"
    sent = [sample(index) for index in range(3)]
    limits = BlockLimits(block_bytes=1, max_bytes=MAX_BYTES, sync=False)
    with folder.open_writer(place, SPEC, run="run", producer="p", limits=limits) as writer:
        for record in sent:
            writer.write(record)
    kept = {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and path.name != "lock"}
    files, dice, expected = sorted(kept), random.Random(0), facts(sent)
    with within_bounds() as look:
        for index in range(count):
            path = files[index % len(files)]
            path.write_bytes(damaged(kept[path], dice))
            with contextlib.suppress(RouteplaneError):
                with folder.open_reader(place, producers=1, options=ReadOptions(timeout_s=1.0, grace_s=0.0)) as reader:
                    came = facts(list(reader))
                    assert not reader.report().complete or expected == came, path
            path.write_bytes(kept[path])
            (place / "groups" / "default" / "position.json").unlink(missing_ok=True)
            if index % 50 == 0:
                look()
    with folder.open_reader(place, producers=1) as reader:
        assert expected == facts(list(reader))


@pytest.mark.parametrize("count", COUNTS)
def test_peers_beside_honest_producers_over_tcp(count: int) -> None:
    """Noise, half greetings and claimed lengths between honest streams: each of these comes whole, and once."""
    dice, streams = random.Random(0), 20
    sent = [sample(index, tokens=20) for index in range(streams)]
    came: list[str] = []
    with listen("tcp://127.0.0.1:0", handshake_s=0.5) as listener, within_bounds() as look:
        port = int(listener.address.rpartition(":")[2])

        def consume() -> None:
            # a peer that greets and goes is a producer that died: an error of ours, and the next stream is opened
            while len(came) < streams:
                with contextlib.suppress(RouteplaneError), open_stream(listener, timeout_s=120.0) as reader:
                    came.extend(facts(list(reader)))

        consumer = threading.Thread(target=consume)
        consumer.start()
        for index in range(count):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10.0) as peer:
                noise = dice.choice([b"", b"routes1\n", b"routes1\n" + b"\xff" * 4, b"GET / HTTP/1.1\r\n\r\n"])
                claimed = b"\xff\xff\xff\xff" + dice.randbytes(4)
                peer.sendall(noise if index % 4 else claimed + dice.randbytes(dice.randrange(300)))
            if index % (count // streams) == 0 and index // (count // streams) < streams:
                with new_stream(listener.address, SPEC, timeout_s=120.0) as sink:
                    sink.write(sent[index // (count // streams)])
                look()
        consumer.join(120.0)
        assert not consumer.is_alive()
    assert facts(sent) == came
