"""What a stream holds and what is wrong with it, as values that the command line prints.

``summarise_stream`` walks message headers; ``check_stream`` reads every record, goes on after a bad one, and lists all
problems with sample, token and layer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from routeplane.coverage import Coverage
from routeplane.errors import ErrorKind, FormatError, Problem, UsageError
from routeplane.schema import StreamHeader
from routeplane.stream import IpcReader, StreamReport, open_stream
from routeplane.validate import find_alarms

__all__ = ["StreamCheck", "StreamSummary", "check_stream", "summarise_stream"]


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
    """Read and verify every record, and go on after a bad one.

    Raises FormatError where not even the header is readable, OSError where the file is not.
    """
    found: list[Problem] = []
    with _open(path, verify=True) as reader:
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
        report = reader.report()
    if report.truncated:
        found.append(Problem(kind=ErrorKind.TRUNCATED, message="expected a trailer, got the end of the stream"))
    return StreamCheck(
        problems=(*_quarantined(report), *found),
        records=report.records,
        tokens=report.tokens,
        coverage=report.coverage,
    )


def _quarantined(report: StreamReport) -> Iterator[Problem]:
    for item in report.quarantined:
        sample = None if item.key is None else item.key.sample_id
        if not item.error.problems:
            yield Problem(kind=item.error.kind, message=f"record {item.index}: {item.error.message}", sample=sample)
        for problem in item.error.problems:
            yield problem if problem.sample is not None else replace(problem, sample=sample)


def _open(path: str | os.PathLike[str], *, verify: bool) -> IpcReader:
    reader = open_stream(path, on_truncated="keep", on_corrupt="quarantine", verify=verify)
    if not isinstance(reader, IpcReader):
        raise UsageError(f"expected the path of a stream, got {path!r}", kind=ErrorKind.ARGUMENT)
    return reader
