"""Records at rest as a Ray Data set, so that looking and filtering scale out. Ray reads, shuffles and filters, not we.

A partition is a run of one stream's batches. The driver touches headers alone; each task maps its file, checks its own
records, and gives them as ``plain`` rows whatever encoding they rest in. Streams are whole or refused, but a duplicate
key shows only within a partition: ``routeplane validate`` reads a stream in one piece.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from routeplane.columns import read_records, write_batch
from routeplane.errors import DataError, ErrorKind, MissingExtraError, SpecError, TruncatedError, refused
from routeplane.record import RouteRecord
from routeplane.schema import StreamHeader, arrow_schema, parse_schema
from routeplane.stream.endpoints import RecordReader
from routeplane.stream.files import frames_of
from routeplane.stream.frames import Frame
from routeplane.stream.ipc import IpcReader
from routeplane.stream.protocol import ReadPolicy

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

    ``source``: a stream's path, or several; every node that reads must see them. ``layer_ids`` and ``tokens`` as in
    ``RouteSource.select``: whole records are verified before they are cut. ``verify=False`` skips comparing checksums,
    nothing else. Blocks are copies in Ray's object store.

    Filter with ``filter_batches``, or with ``Dataset.filter(expr=...)``; ``Dataset.filter(function)`` goes through
    Python rows and destroys the types. Raises FormatError (TruncatedError) for a stream that is not whole, SpecError or
    DataError where several differ in spec or token columns; a task raises DataError for a bad record.
    """
    paths = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not paths:
        raise refused("at least one path", "none")
    streams = [_Stream.open(os.path.abspath(path)) for path in paths]
    for stream in streams[1:]:
        _require_alike(streams[0], stream)
    cut = _Cut(layer_ids=None if layer_ids is None else tuple(layer_ids), tokens=tokens, verify=verify)
    schema = _schema(streams[0].header, cut)  # also refuses a layer that is not there, here and not in a task
    return ray.data.read_datasource(_RecordSource(streams, cut, schema))


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


# -- the partitions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """What of every record is wanted."""

    layer_ids: tuple[int, ...] | None
    tokens: tuple[int, int] | None
    verify: bool

    def apply(self, reader: RecordReader) -> RecordReader:
        return reader.select(layer_ids=self.layer_ids, tokens=self.tokens)


@dataclass(frozen=True, kw_only=True)
class _Stream:
    """A whole stream: its path, its header, and the bytes of each batch."""

    path: str
    header: StreamHeader
    batch_bytes: tuple[int, ...]

    @classmethod
    def open(cls, path: str) -> _Stream:
        if not Path(path).is_file():
            raise refused("the path of a regular file", path)
        with IpcReader(frames_of(path)[0], ReadPolicy(), walkable=True) as reader:
            header = reader.header
        sizes = tuple(frame.data.size for frame in _batches(path))
        return cls(path=path, header=header, batch_bytes=sizes)


def _batches(path: str) -> Iterator[Frame]:
    """The frames of a whole stream without its schema and its trailer."""
    frames = list(frames_of(path)[0])
    return iter(frames[1:-1])


def _require_alike(first: _Stream, other: _Stream) -> None:
    if first.header.spec != other.header.spec:
        raise SpecError(
            f"expected the spec of {first.path} in all streams, got another in {other.path}",
            kind=ErrorKind.SPEC_MISMATCH,
        )
    if first.header.columns != other.header.columns and first.batch_bytes and other.batch_bytes:
        raise DataError(
            f"expected the token columns of {first.path} in all streams, {first.header.columns}, got "
            f"{other.header.columns} in {other.path}",
            kind=ErrorKind.TOKEN_COLUMN,
        )


def _schema(header: StreamHeader, cut: _Cut) -> pa.Schema:
    spec = header.spec if cut.layer_ids is None else header.spec.select(cut.layer_ids)
    return arrow_schema(spec, "plain", columns=header.columns)


class _RecordSource(ray.data.Datasource):  # type: ignore[misc]  # ray ships no types
    """What Ray asks of a source: how large it is, and tasks that read it."""

    def __init__(self, streams: Sequence[_Stream], cut: _Cut, schema: pa.Schema) -> None:
        self._streams = streams
        self._cut = cut
        self._schema = schema

    def get_name(self) -> str:
        """The name in Ray's progress lines."""
        return "RouteplaneRecords"

    def estimate_inmemory_data_size(self) -> int:
        """Bytes once widened."""
        return sum(_memory(stream, stream.batch_bytes) for stream in self._streams)

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ray.data.ReadTask]:
        """At most about ``parallelism`` tasks, none across two streams."""
        share = max(1, -(-sum(len(stream.batch_bytes) for stream in self._streams) // max(1, parallelism)))
        tasks = []
        for stream in self._streams:
            for start in range(0, len(stream.batch_bytes), share):
                stop = min(start + share, len(stream.batch_bytes))
                metadata = BlockMetadata(
                    num_rows=None,
                    size_bytes=_memory(stream, stream.batch_bytes[start:stop]),
                    input_files=[stream.path],
                    exec_stats=None,
                )
                read = partial(_read, stream.path, start, stop=stop, cut=self._cut, schema=self._schema)
                tasks.append(
                    ray.data.ReadTask(read, metadata, schema=self._schema, per_task_row_limit=per_task_row_limit)
                )
        return tasks


def _memory(stream: _Stream, sizes: Sequence[int]) -> int:
    return sum(sizes) * (2 if stream.header.encoding == "narrow" else 1)


def _read(path: str, start: int, *, stop: int, cut: _Cut, schema: pa.Schema) -> Iterator[pa.Table]:
    """Batches ``[start, stop)`` of a stream as tables; runs in a task. An empty run gives an empty table."""
    frames = list(frames_of(path)[0])
    if len(frames) < stop + 2:
        raise TruncatedError(
            f"expected {path} as it was when the data set was made, got a shorter one", kind=ErrorKind.TRUNCATED
        )
    part = itertools.chain(frames[:1], frames[1 + start : 1 + stop])
    # the whole stream was seen to have its trailer; of a part nothing else can be known
    reader = IpcReader(part, ReadPolicy(on_truncated="keep", on_alarm="ignore", verify=cut.verify), walkable=False)
    spec = cut.apply(reader).spec
    given = False
    for records in _blocks(reader):
        yield pa.Table.from_batches([write_batch(records, spec, encoding="plain")])
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
