"""Endpoints that exist before their servers: a listening socket, held from the first second and never rebound.

Owns the socket, the answer that callers get while there is no server, and the states of a fleet's endpoints. Knows
no server: the server is handed the socket itself (uvicorn: ``Server.serve(sockets=[...])``), so that no other
process can take the port in between. No third party.

Between ``reserve`` and ``hand_over`` a thread answers every request with 503 and Retry-After: a bare listening socket
would let clients hang in its backlog until they time out.

A server that may be killed must not own the socket: the kernel closes it, and callers are refused. ``EndpointKeeper``
holds it in a process of its own, lends it to one server after another, and answers while none has it.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from routeplane.errors import ErrorKind, FleetError, refused

__all__ = [
    "WILDCARDS",
    "BorrowedEndpoint",
    "Endpoint",
    "EndpointKeeper",
    "EndpointState",
    "Endpoints",
    "KeptEndpoint",
    "ServerState",
    "reserve",
]

#: What the kernel keeps of connections that no server accepted yet; the size that uvicorn asks for.
_BACKLOG = 2048
#: Seconds that a caller is told to wait, and that one is given to send its request.
_RETRY_AFTER = 1
_REQUEST_TIMEOUT = 5.0
#: How much of a refused request's body is read, and in what steps; a longer one is cut off.
_DRAIN_BYTES, _DRAIN_STEP = 64 << 20, 1 << 16
#: How often the answering thread looks whether it should end; bounds how long ``hand_over`` takes.
_POLL_SECONDS = 0.02
#: What a server and the keeper of its endpoint say to each other, and how long each waits for the other.
_SOCKET, _SERVING, _NOTED = b"socket", b"serving", b"noted"
_LENDING_SECONDS = 10.0


#: Addresses that bind all interfaces, and that no caller can connect to from elsewhere.
WILDCARDS = ("0.0.0.0", "::")


class ServerState(StrEnum):
    """What stands behind an endpoint.

    >>> Endpoints.of(["http://127.0.0.1:21000/v1"]).states[0].state
    <ServerState.RESERVED: 'reserved'>
    """

    RESERVED = "reserved"  # the port is ours; requests get 503
    SERVING = "serving"
    DEGRADED = "degraded"  # it served and does not now; its place and URL stay
    CLOSED = "closed"


@dataclass(frozen=True, kw_only=True, slots=True)
class EndpointState:
    """One shard's URL and state, as plain values that cross processes.

    >>> EndpointState(shard=0, url="http://127.0.0.1:21000/v1", state=ServerState.RESERVED).state.value
    'reserved'
    """

    shard: int
    url: str
    state: ServerState


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoints:
    """The endpoints of a fleet in shard order. None is the empty one: ``bool(endpoints)`` says whether there are any.

    A shard that fails changes its state; it never leaves, so that position i is shard i for as long as the fleet lives.
    Raises UsageError (ARGUMENT) where shards are not 0, 1, ... in order, or two share a URL.
    """

    states: tuple[EndpointState, ...] = ()

    def __post_init__(self) -> None:
        shards = [state.shard for state in self.states]
        if shards != list(range(len(shards))):
            raise refused("shards 0, 1, ... in order", f"{shards}")
        for url in self.urls:
            _check_url(url)
        urls = self.urls
        if len(set(urls)) != len(urls):
            raise refused("a URL of its own for every shard", f"{list(urls)}")

    @classmethod
    def of(cls, urls: Iterable[str], *, state: ServerState = ServerState.RESERVED) -> Endpoints:
        """Endpoints that are all in one state, shard numbers in the order of ``urls``.

        Raises UsageError (ARGUMENT) for one string in place of several, and for what is not an http URL with a host.

        Example::

            >>> Endpoints.of(["http://127.0.0.1:21000/v1"]).urls
            ('http://127.0.0.1:21000/v1',)
        """
        if isinstance(urls, str):
            raise refused("a sequence of URLs", f"one string, {urls!r}")
        return cls(states=tuple(EndpointState(shard=shard, url=url, state=state) for shard, url in enumerate(urls)))

    def __len__(self) -> int:
        return len(self.states)

    @property
    def urls(self) -> tuple[str, ...]:
        """Every shard's URL, whatever its state."""
        return tuple(state.url for state in self.states)


def _check_url(url: object) -> None:
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        usable = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        usable = False
    if not usable:
        raise refused("URLs like http://host:port/v1", repr(url))


def reserve(
    host: str, port_range: tuple[int, int], *, advertise: str | None = None, path: str = "/v1", port: int | None = None
) -> Endpoint:
    """Bind and listen on the first free port of ``[port_range[0], port_range[1])``, and answer 503 there at once.

    ``host``: the address to bind; a wildcard (``0.0.0.0``, ``::``) is spelled out. ``advertise``: the host that stands
    in the URL (default: ``host``). ``path``: appended to the URL. ``port``: this one or none, for a server that comes
    back at its old place. The caller owns the endpoint and closes it. Raises FleetError (NO_PORT) naming the range and
    what the last bind said, and UsageError (ARGUMENT) for no host, and for a range that is empty or no port range.

    >>> with reserve("127.0.0.1", (20_000, 30_000)) as endpoint:
    ...     endpoint.url == f"http://127.0.0.1:{endpoint.port}/v1", endpoint.state.value
    (True, 'reserved')
    """
    first, stop = port_range
    if not host:
        raise refused("a host to bind (0.0.0.0 or :: for all interfaces)", repr(host))
    if not 0 < first < stop <= 65_536:
        raise refused("a port range 0 < first < stop <= 65536", f"{port_range}")
    if port is not None and not first <= port < stop:
        raise refused(f"a port in [{first}, {stop})", f"{port}")
    if advertise is None and host in WILDCARDS:
        raise refused(f"a host to advertise, as {host!r} binds all interfaces", "none")
    last: OSError | None = None
    for candidate in (port,) if port is not None else range(first, stop):
        try:
            listening = _listen(host, candidate)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise FleetError(
                    f"expected an address of this machine to bind, got {host!r}: {error}", kind=ErrorKind.NO_PORT
                ) from error
            last = error
            continue
        return Endpoint(listening, advertise or host, path=path)
    wanted = f"port {port}" if port is not None else f"a free port in [{first}, {stop})"
    raise FleetError(f"expected {wanted} on {host!r}, got none: {last}", kind=ErrorKind.NO_PORT) from last


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A server that comes back finds its own closed connections in TIME_WAIT. With this a bind still fails where
        # another socket listens (Linux; unlike SO_REUSEPORT, which would share the port silently).
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


class Endpoint:
    """A port that is ours, with an answer until a server takes over. Owns its socket until ``hand_over``.

    Lives in the process that serves. ``url`` is known at once and never changes. Leaving ``with`` closes.

    >>> endpoint = reserve("127.0.0.1", (20_000, 30_000))
    >>> listening = endpoint.hand_over()  # for the server to accept on: ``Server.serve(sockets=[listening])``
    >>> listening.getsockname()[1] == endpoint.port
    True
    >>> endpoint.close()
    """

    def __init__(self, listening: socket.socket, host: str, *, path: str) -> None:
        self._socket = listening
        bracketed = f"[{host}]" if ":" in host else host
        self.port: int = listening.getsockname()[1]
        self.url = f"http://{bracketed}:{self.port}{path}"
        self._lock = threading.Lock()
        self._state = ServerState.RESERVED
        self._responder: _Responder | None = _Responder(listening)

    @property
    def state(self) -> ServerState:
        """What stands behind the endpoint now."""
        return self._state

    def hand_over(self) -> socket.socket:
        """The listening socket, for the server to accept on; nothing is closed or bound again.

        The answering thread ends first; a connection that arrives meanwhile waits in the backlog for the server. The
        socket stays open until ``close``, also after the server ended (uvicorn does not close what it was handed).
        Raises FleetError (CLOSED) after ``close``, and where a server has it.
        """
        with self._lock:
            if self._responder is None:
                raise FleetError(
                    f"expected an endpoint that is reserved and not handed over, got {self.url} ({self._state})",
                    kind=ErrorKind.CLOSED,
                )
            responder, self._responder = self._responder, None
        responder.end()
        self._socket.setblocking(False)
        return self._socket

    def take_back(self) -> None:
        """Answer 503 again: the server that had the socket is gone. The state is DEGRADED where it served."""
        with self._lock:
            if self._responder is not None or self._state is ServerState.CLOSED:
                return
            self._responder = _Responder(self._socket)
            if self._state is ServerState.SERVING:
                self._state = ServerState.DEGRADED

    def mark_serving(self) -> None:
        """Say that the server accepts. Raises FleetError (CLOSED) before ``hand_over``."""
        with self._lock:
            if self._responder is not None or self._state is ServerState.CLOSED:
                raise FleetError(
                    f"expected a server that was handed the socket of {self.url}, got none", kind=ErrorKind.CLOSED
                )
            self._state = ServerState.SERVING

    def close(self) -> None:
        """End the answering thread and close the socket. Idempotent; frees the port."""
        with self._lock:
            responder, self._responder = self._responder, None
            self._state = ServerState.CLOSED
        if responder is not None:
            responder.end()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _ReservedHandler(BaseHTTPRequestHandler):
    """503 for everything, whatever the method."""

    timeout = _REQUEST_TIMEOUT  # of the socket: a caller that sends nothing holds its thread no longer
    protocol_version = "HTTP/1.1"
    server_version = "routeplane"
    sys_version = ""

    def parse_request(self) -> bool:
        """Answer as soon as the request's head is read: methods and bodies make no difference here."""
        if super().parse_request():
            body = b'{"error": "no engine behind this endpoint at present: it loads, or it is gone"}\n'
            self.send_response(503)
            self.send_header("Retry-After", str(_RETRY_AFTER))
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
        self.close_connection = True
        return False

    def finish(self) -> None:
        """End our side, then read what the caller still sends: closing over unread bytes would reset the connection,
        and the caller of a POST would see that instead of the 503.
        """
        try:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_WR)
            for _ in range(_DRAIN_BYTES // _DRAIN_STEP):
                if not self.connection.recv(_DRAIN_STEP):
                    break
        except OSError:  # the caller went, or sends too slowly
            pass
        finally:
            super().finish()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a caller that polls would fill the log."""


class _ReservedServer(ThreadingHTTPServer):
    """The standard library's server on a socket that it does not own."""

    daemon_threads = True

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(listening.getsockname()[:2], _ReservedHandler, bind_and_activate=False)
        self.socket.close()  # the one that the base class made, never bound
        self.socket = listening

    def handle_error(self, request: object, client_address: object) -> None:
        """A caller that hangs up early needs no answer."""


class _Responder:
    """The thread that answers on a listening socket until ``end``; the socket stays open."""

    def __init__(self, listening: socket.socket) -> None:
        # accept() would block for good where a caller left the backlog between select and accept
        listening.setblocking(False)
        self._server = _ReservedServer(listening)
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": _POLL_SECONDS},
            name=f"routeplane-503-{listening.getsockname()[1]}",
            daemon=True,
        )
        self._thread.start()

    def end(self) -> None:
        self._server.shutdown()
        self._thread.join()


# ----------------------------------------------------------------------------------------------------------------------
# An endpoint that outlives its servers
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptEndpoint:
    """An endpoint that a keeper holds. ``socket_path``: the path of the local socket where servers borrow it.

    >>> KeptEndpoint(url="http://127.0.0.1:21000/v1", socket_path="/run/lend").url
    'http://127.0.0.1:21000/v1'
    """

    url: str
    socket_path: str


class EndpointKeeper:
    """Holds one endpoint for servers in other processes of this machine, one server at a time. Owns the socket.

    A server borrows the listening socket and keeps its connection to the keeper as long as it serves. Where that
    connection ends, by whatever cause, the keeper answers 503 at once: the port is open throughout, and no caller is
    refused. Arguments as ``reserve``'s.

    >>> keeper = EndpointKeeper("127.0.0.1", (20_000, 30_000))
    >>> kept = keeper.reserve(None, None)
    >>> borrowed = BorrowedEndpoint(kept)
    >>> listening = borrowed.hand_over()
    >>> borrowed.mark_serving()
    >>> keeper.state().value
    'serving'
    >>> borrowed.close()
    >>> keeper.close()
    """

    def __init__(self, host: str, port_range: tuple[int, int]) -> None:
        self._host, self._port_range = host, port_range
        self._endpoint: Endpoint | None = None
        self._lending = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server: socket.socket | None = None
        # only this user may enter the folder, and so borrow
        self._folder = tempfile.TemporaryDirectory(prefix="routeplane-endpoint-")
        self._thread = threading.Thread(target=self._lend, name="routeplane-keeper", daemon=True)

    def reserve(self, advertise: str | None, port: int | None) -> KeptEndpoint:
        """Listen now, once; 503 until a server borrows. ``port``: this one or none. Raises as ``reserve``."""
        self._endpoint = reserve(self._host, self._port_range, advertise=advertise, port=port)
        path = str(Path(self._folder.name) / "lend")
        self._lending.bind(path)
        self._lending.listen()
        self._thread.start()
        return KeptEndpoint(url=self._endpoint.url, socket_path=path)

    def state(self) -> ServerState:
        """What stands behind the endpoint now; CLOSED before ``reserve``."""
        return ServerState.CLOSED if self._endpoint is None else self._endpoint.state

    def close(self) -> None:
        """Close the endpoint and free the port, whether a server has it or not. Idempotent."""
        if self._endpoint is not None:
            self._endpoint.close()  # first: nothing is taken back from here on
        for each in (self._lending, self._server):
            if each is not None:
                with contextlib.suppress(OSError):  # it is closed, or was never bound
                    each.shutdown(socket.SHUT_RDWR)  # close() alone would leave the thread waiting on it
        if self._thread.is_alive():
            self._thread.join()
        self._lending.close()
        self._folder.cleanup()

    def _lend(self) -> None:
        while True:
            try:
                self._server, _ = self._lending.accept()
            except OSError:  # closed
                return
            with self._server:
                self._lend_to(self._server)

    def _lend_to(self, server: socket.socket) -> None:
        endpoint = self._endpoint
        if endpoint is None:
            return
        try:
            socket.send_fds(server, [_SOCKET], [endpoint.hand_over().fileno()])
            while server.recv(len(_SERVING), socket.MSG_WAITALL) == _SERVING:
                endpoint.mark_serving()
                server.sendall(_NOTED)
        except (OSError, FleetError):  # the server was killed, or this was closed
            pass
        finally:
            endpoint.take_back()


class BorrowedEndpoint:
    """A kept endpoint in the process of its server, as ``Endpoint`` is where nothing keeps it. Owns its connection.

    Blocks for an instant. Raises FleetError (NOT_READY) where the keeper does not lend: it is gone, or another server
    still has the socket. Example: see EndpointKeeper.
    """

    def __init__(self, kept: KeptEndpoint) -> None:
        self.url = kept.url
        self._keeper = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._keeper.settimeout(_LENDING_SECONDS)
        try:
            self._keeper.connect(kept.socket_path)
            _, lent, _, _ = socket.recv_fds(self._keeper, len(_SOCKET), 1)
        except OSError as error:
            self._keeper.close()
            raise self._not_lent(str(error)) from error
        if not lent:
            self._keeper.close()
            raise self._not_lent("an endpoint that is closed")
        self._socket = socket.socket(fileno=lent[0])

    def hand_over(self) -> socket.socket:
        """The listening socket, for the server to accept on."""
        self._socket.setblocking(False)
        return self._socket

    def mark_serving(self) -> None:
        """Say that the server accepts. Raises FleetError (NOT_READY) where the keeper is gone."""
        try:
            self._keeper.sendall(_SERVING)
            noted = self._keeper.recv(len(_NOTED), socket.MSG_WAITALL)
        except OSError as error:
            raise self._not_lent(str(error)) from error
        if noted != _NOTED:
            raise self._not_lent("an endpoint that is closed")

    def give_back(self) -> None:
        """Have the keeper answer from here on; a server that still accepts may do so beside it. Idempotent."""
        self._keeper.close()

    def close(self) -> None:
        """Give back, and close this process's hold on the socket; its server must have ended. Idempotent."""
        self.give_back()
        self._socket.close()

    def _not_lent(self, got: str) -> FleetError:
        return FleetError(f"expected the socket of {self.url} from its keeper, got {got}", kind=ErrorKind.NOT_READY)
