"""The contracts of streams and carriers, for those that need no other package."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Any

from routeplane.record.interfaces import BlockName
from routeplane.record.spec import RouteSpec
from routeplane.stream import MemoryStream, folder, listen, new_stream, open_stream
from routeplane.testing.builders import SPEC
from routeplane.testing.contracts import CarrierContract, LiveContract, StreamContract
from tests.stream.streams import flip_in_rows

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "delivery.md"


def clauses(page: str) -> dict[str, list[str]]:
    """Clause -> the tests that the page's table of the contract names for it."""
    table = page.partition("| clause | what holds | tests |\n")[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()[1:]]
    return {row[0].strip(): re.findall(r"`(\w+)`", row[2]) for row in rows}


def faults(page: str) -> list[str]:
    """Where the table and the contract differ: lines without a test, and tests in no line, or in two, or nowhere."""
    found = clauses(page)
    named = sorted(name for names in found.values() for name in names)
    tests = sorted(name.removeprefix("test_") for name in vars(CarrierContract) if name.startswith("test_"))
    return [clause for clause, names in found.items() if not names] + [
        name for name in {*named, *tests} if (named.count(name), tests.count(name)) != (1, 1)
    ]


def test_the_table_of_the_contract_is_its_tests() -> None:
    """Each line of the page names its tests, and each test stands in one line; a changed page is found out."""
    page = PAGE.read_text(encoding="utf-8")
    assert 15 <= len(clauses(page))
    assert [] == faults(page)
    changed = page.replace("`a_position_before_a_deleted_block_is_expired`", "").replace("`fetch_cuts_a_block`", "`x`")
    expected = ["a_position_before_a_deleted_block_is_expired", "expired", "fetch_cuts_a_block", "x"]
    assert expected == sorted(faults(changed))


class TestMemory(LiveContract):
    """Records by reference, between two threads."""

    def place(self, tmp_path: Path) -> Any:
        """A stream."""
        return MemoryStream()

    def sink(self, place: Any, spec: RouteSpec, **options: Any) -> Any:
        """The writer, which encodes nothing."""
        options.pop("encoding", None)
        return new_stream(place, spec, **options)

    def source(self, place: Any, **options: Any) -> Any:
        """The reader."""
        return open_stream(place, **options)


class TestFile(StreamContract):
    """A path, published by rename."""

    def place(self, tmp_path: Path) -> Any:
        """A path."""
        return tmp_path / "stream.arrows"

    def sink(self, place: Any, spec: RouteSpec, **options: Any) -> Any:
        """A writer to it."""
        return new_stream(place, spec, **options)

    def source(self, place: Any, **options: Any) -> Any:
        """It, mapped."""
        return open_stream(place, **options)


class SocketContract(LiveContract):
    """Both ends of a socket: the consumer listens, the producer connects."""

    address: str

    def place(self, tmp_path: Path) -> Any:
        """A listener."""
        return listen(self.address.format(folder=tmp_path))

    def sink(self, place: Any, spec: RouteSpec, **options: Any) -> Any:
        """A writer that connects."""
        return new_stream(place.address, spec, timeout_s=30.0, **options)

    def source(self, place: Any, **options: Any) -> Any:
        """The stream of the next that connects."""
        return open_stream(place, timeout_s=30.0, **options)

    def release(self, place: Any) -> None:
        """Stop listening."""
        place.close()


class TestTcp(SocketContract):
    """Over the loopback."""

    address = "tcp://127.0.0.1:0"
    slack = 8 * 2**20  # what Linux buffers on both sides, once the receiving one does not grow
    slow_tokens = 20_000

    def place(self, tmp_path: Path) -> Any:
        """A listener whose connections have a buffer of a set size: on some machines Linux lets it grow to 32 MiB."""
        listener = super().place(tmp_path)
        listener._server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        return listener


class TestUnixSocket(SocketContract):
    """A socket with a path."""

    address = "unix://{folder}/socket"
    slack = 2**19
    slow_tokens = 2_000


class TestPipe(LiveContract):
    """An operating system's pipe."""

    slack = 65_536  # what Linux buffers

    def place(self, tmp_path: Path) -> Any:
        """Both ends."""
        read, write = os.pipe()
        return os.fdopen(read, "rb"), os.fdopen(write, "wb", buffering=0)

    def sink(self, place: Any, spec: RouteSpec, **options: Any) -> Any:
        """A writer that closes its end, as the end of its process would."""
        sink = new_stream(place[1], spec, **options)
        for name in ("close", "abort"):
            self._then_hang_up(sink, name, place[1])
        return sink

    def _then_hang_up(self, sink: Any, name: str, file: Any) -> None:
        end = getattr(sink, name)

        def both() -> None:
            end()
            file.close()

        setattr(sink, name, both)

    def source(self, place: Any, **options: Any) -> Any:
        """A reader."""
        return open_stream(place[0], **options)

    def release(self, place: Any) -> None:
        """Close both ends."""
        for file in place:
            file.close()


class TestFolder(CarrierContract):
    """Sealed blocks as files."""

    def place(self, tmp_path: Path) -> Any:
        """A folder."""
        return tmp_path / "place"

    def writer(self, place: Any, **options: Any) -> Any:
        """A writer."""
        return folder.open_writer(place, SPEC, **options)

    def reader(self, place: Any, **options: Any) -> Any:
        """A reader."""
        return folder.open_reader(place, **options)

    def kill(self, place: Any, writer: Any) -> None:
        """The system frees a dead process's locks."""
        writer._slot.release()

    def path(self, place: Path, name: BlockName) -> Path:
        """The file of a block."""
        return place / "producers" / name.producer / f"{name.number:09d}.arrows"

    def delete(self, place: Any, name: BlockName) -> None:
        """Remove its file."""
        self.path(place, name).unlink()

    def damage(self, place: Any, name: BlockName) -> None:
        """Flip one bit in the rows of its file."""
        path = self.path(place, name)
        path.write_bytes(flip_in_rows(path.read_bytes()))
