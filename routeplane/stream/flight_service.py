"""The service side of Arrow Flight: one stream behind a network address. ``routeplane serve`` runs it.

Decides nothing: ``gate`` and its ledger do. Owns what a network adds: TLS, the shared token, limits, waits that end so
that a client which left is noticed, and errors that arrive as they were raised. ``flight`` is the other side.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow.flight as fl

from routeplane.errors import ErrorKind, RouteplaneError, TransportError, TruncatedError, UsageError, refused
from routeplane.stream import messages
from routeplane.stream.blocks import batch_of_stream, stream_of_batch
from routeplane.stream.delivery import DeliveryReport
from routeplane.stream.gate import Gate, PlaneOptions
from routeplane.stream.handlers import Handlers

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self


__all__ = ["FlightService", "ServiceOptions"]

#: Actions that clients may ask for; each is the method of ``Handlers`` of that name.
_ACTIONS = (
    "abort",
    "acknowledge",
    "acknowledged",
    "attach",
    "close",
    "describe",
    "disconnect",
    "health",
    "heartbeat",
    "join",
    "leave",
    "metrics",
    "reserve",
    "retire",
    "seal",
)


@dataclass(frozen=True, kw_only=True)
class ServiceOptions(PlaneOptions):
    """What a service holds, and whom it lets in.

    ``token``: what clients must present, None for none. ``certificate``, ``private_key``: PEM bytes, for TLS.
    """

    token: str | None = field(default=None, repr=False)
    certificate: bytes | None = field(default=None, repr=False)
    private_key: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.certificate is None) != (self.private_key is None):
            raise refused("a certificate with its private key, or neither", "one of the two")
        if self.token == "":
            raise refused("a token that is not empty", "an empty one")


class FlightService:
    """A running service; a context manager, which stops it. Listens from construction on.

    ``port`` 0 takes a free one, which ``location`` names. Without TLS and a token it should listen on loopback alone.
    """

    def __init__(
        self,
        options: ServiceOptions,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gate = Gate(options, to_bytes=stream_of_batch, load=batch_of_stream, clock=clock)
        self._scheme = "grpc" if options.certificate is None else "grpc+tls"
        self._host = host
        try:
            self._server = _Server(f"{self._scheme}://{host}:{port}", Handlers(self._gate), options)
        except BaseException:
            self._gate.close_spool()
            raise

    @property
    def location(self) -> str:
        """The address for clients of this machine."""
        return f"{self._scheme}://{self._host}:{self._server.port}"

    def report(self) -> DeliveryReport:
        """What was delivered and is held."""
        return self._gate.report()

    def seal(self) -> None:
        """No further producer will come."""
        self._gate.seal()

    def tick(self) -> None:
        """Look at the clock now: for another clock than the machine's."""
        self._gate.tick()

    def stop(self) -> None:
        """Let go of everybody who waits, and stop listening. What no consumer took is gone unless there is a spool, or
        its producers send it again to the service that is started next. Again is no error."""
        self._gate.shut("stopped", for_good=False)
        self._server.shutdown()
        self._gate.close_spool()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class _Token(fl.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow ships no types
    """Refuses calls without the shared token, before anything of them is read."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._expected = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: Mapping[str, list[Any]]) -> None:
        """Called by Flight for every call."""
        given = [value for name, values in headers.items() if name.lower() == "authorization" for value in values]
        presented = given[0].encode() if given and isinstance(given[0], str) else b""
        if not hmac.compare_digest(presented, self._expected):
            error = TransportError("expected the service's token, got another or none", kind=ErrorKind.UNAUTHENTICATED)
            raise fl.FlightUnauthenticatedError(error.message, messages.dump_error(error))


class _Server(fl.FlightServerBase):  # type: ignore[misc]  # pyarrow ships no types
    """Flight's calls, each handed to ``Handlers``; each runs in a thread of Flight's."""

    def __init__(self, location: str, handlers: Handlers, options: ServiceOptions) -> None:
        certificates = [] if options.certificate is None else [fl.CertKeyPair(options.certificate, options.private_key)]
        middleware = {} if options.token is None else {"token": _Token(options.token)}
        self._handlers = handlers
        self._actions = {name: getattr(handlers, name) for name in _ACTIONS}
        super().__init__(location, tls_certificates=certificates, middleware=middleware)

    def do_action(self, context: Any, action: Any) -> Iterator[Any]:
        """An action by name, its JSON in the body."""
        handler = self._actions.get(action.type)
        if handler is None:
            raise _flight_error(refused(f"one of the actions {_ACTIONS}", action.type))
        yield fl.Result(_asked(lambda: handler(messages.document_of(action.body or b"{}"))))

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        """The actions and what each does."""
        return [(name, str(handler.__doc__)) for name, handler in self._actions.items()]

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """One block: the command names it, the one batch is its payload, the answer is the session."""

        def work() -> bytes:
            command = messages.document_of(descriptor.command or b"", names=["session", "block"])
            chunks = [chunk.data for chunk in _chunks(reader)]
            if len(chunks) != 1:
                raise TruncatedError(f"expected one batch, got {len(chunks)}", kind=ErrorKind.TRUNCATED)
            return self._handlers.put(command, schema=reader.schema, batch=chunks[0])

        writer.write(_asked(work))

    def do_get(self, context: Any, ticket: Any) -> Any:
        """Blocks for a consumer, or records by key. The last chunk has no rows: without it the answer was cut."""

        def work() -> Any:
            command = messages.document_of(ticket.ticket, names=["op"])
            work_of = {"take": self._handlers.take, "fetch": self._handlers.fetch}
            if command["op"] not in work_of:
                raise refused(f"one of {sorted(work_of)}", repr(command["op"]))
            return work_of[command["op"]](command)

        schema, parts = _asked(work)
        return fl.GeneratorStream(schema, iter(parts))


def _chunks(reader: Any) -> Iterator[Any]:
    while True:
        try:
            yield reader.read_chunk()
        except StopIteration:
            return


def _asked(work: Callable[[], Any]) -> Any:
    """Run a handler; what it raises goes over the wire as what it is. A request of another shape is the client's."""
    try:
        return work()
    except RouteplaneError as error:
        raise _flight_error(error) from None
    except (KeyError, TypeError, ValueError) as error:
        wrong = UsageError(f"expected a request of this service, got another ({error})", kind=ErrorKind.ARGUMENT)
        raise _flight_error(wrong) from None


def _flight_error(error: RouteplaneError) -> Exception:
    made: Exception = fl.FlightServerError(error.message, messages.dump_error(error))
    return made
