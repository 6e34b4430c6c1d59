"""Streams that are valid Arrow and yet not what their trailer says, or not ours: each a typed error.

What is changed here is changed by an Arrow writer, so that no Arrow check can object; only the format's can.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from itertools import pairwise

import pyarrow as pa
import pytest

from routeplane.errors import ErrorKind, FormatError, TruncatedError
from routeplane.record.batches import Trailer
from routeplane.record.codec import column_types, write_batch
from routeplane.record.schema import CAPTURE_TYPE
from routeplane.stream import open_stream
from tests.stream.streams import SPEC, content, contents, forge, forged_column, record, refusal, stream_of, trailer_of

RECORDS = [record(sample, 4 + sample) for sample in range(3)]
BATCH = write_batch(RECORDS, SPEC, encoding="plain")
TRAILER = trailer_of(RECORDS)


def test_the_forge_makes_good_streams() -> None:
    """What the forgeries below start from reads as the records it was made of."""
    assert contents(RECORDS) == contents(open_stream(forge([BATCH], trailer=TRAILER)))
    assert contents(RECORDS) == contents(open_stream(forged_column(RECORDS, "attempt", [0, 0, 0])))


# ----------------------------------------------------------------------------------------------------------------------
# Trailers
# ----------------------------------------------------------------------------------------------------------------------

FORGED_TRAILERS: dict[str, Trailer | str] = {
    "a batch more": replace(TRAILER, batches=2),
    "no batch": replace(TRAILER, batches=0),
    "a record more": replace(TRAILER, records=4),
    "a record less": replace(TRAILER, records=2),
    "a token more": replace(TRAILER, tokens=TRAILER.tokens + 1),
    "another digest": replace(TRAILER, digest=TRAILER.digest ^ 1),
    "records in another order": trailer_of(RECORDS[::-1]),
    "another spec": trailer_of(RECORDS, spec=replace(SPEC, model="other")),
    "another encoding": trailer_of(RECORDS, encoding="narrow"),
    "another version": trailer_of(RECORDS, version="1.0"),
    "no JSON": "complete",
    "empty": "",
    "an array": "[1,3,15]",
    "null": "null",
    "a member less": json.dumps({"batches": 1, "records": 3, "tokens": 15}),
    "counts as text": TRAILER.to_json().replace(":1,", ':"1",'),
    "digest in capitals": TRAILER.to_json().replace(f"{TRAILER.digest:016x}", f"{TRAILER.digest:016X}"),
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("name", FORGED_TRAILERS)
def test_forged_trailers(name: str) -> None:
    """Whatever a trailer counts that did not come, or does not say, is refused as a trailer."""
    found = refusal(forge([BATCH], trailer=FORGED_TRAILERS[name]))

    assert (FormatError, ErrorKind.TRAILER) == (type(found), found.kind)


def test_no_trailer() -> None:
    """A stream that Arrow calls complete, end mark and all, is cut without its trailer."""
    assert isinstance(refusal(forge([BATCH], trailer=None)), TruncatedError)


def test_two_trailers() -> None:
    """Nothing follows a trailer, not even another."""
    twice = forge([BATCH], trailer=TRAILER)
    frames = twice[: twice.rindex(b"\xff\xff\xff\xff\0\0\0\0")]
    last = frames[frames.rindex(b"\xff\xff\xff\xff") :]

    assert refusal(frames + last + b"\xff\xff\xff\xff\0\0\0\0").kind is ErrorKind.TRAILER


def test_batches_after_the_trailer() -> None:
    """A trailer in the middle is none."""
    whole, more = forge([BATCH], trailer=TRAILER), forge([BATCH], trailer=TRAILER)
    schema = len(forge([], trailer=None, schema=BATCH.schema)) - 8

    assert refusal(whole[:-8] + more[schema:]).kind is ErrorKind.TRAILER


def test_a_trailer_with_rows() -> None:
    """Rows in the batch that carries the trailer would be counted by no one."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, BATCH.schema) as writer:
        writer.write_batch(BATCH)
        writer.write_batch(BATCH.slice(0, 1), custom_metadata={"routeplane.trailer": TRAILER.to_json()})

    assert refusal(sink.getvalue()).kind is ErrorKind.TRAILER


def test_reordered_records() -> None:
    """The right records in another order do not agree with the digest."""
    turned = BATCH.take(pa.array([1, 0, 2]))

    assert refusal(forge([turned], trailer=TRAILER)).kind is ErrorKind.TRAILER


def test_a_record_that_was_dropped_or_came_twice() -> None:
    """One record less is seen by the trailer, one twice by its key."""
    assert refusal(forge([BATCH.slice(0, 2)], trailer=TRAILER)).kind is ErrorKind.TRAILER
    assert refusal(forge([BATCH, BATCH.slice(1, 1)], trailer=TRAILER)).kind is ErrorKind.DUPLICATE_KEY


def test_batches_without_rows_are_batches() -> None:
    """An empty batch among the others is counted like them."""
    batches = [BATCH.slice(0, 0), BATCH, BATCH.slice(0, 0)]

    assert contents(RECORDS) == contents(open_stream(forge(batches, trailer=replace(TRAILER, batches=3))))
    assert refusal(forge(batches, trailer=TRAILER)).kind is ErrorKind.TRAILER


def test_the_digest_is_known_before_reading() -> None:
    """A stream that can be walked tells its trailer's digest at once; a pipe and a cut stream have none to tell."""
    data = stream_of(RECORDS)
    whole, other = (open_stream(held) for held in (data, stream_of(RECORDS[:2])))

    assert (f"{TRAILER.digest:016x}", False) == (whole.digest, whole.report().complete)
    assert whole.digest != other.digest
    assert open_stream(io.BytesIO(data)).digest is None
    assert open_stream(data[:-60], on_truncated="keep").digest is None
    assert open_stream(forge([BATCH], trailer=None), on_truncated="keep").digest is None
    with pytest.raises(FormatError) as caught:
        open_stream(forge([BATCH], trailer="complete")).digest  # noqa: B018
    assert ErrorKind.TRAILER is caught.value.kind


# ----------------------------------------------------------------------------------------------------------------------
# Compression and other messages
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_bodies_are_refused_undecoded(codec: str) -> None:
    """A compressed body that claims ten gigabytes is refused by its header: Arrow's pool never hears of it."""
    data = bytearray(forge([BATCH], trailer=TRAILER, options=pa.ipc.IpcWriteOptions(compression=codec)))
    magic = {"zstd": b"\x28\xb5\x2f\xfd", "lz4": b"\x04\x22\x4d\x18"}[codec]
    at = data.find(magic)
    assert at > 8
    data[at - 8 : at] = (10 * 2**30).to_bytes(8, "little")
    default = pa.default_memory_pool()
    watched = pa.proxy_memory_pool(default)
    pa.set_memory_pool(watched)
    try:
        found = refusal(bytes(data))
    finally:
        pa.set_memory_pool(default)

    assert (FormatError, ErrorKind.COMPRESSED) == (type(found), found.kind)
    assert watched.max_memory() < 2**20
    with pytest.raises(FormatError) as refused, open_stream(bytes(data), on_corrupt="quarantine") as reader:
        list(reader)
    assert refused.value.kind is ErrorKind.COMPRESSED


def test_dictionary_messages_are_refused() -> None:
    """A stream with a dictionary batch is none of ours, even where no column of ours uses it."""
    foreign = forge([pa.record_batch({"x": pa.array(["a"]).dictionary_encode()})], trailer=None)
    at = [index for index in range(len(foreign)) if foreign.startswith(b"\xff\xff\xff\xff", index)]
    whole = forge([BATCH], trailer=TRAILER)
    schema = len(forge([], trailer=None, schema=BATCH.schema)) - 8
    found = refusal(whole[:schema] + foreign[at[1] : at[2]] + whole[schema:])

    assert (FormatError, ErrorKind.SCHEMA) == (type(found), found.kind)


# ----------------------------------------------------------------------------------------------------------------------
# Other readers
# ----------------------------------------------------------------------------------------------------------------------


def test_plain_pyarrow_reads_everything_but_the_trailer() -> None:
    """Any Arrow reader gets the records, and metadata that says what they are."""
    with pa.ipc.open_stream(stream_of(RECORDS)) as reader:
        table = reader.read_all()

    assert ["sample-0", "sample-1", "sample-2"] == table["sample_id"].to_pylist()
    assert [item.token_ids.tolist() for item in RECORDS] == table["token_ids"].to_pylist()
    assert [item.routes.reshape(-1, 4).tolist() for item in RECORDS] == [
        chunk for column in table["routes"].chunks for chunk in (row.to_pylist() for row in _lists(column))
    ]
    assert SPEC.to_json() == table.schema.metadata[b"routeplane.spec"].decode()
    assert CAPTURE_TYPE == table.schema.field("captures").type.value_type
    assert () == column_types(RECORDS[0])
    assert content(RECORDS[0])["checksum"] == f"{table['checksum'][0].as_py():016x}"


def _lists(column: pa.LargeListArray) -> list[pa.Array]:
    flat = column.flatten().storage
    offsets = column.offsets.to_pylist()
    return [flat.slice(start, stop - start) for start, stop in pairwise(offsets)]
