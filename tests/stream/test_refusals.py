"""What streams and carriers refuse, and what they say of a place that is not as it was left: class, kind and text."""

from __future__ import annotations

import errno
import io
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest

from routeplane.errors import DataError, ErrorKind, FormatError, RouteplaneError, StoreError, TransportError, UsageError
from routeplane.record.interfaces import BlockName, Position
from routeplane.record.transfer import check_max_bytes
from routeplane.stream import MemoryStream, blocks, flight, folder, listen, new_stream, open_stream
from routeplane.stream.block_reader import BlockPart, parse_leans, sealed_cut
from routeplane.stream.blocks import LEANS_KEY, BlockLimits, Manifest, ReadOptions
from routeplane.testing.builders import SPEC, sample, turns_of


def written(place: Path, count: int = 1) -> Path:
    """A folder with so many blocks of one record, and a producer that is done."""
    limits = BlockLimits(block_bytes=1, sync=False)
    with folder.open_writer(place, SPEC, run="run", producer="p", limits=limits) as writer:
        for index in range(count):
            writer.write(sample(index))
    return place


def raw(path: Path) -> folder.FolderStore:
    """The place as its default group sees it."""
    return folder.FolderStore(path, group="default")


def closed_writer(place: Path) -> Any:
    """A writer behind its end."""
    writer = folder.open_writer(place, SPEC, run="run", producer="p")
    writer.close()
    return writer


def other_end(place: Path) -> folder.FolderStore:
    """A place whose producer ended in a manner of its own."""
    written(place)
    folder._store(place / "producers" / "p" / "end.json", {"how": "asleep", "blocks": 1}, sync=False)
    return raw(place)


#: What the manifest of a place says.
MANIFEST = Manifest.of(SPEC, run="run", groups=["g"], encoding="plain").to_document()

REFUSED: dict[str, tuple[Callable[[Path], object], type[Exception], ErrorKind, str]] = {
    "a block of no bytes": (lambda _: BlockLimits(block_bytes=0), UsageError, ErrorKind.ARGUMENT, "block_bytes"),
    "an unknown acknowledgement": (
        lambda _: ReadOptions(acknowledge="never"),  # type: ignore[arg-type]
        UsageError,
        ErrorKind.ARGUMENT,
        "acknowledge",
    ),
    "a bound under which nothing is written": (
        lambda _: check_max_bytes(0),
        UsageError,
        ErrorKind.ARGUMENT,
        "max_bytes of at least 1",
    ),
    "a place without groups": (
        lambda place: folder.open_writer(place, SPEC, run="run", producer="p", groups=()),
        UsageError,
        ErrorKind.ARGUMENT,
        "at least one group",
    ),
    "no producers": (
        lambda place: folder.open_reader(written(place), producers=0),
        UsageError,
        ErrorKind.ARGUMENT,
        "at least one producer",
    ),
    "a flush behind the end": (
        lambda place: closed_writer(place).flush(),
        UsageError,
        ErrorKind.CLOSED,
        "an open writer",
    ),
    "an old format for a transport": (
        lambda _: new_stream(MemoryStream(), SPEC, format="1.0"),
        UsageError,
        ErrorKind.ARGUMENT,
        "for a transport",
    ),
    "a place without its manifest": (
        lambda place: raw(place),
        FormatError,
        ErrorKind.MANIFEST,
        "got no manifest",
    ),
    "a block that is gone": (
        lambda place: raw(written(place)).read(BlockName("p", 7)),
        DataError,
        ErrorKind.EXPIRED,
        "p/000000007",
    ),
    "a manifest of another version": (
        lambda _: Manifest.from_document({**MANIFEST, "version": 99}),
        FormatError,
        ErrorKind.VERSION,
        "99",
    ),
    "a manifest of an unknown encoding": (
        lambda _: Manifest.from_document({**MANIFEST, "encoding": "zip"}),
        FormatError,
        ErrorKind.MANIFEST,
        "another encoding",
    ),
    "a manifest without a run": (
        lambda _: Manifest.from_document({name: value for name, value in MANIFEST.items() if name != "run"}),
        FormatError,
        ErrorKind.MANIFEST,
        "run",
    ),
    "an end that no writer stores": (
        lambda place: other_end(place).state(BlockName("p", 9)),
        FormatError,
        ErrorKind.MANIFEST,
        "asleep",
    ),
    "numbers of blocks below 0": (lambda _: parse_leans({LEANS_KEY: "[-1]"}), FormatError, ErrorKind.TRAILER, "[-1]"),
    "a part without records": (
        lambda place: sealed_cut(
            raw(written(place)).read(BlockName("p", 0)),
            BlockPart(keys=(), layer_ids=None, tokens=None),
            read=lambda _: pa.py_buffer(b""),
            encoding="plain",
        ),
        DataError,
        ErrorKind.ROUTES_MISSING,
        "at least one record",
    ),
    "a message that is not a part of a block": (
        lambda _: flight._bytes_of(None),
        FormatError,
        ErrorKind.NOT_ARROW,
        "got another message",
    ),
    "a path that no socket can have": (
        lambda place: new_stream(f"unix://{place}{'/x' * 100}", SPEC, timeout_s=5.0),
        TransportError,
        ErrorKind.CONNECTION,
        "expected a connection",
    ),
    "a socket where a folder is absent": (
        lambda place: listen(f"unix://{place}/absent/socket"),
        TransportError,
        ErrorKind.CONNECTION,
        "expected to listen",
    ),
    "a port that is taken": (
        lambda _: second_listener(),
        TransportError,
        ErrorKind.CONNECTION,
        "expected to listen",
    ),
}


def second_listener() -> None:
    """Two at one address."""
    with listen("tcp://127.0.0.1:0") as first:
        listen(first.address)


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_with_its_kind_and_place(what: str, tmp_path: Path) -> None:
    """The class that a handler looks for, the kind, and what was wrong."""
    work, error, kind, text = REFUSED[what]
    with pytest.raises(error) as caught:
        work(tmp_path)

    assert isinstance(caught.value, RouteplaneError)
    assert kind == caught.value.kind
    assert text in str(caught.value)


# ----------------------------------------------------------------------------------------------------------------------
# What is waited for, and what is named
# ----------------------------------------------------------------------------------------------------------------------


class Making(logging.Handler):
    """Keeps what was logged, and makes the place that a reader said it was waiting for."""

    def __init__(self, make: Callable[[], object]) -> None:
        super().__init__()
        self.make, self.said = make, list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """One warning."""
        self.said.append(record.getMessage())
        self.make()


@pytest.mark.parametrize("carrier", ["folder", "flight"])
def test_a_reader_that_waits_for_its_place_logs_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carrier: str
) -> None:
    """A mistyped path never comes: the wait is logged with the path and what of it exists, and goes on."""
    monkeypatch.setattr(blocks, "WARN_AFTER_S", 0.0)
    place = tmp_path / "runs" / "one"
    handler = Making(lambda: written(place))
    logger = logging.getLogger("routeplane.stream.blocks")
    logger.addHandler(handler)
    try:
        with flight.Server(place) as server:
            if carrier == "folder":
                reader = folder.open_reader(place, producers=1)
            else:
                reader = flight.open_reader(server.place, producers=1)
            with reader:
                found = list(reader)
            named = f"the place {place}, of which {tmp_path} exists" if carrier == "folder" else server.place
    finally:
        logger.removeHandler(handler)

    assert [sample(0).checksum] == [record.checksum for record in found]
    (said,) = handler.said
    assert named in said
    assert said.endswith("got none yet; waiting without a bound")


def test_a_place_that_did_not_come_in_time_is_named(tmp_path: Path) -> None:
    """The folder, and whether it is there."""
    with pytest.raises(TransportError, match=f"the place {tmp_path}, which holds no place within 0.0 s"):
        folder.open_reader(tmp_path, producers=1, follow=False)


def cut(data: bytes) -> bytes:
    """Without its trailer."""
    return data[: 3 * len(data) // 4]


def flipped(data: bytes) -> bytes:
    """One bit of a row changed."""
    changed = bytearray(data)
    changed[data.index(sample(0).routes.tobytes()) + 1] ^= 0x40
    return bytes(changed)


@pytest.mark.parametrize(
    ("damage", "policy"),
    [
        (lambda _: b"", {}),
        (lambda _: b"no stream", {}),
        (cut, {}),
        (flipped, {}),
        (lambda data: data, {"max_missing": -1.0}),
    ],
    ids=["empty", "foreign", "cut", "flipped", "policy"],
)
@pytest.mark.parametrize("kind", [str, Path])
def test_errors_of_a_path_name_it(
    tmp_path: Path, damage: Callable[[bytes], bytes], policy: dict[str, Any], kind: type
) -> None:
    """At opening and while reading; what is wrong with the call alone names no path."""
    path = tmp_path / "run.arrows"
    with new_stream(path, SPEC, encoding="plain") as sink:
        sink.write(sample(0))
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(RouteplaneError) as caught, open_stream(kind(path), **policy) as reader:
        list(reader)

    assert (0 if policy else 1) == str(caught.value).count(f"stream {path}")


# ----------------------------------------------------------------------------------------------------------------------
# Memory
# ----------------------------------------------------------------------------------------------------------------------


def test_a_memory_stream_has_one_end_each() -> None:
    """A second writer, a second reader, and a writer whose reader left."""
    stream = MemoryStream()
    sink = new_stream(stream, SPEC)
    with pytest.raises(UsageError, match="one writer"):
        new_stream(stream, SPEC)
    reader = open_stream(stream)
    with pytest.raises(UsageError, match="one reader"):
        open_stream(stream)
    reader.close()
    with pytest.raises(TransportError) as caught:
        sink.write(sample(0))

    assert ErrorKind.CONNECTION == caught.value.kind
    assert 0 == stream.waiting_bytes


def test_waits_of_a_memory_stream_end_with_the_timeout() -> None:
    """No writer, no record, and no reader that takes one."""
    with pytest.raises(TransportError) as no_writer:
        open_stream(MemoryStream(), timeout_s=0.01)
    stream = MemoryStream()
    sink = new_stream(stream, SPEC, max_bytes=1, timeout_s=0.01)
    reader = iter(open_stream(stream, timeout_s=0.01))
    with pytest.raises(TransportError) as no_record:
        next(reader)
    sink.write(sample(0))
    with pytest.raises(TransportError) as no_space:
        sink.write(sample(1))

    found = [each.value for each in (no_writer, no_record, no_space)]
    assert [ErrorKind.TIMED_OUT] * 3 == [each.kind for each in found]
    assert ["a writer", "a record", "a reader"] == [
        str(each).removeprefix("expected ").partition(" within")[0].partition(" that")[0] for each in found
    ]


# ----------------------------------------------------------------------------------------------------------------------
# Files and sockets
# ----------------------------------------------------------------------------------------------------------------------


def test_a_file_that_takes_nothing_is_an_error() -> None:
    """``write`` that returns 0 would loop for ever."""

    class Full(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            return 0

    with pytest.raises((OSError, RouteplaneError), match="more bytes, got one that took 0"):
        with new_stream(Full(), SPEC) as sink:
            sink.write(sample(0))


def test_an_address_is_a_source_for_one_stream(tmp_path: Path) -> None:
    """``open_stream("unix://...")`` listens, takes the first producer, and leaves no socket file."""
    path = tmp_path / "socket"

    def produce() -> None:
        with new_stream(f"unix://{path}", SPEC, timeout_s=30.0) as sink:
            sink.write(sample(3))

    producer = threading.Thread(target=produce)
    producer.start()
    with open_stream(f"unix://{path}", timeout_s=30.0) as reader:
        found = list(reader)
    producer.join()

    assert [sample(3).checksum] == [record.checksum for record in found]
    assert not path.exists()


def test_the_socket_file_of_a_killed_consumer_is_replaced(tmp_path: Path) -> None:
    """It is there, and nothing listens; one that listens is left alone."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with listen(f"unix://{path}") as listener:
        assert f"unix://{path}" == listener.address
        with pytest.raises(TransportError, match="expected to listen"):
            listen(f"unix://{path}")


# ----------------------------------------------------------------------------------------------------------------------
# Folders
# ----------------------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_told_by_its_kind_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    """A position that cannot be replaced is the old one, and its temporary file is gone."""
    store = raw(written(tmp_path))
    before = store.load_position()
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch("routeplane.stream.folder.os.replace", side_effect=full), pytest.raises(StoreError) as caught:
        store.save_position(before.after(BlockName("p", 0)))

    assert ErrorKind.NO_SPACE == caught.value.kind
    assert before == store.load_position()
    assert [] == list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_block_that_cannot_be_written_is_told_and_leaves_nothing(code: int, tmp_path: Path) -> None:
    """Nothing was acknowledged that could make space; what was sealed before is whole."""
    written(tmp_path / "whole")
    with (
        mock.patch.object(folder.BlockFiles, "prepare", side_effect=OSError(code, "no")),
        pytest.raises(OSError, match="no") as caught,
    ):
        written(tmp_path / "place")
    home = tmp_path / "place" / "producers" / "p"

    assert (code == errno.ENOSPC) == isinstance(caught.value, StoreError)
    assert [] == [*home.glob("*.arrows"), *home.glob(".*.tmp")]


def test_another_error_of_the_disk_stays_what_it_is(tmp_path: Path) -> None:
    """Only a full disk has a kind of its own."""
    store = raw(written(tmp_path))
    broken = OSError(errno.EIO, "Input/output error")
    with (
        mock.patch("routeplane.stream.folder.os.replace", side_effect=broken),
        pytest.raises(OSError, match="output error") as caught,
    ):
        store.save_position(store.load_position())

    assert errno.EIO == caught.value.errno


def test_a_file_system_without_locks_is_refused(tmp_path: Path) -> None:
    """Its first ``flock`` fails; or it succeeds for everyone, as where a network file system ignores it."""
    absent = OSError(errno.ENOLCK, "No locks available")
    with mock.patch("routeplane.stream.folder.fcntl.flock", side_effect=absent), pytest.raises(StoreError) as failed:
        folder.open_writer(tmp_path / "a", SPEC, run="run", producer="p")
    with mock.patch("routeplane.stream.folder.fcntl.flock"), pytest.raises(StoreError) as ignored:
        folder.open_writer(tmp_path / "b", SPEC, run="run", producer="p")

    assert [ErrorKind.WRITER] * 2 == [failed.value.kind, ignored.value.kind]


def test_the_position_of_another_place_is_refused(tmp_path: Path) -> None:
    """A position file that was copied from elsewhere would skip blocks."""
    store = raw(written(tmp_path))
    store.save_position(Position(place="other", next={"p": 1}))
    store.release()
    with pytest.raises(FormatError) as caught:
        folder.open_reader(tmp_path, producers=1)

    assert ErrorKind.MANIFEST == caught.value.kind
    assert "got one in other" in str(caught.value)


def test_a_block_holds_records_of_one_set_of_columns(tmp_path: Path) -> None:
    """A record with a column more is the first of the next block, and all come back."""
    more = replace(sample(1), columns={"score": np.ones(sample(1).num_tokens, np.float32)}, checksum=None)
    with folder.open_writer(tmp_path, SPEC, run="run", producer="p", limits=BlockLimits(sync=False)) as writer:
        writer.write(sample(0))
        writer.write(more)
        assert BlockName("p", 1) == writer.flush()
    with folder.open_reader(tmp_path, producers=1) as reader:
        found = list(reader)

    assert [sample(0).checksum, more.checksum] == [record.checksum for record in found]


def test_a_writer_that_forgot_a_base_stores_the_record_whole(tmp_path: Path) -> None:
    """Beyond its memory of records it shares no rows; what comes back is the same."""
    turns = turns_of(4)
    with mock.patch.object(blocks, "_BASE_BYTES", 1):
        with folder.open_writer(tmp_path, turns[0].spec, run="run", producer="p") as writer:
            for record in turns:
                writer.write(record)
            assert 0 == writer._base_bytes
    with folder.open_reader(tmp_path, producers=1) as reader:
        assert [record.checksum for record in turns] == [record.checksum for record in reader]


def test_a_reader_that_is_closed_between_records_stops(tmp_path: Path) -> None:
    """The block that it was in is not acknowledged."""
    written(tmp_path, count=3)
    reader = folder.open_reader(tmp_path, producers=1)
    records = iter(reader)
    next(records)
    reader.close()

    assert [] == list(records)
    with folder.open_reader(tmp_path, producers=1) as again:
        assert [sample(index).checksum for index in range(3)] == [record.checksum for record in again]
