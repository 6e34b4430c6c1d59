"""Whose memory a record's arrays are: the source's, shared and read-only, and alive for as long as the record."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from routeplane.stream import new_stream, open_stream
from tests.stream.streams import SPEC, Encoding, contents, record, stream_of

RECORDS = [record(sample, 4 + sample) for sample in range(3)]


def test_plain_rows_are_views_of_the_source() -> None:
    """Reading plain copies neither rows nor tokens: both lie in the bytes that were opened, and cannot be written."""
    data = stream_of(RECORDS)
    memory = np.frombuffer(data, dtype=np.uint8)
    for item in open_stream(data):
        for array in (item.routes, item.token_ids):
            assert np.shares_memory(memory, array)
            assert not array.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
            with pytest.raises(ValueError, match=r"WRITEABLE|writeable"):
                array.flags.writeable = True


def test_a_mapped_file_takes_no_memory(tmp_path: Path) -> None:
    """Rows of a path are those of its mapping: megabytes are read without an allocation of their size."""
    path = tmp_path / "large.arrows"
    large = [record(sample, 40_000) for sample in range(4)]
    with new_stream(path, SPEC) as sink:
        for item in large:
            sink.write(item)
    default = pa.default_memory_pool()
    watched = pa.proxy_memory_pool(default)
    pa.set_memory_pool(watched)
    try:
        found = list(open_stream(path))
    finally:
        pa.set_memory_pool(default)

    assert sum(item.nbytes for item in found) > 10 * watched.max_memory()
    assert contents(large[:1]) == contents(found[:1])
    with pytest.raises(ValueError, match="read-only"):
        found[0].routes[0, 0, 0] = 1


@pytest.mark.parametrize("encoding", ["plain", "narrow"])
def test_records_outlive_their_reader(encoding: Encoding, tmp_path: Path) -> None:
    """Records stay what they are when reader and file are gone."""
    path = tmp_path / "a.arrows"
    with new_stream(path, SPEC, encoding=encoding) as sink:
        for item in RECORDS:
            sink.write(item)
    with open_stream(path) as reader:
        found = list(reader)
    del reader
    path.unlink()
    gc.collect()

    assert contents(RECORDS) == contents(found)
    for item in found:
        item.verify()


def test_a_slice_does_not_write_its_parent() -> None:
    """A record cut from a long one takes its own size in a stream, not the long one's."""
    long = record(1, 20_000)
    short = long.slice(10_000, 10_010)
    data = stream_of([short])

    assert len(data) < 10_000 < long.nbytes
    assert contents([short]) == contents(open_stream(data))


def test_a_slice_pickles_without_its_parent() -> None:
    """A token of a long record that was read crosses a process by itself."""
    (long,) = open_stream(stream_of([record(1, 20_000)]))
    part = long.slice(10_000, 10_001)
    sent = pickle.dumps(part)

    assert len(sent) < 4_000 < long.nbytes
    assert contents([part]) == contents([pickle.loads(sent)])
