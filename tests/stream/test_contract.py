"""The contract of transports, for those that need no other process: memory, files, and pipes."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from routeplane.record.spec import RouteSpec
from routeplane.stream import MemoryStream, new_stream, open_stream, shared
from routeplane.stream.sockets import listen
from routeplane.stream.spooled import SpoolStream
from routeplane.testing.contracts import DeliveryContract, LiveContract, StreamContract


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Now."""
        return self.now


class TestMemory(DeliveryContract):
    """Records by reference, between threads."""

    def place(self, tmp_path: Path, *, groups: Sequence[str] = ("default",), producers: int = 1) -> Any:
        """A stream with groups, and the clock of its leases."""
        clock = Clock()
        return MemoryStream(groups=groups, producers=producers, lease_s=30.0, clock=clock), clock

    def sink(self, place: Any, spec: RouteSpec, **options: Any) -> Any:
        """A writer."""
        return new_stream(place[0], spec, **options)

    def source(self, place: Any, **options: Any) -> Any:
        """A reader."""
        return open_stream(place[0], **options)

    def lose(self, place: Any, sink: Any) -> None:
        """Half an hour without a word."""
        stream, clock = place
        stream.disconnect(sink)
        clock.now += 1_800


class TestMemoryAlone(LiveContract):
    """One writer and one reader, as a MemoryStream is by default."""

    def place(self, tmp_path: Path) -> Any:
        """A stream."""
        return MemoryStream()

    def sink(self, place: Any, spec: RouteSpec, **options: Any) -> Any:
        """The writer."""
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


class TestSpool(DeliveryContract):
    """Blocks on disk."""

    def place(self, tmp_path: Path, *, groups: Sequence[str] = ("default",), producers: int = 1) -> Any:
        """A folder, and the clock of its leases."""
        clock = Clock()
        return SpoolStream(tmp_path / "spool", groups=groups, producers=producers, lease_s=30.0, clock=clock), clock

    def sink(self, place: Any, spec: RouteSpec, **options: Any) -> Any:
        """A writer; its bound is the folder's."""
        return new_stream(place[0], spec, **options)

    def source(self, place: Any, **options: Any) -> Any:
        """A reader."""
        return open_stream(place[0], **options)

    def lose(self, place: Any, sink: Any) -> None:
        """Half an hour without a word."""
        stream, clock = place
        stream.disconnect(sink)
        clock.now += 1_800

    def release(self, place: Any) -> None:
        """Let go of the folder."""
        place[0].close()


class SocketContract(LiveContract):
    """Both ends of a socket: the consumer listens, the producer calls."""

    address: str

    def place(self, tmp_path: Path) -> Any:
        """A listener."""
        return listen(self.address.format(folder=tmp_path))

    def sink(self, place: Any, spec: RouteSpec, **options: Any) -> Any:
        """A writer that calls."""
        return new_stream(place.address, spec, timeout_s=30.0, **options)

    def source(self, place: Any, **options: Any) -> Any:
        """The next that calls."""
        return open_stream(place, timeout_s=30.0, **options)

    def release(self, place: Any) -> None:
        """Listen no more."""
        place.close()


class TestTcp(SocketContract):
    """Over the loopback."""

    address = "tcp://127.0.0.1:0"


class TestUnixSocket(SocketContract):
    """A socket with a path."""

    address = "unix://{folder}/socket"


class TestSharedMemory(SocketContract):
    """A segment that both ends map."""

    def place(self, tmp_path: Path) -> Any:
        """A listener under a name of its own."""
        return shared.listen(f"shm://test-{uuid.uuid4().hex}")


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
