"""Streams over sockets: ``tcp://host:port`` and ``unix:///path``. The consumer listens, the producer calls.

Owns connecting, waiting with a bound, and receiving into memory that goes round. What is said over the connection is
``connection``'s business. No authentication and no encryption: for trusted networks; ``grpc+tls://`` has both.
"""

from __future__ import annotations

import contextlib
import select
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routeplane.errors import ErrorKind, TransportError, refused
from routeplane.record.schema import choose_encoding
from routeplane.stream.addresses import Address, SinkOptions, SourceOptions, parse_address
from routeplane.stream.connection import NOTE, ConnectedReader, ConnectedWriter, Received
from routeplane.stream.frames import frames_received
from routeplane.stream.pool import BufferPool

if TYPE_CHECKING:
    from routeplane.record.policy import ReadPolicy
    from routeplane.record.record import RecordKey
    from routeplane.record.spec import RouteSpec

__all__ = ["Listener", "SocketBack", "SocketLine", "call", "filler", "listen", "listening", "lost", "transport"]

# Smaller pieces of a message are gathered: a header and its padding are not worth a packet each.
_GATHER = 64 * 1024
# Between two attempts to reach a consumer that does not listen yet.
_AGAIN_S = 0.05


def lost(error: OSError, *, timeout_s: float | None) -> TransportError:
    """The error of a connection that failed; for ``raise``."""
    if isinstance(error, TransportError):
        return error
    if isinstance(error, TimeoutError | BlockingIOError):
        return TransportError(
            f"expected the other side within {timeout_s} s, got nothing: it is slow, or gone; what was not "
            "acknowledged is still yours",
            kind=ErrorKind.TIMED_OUT,
        )
    return TransportError(
        f"expected a connection, got {error.strerror or error}: the other side is gone; write what is unacknowledged "
        "again on a new stream",
        kind=ErrorKind.CONNECTION,
    )


class SocketLine:
    """A producer's end of a socket: takes messages, gathers small pieces, hears what comes back."""

    closed = False  # what pyarrow asks of a file

    def __init__(self, connection: socket.socket, *, timeout_s: float | None) -> None:
        connection.settimeout(timeout_s)
        self._socket, self._timeout_s = connection, timeout_s
        self._small = bytearray()
        self._heard = bytearray()

    @property
    def file(self) -> SocketLine:
        """Itself."""
        return self

    def write(self, data: Any) -> int:
        """Take all of it."""
        view = memoryview(data).cast("B")
        if len(view) < _GATHER:
            self._small += view
            if len(self._small) >= _GATHER:
                self.flush()
        else:
            self.flush()
            self._send(view)
        return len(view)

    def flush(self) -> None:
        """Send what was gathered."""
        if self._small:
            gathered, self._small = self._small, bytearray()
            self._send(gathered)

    def _send(self, data: Any) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise lost(error, timeout_s=self._timeout_s) from error

    def notes(self, *, wait: bool) -> list[tuple[int, int]]:
        """See ``Line``."""
        while True:
            # a socket with a timeout waits for it whatever the flags of recv say
            if not wait and not select.select([self._socket], [], [], 0)[0]:
                return self._whole_notes()
            try:
                came = self._socket.recv(4096)
            except OSError as error:
                raise lost(error, timeout_s=self._timeout_s) from error
            if not came:
                raise TransportError(
                    "expected a consumer, got one that hung up: write what is unacknowledged again on a new stream",
                    kind=ErrorKind.CONNECTION,
                )
            self._heard += came
            if len(self._heard) >= NOTE.size:
                return self._whole_notes()

    def _whole_notes(self) -> list[tuple[int, int]]:
        size = len(self._heard) // NOTE.size * NOTE.size
        whole, self._heard = bytes(self._heard[:size]), self._heard[size:]
        return list(NOTE.iter_unpack(whole))

    def publish(self) -> None:
        """Send what was gathered: the trailer is among it."""
        self.flush()

    def discard(self) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Close; again is no error."""
        self._socket.close()


class SocketBack:
    """A consumer's end of a socket."""

    def __init__(self, connection: socket.socket, *, then: Callable[[], None] = lambda: None) -> None:
        self._socket, self._then = connection, then

    def tell(self, what: int, number: int) -> None:
        """See ``Back``."""
        with contextlib.suppress(OSError):
            self._socket.sendall(NOTE.pack(what, number))

    def close(self) -> None:
        """Close; again is no error."""
        # what lies unread in a closed socket makes it reset the connection, and a reset may swallow notes on their way
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._socket.close()
        self._then()


def filler(connection: socket.socket, *, timeout_s: float | None) -> Callable[[memoryview], int]:
    """Fills memory from a socket and says how much came; a reset is an end, and the stream says whether it was one."""

    def fill(memory: memoryview) -> int:
        came = 0
        while came < len(memory):
            try:
                size = connection.recv_into(memory[came:])
            except TimeoutError as error:
                raise lost(error, timeout_s=timeout_s) from error
            except OSError:
                return came
            if size == 0:
                return came
            came += size
        return came

    return fill


def listening(address: Address) -> socket.socket:
    """A socket that listens at an address. Raises TransportError where that cannot be."""
    try:
        if address.scheme == "tcp":
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            return socket.create_server((address.host, address.port or 0), family=family)
        _remove_stale(Path(address.path))
        server = socket.socket(socket.AF_UNIX)
        server.bind(address.path)
        server.listen()
    except OSError as error:
        raise TransportError(
            f"expected to listen at {address}, got {error.strerror or error}", kind=ErrorKind.CONNECTION
        ) from error
    return server


def _remove_stale(path: Path) -> None:
    """Remove a socket file that nobody listens at, as a killed consumer leaves it."""
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) != 0:
                path.unlink(missing_ok=True)


def call(address: Address, *, timeout_s: float | None) -> socket.socket:
    """A connection to whoever listens, waiting until someone does. Raises TransportError (TIMED_OUT)."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        try:
            if address.scheme == "tcp":
                connection = socket.create_connection((address.host, address.port or 0), timeout=timeout_s)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                return connection
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(address.path)
            except OSError:
                connection.close()
                raise
            return connection
        except (ConnectionRefusedError, FileNotFoundError, TimeoutError) as error:
            if end is not None and time.monotonic() + _AGAIN_S > end:
                raise TransportError(
                    f"expected a consumer at {address.scheme}://{address.location}{address.path} within {timeout_s} s, "
                    f"got {error.strerror or error}: start it, or give the address at which it listens",
                    kind=ErrorKind.TIMED_OUT,
                ) from error
            time.sleep(_AGAIN_S)
        except OSError as error:
            raise lost(error, timeout_s=timeout_s) from error


class Listener:
    """A consumer's address: ``open_stream(listener)`` gives the stream of the next producer that calls.

    Open it again after a connection was cut: what was acknowledged before is known by its keys and not yielded twice.
    ``have``: the same for what an earlier process acknowledged, key -> checksum. Close it, or leave ``with``.
    """

    def __init__(self, address: Address, *, have: Mapping[RecordKey, int] | None = None) -> None:
        self._asked = address
        self._server = listening(address)
        self._received = Received(keys=have)
        self._pool = BufferPool()

    @property
    def address(self) -> str:
        """Where producers call; with the port that the system chose where 0 was asked for."""
        if self._asked.scheme != "tcp":
            return f"{self._asked.scheme}://{self._asked.path}"
        host, port = self._server.getsockname()[:2]
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

    def new_sink(self, spec: RouteSpec, options: SinkOptions) -> ConnectedWriter:
        """Producers give the address, not the listener."""
        raise refused(f"new_stream({self.address!r}, spec)", "the listener at it")

    def open_source(self, policy: ReadPolicy, options: SourceOptions) -> ConnectedReader:
        """The stream of the next producer that calls. Raises TransportError (TIMED_OUT)."""
        connection = self.accept(options.timeout_s)
        return self._reader(connection, policy, options, SocketBack(connection))

    def accept(self, timeout_s: float | None) -> socket.socket:
        """The next connection."""
        self._server.settimeout(timeout_s)
        try:
            connection, _ = self._server.accept()
        except OSError as error:
            raise lost(error, timeout_s=timeout_s) from error
        connection.settimeout(timeout_s)
        if self._asked.scheme == "tcp":
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connection

    def _reader(
        self, connection: socket.socket, policy: ReadPolicy, options: SourceOptions, back: SocketBack
    ) -> ConnectedReader:
        frames = frames_received(filler(connection, timeout_s=options.timeout_s), self._pool.take)
        return connected(frames, policy, options, back=back, received=self._received)

    def close(self) -> None:
        """Listen no more. Streams that are open go on."""
        self._server.close()
        if self._asked.scheme == "unix":
            Path(self._asked.path).unlink(missing_ok=True)

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connected(
    frames: Iterator[Any], policy: ReadPolicy, options: SourceOptions, *, back: SocketBack, received: Received
) -> ConnectedReader:
    """A reader over frames; hangs up where they do not begin as a stream."""
    try:
        return ConnectedReader(frames, policy, back=back, received=received, acknowledge=options.acknowledge)
    except BaseException:
        back.close()
        raise


def listen(address: str, *, have: Mapping[RecordKey, int] | None = None) -> Listener:
    """Listen at ``tcp://host:port`` (port 0: any that is free) or ``unix:///path``.

    Raises TransportError where that cannot be, UsageError for another address.
    """
    parsed = parse_address(address)
    if parsed.scheme not in ("tcp", "unix"):
        raise refused("tcp://host:port or unix:///path", repr(address))
    return Listener(parsed, have=have)


class _Place:
    """An address: a producer calls there, a consumer listens there for one stream."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def new_sink(self, spec: RouteSpec, options: SinkOptions) -> ConnectedWriter:
        network = self._address.scheme == "tcp"
        encoding = choose_encoding(options.encoding or ("auto" if network else "plain"), spec)
        line = SocketLine(call(self._address, timeout_s=options.timeout_s), timeout_s=options.timeout_s)
        return ConnectedWriter(line, spec, encoding=encoding, max_bytes=options.max_bytes)

    def open_source(self, policy: ReadPolicy, options: SourceOptions) -> ConnectedReader:
        with Listener(self._address) as listener:
            return listener.open_source(policy, options)


def transport(address: Address) -> _Place:
    """The place of an address."""
    if address.scheme == "tcp" and (not address.host or address.port is None or address.path):
        raise refused("tcp://host:port", f"{address.location}{address.path}")
    if address.scheme == "unix" and (address.host or not address.path):
        raise refused("unix:///path", f"{address.location}{address.path}")
    return _Place(address)
