"""Records at rest as a Ray Data set, so that looking and filtering scale out. Ray reads, shuffles and filters, not we.

A partition is a run of one stream's batches, or of an archive's keys. The driver touches headers alone; each task maps
its file, checks its own records, and gives them as ``plain`` rows whatever encoding they rest in. Streams are whole or
refused, but a duplicate key shows only within a partition: ``routeplane validate`` reads a stream in one piece.
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

from routeplane.columns import column_types, read_records, write_batch
from routeplane.errors import DataError, ErrorKind, MissingExtraError, SpecError, TruncatedError, refused
from routeplane.record import RecordKey, RouteRecord
from routeplane.schema import FORMAT_VERSION, StreamHeader, arrow_schema, parse_schema
from routeplane.spec import RouteSpec
from routeplane.stream.endpoints import RecordReader
from routeplane.stream.files import frames_of
from routeplane.stream.frames import Frame
from routeplane.stream.ipc import IpcReader
from routeplane.stream.protocol import ReadPolicy
from routeplane.stream.selection import Selection

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

    ``source``: the path of a stream or of an archive (a folder; needs zarr), or several; every node that reads must see
    them. ``layer_ids`` and ``tokens`` as in
    ``RouteSource.select``: whole records are verified before they are cut. ``verify=False`` skips comparing checksums,
    nothing else. Blocks are copies in Ray's object store.

    Filter with ``filter_batches``, or with ``Dataset.filter(expr=...)``; ``Dataset.filter(function)`` goes through
    Python rows and destroys the types. Raises FileNotFoundError, FormatError (TruncatedError) for a stream that is not
    whole, SpecError or DataError where several differ in spec or token columns; a task raises DataError for a bad
    record.
    """
    paths = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not paths:
        raise refused("at least one path", "none")
    streams = [_opened(os.path.abspath(path)) for path in paths]
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

    def tasks(self, share: int) -> Iterator[tuple[int, Any]]:
        """The size in memory of each run of batches, and what reads it."""
        for start in range(0, len(self.batch_bytes), share):
            stop = min(start + share, len(self.batch_bytes))
            size = sum(self.batch_bytes[start:stop]) * (2 if self.header.encoding == "narrow" else 1)
            yield size, partial(_read, self.path, start, stop=stop)

    @property
    def parts(self) -> int:
        """How finely it splits."""
        return len(self.batch_bytes)

    @classmethod
    def open(cls, path: str) -> _Stream:
        if not Path(path).is_file():
            raise refused("the path of a regular file", path)
        with IpcReader(frames_of(path)[0], ReadPolicy(), walkable=True) as reader:
            header = reader.header
        sizes = tuple(frame.data.size for frame in _batches(path))
        return cls(path=path, header=header, batch_bytes=sizes)


@dataclass(frozen=True, kw_only=True)
class _Archived:
    """An archive: its path, what a stream of it would say, its keys, and about how many bytes each record has."""

    path: str
    header: StreamHeader
    keys: tuple[RecordKey, ...]
    record_bytes: int

    def tasks(self, share: int) -> Iterator[tuple[int, Any]]:
        """The size in memory of each run of keys, and what reads it."""
        for start in range(0, len(self.keys), share):
            keys = self.keys[start : start + share]
            yield self.record_bytes * len(keys), partial(_read_archive, self.path, keys)

    @property
    def parts(self) -> int:
        """How finely it splits."""
        return len(self.keys)

    @classmethod
    def open(cls, path: str) -> _Archived:
        from routeplane.archive import open_archive

        archive = open_archive(path)
        keys = tuple(archive)
        columns = column_types(archive[keys[0]]) if keys else ()
        header = StreamHeader(spec=archive.spec, encoding="plain", version=FORMAT_VERSION, columns=columns)
        return cls(path=path, header=header, keys=keys, record_bytes=archive.nbytes // max(1, len(keys)))


def _opened(path: str) -> _Stream | _Archived:
    return _Archived.open(path) if Path(path).is_dir() else _Stream.open(path)


def _batches(path: str) -> Iterator[Frame]:
    """The frames of a whole stream without its schema and its trailer."""
    frames = list(frames_of(path)[0])
    return iter(frames[1:-1])


def _require_alike(first: _Stream | _Archived, other: _Stream | _Archived) -> None:
    if first.header.spec != other.header.spec:
        raise SpecError(
            f"expected the spec of {first.path} in all streams, got another in {other.path}",
            kind=ErrorKind.SPEC_MISMATCH,
        )
    if first.header.columns != other.header.columns and first.parts and other.parts:
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

    def __init__(self, sources: Sequence[_Stream | _Archived], cut: _Cut, schema: pa.Schema) -> None:
        self._sources = sources
        self._cut = cut
        self._schema = schema

    def get_name(self) -> str:
        """The name in Ray's progress lines."""
        return "RouteplaneRecords"

    def estimate_inmemory_data_size(self) -> int:
        """Bytes once widened."""
        return sum(size for source in self._sources for size, _ in source.tasks(1))

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ray.data.ReadTask]:
        """At most about ``parallelism`` tasks, none across two sources."""
        share = max(1, -(-sum(source.parts for source in self._sources) // max(1, parallelism)))
        return [
            ray.data.ReadTask(
                partial(read, cut=self._cut, schema=self._schema),
                BlockMetadata(num_rows=None, size_bytes=size, input_files=[source.path], exec_stats=None),
                schema=self._schema,
                per_task_row_limit=per_task_row_limit,
            )
            for source in self._sources
            for size, read in source.tasks(share)
        ]


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
    yield from _tables(reader, spec, schema=schema)


def _read_archive(path: str, keys: Sequence[RecordKey], *, cut: _Cut, schema: pa.Schema) -> Iterator[pa.Table]:
    """Records of an archive as tables; runs in a task. Reads the chunks of the selected layers alone."""
    from routeplane.archive import open_archive

    archive = open_archive(path, verify=cut.verify)
    tokens = Selection(tokens=cut.tokens)
    cuts = (tokens.cut(archive.read(key, layer_ids=cut.layer_ids)) for key in keys)
    spec = archive.spec if cut.layer_ids is None else archive.spec.select(cut.layer_ids)
    yield from _tables((record for record in cuts if record is not None), spec, schema=schema)


def _tables(records: Iterable[RouteRecord], spec: RouteSpec, *, schema: pa.Schema) -> Iterator[pa.Table]:
    given = False
    for held in _blocks(records):
        yield pa.Table.from_batches([write_batch(held, spec, encoding="plain")])
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
