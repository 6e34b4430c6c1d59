"""Whatever carries the records, they arrive as they left: every transport, encoding and batch size; selection; use."""

from __future__ import annotations

import io
import os
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routeplane.errors import ErrorKind, SpecError, UsageError
from routeplane.record import codec
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.spec import RouteSpec
from routeplane.stream import MemoryStream, new_stream, open_stream
from routeplane.stream.blocks import SealedBlock
from routeplane.stream.ipc import IpcReader
from tests.stream.streams import SPEC, Encoding, content, contents, record, record_lists, stream_of

RECORDS = [record(sample, 4 + sample) for sample in range(4)]

# ----------------------------------------------------------------------------------------------------------------------
# Transports
# ----------------------------------------------------------------------------------------------------------------------


def put(sink: Any, spec: RouteSpec, *, found: list[RouteRecord], options: dict[str, Any]) -> None:
    """Write all."""
    with new_stream(sink, spec, **options) as writer:
        for item in found:
            writer.write(item)


def via_bytes(spec: RouteSpec, found: list[RouteRecord], **options: Any) -> Any:
    """Through bytes in memory."""
    sink = io.BytesIO()
    put(sink, spec, found=found, options=options)
    return open_stream(sink.getvalue()), None


def via_file_object(spec: RouteSpec, found: list[RouteRecord], **options: Any) -> Any:
    """Through a file object, read as a pipe is."""
    sink = io.BytesIO()
    put(sink, spec, found=found, options=options)
    sink.seek(0)
    return open_stream(sink), None


def via_path(spec: RouteSpec, found: list[RouteRecord], **options: Any) -> Any:
    """Through a file that is mapped."""
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name) / "stream.arrows"
    put(path, spec, found=found, options=options)
    return open_stream(path), folder.cleanup


def via_pipe(spec: RouteSpec, found: list[RouteRecord], **options: Any) -> Any:
    """Through a real pipe, written by a thread."""
    read, write = os.pipe()

    def work() -> None:
        with os.fdopen(write, "wb") as file:
            put(file, spec, found=found, options=options)

    thread = threading.Thread(target=work)
    thread.start()
    file = os.fdopen(read, "rb")

    def end() -> None:
        thread.join()
        file.close()

    return open_stream(file), end


def via_memory(spec: RouteSpec, found: list[RouteRecord], **options: Any) -> Any:
    """Through memory, written by a thread."""
    stream = MemoryStream()
    options.pop("encoding")
    sink = new_stream(stream, spec, **options)

    def work() -> None:
        with sink:
            for item in found:
                sink.write(item)

    thread = threading.Thread(target=work)
    thread.start()
    return open_stream(stream), thread.join


TRANSPORTS: list[Callable[..., Any]] = [via_bytes, via_file_object, via_path, via_pipe, via_memory]


@pytest.mark.parametrize("via", TRANSPORTS, ids=lambda via: via.__name__)
@given(record_lists(), st.sampled_from(["plain", "narrow", "auto"]), st.integers(1, 600))
def test_round_trip(
    via: Callable[..., Any], drawn: tuple[RouteSpec, list[RouteRecord]], encoding: str, max_bytes: int
) -> None:
    """Any records through any transport, encoding and batch size: equal in every value, key, checksum, and in order."""
    spec, found = drawn
    reader, end = via(spec, found, encoding=encoding, max_bytes=max_bytes)
    came = list(reader)
    if end is not None:
        end()

    assert contents(found) == contents(came)
    assert spec == reader.spec
    report = reader.report()
    assert (len(found), sum(item.num_tokens for item in found)) == (report.records, report.tokens)
    assert (True, False) == (report.complete, report.truncated)
    for item in came:
        item.verify()


@given(record_lists(max_size=6), st.integers(1, 2_000))
def test_batches(drawn: tuple[RouteSpec, list[RouteRecord]], max_bytes: int) -> None:
    """A batch is written as soon as what is held reaches ``max_bytes``, and holds no more records than that takes."""
    spec, found = drawn
    held, batches = 0, 0
    for item in found:
        held += item.nbytes
        if held >= max_bytes:
            held, batches = 0, batches + 1
    reader = open_stream(stream_of(found, spec=spec, max_bytes=max_bytes))
    list(reader)

    assert batches + (held > 0) == reader.report().batches


def test_many_records() -> None:
    """Thousands of records, in one batch and in many."""
    many = [record(sample, 3) for sample in range(2_000)]
    for max_bytes in (2**30, 1_000):
        came = list(open_stream(stream_of(many, encoding="narrow", max_bytes=max_bytes)))
        assert [(item.key, item.checksum) for item in many] == [(item.key, item.checksum) for item in came]
        assert content(many[-1]) == content(came[-1])


@pytest.mark.parametrize("encoding", ["plain", "narrow"])
def test_no_records(encoding: Encoding) -> None:
    """A stream of nothing is whole, and says of what it is nothing."""
    reader = open_stream(stream_of([], encoding=encoding))

    assert isinstance(reader, IpcReader)
    assert [] == list(reader)
    assert (SPEC, encoding) == (reader.spec, reader.header.encoding)
    assert reader.report().complete


def test_no_records_with_columns_elsewhere() -> None:
    """A stream's token columns are known from its schema, by name and type, before any record."""
    columns = {"w": np.arange(4, dtype=np.uint8), "m": np.ones(4, dtype=bool)}
    reader = open_stream(stream_of([record(0, 4, columns=columns)]))

    assert isinstance(reader, IpcReader)
    assert [("m", "bool"), ("w", "uint8")] == [(name, kind.dtype) for name, kind in reader.header.columns]


def test_types_do_not_depend_on_lengths() -> None:
    """Records of equal lengths, of different ones, and none at all come under one and the same schema."""
    equal, ragged = [record(0, 5), record(1, 5)], [record(0, 5), record(1, 6)]
    schemas = []
    for found in (equal, ragged, []):
        with pa.ipc.open_stream(stream_of(found)) as reader:
            schemas.append(reader.schema)

    assert schemas[0].equals(schemas[1], check_metadata=True)
    assert schemas[0].equals(schemas[2], check_metadata=True)


def test_encodings_give_the_same_records() -> None:
    """Plain and narrow differ in bytes only; the one is about half of the other where rows are most of it."""
    long = [record(sample, 4_000, logprobs=None) for sample in range(2)]
    plain, narrow = stream_of(long), stream_of(long, encoding="narrow")

    assert contents(open_stream(plain)) == contents(open_stream(narrow))
    rows = sum(item.routes.nbytes for item in long)
    saved = len(plain) - len(narrow)
    assert abs(saved - rows // 2) <= 64  # but for padding and the encodings' names


@pytest.mark.parametrize(("experts", "top_k", "encoding"), [(256, 2, "narrow"), (257, 2, "plain"), (256, 1, "plain")])
def test_auto(experts: int, top_k: int, encoding: str) -> None:
    """``auto`` takes the narrow encoding where the spec allows it, whatever the data's maximum is."""
    spec = RouteSpec(num_experts=experts, top_k=top_k, layer_ids=(0,))
    reader = open_stream(stream_of([record(0, spec=spec)], spec=spec, encoding="auto"))

    assert isinstance(reader, IpcReader)
    assert encoding == reader.header.encoding


# ----------------------------------------------------------------------------------------------------------------------
# Selection
# ----------------------------------------------------------------------------------------------------------------------


@given(record_lists(), st.data(), st.sampled_from(["plain", "narrow"]))
def test_selection(drawn: tuple[RouteSpec, list[RouteRecord]], data: st.DataObject, encoding: Encoding) -> None:
    """Selecting at the reader gives what slicing and selecting each record gives; the rest is counted."""
    spec, found = drawn
    found = [replace(item, routes_start=0, prefix=None, routes=whole_rows(item), checksum=None) for item in found]
    layers = data.draw(st.none() | st.lists(st.sampled_from(spec.layer_ids), min_size=1))
    tokens = data.draw(
        st.none() | st.tuples(st.integers(0, 5), st.integers(1, 6)).filter(lambda pair: pair[0] < pair[1])
    )
    reader = open_stream(stream_of(found, spec=spec, encoding=encoding))
    came = list(reader.select(layer_ids=layers, tokens=tokens))

    expected = []
    for item in found:
        if tokens is not None and tokens[0] >= item.num_tokens:
            continue
        cut = item if tokens is None else item.slice(tokens[0], min(tokens[1], item.num_tokens))
        expected.append(cut if layers is None else cut.select(layers))
    assert contents(expected) == contents(came)
    assert len(found) - len(expected) == reader.report().outside
    assert reader.spec == (spec if layers is None else spec.select(layers))
    assert reader.report().complete


def whole_rows(item: RouteRecord) -> np.ndarray[Any, Any]:
    """Rows for every token of a record, those that stand elsewhere made up: legal, and as its captures say."""
    rows = item.spec.missing_rows(item.num_tokens)
    rows[item.routes_start :] = item.routes
    ids = np.arange(item.spec.top_k)
    for capture in item.captures:
        for token in range(capture.start, min(capture.stop, item.routes_start)):
            if capture.state in ("captured", "cached"):
                rows[token] = ids
            elif capture.state == "partial":
                rows[token, 0] = ids
    return rows


def test_selection_verifies_what_it_cuts() -> None:
    """A record is verified whole before a part of it is handed on: damage outside the part is damage."""
    data = bytearray(stream_of(RECORDS))
    at = bytes(data).index(RECORDS[0].routes.tobytes())
    data[at] ^= 4
    with pytest.raises(ValueError, match="sample-0"):
        list(open_stream(bytes(data)).select(tokens=(2, 3)))


BAD_SELECTIONS: list[dict[str, Any]] = [
    {"tokens": (2, 2)},
    {"tokens": (3, 2)},
    {"tokens": (-1, 2)},
    {"layer_ids": [1, 2]},
    {"layer_ids": []},
]


@pytest.mark.parametrize("selection", BAD_SELECTIONS, ids=str)
def test_bad_selections(selection: dict[str, Any]) -> None:
    """Layers that are not captured and empty intervals are refused before anything is read."""
    with pytest.raises((UsageError, SpecError)):
        open_stream(stream_of(RECORDS)).select(**selection)


# ----------------------------------------------------------------------------------------------------------------------
# Use
# ----------------------------------------------------------------------------------------------------------------------


def test_one_iteration() -> None:
    """A stream is read once: another iteration is refused, not empty; so is selecting after the first."""
    reader = open_stream(stream_of(RECORDS))
    list(reader)
    with pytest.raises(UsageError) as caught:
        iter(reader)
    assert caught.value.kind is ErrorKind.CLOSED
    with pytest.raises(UsageError):
        reader.select(layer_ids=[1])


def test_a_closed_reader() -> None:
    """A reader that was closed is not a stream that was cut."""
    with open_stream(stream_of(RECORDS)) as reader:
        pass
    with pytest.raises(UsageError) as caught:
        list(reader)
    assert caught.value.kind is ErrorKind.CLOSED


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_closed_writer(end: str) -> None:
    """After the end nothing is written; ending again changes nothing."""
    sink = io.BytesIO()
    writer = new_stream(sink, SPEC)
    writer.write(RECORDS[0])
    getattr(writer, end)()
    written = sink.getvalue()
    with pytest.raises(UsageError) as caught:
        writer.write(RECORDS[1])
    writer.close()
    writer.abort()

    assert caught.value.kind is ErrorKind.CLOSED
    assert written == sink.getvalue()


REFUSED: dict[str, tuple[RouteRecord, ErrorKind]] = {
    "another width": (record(9, spec=replace(SPEC, num_experts=32)), ErrorKind.SPEC_MISMATCH),
    "other layers": (record(9, spec=replace(SPEC, layer_ids=(1, 5))), ErrorKind.SPEC_MISMATCH),
    "another model": (record(9, spec=replace(SPEC, model="other")), ErrorKind.SPEC_MISMATCH),
    "the same key": (record(0), ErrorKind.DUPLICATE_KEY),
    "content that changed": (replace(record(9), checksum=1), ErrorKind.CHECKSUM),
    "a token column more": (record(9, columns={"w": np.arange(5)}), ErrorKind.TOKEN_COLUMN),
}


@pytest.mark.parametrize("name", REFUSED)
def test_records_that_do_not_fit(name: str) -> None:
    """A record of another geometry, key, content or columns is refused by name, and the stream goes on without it."""
    item, kind = REFUSED[name]
    sink = io.BytesIO()
    with new_stream(sink, SPEC) as writer:
        writer.write(RECORDS[0])
        with pytest.raises(ValueError, match=r"sample-[09]|'tests/stream'") as caught:
            writer.write(item)
        writer.write(RECORDS[1])

    assert kind == getattr(caught.value, "kind", None)
    assert contents(RECORDS[:2]) == contents(open_stream(sink.getvalue()))


def test_keys_are_of_three_parts() -> None:
    """Attempts and segments of one sample are records of their own."""
    found = [record(0), record(0, attempt=1), record(0, segment=1)]

    assert [RecordKey("sample-0", 0, 0), RecordKey("sample-0", 1, 0), RecordKey("sample-0", 0, 1)] == [
        item.key for item in open_stream(stream_of(found))
    ]


@pytest.mark.parametrize(
    "options", [{"encoding": "wide"}, {"encoding": ""}, {"max_bytes": 0}, {"max_bytes": -1}], ids=str
)
def test_bad_options(options: dict[str, Any], tmp_path: Path) -> None:
    """An encoding that does not exist and a bound below one byte are refused; no file is left of the attempt."""
    with pytest.raises(UsageError):
        new_stream(tmp_path / "a", SPEC, **options)

    assert [] == list(tmp_path.iterdir())


def test_narrow_is_refused_where_it_does_not_fit(tmp_path: Path) -> None:
    """Narrow with 257 experts is an error, not a silent plain; no file is left of the attempt."""
    with pytest.raises(UsageError, match="256"):
        new_stream(tmp_path / "a", RouteSpec(num_experts=257, top_k=2, layer_ids=(0,)), encoding="narrow")

    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("encoding", ["plain", "narrow"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_rows_are_written_from_where_they_lie(monkeypatch: pytest.MonkeyPatch, encoding: Any, count: int) -> None:
    """Rows that need no conversion, int16 or of a narrow stream, are not copied; the bytes are the same."""
    found = [record(sample, 4 + sample) for sample in range(count)]
    for records in (
        found,
        list(open_stream(stream_of(found, encoding="narrow"))),
    ):
        written = []
        for least in (2**60, 0):
            monkeypatch.setattr(codec, "_SCATTERED_BYTES", least)
            block = SealedBlock.of(records, SPEC, encoding=encoding).to_buffer().to_pybytes()
            written.append((stream_of(records, encoding=encoding), block))
        assert written[0] == written[1]
