"""Streams over sockets: ``tcp://host:port`` and ``unix:///path``. The consumer listens, the producer connects.

One stream per connection, behind a greeting of 8 bytes. When the reader has verified the whole stream it answers with
the trailer's digest, and the writer's ``close`` returns on that answer or raises. Handshakes are concurrent, bounded in
number, bytes and time, so that port scanners, garbage and silent peers neither end nor delay a listener. No
authentication and no encryption: for trusted networks.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa

from routeplane.errors import (
    ErrorKind,
    FormatError,
    RouteplaneError,
    TransportError,
    TruncatedError,
    check_type,
    refused,
)
from routeplane.record.schema import Encoding, choose_encoding
from routeplane.stream.files import BufferPool, WholeWrites
from routeplane.stream.frames import Frame, frames_of_buffer, frames_received
from routeplane.stream.ipc import IpcReader, IpcWriter, parse_schema_frame

if TYPE_CHECKING:
    from routeplane.record.policy import ReadPolicy
    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = ["Address", "Listener", "SocketReader", "SocketWriter", "connect", "listen", "parse_address"]

#: What a producer sends first; a peer that has not sent it within the deadline is disconnected.
GREETING = b"routes1\n"
#: What a reader answers when it has verified the whole stream: a mark, and the trailer's digest.
_ANSWER, _ANSWER_MARK = struct.Struct("<8sQ"), b"whole1\r\n"
#: Largest schema message of a handshake: one of 4,096 layers has some 60 kB.
_MAX_SCHEMA_BYTES = 2**20
# Smaller pieces of a message are gathered: a header and its padding are not worth a packet each.
_GATHER = 64 * 1024
# Between two attempts to reach a consumer that does not listen yet.
_RETRY_S = 0.05
_BACKLOG = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where a consumer listens: a host and a port (``tcp``), or a path (``unix``)."""

    place: tuple[str, int] | str

    @property
    def family(self) -> socket.AddressFamily:
        """The kind of socket."""
        if isinstance(self.place, str):
            return socket.AF_UNIX
        return socket.AF_INET6 if ":" in self.place[0] else socket.AF_INET

    def __str__(self) -> str:
        if isinstance(self.place, str):
            return f"unix://{self.place}"
        host, port = self.place
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def parse_address(text: str) -> Address:
    """Parse ``tcp://host:port`` or ``unix:///path``.

    Without a host the address is the loopback; a wildcard must be spelled out (``tcp://0.0.0.0:4000``). Raises
    UsageError.

    >>> str(parse_address("tcp://:4000"))
    'tcp://127.0.0.1:4000'
    """
    check_type(text, str, expected="tcp://host:port or unix:///path")
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "127.0.0.1", parts.port
    except ValueError as error:
        raise refused("tcp://host:port or unix:///path", f"{text!r} ({error})") from None
    plain = not (parts.query or parts.fragment or parts.username or parts.password)
    if parts.scheme == "tcp" and plain and port is not None and not parts.path:
        return Address(place=(host, port))
    if parts.scheme == "unix" and plain and not parts.netloc and parts.path:
        return Address(place=unquote(parts.path))
    raise refused("tcp://host:port or unix:///path", repr(text))


# -- writing -----------------------------------------------------------------------------------------------------------


class SocketWriter(IpcWriter):
    """The RouteSink of one connection; ``close`` returns when the reader has verified the whole stream."""

    def __init__(self, connection: socket.socket, spec: RouteSpec, *, encoding: Encoding, max_bytes: int) -> None:
        self._socket = connection
        self._file: Any = connection.makefile("wb", _GATHER)
        super().__init__(WholeWrites(self._file), spec, encoding=encoding, max_bytes=max_bytes)
        with _typed(connection.gettimeout()):
            self._file.write(GREETING)
            self._file.flush()

    def _send(self, batch: pa.RecordBatch) -> None:
        with _typed(self._socket.gettimeout()):
            super()._send(batch)
            self._file.flush()  # the reader is to have each batch when it was written

    def _finish(self) -> None:
        with _typed(self._socket.gettimeout()):
            super()._finish()
            answer = bytearray(_ANSWER.size)
            _fill(self._socket, memoryview(answer))
        if _ANSWER.unpack(answer) != (_ANSWER_MARK, self._counter.trailer().digest):
            raise TransportError(
                "expected the reader's answer that it verified the whole stream, got a closed connection: the reader "
                "failed or ended early; write the records again on a new stream",
                kind=ErrorKind.CONNECTION,
            )
        self._discard()

    def _discard(self) -> None:
        super()._discard()
        self._file.raw.close()  # what is gathered is dropped, not sent
        self._socket.close()


def connect(
    address: Address, spec: RouteSpec, *, encoding: str | None, max_bytes: int, timeout_s: float | None
) -> SocketWriter:
    """Connect to a consumer, waiting until one listens. Raises TransportError (TIMED_OUT).

    Over TCP the default encoding is ``auto``, over a Unix socket ``plain``.
    """
    chosen = choose_encoding(encoding or ("plain" if address.family == socket.AF_UNIX else "auto"), spec)
    end = float("inf") if timeout_s is None else time.monotonic() + timeout_s
    with _typed(timeout_s):
        while True:
            try:
                return SocketWriter(_connected(address, timeout_s), spec, encoding=chosen, max_bytes=max_bytes)
            except (ConnectionRefusedError, FileNotFoundError, TimeoutError, BlockingIOError) as error:
                if time.monotonic() + _RETRY_S > end:
                    raise TransportError(
                        f"expected a consumer at {address} within {timeout_s} s, got none ({error}): start it, or "
                        "give the address at which it listens",
                        kind=ErrorKind.TIMED_OUT,
                    ) from error
                time.sleep(_RETRY_S)


def _connected(address: Address, timeout_s: float | None) -> socket.socket:
    if not isinstance(address.place, str):
        connection = socket.create_connection(address.place, timeout=timeout_s)
        _tune(connection)
        return connection
    connection = socket.socket(address.family)
    connection.settimeout(timeout_s)
    try:
        connection.connect(address.place)
    except OSError:
        connection.close()
        raise
    return connection


def _tune(connection: socket.socket) -> None:
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


@contextmanager
def _typed(timeout_s: float | None) -> Iterator[None]:
    """Turn errors of a connection into TransportError."""
    try:
        yield
    except TransportError:
        raise
    except OSError as error:
        if isinstance(error, TimeoutError | BlockingIOError):
            found, kind = f"the other side within {timeout_s} s, got nothing: it is slow or dead", ErrorKind.TIMED_OUT
        else:
            found, kind = f"a connection, got {error.strerror or error}: the other side is gone", ErrorKind.CONNECTION
        raise TransportError(f"expected {found}; write the records again on a new stream", kind=kind) from error


def _fill(connection: socket.socket, memory: memoryview) -> int:
    """Fill memory from a socket and return how much came; a reset is an end like a close."""
    came = 0
    with _typed(connection.gettimeout()), suppress(ConnectionError):
        while came < len(memory) and (size := connection.recv_into(memory[came:], 0, socket.MSG_WAITALL)):
            came += size
    return came


# -- reading -----------------------------------------------------------------------------------------------------------


class SocketReader(IpcReader):
    """The RouteSource of one connection; answers with the trailer's digest when everything was verified."""

    def __init__(self, connection: socket.socket, frames: Iterator[Frame], *, policy: ReadPolicy) -> None:
        self._socket = connection
        super().__init__(frames, policy, walkable=False)

    def _arrive(self) -> Iterator[RouteRecord]:
        try:
            yield from super()._arrive()
        finally:
            if self._report.complete:
                with suppress(OSError):
                    self._socket.sendall(_ANSWER.pack(_ANSWER_MARK, self._counter.trailer().digest))
            self.close()

    def close(self) -> None:
        """Close the connection; a writer that has not heard the answer raises TransportError."""
        super().close()
        # unread bytes in a closed socket make it reset the connection, and a reset may swallow the answer on its way
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._socket.close()


class _Handshake:
    """One peer that has connected: what came of its greeting and its schema, read without waiting."""

    def __init__(self, connection: socket.socket, *, deadline: float) -> None:
        connection.setblocking(False)
        self.connection, self.deadline, self.greeted = connection, deadline, False
        self._came = bytearray()

    def receive(self) -> Frame:
        """The schema when all of it came, else BlockingIOError; what came is kept for the next call.

        Raises FormatError or OSError for a peer that must be disconnected.
        """
        start, stop = len(GREETING), len(GREETING) + 8
        if (came := self._first(start)) != GREETING:
            raise FormatError(f"expected a producer's greeting, got {came!r}", kind=ErrorKind.NOT_ARROW)
        self.greeted, self.deadline = True, float("inf")
        prefix = self._first(stop)[start:]
        mark, length = struct.unpack("<II", prefix)
        if mark != 0xFFFFFFFF or not 0 < length <= _MAX_SCHEMA_BYTES:
            raise FormatError(f"expected a schema message, got {prefix.hex()}", kind=ErrorKind.NOT_ARROW)
        frame = next(frames_of_buffer(pa.py_buffer(self._first(stop + length)[start:])))
        parse_schema_frame(frame)
        return frame

    def _first(self, size: int) -> bytes:
        while len(self._came) < size:
            part = self.connection.recv(size - len(self._came))
            if not part:
                raise TruncatedError("expected a stream, got a closed connection", kind=ErrorKind.TRUNCATED)
            self._came += part
        return bytes(self._came[:size])


class Listener:
    """A consumer's address: ``open_stream(listener)`` gives the next stream whose producer connects.

    Owns the listening socket and the connections whose handshake is not done. Close it, or leave ``with``. ``listen``
    makes one. ``max_handshakes``: peers that may be connected before their schema came; the oldest without a greeting
    goes first.

    >>> with Listener(parse_address("tcp://127.0.0.1:0")) as listener:
    ...     listener.disconnected
    0
    """

    def __init__(self, address: Address, *, handshake_s: float = 5.0, max_handshakes: int = 256) -> None:
        self._asked, self._handshake_s, self._max_handshakes = address, handshake_s, max_handshakes
        self._server = _listening(address)
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()  # a peer's handshake is the data of its key
        self._selector.register(self._server, selectors.EVENT_READ)
        self._pool = BufferPool()
        place = self._server.getsockname()
        #: Where producers connect, with the port that the system chose where 0 was asked for.
        self.address = str(Address(place=place if isinstance(place, str) else place[:2]))
        #: Peers that were disconnected before a stream began.
        self.disconnected = 0
        self._last_error = ""

    def open_source(self, policy: ReadPolicy, *, timeout_s: float | None) -> SocketReader:
        """Return the next stream. Raises TransportError (TIMED_OUT)."""
        connection, schema = self._accept(timeout_s)
        connection.settimeout(timeout_s)
        received = frames_received(partial(_fill, connection), self._pool.take, at=schema.data.size)
        try:
            return SocketReader(connection, chain([schema], received), policy=policy)
        except BaseException:
            connection.close()
            raise

    def _accept(self, timeout_s: float | None) -> tuple[socket.socket, Frame]:
        """The first peer whose greeting and schema are whole; the others stay, or are disconnected."""
        end = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while (now := time.monotonic()) < end:
            wake = min([end, *(peer.deadline for peer in self._peers())])
            ready = self._selector.select(None if wake == float("inf") else max(wake - now, 0.0))
            for key, _ in ready:
                if key.data is not None and (schema := self._receive(key.data)) is not None:
                    return key.data.connection, schema
            if any(key.data is None for key, _ in ready):
                self._welcome()  # last: a peer that loses its place to a newcomer has been read
            for peer in self._peers():
                if peer.deadline <= time.monotonic():
                    self._drop(peer, f"no greeting within {self._handshake_s} s")
        raise TransportError(
            f"expected a producer at {self.address} within {timeout_s} s, got {self.disconnected} peers that were "
            f"disconnected{self._last_error}",
            kind=ErrorKind.TIMED_OUT,
        )

    def _peers(self) -> list[_Handshake]:
        return [key.data for key in (self._selector.get_map() or {}).values() if key.data is not None]

    def _welcome(self) -> None:
        """Take the connections that wait, as many as have a place; where none is left, the oldest silent peer goes."""
        peers = self._peers()
        count = len(peers)
        if count >= self._max_handshakes:
            self._drop(min(peers, key=lambda peer: (peer.greeted, peer.deadline)), "another peer took its place")
            count -= 1
        for _ in range(self._max_handshakes - count):
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # none waits, or the peer has gone already
            _tune(connection)
            peer = _Handshake(connection, deadline=time.monotonic() + self._handshake_s)
            self._selector.register(connection, selectors.EVENT_READ, peer)

    def _receive(self, peer: _Handshake) -> Frame | None:
        try:
            schema = peer.receive()
        except (BlockingIOError, InterruptedError):
            return None
        except (RouteplaneError, OSError) as error:  # a schema of another version, or not a schema
            self._drop(peer, str(error))
            if peer.greeted and isinstance(error, TruncatedError):
                raise  # a producer that aborted or died before its first batch
            return None
        self._selector.unregister(peer.connection)
        return schema

    def _drop(self, peer: _Handshake, reason: str) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        self.disconnected += 1
        self._last_error = f" (the last: {reason[:200]})"

    def close(self) -> None:
        """Stop listening, and disconnect peers without a stream. Streams that are open go on."""
        for peer in self._peers():
            peer.connection.close()
        self._selector.close()
        self._server.close()
        if isinstance(self._asked.place, str):
            Path(self._asked.place).unlink(missing_ok=True)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _listening(address: Address) -> socket.socket:
    try:
        if isinstance(address.place, str):
            _remove_stale(Path(address.place))
        return socket.create_server(address.place, family=address.family, backlog=_BACKLOG)
    except OSError as error:
        raise TransportError(
            f"expected to listen at {address}, got {error.strerror or error}", kind=ErrorKind.CONNECTION
        ) from error


def _remove_stale(path: Path) -> None:
    """Remove a socket file without a listener, as a killed consumer leaves it."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) != 0:
                path.unlink(missing_ok=True)


def listen(address: str, *, handshake_s: float = 5.0) -> Listener:
    """Listen at ``tcp://host:port`` (port 0: any that is free) or ``unix:///path``.

    Args:
        address: without a host, the loopback; spell a wildcard out to listen on all interfaces.
        handshake_s: after so long without a greeting a peer is disconnected.

    Returns a Listener that the caller closes. Raises TransportError where that cannot be, UsageError for another
    address.

    >>> with listen("tcp://:0") as listener:
    ...     listener.address.startswith("tcp://127.0.0.1:")
    True
    """
    return Listener(parse_address(address), handshake_s=handshake_s)
