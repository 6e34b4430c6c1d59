"""Bytes that changed or are not there: the same records, or a typed error; never other content, never an abort.

Reading damaged bytes can end the process where a buffer is viewed unchecked, so flips are tried in processes of
their own.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from routeplane.errors import ErrorKind, FormatError, RouteplaneError, TruncatedError
from routeplane.record.record import RouteRecord
from routeplane.record.spec import RouteSpec
from routeplane.stream import open_stream
from routeplane.stream.frames import frames_of_buffer
from tests.stream.streams import Encoding, contents, flip_outcomes, record, stream_of

TINY = RouteSpec(num_experts=8, top_k=2, layer_ids=(1,), model="m")


def small_stream(encoding: Encoding) -> bytes:
    """One record with something in every column; names and values that one bit turns into others of the same kind."""
    changes = {
        "group": "g",
        "attributes": {"k": "v"},
        "logprobs": np.asarray([np.nan, -1.0, -2.0], dtype=np.float32),
        # int32 turns unsigned, and "a" becomes "c", by one bit of the schema
        "columns": {"a": np.asarray([-1, 2, 3], dtype=np.int32), "c": np.asarray([True, False, True])},
    }
    return stream_of([record(1, 3, spec=TINY, **changes)], spec=TINY, encoding=encoding)


def larger_stream(encoding: Encoding) -> bytes:
    """Six records in three batches."""
    return stream_of([record(sample, 40 + sample) for sample in range(6)], encoding=encoding, max_bytes=800)


def outcomes_apart(data: bytes, places: list[tuple[int, int]]) -> dict[str, list[tuple[int, int]]]:
    """``flip_outcomes`` in a process of its own; an abort there raises BrokenProcessPool here."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(flip_outcomes, data, places).result()


def assert_safe(outcomes: dict[str, list[tuple[int, int]]]) -> None:
    """Nothing but the same records or a typed error, and both occurred."""
    assert {} == {name: places[:5] for name, places in outcomes.items() if name not in ("same", "refused")}
    assert {"same", "refused"} == set(outcomes)


# ----------------------------------------------------------------------------------------------------------------------
# Flips
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["plain", "narrow"])
def test_every_byte_flipped(encoding: Encoding) -> None:
    """One flipped bit in any byte of a small stream: the same records or a typed error. The bit goes round by byte."""
    data = small_stream(encoding)

    assert_safe(outcomes_apart(data, [(position, 1 << position % 8) for position in range(len(data))]))


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["plain", "narrow"])
def test_every_bit_flipped(encoding: Encoding) -> None:
    """The same for each of the bits."""
    data = small_stream(encoding)

    assert_safe(outcomes_apart(data, [(position, 1 << bit) for position in range(len(data)) for bit in range(8)]))


@pytest.mark.parametrize("encoding", ["plain", "narrow"])
def test_random_bytes_changed(encoding: Encoding) -> None:
    """Any byte turned into any other, at random places of a stream of several batches."""
    data = larger_stream(encoding)
    rng = np.random.default_rng(7)
    places = list(zip(rng.integers(0, len(data), 500).tolist(), rng.integers(1, 256, 500).tolist(), strict=True))

    assert_safe(outcomes_apart(data, places))


def test_flips_that_mean_something_else() -> None:
    """A bit that makes a later minor version, or of one token column's name another's, is noticed."""
    data = small_stream("plain")
    places = [(data.index(b"1.1") + 2, 0x04), (data.index(b"\x01\x00\x00\x00c\x00") + 4, 0x02)]

    assert {"refused": places} == flip_outcomes(data, places)


# ----------------------------------------------------------------------------------------------------------------------
# Cuts
# ----------------------------------------------------------------------------------------------------------------------


class Pipe:
    """A real pipe that a thread fills with ``data`` and closes."""

    def __init__(self, data: bytes) -> None:
        self._read, self._write = os.pipe()
        self._thread = threading.Thread(target=self._fill, args=(data,))

    def _fill(self, data: bytes) -> None:
        with os.fdopen(self._write, "wb") as file:
            file.write(data)

    def __enter__(self) -> io.BufferedReader:
        self._thread.start()
        self._file = os.fdopen(self._read, "rb")
        return self._file

    def __exit__(self, *_: object) -> None:
        self._file.read()  # whatever the reader left, so that the writer can end
        self._file.close()
        self._thread.join()


def read_cut(source: object) -> str:
    """The kind of error that reading gives, or how many records came."""
    try:
        return str(len(list(open_stream(source))))
    except RouteplaneError as error:
        return f"{type(error).__name__}:{error.kind}"


@pytest.mark.parametrize(("via", "encoding"), [("bytes", "plain"), ("file object", "narrow")])
def test_cut_at_every_byte(via: str, encoding: Encoding) -> None:
    """A stream that ends early, wherever, ends in TruncatedError; only the whole one reads."""
    data = small_stream(encoding)
    sources = {"bytes": lambda cut: cut, "file object": io.BytesIO}
    found = {read_cut(sources[via](data[:length])) for length in range(len(data))}

    assert {"TruncatedError:truncated"} == found
    assert read_cut(sources[via](data)) == "1"


@pytest.mark.parametrize("via", ["path", "pipe"])
def test_cut_at_every_kind_of_byte(via: str, tmp_path: Path) -> None:
    """The same through a file's mapping and through a real pipe, at every 61st byte and around every boundary."""
    data = larger_stream("plain")
    edges = set(boundaries(data))
    lengths = {*range(0, len(data), 61), *edges, *(edge - 1 for edge in edges), *(edge + 1 for edge in edges)}
    for length in sorted(lengths - {len(data), len(data) + 1, -1}):
        if via == "path":
            path = tmp_path / "cut.arrows"
            path.write_bytes(data[:length])
            assert read_cut(path) == "TruncatedError:truncated", length
        else:
            with Pipe(data[:length]) as pipe:
                assert read_cut(pipe) == "TruncatedError:truncated", length


def boundaries(data: bytes) -> Iterator[int]:
    """Where each message ends."""
    at = 0
    for frame in frames_of_buffer(pa.py_buffer(data)):
        at += frame.data.size
        yield at


def test_plain_arrow_takes_a_cut_stream_for_whole() -> None:
    """Why the trailer is there: cut between two batches, Arrow itself reads fewer records and complains of nothing."""
    data = larger_stream("plain")
    after_first = list(boundaries(data))[1]
    with pa.ipc.open_stream(data[:after_first]) as reader:
        assert 0 < reader.read_all().num_rows < 6
    with pytest.raises(TruncatedError):
        list(open_stream(data[:after_first]))


# ----------------------------------------------------------------------------------------------------------------------
# Keeping what came whole
# ----------------------------------------------------------------------------------------------------------------------


@given(st.data())
@example(None)
def test_keep_gives_exactly_the_whole_batches(data: st.DataObject | None) -> None:
    """Cut anywhere behind the schema, "keep" yields the records of the batches that came whole, and says so."""
    whole, edges = STREAM, EDGES
    cut = edges[2] if data is None else data.draw(st.integers(edges[0], len(whole) - 1))
    batches = sum(edge <= cut for edge in edges[1:-1])
    for source in (whole[:cut], io.BytesIO(whole[:cut])):
        reader = open_stream(source, on_truncated="keep")
        found = list(reader)

        assert contents(EXPECTED[: 2 * batches]) == contents(found)
        report = reader.report()
        assert (True, False, batches, 2 * batches) == (
            report.truncated,
            report.complete,
            report.batches,
            report.records,
        )
        assert report.scalars()["routeplane/stream_truncated"] == 1.0


def _pairs() -> list[RouteRecord]:
    return [record(sample, 30) for sample in range(6)]


EXPECTED = _pairs()
#: Three batches of two records.
STREAM = stream_of(EXPECTED, max_bytes=2 * EXPECTED[0].nbytes)
EDGES = list(boundaries(STREAM))


def test_the_stream_that_is_cut_has_three_batches() -> None:
    """Schema, three batches of two records, trailer."""
    reader = open_stream(STREAM)

    assert contents(EXPECTED) == contents(reader)
    assert (3, 6) == (reader.report().batches, reader.report().records)
    assert len(EDGES) == 5


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 500], ids=lambda cut: f"{cut} bytes")
def test_keep_needs_a_schema(cut: int) -> None:
    """Without a whole schema there is nothing to keep: the error stays."""
    for source in (STREAM[:cut], io.BytesIO(STREAM[:cut])):
        with pytest.raises(TruncatedError):
            open_stream(source, on_truncated="keep")


def test_keep_of_a_whole_stream_says_complete() -> None:
    """The policy changes nothing where nothing is cut."""
    reader = open_stream(STREAM, on_truncated="keep")

    assert contents(EXPECTED) == contents(reader)
    assert (False, True) == (reader.report().truncated, reader.report().complete)


@pytest.mark.parametrize("via", ["bytes", "path"])
def test_a_cut_that_can_be_seen_is_seen_before_the_first_record(via: str, tmp_path: Path) -> None:
    """A path or bytes without its trailer is refused on opening: nothing of it is ever handed out."""
    path = tmp_path / "cut.arrows"
    path.write_bytes(STREAM[: EDGES[2]])

    with pytest.raises(TruncatedError):
        open_stream(path if via == "path" else STREAM[: EDGES[2]])


# ----------------------------------------------------------------------------------------------------------------------
# Bytes that do not belong
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rest", [b"\0", b"garbage behind the end", STREAM], ids=["a byte", "text", "another stream"])
def test_bytes_behind_the_end(rest: bytes, tmp_path: Path) -> None:
    """A file ends with its stream: whatever follows is refused, another whole stream too."""
    path = tmp_path / "two.arrows"
    path.write_bytes(STREAM + rest)
    for source in (STREAM + rest, path):
        with pytest.raises(FormatError) as caught:
            list(open_stream(source))
        assert caught.value.kind is ErrorKind.TRAILER


def test_two_streams_down_one_pipe() -> None:
    """From a pipe nothing behind a stream's end is read: the next stream follows where the first ended."""
    source = io.BytesIO(STREAM + STREAM)

    assert contents(EXPECTED) == contents(open_stream(source))
    assert contents(EXPECTED) == contents(open_stream(source))
    assert source.read() == b""


NOT_STREAMS = {
    "empty": (b"", "truncated"),
    "one byte": (b"\xff", "truncated"),
    "json": (b'{"routes": [[1, 2], [3, 4]]}', "not_arrow"),
    "text": (b"sample_id,token_ids,routes\n", "not_arrow"),
    "zeros": (bytes(64), "not_arrow"),
    "ones": (b"\xff" * 64, "not_arrow"),
    "end of stream only": (b"\xff\xff\xff\xff\0\0\0\0", "not_arrow"),
    "npy": (b"\x93NUMPY\x01\x00v\x00{'descr': '<i2'", "not_arrow"),
    "parquet": (b"PAR1" + bytes(60), "not_arrow"),
    "arrow file": (b"ARROW1\0\0" + STREAM, "not_arrow"),
    "a batch first": (STREAM[EDGES[0] :], "not_arrow"),
}


@pytest.mark.parametrize("name", NOT_STREAMS)
@pytest.mark.parametrize("via", ["bytes", "path", "file object"])
def test_files_of_another_kind_are_refused(via: str, name: str, tmp_path: Path) -> None:
    """A file of another kind is a FormatError that names what was expected, from wherever it comes."""
    data, kind = NOT_STREAMS[name]
    path = tmp_path / "other"
    path.write_bytes(data)
    source = {"bytes": data, "path": path, "file object": io.BytesIO(data)}[via]
    with pytest.raises(FormatError, match="expected") as caught:
        open_stream(source)

    assert kind == str(caught.value.kind)
