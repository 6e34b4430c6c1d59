"""What is wrong first: what stands out in the statistics of a run, worst first, each with where to look.

Thresholds are arguments with their reasons; a finding is a hint to a person, never a verdict that stops a run (those
are ``validate``'s and ``admit``'s). Knows statistics and differences, no file and no picture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from routeplane.inspect.compare import RouteDiff
from routeplane.inspect.statistics import RouteStatistics, dead_experts

__all__ = ["Finding", "find_findings"]

#: Share of missing rows from which replay leaves a noticeable part of a batch to the live router.
MISSING_SHARE = 0.01
#: Tokens of equal rows in all layers that healthy captures do not show (``alarms``: greedy decoding repeats 2).
LONGEST_RUN = 32
#: Mean rows for each expert below which an unused one is chance: the chance of none is exp(-20) at 20 rows.
ROWS_PER_EXPERT = 20
#: Jensen-Shannon divergence (nats) of a layer's load between two weights versions: 0 is none, 0.69 is disjoint.
DRIFT = 0.05

_ORDER = ("error", "warning", "note")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing to look at. ``where``: what to give to ``routeplane explain``, or the layers concerned."""

    severity: Literal["error", "warning", "note"]
    title: str
    detail: str
    where: str = ""

    def to_dict(self) -> dict[str, str]:
        """JSON-ready."""
        return {"severity": self.severity, "title": self.title, "detail": self.detail, "where": self.where}


def find_findings(statistics: RouteStatistics, *, diff: RouteDiff | None = None) -> list[Finding]:
    """What stands out, errors first; empty for a healthy run."""
    found = [
        *_missing(statistics),
        *_constant(statistics),
        *_runs(statistics),
        *_dead(statistics),
        *_drift(statistics),
        *(_differences(diff) if diff is not None else []),
    ]
    return sorted(found, key=lambda finding: _ORDER.index(finding.severity))


def _missing(statistics: RouteStatistics) -> list[Finding]:
    coverage = statistics.coverage
    if coverage.total == 0:
        return [Finding(severity="error", title="nothing was recorded", detail="the source holds no token")]
    if not coverage.missing:
        return []
    states = ", ".join(
        f"{state} {count}"
        for state, count in coverage.rows.items()
        if count and state not in ("captured", "cached", "not_fed")
    )
    worst = statistics.worst[0]
    return [
        Finding(
            severity="error" if coverage.missing_share >= MISSING_SHARE else "warning",
            title=f"{coverage.missing} rows are missing ({coverage.missing_share:.2%} of those that were fed)",
            detail=f"by state: {states}; the trainer's own router decides there",
            where=f"sample {worst.key.sample_id}: {worst.missing} of {worst.tokens} tokens",
        )
    ]


def _constant(statistics: RouteStatistics) -> list[Finding]:
    """A layer that shows no more experts than one row holds, over many rows: a kernel that writes one buffer."""
    load_LE = statistics.load_of()
    top_k = statistics.spec.top_k
    layers = [
        layer_id
        for slot, layer_id in enumerate(statistics.spec.layer_ids)
        if (load_LE[slot] > 0).sum() == top_k < statistics.experts_L[slot]
        and load_LE[slot].sum() >= ROWS_PER_EXPERT * statistics.experts_L[slot]
    ]
    if not layers:
        return []
    return [
        Finding(
            severity="error",
            title=f"{len(layers)} layers always choose the same {top_k} experts",
            detail="a healthy router does not; the capture of these layers is probably not connected",
            where=f"layers {_few(layers)}",
        )
    ]


def _runs(statistics: RouteStatistics) -> list[Finding]:
    run = statistics.longest_run
    if run is None or run.length <= LONGEST_RUN:
        return []
    return [
        Finding(
            severity="warning",
            title=f"{run.length} consecutive tokens have equal rows in all layers",
            detail="a stale buffer, unless the tokens are equal too",
            where=f"sample {run.sample}, from token {run.token}",
        )
    ]


def _dead(statistics: RouteStatistics) -> list[Finding]:
    load_LE = statistics.load_of()
    dead_L = dead_experts(load_LE, statistics.experts_L)
    enough_L = load_LE.sum(axis=1) >= ROWS_PER_EXPERT * statistics.experts_L
    layers = [layer_id for slot, layer_id in enumerate(statistics.spec.layer_ids) if dead_L[slot] and enough_L[slot]]
    if not layers:
        return []
    worst = int((dead_L * enough_L).argmax())
    most = f"{dead_L[worst]} of {statistics.experts_L[worst]}"
    return [
        Finding(
            severity="note",
            title=f"{int((dead_L * enough_L).sum())} experts were never chosen, in {len(layers)} layers",
            detail=f"most in layer {statistics.spec.layer_ids[worst]}: {most}",
            where=f"layers {_few(layers)}",
        )
    ]


def _drift(statistics: RouteStatistics) -> list[Finding]:
    moved = [drift for drift in statistics.drift() if drift.divergence_L.max() >= DRIFT]
    if not moved:
        return []
    largest = max(moved, key=lambda drift: float(drift.divergence_L.max()))
    layer = statistics.spec.layer_ids[int(largest.divergence_L.argmax())]
    return [
        Finding(
            severity="note",
            title=f"routing moved between weights versions ({len(moved)} of {len(statistics.drift())} steps)",
            detail=f"most from version {largest.before} to {largest.after}: {largest.divergence_L.max():.3f} nats",
            where=f"layer {layer}",
        )
    ]


def _differences(diff: RouteDiff) -> list[Finding]:
    found = []
    if diff.left_only or diff.right_only:
        keys = [key.sample_id for key in (*diff.left_only_keys, *diff.right_only_keys)]
        found.append(
            Finding(
                severity="error",
                title=f"{diff.left_only + diff.right_only} samples are on one side only",
                detail=f"{diff.left_only} here, {diff.right_only} there",
                where=f"samples {_few(keys)}",
            )
        )
    if diff.token_mismatches:
        sample = next((item for item in diff.worst if item.token_mismatch is not None), None)
        found.append(
            Finding(
                severity="error",
                title=f"{diff.token_mismatches} samples have other tokens on the two sides",
                detail="rows after the first token that differs were not compared",
                where=f"sample {sample.key.sample_id}, token {sample.token_mismatch}" if sample is not None else "",
            )
        )
    if diff.flipped_share:
        first = next((item for item in diff.worst if item.flipped), None)
        found.append(
            Finding(
                severity="warning",
                title=f"{diff.flipped_share:.2%} of the rows are other sets of experts",
                detail="a trainer without replay would train on these",
                where=f"sample {first.key.sample_id}, token {first.token}, layer {first.layer}" if first else "",
            )
        )
    return found


def _few(items: list[int] | list[str]) -> str:
    shown = ", ".join(str(item) for item in items[:8])
    return f"{shown} and {len(items) - 8} more" if len(items) > 8 else shown
