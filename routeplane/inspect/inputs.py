"""What a place holds, for every command: streams, folders of blocks, archives, Parquet, pipes, URLs and patterns.

Owns how a place is recognised (by what lies there, never by its name alone) and opened, and how a sample is found by
its name. Every kind opens to a reader with one policy and one report. A place that can be read only once (``-``, a
pipe, a stream behind a URL) is copied to a temporary file first, since commands read twice. Decides nothing about
data: readers refuse or set aside what is bad.
"""

from __future__ import annotations

import glob
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from pyarrow.fs import FileSystem

from routeplane.errors import (
    ErrorKind,
    FormatError,
    Problem,
    SpecError,
    TruncatedError,
    UsageError,
    naming_stream,
    refused,
)
from routeplane.inspect.export import ParquetReader
from routeplane.record.codec import stored_rows
from routeplane.record.counts import html_table
from routeplane.record.policy import Quarantine, QuarantineEntry, ReadPolicy, StreamReport
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.validate import find_problems
from routeplane.stream.files import frames_of
from routeplane.stream.ipc import IpcReader

if TYPE_CHECKING:
    from routeplane.archive import Archive
    from routeplane.record.schema import StreamHeader
    from routeplane.record.spec import RouteSpec
    from routeplane.record.transfer import RecordReader

__all__ = [
    "LOOK",
    "SALVAGE",
    "Kind",
    "Source",
    "SourceRecords",
    "SourceSet",
    "damage_of",
    "find_sources",
    "is_archive",
    "is_wanted",
    "parse_sample",
    "resolve",
]

Kind = Literal["stream", "archive", "parquet"]

#: Everything is verified, and what is damaged raises.
LOOK = ReadPolicy(on_alarm="ignore")
#: Everything is verified, and what is damaged is passed over and counted.
SALVAGE = ReadPolicy(on_truncated="keep", on_corrupt="quarantine", on_alarm="ignore")

_WILDCARDS = frozenset("*?[")
_PARQUET_MAGIC = b"PAR1"
_ROW_KINDS = frozenset({ErrorKind.PARTIAL_ROW, ErrorKind.ID_OUT_OF_RANGE, ErrorKind.DUPLICATE_ID})
_NO_LIMIT = 2**62
#: Schemes of pyarrow's own file systems; others go to fsspec.
_ARROW_SCHEMES = frozenset({"s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One place that holds records. ``name``: as the user gave it; ``path``: what is opened.

    ``copy`` keeps the temporary file of a place that can be read only once; it goes with the last reference.
    """

    name: str
    path: str
    kind: Kind
    copy: Any = field(default=None, compare=False, repr=False)

    def open(self, *, policy: ReadPolicy = LOOK, layer_ids: Sequence[int] | None = None) -> RecordReader:
        """Open a reader of all records; close it. Raises FormatError, OSError, SpecError for an unknown layer."""
        reader: RecordReader
        if self.kind == "archive":
            reader = self.archive(policy=policy).select(layer_ids=layer_ids)
        else:
            reader = self._file_reader(policy)
            if layer_ids is not None:
                reader.select(layer_ids=layer_ids)
        return reader

    def archive(self, *, policy: ReadPolicy = LOOK) -> Archive:
        """The archive, where it is one. Raises MissingExtraError without the extra ``zarr``."""
        from routeplane.archive import open_archive

        return open_archive(self.path, on_corrupt=policy.on_corrupt, on_alarm=policy.on_alarm, verify=policy.verify)

    @property
    def spec(self) -> RouteSpec:
        """The geometry, read from the header or the commit."""
        if self.kind == "archive":
            return self.archive().spec
        with naming_stream(self.name), self._file_reader(SALVAGE) as reader:
            return reader.spec

    def _file_reader(self, policy: ReadPolicy) -> RecordReader:
        if self.kind == "parquet":
            return ParquetReader(self.path, policy=policy)
        # unlike those of ``open_stream``, its errors do not name the path: the caller names the source, or lists it
        frames, walkable = frames_of(self.path, salvage=policy.on_corrupt == "quarantine")
        return IpcReader(frames, policy, walkable=walkable)


def resolve(patterns: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> tuple[Source, ...]:
    """Find the sources that places name; opens none, but looks at what lies there.

    Args:
        patterns: Paths of streams or Parquet files, of folders of blocks (each ``.arrows`` file below is a source) or
            of archives; ``file://`` and other URLs; ``-`` for the standard input; glob patterns. What exists under
            the very name is not a pattern. A place that several name is read once.

    Returns:
        Sources, those of one pattern sorted by name.

    Raises:
        UsageError: A pattern that matches nothing (ARGUMENT).
        OSError: A place that is not there or may not be read.
    """
    found: dict[str, Source] = {}
    # a text is a sequence of texts too, and the first character of an absolute path is all of the file system
    for pattern in [patterns] if isinstance(patterns, str | os.PathLike) else patterns:
        for name in _names(os.fspath(pattern)):
            for source in _sources_at(name):
                found.setdefault(source.path if "://" in source.path else os.path.realpath(source.path), source)
    if not found:
        raise UsageError("expected at least one stream, archive or Parquet file, got none", kind=ErrorKind.ARGUMENT)
    return tuple(found.values())


def _names(pattern: str) -> list[str]:
    """The names that a pattern matches."""
    # a shell that expanded a pattern hands over names, and as a pattern ``run[1]`` is ``run1``
    if not _WILDCARDS & set(pattern) or "://" in pattern or os.path.lexists(pattern):
        return [pattern]
    matched = sorted(glob.glob(pattern))
    if not matched:
        raise UsageError(f"expected a file that matches {pattern!r}, got none", kind=ErrorKind.ARGUMENT)
    return matched


def _sources_at(name: str) -> list[Source]:
    path = unquote(urlsplit(name).path) if name.startswith("file://") else name
    if name == "-":
        return [_copied(name, lambda: sys.stdin.buffer)]
    if "://" in path:
        return [_remote(path)]
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        blocks = sorted(Path(path).rglob("*.arrows"))
        if blocks:
            return [Source(name=str(block), path=str(block), kind="stream") for block in blocks]
        if not os.listdir(path):
            raise FileNotFoundError(f"expected a folder with .arrows files, or an archive, got an empty one: {name}")
        return [Source(name=name, path=path, kind="archive")]
    if not stat.S_ISREG(mode):
        return [_copied(name, lambda: open(path, "rb"))]
    return [Source(name=name, path=path, kind=_file_kind(path))]


def _file_kind(path: str) -> Kind:
    with open(path, "rb") as file:
        return "parquet" if file.read(len(_PARQUET_MAGIC)) == _PARQUET_MAGIC else "stream"


def _remote(url: str) -> Source:
    if PurePosixPath(urlsplit(url).path).suffix not in (".arrows", ".parquet"):
        return Source(name=url, path=url, kind="archive")
    scheme = urlsplit(url).scheme
    try:
        system, path = FileSystem.from_uri(url if scheme in _ARROW_SCHEMES else f"fsspec+{url}")
    except (pa.ArrowException, ValueError, ImportError) as error:
        raise refused("a URL that pyarrow opens, or fsspec where it is installed", f"{url}: {error}") from error
    return _copied(url, lambda: system.open_input_stream(path))


def _copied(name: str, opening: Callable[[], Any]) -> Source:
    """A temporary file with what a place gives once."""
    copy = tempfile.NamedTemporaryFile(prefix="routeplane-", suffix=".arrows")  # noqa: SIM115  # lives with the Source
    with opening() as file:
        shutil.copyfileobj(file, copy)
    copy.flush()
    return Source(name=name, path=copy.name, kind=_file_kind(copy.name), copy=copy)


def is_archive(path: str) -> bool:
    """Whether a path names an archive: a URL, or a folder without blocks."""
    return "://" in path or (Path(path).is_dir() and not any(Path(path).rglob("*.arrows")))


# ----------------------------------------------------------------------------------------------------------------------
# Several sources as one
# ----------------------------------------------------------------------------------------------------------------------


def find_sources(
    patterns: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, policy: ReadPolicy = LOOK
) -> SourceSet:
    """Resolve places into one set of sources of one geometry.

    Args:
        patterns: As in ``resolve``.
        policy: What is done with what is damaged; ``SALVAGE`` passes over it.

    Returns:
        The set. Holds nothing open.

    Raises:
        SpecError: Two sources differ in geometry.
        UsageError, OSError: As ``resolve``; and what opening raises.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec(layers=(1, 2))
    >>> records = [watermarked_record(index, num_tokens=8, spec=spec) for index in range(3)]
    >>> import tempfile
    >>> from routeplane import new_stream
    >>> path = tempfile.mkdtemp() + "/run.arrows"
    >>> with new_stream(path, spec) as sink:
    ...     for record in records:
    ...         sink.write(record)
    >>> sources = find_sources([path])
    >>> len(sources), [record.num_tokens for record in sources.records()]
    (1, [8, 8, 8])
    """
    sources = resolve(patterns)
    specs = [source.spec for source in sources]
    for source, spec in zip(sources, specs, strict=True):
        if spec != specs[0]:
            differences = "; ".join(specs[0].differences(spec))
            raise SpecError(
                f"expected sources of one spec, got another in {source.name} than in {sources[0].name}: {differences}",
                kind=ErrorKind.SPEC_MISMATCH,
            )
    return SourceSet(sources=sources, spec=specs[0], policy=policy)


@dataclass(frozen=True, kw_only=True)
class SourceSet:
    """Sources of one spec. Every call opens, reads and closes.

    Example: see ``find_sources``.
    """

    sources: tuple[Source, ...]
    spec: RouteSpec
    policy: ReadPolicy = LOOK

    def __len__(self) -> int:
        """How many streams, archives and files."""
        return len(self.sources)

    def __iter__(self) -> Iterator[SourceSet]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int | slice) -> SourceSet:
        """Some of the sources, as a set; ``find`` gives a record by its sample."""
        chosen = self.sources[index]
        return replace(self, sources=chosen if isinstance(chosen, tuple) else (chosen,))

    def __repr__(self) -> str:
        names = ", ".join(self.paths[:3]) + (f" and {len(self) - 3} more" if len(self) > 3 else "")
        return f"SourceSet({names}; {self.spec.model!r})"

    def _repr_html_(self) -> str:
        return html_table(repr(self), {source.name: source.kind for source in self.sources})

    @property
    def paths(self) -> tuple[str, ...]:
        """The places, as they were named."""
        return tuple(source.name for source in self.sources)

    def records(self, *, layer_ids: Sequence[int] | None = None, samples: Sequence[str] | None = None) -> SourceRecords:
        """Every record, or those of ``samples`` (as in ``parse_sample``), of all layers or some: to iterate once.

        While iterated raises what the readers raise under the policy: FormatError, DataError, SpecError.
        """
        return SourceRecords(self.sources, self.policy, layer_ids=layer_ids, samples=samples)

    def find(self, sample: str) -> RouteRecord:
        """One sample, as named by a person. Raises UsageError (ARGUMENT) where none, or more than one, has the name."""
        found: list[RouteRecord] = []
        for record in self.records(samples=[sample]):
            found.append(record)
            if len(found) > 1:
                keys = " and ".join("/".join(str(part) for part in each.key) for each in found)
                raise refused(f"one record of sample {sample!r}", f"{keys}: give attempt and segment too")
        if not found:
            raise refused(f"a record of sample {sample!r} in {', '.join(self.paths)}", "none")
        return found[0]

    def lookup(self) -> Archive | None:
        """The mapping from keys to records, where all is one archive whose records are read without exception."""
        if len(self.sources) == 1 and self.sources[0].kind == "archive" and self.policy.on_corrupt == "raise":
            return self.sources[0].archive(policy=self.policy)
        return None


class SourceRecords:
    """The records of several sources in order; iterate once. ``report`` says what was read, and what was damaged."""

    def __init__(
        self,
        sources: Sequence[Source],
        policy: ReadPolicy,
        *,
        layer_ids: Sequence[int] | None,
        samples: Sequence[str] | None,
    ) -> None:
        self._sources, self._policy, self._layer_ids = sources, policy, layer_ids
        self._wanted = None if samples is None else [parse_sample(sample) for sample in samples]
        #: What was read so far, merged over sources.
        self.report = StreamReport(complete=True)
        #: What was passed over under ``SALVAGE``, with the name of its source.
        self.damage: list[tuple[str, Problem]] = []

    def __iter__(self) -> Iterator[RouteRecord]:
        for source in self._sources:
            looks_up = source.kind == "archive" and self._wanted is not None
            with naming_stream(source.name):
                yield from self._looked_up(source) if looks_up else self._read_through(source)

    def _read_through(self, source: Source) -> Iterator[RouteRecord]:
        salvages = self._policy.on_corrupt == "quarantine"
        try:
            reader = source.open(policy=self._policy, layer_ids=self._layer_ids)
        except FormatError as error:
            if not salvages or (isinstance(error, TruncatedError) and self._policy.on_truncated == "raise"):
                raise
            self._note(source, error)
            return
        with reader:
            try:
                for record in reader:
                    if self._wanted is None or is_wanted(record.key, self._wanted):
                        yield record
            except FormatError as error:
                if not salvages or (isinstance(error, TruncatedError) and self._policy.on_truncated == "raise"):
                    raise
                self._note(source, error)
            report = reader.report()
            self.report = self.report.merge(report)
            header = getattr(reader, "header", None)
            self.damage += [(source.name, problem) for problem in damage_of(report, header=header)]

    def _note(self, source: Source, error: FormatError) -> None:
        self.damage.append((source.name, Problem(kind=error.kind, message=error.message)))

    def _looked_up(self, source: Source) -> Iterator[RouteRecord]:
        archive = source.archive(policy=self._policy)
        for key in archive:
            if is_wanted(key, self._wanted or ()):
                yield archive.read(key, layer_ids=self._layer_ids)


def damage_of(
    report: StreamReport, *, header: StreamHeader | None = None, quarantine: Quarantine | None = None
) -> list[Problem]:
    """List what a reader passed over under ``SALVAGE``: damaged records, damaged batches, a missing trailer.

    ``header``, ``quarantine``: the reader's, to name every bad row of a record rather than the first few.
    """
    found = [problem for item in report.quarantined for problem in _problems_of(item, header, quarantine)]
    if report.quarantined_count > len(report.quarantined):
        message = f"expected whole records, got {report.quarantined_count} damaged, the first of which are listed"
        found.append(Problem(kind=ErrorKind.CHECKSUM, message=message))
    if report.skipped_batches:
        message = f"expected whole batches, got {report.skipped_batches} damaged, of {report.skipped_records} records"
        found.append(Problem(kind=ErrorKind.CORRUPT_BATCH, message=message))
    if report.truncated:
        found.append(Problem(kind=ErrorKind.TRUNCATED, message="expected a trailer, got the end of the stream"))
    return found


def _problems_of(item: QuarantineEntry, header: StreamHeader | None, quarantine: Quarantine | None) -> list[Problem]:
    """Everything wrong with one record. The error names the first few bad rows; here are all of them."""
    sample = item.key.sample_id
    raw = None if quarantine is None else quarantine.raw(item)
    if item.error.kind in _ROW_KINDS and header is not None and raw is not None:
        first_token, rows_SLK = stored_rows(raw, header=header)
        return find_problems(rows_SLK, header.spec, limit=_NO_LIMIT, first_token=first_token, sample=sample)
    if item.error.problems:
        return [
            problem if problem.sample is not None else replace(problem, sample=sample)
            for problem in item.error.problems
        ]
    return [Problem(kind=item.error.kind, message=f"record {item.index}: {item.error.message}", sample=sample)]


def parse_sample(text: str) -> tuple[str, int | None, int | None]:
    """Split ``sample``, or ``sample/attempt/segment`` as reports print it; the id itself may hold slashes.

    >>> parse_sample("step-3/17/0/0"), parse_sample("step-3/seventeen")
    (('step-3/17', 0, 0), ('step-3/seventeen', None, None))
    """
    head, _, segment = text.rpartition("/")
    sample, _, attempt = head.rpartition("/")
    if sample and attempt.isdecimal() and segment.isdecimal():
        return sample, int(attempt), int(segment)
    return text, None, None


def is_wanted(key: RecordKey, wanted: Sequence[tuple[str, int | None, int | None]]) -> bool:
    """Whether a key is one of those that ``parse_sample`` gave."""
    return any(
        key.sample_id == sample and attempt in (None, key.attempt) and segment in (None, key.segment)
        for sample, attempt, segment in wanted
    )
