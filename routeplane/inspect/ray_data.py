"""Records at rest as a Ray Data set, and the statistics of one: reading and counting scale out over a Ray cluster.

The driver touches headers and manifests only and cuts each source into parts: a stream between its batches, an archive
between its records. Each task opens its source itself, checks its own records, and gives them as ``plain`` rows
whatever encoding they rest in; a duplicate key shows only within a part. ``collect_on_ray`` counts in the workers, and
only tables of counts come back to the driver.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from routeplane.errors import (
    DataError,
    ErrorKind,
    MissingExtraError,
    SpecError,
    TransportError,
    TruncatedError,
    check_type,
    refused,
)
from routeplane.inspect.inputs import SourceSet, is_archive, is_wanted, parse_sample
from routeplane.inspect.statistics import RouteStatistics, collect
from routeplane.record.aligned import ColumnType
from routeplane.record.codec import read_records, write_batch
from routeplane.record.policy import ReadPolicy
from routeplane.record.record import RouteRecord
from routeplane.record.schema import arrow_schema, parse_schema
from routeplane.stream.files import frames_of
from routeplane.stream.ipc import IpcReader

try:
    import ray
    import ray.data
    from ray.data.block import BlockMetadata
except ModuleNotFoundError as error:
    if error.name not in ("ray", "pandas"):
        raise
    raise MissingExtraError(
        "routeplane.inspect.ray_data needs Ray Data: install the extra routeplane[ray]", kind=ErrorKind.MISSING_EXTRA
    ) from error

if TYPE_CHECKING:
    from routeplane.archive import Archive
    from routeplane.record.spec import RouteSpec
    from routeplane.record.transfer import RecordReader

__all__ = [
    "Cut",
    "Divisible",
    "Part",
    "PartReader",
    "collect_on_ray",
    "dataset",
    "divide",
    "examine",
    "filter_batches",
    "joined_cluster",
    "read_part",
    "records_of",
    "require_alike",
]

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

    Example, on a cluster::

        dataset(["step-1.arrows", "step-2.arrows"], layer_ids=[4]).count()
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

    Example, on a cluster::

        filter_batches(dataset("a.arrows"), lambda table: pc.equal(table["attempt"], 0)).count()
    """
    _require_dataset(records)
    return records.map_batches(partial(_keep, keep), batch_format="pyarrow", batch_size=None, zero_copy_batch=True)


def records_of(records: ray.data.Dataset, *, verify: bool = True) -> Iterator[RouteRecord]:
    """The rows of a data set as records again, checked like those of a stream.

    Raises FormatError where the types are not the format's any more, DataError for a bad record.

    Example, on a cluster::

        for record in records_of(dataset("a.arrows")): ...
    """
    _require_dataset(records)
    for table in records.iter_batches(batch_format="pyarrow", batch_size=None):
        for batch in table.to_batches():
            batch.validate(full=True)
            for read in read_records(batch, parse_schema(batch.schema)):
                if isinstance(read, DataError):
                    raise read
                yield read.verify() if verify else read


def _require_dataset(records: object) -> None:
    check_type(records, ray.data.Dataset, expected="a data set of Ray (dataset makes one)")


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


# ----------------------------------------------------------------------------------------------------------------------
# Statistics over a cluster
# ----------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def joined_cluster() -> Iterator[None]:
    """Be in a Ray cluster: the one this process is in, else the one that RAY_ADDRESS or a file of Ray's names.

    One that was joined here is left at the end. None is started: counting in processes of this machine alone is slower
    than ``collect``. Raises TransportError (CONNECTION) where there is none.
    """
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError) as error:  # none is there; an address that is none
        raise TransportError(
            f"expected a running Ray cluster (`ray start --head` starts one, RAY_ADDRESS names one), got: {error}",
            kind=ErrorKind.CONNECTION,
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def collect_on_ray(
    sources: SourceSet, *, layer_ids: Sequence[int] | None = None, samples: Sequence[str] | None = None
) -> RouteStatistics:
    """Statistics of ``sources`` as ``collect`` gives them, reduced over Ray Data: the same numbers.

    Needs a Ray cluster that is up (``ray.init``, or ``joined_cluster``), and workers that see the files. Sources must
    share their token columns too. Raises what ``collect`` and the readers raise.

    Example, on a cluster::

        collect_on_ray(find_sources(["step-*.arrows"])).scalars()
    """
    check_type(sources, SourceSet, expected="sources (find_sources gives them)")
    spec = sources.spec if layer_ids is None else sources.spec.select(layer_ids)
    records = dataset([source.path for source in sources.sources], layer_ids=layer_ids)
    counted = records.map_batches(
        partial(_count, spec, None if samples is None else tuple(samples)),
        batch_format="pyarrow",
        batch_size=None,
        zero_copy_batch=True,
    )
    # pickle: our own value, between our own processes of one cluster
    parts = (pickle.loads(row["statistics"]) for row in counted.iter_rows())
    return reduce(RouteStatistics.merge, parts, collect((), spec))


def _count(spec: RouteSpec, samples: tuple[str, ...] | None, table: pa.Table) -> pa.Table:
    """One block's statistics, as the one row of a table; runs in a worker."""
    found = collect(_records_of_table(table, samples), spec)
    return pa.table({"statistics": [pickle.dumps(found)]})


def _records_of_table(table: pa.Table, samples: tuple[str, ...] | None) -> Iterator[RouteRecord]:
    wanted = None if samples is None else [parse_sample(sample) for sample in samples]
    for batch in table.to_batches():
        batch.validate(full=True)
        for record in read_records(batch, parse_schema(batch.schema)):
            if isinstance(record, DataError):
                raise record
            if wanted is None or is_wanted(record.key, wanted):
                yield record


# ----------------------------------------------------------------------------------------------------------------------
# Sources cut into parts
# ----------------------------------------------------------------------------------------------------------------------


Columns = tuple[tuple[str, ColumnType], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """What of every record is wanted: as in ``RouteSource.select``."""

    layer_ids: tuple[int, ...] | None = None
    tokens: tuple[int, int] | None = None
    verify: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Divisible:
    """A source that can be cut. ``units``: batches of a stream, or records of an archive; ``nbytes``: once widened.

    ``commit``: an archive's, None for a stream.
    """

    path: str
    spec: RouteSpec
    columns: Columns
    units: int
    nbytes: int
    commit: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Units ``[start, stop)`` of a source. ``nbytes``: about, once widened."""

    source: Divisible
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Its share of the source's."""
        return self.source.nbytes * (self.stop - self.start) // self.source.units


@dataclass(frozen=True, kw_only=True, slots=True)
class PartReader:
    """A part being read. ``spec``: of its records, after the cut. ``records``: iterate once."""

    spec: RouteSpec
    records: Iterator[RouteRecord]


def examine(path: str | os.PathLike[str]) -> Divisible:
    """The source at ``path``: a stream's file, an archive's folder or URL.

    Raises FormatError (TruncatedError) for what is not whole, DataError for an archive whose runs differ in token
    columns, UsageError for what several processes cannot open, OSError.
    """
    text = os.fspath(path)
    if is_archive(text):
        return _examine_archive(text if "://" in text else os.path.abspath(text))
    return _examine_stream(os.path.abspath(text))


def require_alike(sources: Sequence[Divisible]) -> None:
    """Raise SpecError or DataError (TOKEN_COLUMN) where sources have no common table. An empty one has any columns."""
    first = next((source for source in sources if source.units), sources[0])
    for other in sources:
        if other.spec != first.spec:
            raise SpecError(
                f"expected the spec of {first.path} in all sources, got another in {other.path}",
                kind=ErrorKind.SPEC_MISMATCH,
            )
        if other.columns != first.columns and other.units:
            raise DataError(
                f"expected the token columns of {first.path} in all sources, {first.columns}, got "
                f"{other.columns} in {other.path}",
                kind=ErrorKind.TOKEN_COLUMN,
            )


def divide(sources: Sequence[Divisible], parts: int) -> list[Part]:
    """About ``parts`` parts of about equal size, none across two sources."""
    share = max(1, -(-sum(source.nbytes for source in sources) // max(1, parts)))
    found = []
    for source in sources:
        count = min(source.units, max(1, -(-source.nbytes // share)))
        edges = [source.units * index // count for index in range(count + 1)] if count else []
        found += [Part(source=source, start=a, stop=b) for a, b in itertools.pairwise(edges)]
    return found


def read_part(part: Part, cut: Cut) -> PartReader:
    """Open a part's source and read it. Raises TruncatedError where that has become shorter, and as readers do."""
    reader = _stream_reader(part, cut) if part.source.commit is None else _archive_reader(part, cut)
    return PartReader(spec=reader.spec, records=iter(reader))


# -- streams -----------------------------------------------------------------------------------------------------------


def _examine_stream(path: str) -> Divisible:
    if not Path(path).is_file():
        raise refused("the path of a regular file, or an archive", path)
    with IpcReader(frames_of(path)[0], ReadPolicy(), walkable=True) as reader:
        header = reader.header
    sizes = [frame.data.size for frame in list(frames_of(path)[0])[1:-1]]  # without schema and trailer
    return Divisible(
        path=path,
        spec=header.spec,
        columns=header.columns,
        units=len(sizes),
        nbytes=sum(sizes) * (2 if header.encoding == "narrow" else 1),
    )


def _stream_reader(part: Part, cut: Cut) -> RecordReader:
    frames = list(frames_of(part.source.path)[0])
    if len(frames) < part.stop + 2:
        raise _shorter(part.source.path)
    chosen = itertools.chain(frames[:1], frames[1 + part.start : 1 + part.stop])
    # the whole stream was seen to have its trailer; of a part nothing else can be known
    policy = ReadPolicy(on_truncated="keep", on_alarm="ignore", verify=cut.verify)
    return IpcReader(chosen, policy, walkable=False).select(layer_ids=cut.layer_ids, tokens=cut.tokens)


# -- archives ----------------------------------------------------------------------------------------------------------


def _examine_archive(path: str) -> Divisible:
    archive = _open_part(path, verify=True)
    columns = _columns(archive, path)
    row = archive.spec.num_layers * archive.spec.top_k * 2
    return Divisible(
        path=path,
        spec=archive.spec,
        columns=columns,
        units=len(archive),
        nbytes=max(1, archive.num_tokens) * (row + 8),
        commit=archive.commit,
    )


def _archive_reader(part: Part, cut: Cut) -> RecordReader:
    # runs are only ever appended, so a later commit has the same records under the same numbers
    archive = _open_part(part.source.path, verify=cut.verify)
    if len(archive) < part.stop:
        raise _shorter(part.source.path)
    return archive.select(layer_ids=cut.layer_ids, tokens=cut.tokens, records=(part.start, part.stop))


def _columns(archive: Archive, path: str) -> Columns:
    found = {run.name: archive.columns(run.name) for run in archive.runs if run.records}
    different = {columns: name for name, columns in found.items()}
    if len(different) > 1:
        raise DataError(
            f"expected runs with the same token columns, got {' and '.join(map(str, different))} @ {path}",
            kind=ErrorKind.TOKEN_COLUMN,
        )
    return next(iter(different), ())


def _open_part(path: str, *, verify: bool) -> Archive:
    from routeplane.archive import open_archive

    return open_archive(path, on_alarm="ignore", verify=verify)


def _shorter(path: str) -> TruncatedError:
    return TruncatedError(f"expected {path} as it was when it was divided, got a shorter one", kind=ErrorKind.TRUNCATED)
