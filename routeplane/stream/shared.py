"""Streams between processes of one host through memory that both map: ``shm://name``.

The producer makes a segment (an anonymous file, so that nothing is left of a crash), maps it once and hands it over;
messages are written into it and read where they lie. A Unix socket beside it says where, and carries notes back; by
its end either side hears that the other died. Reading maps the segment read-only.

Lifetime: the memory of a message is written again after the last view of its records is gone, wherever that was held. A
reader that keeps more than half of the segment is given copies from there on, and a message that finds no room goes
through the socket: neither side waits for the other to let go.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from routeplane.errors import ErrorKind, TransportError, TruncatedError, UsageError, refused
from routeplane.record.schema import choose_encoding
from routeplane.stream.addresses import Address, SinkOptions, SourceOptions, parse_address
from routeplane.stream.connection import ConnectedReader, ConnectedWriter, Note
from routeplane.stream.frames import Frame, messages_of
from routeplane.stream.pool import BufferPool, Lease, lend
from routeplane.stream.sockets import Listener, SocketBack, SocketLine, call, connected, filler, lost

if TYPE_CHECKING:
    from routeplane.record.policy import ReadPolicy
    from routeplane.record.record import RecordKey
    from routeplane.record.spec import RouteSpec

__all__ = ["Extents", "SharedListener", "listen", "transport"]

# A message in the segment: where it begins and how long it is. INLINE: it follows on the socket instead.
_PLACE = struct.Struct("<QQ")
_INLINE = 2**64 - 1
# Where sockets of names lie: gone after a reboot, and as their umask lets others reach them.
_SOCKETS = Path("/dev/shm")
_ALIGN = 64
# A schema alone takes some kilobytes.
_MIN_SEGMENT = 2**20


class Extents:
    """Which parts of ``[0, size)`` are free: first fit, joined again when they come back. Pure."""

    def __init__(self, size: int) -> None:
        self._free: list[tuple[int, int]] = [(0, size)]
        self._taken: dict[int, int] = {}

    @property
    def taken(self) -> int:
        """Parts that did not come back."""
        return len(self._taken)

    def take(self, nbytes: int) -> int | None:
        """Where ``nbytes`` may be written; None where there is no room."""
        size = -(-max(nbytes, 1) // _ALIGN) * _ALIGN
        for at, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[at : at + 1] = [(start + size, stop)] if stop - start > size else []
                self._taken[start] = size
                return start
        return None

    def give_back(self, start: int) -> None:
        """A part is free again. Raises UsageError for one that was not taken."""
        size = self._taken.pop(start, None)
        if size is None:
            raise UsageError(f"expected memory that was taken, got offset {start}", kind=ErrorKind.SEQUENCE)
        insort(self._free, (start, start + size))
        at = max(self._free.index((start, start + size)) - 1, 0)
        while at + 1 < len(self._free):
            (first, middle), (other, last) = self._free[at], self._free[at + 1]
            if middle == other:
                self._free[at : at + 2] = [(first, last)]
            elif first > start:
                break
            else:
                at += 1


def _segment(size: int) -> int:
    """A file descriptor of so much memory, all of it there. Raises TransportError (NO_ROOM)."""
    # anonymous memory files have no bound of their own, and the system's answer to too large a one is to kill somebody
    most = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 2
    if size > most:
        raise TransportError(
            f"expected a segment of at most half the memory, {most} bytes, got {size}: give a smaller max_bytes",
            kind=ErrorKind.NO_ROOM,
        )
    file = os.memfd_create("routeplane", os.MFD_CLOEXEC)
    try:
        # without this, memory that is not there shows as SIGBUS in the middle of a copy
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        os.close(file)
        raise TransportError(
            f"expected {size} bytes of memory for a segment, got {error.strerror}: give a smaller max_bytes",
            kind=ErrorKind.NO_ROOM,
        ) from error
    return file


class _SharedLine(SocketLine):
    """A producer's end: a flush puts what was written since the last one into the segment, as one message."""

    def __init__(self, connection: socket.socket, *, size: int, timeout_s: float | None) -> None:
        super().__init__(connection, timeout_s=timeout_s)
        file = _segment(size)
        try:
            self._map = mmap.mmap(file, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            socket.send_fds(connection, [struct.pack("<Q", size)], [file])
        except OSError as error:
            raise lost(error, timeout_s=timeout_s) from error
        finally:
            os.close(file)
        self._memory = memoryview(self._map)
        self._extents = Extents(size)
        self._parts: list[memoryview] = []
        self._sent = self._taken_by_reader = 0
        self._others: list[tuple[int, int]] = []

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._parts.append(view)
        return len(view)

    def flush(self) -> None:
        if not self._parts:
            return
        parts, self._parts = self._parts, []
        size = sum(map(len, parts))
        start = self._room(size)
        if start is None:
            self._send(_PLACE.pack(_INLINE, size))
            for part in parts:
                self._send(part)
        else:
            at = start
            for part in parts:
                self._memory[at : at + len(part)] = part
                at += len(part)
            self._send(_PLACE.pack(start, size))
        self._sent += 1

    def _room(self, size: int) -> int | None:
        """Where a message goes; None where it must go through the socket."""
        self._listen(wait=False)
        while (start := self._extents.take(size)) is None:
            # a reader that waits for the next message lets go of nothing by itself
            if size > len(self._memory) or self._taken_by_reader == self._sent:
                return None
            self._listen(wait=True)
        return start

    def _listen(self, *, wait: bool) -> None:
        for what, number in super().notes(wait=wait):
            if what == Note.FREE:
                self._extents.give_back(number)
            elif what == Note.WAITING:
                self._taken_by_reader = number
            else:
                self._others.append((what, number))

    def notes(self, *, wait: bool) -> list[tuple[int, int]]:
        self._listen(wait=False)
        while wait and not self._others:
            self._listen(wait=True)
        others, self._others = self._others, []
        return others

    def close(self) -> None:
        super().close()
        self._parts = []
        self._memory.release()
        self._map.close()


class _Mapped:
    """A consumer's end: the segment, read-only, and which parts of it are held by records."""

    def __init__(self, file: int, size: int) -> None:
        self._map = mmap.mmap(file, size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._size = size
        # finalizers, which run anywhere at any moment, only append
        self._gone: deque[tuple[int, int]] = deque()
        self._held = 0
        self._pool = BufferPool()

    def part(self, start: int, size: int) -> tuple[pa.Buffer, bool]:
        """A message as a buffer, and whether its memory is free again already, because it was copied."""
        if start + size > self._size:
            raise TruncatedError(
                f"expected a message within {self._size} bytes, got [{start}, {start + size})", kind=ErrorKind.TRUNCATED
            )
        found = self._bytes[start : start + size]
        if self._held + size > self._size // 2:
            memory, copied = self._pool.take(size)
            memory[:] = found.data
            return copied, True
        lease = Lease(self._bytes)
        weakref.finalize(lease, self._gone.append, (start, size)).atexit = False
        self._held += size
        return lend(found, lease), False

    def inline(self, size: int, fill: Callable[[memoryview], int]) -> pa.Buffer:
        """A message from the socket."""
        memory, data = self._pool.take(size)
        if (came := fill(memory)) < size:
            raise TruncatedError(f"expected a message of {size} bytes, got {came}", kind=ErrorKind.TRUNCATED)
        return data

    def let_go(self) -> list[int]:
        """Offsets of what nobody views any more, since the last call."""
        offsets = []
        while self._gone:
            start, size = self._gone.popleft()
            self._held -= size
            offsets.append(start)
        return offsets


def _frames(mapped: _Mapped, back: SocketBack, fill: Callable[[memoryview], int]) -> Iterator[Frame]:
    """Frames of a segment; tells the producer what is free, and when it waits."""
    place = bytearray(_PLACE.size)
    count = 0
    while True:
        for start in mapped.let_go():
            back.tell(Note.FREE, start)
        back.tell(Note.WAITING, count)
        if fill(memoryview(place)) < _PLACE.size:
            return
        start, size = _PLACE.unpack(place)
        count += 1
        if start == _INLINE:
            data = mapped.inline(size, fill)
        else:
            data, copied = mapped.part(start, size)
            if copied:
                back.tell(Note.FREE, start)
        if (yield from messages_of(data)):
            return
        del data


class SharedListener(Listener):
    """A consumer's end of ``shm://name``; see ``Listener``."""

    @property
    def address(self) -> str:
        """Where producers call."""
        return f"shm://{Path(self._asked.path).name.removeprefix('routeplane-')}"

    def open_source(self, policy: ReadPolicy, options: SourceOptions) -> ConnectedReader:
        """The stream of the next producer that calls."""
        connection = self.accept(options.timeout_s)
        back = SocketBack(connection)
        try:
            head, files, _, _ = socket.recv_fds(connection, 8, 1)
            if len(head) < 8 or not files:
                raise TruncatedError("expected a segment, got a producer that hung up", kind=ErrorKind.TRUNCATED)
            try:
                mapped = _Mapped(files[0], struct.unpack("<Q", head)[0])
            finally:
                os.close(files[0])
        except BaseException:
            back.close()
            raise
        frames = _frames(mapped, back, filler(connection, timeout_s=options.timeout_s))
        return connected(frames, policy, options, back=back, received=self._received)


class _Place:
    """A name: a producer calls there, a consumer listens there for one stream."""

    def __init__(self, socket_at: Address) -> None:
        self._address = socket_at

    def new_sink(self, spec: RouteSpec, options: SinkOptions) -> ConnectedWriter:
        encoding = choose_encoding(options.encoding or "plain", spec)
        connection = call(self._address, timeout_s=options.timeout_s)
        # twice what is on its way: half may be held by the reader
        size = max(-(-2 * options.max_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, _MIN_SEGMENT)
        try:
            line = _SharedLine(connection, size=size, timeout_s=options.timeout_s)
        except BaseException:
            connection.close()
            raise
        return ConnectedWriter(line, spec, encoding=encoding, max_bytes=options.max_bytes)

    def open_source(self, policy: ReadPolicy, options: SourceOptions) -> ConnectedReader:
        with SharedListener(self._address) as listener:
            return listener.open_source(policy, options)


def _socket_of(address: Address) -> Address:
    if not address.host or address.port is not None or address.path:
        raise refused("shm://name", f"{address.location}{address.path}")
    return Address(scheme="unix", host="", port=None, path=str(_SOCKETS / f"routeplane-{address.host}"))


def transport(address: Address) -> _Place:
    """The place of a name."""
    return _Place(_socket_of(address))


def listen(address: str, *, have: Mapping[RecordKey, int] | None = None) -> SharedListener:
    """Listen at ``shm://name``, for several streams one after the other. Raises TransportError, UsageError."""
    parsed = parse_address(address)
    if parsed.scheme != "shm":
        raise refused("shm://name", repr(address))
    return SharedListener(_socket_of(parsed), have=have)
