"""Records as tables: for analysis, in Arrow, Parquet, polars and pandas; and as Parquet that is read back as records.

The stream's own schema is for routeplane: rows are extension tensors and MISSING is a value. Here it is null, so that
an average, a count of experts or a data set library is right without knowing the format.

Two forms. ``nested``: one row a record, ``routes`` as list (tokens) of list (layers) of list (experts), null where
MISSING. ``flat``: one row a token and layer, ``experts`` a list or null. Neither is read back as records; that
is what ``ParquetWriter`` and ``ParquetReader`` are for.

Axes: S tokens, L layers, K top-k slots.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from routeplane.errors import DataError, ErrorKind, FormatError, MissingExtraError, refused
from routeplane.record.batches import DEFAULT_MAX_BYTES, TRAILER_KEY, BatchRecords, BatchWriter, Trailer, TrailerCounter
from routeplane.record.policy import ReadPolicy
from routeplane.record.record import RouteRecord, checked_records
from routeplane.record.schema import Encoding, StreamHeader, parse_schema
from routeplane.record.spec import MISSING
from routeplane.record.transfer import RecordReader
from routeplane.stream.files import PublishedPath, WholeWrites

if TYPE_CHECKING:
    import pandas
    import polars
    from numpy.typing import NDArray

    from routeplane.record.aligned import AlignedColumn
    from routeplane.record.spec import RouteSpec

__all__ = ["Form", "ParquetReader", "ParquetWriter", "tables", "to_arrow", "to_pandas", "to_polars", "write_tables"]

Form = Literal["nested", "flat"]

_SPANS = pa.list_(
    pa.struct(
        [
            ("start", pa.int64()),
            ("stop", pa.int64()),
            ("kind", pa.utf8()),
            ("role", pa.utf8()),
            ("call", pa.utf8()),
            ("weights_version", pa.int64()),
        ]
    )
)
_CAPTURES = pa.list_(
    pa.struct(
        [
            ("start", pa.int64()),
            ("stop", pa.int64()),
            ("state", pa.utf8()),
            ("call", pa.utf8()),
            ("weights_version", pa.int64()),
        ]
    )
)
_ATTRIBUTES = pa.list_(pa.struct([("key", pa.utf8()), ("value", pa.utf8())]))

_NESTED = pa.schema(
    [
        ("sample_id", pa.utf8()),
        ("attempt", pa.int32()),
        ("segment", pa.int32()),
        ("group", pa.utf8()),
        ("routes_start", pa.int64()),
        ("token_ids", pa.list_(pa.int32())),
        ("routes", pa.list_(pa.list_(pa.list_(pa.int16())))),
        ("layer_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("spans", _SPANS),
        ("captures", _CAPTURES),
        ("attributes", _ATTRIBUTES),
    ]
)
_FLAT = pa.schema(
    [
        ("sample_id", pa.utf8()),
        ("attempt", pa.int32()),
        ("segment", pa.int32()),
        ("token", pa.int64()),
        ("token_id", pa.int32()),
        ("kind", pa.utf8()),
        ("state", pa.utf8()),
        ("weights_version", pa.int64()),
        ("logprob", pa.float32()),
        ("layer", pa.int32()),
        ("experts", pa.list_(pa.int16())),
    ]
)


def tables(records: Iterable[RouteRecord], *, form: Form) -> Iterator[pa.Table]:
    """Turn records into tables of one schema, one a record; rows that stand in another record are counted there.

    Args:
        records: Any iterable of them.
        form: ``nested`` or ``flat``.

    Returns:
        Tables with memory of their own. Raises UsageError (ARGUMENT) for an aligned column that has a name of the
        table's own.
    """
    if form not in ("nested", "flat"):
        raise refused("form of ('nested', 'flat')", repr(form))
    make = _nested if form == "nested" else _flat
    return (_with_columns(make(record), record, form) for record in checked_records(records))


def to_arrow(records: Iterable[RouteRecord] | RouteRecord, *, form: Form = "flat") -> pa.Table:
    """Make one Arrow table of records.

    Args:
        records: Records, or one.
        form: ``flat``: one row a token and layer; ``nested``: one row a record.

    Returns:
        A table with memory of its own; MISSING rows are null, and so are columns that a record does not have.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> table = to_arrow(watermarked_record(0, num_tokens=3, spec=watermarked_spec(layers=(1, 2, 5))))
    >>> table.num_rows, table.column("experts").null_count
    (9, 3)
    """
    several = [records] if isinstance(records, RouteRecord) else records
    schema = _NESTED if form == "nested" else _FLAT
    return pa.concat_tables([schema.empty_table(), *tables(several, form=form)], promote_options="default")


def to_polars(records: Iterable[RouteRecord] | RouteRecord, *, form: Form = "flat") -> polars.DataFrame:
    """The same as a polars data frame. Raises MissingExtraError where polars is not installed.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec(layers=(1, 2))
    >>> records = [watermarked_record(index, num_tokens=8, spec=spec) for index in range(3)]
    >>> to_polars(records).shape
    (48, 11)
    """
    try:
        import polars
    except ImportError as error:
        raise MissingExtraError(f"expected polars, got: {error}", kind=ErrorKind.MISSING_EXTRA) from error
    frame = polars.from_arrow(to_arrow(records, form=form))
    if not isinstance(frame, polars.DataFrame):
        raise TypeError(f"expected a data frame of a table, got {type(frame).__name__}")
    return frame


def to_pandas(records: Iterable[RouteRecord] | RouteRecord, *, form: Form = "flat") -> pandas.DataFrame:
    """The same as a pandas data frame with Arrow types. Raises MissingExtraError where pandas is not installed.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec(layers=(1, 2))
    >>> records = [watermarked_record(index, num_tokens=8, spec=spec) for index in range(3)]
    >>> to_pandas(records, form="nested").shape
    (3, 12)
    """
    try:
        import pandas
    except ImportError as error:
        raise MissingExtraError(f"expected pandas, got: {error}", kind=ErrorKind.MISSING_EXTRA) from error
    return to_arrow(records, form=form).to_pandas(types_mapper=pandas.ArrowDtype)


def write_tables(records: Iterable[RouteRecord], path: str | os.PathLike[str], *, form: Form) -> int:
    """Write a Parquet file for analysis, record by record; it appears when it is whole. Returns how many records.

    All records have the aligned columns of the first. Raises OSError, UsageError, DataError (TOKEN_COLUMN) for other
    columns, and what the iteration raises.
    """
    target = PublishedPath(os.fspath(path))
    made = tables(records, form=form)
    first = next(made, None)
    schema = (_NESTED if form == "nested" else _FLAT) if first is None else first.schema
    count = 0
    try:
        with pq.ParquetWriter(target, schema, compression="zstd", compression_level=1) as writer:
            for table in () if first is None else chain([first], made):
                if table.schema != schema:
                    raise DataError(
                        f"expected the columns of the first record, {schema.names}, got {table.schema.names} @ record "
                        f"{count}",
                        kind=ErrorKind.TOKEN_COLUMN,
                    )
                writer.write_table(table)
                count += 1
        target.publish()
    except BaseException:
        target.discard()
        raise
    return count


def _nested(record: RouteRecord) -> pa.Table:
    spec = record.spec
    rows = _rows(record.routes.reshape(-1, spec.top_k))
    tokens = np.arange(0, len(rows) + 1, spec.num_layers, dtype=np.int32)
    routes = pa.ListArray.from_arrays(pa.array(tokens), rows)
    one = pa.array([0, len(routes)], type=pa.int32())
    return pa.table(
        [
            [record.sample_id],
            [record.attempt],
            [record.segment],
            [record.group],
            [record.routes_start],
            pa.ListArray.from_arrays(pa.array([0, len(record.token_ids)], pa.int32()), pa.array(record.token_ids)),
            pa.ListArray.from_arrays(one, routes),
            [list(spec.layer_ids)],
            [_logprobs(record)],
            [[_entry(span, "kind", "role") for span in record.spans]],
            [[_entry(capture, "state") for capture in record.captures]],
            [[{"key": key, "value": value} for key, value in record.attributes.items()]],
        ],
        schema=_NESTED,
    )


def _entry(interval: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(interval, name) for name in ("start", "stop", *names, "call", "weights_version")}


def _logprobs(record: RouteRecord) -> Any:
    if record.logprobs is None:
        return None
    return pa.array(record.logprobs, pa.float32(), from_pandas=True).to_pylist()  # NaN is null


def _flat(record: RouteRecord) -> pa.Table:
    layers, start = record.spec.num_layers, record.routes_start
    tokens = record.num_tokens - start
    count = tokens * layers

    def each(values: Any) -> Any:
        """One value a token, for each of its layers."""
        return np.repeat(values, layers)

    kinds = _spread(record.spans, "kind", start, record.num_tokens)
    states = _spread(record.captures, "state", start, record.num_tokens)
    versions = _spread(record.captures, "weights_version", start, record.num_tokens)
    logprobs = (
        np.full(tokens, np.nan, np.float32)
        if record.logprobs is None
        else record.logprobs[start - record.tokens_start :]
    )
    return pa.table(
        [
            pa.repeat(record.sample_id, count),
            pa.repeat(pa.scalar(record.attempt, pa.int32()), count),
            pa.repeat(pa.scalar(record.segment, pa.int32()), count),
            pa.array(each(np.arange(start, record.num_tokens))),
            pa.array(each(record.row_token_ids)),
            pa.array(each(kinds), pa.utf8()),
            pa.array(each(states), pa.utf8()),
            pa.array(each(versions), pa.int64()),
            pa.array(each(logprobs), pa.float32(), from_pandas=True),
            pa.array(np.tile(np.asarray(record.spec.layer_ids, dtype=np.int32), tokens)),
            _rows(record.routes.reshape(-1, record.spec.top_k)),
        ],
        schema=_FLAT,
    )


def _with_columns(table: pa.Table, record: RouteRecord, form: Form) -> pa.Table:
    """The table of a record with its aligned columns behind the table's own."""
    taken = sorted(set(record.columns) & set(table.schema.names))
    if taken:
        raise refused(f"aligned columns outside the table's own {table.schema.names}", f"{taken}")
    own, layers = record.routes_start - record.tokens_start, record.spec.num_layers
    for name, column in record.columns.items():
        if form == "nested":
            found = _column_entries(column, column.values, column.type.shape)
            one = pa.array([0, len(found)], type=pa.int32())
            table = table.append_column(name, pa.ListArray.from_arrays(one, found))
            continue
        part = column[own:]
        if "layers" in part.type.axes:
            axis = part.type.axes.index("layers")
            values = np.moveaxis(part.values, axis + 1, 1)
            shape = (*part.type.shape[:axis], *part.type.shape[axis + 1 :])
            valid = None if part.valid is None else np.repeat(part.valid, layers)
            each = replace(part, valid=valid)
            table = table.append_column(name, _column_entries(each, values.reshape(-1, *shape), shape))
        else:
            repeated = part.take(np.repeat(np.arange(len(part)), layers))
            table = table.append_column(name, _column_entries(repeated, repeated.values, part.type.shape))
    return table


def _column_entries(column: AlignedColumn, values: NDArray[Any], shape: Sequence[int]) -> pa.Array:
    """An Arrow array of entries, of lists where they are lists or arrays; null where one is unknown."""
    mask = None if column.valid is None else pa.array(~column.valid)
    if column.offsets is not None:
        ends = pa.array(column.offsets.astype(np.int32))
        return pa.ListArray.from_arrays(ends, pa.array(values), mask=mask)
    if not shape:
        return pa.array(values, mask=None if column.valid is None else ~column.valid)
    found = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in shape[:0:-1]:
        found = _in_lists(found, size, None)
    return _in_lists(found, shape[0], mask)


def _in_lists(values: pa.Array, size: int, mask: pa.Array | None) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(np.arange(0, len(values) + 1, size, dtype=np.int32)), values, mask=mask)


def _spread(intervals: Iterable[Any], name: str, start: int, stop: int) -> NDArray[np.object_]:
    """The value of each token's interval."""
    found = np.empty(stop - start, dtype=object)
    for interval in intervals:
        found[max(0, interval.start - start) : max(0, interval.stop - start)] = getattr(interval, name)
    return found


def _rows(rows_NK: NDArray[np.int16]) -> pa.ListArray:
    """Each row as a list, null where it is MISSING; nulls hold no values."""
    missing_N = rows_NK[:, 0] == MISSING
    lengths_N = np.where(missing_N, 0, rows_NK.shape[1])
    offsets = np.concatenate([[0], np.cumsum(lengths_N)]).astype(np.int32)
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(rows_NK[~missing_N].reshape(-1)), mask=pa.array(missing_N)
    )


# ----------------------------------------------------------------------------------------------------------------------
# Records as Parquet, under the schema of a stream: bounded row groups, page checksums, the trailer in the footer
# ----------------------------------------------------------------------------------------------------------------------


class ParquetWriter(BatchWriter):
    """The RouteSink of one Parquet file; the target is its until ``close`` or ``abort``."""

    def __init__(
        self, target: WholeWrites, spec: RouteSpec, *, encoding: Encoding, max_bytes: int = DEFAULT_MAX_BYTES
    ) -> None:
        super().__init__(spec, encoding=encoding, max_bytes=max_bytes)
        self._target = target
        self._file: Any = None

    def _send(self, batch: pa.RecordBatch) -> None:
        self._writer().write_batch(batch, row_group_size=batch.num_rows)

    def _writer(self) -> Any:
        if self._file is None:
            self._file = pq.ParquetWriter(
                self._target,
                self._schema(),
                compression="zstd",
                compression_level=1,
                use_dictionary=False,
                write_page_checksum=True,
            )
        return self._file

    def _finish(self) -> None:
        self._flush()
        writer = self._writer()
        writer.add_key_value_metadata({TRAILER_KEY: self._counter.trailer().to_json()})
        writer.close()
        self._target.publish()

    def _discard(self) -> None:
        self._held = []
        if self._file is not None:
            self._file.is_open = False  # else it would write a footer when it is collected, into a closed file
        self._target.discard()


class ParquetReader(RecordReader):
    """The RouteSource of one Parquet file that ``ParquetWriter`` wrote. Holds one row group."""

    def __init__(self, path: str | os.PathLike[str], *, policy: ReadPolicy) -> None:
        self._where = str(path)
        with open(path, "rb"):
            pass  # raises the system's own error for a missing or unreadable file; pyarrow's error does not say which
        self._file: Any = self._decode(
            lambda: pq.ParquetFile(path, page_checksum_verification=True, arrow_extensions_enabled=True)
        )
        schema = self._decode(lambda: self._file.schema_arrow)
        self._header: StreamHeader = parse_schema(schema)
        self._declared = self._trailer()
        super().__init__(self._header.spec, policy)

    @property
    def digest(self) -> str:
        """The trailer's digest as 16 hex digits."""
        return f"{self._declared.digest:016x}"

    @property
    def total_records(self) -> int:
        """Records of the file."""
        return self._declared.records

    def close(self) -> None:
        """Close the file."""
        super().close()
        self._file.close()

    def _trailer(self) -> Trailer:
        found = self._decode(lambda: self._file.metadata.metadata or {})
        key = TRAILER_KEY.encode()
        if key not in found:
            raise FormatError(
                f"expected the metadata {TRAILER_KEY}, got none @ {self._where}",
                kind=ErrorKind.NOT_ROUTEPLANE,
            )
        return Trailer.from_json(found[key].decode("utf-8", "replace"))

    @property
    def header(self) -> StreamHeader:
        """The schema's metadata."""
        return self._header

    def _arrive(self) -> Iterator[RouteRecord]:
        counter = TrailerCounter(self._header.spec, self._header.encoding, version=self._header.version)
        checked = BatchRecords(self._header, policy=self._policy, quarantine=self.quarantine)
        for index in range(self._file.num_row_groups):
            counter.add_batch()
            self._report = replace(self._report, batches=self._report.batches + 1)
            for batch in self._decode(lambda index=index: self._batches(index)):  # type: ignore[misc]
                yield from checked.records(batch, seen=counter.add_record)
        counter.check(self._declared)
        self._report = replace(self._report, complete=True)

    def _batches(self, index: int) -> list[pa.RecordBatch]:
        batches: list[pa.RecordBatch] = self._file.read_row_group(index).combine_chunks().to_batches()
        for batch in batches:
            batch.validate(full=True)
        return batches

    def _decode(self, work: Callable[[], Any]) -> Any:
        """Run a pyarrow decoder over bytes from outside; whatever it objects to is a damaged file."""
        try:
            return work()
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            if getattr(error, "errno", None) is not None:
                raise  # the system's own; pyarrow's for a damaged file have none
            raise FormatError(
                f"expected a whole Parquet file, got a damaged one: {error} @ {self._where}",
                kind=ErrorKind.CORRUPT_BATCH,
            ) from error
