"""What a reader does with what is wrong, and what it reports: read policy, quarantined records, counts.

Pure values; no IO. Streams, carriers and archives share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from routeplane.errors import DataError, ErrorKind, Problem, UsageError
from routeplane.record.coverage import Coverage
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.spans import STATES

__all__ = ["MAX_ALARMS", "Quarantined", "ReadPolicy", "RecordCounts", "StreamReport"]

#: Alarms that a report keeps word for word; the rest are counted.
MAX_ALARMS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadPolicy:
    """What a reader does with what is wrong. ``max_missing``: largest share of fed rows that may be absent, or None."""

    on_truncated: Literal["raise", "keep"] = "raise"
    on_corrupt: Literal["raise", "quarantine"] = "raise"
    on_alarm: Literal["count", "raise", "ignore"] = "count"
    max_missing: float | None = None
    verify: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (
            ("on_truncated", ("raise", "keep")),
            ("on_corrupt", ("raise", "quarantine")),
            ("on_alarm", ("count", "raise", "ignore")),
        ):
            if getattr(self, name) not in allowed:
                raise UsageError(f"expected {name} of {allowed}, got {getattr(self, name)!r}", kind=ErrorKind.ARGUMENT)
        if self.max_missing is not None and not 0.0 <= self.max_missing <= 1.0:
            raise UsageError(f"expected max_missing in [0, 1], got {self.max_missing}", kind=ErrorKind.ARGUMENT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantined:
    """A record set aside, under the key it claims. ``index`` counts records of the stream from 0; ``raw`` is an Arrow
    IPC stream of its one row as it came, in memory of its own.

    ``yielded``: whether a copy with every row MISSING took its place; a record whose very shape is unreadable has none.
    """

    index: int
    key: RecordKey
    error: DataError
    raw: bytes
    yielded: bool


class RecordCounts:
    """Records as they pass, counted without a report for each; ``StreamReport.with_counts`` makes one."""

    def __init__(self) -> None:
        self.records = self.tokens = 0
        self._rows: dict[str, int] = dict.fromkeys(STATES, 0)

    def add(self, record: RouteRecord) -> None:
        """Count one record."""
        self.records += 1
        self.tokens += record.num_tokens
        for capture in record.captures:
            self._rows[capture.state] += capture.stop - capture.start

    def coverage(self) -> Coverage:
        """Rows by capture state."""
        return Coverage(records=self.records, rows=MappingProxyType(dict(self._rows)))


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamReport:
    """What a reader saw so far."""

    batches: int = 0
    records: int = 0
    tokens: int = 0
    quarantined: tuple[Quarantined, ...] = ()
    alarm_count: int = 0
    alarms: tuple[Problem, ...] = ()  # the first MAX_ALARMS of them
    outside: int = 0  # records with no token in the selected range
    truncated: bool = False
    complete: bool = False  # the trailer was reached and agrees
    coverage: Coverage = field(default_factory=Coverage)

    def with_record(self, record: RouteRecord) -> StreamReport:
        """The report after one more record."""
        return replace(
            self,
            records=self.records + 1,
            tokens=self.tokens + record.num_tokens,
            coverage=self.coverage.merge(record.coverage()),
        )

    def with_counts(self, counts: RecordCounts) -> StreamReport:
        """The report after the records that were counted."""
        if counts.records == 0:
            return self
        return replace(
            self,
            records=self.records + counts.records,
            tokens=self.tokens + counts.tokens,
            coverage=self.coverage.merge(counts.coverage()),
        )

    def with_alarms(self, found: Sequence[Problem]) -> StreamReport:
        """The report after some more alarms; all are counted, the first are kept."""
        if not found:
            return self
        kept = (*self.alarms, *found)[:MAX_ALARMS]
        return replace(self, alarm_count=self.alarm_count + len(found), alarms=kept)

    def merge(self, other: StreamReport) -> StreamReport:
        """The counts of both; truncated if either is, complete if both are."""
        return StreamReport(
            batches=self.batches + other.batches,
            records=self.records + other.records,
            tokens=self.tokens + other.tokens,
            quarantined=self.quarantined + other.quarantined,
            alarm_count=self.alarm_count + other.alarm_count,
            alarms=(*self.alarms, *other.alarms)[:MAX_ALARMS],
            outside=self.outside + other.outside,
            truncated=self.truncated or other.truncated,
            complete=self.complete and other.complete,
            coverage=self.coverage.merge(other.coverage),
        )

    def scalars(self, *, prefix: str = "routeplane/") -> dict[str, float]:
        """A flat dict with stable names for a metrics logger."""
        return {
            **self.coverage.scalars(prefix=f"{prefix}stream_"),
            f"{prefix}stream_batches": float(self.batches),
            f"{prefix}stream_tokens": float(self.tokens),
            f"{prefix}stream_quarantined": float(len(self.quarantined)),
            f"{prefix}stream_alarms": float(self.alarm_count),
            f"{prefix}stream_outside_selection": float(self.outside),
            f"{prefix}stream_truncated": float(self.truncated),
        }
