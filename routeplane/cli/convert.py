"""From one container to another: streams, archives and Parquet, chosen by suffix.

A file appears when it is complete. An archive gets runs, each saying which records of which source it holds: a second
call finds them, and begins behind them. Every record is verified on the way in; its checksum comes along unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal

from routeplane.errors import ErrorKind, FormatError, Problem, naming_stream, refused
from routeplane.inspect.export import Form, ParquetWriter, write_tables
from routeplane.inspect.inputs import LOOK, Kind, Source, find_sources
from routeplane.record.policy import ReadPolicy
from routeplane.record.schema import choose_encoding
from routeplane.stream import new_stream
from routeplane.stream.files import PublishedPath

if TYPE_CHECKING:
    from routeplane.record.interfaces import RouteSink
    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = [
    "DEFAULT_PART_BYTES",
    "SUFFIXES",
    "Conversion",
    "convert",
    "export",
    "kind_of",
    "make_file",
    "open_any",
]

#: Payload of one run of an archive. A stopped conversion into one loses at most so much work.
DEFAULT_PART_BYTES = 2**30

#: Told after each record: how many are done, those of an earlier attempt included, and how many there are, if known.
Progress = Callable[[int, int | None], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What was done. ``resumed``: records that an archive had of an earlier call; ``damaged``: problems passed over."""

    records: int
    resumed: int
    bytes: int
    damaged: int = 0


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    encoding: Literal["plain", "narrow", "auto"] = "auto",
    overwrite: bool = False,
    part_bytes: int = DEFAULT_PART_BYTES,
    on_corrupt: Literal["raise", "quarantine"] = "raise",
    on_truncated: Literal["raise", "keep"] = "raise",
    progress: Progress | None = None,
) -> Conversion:
    """Copy all records of ``source`` into ``target``: ``.arrows`` streams, ``.zarr`` archives, ``.parquet`` files.

    A file appears when it is complete, and one that is there is kept unless ``overwrite``. An archive is appended to,
    run by run, so its first records can be read while the rest is copied; where an earlier call with the same source
    was stopped, this one goes on. A source whose content has no digest before its end (a pipe, several files) begins
    from the start. Records are held one batch at a time.

    Args:
        source: As in ``inspect.find_sources``.
        target: A path, chosen by suffix; an archive may be a URL.
        encoding: Of a stream or Parquet file.
        overwrite: Replace a file that is there.
        part_bytes: Payload of one run of an archive.
        on_corrupt: As in ``open_stream``, as ``on_truncated``; what is passed over is counted.
        progress: Told after each record how many are done, and how many there are, if known.

    Returns:
        What was done.

    Raises:
        UsageError: An unknown suffix, a target that exists, arguments out of range.
        FormatError, DataError: A damaged source, where damage is to raise.
        StoreError, OSError: An archive's disk is full, a place that cannot be read or written.
    """
    places = os.fspath(source), os.fspath(target)
    into_archive = kind_of(places[1]) == "archive"
    if os.path.realpath(places[0]) == os.path.realpath(places[1]):
        raise refused("two places", f"{places[0]} twice")
    if part_bytes < 1:
        raise refused("part_bytes of at least 1", f"{part_bytes}")
    if not into_archive and os.path.lexists(places[1]) and not overwrite:
        raise refused("a target that does not exist (overwrite replaces one)", places[1])
    policy = ReadPolicy(on_corrupt=on_corrupt, on_truncated=on_truncated, on_alarm="ignore")
    opened = open_any(places[0], policy=policy)
    tell = progress or _silent
    if into_archive:
        done = _into_archive(opened, places[1], part_bytes=part_bytes, tell=tell)
    else:
        done = _into_file(opened, os.path.realpath(places[1]), encoding=encoding, tell=tell)
    return replace(done, damaged=len(opened.damage))


def export(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    form: Form,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Write a Parquet file for analysis: null for MISSING, plain lists (see ``inspect.to_arrow``).

    Arguments and errors as in ``convert``; ``form`` is ``flat`` or ``nested``.
    """
    place = os.fspath(target)
    if kind_of(place) != "parquet":
        raise refused("a target that ends in .parquet", repr(place))
    if os.path.lexists(place) and not overwrite:
        raise refused("a target that does not exist (overwrite replaces one)", place)
    opened = open_any(os.fspath(source))
    records = _told(opened.records(skip=0), done=0, total=opened.total, tell=progress or _silent)
    count = write_tables(records, place, form=form)
    return Conversion(records=count, resumed=0, bytes=os.stat(place).st_size)


def _into_file(
    opened: SourceContent, target: str, *, encoding: Literal["plain", "narrow", "auto"], tell: Progress
) -> Conversion:
    count = 0
    with make_file(target, opened.spec, encoding=encoding) as sink:
        for record in _told(opened.records(skip=0), done=0, total=opened.total, tell=tell):
            sink.write(record)
            count += 1
    return Conversion(records=count, resumed=0, bytes=os.stat(target).st_size)


def _silent(done: int, total: int | None) -> None:
    """No progress."""


def _told(records: Iterable[RouteRecord], *, done: int, total: int | None, tell: Progress) -> Iterator[RouteRecord]:
    tell(done, total)
    for count, record in enumerate(records, done + 1):
        yield record
        tell(count, total)


class _Part:
    """The next records of a source, up to a bound of bytes; at least one, where there is one."""

    def __init__(self, records: Iterator[RouteRecord], *, limit: int) -> None:
        self._records, self._limit = records, limit
        self.first = next(records, None)
        self.count = 0

    def __iter__(self) -> Iterator[RouteRecord]:
        if self.first is None:
            return
        size = 0
        for record in chain([self.first], self._records):
            self.count += 1
            size += record.nbytes
            yield record
            if size >= self._limit:
                return


# ----------------------------------------------------------------------------------------------------------------------
# An archive, run by run
# ----------------------------------------------------------------------------------------------------------------------


def _into_archive(opened: SourceContent, target: str, *, part_bytes: int, tell: Progress) -> Conversion:
    from routeplane.archive import new_run, open_archive

    resumed = _converted_runs(target, opened.digest)
    done = resumed
    records = _told(opened.records(skip=done), done=done, total=opened.total, tell=tell)
    while True:
        part = _Part(records, limit=part_bytes)
        if part.first is None and done:
            break
        # the count is known only at the end of the part, and attributes are written with the commit
        attributes = {"source": opened.digest or "", "first": str(done)}
        with new_run(target, opened.spec, attributes=attributes) as sink:
            for record in part:
                sink.write(record)
        done += part.count
        if part.first is None:
            break
    archive = open_archive(target)
    return Conversion(records=done, resumed=resumed, bytes=archive.nbytes)


def _converted_runs(target: str, digest: str | None) -> int:
    """How many records of that source the archive holds, counted over runs that follow each other."""
    from routeplane.archive import open_archive

    if digest is None:
        return 0
    try:
        archive = open_archive(target)
    except FileNotFoundError:
        return 0
    except FormatError as error:
        if error.kind == ErrorKind.TRUNCATED:
            return 0  # begun, and nothing committed
        raise
    done = 0
    for run in archive.runs:
        said = archive.attributes(run.name)
        if said.get("source") == digest and said.get("first") == str(done):
            done += run.records
    return done


# ----------------------------------------------------------------------------------------------------------------------
# Containers, by suffix
# ----------------------------------------------------------------------------------------------------------------------


SUFFIXES: dict[str, Kind] = {".arrows": "stream", ".zarr": "archive", ".parquet": "parquet"}


def kind_of(place: str) -> Kind:
    """The container that a path's suffix names. Raises UsageError."""
    suffix = PurePosixPath(place.rstrip("/")).suffix
    if suffix not in SUFFIXES:
        raise refused(f"a path that ends in {', '.join(SUFFIXES)}", repr(place))
    return SUFFIXES[suffix]


class SourceContent:
    """A source to copy. ``digest``: names its content, None where only reading it can tell; ``total``: its records,
    likewise; ``damage``: what was passed over."""

    def __init__(self, place: str, policy: ReadPolicy) -> None:
        self._set = find_sources([place], policy=policy)
        self._policy = policy
        self.spec: RouteSpec = self._set.spec
        self.digest: str | None = None
        self.total: int | None = None
        self.damage: list[tuple[str, Problem]] = []
        if len(self._set.sources) == 1 and self._set.sources[0].copy is None:
            self._look(self._set.sources[0])

    def _look(self, source: Source) -> None:
        if source.kind == "archive":
            archive = source.archive(policy=self._policy)
            self.digest, self.total = archive.digest, len(archive)
            return
        with naming_stream(source.name), source.open(policy=self._policy) as reader:
            self.digest = reader.digest
            self.total = getattr(reader, "total_records", None)

    def records(self, *, skip: int) -> Iterator[RouteRecord]:
        """All records but the first ``skip``; an archive does not read these."""
        [first, *rest] = self._set.sources
        if first.kind == "archive" and not rest:
            archive = first.archive(policy=self._policy)
            with naming_stream(first.name):
                yield from archive.select(records=(min(skip, len(archive)), len(archive)))
            return
        read = self._set.records()
        yield from islice(read, skip, None)
        self.damage += read.damage


def open_any(place: str, *, policy: ReadPolicy = LOOK) -> SourceContent:
    """Open anything that holds records, checking everything. Raises as its readers do."""
    return SourceContent(place, policy)


def make_file(place: str, spec: RouteSpec, *, encoding: Literal["plain", "narrow", "auto"]) -> RouteSink:
    """A sink for a stream or a Parquet file, which appears when it is closed."""
    kind = kind_of(place)
    if kind == "archive":
        raise refused("a stream or a Parquet file", repr(place))
    if kind == "parquet":
        return ParquetWriter(PublishedPath(os.fspath(place)), spec, encoding=choose_encoding(encoding, spec))
    return new_stream(place, spec, encoding=encoding)
