"""What the routes of a run look like: counts that merge, and what follows from them.

``RouteStatistics`` is a value: tables of counts, made in one pass by ``collect``, added up by ``merge`` across files,
ranks and workers, so that any way of cutting the data gives the same numbers. Knows no file and no picture.

Axes: L captured layers, E experts (the widest layer's), P bins of absolute position, H powers of two.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.errors import ErrorKind, UsageError
from routeplane.inspect import measures
from routeplane.record.coverage import Coverage
from routeplane.record.record import RecordKey
from routeplane.record.spans import SpanKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.spec import RouteSpec

__all__ = ["KIND_NAMES", "POSITION_BIN", "Drift", "GroupKey", "RouteStatistics", "Run", "WorstSample"]

#: Kinds of span, in the order of tables.
KIND_NAMES: tuple[SpanKind, ...] = ("prompt", "generation")
#: Tokens of one bin of absolute position, and how many bins there are; the last is open.
POSITION_BIN, POSITION_BINS = 64, 2048
#: Samples with the most missing rows that are kept by name.
MAX_WORST = 16
#: Kind of the span and weights version of the capture (None where unknown): what loads are kept apart by.
GroupKey = tuple[SpanKind, int | None]


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Run:
    """Consecutive tokens whose rows are, as sets, equal in all layers. The longest of a run of the data is kept."""

    length: int
    sample: str
    token: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstSample:
    """A record and how many of its fed rows are not there in every layer."""

    key: RecordKey
    missing: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """How far the load of a layer moved from one weights version to the next: Jensen-Shannon divergence in nats."""

    before: int
    after: int
    divergence_L: NDArray[np.float64]


def _empty() -> Mapping[Any, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, kw_only=True, eq=False)
class RouteStatistics:
    """Counts over records of one spec. ``collect`` makes it; arrays are its own and read-only.

    ``load``: for each kind and weights version int64 ``[L, E]``, how often each expert was chosen; ``rows``: int64
    ``[L]``, of how many present rows. ``states``: for each kind rows by capture state, in tokens. ``pairs_LEE``: int64,
    how often two experts stand in one row, symmetric with a zero diagonal, counted on every ``pairs_every``-th token of
    a record; empty where it is 0. ``shared_L`` of ``neighbours_L * K`` ids: of neighbouring rows, those that the row
    before holds too. ``runs_H[h]``: runs of equal rows in all layers of a length in ``[2**h, 2**(h+1))``, from 2 on.
    ``positions_P2``: tokens with all their rows, and fed ones without, by absolute position.
    """

    spec: RouteSpec
    coverage: Coverage = field(default_factory=Coverage)
    states: Mapping[SpanKind, Mapping[str, int]] = field(default_factory=_empty)
    load: Mapping[GroupKey, NDArray[np.int64]] = field(default_factory=_empty)
    rows: Mapping[GroupKey, NDArray[np.int64]] = field(default_factory=_empty)
    pairs_every: int = 0
    pairs_LEE: NDArray[np.int64]
    shared_L: NDArray[np.int64]
    neighbours_L: NDArray[np.int64]
    runs_H: NDArray[np.int64]
    longest_run: Run | None = None
    positions_P2: NDArray[np.int64]
    worst: tuple[WorstSample, ...] = ()

    # ---- tables -----------------------------------------------------------------------------------------------------

    @property
    def experts_L(self) -> NDArray[np.int64]:
        """E of each layer."""
        return np.asarray(self.spec.experts_per_layer, dtype=np.int64)

    def load_of(self, *, kind: SpanKind | None = None, version: int | None = None) -> NDArray[np.int64]:
        """Load int64 ``[L, E]`` of one kind, of one weights version, of both, or of everything."""
        total_LE = np.zeros((self.spec.num_layers, max(self.spec.experts_per_layer)), dtype=np.int64)
        for (its_kind, its_version), load_LE in self.load.items():
            if kind in (None, its_kind) and version in (None, its_version):
                total_LE += load_LE
        return total_LE

    @property
    def versions(self) -> tuple[int, ...]:
        """The weights versions that routed, in order; rows of unknown version stand under none of them."""
        return tuple(sorted({version for _, version in self.load if version is not None}))

    @property
    def overlap_L(self) -> NDArray[np.float64]:
        """Share of a row's experts that the row before holds too, by layer; 0.0 without neighbours."""
        ids_L = self.neighbours_L * self.spec.top_k
        return np.asarray(self.shared_L / np.where(ids_L > 0, ids_L, 1))

    def drift(self) -> tuple[Drift, ...]:
        """How far loads moved between weights versions that follow one another."""
        versions = self.versions
        return tuple(
            Drift(
                before=before,
                after=after,
                divergence_L=measures.divergence(self.load_of(version=before), self.load_of(version=after)),
            )
            for before, after in itertools.pairwise(versions)
        )

    def partners(self, layer_id: int, *, limit: int = 8) -> tuple[tuple[int, int, float], ...]:
        """Pairs of experts of a layer that are chosen together most, relative to chance: ``(i, j, lift)``, i < j.

        Lift is the pair's count over what independent choices of the two would give; 1.0 is chance. Pairs seen fewer
        than 8 times are left out, as chance alone lifts them. Raises SpecError for a layer that is not there.
        """
        slot = self.spec.slot(layer_id)
        if self.pairs_LEE.size == 0:
            return ()
        pairs_EE = self.pairs_LEE[slot]
        row_sums = pairs_EE.sum(axis=1)
        total = max(int(pairs_EE.sum()), 1)
        expected = row_sums[:, None] * row_sums[None, :] / total
        lift = np.where((pairs_EE >= 8) & (expected > 0), pairs_EE / np.where(expected > 0, expected, 1.0), 0.0)
        upper = np.triu(lift, k=1)
        best = np.argsort(upper, axis=None)[::-1][:limit]
        cells = [divmod(int(cell), upper.shape[1]) for cell in best]
        return tuple((i, j, float(upper[i, j])) for i, j in cells if upper[i, j] > 0)

    # ---- putting together -------------------------------------------------------------------------------------------

    def merge(self, other: RouteStatistics) -> RouteStatistics:
        """The counts of both. Raises UsageError where specs, or the share of tokens counted in pairs, differ."""
        if self.spec != other.spec or self.pairs_every != other.pairs_every:
            raise UsageError(
                f"expected statistics of one spec and pairs_every, got {self.spec.digest}, {self.pairs_every} and "
                f"{other.spec.digest}, {other.pairs_every}",
                kind=ErrorKind.ARGUMENT,
            )
        runs = [run for run in (self.longest_run, other.longest_run) if run is not None]
        return RouteStatistics(
            spec=self.spec,
            coverage=self.coverage.merge(other.coverage),
            states=_add_counts(self.states, other.states),
            load=_add_arrays(self.load, other.load),
            rows=_add_arrays(self.rows, other.rows),
            pairs_every=self.pairs_every,
            pairs_LEE=self.pairs_LEE + other.pairs_LEE,
            shared_L=self.shared_L + other.shared_L,
            neighbours_L=self.neighbours_L + other.neighbours_L,
            runs_H=self.runs_H + other.runs_H,
            longest_run=max(runs, default=None),
            positions_P2=self.positions_P2 + other.positions_P2,
            worst=worst_of((*self.worst, *other.worst)),
        )

    # ---- for people and loggers -------------------------------------------------------------------------------------

    def layers(self) -> list[dict[str, Any]]:
        """One JSON-ready row for each layer: what a table shows."""
        load_LE = self.load_of()
        columns = {
            "rows": sum(self.rows.values(), np.zeros(self.spec.num_layers, dtype=np.int64)),
            "experts": self.experts_L,
            "dead": measures.dead_experts(load_LE, self.experts_L),
            "effective": measures.effective_experts(load_LE),
            "entropy": measures.entropy(load_LE),
            "imbalance": measures.imbalance(load_LE, self.experts_L),
            "gini": measures.gini(load_LE, self.experts_L),
            "overlap": self.overlap_L,
            "prompt_vs_generation": measures.divergence(self.load_of(kind="prompt"), self.load_of(kind="generation")),
        }
        return [
            {"layer": layer_id, **{name: round(values[slot].item(), 6) for name, values in columns.items()}}
            for slot, layer_id in enumerate(self.spec.layer_ids)
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: counts and measures, without the tables of single experts."""
        return {
            "records": self.coverage.records,
            "tokens": self.coverage.total,
            "coverage": {state: count for state, count in self.coverage.rows.items() if count},
            "missing_share": self.coverage.missing_share,
            "by_kind": {
                kind: {state: count for state, count in counts.items() if count} for kind, counts in self.states.items()
            },
            "weights_versions": list(self.versions),
            "layers": self.layers(),
            "drift": [
                {
                    "before": drift.before,
                    "after": drift.after,
                    "mean": round(float(drift.divergence_L.mean()), 6),
                    "max": round(float(drift.divergence_L.max()), 6),
                    "layer": self.spec.layer_ids[int(drift.divergence_L.argmax())],
                }
                for drift in self.drift()
            ],
            "equal_rows": {
                "runs_from": {str(2**power): int(count) for power, count in enumerate(self.runs_H) if count},
                "longest": None
                if self.longest_run is None
                else {
                    "length": self.longest_run.length,
                    "sample": self.longest_run.sample,
                    "token": self.longest_run.token,
                },
            },
            "worst": [
                {"key": list(worst.key), "missing": worst.missing, "tokens": worst.tokens} for worst in self.worst
            ],
        }

    def scalars(self, *, prefix: str = "routeplane/") -> dict[str, float]:
        """A flat dict with stable names for a metrics logger: coverage, and the layers' extremes."""
        load_LE = self.load_of()
        return {
            **self.coverage.scalars(prefix=f"{prefix}statistics_"),
            f"{prefix}statistics_dead_experts": float(measures.dead_experts(load_LE, self.experts_L).sum()),
            f"{prefix}statistics_effective_min": float(measures.effective_experts(load_LE).min()),
            f"{prefix}statistics_imbalance_max": float(measures.imbalance(load_LE, self.experts_L).max()),
            f"{prefix}statistics_overlap_mean": float(self.overlap_L.mean()),
            f"{prefix}statistics_longest_run": float(self.longest_run.length if self.longest_run else 0),
            f"{prefix}statistics_drift_max": max((float(d.divergence_L.max()) for d in self.drift()), default=0.0),
        }


def worst_of(samples: tuple[WorstSample, ...]) -> tuple[WorstSample, ...]:
    """Those with the most missing rows, most first; equal ones by key, so that the order of merging shows nowhere."""
    return tuple(sorted(samples, key=lambda sample: (-sample.missing, sample.key))[:MAX_WORST])


def _add_arrays(
    left: Mapping[GroupKey, NDArray[np.int64]], right: Mapping[GroupKey, NDArray[np.int64]]
) -> Mapping[GroupKey, NDArray[np.int64]]:
    merged = dict(left)
    for key, array in right.items():
        merged[key] = merged[key] + array if key in merged else array
    return MappingProxyType(merged)


def _add_counts(
    left: Mapping[SpanKind, Mapping[str, int]], right: Mapping[SpanKind, Mapping[str, int]]
) -> Mapping[SpanKind, Mapping[str, int]]:
    merged: dict[SpanKind, dict[str, int]] = {}
    for part in (left, right):
        for kind, counts in part.items():
            mine = merged.setdefault(kind, {})
            for state, count in counts.items():
                mine[state] = mine.get(state, 0) + count
    return MappingProxyType(merged)
