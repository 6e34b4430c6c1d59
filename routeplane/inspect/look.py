"""What a place holds and what is wrong with it, as values that the command line prints.

``summarise`` counts, and compares no checksum; ``check`` verifies every record, goes on after a bad one, and lists all
problems with sample, token and layer. ``explain`` follows one token of one record.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

from routeplane.errors import ErrorKind, FormatError, Problem, UsageError, check_type, naming_stream, refused
from routeplane.inspect.inputs import SALVAGE, Source, damage_of, resolve
from routeplane.record.alarms import find_alarms
from routeplane.record.policy import StreamReport
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.schema import FORMAT_VERSION, StreamHeader
from routeplane.record.spans import Capture, Coverage, Span
from routeplane.record.spec import MISSING, RouteSpec

if TYPE_CHECKING:
    from routeplane.record.transfer import RecordReader

__all__ = [
    "ArchiveSummary",
    "Explanation",
    "LayerRows",
    "StreamCheck",
    "StreamSummary",
    "check",
    "explain",
    "summarise",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSummary:
    """The header and counts of a stream or Parquet file. ``damage``: what ended the reading; empty for nothing.

    Example: see ``summarise``.
    """

    path: str
    bytes: int
    header: StreamHeader
    report: StreamReport
    damage: str = ""

    @property
    def complete(self) -> bool:
        """Whether the trailer was reached and agrees."""
        return self.report.complete and not self.damage

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
            "quarantined": self.report.quarantined_count,
            "damage": self.damage,
            "complete": self.complete,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveSummary:
    """An archive's newest commit and its counts. ``runs``: records of each run, in order of saving.

    Example: see ``summarise``.
    """

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

    Example: see ``check``.
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
            "problems": [problem.to_dict() for problem in self.problems],
        }


def summarise(place: str | os.PathLike[str]) -> list[StreamSummary | ArchiveSummary]:
    """Say what each source at a place holds, as far as it can be read.

    Reads all records of a stream or Parquet file and compares no checksum; of an archive no array is read.

    Args:
        place: As in ``find_sources``: a path, a pattern, a folder of blocks, an archive, a URL, or ``-``.

    Returns:
        One summary a source.

    Raises:
        FormatError: What stands there is none of these, or its header is damaged.
        OSError: It cannot be read.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec(layers=(1, 2))
    >>> records = [watermarked_record(index, num_tokens=8, spec=spec) for index in range(3)]
    >>> import tempfile
    >>> from routeplane import new_stream
    >>> path = tempfile.mkdtemp() + "/run.arrows"
    >>> with new_stream(path, spec) as sink:
    ...     for record in records:
    ...         sink.write(record)
    >>> [summary] = summarise(path)
    >>> summary.to_dict()["records"], summary.to_dict()["tokens"], summary.complete
    (3, 24, True)
    """
    return [_summary(source) for source in resolve([place])]


def _summary(source: Source) -> StreamSummary | ArchiveSummary:
    if source.kind != "archive":
        return _summarise_file(source)
    from routeplane.archive import ARCHIVE_VERSION

    archive = source.archive()
    return ArchiveSummary(
        path=source.name,
        bytes=archive.nbytes,
        version=ARCHIVE_VERSION,
        spec=archive.spec,
        columns=tuple(dict.fromkeys(name for run in archive.runs for name, _ in archive.columns(run.name))),
        commit=archive.commit,
        runs=tuple((run.name, run.records) for run in archive.runs),
        tokens=archive.num_tokens,
        coverage=archive.coverage(),
    )


def _summarise_file(source: Source) -> StreamSummary:
    with naming_stream(source.name), source.open(policy=replace(SALVAGE, verify=False)) as reader:
        damage = ""
        try:
            for _ in reader:
                pass
        except FormatError as error:
            damage = error.message
        report = reader.report()
        return StreamSummary(
            path=source.name,
            bytes=os.stat(source.path).st_size,
            header=_header(reader),
            report=report,
            damage=damage,
        )


def _header(reader: Any) -> StreamHeader:
    header: StreamHeader = reader.header
    return header


def check(place: str | os.PathLike[str]) -> StreamCheck:
    """Read and verify everything at a place, go on after damage, and list every problem.

    Args:
        place: As in ``summarise``.

    Returns:
        The problems of all sources there, each with its source where there are several, and what was counted. A place
        that holds none of the known formats is a problem too.

    Raises:
        OSError: Nothing can be read.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec(layers=(1, 2))
    >>> records = [watermarked_record(index, num_tokens=8, spec=spec) for index in range(3)]
    >>> import tempfile
    >>> from routeplane import new_stream
    >>> path = tempfile.mkdtemp() + "/run.arrows"
    >>> with new_stream(path, spec) as sink:
    ...     for record in records:
    ...         sink.write(record)
    >>> found = check(path)
    >>> found.verdict, found.records, found.tokens
    ('valid', 3, 24)
    """
    sources = resolve([place])
    found = [_check(source) for source in sources]
    if len(found) == 1:
        return found[0]
    return StreamCheck(
        problems=tuple(
            replace(problem, message=f"{problem.message} in {source.name}")
            for source, part in zip(sources, found, strict=True)
            for problem in part.problems
        ),
        records=sum(part.records for part in found),
        tokens=sum(part.tokens for part in found),
        coverage=reduce(Coverage.merge, (part.coverage for part in found)),
    )


def _check(source: Source) -> StreamCheck:
    if source.kind != "archive":
        return _check_file(source)
    from routeplane.archive import verify

    found = verify(source.path, look=_alarms)
    return StreamCheck(
        problems=found.problems, records=found.records + found.damaged, tokens=found.tokens, coverage=found.coverage
    )


def _check_file(source: Source) -> StreamCheck:
    try:
        reader = source.open(policy=SALVAGE)
    except FormatError as error:
        problem = Problem(kind=error.kind, message=error.message)
        return StreamCheck(problems=(problem,), records=0, tokens=0, coverage=Coverage())
    with reader:
        found = _read_through(reader)
        report = reader.report()
        bad = damage_of(report, header=_header(reader), quarantine=reader.quarantine)
    return StreamCheck(
        problems=(*bad, *found),
        records=report.records,
        tokens=report.tokens,
        coverage=report.coverage,
    )


def _read_through(reader: RecordReader) -> list[Problem]:
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
        token_ids=record.row_token_ids,
        first_token=record.routes_start,
        sample=record.sample_id,
    )


# ----------------------------------------------------------------------------------------------------------------------
# One token
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRows:
    """One layer's rows around a token; ids as stored, None for a row that is MISSING or stands in another record.

    ``kept_from_before``: ids that the row before holds too; None where either is None.
    """

    layer: int
    before: tuple[int, ...] | None
    row: tuple[int, ...] | None
    after: tuple[int, ...] | None
    kept_from_before: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """What is known about one token of a record.

    ``checksum``: the record's, and whether its content agrees (``intact``). ``logprob``: of this token, governed by the
    rows of the token before. ``columns``: this token's values of further token columns.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> explain(watermarked_record(0, num_tokens=3, spec=watermarked_spec()), 1).tokens
    3
    """

    key: RecordKey
    group: str | None
    token: int
    tokens: int
    token_id: int
    span: Span
    capture: Capture
    where: str
    checksum: int
    intact: bool
    logprob: float | None
    columns: dict[str, Any]
    attributes: dict[str, str]
    layers: tuple[LayerRows, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "key": list(self.key),
            "group": self.group,
            "token": self.token,
            "tokens": self.tokens,
            "token_id": self.token_id,
            "sampled": {
                "kind": self.span.kind,
                "role": self.span.role,
                "call": self.span.call,
                "weights_version": self.span.weights_version,
                "span": [self.span.start, self.span.stop],
            },
            "captured": {
                "state": self.capture.state,
                "call": self.capture.call,
                "weights_version": self.capture.weights_version,
                "capture": [self.capture.start, self.capture.stop],
            },
            "where": self.where,
            "checksum": f"{self.checksum:016x}",
            "intact": self.intact,
            "logprob": self.logprob,
            "columns": self.columns,
            "attributes": self.attributes,
            "layers": [asdict(rows) for rows in self.layers],
        }


def explain(record: RouteRecord, token: int, *, layer_ids: tuple[int, ...] | None = None) -> Explanation:
    """Explain ``token``, an absolute position of ``record``, in all layers or those of ``layer_ids``.

    Raises UsageError (ARGUMENT) for a position outside the record, SpecError for a layer that it does not have.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec(layers=(1, 2))
    >>> records = [watermarked_record(index, num_tokens=8, spec=spec) for index in range(3)]
    >>> hop = explain(records[0], 3)
    >>> hop.capture.state, [rows.layer for rows in hop.layers]
    ('captured', [1, 2])
    """
    check_type(record, RouteRecord, expected="a RouteRecord")
    if not 0 <= token < record.num_tokens:
        raise refused(f"a token in [0, {record.num_tokens})", f"{token} @ sample {record.sample_id}")
    chosen = record.spec.layer_ids if layer_ids is None else layer_ids
    own = token - record.tokens_start
    if own < 0:
        raise UsageError(
            f"expected a token from {record.tokens_start} on (those before stand in another record), got {token} "
            f"@ sample {record.sample_id}",
            kind=ErrorKind.PREFIX,
        )
    logprob = None if record.logprobs is None else float(record.logprobs[own])
    return Explanation(
        key=record.key,
        group=record.group,
        token=token,
        tokens=record.num_tokens,
        token_id=int(record.token_ids[own]),
        span=next(span for span in record.spans if span.start <= token < span.stop),
        capture=next(capture for capture in record.captures if capture.start <= token < capture.stop),
        where=_where(record, token),
        checksum=int(record.checksum),
        intact=record.compute_checksum() == record.checksum,
        logprob=None if logprob is None or logprob != logprob else logprob,
        columns={name: values[own : own + 1].tolist()[0] for name, values in record.columns.items()},
        attributes=dict(record.attributes),
        layers=tuple(_layer_rows(record, token, layer_id) for layer_id in chosen),
    )


def _where(record: RouteRecord, token: int) -> str:
    if token >= record.routes_start:
        return f"row {token - record.routes_start} of this record"
    prefix = record.prefix
    return "no record" if prefix is None else f"record {tuple(prefix.key)}, which holds the rows before {prefix.stop}"


def _layer_rows(record: RouteRecord, token: int, layer_id: int) -> LayerRows:
    slot = record.spec.slot(layer_id)
    before, row, after = (_row(record, position, slot) for position in (token - 1, token, token + 1))
    kept = None if before is None or row is None else len(set(before) & set(row))
    return LayerRows(layer=layer_id, before=before, row=row, after=after, kept_from_before=kept)


def _row(record: RouteRecord, token: int, slot: int) -> tuple[int, ...] | None:
    if not record.routes_start <= token < record.num_tokens:
        return None
    ids = record.routes[token - record.routes_start, slot].tolist()
    return None if ids[0] == MISSING else tuple(ids)
