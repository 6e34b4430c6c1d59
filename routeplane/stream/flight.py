"""Streams over Arrow Flight: the side of producers and consumers. ``flight_service`` is the other one.

A block travels as one native Arrow batch (``narrow`` where the geometry allows it) with its description beside it as
``app_metadata``; everything else is an action with a JSON object. What is selected is cut by the service, so only that
travels. The only wire here is Flight's own.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.flight as fl

from routeplane.errors import ErrorKind, RouteplaneError, TransportError, refused
from routeplane.record.codec import write_batch
from routeplane.record.policy import ReadPolicy
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.schema import Encoding, choose_encoding, parse_schema
from routeplane.record.spec import RouteSpec
from routeplane.stream import messages
from routeplane.stream.addresses import yes_or_no
from routeplane.stream.batches import RecordsOfBatches
from routeplane.stream.brokered import BrokeredReader, BrokeredWriter
from routeplane.stream.delivery import Block, Membership, Session, Taken, Totals
from routeplane.stream.selection import Selection

if TYPE_CHECKING:
    from typing import Self

    from routeplane.record.interfaces import RouteTicket
    from routeplane.stream.addresses import Address, SinkOptions, SourceOptions

__all__ = ["FlightPlane", "FlightReader", "FlightWriter", "transport"]

# How long the service is asked to wait at a time, and how much longer an answer may take before the way counts as cut.
_ASK_S, _GRACE_S = 2.0, 60.0
# How often a producer takes the way to the service again, and how long it waits in between at first.
_RETRIES, _FIRST_RETRIES, _FIRST_PAUSE_S = 8, 3, 0.1


def transport(address: Address) -> FlightPlane:
    """``grpc://host:port`` or ``grpc+tls://host:port?ca=PEM_FILE&token_file=FILE``, and ``linger=false`` for a writer
    whose ``close`` does not wait. Raises UsageError, OSError."""
    unknown = set(address.query) - {"ca", "token_file", "linger"}
    if unknown or address.path not in ("", "/") or address.port is None:
        raise refused("grpc://host:port or grpc+tls://host:port with ca=, token_file= and linger=", str(address))
    files = {name: Path(path).read_bytes() for name, path in address.query.items() if name != "linger"}
    return FlightPlane(
        f"{address.scheme}://{address.location}",
        token=files["token_file"].decode().strip() if "token_file" in files else None,
        root_certificates=files.get("ca"),
        linger=yes_or_no(address, "linger"),
    )


@dataclass(frozen=True, kw_only=True)
class FlightPlane:
    """The address of a service, for ``new_stream`` and ``open_stream``; connects when it is used.

    ``root_certificates``: PEM bytes that the service's certificate must come from, None for those of the system.
    ``linger``: a writer's ``close`` returns when nothing can be lost any more: at once from a service with a spool,
    otherwise when every group acknowledged all of it.
    """

    location: str = field(kw_only=False)
    token: str | None = field(default=None, repr=False)
    root_certificates: bytes | None = field(default=None, repr=False)
    linger: bool = True

    def new_sink(self, spec: RouteSpec, options: SinkOptions) -> FlightWriter:
        """A producer's end. Raises UsageError where one of its name is there; TransportError."""
        encoding = choose_encoding(options.encoding or "auto", spec)
        return FlightWriter(
            _Port(self, spec=spec, encoding=encoding),
            spec,
            codec=_Codec(encoding),
            producer=options.producer or uuid.uuid4().hex,
            block_bytes=options.max_bytes,
            timeout_s=options.timeout_s,
            retries=_RETRIES,
            linger=self.linger,
        )

    def open_source(self, policy: ReadPolicy, options: SourceOptions) -> FlightReader:
        """A consumer's end; waits for the first producer. Raises TransportError."""
        port = _Port(self)
        spec, encoding = port.describe(options.timeout_s)
        return FlightReader(port, spec, codec=_Codec(encoding), policy=policy, options=options)

    def fetch(
        self,
        keys: Iterable[RecordKey],
        *,
        layer_ids: Sequence[int] | None = None,
        tokens: tuple[int, int] | None = None,
        policy: ReadPolicy | None = None,
    ) -> list[RouteRecord]:
        """Records that the service holds, by key, cut there; in no order, and acknowledged by nobody.

        Raises DataError (ROUTES_MISSING) where one never came or has left: see ``ServiceOptions.keep``.
        """
        selection = Selection(layer_ids=None if layer_ids is None else tuple(layer_ids), tokens=tokens)
        with _Port(self) as port:
            return port.fetch(list(keys), selection, policy=policy or ReadPolicy())

    def redeem(self, ticket: RouteTicket) -> RouteRecord:
        """The rows that a ticket names, as a record of these tokens. Raises as ``fetch``."""
        [record] = self.fetch([ticket.key], tokens=(ticket.start, ticket.stop))
        return record

    def ask(self, action: Literal["health", "metrics", "seal"], /) -> dict[str, Any]:
        """``health``: that it serves; ``metrics``: its scalars; ``seal``: no further producer will come."""
        with _Port(self) as port:
            return port.action(action)

    def retire(self, *, below: int) -> int:
        """Let go of every block whose newest weights are below a version, acknowledged or not; how many."""
        with _Port(self) as port:
            return int(port.action("retire", below=below)["retired"])


class FlightWriter(BrokeredWriter):
    """The RouteSink of a producer."""


class FlightReader(BrokeredReader):
    """The RouteSource of a consumer. What ``select`` asks for is cut by the service and counted as it came."""

    def __init__(
        self, port: _Port, spec: RouteSpec, *, codec: _Codec, policy: ReadPolicy, options: SourceOptions
    ) -> None:
        super().__init__(port, spec, codec=codec, policy=policy, options=options)
        self._flight, self._batches = port, codec

    def select(self, *, layer_ids: Sequence[int] | None = None, tokens: tuple[int, int] | None = None) -> Self:
        """See ``RouteSource.select``; records with no token in the range do not travel."""
        super().select(layer_ids=layer_ids, tokens=tokens)
        self._flight.selection = Selection(layer_ids=self._layer_ids, tokens=self._tokens)
        return self

    def _records(self, block: Block) -> Iterator[RouteRecord]:
        batch, is_cut = block.payload
        yield from super()._records(block)
        if is_cut:  # then what lies outside did not travel
            outside = len(block.keys) - batch.num_rows
            self._report = replace(self._report, outside=self._report.outside + outside)

    def _cut(self, record: RouteRecord) -> RouteRecord | None:
        return record if self._batches.cut else super()._cut(record)

    def close(self) -> None:
        """Leave the group and hang up."""
        closing = not self._closed
        super().close()
        if closing:
            self._flight.hang_up()


class _Codec:
    """Payloads are batches; those that a consumer is given say whether the service cut them."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self.cut = False

    def encode(self, records: Sequence[RouteRecord]) -> tuple[pa.RecordBatch, int]:
        batch = write_batch(records, records[0].spec, encoding=self._encoding)
        return batch, batch.nbytes

    def open(self, payload: tuple[pa.RecordBatch, bool], policy: ReadPolicy) -> RecordsOfBatches:
        batch, self.cut = payload
        return RecordsOfBatches([batch], parse_schema(batch.schema), policy=policy)


class _Port:
    """A connection: what ``BrokeredWriter`` and ``BrokeredReader`` ask of a broker, asked of a service."""

    def __init__(self, plane: FlightPlane, *, spec: RouteSpec | None = None, encoding: Encoding = "plain") -> None:
        self._plane, self._spec, self._encoding = plane, spec, encoding
        self._client: Any = None
        self._owner, self._attached = uuid.uuid4().hex, False
        self.selection = Selection()

    # -- the way -----------------------------------------------------------------------------------------------------

    def _connected(self) -> Any:
        if self._client is None:
            self._client = fl.connect(self._plane.location, tls_root_certs=self._plane.root_certificates)
        return self._client

    def hang_up(self) -> None:
        """Let go of the connection; the next call makes another."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()

    def _options(self) -> Any:
        token = self._plane.token
        headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        return fl.FlightCallOptions(timeout=_ASK_S + _GRACE_S, headers=headers)

    def _asked(self, work: Callable[[Any, Any], Any]) -> Any:
        try:
            return work(self._connected(), self._options())
        except fl.FlightError as error:
            raise _raised(error, self._plane.location) from error
        except (pa.ArrowException, OSError) as error:
            raise _cut_off(error, self._plane.location) from error

    def action(self, name: str, **entries: Any) -> dict[str, Any]:
        """One action; its answer."""
        body = fl.Action(name, messages.dump(**entries))
        [answer] = self._asked(lambda client, options: list(client.do_action(body, options)))
        return messages.document_of(answer.body)

    def _ask_until(self, name: str, wanted: str, *, timeout_s: float | None, **entries: Any) -> dict[str, Any]:
        """Ask again and again, the service waiting each time, until an answer has what is wanted."""
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = end - time.monotonic()
            answer = self.action(name, wait_s=min(_ASK_S, max(left, 0.0)), **entries)
            if answer.get(wanted):
                return answer
            if left <= 0:
                raise TransportError(
                    f"expected {wanted} within {timeout_s} s, got none @ {self._plane.location}",
                    kind=ErrorKind.TIMED_OUT,
                )

    # -- producers ---------------------------------------------------------------------------------------------------

    def attach(self, producer: str, *, first: int = 0, before: Totals | None = None) -> Session:
        if self._spec is None:
            raise refused("a connection of a producer", "one of a consumer")
        attempts = _RETRIES if self._attached else _FIRST_RETRIES
        self._attached = True
        for attempt in range(attempts):
            self.hang_up()
            try:
                answer = self.action(
                    "attach",
                    owner=self._owner,
                    producer=producer,
                    first=first,
                    before=before,
                    spec=self._spec.to_json(),
                    encoding=self._encoding,
                )
                return messages.session_of(answer["session"])
            except TransportError as error:
                if error.kind != ErrorKind.CONNECTION or attempt == attempts - 1:
                    raise
                time.sleep(_FIRST_PAUSE_S * 2**attempt)
        raise refused("at least one attempt", "none")

    def put(self, session: Session, block: Block, *, timeout_s: float | None = None) -> Session:
        described = messages.dump_block(block)
        self._ask_until("reserve", "room", timeout_s=timeout_s, session=session, block=described)
        del described["keys"]  # which stand in the batch
        descriptor = fl.FlightDescriptor.for_command(messages.dump(session=session, block=described))

        def work(client: Any, options: Any) -> Any:
            writer, answers = client.do_put(descriptor, block.payload.schema, options)
            with writer:
                writer.write_batch(block.payload)
                writer.done_writing()
                return answers.read()

        answer = self._asked(work)
        if answer is None:
            raise _cut_off(EOFError("no answer to a block"), self._plane.location)
        return messages.session_of(messages.document_of(answer)["session"])

    def heartbeat(self, session: Session) -> Session:
        return messages.session_of(self.action("heartbeat", session=session)["session"])

    def wait_acknowledged(self, session: Session, *, through: int, timeout_s: float | None = None) -> Session:
        answer = self._ask_until("acknowledged", "session", timeout_s=timeout_s, session=session, through=through)
        return messages.session_of(answer["session"])

    def close(self, session: Session, *, totals: Totals) -> None:
        self.action("close", session=session, totals=totals)

    def abort(self, session: Session) -> None:
        self.action("abort", session=session)

    def disconnect(self, session: Session) -> None:
        self.action("disconnect", session=session)

    # -- consumers ---------------------------------------------------------------------------------------------------

    def describe(self, timeout_s: float | None) -> tuple[RouteSpec, Encoding]:
        """Spec and encoding of the stream, once a producer brought them."""
        answer = self._ask_until("describe", "spec", timeout_s=timeout_s)
        spec = RouteSpec.from_json(answer["spec"])
        return spec, choose_encoding(answer["encoding"], spec)

    def join(self, group: str, consumer: str, *, cursor: Mapping[str, int] | None = None) -> Membership:
        answer = self.action("join", group=group, consumer=consumer, cursor=None if cursor is None else dict(cursor))
        return messages.membership_of(answer["member"])

    def take(self, member: Membership, *, max_blocks: int = 1, timeout_s: float | None = None) -> Taken:
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = end - time.monotonic()
            parts = self._got(
                op="take",
                member=member,
                max_blocks=max_blocks,
                wait_s=min(_ASK_S, max(left, 0.0)),
                selection=self.selection,
            )
            progress = messages.progress_of(messages.document_of(parts[-1][1], names=["progress"])["progress"])
            blocks = tuple(_given(batch, text) for batch, text in parts[:-1])
            if blocks or progress.ended or left <= 0:
                return Taken(blocks=blocks, progress=progress)

    def acknowledge(self, member: Membership, *, producer: str, through: int) -> None:
        self.action("acknowledge", member=member, producer=producer, through=through)

    def leave(self, member: Membership) -> None:
        self.action("leave", member=member)

    def fetch(self, keys: list[RecordKey], selection: Selection, *, policy: ReadPolicy) -> list[RouteRecord]:
        """Records by key."""
        parts = self._got(op="fetch", keys=keys, selection=selection)
        return [
            record
            for batch, _ in parts[:-1]
            for record in RecordsOfBatches([batch], parse_schema(batch.schema), policy=policy)
        ]

    def _got(self, **command: Any) -> list[tuple[Any, bytes]]:
        """The batches of an answer, each with its JSON. The last has no rows; without it the answer was cut."""
        ticket = fl.Ticket(messages.dump(**command))
        chunks = self._asked(lambda client, options: list(client.do_get(ticket, options)))
        parts = [(chunk.data, chunk.app_metadata.to_pybytes()) for chunk in chunks if chunk.app_metadata is not None]
        if not parts or parts[-1][0].num_rows or len(parts) < len(chunks):
            raise _cut_off(EOFError("an answer without its end"), self._plane.location)
        return parts


def _given(batch: pa.RecordBatch, text: bytes) -> Block:
    document = messages.document_of(text, names=["block", "cut"])
    return messages.block_of(document["block"], payload=(batch, bool(document["cut"])))


def _raised(error: Any, location: str) -> RouteplaneError:
    """What a service raised, as it was raised there; a way that is cut is a TransportError."""
    return messages.error_of(error.extra_info) if error.extra_info else _cut_off(error, location)


def _cut_off(error: Exception, location: str) -> TransportError:
    return TransportError(
        f"expected the service to answer, got {str(error)[:200]!r} @ {location}: is it running? Open the stream again "
        "under the same name; what was not acknowledged is sent again",
        kind=ErrorKind.CONNECTION,
    )
