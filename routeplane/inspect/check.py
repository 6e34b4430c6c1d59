"""What a stream holds and what is wrong with it, as values that the command line prints.

``summarise_stream`` counts, and compares no checksum; ``check_stream`` verifies every record, goes on after a bad one,
and lists all problems with sample, token and layer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from routeplane.alarms import find_alarms
from routeplane.columns import stored_rows
from routeplane.coverage import Coverage
from routeplane.errors import ErrorKind, FormatError, Problem, UsageError
from routeplane.schema import StreamHeader
from routeplane.stream import IpcReader, StreamReport, open_stream
from routeplane.stream.protocol import Quarantined
from routeplane.validate import find_problems

__all__ = ["StreamCheck", "StreamSummary", "check_stream", "summarise_stream"]

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
            "model": spec.model,
            "num_experts": spec.num_experts,
            "top_k": spec.top_k,
            "layers": spec.num_layers,
            "layer_ids": list(spec.layer_ids),
            "token_columns": [name for name, _ in self.header.columns],
            "batches": self.report.batches,
            "records": self.report.records,
            "tokens": self.report.tokens,
            "coverage": {state: count for state, count in self.report.coverage.rows.items() if count},
            "missing_share": self.report.coverage.missing_share,
            "quarantined": len(self.report.quarantined),
            "complete": self.complete,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamCheck:
    """The verdict on a stream, with every problem that was found."""

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
            found += find_alarms(
                record.routes,
                record.spec,
                token_ids=record.token_ids[record.routes_start :],
                first_token=record.routes_start,
                sample=record.sample_id,
            )
    except FormatError as error:
        found.append(Problem(kind=error.kind, message=error.message))
    return found


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
