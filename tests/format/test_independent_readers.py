"""Golden streams of both versions read by Arrow implementations that know nothing of this format: every value.

polars and nanoarrow have IPC readers of their own; DuckDB reads through pyarrow. What one of them cannot read is named
here. None of them can check the trailer: batch metadata stays hidden from their users.
"""

from __future__ import annotations

import itertools
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

#: A path below ``schemas/v1`` -> what the stream holds.
STREAMS: dict[str, Any] = {
    f"{folder}/{name}": stream
    for folder in ("golden", "golden-1.1")
    for name, stream in load(SCHEMAS / folder / "expected.json")["streams"].items()
}

Table = dict[str, list[Any]]

# ----------------------------------------------------------------------------------------------------------------------
# The readers: column name -> values, one per record
# ----------------------------------------------------------------------------------------------------------------------


def read_polars(path: Path) -> Table:
    """With polars' own reader."""
    frame = polars.read_ipc_stream(path)
    return {name: frame[name].to_list() for name in frame.columns}


def read_duckdb(path: Path) -> Table:
    """With DuckDB's scan of a pyarrow table; DuckDB has no 16-bit floats, alone or in an array."""
    with pa.ipc.open_stream(path) as reader:
        table = reader.read_all()
    stream = table.drop_columns([field.name for field in table.schema if "halffloat" in str(field.type)])
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
    "duckdb": (read_duckdb, {"f16", "halves"}),
    "nanoarrow": (read_nanoarrow, {"attributes"}),
}

# ----------------------------------------------------------------------------------------------------------------------
# What the file says, in the terms that every Arrow reader has
# ----------------------------------------------------------------------------------------------------------------------


def stored(stream: dict[str, Any]) -> Table:
    """The columns as Arrow stores them: rows and arrays flat, bytes under narrow, checksums as integers."""
    names = ("sample_id", "attempt", "segment", "group", "token_ids", "routes_start", "captures", "logprobs")
    records = stream["records"]
    table = {name: [record[name] for record in records] for name in (*names, "attributes")}
    table["routes"] = [[_flat_row(row, stream["encoding"]) for row in record["routes"]] for record in records]
    sampling = {} if stream["format"] == "1.0" else {"sampling": None}  # 1.0 has no such member
    table["spans"] = [[{**sampling, **span} for span in record["spans"]] for record in records]
    table["checksum"] = [int(record["checksum"], 16) for record in records]
    table["prefix"] = [
        None if record["prefix"] is None else {**record["prefix"], "checksum": int(record["prefix"]["checksum"], 16)}
        for record in records
    ]
    for name in records[0]["columns"] if records else ():
        table[name] = [_entries(record["columns"][name]) for record in records]
    return table


def _entries(column: dict[str, Any]) -> list[Any]:
    """One entry per token: a number, the values of a list or an array, or None where it is unknown."""
    values, offsets, shape = column["values"], column.get("offsets"), column.get("shape") or ()
    if not offsets and not shape:
        entries = values
    else:
        ends = offsets or range(0, len(values) + 1, math.prod(shape))
        entries = [values[start:stop] for start, stop in itertools.pairwise(ends)]
    valid = column.get("valid") or [True] * len(entries)
    return [entry if known else None for entry, known in zip(entries, valid, strict=True)]


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
    """Tokens, rows, checksums, spans, captures, prefixes, log-probabilities and aligned columns are as expected."""
    read, unreadable = READERS[reader]
    expected = {key: values for key, values in stored(STREAMS[name]).items() if key not in unreadable}
    found = read(SCHEMAS / name)

    if not STREAMS[name]["records"]:
        assert [] == [key for key, values in found.items() if values]
        return
    assert sorted(expected) == sorted(found)
    for key, values in expected.items():
        assert values == [plain(value) for value in found[key]], key


def test_polars_keeps_the_tensor() -> None:
    """The shape and the names of a row's axes, and of a column's, arrive without our code."""
    schema = polars.read_ipc_stream(SCHEMAS / "golden-1.1" / "aligned-plain.arrows").schema

    assert '{"shape":[3,4],"dim_names":["layers","topk"]}' in str(schema["routes"])
    assert '{"shape":[3,4],"dim_names":["layers","topk"]}' in str(schema["route_weights"])
    assert '{"shape":[2,3],"dim_names":["y","x"]}' in str(schema["maybe_grid"])


def test_the_files_hold_every_form_of_column() -> None:
    """Numbers, arrays and lists, with and without nulls, are among what is compared above."""
    columns = [
        column for stream in STREAMS.values() for record in stream["records"] for column in record["columns"].values()
    ]
    declared = [column for column in columns if "aligned" in column]
    forms = {
        ("list" if column["shape"] is None else len(column["shape"]), column["valid"] is None) for column in declared
    }

    assert forms >= set(itertools.product((0, 2, "list"), (True, False)))


@pytest.mark.parametrize("name", sorted(STREAMS))
def test_metadata_is_open(name: str) -> None:
    """Format, spec, encoding and declarations are schema metadata that plain pyarrow shows, two of them as JSON."""
    with pa.ipc.open_stream(SCHEMAS / name) as reader:
        metadata = reader.schema.metadata

    assert STREAMS[name]["format"] == metadata[b"routeplane.format"].decode()
    assert STREAMS[name]["encoding"] == metadata[b"routeplane.encoding"].decode()
    assert STREAMS[name]["spec"] == json.loads(metadata[b"routeplane.spec"])
    records = STREAMS[name]["records"]
    columns = records[0]["columns"] if records else {}
    members = ("aligned", "axes", "dtype", "null", "shape")
    assert json.loads(metadata.get(b"routeplane.columns", b"{}")) == {
        key: {member: column[member] for member in members} for key, column in columns.items() if "aligned" in column
    }
