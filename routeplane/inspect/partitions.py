"""Streams and archives cut into parts that several processes read at once. Knows no cluster, and decides no order.

A stream is cut between its batches, an archive between its records. Whoever divides touches headers and manifests
alone; whoever reads a part opens the source anew, and checks its own records. A duplicate key shows only within a part.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from routeplane.errors import DataError, ErrorKind, SpecError, TruncatedError, refused
from routeplane.inspect.sources import is_archive
from routeplane.record.policy import ReadPolicy
from routeplane.stream.files import frames_of
from routeplane.stream.ipc import IpcReader

if TYPE_CHECKING:
    from routeplane.archive import Archive
    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec
    from routeplane.record.transfer import RecordReader

__all__ = ["Cut", "Divisible", "Part", "Read", "divide", "examine", "read_part", "require_alike"]

Columns = tuple[tuple[str, pa.DataType], ...]


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
class Read:
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


def read_part(part: Part, cut: Cut) -> Read:
    """Open a part's source and read it. Raises TruncatedError where that has become shorter, and as readers do."""
    reader = _stream_reader(part, cut) if part.source.commit is None else _archive_reader(part, cut)
    return Read(spec=reader.spec, records=iter(reader))


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
    archive = _open(path, verify=True)
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
    archive = _open(part.source.path, verify=cut.verify)
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
    return tuple((name, pa.from_numpy_dtype(np.dtype(kind))) for name, kind in next(iter(different), ()))


def _open(path: str, *, verify: bool) -> Archive:
    from routeplane.archive import open_archive

    return open_archive(path, on_alarm="ignore", verify=verify)


def _shorter(path: str) -> TruncatedError:
    return TruncatedError(f"expected {path} as it was when it was divided, got a shorter one", kind=ErrorKind.TRUNCATED)
