"""Every decoder of foreign bytes, with good inputs, and what reading an input must give.

A decoder is given a folder of its own and yields ``Input`` values: the bytes of one good input, and ``read``, which
returns whether other bytes in its place mean the same. Raising RouteplaneError is right, too; anything else is a
finding of ``measure``.
"""

from __future__ import annotations

import io
import json
import math
import random
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
import pyarrow.parquet as pq
import torch

from routeplane.archive import open_archive, save_archive
from routeplane.archive.layout import seal, unseal
from routeplane.batch.dataset import RecordDataset
from routeplane.capture.http import TicketStore, issue_ticket
from routeplane.errors import ErrorKind, FormatError, TruncatedError
from routeplane.inspect.audit import load_batch
from routeplane.inspect.export import ParquetReader, ParquetWriter
from routeplane.record.aligned import ColumnType
from routeplane.record.batches import Trailer
from routeplane.record.calls import ModelCall
from routeplane.record.interfaces import BlockName, Position, RouteTicket
from routeplane.record.policy import ReadPolicy
from routeplane.record.spec import RouteSpec
from routeplane.stream import flight, folder, listen, open_stream
from routeplane.stream.block_reader import BlockPart, BlockRecords, parse_leans
from routeplane.stream.blocks import LEANS_KEY, BlockLimits, Manifest, ReadOptions, SealedBlock
from routeplane.stream.files import PublishedPath
from routeplane.testing.builders import SPEC, facts, sample, turns_of
from tests.format.test_faults import true_records
from tests.plain_columns import NARROW
from tests.stream.streams import contents, stream_of
from tests.trust.edits import mutate

__all__ = ["CONTROL", "PAYLOAD", "Input", "damaged", "edited"]

_QUICK = ReadOptions(timeout_s=1.0, grace_s=0.0)


@dataclass(frozen=True)
class Home:
    """A decoder's folder, and what is to be closed behind it."""

    path: Path
    stack: ExitStack

    def __truediv__(self, name: str) -> Path:
        return self.path / name


@dataclass(frozen=True, kw_only=True)
class Input:
    """One good input.

    ``read``: whether these bytes mean the same as the good ones; raises where they are refused.
    ``edit``: bytes of an edited document, under the checksum that a writer would give it; None: bytes are changed.
    """

    data: bytes
    read: Callable[[bytes], bool]
    edit: Callable[[Any], bytes] | None = None


def damaged(data: bytes, dice: random.Random) -> bytes:
    """A bit flipped, bytes replaced, a part cut out, doubled or swapped, the end cut off, or noise."""
    out, kind, at = bytearray(data), dice.randrange(8), dice.randrange(max(1, len(data)))
    size = dice.choice([1, 2, 4, 8, 64])
    if kind <= 2 and out:
        out[at] ^= 1 << dice.randrange(8)
    elif kind == 3:
        out[at : at + size] = dice.randbytes(size)
    elif kind == 4:
        del out[at : at + size]
    elif kind == 5:
        out[at:at] = out[at : at + size]
    elif kind == 6:
        del out[at:]
    else:
        out[at : at + 8] = dice.choice([b"\xff" * 8, b"\0" * 8, b"\xff\xff\xff\x7f" * 2])
    return bytes(out)


def edited(given: Input, dice: random.Random) -> bytes:
    """One to three places of a document changed, removed or doubled."""
    if given.edit is None:
        raise TypeError("expected an input that is a document")
    return given.edit(mutate(json.loads(given.data), dice))


def _plain(document: Any) -> bytes:
    return json.dumps(document).encode()


# ----------------------------------------------------------------------------------------------------------------------
# Payloads
# ----------------------------------------------------------------------------------------------------------------------


def streams(home: Home) -> Iterator[Input]:
    """v1 streams in memory, narrow and plain, with every kind of column and a delta."""
    del home
    expected = contents(true_records())
    for encoding in ("narrow", "plain"):
        data = stream_of(true_records(), spec=NARROW, encoding=encoding)
        yield Input(data=data, read=lambda given: expected == contents(open_stream(given)))


def pipes(home: Home) -> Iterator[Input]:
    """The same through a file object, which is read as a pipe is."""
    for good in streams(home):
        expected = contents(open_stream(good.data))

        def read(given: bytes, expected: Any = expected) -> bool:
            return bool(expected == contents(open_stream(io.BytesIO(given))))

        yield Input(data=good.data, read=read)


def mapped(home: Home) -> Iterator[Input]:
    """A file, mapped."""
    expected, path = contents(true_records()), home / "a.arrows"

    def read(given: bytes) -> bool:
        path.unlink(missing_ok=True)  # never rewritten under its mapping
        path.write_bytes(given)
        return bool(expected == contents(open_stream(path)))

    yield Input(data=stream_of(true_records(), spec=NARROW), read=read)


def kept(home: Home) -> Iterator[Input]:
    """A stream under ``on_corrupt="quarantine"`` and ``on_truncated="keep"``: what is yielded as it was is the same."""
    del home
    records = [sample(index) for index in range(6)]
    data, expected = stream_of(records, spec=SPEC, max_bytes=2 * records[0].nbytes), set(facts(records))

    def read(given: bytes) -> bool:
        with open_stream(given, on_corrupt="quarantine", on_truncated="keep") as reader:
            came = list(reader)
        whole = {fact for fact, record in zip(facts(came), came, strict=True) if not _is_blank(record)}
        report = reader.report()
        said = len(reader.quarantine.entries) or report.skipped_batches or report.truncated
        return whole <= expected and (bool(said) or expected == set(facts(came)))

    yield Input(data=data, read=read)


def _is_blank(record: Any) -> bool:
    return any(capture.state == "lost" for capture in record.captures)


def connections(home: Home) -> Iterator[Input]:
    """A stream over TCP: what a producer sends behind its greeting."""
    del home
    records = [sample(index) for index in range(3)]
    expected = facts(records)

    def read(given: bytes) -> bool:
        with listen("tcp://127.0.0.1:0", handshake_s=0.2) as listener:
            port = int(listener.address.rpartition(":")[2])

            def send() -> None:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5.0) as peer:
                    peer.sendall(b"routes1\n" + given)
                    peer.shutdown(socket.SHUT_WR)
                    while peer.recv(64):
                        pass

            sender = threading.Thread(target=send)
            sender.start()
            try:
                with open_stream(listener, timeout_s=0.5) as reader:
                    return expected == facts(list(reader))
            finally:
                listener.close()
                sender.join()

    yield Input(data=stream_of(records, spec=SPEC), read=read)


def blocks(home: Home) -> Iterator[Input]:
    """A sealed block as bytes, as the carriers over Ray and Mooncake get an object."""
    del home
    records = [sample(index) for index in range(4)]
    expected, data = facts(records), SealedBlock.of(records, SPEC, encoding="narrow").to_buffer().to_pybytes()

    def read(given: bytes) -> bool:
        with BlockRecords(pa.py_buffer(given), ReadPolicy(), read=_none) as reader:
            return bool(expected == facts(list(reader)))

    yield Input(data=data, read=read)


def _none(number: int) -> pa.Buffer:
    raise FormatError(f"expected no other block, got a request for {number}", kind=ErrorKind.NOT_ARROW)


def prefixes(home: Home) -> Iterator[Input]:
    """A chain of deltas over several blocks: the block that holds the first rows, and one that leans on it."""
    place, turns = home / "chain", turns_of(6, tokens=30)
    limits = BlockLimits(block_bytes=1, sync=False)
    with folder.open_writer(place, turns[0].spec, run="run", producer="p", limits=limits) as writer:
        for record in turns:
            writer.write(record)
    paths = sorted((place / "producers" / "p").glob("*.arrows"))
    held = [path.read_bytes() for path in paths]
    expected = facts([turns[-1]])
    for changed in (0, len(held) - 1):

        def read(given: bytes, changed: int = changed) -> bool:
            parts = [given if index == changed else data for index, data in enumerate(held)]
            with BlockRecords(
                pa.py_buffer(parts[-1]), ReadPolicy(), read=lambda number: pa.py_buffer(parts[number])
            ) as reader:
                return bool(expected == facts(list(reader)))

        yield Input(data=held[changed], read=read)


def folders(home: Home) -> Iterator[Input]:
    """Blocks of a folder, read by its reader."""
    yield from _files_of_place(home, "*.arrows")


def archives(home: Home) -> Iterator[Input]:
    """Every file of an archive, metadata of zarr and of ours among them."""
    where, records = home / "archive", [sample(index) for index in range(3)]
    save_archive(records, where, spec=SPEC, run="run")
    expected = facts(records)
    for path in sorted(path for path in where.rglob("*") if path.is_file()):
        yield Input(data=path.read_bytes(), read=_archive_reader(where, path, expected))


def _archive_reader(where: Path, path: Path, expected: list[str]) -> Callable[[bytes], bool]:
    good = path.read_bytes()

    def read(given: bytes) -> bool:
        path.write_bytes(given)
        try:
            return expected == facts(list(open_archive(where).values()))
        finally:
            path.write_bytes(good)

    return read


def parquet(home: Home) -> Iterator[Input]:
    """A Parquet file that is read back as records."""
    path, records = home / "a.parquet", true_records()[:1]
    with ParquetWriter(PublishedPath(str(path)), NARROW, encoding="narrow") as writer:
        for record in records:
            writer.write(record)
    expected = contents(records)

    def read(given: bytes) -> bool:
        path.write_bytes(given)
        reader = ParquetReader(path, policy=ReadPolicy())
        try:
            return bool(expected == contents(reader))
        finally:
            reader.close()

    yield Input(data=path.read_bytes(), read=read)


def batches(home: Home) -> Iterator[Input]:
    """A trainer's batch as files of numpy, torch and Parquet, as ``routeplane audit`` reads them, without checksums."""
    ids = np.arange(12).reshape(2, 6)
    np.savez(home / "batch.npz", input_ids=ids, attention_mask=np.ones((2, 6), dtype=np.int64))
    torch.save({"input_ids": torch.from_numpy(ids), "routed_experts": ids}, home / "batch.pt")
    pq.write_table(pa.table({"tokens": ids.tolist()}), home / "batch.parquet")
    for name in ("batch.npz", "batch.pt", "batch.parquet"):

        def read(given: bytes, path: Path = home / name) -> bool:
            path.write_bytes(given)
            load_batch(path)
            return True

        yield Input(data=(home / name).read_bytes(), read=read)


# ----------------------------------------------------------------------------------------------------------------------
# Control data
# ----------------------------------------------------------------------------------------------------------------------


def _resealed(document: Any) -> bytes:
    """A control file of a folder under a right checksum."""
    if not isinstance(document, dict):
        return _plain(document)
    body = {name: value for name, value in document.items() if name != "checksum"}
    return _plain({**body, "checksum": folder._digest(body)})


def _files_of_place(home: Home, pattern: str, *, reseal: bool = False) -> Iterator[Input]:
    place, records = home / "place", [sample(index) for index in range(3)]
    limits = BlockLimits(block_bytes=1, sync=False)
    with folder.open_writer(place, SPEC, run="run", producer="p", limits=limits) as writer:
        for record in records:
            writer.write(record)
    with folder.open_reader(place, producers=1, options=replace(_QUICK, acknowledge="call")) as reader:
        reader.acknowledge(reader.position())
    expected = facts(records)
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and path.name != "lock"}
    for path in sorted(place.rglob(pattern)):

        def read(given: bytes, path: Path = path) -> bool:
            path.write_bytes(given)
            try:
                with folder.open_reader(place, producers=["p"], options=_QUICK, follow=False) as reader:
                    came = facts(list(reader))
                return reseal or came == expected or not reader.report().complete
            finally:
                for known, data in before.items():
                    known.write_bytes(data)

        yield Input(data=path.read_bytes(), read=read, edit=_resealed if reseal else None)


def control_files(home: Home) -> Iterator[Input]:
    """Manifest, numbers, end and position of a folder."""
    yield from _files_of_place(home, "*.json")


def resealed_files(home: Home) -> Iterator[Input]:
    """The same, edited under right checksums: whatever they say, what comes is an error of ours or records."""
    yield from _files_of_place(home, "*.json", reseal=True)


def writer_files(home: Home) -> Iterator[Input]:
    """The same, met by a writer that goes on."""
    place = home / "going-on"
    limits = BlockLimits(block_bytes=1, sync=False, timeout_s=0.2)
    writer = folder.open_writer(place, SPEC, run="run", producer="p", limits=limits)
    writer.write(sample(0))
    writer.flush()
    writer._slot.release()
    reading = folder.open_reader(place, producers=1, follow=False, options=_QUICK)
    with reading as reader, suppress(TruncatedError):
        list(reader)
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and path.name != "lock"}
    for path in sorted(place.rglob("*.json")):

        def read(given: bytes, path: Path = path) -> bool:
            path.write_bytes(given)
            try:
                again = folder.open_writer(place, SPEC, run="run", producer="p", limits=limits)
                again._slot.release()
            finally:
                for known, data in before.items():
                    known.write_bytes(data)
            return True

        yield Input(data=path.read_bytes(), read=read, edit=_resealed)


def archive_documents(home: Home) -> Iterator[Input]:
    """Commits and manifests of an archive, edited under right checksums."""
    where, records = home / "documents", [sample(index) for index in range(2)]
    save_archive(records, where, spec=SPEC, run="run")
    expected = facts(records)
    for path in sorted(where.rglob("*.json")):
        data = path.read_bytes()
        with suppress(FormatError):
            body = _plain(unseal(data, where="a good one"))
            yield Input(data=body, read=_whatever(_archive_reader(where, path, expected)), edit=_sealed)
    for path in sorted(where.rglob("zarr.json")):
        yield Input(data=path.read_bytes(), read=_archive_reader(where, path, expected), edit=_plain)


def _whatever(read: Callable[[bytes], bool]) -> Callable[[bytes], bool]:
    """Under a right checksum another document is another archive: only errors and bounds are looked at."""
    return lambda given: read(given) or True


def _sealed(document: Any) -> bytes:
    return seal(document) if isinstance(document, dict) else _plain(document)


def positions(home: Home) -> Iterator[Input]:
    """Positions, parts of blocks, leans, trailers, manifests, specs and declarations of columns as text."""
    del home
    position = Position(place="0" * 32, next={"p": 3, "q": 1}, last="p", keys=b"0" * 32)
    parts = BlockPart(layer_ids=(1, 4), tokens=(0, 3)).to_json()
    trailer = Trailer(batches=1, records=2, tokens=3, digest=4).to_json()
    manifest = Manifest.of(SPEC, run="run", groups=("a", "b"), encoding="auto").to_document()
    column = ColumnType(dtype="float32", shape=(2, 2), axes=("layers", "topk"), aligned="fed").to_document()
    documents: Sequence[tuple[str, Callable[[str], object]]] = (
        (position.to_json(), lambda given: Position.from_json(given)),
        (parts, lambda given: BlockPart.from_json(given)),
        ("[0, 1, 2]", lambda given: parse_leans({LEANS_KEY: given})),
        (trailer, lambda given: Trailer.from_json(given)),
        (json.dumps(manifest), lambda given: Manifest.from_document(_document(given))),
        (SPEC.to_json(), lambda given: RouteSpec.from_json(given)),
        (json.dumps(column), lambda given: ColumnType.from_document(_document(given))),
    )
    for data, parse in documents:

        def read(given: bytes, parse: Callable[[str], object] = parse) -> bool:
            parse(given.decode("utf-8", "replace"))
            return True

        yield Input(data=data.encode(), read=read, edit=_plain)


def _document(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"expected JSON, got {text[:40]!r}", kind=ErrorKind.MANIFEST) from error


def states(home: Home) -> Iterator[Input]:
    """States of a RecordDataset over streams: the rest comes, or a later part of it, or an error."""
    records = [sample(index) for index in range(9)]
    paths = []
    for index in range(3):
        path = home / f"{index}.arrows"
        path.write_bytes(stream_of(records[3 * index : 3 * index + 3], spec=SPEC))
        paths.append(str(path))
    expected = facts(records)
    dataset = RecordDataset(paths, opener=open_stream)
    rest = iter(dataset)
    for _ in range(4):
        next(rest)

    def read(given: bytes) -> bool:
        other = RecordDataset(paths, opener=open_stream)
        other.load_state_dict(_document(given.decode("utf-8", "replace")))
        came = facts(list(other))
        return came == expected[len(expected) - len(came) :]

    yield Input(data=_plain(dataset.state_dict()), read=read, edit=_plain)


def tickets(home: Home) -> Iterator[Input]:
    """Tickets against a store that holds the call: that call, or an error."""
    del home
    spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0,))
    call = ModelCall(
        prompt_ids=np.asarray([5, 6], np.int32),
        generation_ids=np.asarray([7], np.int32),
        routes=np.asarray([[[3, 1]], [[0, 5]]], np.int16),
        weights_version=4,
        call_id="c",
    )
    record, ticket = issue_ticket(call, spec, stream="run")

    def read(given: bytes) -> bool:
        with TicketStore(spec, stream="run") as store:
            store.write(record)
            redeemed = store.redeem(RouteTicket.from_json(given.decode("utf-8", "replace")))
            return bool(redeemed.checksum == call.checksum)

    yield Input(data=ticket.to_json().encode(), read=read, edit=_plain)


def schemas(home: Home) -> Iterator[Input]:
    """The JSON in a stream's schema, edited under the trailer of the true records."""
    del home
    data = stream_of(true_records(), spec=NARROW, encoding="plain")
    expected = contents(true_records())
    with pa.ipc.open_stream(data) as reader:
        schema = reader.schema
        found = []
        for _ in range(2):
            batch, metadata = reader.read_next_batch_with_custom_metadata()
            found.append((batch, metadata))
    for key in (b"routeplane.spec", b"routeplane.columns"):

        def read(given: bytes, key: bytes = key) -> bool:
            changed = schema.with_metadata({**schema.metadata, key: given})
            sink = io.BytesIO()
            with pa.ipc.new_stream(sink, changed) as writer:
                for batch, metadata in found:
                    writer.write_batch(batch.replace_schema_metadata(changed.metadata), custom_metadata=metadata)
            return bool(expected == contents(open_stream(sink.getvalue())))

        yield Input(data=schema.metadata[key], read=read, edit=_plain)


class _LyingServer(flight.Server):
    """A server of Flight whose answers are not those of its folder: ``lies``, by what is asked."""

    def __init__(self, manifest: Manifest, root: Path) -> None:
        super().__init__(root, max_block_bytes=2**20)
        good: dict[str, Any] = {"manifest": manifest.to_document(), "producers": ["p"], "state": "sealed"}
        good |= {"last_number": 7, "position": Position(place=manifest.place).to_json(), "block": [3, [[2, 10, [1]]]]}
        self.good = {name: _plain(answer) for name, answer in good.items()}
        self.lies = dict(self.good)

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        """Answer a question."""
        yield self.lies[action.type]

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Give a position."""
        writer.write_metadata(self.lies["position"])
        with suppress(StopIteration, pa.ArrowException):
            while True:
                reader.read_chunk()

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Take blocks."""
        writer.write(self.lies["manifest"])
        with suppress(StopIteration, pa.ArrowException):
            while True:
                if reader.read_chunk().app_metadata is not None:
                    writer.write(self.lies["block"])


def answers(home: Home) -> Iterator[Input]:
    """What a client of Flight makes of a server's answers: manifest, names, states, numbers, positions, retention."""
    declared = Manifest.of(SPEC, run="run", groups=("default",), encoding="auto")
    server = _LyingServer(declared, home / "nothing")
    home.stack.callback(server.shutdown)
    block = SealedBlock.of([sample(0)], SPEC, encoding="narrow")

    def ask() -> None:
        store = flight._Store(server.place, group="default", timeout_s=0.0)
        try:
            for producer in store.producers():
                store.state(BlockName(producer, store.last_number(producer)))
            store.load_position()
        finally:
            store.release()

    def put() -> None:
        slot = flight._Slot(server.place, declared, producer="p", limits=BlockLimits())
        try:
            slot.publish(block)
        finally:
            slot.release()

    for name, answer in server.good.items():

        def read(given: bytes, name: str = name) -> bool:
            server.lies = {**server.good, name: given}
            put() if name == "block" else ask()
            return True

        yield Input(data=answer, read=read, edit=_plain)


def requests(home: Home) -> Iterator[Input]:
    """What a server of Flight makes of commands, tickets and actions; the client sees an error of ours."""
    place = home / "served"
    server = home.stack.enter_context(flight.Server(place, max_block_bytes=2**20))
    with flight.open_writer(server.place, SPEC, run="run", producer="p") as writer:
        writer.write(sample(0))
    client = flight._Client(server.place, flight.NO_ACCESS)
    home.stack.callback(client.close)
    limits = {name: getattr(BlockLimits(), name) for name in BlockLimits.__slots__}
    manifest = folder.manifest_of(place).to_document()
    put = {"manifest": manifest, "producer": "q", "limits": limits}
    calls: Sequence[tuple[Any, Callable[[bytes], object]]] = (
        ({"block": ["p", 0], "part": None}, lambda given: client.flight.do_get(fl.Ticket(given)).read_all()),
        ({"block": ["p", 0]}, lambda given: list(client.flight.do_action(fl.Action("state", given)))),
        ({"group": "default"}, lambda given: _exchanged(client, given)),
        (put, lambda given: _put(client, given)),
    )
    for document, call in calls:

        def read(given: bytes, call: Callable[[bytes], object] = call) -> bool:
            with client.told():
                try:
                    call(given)
                except fl.FlightError as error:
                    if not error.extra_info:
                        raise AssertionError(f"untyped: {str(error)[:200]}") from error
                    raise
            return True

        yield Input(data=_plain(document), read=read, edit=_plain)


def _exchanged(client: Any, command: bytes) -> None:
    call, answers = client.flight.do_exchange(fl.FlightDescriptor.for_command(command))
    with suppress(StopIteration):
        answers.read_chunk()
    call.done_writing()
    for _ in answers:
        pass
    call.close()


def _put(client: Any, command: bytes) -> None:
    call, answers = client.flight.do_put(fl.FlightDescriptor.for_command(command), flight._CHUNKS)
    answers.read()
    call.close()


#: name -> decoder, and how many of a thousand inputs it gets
PAYLOAD: Mapping[str, tuple[Callable[[Home], Iterator[Input]], int]] = {
    "stream in memory": (streams, 200),
    "stream as a file": (mapped, 60),
    "stream through a pipe": (pipes, 120),
    "stream, quarantine and keep": (kept, 100),
    "stream over TCP": (connections, 20),
    "block of Ray and Mooncake": (blocks, 150),
    "block of a folder": (folders, 60),
    "chain of prefixes": (prefixes, 100),
    "archive": (archives, 100),
    "Parquet": (parquet, 60),
    "batch for audit": (batches, 30),
}
CONTROL: Mapping[str, tuple[Callable[[Home], Iterator[Input]], int]] = {
    "files of a folder": (control_files, 150),
    "files of a folder, resealed": (resealed_files, 150),
    "files met by a writer": (writer_files, 80),
    "archive metadata, resealed": (archive_documents, 120),
    "positions, trailers, specs": (positions, 220),
    "schema JSON": (schemas, 80),
    "RecordDataset states": (states, 80),
    "tickets": (tickets, 60),
    "Flight: requests": (requests, 30),
    "Flight: answers": (answers, 30),
}


def share(per_mille: int, total: int) -> int:
    """How many inputs a decoder gets of a total."""
    return math.ceil(per_mille * total / 1000)
