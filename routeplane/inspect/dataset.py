"""Records at rest as a Ray Data set, so that looking and filtering scale out. Ray reads, shuffles and filters, not we.

``partitions`` cuts streams and archives into parts. The driver touches headers alone; each task opens its source,
checks its own records, and gives them as ``plain`` rows whatever encoding they rest in.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from routeplane.errors import DataError, ErrorKind, MissingExtraError, refused
from routeplane.inspect.partitions import Cut, Divisible, Part, divide, examine, read_part, require_alike
from routeplane.record.codec import read_records, write_batch
from routeplane.record.record import RouteRecord
from routeplane.record.schema import arrow_schema, parse_schema

try:
    import ray.data
    from ray.data.block import BlockMetadata
except ModuleNotFoundError as error:
    if error.name not in ("ray", "pandas"):
        raise
    raise MissingExtraError(
        "routeplane.inspect.dataset needs Ray Data: pip install 'routeplane[ray]'", kind=ErrorKind.MISSING_EXTRA
    ) from error

__all__ = ["dataset", "filter_batches", "records_of"]

# Rows are widened into blocks of about this many bytes, so that a task holds little besides what it maps.
_BLOCK_BYTES = 32 * 2**20


def dataset(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    layer_ids: Sequence[int] | None = None,
    tokens: tuple[int, int] | None = None,
    verify: bool = True,
) -> ray.data.Dataset:
    """A ``ray.data.Dataset`` with one row per record, in the columns and types of format v1 (``plain``).

    ``source``: a stream's path, an archive's folder or URL, or several; every node that reads must see them.
    ``layer_ids`` and ``tokens`` as in ``RouteSource.select``: a stream's records are verified before they are cut, and
    of an archive nothing else is read. ``verify=False`` skips comparing records' checksums, nothing else. Blocks are
    copies in Ray's object store.

    Filter with ``filter_batches``, or with ``Dataset.filter(expr=...)``; ``Dataset.filter(function)`` goes through
    Python rows and destroys the types. Raises FormatError (TruncatedError) for a stream that is not whole, SpecError or
    DataError where several differ in spec or token columns; a task raises DataError or FormatError for what is damaged.
    """
    paths = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not paths:
        raise refused("at least one path", "none")
    sources = [examine(path) for path in paths]
    require_alike(sources)
    cut = Cut(layer_ids=None if layer_ids is None else tuple(layer_ids), tokens=tokens, verify=verify)
    spec = sources[0].spec if layer_ids is None else sources[0].spec.select(layer_ids)  # refuses here, not in a task
    columns = next((source.columns for source in sources if source.units), sources[0].columns)
    return ray.data.read_datasource(_RecordSource(sources, cut, arrow_schema(spec, "plain", columns=columns)))


def filter_batches(records: ray.data.Dataset, keep: Callable[[pa.Table], Any]) -> ray.data.Dataset:
    """The records for which ``keep`` says so: it gets a ``pyarrow.Table`` and returns a boolean array of its length.

    Types and metadata stay, which Ray's ``filter(function)`` loses. ``keep`` runs in Ray's workers.
    """
    return records.map_batches(partial(_keep, keep), batch_format="pyarrow", batch_size=None, zero_copy_batch=True)


def records_of(records: ray.data.Dataset, *, verify: bool = True) -> Iterator[RouteRecord]:
    """The rows of a data set as records again, checked like those of a stream.

    Raises FormatError where the types are not the format's any more, DataError for a bad record.
    """
    for table in records.iter_batches(batch_format="pyarrow", batch_size=None):
        for batch in table.to_batches():
            batch.validate(full=True)
            for read in read_records(batch, parse_schema(batch.schema)):
                if isinstance(read, DataError):
                    raise read
                yield read.verify() if verify else read


def _keep(keep: Callable[[pa.Table], Any], table: pa.Table) -> pa.Table:
    return table.filter(keep(table))


class _RecordSource(ray.data.Datasource):  # type: ignore[misc]  # ray ships no types
    """What Ray asks of a source: how large it is, and tasks that read it."""

    def __init__(self, sources: Sequence[Divisible], cut: Cut, schema: pa.Schema) -> None:
        self._sources = sources
        self._cut = cut
        self._schema = schema

    def get_name(self) -> str:
        """The name in Ray's progress lines."""
        return "RouteplaneRecords"

    def estimate_inmemory_data_size(self) -> int:
        """Bytes once widened."""
        return sum(source.nbytes for source in self._sources)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ray.data.ReadTask]:
        """At most about ``parallelism`` tasks, none across two sources."""
        tasks = []
        for part in divide(self._sources, parallelism):
            metadata = BlockMetadata(
                num_rows=None, size_bytes=part.nbytes, input_files=[part.source.path], exec_stats=None
            )
            read = partial(_read, part, self._cut, self._schema)
            tasks.append(ray.data.ReadTask(read, metadata, schema=self._schema, per_task_row_limit=per_task_row_limit))
        return tasks


def _read(part: Part, cut: Cut, schema: pa.Schema) -> Iterator[pa.Table]:
    """A part as tables; runs in a task. A part without records gives an empty table."""
    read = read_part(part, cut)
    given = False
    for records in _blocks(read.records):
        yield pa.Table.from_batches([write_batch(records, read.spec, encoding="plain")])
        given = True
    if not given:
        yield pa.table([pa.nulls(0, field.type) for field in schema], schema=schema)


def _blocks(records: Iterable[RouteRecord]) -> Iterator[list[RouteRecord]]:
    held: list[RouteRecord] = []
    size = 0
    for record in records:
        held.append(record)
        size += record.nbytes
        if size >= _BLOCK_BYTES:
            yield held
            held, size = [], 0
    if held:
        yield held
