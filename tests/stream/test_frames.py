"""Messages cut from bytes: whole and in order; damaged headers are refused, compressed bodies seen by the header."""

from __future__ import annotations

import io
import struct
import tracemalloc
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.errors import ErrorKind, FormatError
from routeplane.record.batches import TRAILER_KEY
from routeplane.stream import open_stream
from routeplane.stream.frames import MAX_METADATA_BYTES, Frame, frames_of_buffer, frames_of_file, parse_metadata
from tests.stream.streams import contents, forge, record, stream_of, trailer_of

RECORDS = [record(sample, 5 + sample) for sample in range(4)]
#: Four batches.
STREAM = stream_of(RECORDS, max_bytes=1)
END = b"\xff\xff\xff\xff\0\0\0\0"


class Dribble(io.RawIOBase):
    """A file that gives a few bytes at a time, as pipes and sockets may, and records what it was asked for."""

    def __init__(self, data: bytes, *, step: int = 1) -> None:
        self.source = io.BytesIO(data)
        self.step = step
        self.largest = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """At most ``step`` bytes."""
        self.largest = max(self.largest, size)
        return self.source.read(min(size, self.step))


def described(frames: Iterator[Frame]) -> list[tuple[str, bool, dict[str, str], bytes]]:
    """Frames as values."""
    return [(frame.kind, frame.compressed, frame.metadata, frame.data.to_pybytes()) for frame in frames]


# ----------------------------------------------------------------------------------------------------------------------
# Whole frames
# ----------------------------------------------------------------------------------------------------------------------


def test_frames_are_the_stream() -> None:
    """Schema, batches, trailer: their bytes, joined, are the stream without its end; the trailer shows its text."""
    frames = described(frames_of_buffer(pa.py_buffer(STREAM)))

    assert ["schema", "batch", "batch", "batch", "batch", "batch"] == [kind for kind, *_ in frames]
    assert STREAM == b"".join(data for *_, data in frames) + END
    assert [[]] * 5 + [[TRAILER_KEY]] == [sorted(metadata) for _, _, metadata, _ in frames]
    assert trailer_of(RECORDS, batches=4).to_json() == frames[-1][2][TRAILER_KEY]


@pytest.mark.parametrize("step", [1, 3, 4_096])
def test_a_file_gives_the_same_frames(step: int) -> None:
    """However few bytes a read brings, frames of a file are those of the buffer, and nothing behind the end is read."""
    source = Dribble(STREAM + b"rest", step=step)

    assert described(frames_of_buffer(pa.py_buffer(STREAM))) == described(frames_of_file(source))
    assert source.source.read() == b"rest"


@pytest.mark.parametrize("shift", range(1, 8))
def test_bytes_at_any_address(shift: int) -> None:
    """A stream that begins at an odd address in memory reads the same."""
    moved = memoryview(bytes(shift) + STREAM)[shift:]

    assert contents(RECORDS) == contents(open_stream(moved))


def test_frames_of_a_buffer_share_its_memory() -> None:
    """A frame of a buffer is a view; one of a file has memory of its own."""
    whole = pa.py_buffer(STREAM)
    shared = [frame.data.address - whole.address for frame in frames_of_buffer(whole)]
    sizes = [frame.data.size for frame in frames_of_buffer(whole)]

    assert [sum(sizes[:index]) for index in range(len(sizes))] == shared


# ----------------------------------------------------------------------------------------------------------------------
# Damaged frames
# ----------------------------------------------------------------------------------------------------------------------


def read_both(data: bytes) -> Iterator[Callable[[], object]]:
    """Reading from a buffer, and from a file."""
    yield lambda: list(frames_of_buffer(pa.py_buffer(data)))
    yield lambda: list(frames_of_file(io.BytesIO(data)))


@pytest.mark.parametrize("length", [MAX_METADATA_BYTES + 1, 2**31 - 1, 2**31, 2**32 - 1])
def test_a_header_too_long_is_refused_before_it_is_read(length: int) -> None:
    """A length beyond the format's limit asks for nothing."""
    data = b"\xff\xff\xff\xff" + struct.pack("<I", length) + bytes(64)
    for read in read_both(data):
        with pytest.raises(FormatError) as caught:
            read()
        assert caught.value.kind is ErrorKind.NOT_ARROW
    source = Dribble(data, step=64)
    with pytest.raises(FormatError):
        list(frames_of_file(source))
    assert source.largest == 8


def test_a_body_too_long_takes_no_memory() -> None:
    """A flipped body length of a terabyte is refused or a cut stream; from a pipe no more memory is used than comes."""
    whole = bytearray(STREAM)
    first = next(frames_of_buffer(pa.py_buffer(STREAM))).data.size
    header_length = struct.unpack_from("<I", whole, first + 4)[0]
    body_length = parse_metadata(bytes(whole[first + 8 : first + 8 + header_length])).body_length
    at = whole.index(struct.pack("<q", body_length), first + 8, first + 8 + header_length)
    struct.pack_into("<q", whole, at, 2**40)
    tracemalloc.start()
    for read in read_both(bytes(whole)):
        with pytest.raises(FormatError):
            read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 20 * len(STREAM)


def test_a_negative_body_is_refused() -> None:
    """A body length below zero would send a reader backwards."""
    whole = bytearray(STREAM)
    first = next(frames_of_buffer(pa.py_buffer(STREAM))).data.size
    header_length = struct.unpack_from("<I", whole, first + 4)[0]
    body_length = parse_metadata(bytes(whole[first + 8 : first + 8 + header_length])).body_length
    at = whole.index(struct.pack("<q", body_length), first + 8, first + 8 + header_length)
    struct.pack_into("<q", whole, at, -(2**62))
    for read in read_both(bytes(whole)):
        with pytest.raises(FormatError) as caught:
            read()
        assert caught.value.kind is ErrorKind.NOT_ARROW


def refusal(read: Callable[[], object]) -> ErrorKind | None:
    """The kind of FormatError that reading gives, None where it gives none; any other error comes out."""
    try:
        read()
    except FormatError as error:
        return error.kind
    return None


@given(st.binary(max_size=200))
def test_any_bytes_as_a_header(raw: bytes) -> None:
    """A header of arbitrary bytes is read or refused, with an error of ours."""
    assert refusal(lambda: parse_metadata(raw)) in (None, ErrorKind.NOT_ARROW)


@given(st.data())
def test_a_header_with_a_few_other_bytes(data: st.DataObject) -> None:
    """The header of a trailer, the one with metadata, with any bytes changed: read or refused."""
    trailer = [frame.data.to_pybytes() for frame in frames_of_buffer(pa.py_buffer(STREAM))][-1]
    header = bytearray(trailer[8:])
    places = st.tuples(st.integers(0, len(header) - 1), st.integers(0, 255))
    for position, value in data.draw(st.lists(places, max_size=4)):
        header[position] = value

    assert refusal(lambda: parse_metadata(bytes(header))) in (None, ErrorKind.NOT_ARROW)


@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_as_a_stream(rest: bytes, marked: bool) -> None:
    """Arbitrary bytes are no stream, from a buffer and from a file alike; nothing but the end mark passes."""
    data = b"\xff\xff\xff\xff" + rest if marked else rest
    of_buffer, of_file = (refusal(read) for read in read_both(data))

    assert of_buffer == of_file or data.startswith(END)
    assert of_buffer is not None or data == END


# ----------------------------------------------------------------------------------------------------------------------
# Other messages
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compression_is_seen_in_the_header(codec: str) -> None:
    """A compressed batch is known as one without a look at its body: here there is none."""
    batch = pa.record_batch({"x": pa.array(range(1_000), pa.int64())})
    data = forge([batch], trailer=None, options=pa.ipc.IpcWriteOptions(compression=codec))
    schema, body = list(frames_of_buffer(pa.py_buffer(data)))
    header_length = struct.unpack_from("<I", body.data.to_pybytes(), 4)[0]

    assert (False, True) == (schema.compressed, body.compressed)
    assert parse_metadata(body.data.to_pybytes()[8 : 8 + header_length]).compressed


def test_dictionaries_are_another_kind() -> None:
    """A dictionary batch is not a record batch, whatever bytes it holds."""
    batch = pa.record_batch({"x": pa.array(["a", "b", "a"]).dictionary_encode()})
    frames = list(frames_of_buffer(pa.py_buffer(forge([batch], trailer=None))))

    assert ["schema", "other", "batch"] == [frame.kind for frame in frames]


def test_the_old_framing_is_refused() -> None:
    """Before Arrow 0.15 messages had no continuation marker; such a stream is not misread."""
    batch = pa.record_batch({"x": pa.array([1, 2, 3])})
    data = forge([batch], trailer=None, options=pa.ipc.IpcWriteOptions(use_legacy_format=True))
    for read in read_both(data):
        with pytest.raises(FormatError) as caught:
            read()
        assert caught.value.kind is ErrorKind.NOT_ARROW


def test_text_files_are_refused() -> None:
    """A file opened as text gives no bytes; that is a mistake of the caller's, said so."""
    with pytest.raises(ValueError, match="binary"):
        open_stream(io.StringIO("some text that is long enough"))
