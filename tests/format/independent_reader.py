"""A reader of format v1 in one file, written from ``docs/spec/v1.md`` alone: pyarrow, xxhash and the standard library.

It opens a stream of 1.0 or 1.1, resolves the encoding, reads aligned columns and the trailer, and refuses what its own
checksums do not bear out. Every Arrow value becomes canonical bytes by its Arrow type, so that neither the library's
code nor ``reference.py`` is repeated here. It is slow: every value passes through Python.

JSON forms are those of ``schemas/v1/README.md``: NaN is null, a 64-bit checksum is 16 hex digits.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

__all__ = ["read_stream"]

END = bytes.fromhex("ffffffff00000000")
FIXED = 13  # columns that every stream has (section 6); aligned columns follow
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
CODES = dict(zip(("bool", *INTEGERS, "float16", "float32", "float64"), "?bhiqBHIQefd", strict=True))
NANS = {"float16": "007e", "float32": "0000c07f", "float64": "000000000000f87f"}
ARROW_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}


def read_stream(path: Path, *, versions: tuple[str, ...] = ("1.0", "1.1")) -> dict[str, Any]:
    """Format, spec, encoding, trailer and records of a stream. Raises ValueError where the stream is not whole.

    ``versions``: those that the reader is to know; another is refused.
    """
    _require(path.read_bytes()[-8:] == END, "the end-of-stream mark (section 3)")
    with pa.ipc.open_stream(path) as reader:
        metadata = {key.decode(): value.decode() for key, value in reader.schema.metadata.items()}
        names = reader.schema.names
        found = [reader.read_next_batch_with_custom_metadata() for _ in range(_count(path))]
    version, encoding = metadata["routeplane.format"], metadata["routeplane.encoding"]
    _require(version in versions, f"format {' or '.join(versions)}, got {version} (section 11)")
    spec = json.loads(metadata["routeplane.spec"])
    declared = json.loads(metadata.get("routeplane.columns", "{}"))
    records = []
    for batch, _ in found[:-1]:
        batch.validate(full=True)
        for row in range(batch.num_rows):
            cells = {name: batch.column(name)[row] for name in names}
            records.append(_record(cells, spec, encoding=encoding, declared=declared))
    last, more = found[-1]
    _require(more is not None and b"routeplane.trailer" in more, "a trailer (section 9)")
    trailer = json.loads(more[b"routeplane.trailer"])
    texts = b"".join(_str(text) for text in (version, _canonical(spec), encoding))
    digest = _hash(texts + b"".join(_u64(int(record["checksum"], 16)) for record in records))
    tokens = sum(len(record["token_ids"]) for record in records)
    counted = {"batches": len(found) - 1, "digest": digest, "records": len(records), "tokens": tokens}
    _require(last.num_rows == 0 and trailer == counted, f"a trailer of {counted}, got {trailer} (section 9)")
    return {"format": version, "spec": spec, "encoding": encoding, "trailer": trailer, "records": records}


def _count(path: Path) -> int:
    with pa.ipc.open_stream(path) as reader:
        return sum(1 for _ in reader)


def _record(cells: dict[str, Any], spec: dict[str, Any], *, encoding: str, declared: dict[str, Any]) -> dict[str, Any]:
    """One row of the table as JSON, its checksum compared (section 8)."""
    fixed, aligned = list(cells)[:FIXED], list(cells)[FIXED:]
    routes = [_rows(flat, spec, encoding) for flat in _storage(cells["routes"]).to_pylist()]
    columns = {name: _column(cells[name], declared.get(name), spec, name) for name in aligned}
    ids = [expert for row_LK in routes for row_K in row_LK for expert in row_K]
    parts = [_u64(int(_hash(_canonical(spec).encode()), 16))]
    for name in fixed[:-1]:
        cell = cells[name]
        parts.append(_numbers(name, ids, "int16") if name == "routes" else _item(name, cell.type, cell.as_py()))
    parts += [_column_bytes(name, columns[name]) for name in sorted(columns)]
    stored, computed = f"{cells['checksum'].as_py():016x}", _hash(b"".join(parts))
    _require(stored == computed, f"checksum {computed}, got {stored} (section 8)")
    document = {name: cells[name].as_py() for name in fixed if name != "routes"}
    if document["prefix"] is not None:
        document["prefix"]["checksum"] = f"{document['prefix']['checksum']:016x}"
    for span in document["spans"]:
        if span.get("sampling", 0) is None:
            del span["sampling"]
    document["attributes"] = dict(document["attributes"])
    document["logprobs"] = None if document["logprobs"] is None else [_json(value) for value in document["logprobs"]]
    return {**document, "routes": routes, "columns": columns, "checksum": stored}


def _rows(flat: list[int], spec: dict[str, Any], encoding: str) -> list[list[int]]:
    """The rows of one token, ``narrow`` resolved to ids (section 7), each legal (6.7)."""
    top_k, widths = spec["top_k"], spec["num_experts"]
    widths = widths if isinstance(widths, list) else [widths] * len(spec["layer_ids"])
    rows = [flat[first : first + top_k] for first in range(0, len(flat), top_k)]
    if encoding == "narrow":
        rows = [[-1] * top_k if row_K == [0xFF] * top_k else row_K for row_K in rows]
    for row_K, width in zip(rows, widths, strict=True):
        legal = len(set(row_K)) == top_k and all(0 <= expert < width for expert in row_K)
        _require(legal or row_K == [-1] * top_k, f"a legal row, got {row_K} of {width} experts (6.7)")
    return rows


def _storage(cell: Any) -> Any:
    """The entries of one record's column; arrays of one shape as Arrow stores them, flat."""
    return cell.values.storage if isinstance(cell.values, pa.ExtensionArray) else cell.values


def _column(cell: Any, declared: dict[str, Any] | None, spec: dict[str, Any], name: str) -> dict[str, Any]:
    """An aligned column: its flat values, where lists end, which entries are known, what it declares (6.5)."""
    entries = _storage(cell)
    nested = pa.types.is_nested(entries.type)
    dtype = str(entries.type.value_type if nested else entries.type)
    dtype = ARROW_NAMES.get(dtype, dtype)
    found = entries.to_pylist()
    if declared is None:
        _require(None not in found and not nested, f"numbers in {name}, which declares nothing (6.5)")
        return {"type": dtype, "values": [_json(value) for value in found]}
    shape, size = declared["shape"], math.prod(declared["shape"] or ())
    _require(dtype == declared["dtype"], f"{declared['dtype']} in {name}, got {dtype} (6.5)")
    for axis, length in zip(declared["axes"], shape or (), strict=False):
        wanted = {"layers": len(spec["layer_ids"]), "topk": spec["top_k"]}.get(axis, length)
        _require(length == wanted, f"{wanted} entries along {axis} of {name}, got {length} (6.5)")
    _require(declared["null"] == "unknown" or None not in found, f"no null in {name} (6.5)")
    blank: list[Any] = [] if shape is None else [0] * size
    lists = [blank if entry is None else entry if nested else [entry] for entry in found]
    return {
        **declared,
        "values": [_json(value) for entry in lists for value in entry],
        "offsets": list(itertools.accumulate(map(len, lists), initial=0)) if shape is None else None,
        "valid": [entry is not None for entry in found] if declared["null"] else None,
    }


# ----------------------------------------------------------------------------------------------------------------------
# Canonical bytes (section 8)
# ----------------------------------------------------------------------------------------------------------------------


def _item(name: str, kind: Any, value: Any) -> bytes:
    if value is None:
        return _str(name) + b"\x01"
    if pa.types.is_string(kind):
        return _present(name, value.encode())
    if pa.types.is_map(kind):
        return _entries(name, [_str(key) + _str(text) for key, text in sorted(value, key=lambda one: one[0].encode())])
    if pa.types.is_struct(kind):
        return _entries(name, [_members(kind, value)])
    if pa.types.is_list(kind) and pa.types.is_struct(kind.value_type):
        return _entries(name, [_members(kind.value_type, entry) for entry in value])
    if pa.types.is_list(kind):  # names of logits processors, the one list of texts
        return _entries(name, [_item("name", kind.value_type, entry) for entry in value])
    numbers, dtype = (value, str(kind.value_type)) if pa.types.is_large_list(kind) else ([value], str(kind))
    return _numbers(name, [_json(number) for number in numbers], ARROW_NAMES.get(dtype, dtype))


def _members(kind: Any, value: dict[str, Any]) -> bytes:
    fields = [kind.field(index) for index in range(kind.num_fields)]
    kept = [field for field in fields if field.name != "sampling" or value["sampling"] is not None]
    return b"".join(_item(field.name, field.type, value[field.name]) for field in kept)


def _column_bytes(name: str, column: dict[str, Any]) -> bytes:
    if "aligned" not in column:
        return _present("type", column["type"].encode()) + _numbers(name, column["values"], column["type"])
    items = {"shape": "int64", "valid": "bool", "offsets": "int64"}
    return b"".join(
        [
            _str("column") + b"\x00" + _u64(5),
            _present("type", column["dtype"].encode()),
            _present("aligned", column["aligned"].encode()),
            _entries("axes", [_present("axis", axis.encode()) for axis in column["axes"]]),
            *(_numbers(key, column[key], dtype) for key, dtype in items.items()),
            _numbers(name, column["values"], column["dtype"]),
        ]
    )


def _numbers(name: str, values: Iterable[Any] | None, dtype: str) -> bytes:
    if values is None:
        return _str(name) + b"\x01"
    nan = bytes.fromhex(NANS.get(dtype, ""))
    return _present(name, b"".join(nan if v is None else struct.pack("<" + CODES[dtype], v) for v in values))


def _entries(name: str, entries: list[bytes]) -> bytes:
    return _str(name) + b"\x00" + _u64(len(entries)) + b"".join(entries)


def _present(name: str, payload: bytes) -> bytes:
    return _str(name) + b"\x00" + _u64(len(payload)) + payload


def _str(text: str) -> bytes:
    return _u64(len(text.encode())) + text.encode()


def _u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def _hash(data: bytes) -> str:
    return str(xxhash.xxh3_64_hexdigest(data))


def _canonical(spec: dict[str, Any]) -> str:
    widths = spec["num_experts"]
    folded = widths[0] if isinstance(widths, list) and len(set(widths)) == 1 else widths
    return json.dumps({**spec, "num_experts": folded}, sort_keys=True, separators=(",", ":"))


def _json(value: Any) -> Any:
    return None if value != value else value


def _require(holds: bool, expected: str) -> None:
    if not holds:
        raise ValueError(f"expected {expected}")
