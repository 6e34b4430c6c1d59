"""Golden streams read by Arrow implementations that know nothing of this format: every value, not merely row counts.

polars and nanoarrow have IPC readers of their own; DuckDB reads through pyarrow. What one of them cannot read is named
here. None of them can check the trailer: batch metadata stays hidden from their users.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import nanoarrow
import polars
import pyarrow as pa
import pytest

from tests.format.documents import SCHEMAS, load

GOLDEN = SCHEMAS / "golden"
STREAMS: dict[str, Any] = load(GOLDEN / "expected.json")["streams"]

Table = dict[str, list[Any]]

# ----------------------------------------------------------------------------------------------------------------------
# The readers: column name -> values, one per record
# ----------------------------------------------------------------------------------------------------------------------


def read_polars(path: Path) -> Table:
    """With polars' own reader."""
    frame = polars.read_ipc_stream(path)
    return {name: frame[name].to_list() for name in frame.columns}


def read_duckdb(path: Path) -> Table:
    """With DuckDB's scan of a pyarrow table; DuckDB has no 16-bit floats."""
    with pa.ipc.open_stream(path) as reader:
        table = reader.read_all()
    halves = [field.name for field in table.schema if field.type.equals(pa.large_list(pa.float16()))]
    stream = table.drop_columns(halves)
    with duckdb.connect() as connection:
        connection.register("stream", stream)
        rows = connection.sql("SELECT * FROM stream").fetchall()
    return {name: [row[index] for row in rows] for index, name in enumerate(stream.column_names)}


def read_nanoarrow(path: Path) -> Table:
    """With nanoarrow's own reader; its conversion to Python lists knows no maps, so these are left out."""
    with nanoarrow.ArrayStream.from_path(path) as stream:
        table = stream.read_all()
    columns = {table.schema.field(index).name: table.child(index) for index in range(table.n_children)}
    with warnings.catch_warnings():
        # it says that it shows the tensor's storage, which is what is compared
        warnings.filterwarnings("ignore", ".*Converting unregistered extension 'arrow.fixed_shape_tensor'")
        return {name: column.to_pylist() for name, column in columns.items() if name != "attributes"}


READERS: dict[str, tuple[Callable[[Path], Table], set[str]]] = {
    "polars": (read_polars, set()),
    "duckdb": (read_duckdb, {"f16"}),
    "nanoarrow": (read_nanoarrow, {"attributes"}),
}

# ----------------------------------------------------------------------------------------------------------------------
# What the file says, in the terms that every Arrow reader has
# ----------------------------------------------------------------------------------------------------------------------


def stored(stream: dict[str, Any]) -> Table:
    """The columns as Arrow stores them: rows flat, bytes under narrow, checksums as integers."""
    names = ("sample_id", "attempt", "segment", "group", "token_ids", "routes_start", "spans", "captures", "logprobs")
    records = stream["records"]
    table = {name: [record[name] for record in records] for name in (*names, "attributes")}
    table["routes"] = [[_flat_row(row, stream["encoding"]) for row in record["routes"]] for record in records]
    table["checksum"] = [int(record["checksum"], 16) for record in records]
    table["prefix"] = [
        None if record["prefix"] is None else {**record["prefix"], "checksum": int(record["prefix"]["checksum"], 16)}
        for record in records
    ]
    for name in records[0]["columns"] if records else ():
        table[name] = [record["columns"][name]["values"] for record in records]
    return table


def _flat_row(row_LK: list[list[int]], encoding: str) -> list[int]:
    return [0xFF if expert == -1 and encoding == "narrow" else expert for row_K in row_LK for expert in row_K]


def plain(value: Any) -> Any:
    """Whatever a reader gives, as lists, dicts and scalars; NaN as None, a map's entries as a dict."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "to_list"):
        return plain(value.to_list())
    return value


@pytest.mark.parametrize("name", sorted(STREAMS))
@pytest.mark.parametrize("reader", READERS)
def test_values(reader: str, name: str) -> None:
    """Tokens, rows, checksums, spans, captures, prefixes, log-probabilities and token columns are as expected."""
    read, unreadable = READERS[reader]
    expected = {key: values for key, values in stored(STREAMS[name]).items() if key not in unreadable}
    found = read(GOLDEN / name)

    if not STREAMS[name]["records"]:
        assert [] == [key for key, values in found.items() if values]
        return
    assert sorted(expected) == sorted(found)
    for key, values in expected.items():
        assert values == [plain(value) for value in found[key]], key


def test_polars_keeps_the_tensor() -> None:
    """The shape and the names of a row's axes arrive without our code."""
    routes = polars.read_ipc_stream(GOLDEN / "plain.arrows").schema["routes"]

    assert '{"shape":[3,4],"dim_names":["layers","topk"]}' in str(routes)


@pytest.mark.parametrize("name", sorted(STREAMS))
def test_metadata_is_open(name: str) -> None:
    """Format, spec and encoding are schema metadata that plain pyarrow shows, the spec as JSON."""
    with pa.ipc.open_stream(GOLDEN / name) as reader:
        metadata = reader.schema.metadata

    assert STREAMS[name]["format"] == metadata[b"routeplane.format"].decode()
    assert STREAMS[name]["encoding"] == metadata[b"routeplane.encoding"].decode()
    assert STREAMS[name]["spec"] == json.loads(metadata[b"routeplane.spec"])
