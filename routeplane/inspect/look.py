"""What a stream or an archive holds and what is wrong with it, as values that the command line prints.

``summarise`` counts, and compares no checksum; ``check`` verifies every record, goes on after a bad one, and lists all
problems with sample, token and layer. Each has its form for streams; those of archives are ``archive``'s.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from routeplane.errors import ErrorKind, FormatError, Problem, UsageError
from routeplane.inspect.inputs import is_archive
from routeplane.record.alarms import find_alarms
from routeplane.record.codec import stored_rows
from routeplane.record.coverage import Coverage
from routeplane.record.policy import Quarantined
from routeplane.record.record import RouteRecord
from routeplane.record.schema import FORMAT_VERSION, StreamHeader
from routeplane.record.spec import RouteSpec
from routeplane.record.validate import find_problems
from routeplane.stream import IpcReader, StreamReport, open_stream

__all__ = ["ArchiveSummary", "StreamCheck", "StreamSummary", "check", "check_stream", "summarise", "summarise_stream"]

_ROW_KINDS = frozenset({ErrorKind.PARTIAL_ROW, ErrorKind.ID_OUT_OF_RANGE, ErrorKind.DUPLICATE_ID})
_NO_LIMIT = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSummary:
    """A stream's header and counts."""

    path: str
    bytes: int
    header: StreamHeader
    report: StreamReport

    @property
    def complete(self) -> bool:
        """Whether the trailer was reached and agrees."""
        return self.report.complete

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, keys in reading order."""
        spec = self.header.spec
        return {
            "path": self.path,
            "bytes": self.bytes,
            "format": self.header.version,
            "encoding": self.header.encoding,
            **_geometry(spec),
            "token_columns": [name for name, _ in self.header.columns],
            "batches": self.report.batches,
            "records": self.report.records,
            "tokens": self.report.tokens,
            **_shares(self.report.coverage),
            "quarantined": len(self.report.quarantined),
            "complete": self.complete,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveSummary:
    """An archive's newest commit and its counts. ``runs``: records of each run, in order of saving."""

    path: str
    bytes: int
    version: str
    spec: RouteSpec
    columns: tuple[str, ...]
    commit: int
    runs: tuple[tuple[str, int], ...]
    tokens: int
    coverage: Coverage

    @property
    def complete(self) -> bool:
        """Always: a commit is whole, or the archive does not open."""
        return True

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, keys in reading order."""
        return {
            "path": self.path,
            "bytes": self.bytes,
            "format": FORMAT_VERSION,
            "archive": self.version,
            **_geometry(self.spec),
            "token_columns": list(self.columns),
            "commit": self.commit,
            "runs": dict(self.runs),
            "records": self.coverage.records,
            "tokens": self.tokens,
            **_shares(self.coverage),
            "complete": self.complete,
        }


def _geometry(spec: RouteSpec) -> dict[str, Any]:
    return {
        "model": spec.model,
        "num_experts": spec.num_experts,
        "top_k": spec.top_k,
        "layers": spec.num_layers,
        "layer_ids": list(spec.layer_ids),
    }


def _shares(coverage: Coverage) -> dict[str, Any]:
    return {
        "coverage": {state: count for state, count in coverage.rows.items() if count},
        "missing_share": coverage.missing_share,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamCheck:
    """The verdict on a stream or an archive, with every problem that was found.

    Damaged records count as records. A stream's count as tokens too, their rows as ``lost``; an archive's do not.
    """

    problems: tuple[Problem, ...]
    records: int
    tokens: int
    coverage: Coverage

    @property
    def verdict(self) -> str:
        """``valid``, or how many errors and alarms there are."""
        errors = sum(problem.severity == "error" for problem in self.problems)
        alarms = len(self.problems) - errors
        return f"{errors} errors, {alarms} alarms" if self.problems else "valid"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "valid": not any(problem.severity == "error" for problem in self.problems),
            "records": self.records,
            "tokens": self.tokens,
            "coverage": {state: count for state, count in self.coverage.rows.items() if count},
            "problems": [
                {
                    "severity": problem.severity,
                    "kind": str(problem.kind),
                    "message": problem.message,
                    "sample": problem.sample,
                    "token": problem.token,
                    "layer": problem.layer,
                }
                for problem in self.problems
            ],
        }


def summarise(path: str | os.PathLike[str]) -> StreamSummary | ArchiveSummary:
    """What stands at a path: ``summarise_stream``, or of an archive what its commit and its record tables say.

    Of an archive no array is read. Raises FormatError for what is neither, or damaged there; OSError.
    """
    if not is_archive(os.fspath(path)):
        return summarise_stream(path)
    from routeplane.archive import ARCHIVE_VERSION, open_archive

    archive = open_archive(path)
    return ArchiveSummary(
        path=str(path),
        bytes=archive.nbytes,
        version=ARCHIVE_VERSION,
        spec=archive.spec,
        columns=tuple(dict.fromkeys(name for run in archive.runs for name, _ in archive.columns(run.name))),
        commit=archive.commit,
        runs=tuple((run.name, run.records) for run in archive.runs),
        tokens=archive.num_tokens,
        coverage=archive.coverage(),
    )


def check(path: str | os.PathLike[str]) -> StreamCheck:
    """Read and verify a stream or an archive, and go on after damage. Raises OSError where nothing can be read."""
    if not is_archive(os.fspath(path)):
        return check_stream(path)
    from routeplane.archive import verify

    found = verify(path, look=_alarms)
    return StreamCheck(
        problems=found.problems, records=found.records + found.damaged, tokens=found.tokens, coverage=found.coverage
    )


def summarise_stream(path: str | os.PathLike[str]) -> StreamSummary:
    """Header, counts and coverage of a stream file. Raises FormatError for what is no stream, OSError."""
    with _open(path, verify=False) as reader:
        for _ in reader:
            pass
        return StreamSummary(
            path=str(path), bytes=Path(path).stat().st_size, header=reader.header, report=reader.report()
        )


def check_stream(path: str | os.PathLike[str]) -> StreamCheck:
    """Read and verify every record, and go on after a bad one. Raises OSError where the file cannot be read."""
    try:
        reader = _open(path, verify=True)
    except FormatError as error:
        problem = Problem(kind=error.kind, message=error.message)
        return StreamCheck(problems=(problem,), records=0, tokens=0, coverage=Coverage())
    with reader:
        found = _read_through(reader)
        report = reader.report()
        bad_rows = [problem for item in report.quarantined for problem in _problems_of(item, reader.header)]
    if report.truncated:
        found.append(Problem(kind=ErrorKind.TRUNCATED, message="expected a trailer, got the end of the stream"))
    return StreamCheck(
        problems=(*bad_rows, *found),
        records=report.records,
        tokens=report.tokens,
        coverage=report.coverage,
    )


def _read_through(reader: IpcReader) -> list[Problem]:
    """Alarms of every record, and what ended the reading before the trailer."""
    found: list[Problem] = []
    try:
        for record in reader:
            found += _alarms(record)
    except FormatError as error:
        found.append(Problem(kind=error.kind, message=error.message))
    return found


def _alarms(record: RouteRecord) -> list[Problem]:
    return find_alarms(
        record.routes,
        record.spec,
        token_ids=record.token_ids[record.routes_start :],
        first_token=record.routes_start,
        sample=record.sample_id,
    )


def _problems_of(item: Quarantined, header: StreamHeader) -> list[Problem]:
    """Everything wrong with one record. The error names the first few bad rows; here are all of them."""
    sample = item.key.sample_id
    if item.error.kind in _ROW_KINDS:
        first_token, rows_SLK = stored_rows(item.raw, header=header)
        return find_problems(rows_SLK, header.spec, limit=_NO_LIMIT, first_token=first_token, sample=sample)
    if item.error.problems:
        return [
            problem if problem.sample is not None else replace(problem, sample=sample)
            for problem in item.error.problems
        ]
    return [Problem(kind=item.error.kind, message=f"record {item.index}: {item.error.message}", sample=sample)]


def _open(path: str | os.PathLike[str], *, verify: bool) -> IpcReader:
    reader = open_stream(path, on_truncated="keep", on_corrupt="quarantine", on_alarm="ignore", verify=verify)
    if not isinstance(reader, IpcReader):
        raise UsageError(f"expected the path of a stream, got {path!r}", kind=ErrorKind.ARGUMENT)
    return reader
