"""The record table: everything about a record but its arrays, one row each, in Parquet files of bounded size.

Where its tokens and rows stand in the run's arrays, its key, spans, captures, prefix, attributes, checksum. Knows bytes
and rows; no store and no zarr. A file's bytes must have been compared with its hash before they come here: Parquet,
like Arrow, trusts what it decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from routeplane.errors import DataError, ErrorKind, FormatError
from routeplane.record.record import Prefix, RecordKey, RouteRecord
from routeplane.record.schema import CAPTURE_TYPE, PREFIX_TYPE, SPAN_TYPES
from routeplane.record.spans import Capture, Span

__all__ = ["PART_RECORDS", "Row", "TablePartReader", "encode_rows", "key_hash", "read_keys", "row_of"]

#: Records of one file, at most; and entries of their spans and captures together, at most.
PART_RECORDS = 1_024
PART_ENTRIES = 65_536

_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.utf8(), nullable=False),
        pa.field("attempt", pa.int32(), nullable=False),
        pa.field("segment", pa.int32(), nullable=False),
        pa.field("group", pa.utf8()),
        pa.field("token_start", pa.int64(), nullable=False),
        pa.field("num_tokens", pa.int64(), nullable=False),
        pa.field("row_start", pa.int64(), nullable=False),
        pa.field("routes_start", pa.int64(), nullable=False),
        pa.field("prefix", PREFIX_TYPE),
        pa.field("spans", pa.list_(SPAN_TYPES["1.0"]), nullable=False),
        pa.field("captures", pa.list_(CAPTURE_TYPE), nullable=False),
        pa.field("has_logprobs", pa.bool_(), nullable=False),
        pa.field("attributes", pa.map_(pa.utf8(), pa.utf8()), nullable=False),
        pa.field("checksum", pa.uint64(), nullable=False),
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One record without its arrays. Tokens stand at ``[token_start, token_start + num_tokens)`` of the run's token
    arrays, its rows at ``[row_start, row_start + num_tokens - routes_start)`` of ``routes``."""

    sample_id: str
    attempt: int
    segment: int
    group: str | None
    token_start: int
    num_tokens: int
    row_start: int
    routes_start: int
    prefix: Prefix | None
    spans: tuple[Span, ...]
    captures: tuple[Capture, ...]
    has_logprobs: bool
    attributes: dict[str, str]
    checksum: int

    @property
    def key(self) -> RecordKey:
        """``(sample_id, attempt, segment)``."""
        return RecordKey(self.sample_id, self.attempt, self.segment)

    @property
    def place(self) -> tuple[int, int, int, int]:
        """What the array ``records`` holds of it."""
        return self.token_start, self.num_tokens, self.row_start, self.routes_start

    @property
    def num_rows(self) -> int:
        """Rows of the record's own."""
        return self.num_tokens - self.routes_start


def key_hash(key: RecordKey) -> int:
    """xxh3-64 of sample id, attempt and segment, parted by U+0000."""
    return xxhash.xxh3_64_intdigest(f"{key.sample_id}\0{key.attempt}\0{key.segment}".encode(errors="surrogatepass"))


def read_keys(data: bytes, *, records: int, where: str) -> NDArray[np.uint64]:
    """The hashes of all keys of a run, in order. Raises FormatError."""
    if len(data) != 8 * records:
        raise FormatError(
            f"expected the hashes of {records} keys, got {len(data)} bytes @ {where}", kind=ErrorKind.MANIFEST
        )
    return np.frombuffer(data, dtype="<u8").astype(np.uint64, copy=False)


def row_of(record: RouteRecord, *, token_start: int, row_start: int) -> Row:
    """The row of a record whose arrays begin there."""
    return Row(
        sample_id=record.sample_id,
        attempt=record.attempt,
        segment=record.segment,
        group=record.group,
        token_start=token_start,
        num_tokens=record.num_tokens,
        row_start=row_start,
        routes_start=record.routes_start,
        prefix=record.prefix,
        spans=record.spans,
        captures=record.captures,
        has_logprobs=record.logprobs is not None,
        attributes=dict(record.attributes),
        checksum=record.checksum,
    )


def encode_rows(rows: Sequence[Row]) -> bytes:
    """One Parquet file of the rows, zstd inside, with page checksums for other readers."""
    columns = {name: [getattr(row, name) for row in rows] for name in _SCHEMA.names}
    columns["prefix"] = [None if row.prefix is None else _members(row.prefix, PREFIX_TYPE) for row in rows]
    columns["spans"] = [[_members(item, SPAN_TYPES["1.0"]) for item in row.spans] for row in rows]
    columns["captures"] = [[_members(item, CAPTURE_TYPE) for item in row.captures] for row in rows]
    columns["attributes"] = [sorted(row.attributes.items()) for row in rows]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns, schema=_SCHEMA), sink, compression="zstd", write_page_checksum=True)
    return bytes(sink.getvalue().to_pybytes())


def _members(item: Any, kind: pa.StructType) -> dict[str, object]:
    return {field.name: getattr(item, field.name) for field in kind}


class TablePartReader:
    """The rows of one file, decoded one by one."""

    def __init__(self, data: bytes, *, where: str) -> None:
        try:
            self._table = pq.read_table(pa.BufferReader(data), memory_map=False)
            self._table.validate(full=True)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise FormatError(
                f"expected a record table in Parquet, got a damaged one: {error} @ {where}",
                kind=ErrorKind.CORRUPT_BATCH,
            ) from error
        if not set(_SCHEMA.names) <= set(self._table.column_names):
            raise FormatError(
                f"expected the columns {_SCHEMA.names}, got {self._table.column_names} @ {where}",
                kind=ErrorKind.SCHEMA,
            )

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @property
    def nbytes(self) -> int:
        """Memory of the decoded columns."""
        return int(self._table.nbytes)

    def row(self, index: int) -> Row:
        """One row. Raises DataError for spans, captures or a prefix that are illegal."""
        (entry,) = self._table.slice(index, 1).to_pylist()
        return _row(entry)


def _row(entry: dict[str, Any]) -> Row:
    try:
        prefix = entry["prefix"]
        return Row(
            **{
                **{name: entry[name] for name in _SCHEMA.names},
                "prefix": None if prefix is None else Prefix(**prefix),
                "spans": tuple(Span(**item) for item in entry["spans"]),
                "captures": tuple(Capture(**item) for item in entry["captures"]),
                "attributes": dict(entry["attributes"]),
            }
        )
    except TypeError as error:
        raise DataError(f"expected a row without nulls, got one with ({error})", kind=ErrorKind.SCHEMA) from error
