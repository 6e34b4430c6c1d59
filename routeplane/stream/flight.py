"""The carrier ``flight``: a folder of blocks, served over Arrow Flight to hosts that do not mount it.

The server holds names, numbers and positions as ``folder`` does, and each lock for as long as the call of its holder
lasts: a writer is one ``DoPut`` for its blocks, the reader of a group one ``DoExchange`` for its positions. A process
that dies ends its call, and so its hold. ``DoGet`` sends one block, or a part of it that was cut here, verified, under
new checksums. ``ListFlights`` names the blocks for any Flight client.

One token per role; TLS where certificates are given. Without both, only a loopback address is served.

``place`` is the server's address, ``grpc://host:port`` or ``grpc+tls://host:port``. ``open_writer`` and ``open_reader``
take besides ``access``, an Access: the token of their role, and whom to trust.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.flight as fl

from routeplane import errors
from routeplane.errors import DataError, ErrorKind, FormatError, RouteplaneError, TransportError, refused
from routeplane.record.interfaces import BlockName, Position
from routeplane.record.parse import check_count
from routeplane.record.policy import ReadPolicy
from routeplane.record.record import RouteRecord
from routeplane.record.spec import RouteSpec
from routeplane.stream import blocks
from routeplane.stream.block_reader import BlockPart, BlockStore, Carrier, cut_block, parse_leans, sealed_cut
from routeplane.stream.files import frames_of
from routeplane.stream.folder import FolderSlot, FolderStore
from routeplane.stream.ipc import IpcReader

__all__ = ["Access", "Server", "Tokens", "open_reader", "open_writer"]

#: Bytes of a block in one message.
_CHUNK = 2**20
_CHUNKS = pa.schema([("data", pa.binary())])
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
#: What a document from the other side raises where it is not of our shape.
_MISSHAPEN = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """The secret of each role: who may write blocks, and who may read and acknowledge them. Never printed."""

    writer: str = field(repr=False)
    reader: str = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """What a client shows and trusts: the token of its role; certificates in PEM where the server has TLS."""

    token: str = field(default="", repr=False)
    root_certificates: bytes | None = None


NO_ACCESS = Access()


# -- what both sides say -----------------------------------------------------------------------------------------------


@contextmanager
def _telling() -> Iterator[None]:
    """Tell the other side of an error: its class, its kind, its text."""
    try:
        yield
    except (RouteplaneError, OSError, KeyError, TypeError) as error:
        kind = error.kind.value if isinstance(error, RouteplaneError) else ""
        told = [type(error).__name__, kind, str(error)]
        raise fl.FlightServerError(str(error), extra_info=_said(told)) from None


def _heard(error: fl.FlightError, place: str) -> RouteplaneError:
    """The error that the other side told of."""
    try:
        name, kind, text = map(str, json.loads(error.extra_info))
        known = vars(errors).get(name)
        known = known if isinstance(known, type) and issubclass(known, RouteplaneError) else TransportError
        return known(text, kind=ErrorKind(kind) if kind else ErrorKind.CONNECTION)
    except _MISSHAPEN:
        return TransportError(f"expected an answer of {place}, got {error}", kind=ErrorKind.CONNECTION)


def _said(value: Any) -> bytes:
    return json.dumps(value).encode()


def _parsed(data: bytes, *names: str) -> list[Any]:
    """Values of a request. Raises UsageError for anything else."""
    try:
        document = json.loads(data)
        return [document[name] for name in names]
    except _MISSHAPEN as error:
        raise refused(f"a request with {', '.join(names)}", f"{bytes(data)[:80]!r} ({error})") from None


def _chunks(data: pa.Buffer) -> Iterator[pa.RecordBatch]:
    for at in range(0, data.size, _CHUNK):
        part = data.slice(at, min(_CHUNK, data.size - at))
        offsets = pa.py_buffer(struct.pack("<ii", 0, part.size))
        yield pa.record_batch([pa.Array.from_buffers(pa.binary(), 1, [None, offsets, part])], schema=_CHUNKS)


def _bytes_of(batch: Any) -> memoryview:
    """The bytes in one message. Raises FormatError for another message than ``_chunks`` makes."""
    if batch is None or batch.schema != _CHUNKS or batch.num_rows != 1 or batch.column(0).null_count:
        raise FormatError("expected a part of a block, got another message", kind=ErrorKind.NOT_ARROW)
    batch.validate(full=True)
    return memoryview(batch.column(0)[0].as_buffer())


def _count(value: object) -> int:
    """A number of blocks or bytes, as the other side says it. Raises DataError."""
    return check_count(value, "a number of blocks or bytes", below=2**63)


def _ticket(name: BlockName | None, part: BlockPart | None = None) -> bytes:
    return _said({"block": name, "part": None if part is None else part.to_json()})


def _block_name(data: bytes) -> BlockName:
    (block,) = _parsed(data, "block")
    try:
        producer, number = block
        return BlockName(blocks.check_name(producer, "producer"), _count(number))
    except (DataError, TypeError, ValueError) as error:
        raise refused("a producer and a number", f"{block!r} ({error})") from None


# -- the server --------------------------------------------------------------------------------------------------------


class _Roles(fl.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses a call whose token is not that of its role, before anything of its body is read."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def start_call(self, info: Any, headers: Mapping[str, Sequence[str]]) -> None:
        role = "writer" if info.method == fl.FlightMethod.DO_PUT else "reader"
        given = next(iter(headers.get("authorization", ())), "")
        if not secrets.compare_digest(given.encode(), f"Bearer {getattr(self._tokens, role)}".encode()):
            raise fl.FlightUnauthenticatedError(f"expected the token of a {role}, got another")


def _verified(data: pa.Buffer, spec: RouteSpec) -> blocks.SealedBlock:
    """A block as it came, every record of it read. Raises FormatError, DataError, SpecError."""
    frames, walkable = frames_of(data)
    with IpcReader(frames, ReadPolicy(on_alarm="ignore"), walkable=walkable) as reader:
        reader.spec.require_same_geometry(spec, where="the place's manifest")
        for _ in reader:
            pass
        return blocks.SealedBlock(write_to=lambda sink: sink.write(data), leans=parse_leans(reader.trailer_metadata))


class _ServedSlot(FolderSlot):
    """A producer's name, held by its call: a wait for space ends when the call does."""

    context: Any = None

    def _has_space(self, size: int, leans: Sequence[int] | None) -> bool:
        if self.context.is_cancelled():
            raise TransportError("expected a writer, got the end of its call", kind=ErrorKind.CONNECTION)
        return super()._has_space(size, leans)


class Server(fl.FlightServerBase):  # type: ignore[misc]
    """Serves one folder of blocks; see the module. End it with ``shutdown()``, or leave ``with``.

    Args:
        place: the folder; created by the first writer.
        address: ``grpc://127.0.0.1:0`` (any free port of the loopback), or with TLS ``grpc+tls://host:port``.
        tokens: of the two roles; None: no client is asked for one.
        certificate: certificate chain and private key in PEM; None: no TLS.
        max_block_bytes: a larger block is refused while it comes.

    Raises UsageError for another address than the loopback without tokens and TLS.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place, Server(place) as server:
    ...     server.place.startswith("grpc://127.0.0.1:")
    True
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        address: str = "grpc://127.0.0.1:0",
        tokens: Tokens | None = None,
        certificate: tuple[bytes, bytes] | None = None,
        max_block_bytes: int = 2**28,
    ) -> None:
        scheme, _, target = address.partition("://")
        if scheme != ("grpc" if certificate is None else "grpc+tls"):
            raise refused("grpc://host:port, or grpc+tls://host:port with a certificate", address)
        host = target.rpartition(":")[0]
        if host not in _LOOPBACK and (tokens is None or certificate is None):
            raise refused("tokens and a certificate for an address that others reach", address)
        self._root, self._max_block_bytes = Path(place), max_block_bytes
        super().__init__(
            address,
            tls_certificates=None if certificate is None else [certificate],
            middleware=None if tokens is None else {"role": _Roles(tokens)},
        )
        #: Where clients find it, with the port that the system chose where 0 was asked for.
        self.place = f"{scheme}://{host}:{self.port}"

    def _store(self, group: str | None = None) -> FolderStore:
        return FolderStore(self._root, group=group)

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """One writer: its blocks, each answered with its number; its end. Its death ends the call."""
        with _telling():
            document, producer, given = _parsed(descriptor.command, "manifest", "producer", "limits")
            limits = blocks.BlockLimits(**{name: given[name] for name in blocks.BlockLimits.__slots__})
            slot = _ServedSlot(self._root, blocks.Manifest.from_document(document), producer=producer, limits=limits)
            slot.context = context
            try:
                writer.write(_said(slot.manifest.to_document()))
                for what in self._messages(reader):
                    if isinstance(what, str):
                        slot.end("closed" if what == "closed" else "aborted")
                        slot.release()
                        writer.write(_said(what))
                        return
                    name = slot.publish(_verified(what, slot.manifest.spec))
                    held = [[each, size, slot.retention.leans.get(each)] for each, size in slot.retention.sizes.items()]
                    writer.write(_said([name.number, held]))
            finally:
                slot.release()

    def _messages(self, reader: Any) -> Iterator[pa.Buffer | str]:
        """Whole blocks, counted while they come; and the word that ends the writer. Ends with the call."""
        data = bytearray()
        for batch, metadata in _until_the_end(reader):
            if batch is not None:
                part = _bytes_of(batch)
                if len(data) + len(part) > self._max_block_bytes:
                    raise DataError(
                        f"expected blocks of at most {self._max_block_bytes} bytes", kind=ErrorKind.TOO_LARGE
                    )
                data += part
            if metadata is not None:
                what = bytes(metadata).decode(errors="replace")
                yield pa.py_buffer(data) if what == "block" else what
                data = bytearray()

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """The reader of a group: it is asked for its position, and told each that it is to store."""
        with _telling():
            (group,) = _parsed(descriptor.command, "group")
            store = self._store(blocks.check_name(group, "group"))
            try:
                writer.write_metadata(_said(store.load_position().to_json()))
                for _, metadata in _until_the_end(reader):
                    store.save_position(Position.from_json(bytes(metadata or b"").decode(errors="replace")))
                    writer.write_metadata(_said(None))
            finally:
                store.release()

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        """``manifest``, ``producers``, ``state`` and ``last_number``: what a reader asks between blocks."""
        with _telling():
            yield _said(self._answer(action.type, action.body.to_pybytes()))

    def _answer(self, what: str, body: bytes) -> Any:
        match what:
            case "manifest":
                declared = (self._root / "manifest.json").exists()
                return self._store().manifest.to_document() if declared else None
            case "producers":
                return self._store().producers()
            case "state":
                return self._store().state(_block_name(body))
            case "last_number":
                return self._store().last_number(_block_name(body).producer)
        raise refused("a question of a reader", repr(what))

    def do_get(self, context: Any, ticket: Any) -> Any:
        """One block, or a part of it, in pieces of its v1 stream."""
        with _telling():
            store = self._store()
            name, (part,) = _block_name(ticket.ticket), _parsed(ticket.ticket, "part")
            data = store.read(name)
            if part is not None:
                read, encoding = store.reads(name), store.manifest.encoding
                data = sealed_cut(data, BlockPart.from_json(part), read=read, encoding=encoding)
        return fl.GeneratorStream(_CHUNKS, _chunks(data))

    def list_flights(self, context: Any, criteria: bytes) -> Iterator[Any]:
        """Every block that is there, with its ticket and its size."""
        for path in sorted(self._root.glob("producers/*/[0-9]*.arrows")):
            if path.stem.isdecimal():  # another file is not a block
                name = BlockName(path.parent.name, int(path.stem))
                endpoint = fl.FlightEndpoint(_ticket(name), [self.place])
                descriptor = fl.FlightDescriptor.for_path(*map(str, name))
                yield fl.FlightInfo(_CHUNKS, descriptor, [endpoint], -1, path.stat().st_size)


def _until_the_end(reader: Any) -> Iterator[tuple[Any, Any]]:
    """The batches and the metadata of a call, until it ends."""
    with suppress(StopIteration, pa.ArrowException):
        while True:
            chunk = reader.read_chunk()
            yield chunk.data, chunk.app_metadata


# -- clients -----------------------------------------------------------------------------------------------------------


class _Client:
    """A connection to a server, made on first use in each process; pickles as its address."""

    def __init__(self, place: str, access: Access) -> None:
        self.place, self._access = place, access
        self._client: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_client": None}

    @property
    def options(self) -> Any:
        return fl.FlightCallOptions(headers=[(b"authorization", f"Bearer {self._access.token}".encode())])

    @property
    def flight(self) -> Any:
        if self._client is None:
            self._client = fl.connect(self.place, tls_root_certs=self._access.root_certificates)
        return self._client

    def ask(self, what: str, name: BlockName | None = None) -> Any:
        """The answer to a question. Raises what the server says, or TransportError."""
        with self.told():
            (answer,) = self.flight.do_action(fl.Action(what, _ticket(name)), self.options)
            return json.loads(answer.body.to_pybytes())

    @contextmanager
    def told(self, call: Any = None) -> Iterator[None]:
        """Turn errors of Flight into ours, and answers of another shape; why a call ended, its ``close`` says."""
        try:
            try:
                yield
            except (pa.ArrowException, StopIteration):
                if call is not None:
                    call.close()
                raise
        except RouteplaneError:
            raise
        except fl.FlightError as error:
            raise _heard(error, self.place) from error
        except (pa.ArrowException, StopIteration, OSError) as error:
            raise TransportError(
                f"expected {self.place} to go on, got the end of the call ({error})", kind=ErrorKind.CONNECTION
            ) from error
        except _MISSHAPEN as error:
            raise FormatError(
                f"expected an answer of a server of blocks, got another of {self.place} ({error})",
                kind=ErrorKind.MANIFEST,
            ) from error

    def close(self) -> None:
        """Disconnect. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


class _Call:
    """A call that holds a name at the server: what is said on it is answered, and its end gives the name up."""

    def __init__(self, client: _Client, stream: Any, read: Callable[[], Any], *, parse: Callable[[Any], Any]) -> None:
        self._client, self.stream, self._read = client, stream, read
        try:
            #: The answer to the call itself, parsed.
            self.first = self.answer(parse)
        except BaseException:
            self.release()
            raise

    def say(self, what: bytes, data: pa.Buffer | None = None) -> None:
        """Send a message, behind its data."""
        with self._client.told(self.stream):
            for part in () if data is None else _chunks(data):
                self.stream.write_batch(part)
            self.stream.write_metadata(what)

    def answer(self, parse: Callable[[Any], Any]) -> Any:
        """What the server answers, parsed. Raises what the server says, or TransportError; FormatError."""
        with self._client.told(self.stream):
            answer = self._read()
            if answer is None:
                raise StopIteration("no answer")
            return parse(json.loads(answer.to_pybytes()))

    def release(self) -> None:
        """End the call, and the connection; returns when the server has given the name up. Idempotent."""
        stream, self.stream = self.stream, None
        if stream is not None:
            with suppress(fl.FlightError, pa.ArrowException, StopIteration), closing(stream):
                stream.done_writing()
                while self._read() is not None:
                    pass
            self._client.close()


class _Slot(blocks.ProducerSlot):
    """One producer's call."""

    def __init__(
        self,
        place: str,
        declared: blocks.Manifest,
        *,
        producer: str,
        limits: blocks.BlockLimits,
        access: Access = NO_ACCESS,
    ) -> None:
        self._producer, client = producer, _Client(place, access)
        self.retention = blocks.Retention(max_bytes=limits.max_bytes)
        asked = {"manifest": declared.to_document(), "producer": producer, "limits": asdict(limits)}
        with client.told():
            descriptor = fl.FlightDescriptor.for_command(_said(asked))
            stream, answers = client.flight.do_put(descriptor, _CHUNKS, client.options)
        self._call = _Call(client, stream, answers.read, parse=blocks.Manifest.from_document)
        self.manifest = self._call.first

    def publish(self, block: blocks.SealedBlock) -> BlockName:
        self._call.say(b"block", block.to_buffer())
        return BlockName(self._producer, self._call.answer(self._note))

    def _note(self, answer: Any) -> int:
        """The number of a block; the server says besides what it holds of this producer."""
        number, held = answer
        self.retention = blocks.Retention(max_bytes=self.retention.max_bytes)
        for each, size, leans in held:
            self.retention.add(_count(each), _count(size), leans=None if leans is None else list(map(_count, leans)))
        return _count(number)

    def end(self, how: Literal["closed", "aborted"]) -> None:
        self._call.say(how.encode())
        self._call.answer(str)

    def release(self) -> None:
        self._call.release()


class _Store(BlockStore):
    """The blocks of a served place, for one group."""

    def __init__(self, place: str, *, group: str, timeout_s: float | None, access: Access = NO_ACCESS) -> None:
        self._client = client = _Client(place, access)
        found = blocks.wait_until(
            lambda: client.ask("manifest"),
            timeout_s,
            expected=lambda: f"a place at {place}",
            warn_after_s=blocks.WARN_AFTER_S,
        )
        with client.told():
            self.manifest = blocks.Manifest.from_document(found)
            descriptor = fl.FlightDescriptor.for_command(_said({"group": group}))
            stream, answers = client.flight.do_exchange(descriptor, client.options)
        self._call: Any = _Call(client, stream, lambda: answers.read_chunk().app_metadata, parse=Position.from_json)
        self._position: Position = self._call.first

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_call": None}

    def producers(self) -> list[str]:
        with self._client.told():
            return [blocks.check_name(name, "producer") for name in self._client.ask("producers")]

    def state(self, name: BlockName) -> blocks.BlockState:
        state: blocks.BlockState = self._client.ask("state", name)
        if state not in get_args(blocks.BlockState):
            raise FormatError(f"expected the state of block {name}, got {state!r}", kind=ErrorKind.MANIFEST)
        return state

    def last_number(self, producer: str) -> int:
        return _count(self._client.ask("last_number", BlockName(producer, 0)))

    def read(self, name: BlockName) -> pa.Buffer:
        return self._received(name, None)

    def cut(self, name: BlockName, part: BlockPart) -> list[RouteRecord]:
        """The server verifies the block whole, and cuts it; verified here again as it came."""
        return cut_block(self._received(name, part), BlockPart(keys=part.keys), read=self.reads(name))

    def _received(self, name: BlockName, part: BlockPart | None) -> pa.Buffer:
        data = bytearray()
        with self._client.told():
            for chunk in self._client.flight.do_get(fl.Ticket(_ticket(name, part)), self._client.options):
                data += _bytes_of(chunk.data)
        return pa.py_buffer(data)

    def load_position(self) -> Position:
        return self._position

    def save_position(self, position: Position) -> None:
        self._call.say(position.to_json().encode())
        self._call.answer(bool)

    def release(self) -> None:
        if self._call is not None:
            self._call.release()


_CARRIER = Carrier(slot=_Slot, store=_Store)
open_writer, open_reader = _CARRIER.open_writer, _CARRIER.open_reader
