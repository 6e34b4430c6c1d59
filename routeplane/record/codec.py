"""Records <-> RecordBatch, column by column, in both encodings.

A batch must have passed ``validate(full=True)`` before it comes here: a flipped offset otherwise reads outside its
buffers. Knows nothing of streams, files or trailers.

Axes: B records, T tokens of the whole batch, S tokens of one record, L captured layers, K top-k slots, W = L*K.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from routeplane.errors import DataError, ErrorKind, FormatError, SpecError, UsageError
from routeplane.record.aligned import AlignedColumn, ColumnType, blank_weights, concatenate_columns
from routeplane.record.columnar import Aligned, CheckedBatch, Checks, Ragged, RaggedRoutes, Stored
from routeplane.record.record import Prefix, RouteRecord, read_record
from routeplane.record.rows import lay_out, widen
from routeplane.record.schema import (
    CAPTURE_TYPE,
    FORMAT_VERSION,
    PREFIX_TYPE,
    SPAN_TYPES,
    Encoding,
    StreamHeader,
    arrow_schema,
    check_version,
    row_type,
)
from routeplane.record.spans import Capture, Interval, Sampling, Span, lose_rows, unfed_start
from routeplane.record.spec import RouteSpec

__all__ = [
    "MAX_BATCH_VALUES",
    "column_types",
    "counted_values",
    "read_records",
    "require_version",
    "salvage",
    "stored_rows",
    "widen",
    "write_batch",
]

#: Values of one column in one batch. The lists of a ragged column end at int32, and Arrow implementations exist that
#: count all values of a batch in 32 bits (arrow-rs#5901).
MAX_BATCH_VALUES = 2**31 - 1
# Rows of a batch of so many bytes are written past the caches, which they would leave before anything reads them.
_PAST_CACHES = 2**23
# Less is copied into one piece: a write of its own costs more.
_SCATTERED_BYTES = 2**18
# All batches of a stream have one schema; making it takes some 0.1 ms.
_schema = lru_cache(maxsize=64)(arrow_schema)


def write_batch(
    records: Sequence[RouteRecord],
    spec: RouteSpec,
    *,
    encoding: Encoding,
    version: str = FORMAT_VERSION,
    scattered: dict[tuple[int, int], list[NDArray[Any]]] | None = None,
) -> pa.RecordBatch:
    """One RecordBatch of the given records, which must share spec and aligned columns; copies their arrays once, and
    views those of a single record.

    ``scattered``: where given, rows that need no conversion are not copied: the batch has memory in their place that
    nothing was written to, and its address and size are noted here with the arrays to write instead.

    Raises SpecError or DataError naming the record that differs, UsageError (VERSION) for one that ``version`` cannot
    say, DataError (TOKEN_COLUMN) for lists of more than ``MAX_BATCH_VALUES`` values in all.
    """
    columns = _common_columns(records)
    for record in records:
        require_version(record, version)
        if record.spec != spec:
            spec.require_same_geometry(record.spec, where=f"sample {record.key}")
            theirs, ours = (f"model {one.model!r}, decoder_layers={one.decoder_layers}" for one in (record.spec, spec))
            raise SpecError(f"expected {ours}, got {theirs} @ sample {record.key}", kind=ErrorKind.SPEC_MISMATCH)
    schema = _schema(spec, encoding, columns=columns, version=version)
    span_type = SPAN_TYPES[version]
    declared = [(name, schema.field(name)) for name, _ in columns]
    arrays = [
        pa.array([record.sample_id for record in records], pa.utf8()),
        pa.array([record.attempt for record in records], pa.int32()),
        pa.array([record.segment for record in records], pa.int32()),
        pa.array([record.group for record in records], pa.utf8()),
        _ragged([record.token_ids for record in records], pa.int32()),
        pa.array([record.routes_start for record in records], pa.int64()),
        _ragged_routes(records, spec, encoding, scattered),
        pa.array([_prefix_entry(record.prefix) for record in records], PREFIX_TYPE),
        _intervals([record.spans for record in records], span_type),
        _intervals([record.captures for record in records], CAPTURE_TYPE),
        _ragged([record.logprobs for record in records], pa.float32()),
        pa.array([sorted(record.attributes.items()) for record in records], pa.map_(pa.utf8(), pa.utf8())),
        pa.array([record.checksum for record in records], pa.uint64()),
        *(_aligned([record.columns[name] for record in records], field) for name, field in declared),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def require_version(record: RouteRecord, version: str) -> None:
    """Raise UsageError (VERSION), naming what it is, where a record has what this version of the format cannot say."""
    if version == FORMAT_VERSION:
        return
    check_version(version, spec=record.spec, columns=column_types(record))
    unfed = record.num_tokens - unfed_start(record.captures)
    needs = {
        f"{unfed} tokens that were not fed": unfed > 1,
        "tokens that begin at routes_start": record.tokens_start > 0,
        "sampling parameters": any(span.sampling is not None for span in record.spans),
    }
    for what, needed in needs.items():
        if needed:
            raise UsageError(
                f"expected format 1.1 for {what}, got {version} @ sample {record.key}", kind=ErrorKind.VERSION
            )


def _common_columns(records: Sequence[RouteRecord]) -> tuple[tuple[str, ColumnType], ...]:
    expected = column_types(records[0]) if records else ()
    for record in records:
        if column_types(record) != expected:
            raise DataError(
                f"expected token columns {[f'{n}: {t}' for n, t in expected]}, got "
                f"{[f'{n}: {t}' for n, t in column_types(record)]} @ sample {record.key}",
                kind=ErrorKind.TOKEN_COLUMN,
            )
    return expected


def column_types(record: RouteRecord) -> tuple[tuple[str, ColumnType], ...]:
    """Names of a record's aligned columns, and what they declare."""
    return tuple((name, column.type) for name, column in record.columns.items())


def counted_values(record: RouteRecord) -> dict[str, int]:
    """Values of each column that a batch bounds: of the routes, and of every column of lists."""
    found = {name: len(column.values) for name, column in record.columns.items() if column.type.ragged}
    found["routes"] = record.stored_routes.size  # not ``routes``, which would widen narrow rows to count them
    return found


def _aligned(columns: Sequence[AlignedColumn], field: pa.Field) -> pa.LargeListArray:
    """One column of all records: their entries one after the other."""
    if columns and columns[0].type.ragged:
        _require_int32_ends(sum(len(column.values) for column in columns), field.name)
    offsets_B1 = np.concatenate([[0], np.cumsum([len(column) for column in columns], dtype=np.int64)]).astype(np.int64)
    joined = columns[0] if len(columns) == 1 else concatenate_columns(columns, name=field.name, where="a batch")
    mask = None if joined.valid is None else pa.array(~joined.valid)
    kind, inner = joined.type, field.type.value_type
    if kind.ragged:
        values = pa.array(joined.values, inner.value_type)
        entries = pa.ListArray.from_arrays(pa.array(joined.offsets, pa.int32()), values, mask=mask)
    elif kind.shape:
        flat = pa.array(joined.values.reshape(-1), inner.value_type)
        width = int(np.prod(kind.shape))
        entries = pa.ExtensionArray.from_storage(inner, pa.FixedSizeListArray.from_arrays(flat, width, mask=mask))
    else:
        entries = pa.array(joined.values, inner, mask=None if joined.valid is None else ~joined.valid)
    return pa.LargeListArray.from_arrays(pa.array(offsets_B1, pa.int64()), entries)


def _require_int32_ends(values: int, name: str) -> None:
    if values > MAX_BATCH_VALUES:
        raise DataError(
            f"expected at most {MAX_BATCH_VALUES} values in the lists of column {name!r} of one batch, got {values}",
            kind=ErrorKind.TOKEN_COLUMN,
        )


def _ragged(arrays: Sequence[NDArray[Any] | None], value_type: pa.DataType) -> pa.LargeListArray:
    present = [array for array in arrays if array is not None]
    if not present:
        return pa.nulls(len(arrays), pa.large_list(value_type))
    lengths = [0 if array is None else len(array) for array in arrays]
    offsets_B1 = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    # one record's array needs no other memory: a copy into fresh pages costs several times one into used ones
    flat_T = present[0] if len(present) == 1 else np.concatenate(present)
    mask = pa.array([array is None for array in arrays], pa.bool_()) if len(present) < len(arrays) else None
    return pa.LargeListArray.from_arrays(pa.array(offsets_B1), pa.array(flat_T, value_type), mask=mask)


def _ragged_routes(
    records: Sequence[RouteRecord],
    spec: RouteSpec,
    encoding: Encoding,
    scattered: dict[tuple[int, int], list[NDArray[Any]]] | None,
) -> pa.LargeListArray:
    dtype: Any = np.dtype(np.uint8 if encoding == "narrow" else np.int16)
    width = spec.num_layers * spec.top_k
    # as they are held: narrow ones are widened on the way into a plain batch
    arrays = [record.stored_routes for record in records]
    offsets_B1 = np.concatenate([[0], np.cumsum([len(array) for array in arrays], dtype=np.int64)])
    size = int(offsets_B1[-1]) * width * dtype.itemsize
    as_they_are = all(array.dtype == dtype and array.flags.c_contiguous for array in arrays)
    if len(arrays) == 1 and as_they_are:
        flat_TW = arrays[0].reshape(-1, width)  # as in ``_ragged``
    elif scattered is not None and as_they_are and size >= _SCATTERED_BYTES:
        flat_TW = np.empty((int(offsets_B1[-1]), width), dtype=dtype)
        scattered[(flat_TW.ctypes.data, size)] = arrays
    else:
        # Arrow's pool keeps freed pages; fresh ones from numpy cost five times the copy into them
        memory = pa.allocate_buffer(size)
        flat_TW = np.frombuffer(memory, dtype=dtype).reshape(-1, width)
        out_TLK, slots = flat_TW.reshape(-1, *spec.row_shape), tuple(range(spec.num_layers))
        for array, start, stop in zip(arrays, offsets_B1, offsets_B1[1:], strict=False):
            if encoding == "plain":
                part, past = (0, len(array)), size >= _PAST_CACHES
                lay_out(array, spec, tokens=part, slots=slots, out=out_TLK[start:stop], past_caches=past)
            else:
                # Legal ids of a narrow spec are at most 255, and -1 becomes 0xFF: the wrap is the encoding.
                np.copyto(out_TLK[start:stop], array, casting="unsafe")
    storage = pa.FixedSizeListArray.from_arrays(pa.array(flat_TW.reshape(-1)), width)
    rows = pa.ExtensionArray.from_storage(row_type(spec, encoding), storage)
    return pa.LargeListArray.from_arrays(pa.array(offsets_B1.astype(np.int64), pa.int64()), rows)


def _intervals(lists: Sequence[Sequence[Span | Capture]], kind: pa.StructType) -> pa.ListArray:
    names = _names(kind)
    return pa.array([[_entry(item, names, kind) for item in each] for each in lists], pa.list_(kind))


def _names(kind: pa.StructType) -> list[str]:
    return [field.name for field in kind]


def _entry(item: Span | Capture, names: Sequence[str], kind: pa.StructType) -> dict[str, object]:
    entry = {name: getattr(item, name) for name in names}
    if entry.get("sampling") is not None:
        entry["sampling"] = {name: getattr(entry["sampling"], name) for name in _names(kind.field("sampling").type)}
    return entry


def _prefix_entry(prefix: Prefix | None) -> dict[str, object] | None:
    return None if prefix is None else {field.name: getattr(prefix, field.name) for field in PREFIX_TYPE}


# -- batch -> records ------------------------------------------------------------------------------------------------


def read_records(
    batch: pa.RecordBatch,
    header: StreamHeader,
    *,
    verify: bool = False,
    select: RouteSpec | None = None,
    alarms: bool = False,
    columnar: bool = True,
    threads: int = 1,
) -> Iterator[RouteRecord | DataError]:
    """The records of a validated batch, one by one; an illegal one comes as its DataError, so that a caller may go on.

    Their arrays are read-only views of the batch's buffers, which they keep alive; ``narrow`` rows too, and are widened
    once ``routes`` is asked for. ``verify``: checksums are compared, else carried. ``select``, without ``verify``: the
    layers to keep, which alone are copied and checked, and get a checksum of their own. ``alarms``: look for alarms in
    the pass over the rows, which ``seen_quiet`` of a record then says. ``columnar``: check the batch as a whole first,
    where it is worth it; what comes is the same. ``threads``: from 2 on, so many threads check ahead of what is asked
    for; they end with the iteration.
    """
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if column.null_count and name not in ("group", "prefix", "logprobs"):
            raise FormatError(f"expected no nulls in column {name}, got {column.null_count}", kind=ErrorKind.SCHEMA)
    stored = Stored(
        tokens=Ragged(batch.column("token_ids")),
        logprobs=Ragged(batch.column("logprobs")),
        routes=RaggedRoutes(batch.column("routes"), header),
    )
    extra = {name: Aligned(batch.column(name), kind, name=name) for name, kind in header.columns}
    small: dict[str, list[Any]] = {}
    with ThreadPoolExecutor(threads, "routeplane-read") if threads > 1 else nullcontext() as pool:
        how = Checks(verify=verify, alarms=alarms, select=select, pool=pool, threads=threads)
        checked = CheckedBatch.of(batch, header, stored=stored, how=how) if columnar else None
        for index in range(batch.num_rows):
            columns = {name: column[index] for name, column in extra.items()}
            found = None if checked is None else checked.record(index, columns)
            if found is not None:
                yield found
                continue
            small = small or {name: batch.column(name).to_pylist() for name in _SMALL}
            arrays = _Arrays(
                token_ids=stored.tokens[index],
                routes=stored.routes.stored(index),
                logprobs=stored.logprobs[index],
                columns=columns,
            )
            row = {name: values[index] for name, values in small.items()}
            yield _build(row, header, arrays, verify=verify, select=select)


_SMALL = (
    "sample_id",
    "attempt",
    "segment",
    "group",
    "routes_start",
    "prefix",
    "spans",
    "captures",
    "attributes",
    "checksum",
)


def stored_rows(one_row: bytes, *, header: StreamHeader) -> tuple[int, NDArray[np.int16]]:
    """``routes_start`` and the rows, int16 ``[rows, L, K]``, of a record that was set aside, as stored: nothing is
    checked.

    ``one_row``: an Arrow IPC stream of its one row, from a batch that was validated.
    """
    batch = pa.ipc.open_stream(one_row).read_next_batch()
    return batch.column("routes_start")[0].as_py(), RaggedRoutes(batch.column("routes"), header)[0]


def salvage(batch: pa.RecordBatch, index: int, *, header: StreamHeader) -> RouteRecord | None:
    """Record ``index`` of a validated batch with every row of its own MISSING and marked ``lost``, under a new
    checksum.

    ``attributes["quarantined"]`` is set. None where tokens, spans or captures are unreadable too.
    """
    one = batch.slice(index, 1)
    row = {name: one.column(name).to_pylist()[0] for name in _SMALL}
    tokens, start = Ragged(one.column("token_ids"))[0], row["routes_start"]
    rows = _own_rows(row, len(tokens))
    if rows is None:
        return None  # before anything of that size is allocated
    row["captures"] = _lost_captures(row["captures"], start)
    kept = [(key, value) for key, value in row["attributes"] if key != "quarantined"]
    row["attributes"] = [*kept, ("quarantined", "true")]
    row["checksum"] = None
    try:
        extra = {name: Aligned(one.column(name), kind, name=name)[0] for name, kind in header.columns}
    except (DataError, FormatError):
        return None
    arrays = _Arrays(
        token_ids=tokens,
        routes=header.spec.missing_rows(rows),
        logprobs=Ragged(one.column("logprobs"))[0],
        columns=dict(blank_weights(extra, own=min(rows, len(tokens)))),
    )
    read = _build(row, header, arrays, verify=False)
    return read if isinstance(read, RouteRecord) else None


def _own_rows(row: dict[str, Any], tokens: int) -> int | None:
    """How many rows a record of ``tokens`` stored tokens has; None where its columns contradict each other."""
    start, last = row["routes_start"], row["captures"][-1] if row["captures"] else None
    length = tokens if last is None else last["stop"]
    if start < 0 or length not in (tokens, tokens + start) or length < start:
        return None
    return int(length - start)


def _lost_captures(entries: list[dict[str, Any]], routes_start: int) -> list[dict[str, Any]]:
    try:
        captures = lose_rows(_entries(entries, Capture), start=routes_start)
    except DataError:
        return entries  # unreadable here, and refused with its reason where the record is built
    return [_entry(capture, _names(CAPTURE_TYPE), CAPTURE_TYPE) for capture in captures]


def _entries(entries: Sequence[dict[str, Any] | None], kind: type[Interval]) -> tuple[Interval, ...]:
    built = []
    for entry in entries:
        if entry is None:
            raise DataError(f"expected no null among the {kind.__name__.lower()}s, got one", kind=ErrorKind.SCHEMA)
        if entry.get("sampling") is not None:
            found = dict(entry["sampling"])
            if found["processors"] is not None:
                found["processors"] = tuple(found["processors"])
            entry = {**entry, "sampling": Sampling(**found)}
        built.append(kind(**entry))
    return tuple(built)


class _Arrays(NamedTuple):
    """The arrays of one record, as they are stored."""

    token_ids: NDArray[Any]
    routes: NDArray[Any]
    logprobs: NDArray[Any] | None
    columns: dict[str, AlignedColumn]


def _build(
    row: dict[str, Any], header: StreamHeader, arrays: _Arrays, *, verify: bool, select: RouteSpec | None = None
) -> RouteRecord | DataError:
    try:
        if len(dict(row["attributes"])) != len(row["attributes"]):
            raise DataError(f"expected each attribute once @ sample {row['sample_id']}", kind=ErrorKind.SCHEMA)
        return read_record(
            arrays.routes,
            verify=verify,
            select=select,
            sample_id=row["sample_id"],
            attempt=row["attempt"],
            segment=row["segment"],
            group=row["group"],
            token_ids=arrays.token_ids,
            routes_start=row["routes_start"],
            prefix=None if row["prefix"] is None else Prefix(**row["prefix"]),
            spans=_entries(row["spans"], Span),
            captures=_entries(row["captures"], Capture),
            spec=header.spec,
            logprobs=arrays.logprobs,
            attributes=dict(row["attributes"]),
            columns=arrays.columns,
            checksum=row["checksum"],
        )
    except DataError as error:
        return error
