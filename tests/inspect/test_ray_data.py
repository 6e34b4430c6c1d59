"""Records as a Ray Data set: on a real cluster, against what ``open_stream`` gives.

Ray runs the tasks in processes of its own; what the tests hand it to run is pickled.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import ray
from ray.data.expressions import col

from routeplane.archive import save_archive
from routeplane.errors import DataError, ErrorKind, FormatError, RouteplaneError
from routeplane.inspect.export import write_tables
from routeplane.inspect.ray_data import dataset, filter_batches, records_of
from routeplane.record.record import RouteRecord
from routeplane.record.schema import arrow_schema
from routeplane.stream import new_stream, open_stream
from tests.ray_cluster import local_cluster
from tests.stream.streams import SPEC, contents, record, stream_of

# one worker for all files that start a cluster: at most one at a time
pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Ray, for all of this file."""
    with local_cluster():
        yield


def saved(path: Path, records: Sequence[RouteRecord], **options: Any) -> Path:
    """A stream of the records, one batch for each unless ``max_bytes`` says otherwise."""
    with new_stream(path, SPEC, **{"max_bytes": 1, **options}) as sink:
        for item in records:
            sink.write(item)
    return path


def by_key(found: Iterator[RouteRecord] | Sequence[RouteRecord]) -> list[dict[str, Any]]:
    """Contents in the order of keys: Ray promises none across partitions."""
    return contents(sorted(found, key=lambda item: item.key))


# ----------------------------------------------------------------------------------------------------------------------
# What is read
# ----------------------------------------------------------------------------------------------------------------------


def test_a_data_set_has_the_records_of_its_streams(tmp_path: Path) -> None:
    """Several streams, in either encoding and any number of batches, give all of their records once."""
    records = [record(index, 4 + index, columns={"mask": np.arange(4 + index) % 2 == 0}) for index in range(9)]
    paths = [
        saved(tmp_path / "plain", records[:5]),
        saved(tmp_path / "narrow", records[5:8], encoding="narrow"),
        saved(tmp_path / "one", records[8:], max_bytes=2**20),
        saved(tmp_path / "none", []),
    ]

    found = dataset(paths)

    assert by_key(records) == by_key(records_of(found))
    assert 9 == found.count()


def test_the_schema_is_the_formats_own(tmp_path: Path) -> None:
    """Types and metadata are those of a plain stream, so that any Arrow reader, ours too, knows what the rows mean."""
    found = dataset(saved(tmp_path / "s", [record(0), record(1)], encoding="narrow"))

    [table] = {block.schema for block in found.iter_batches(batch_format="pyarrow", batch_size=None)}

    expected = arrow_schema(SPEC, "plain")
    assert expected.equals(table, check_metadata=True)
    assert expected.equals(found.schema().base_schema, check_metadata=True)


@pytest.mark.parametrize(
    ("layer_ids", "tokens"), [((4,), None), (None, (2, 5)), ((4,), (1, 3))], ids=["layers", "tokens", "both"]
)
def test_a_selection_is_the_one_of_a_reader(
    tmp_path: Path, layer_ids: tuple[int, ...] | None, tokens: tuple[int, int] | None
) -> None:
    """Layers and token ranges are cut as ``RouteSource.select`` cuts them, and those outside are left out."""
    path = saved(tmp_path / "s", [record(index, 1 + 2 * index) for index in range(5)])
    expected = list(open_stream(path).select(layer_ids=layer_ids, tokens=tokens))

    assert by_key(expected) == by_key(records_of(dataset(path, layer_ids=layer_ids, tokens=tokens)))


def test_an_archive_is_read_beside_streams(tmp_path: Path) -> None:
    """An archive's records come with those of streams, cut alike."""
    records = [record(index, 4 + index) for index in range(7)]
    save_archive(records[:4], tmp_path / "a.zarr", spec=SPEC)
    paths = [tmp_path / "a.zarr", saved(tmp_path / "s", records[4:])]

    assert by_key(records) == by_key(records_of(dataset(paths)))
    expected = [item.slice(5, min(8, item.num_tokens)).select([4]) for item in records if item.num_tokens > 5]
    assert by_key(expected) == by_key(records_of(dataset(paths, layer_ids=[4], tokens=(5, 8))))


def test_ray_data_counts_the_same_experts_in_an_export(tmp_path: Path) -> None:
    """A file for analysis is plain Parquet: Ray Data reads it without this library."""
    records = [record(index, 4 + index) for index in range(5)]
    write_tables(records, tmp_path / "flat.parquet", form="flat")
    expected = Counter(int(expert) for one in records for expert in one.routes.ravel() if expert >= 0)
    rows = ray.data.read_parquet(str(tmp_path / "flat.parquet")).take_all()

    assert expected == Counter(int(expert) for row in rows if row["experts"] is not None for expert in row["experts"])


def test_a_data_set_of_nothing_has_a_schema(tmp_path: Path) -> None:
    """An empty stream gives an empty data set that can be counted and read."""
    found = dataset(saved(tmp_path / "s", []))

    assert 0 == found.count()
    assert [] == list(records_of(found))


def test_the_read_is_partitioned(tmp_path: Path) -> None:
    """Ten batches are read by several tasks, each with a part of them."""
    path = saved(tmp_path / "s", [record(index) for index in range(10)])

    blocks = [block.num_rows for block in dataset(path).iter_batches(batch_format="pyarrow", batch_size=None)]
    assert 10 == sum(blocks)
    assert 1 < len(blocks)


# ----------------------------------------------------------------------------------------------------------------------
# What is refused
# ----------------------------------------------------------------------------------------------------------------------


def test_a_cut_stream_is_refused_by_the_driver(tmp_path: Path) -> None:
    """A stream without its trailer never becomes a data set, cut at a batch boundary too."""
    whole = stream_of([record(0), record(1)], max_bytes=1)
    (tmp_path / "cut").write_bytes(whole[: -len(stream_of([]))])

    with pytest.raises(FormatError) as caught:
        dataset(tmp_path / "cut")
    assert ErrorKind.TRUNCATED == caught.value.kind


def test_streams_that_differ_are_refused(tmp_path: Path) -> None:
    """Other layers, or other token columns, make no common table."""
    first = saved(tmp_path / "first", [record(0)])
    columns = saved(tmp_path / "columns", [record(1, columns={"mask": np.ones(5, dtype=bool)})])
    other = tmp_path / "other"
    other.write_bytes(stream_of([], spec=SPEC.select([4])))

    kinds = []
    for path in (other, columns):
        with pytest.raises(RouteplaneError) as caught:
            dataset([first, path])
        kinds.append(caught.value.kind)
    assert [ErrorKind.SPEC_MISMATCH, ErrorKind.TOKEN_COLUMN] == kinds


def test_a_damaged_record_fails_the_task_that_reads_it(tmp_path: Path) -> None:
    """Checksums are compared in the workers; the error that comes out is the library's, with sample and kind."""
    data = bytearray(stream_of([record(0, 50), record(1, 50)], max_bytes=1))
    token = np.int32(1_007).tobytes()
    assert 1 == data.count(token)
    data[data.index(token)] ^= 1
    (tmp_path / "s").write_bytes(data)

    with pytest.raises(DataError) as caught:
        list(records_of(dataset(tmp_path / "s")))
    assert ErrorKind.CHECKSUM == caught.value.kind
    assert 100 == sum(item.num_tokens for item in records_of(dataset(tmp_path / "s", verify=False), verify=False))


@pytest.mark.parametrize("paths", [[], io.BytesIO()], ids=["none", "a file object"])
def test_what_workers_cannot_open_is_refused(paths: Any, tmp_path: Path) -> None:
    """Only paths can be read by several processes."""
    with pytest.raises((RouteplaneError, TypeError)):
        dataset(paths)
    with pytest.raises(FileNotFoundError):
        dataset(tmp_path)
    with pytest.raises(RouteplaneError):
        dataset(tmp_path / "absent")


# ----------------------------------------------------------------------------------------------------------------------
# Filtering
# ----------------------------------------------------------------------------------------------------------------------


def long_enough(table: pa.Table) -> Any:
    """Records of more than five tokens."""
    return pc.greater(pc.list_value_length(table["token_ids"]), 5)


def test_filtering_batches_keeps_the_types(tmp_path: Path) -> None:
    """What is left are whole records, which verify; by a function over tables and by a Ray expression alike."""
    records = [record(index, 3 + index) for index in range(6)]
    found = dataset(saved(tmp_path / "s", records))

    assert by_key(records[3:]) == by_key(records_of(filter_batches(found, long_enough)))
    assert by_key(records[2:3]) == by_key(records_of(found.filter(expr=col("sample_id") == "sample-2")))


def test_shuffling_keeps_the_types(tmp_path: Path) -> None:
    """A shuffle and a repartition move rows, not meanings."""
    records = [record(index, 3 + index) for index in range(6)]

    found = dataset(saved(tmp_path / "s", records)).random_shuffle(seed=1).repartition(2)

    assert by_key(records) == by_key(records_of(found))


@pytest.mark.filterwarnings("ignore:Use 'expr' instead of 'fn':UserWarning")
def test_filtering_rows_destroys_the_types_and_is_refused(tmp_path: Path) -> None:
    """Ray's row-wise ``filter`` gives nested lists of int64 without a spec; nothing here takes these for records."""
    found = dataset(saved(tmp_path / "s", [record(0), record(1)])).filter(lambda row: row["sample_id"] == "sample-1")

    with pytest.raises(FormatError) as caught:
        list(records_of(found))
    assert ErrorKind.NOT_ROUTEPLANE == caught.value.kind
