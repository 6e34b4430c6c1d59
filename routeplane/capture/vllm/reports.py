"""What the writers beside and inside an engine count. Plain values; needs no vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from routeplane.record.coverage import Coverage

__all__ = ["LedgerReport", "WritingReport"]


def _none() -> Mapping[str, int]:
    return MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerReport:
    """What a writer inside an engine did so far. ``refusals``: sequences without a record, by the kind of error."""

    records: int = 0
    skipped: int = 0  # sequences whose request asked for no capture
    refusals: Mapping[str, int] = field(default_factory=_none)
    coverage: Coverage = field(default_factory=Coverage)

    def merge(self, other: LedgerReport) -> LedgerReport:
        """The counts of both."""
        refusals = Counter(self.refusals)
        refusals.update(other.refusals)
        return LedgerReport(
            records=self.records + other.records,
            skipped=self.skipped + other.skipped,
            refusals=MappingProxyType(dict(refusals)),
            coverage=self.coverage.merge(other.coverage),
        )

    def scalars(self, *, prefix: str = "routeplane/") -> dict[str, float]:
        """A flat dict with stable names for a metrics logger."""
        return {
            f"{prefix}engine_skipped": float(self.skipped),
            f"{prefix}engine_refused": float(sum(self.refusals.values())),
            **self.coverage.scalars(prefix=f"{prefix}engine_"),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class WritingReport:
    """What a RouteWritingEngine did so far. ``rows_received``: rows that crossed from the engine, each counted each
    time; a row is one token in all layers."""

    calls: int = 0
    records: int = 0
    rows_received: int = 0
    waits: int = 0  # requests that were held back while the stream was full
    overlap_rows: int = 0  # captured twice and compared; one token in one layer
    drift_rows: int = 0  # ... and different as sets
    weight_updates: int = 0
    coverage: Coverage = field(default_factory=Coverage)

    def merge(self, other: WritingReport) -> WritingReport:
        """The counts of both."""
        names = ("calls", "records", "rows_received", "waits", "overlap_rows", "drift_rows", "weight_updates")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return WritingReport(**sums, coverage=self.coverage.merge(other.coverage))

    def scalars(self, *, prefix: str = "routeplane/") -> dict[str, float]:
        """A flat dict with stable names for a metrics logger."""
        return {
            f"{prefix}writing_calls": float(self.calls),
            f"{prefix}writing_rows_received": float(self.rows_received),
            f"{prefix}writing_waits": float(self.waits),
            f"{prefix}writing_overlap_rows": float(self.overlap_rows),
            f"{prefix}writing_drift_rows": float(self.drift_rows),
            f"{prefix}writing_weight_updates": float(self.weight_updates),
            **self.coverage.scalars(prefix=f"{prefix}writing_"),
        }
