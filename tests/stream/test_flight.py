"""The carrier's contract over a real Flight server, and what the server alone has to refuse."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl
import pytest
import trustme

from routeplane.errors import DataError, ErrorKind, RouteplaneError, TransportError, UsageError
from routeplane.record.interfaces import BlockName
from routeplane.stream import flight as carrier
from routeplane.stream import folder
from routeplane.testing.builders import SPEC, facts, sample
from routeplane.testing.contracts import CarrierContract
from tests.stream.streams import flip_in_rows


class TestFlight(CarrierContract):
    """A folder, served."""

    def place(self, tmp_path: Path) -> Any:
        """A server on the loopback."""
        self.folder = tmp_path / "place"
        return carrier.Server(self.folder)

    def release(self, place: Any) -> None:
        """Stop it."""
        place.shutdown()

    def writer(self, place: Any, **options: Any) -> Any:
        """A client that writes."""
        return carrier.open_writer(place.place, SPEC, **options)

    def reader(self, place: Any, **options: Any) -> Any:
        """A client that reads."""
        return carrier.open_reader(place.place, **options)

    def kill(self, place: Any, writer: Any) -> None:
        """The call ends, as it does with its process."""
        writer._slot.release()

    def path(self, name: BlockName) -> Path:
        """The file of a block."""
        return self.folder / "producers" / name.producer / f"{name.number:09d}.arrows"

    def delete(self, place: Any, name: BlockName) -> None:
        """Remove its file."""
        self.path(name).unlink()

    def damage(self, place: Any, name: BlockName) -> None:
        """Flip one bit in the rows of its file."""
        self.path(name).write_bytes(flip_in_rows(self.path(name).read_bytes()))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[carrier.Server]:
    """A server on the loopback."""
    with carrier.Server(tmp_path / "place", max_block_bytes=2**20) as found:
        yield found


def test_a_block_is_on_disk_when_flush_returns(tmp_path: Path, server: carrier.Server) -> None:
    """What a client flushed is read from the folder itself; the two carriers are one place."""
    with carrier.open_writer(server.place, SPEC, run="run", producer="p") as writer:
        writer.write(sample(0))
        assert BlockName("p", 0) == writer.flush()
    with folder.open_reader(tmp_path / "place", producers=1) as reader:
        assert facts([sample(0)]) == facts(list(reader))


def write_and_wait(place: str, told: Any) -> None:
    """A producer that is killed while it holds its name."""
    writer = carrier.open_writer(place, SPEC, run="run", producer="p")
    writer.write(sample(0))
    writer.flush()
    told.send(os.getpid())
    time.sleep(60)


def test_a_killed_client_gives_its_name_up(server: carrier.Server) -> None:
    """The call of a process that dies ends, and so does its hold; a stopped process keeps it."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=write_and_wait, args=(server.place, theirs))
    process.start()
    pid = ours.recv()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(UsageError) as caught:
        carrier.open_writer(server.place, SPEC, run="run", producer="p")
    assert ErrorKind.PRODUCER_TAKEN is caught.value.kind
    process.kill()
    process.join()
    with carrier.open_writer(server.place, SPEC, run="run", producer="p") as writer:
        writer.write(sample(1))
    with carrier.open_reader(server.place, producers=1) as reader:
        assert facts([sample(0), sample(1)]) == facts(list(reader))


def test_roles_and_certificates(tmp_path: Path) -> None:
    """A token of the other role, none, or a server that is not trusted: refused before anything is read."""
    authority = trustme.CA()
    made = authority.issue_cert("localhost")
    pair = (b"".join(part.bytes() for part in made.cert_chain_pems), made.private_key_pem.bytes())
    tokens = carrier.Tokens(writer="w-secret", reader="r-secret")
    trusted = authority.cert_pem.bytes()
    with carrier.Server(
        tmp_path / "place", address="grpc+tls://localhost:0", tokens=tokens, certificate=pair
    ) as server:
        for access in (
            carrier.Access(token="r-secret", root_certificates=trusted),
            carrier.Access(root_certificates=trusted),
            carrier.Access(token="w-secret", root_certificates=trustme.CA().cert_pem.bytes()),
        ):
            with pytest.raises(TransportError):
                carrier.open_writer(server.place, SPEC, run="run", producer="p", access=access)
        writers = carrier.Access(token="w-secret", root_certificates=trusted)
        with carrier.open_writer(server.place, SPEC, run="run", producer="p", access=writers) as writer:
            writer.write(sample(0))
        with pytest.raises(TransportError):
            carrier.open_reader(server.place, producers=1, access=writers)
        readers = carrier.Access(token="r-secret", root_certificates=trusted)
        with carrier.open_reader(server.place, producers=1, access=readers) as reader:
            assert facts([sample(0)]) == facts(list(reader))


@pytest.mark.parametrize("address", ["grpc://0.0.0.0:0", "grpc://[::]:0", "grpc+tls://127.0.0.1:0", "http://x"])
def test_an_open_address_is_refused(tmp_path: Path, address: str) -> None:
    """An address that others reach needs tokens and TLS; no socket is bound before that is known."""
    with pytest.raises(UsageError):
        carrier.Server(tmp_path, address=address)
    with pytest.raises(UsageError):
        carrier.Server(tmp_path, address=address, tokens=carrier.Tokens(writer="a", reader="b"))


def test_chunks_are_counted_while_they_come(server: carrier.Server) -> None:
    """A writer that sends without end is refused at the bound; the server has not held what it sent."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    writer: Any = carrier.open_writer(server.place, SPEC, run="run", producer="p")
    chunk = next(carrier._chunks(pa.py_buffer(bytes(carrier._CHUNK))))
    with contextlib.suppress(pa.ArrowException, fl.FlightError):
        for _ in range(500):
            writer._slot._call.stream.write_batch(chunk)
            time.sleep(0.001)
    with pytest.raises(DataError) as caught:
        writer._slot._call.answer(str)
    assert ErrorKind.TOO_LARGE is caught.value.kind
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 128 * 1024
    writer._slot.release()


def test_what_is_not_a_block_is_refused(server: carrier.Server) -> None:
    """Garbage under the words of a writer is an error with a kind, and nothing of it is stored."""
    for garbage in (b"", b"ARROW1", bytes(1000)):
        writer: Any = carrier.open_writer(server.place, SPEC, run="run", producer="p")
        for part in carrier._chunks(pa.py_buffer(garbage)):
            writer._slot._call.stream.write_batch(part)
        writer._slot._call.say(b"block")
        with pytest.raises(RouteplaneError):
            writer._slot._call.answer(str)
        writer._slot.release()
    with carrier.open_writer(server.place, SPEC, run="run", producer="p") as last:
        last.write(sample(0))
    with carrier.open_reader(server.place, producers=1) as reader:
        assert facts([sample(0)]) == facts(list(reader))


def test_any_flight_client_lists_and_gets_blocks(server: carrier.Server) -> None:
    """ListFlights names every block with its size and ticket; DoGet of the ticket is its v1 stream in pieces."""
    with carrier.open_writer(server.place, SPEC, run="run", producer="p") as writer:
        writer.write(sample(0))
    client = fl.connect(server.place)
    (info,) = client.list_flights()
    assert [b"p", b"0"] == info.descriptor.path
    data = b"".join(client.do_get(info.endpoints[0].ticket).read_all().column("data").to_pylist())
    assert info.total_bytes == len(data)
    assert ["sample-0"] == pa.ipc.open_stream(data).read_all().column("sample_id").to_pylist()
    client.close()


@pytest.mark.parametrize("ticket", [b"", b"{}", b'{"block": ["../x", 0], "part": null}', b'{"block": 3, "part": null}'])
def test_a_wrong_ticket_is_an_error_of_ours(server: carrier.Server, ticket: bytes) -> None:
    """No path leaves the place, and no request raises anything untyped."""
    carrier.open_writer(server.place, SPEC, run="run", producer="p").close()
    client = carrier._Client(server.place, carrier.NO_ACCESS)
    with pytest.raises(UsageError), client.told():
        client.flight.do_get(fl.Ticket(ticket)).read_all()
    with pytest.raises(UsageError):
        client.ask("unknown")
    client.close()


def test_a_server_that_is_gone_is_told(tmp_path: Path) -> None:
    """Both sides raise TransportError with the address."""
    server = carrier.Server(tmp_path / "place")
    writer = carrier.open_writer(server.place, SPEC, run="run", producer="p")
    reader = carrier.open_reader(server.place, producers=1)
    writer.write(sample(0))
    stop = threading.Thread(target=server.shutdown)
    stop.start()
    time.sleep(0.5)
    with pytest.raises(TransportError, match=server.place.partition("//")[2]):
        list(reader.names())
    writer._slot.release()
    reader.close()
    stop.join(20)
    with pytest.raises(TransportError):
        carrier.open_writer(server.place, SPEC, run=json.dumps(1), producer="q")
