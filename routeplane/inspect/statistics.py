"""What the routes of a run look like: counts that merge, and what follows from them.

``RouteStatistics`` is a value: tables of counts, made in one pass by ``collect``, added up by ``merge`` across files,
ranks and workers, so that every partition of the data gives the same numbers. Memory does not grow with the data: the
tables (L * E int64 for each kind and weights version) and one record. Knows no file.

Rows are counted by functions that add to tables in place; compiled loops do it where numba is installed, numpy says
the same. Measures use natural logarithms. Layers of fewer experts than the widest are padded with experts that do not
exist: ``experts_L`` says how many do.

Axes: S tokens, L captured layers, K top-k slots, E experts (the widest layer's), P bins of absolute position, H powers
of two.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from routeplane.errors import ErrorKind, UsageError, check_type
from routeplane.record.counts import Counts, add_by_key, rule
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.spans import PRESENT_STATES, Capture, Coverage, Span, SpanKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.spec import RouteSpec

__all__ = [
    "KIND_NAMES",
    "OVERLAP_EVERY",
    "POSITION_BIN",
    "SAME",
    "TABLE",
    "Collector",
    "Drift",
    "GroupKey",
    "RouteStatistics",
    "Run",
    "WorstSample",
    "collect",
    "count_load",
    "count_overlap",
    "dead_experts",
    "divergence",
    "effective_experts",
    "entropy",
    "gini",
    "imbalance",
    "plain_load",
    "plain_overlap",
    "plain_shared",
    "shared_ids",
    "shares",
]

# Rows that numpy compares at once: K * K bytes for each row and layer.
_BLOCK_TOKENS = 256


def count_load(routes_SLK: NDArray[np.int16], load_LE: NDArray[np.int64], *, rows_L: NDArray[np.int64]) -> None:
    """Add every id of the present rows to ``load_LE`` and their number to ``rows_L``, in place.

    ``routes_SLK``: legal rows, those that are MISSING counted nowhere; only read.
    """
    kernel = _kernel()
    (plain_load if kernel is None else kernel.count_load)(routes_SLK, load_LE, rows_L=rows_L)


def count_overlap(
    routes_SLK: NDArray[np.int16],
    *,
    shared_L: NDArray[np.int64],
    neighbours_L: NDArray[np.int64],
    repeats_S: NDArray[np.bool_],
    first: int,
    every: int,
) -> None:
    """Add what neighbouring rows share, in place; the rows are one sequence.

    ``shared_L``: ids that the row before, of the same layer, holds too, over the ``neighbours_L`` rows of which both
    are present; of tokens ``first``, ``first + every`` and so on. ``repeats_S`` is set where the rows of a token are,
    as sets, in all layers those of the token before it; of every token.
    """
    kernel = _kernel()
    count = plain_overlap if kernel is None else kernel.count_overlap
    count(routes_SLK, shared_L=shared_L, neighbours_L=neighbours_L, repeats_S=repeats_S, first=first, every=every)


def shared_ids(left_SLK: NDArray[np.int16], right_SLK: NDArray[np.int16]) -> NDArray[np.int32]:
    """How many ids rows at the same place share, int32 ``[S, L]`` of its own; both arrays hold present, legal rows.

    A place where either row is MISSING gives a number without meaning.
    """
    kernel = _kernel()
    return plain_shared(left_SLK, right_SLK) if kernel is None else kernel.shared_ids(left_SLK, right_SLK)


@cache
def _kernel() -> Any:
    """The module of compiled loops, loaded when first asked for; None where numba is not installed."""
    try:
        from routeplane.inspect import tally_kernel
    except ImportError:
        return None
    return tally_kernel


def plain_load(routes_SLK: NDArray[np.int16], load_LE: NDArray[np.int64], *, rows_L: NDArray[np.int64]) -> None:
    """``count_load`` in numpy."""
    present_SL = routes_SLK[:, :, 0] >= 0
    rows_L += present_SL.sum(axis=0)
    for layer in range(routes_SLK.shape[1]):
        ids = routes_SLK[present_SL[:, layer], layer].ravel()
        load_LE[layer] += np.bincount(ids, minlength=load_LE.shape[1])


def plain_overlap(
    routes_SLK: NDArray[np.int16],
    *,
    shared_L: NDArray[np.int64],
    neighbours_L: NDArray[np.int64],
    repeats_S: NDArray[np.bool_],
    first: int,
    every: int,
) -> None:
    """``count_overlap`` in numpy."""
    tokens, _, slots = routes_SLK.shape
    present_SL = routes_SLK[:, :, 0] >= 0
    for begin in range(1, tokens, _BLOCK_TOKENS):
        here = slice(begin, min(begin + _BLOCK_TOKENS, tokens))
        before = slice(begin - 1, here.stop - 1)
        same_SL = plain_shared(routes_SLK[here], routes_SLK[before])
        both_SL = present_SL[here] & present_SL[before]
        repeats_S[here] = ((same_SL == slots) & both_SL).all(axis=1)
        numbers = np.arange(begin, here.stop)
        counted = (numbers >= first) & ((numbers - first) % every == 0)
        shared_L += (same_SL * both_SL)[counted].sum(axis=0)
        neighbours_L += both_SL[counted].sum(axis=0)


def plain_shared(left_SLK: NDArray[np.int16], right_SLK: NDArray[np.int16]) -> NDArray[np.int32]:
    """``shared_ids`` in numpy: K * K comparisons for each row."""
    shared_SL = np.empty(left_SLK.shape[:2], dtype=np.int32)
    for begin in range(0, len(left_SLK), _BLOCK_TOKENS):
        here = slice(begin, begin + _BLOCK_TOKENS)
        shared_SL[here] = (left_SLK[here, :, :, None] == right_SLK[here, :, None, :]).any(axis=3).sum(axis=2)
    return shared_SL


#: Kinds of span, in the order of tables.
KIND_NAMES: tuple[SpanKind, ...] = ("prompt", "generation")
#: Tokens of one bin of absolute position, and how many bins there are; the last is open.
POSITION_BIN, POSITION_BINS = 16, 8192
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
    """A record and how many of its fed rows are not there in every layer; ``[token, stop)``: the first of these."""

    key: RecordKey
    missing: int
    tokens: int
    token: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """How far the load of a layer moved from one weights version to the next: Jensen-Shannon divergence in nats."""

    before: int
    after: int
    divergence_L: NDArray[np.float64]


def _empty() -> Mapping[Any, Any]:
    return MappingProxyType({})


def _agreed(left: Any, right: Any) -> Any:
    """Merge what two parts must have in common. Raises UsageError (ARGUMENT) where it differs."""
    if left != right:
        raise UsageError(f"expected parts that agree, got {left} and {right}", kind=ErrorKind.ARGUMENT)
    return left


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
    return MappingProxyType(
        {kind: dict(add_by_key(left.get(kind, {}), right.get(kind, {}))) for kind in {**left, **right}}
    )


def _worst_of_both(left: tuple[WorstSample, ...], right: tuple[WorstSample, ...]) -> tuple[WorstSample, ...]:
    return worst_of((*left, *right))


def _longest(left: Run | None, right: Run | None) -> Run | None:
    return max((run for run in (left, right) if run is not None), default=None)


#: Fields that no logger takes as they are: counts that add up, and what parts must have in common.
TABLE, SAME = rule(scalar=None), rule(scalar=None, merge=_agreed)


@dataclass(frozen=True, kw_only=True, eq=False)
class RouteStatistics(Counts):
    """Counts over records of one spec. ``collect`` makes it; arrays are its own and read-only.

    ``load``: for each kind and weights version int64 ``[L, E]``, how often each expert was chosen; ``rows``: int64
    ``[L]``, of how many present rows. ``states``: for each kind rows by capture state, in tokens. ``shared_L`` of
    ``neighbours_L * K`` ids: of neighbouring rows, those that the row before holds too, counted on every
    ``OVERLAP_EVERY``-th token. ``runs_H[h]``: runs of equal rows in all layers of a
    length in ``[2**h, 2**(h+1))``, from 2 on. ``positions_P2``: tokens with all their rows, and fed ones without, by
    absolute position.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec()
    >>> record = watermarked_record(0, num_tokens=3, spec=spec)
    >>> collect([record], spec).merge(collect([record], spec)).coverage.records
    2
    """

    SCOPE: ClassVar[str] = "statistics_"

    spec: RouteSpec = field(metadata=SAME)
    coverage: Coverage = field(default_factory=Coverage)
    states: Mapping[SpanKind, Mapping[str, int]] = field(
        metadata=rule(scalar=None, merge=_add_counts), default_factory=_empty
    )
    load: Mapping[GroupKey, NDArray[np.int64]] = field(
        metadata=rule(scalar=None, merge=_add_arrays), default_factory=_empty
    )
    rows: Mapping[GroupKey, NDArray[np.int64]] = field(
        metadata=rule(scalar=None, merge=_add_arrays), default_factory=_empty
    )
    shared_L: NDArray[np.int64] = field(metadata=TABLE)
    neighbours_L: NDArray[np.int64] = field(metadata=TABLE)
    runs_H: NDArray[np.int64] = field(metadata=TABLE)
    longest_run: Run | None = field(metadata=rule(scalar=None, merge=_longest), default=None)
    positions_P2: NDArray[np.int64] = field(metadata=TABLE)
    worst: tuple[WorstSample, ...] = field(metadata=rule(scalar=None, merge=_worst_of_both), default=())

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
                divergence_L=divergence(self.load_of(version=before), self.load_of(version=after)),
            )
            for before, after in itertools.pairwise(versions)
        )

    def __repr__(self) -> str:
        counts = f"{self.coverage.records} records, {self.coverage.total} tokens"
        return f"RouteStatistics({counts}, {self.coverage.missing_share:.2%} missing, {self.spec!r})"

    # ---- for people and loggers -------------------------------------------------------------------------------------

    def layers(self) -> list[dict[str, Any]]:
        """One JSON-ready row for each layer: what a table shows."""
        load_LE = self.load_of()
        columns = {
            "rows": sum(self.rows.values(), np.zeros(self.spec.num_layers, dtype=np.int64)),
            "experts": self.experts_L,
            "dead": dead_experts(load_LE, self.experts_L),
            "effective": effective_experts(load_LE),
            "entropy": entropy(load_LE),
            "imbalance": imbalance(load_LE, self.experts_L),
            "gini": gini(load_LE, self.experts_L),
            "overlap": self.overlap_L,
            "prompt_vs_generation": divergence(self.load_of(kind="prompt"), self.load_of(kind="generation")),
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
                "longest": None if self.longest_run is None else asdict(self.longest_run),
            },
            "worst": [{**asdict(worst), "key": list(worst.key)} for worst in self.worst],
        }

    def derived(self) -> dict[str, float]:
        """The layers' extremes, for a metrics logger."""
        load_LE = self.load_of()
        return {
            "dead_experts": float(dead_experts(load_LE, self.experts_L).sum()),
            "effective_min": float(effective_experts(load_LE).min()),
            "imbalance_max": float(imbalance(load_LE, self.experts_L).max()),
            "overlap_mean": float(self.overlap_L.mean()),
            "longest_run": float(self.longest_run.length if self.longest_run else 0),
            "drift_max": max((float(drift.divergence_L.max()) for drift in self.drift()), default=0.0),
        }


# ----------------------------------------------------------------------------------------------------------------------
# One pass over records
# ----------------------------------------------------------------------------------------------------------------------


#: Every how many tokens the overlap with the row before is counted, which costs more than reading the row does.
OVERLAP_EVERY = 4


def collect(records: Iterable[RouteRecord], spec: RouteSpec) -> RouteStatistics:
    """Statistics of ``records``, any iterable of them: a reader, an archive's values, a list.

    ``spec``: theirs. Raises SpecError for a record of another spec, and what the iteration raises.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec(layers=(1, 2))
    >>> records = [watermarked_record(index, num_tokens=8, spec=spec) for index in range(3)]
    >>> found = collect(records, spec)
    >>> found.coverage.records, found.overlap_L.shape
    (3, (2,))
    """
    collector = Collector(spec)
    for record in records:
        collector.add(record)
    return collector.result()


class Collector:
    """Counts records as they come; ``result()`` is what passed so far, and counting may go on after it.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec(layers=(1, 2))
    >>> records = [watermarked_record(index, num_tokens=8, spec=spec) for index in range(3)]
    >>> collector = Collector(spec)
    >>> for record in records:
    ...     collector.add(record)
    >>> collector.result().coverage.total
    24
    """

    def __init__(self, spec: RouteSpec) -> None:
        self._spec = spec
        self._width = max(spec.experts_per_layer)
        self._coverage = Coverage()
        self._states: dict[SpanKind, dict[str, int]] = {}
        self._load: dict[GroupKey, NDArray[np.int64]] = {}
        self._rows: dict[GroupKey, NDArray[np.int64]] = {}
        self._shared_L = np.zeros(spec.num_layers, dtype=np.int64)
        self._neighbours_L = np.zeros(spec.num_layers, dtype=np.int64)
        self._runs_H = np.zeros(64, dtype=np.int64)
        self._longest: Run | None = None
        self._positions_P2 = np.zeros((POSITION_BINS, 2), dtype=np.int64)
        self._worst: tuple[WorstSample, ...] = ()

    def add(self, record: RouteRecord) -> None:
        """Count one record; rows that stand in another record (``prefix``) are counted there. Raises SpecError."""
        check_type(record, RouteRecord, expected="a RouteRecord")
        self._spec.require_same_geometry(record.spec, where=f"sample {record.sample_id}")
        start = record.routes_start
        for begin, end, span, capture in _pieces(record):
            self._count_states(span.kind, capture.state, end - begin)
            self._count_positions(begin, end, capture)
            key = (span.kind, capture.weights_version)
            load_LE, rows_L = self._tables(key)
            count_load(record.routes[begin - start : end - start], load_LE, rows_L=rows_L)
        self._count_overlap(record)
        coverage = record.coverage()
        self._coverage = self._coverage.merge(coverage)
        if coverage.missing:
            self._worst = worst_of((*self._worst, _worst(record, coverage.missing)))

    def result(self) -> RouteStatistics:
        """The counts so far, as a value with arrays of its own."""
        return RouteStatistics(
            spec=self._spec,
            coverage=self._coverage,
            states={kind: dict(counts) for kind, counts in self._states.items()},
            load={key: _frozen(load_LE) for key, load_LE in self._load.items()},
            rows={key: _frozen(rows_L) for key, rows_L in self._rows.items()},
            shared_L=_frozen(self._shared_L),
            neighbours_L=_frozen(self._neighbours_L),
            runs_H=_frozen(self._runs_H),
            longest_run=self._longest,
            positions_P2=_frozen(self._positions_P2),
            worst=self._worst,
        )

    def _tables(self, key: GroupKey) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if key not in self._load:
            self._load[key] = np.zeros((self._spec.num_layers, self._width), dtype=np.int64)
            self._rows[key] = np.zeros(self._spec.num_layers, dtype=np.int64)
        return self._load[key], self._rows[key]

    def _count_states(self, kind: SpanKind, state: str, tokens: int) -> None:
        counts = self._states.setdefault(kind, {})
        counts[state] = counts.get(state, 0) + tokens

    def _count_positions(self, begin: int, end: int, capture: Capture) -> None:
        if capture.state == "not_fed":
            return
        column = 0 if capture.state in PRESENT_STATES else 1
        bins = np.minimum(np.arange(begin, end) // POSITION_BIN, POSITION_BINS - 1)
        self._positions_P2[:, column] += np.bincount(bins, minlength=POSITION_BINS)

    def _count_overlap(self, record: RouteRecord) -> None:
        repeats_S = np.zeros(len(record.routes), dtype=np.bool_)
        count_overlap(
            record.routes,
            shared_L=self._shared_L,
            neighbours_L=self._neighbours_L,
            repeats_S=repeats_S,
            first=-record.routes_start % OVERLAP_EVERY,
            every=OVERLAP_EVERY,
        )
        # a run of n equal rows is n - 1 rows that equal the one before, in all layers; equal tokens have equal rows
        # honestly
        own_S = record.row_token_ids
        repeats_S[1:] &= own_S[1:] != own_S[:-1]
        if not repeats_S.any():
            return
        edges = np.flatnonzero(np.diff(np.concatenate([[False], repeats_S, [False]]).astype(np.int8)))
        starts, lengths = edges[::2], edges[1::2] - edges[::2] + 1
        self._runs_H += np.bincount(np.log2(lengths).astype(np.int64), minlength=64)
        best = int(lengths.argmax())
        run = Run(length=int(lengths[best]), sample=record.sample_id, token=record.routes_start + int(starts[best]) - 1)
        self._longest = run if self._longest is None else max(self._longest, run)


def _worst(record: RouteRecord, missing: int) -> WorstSample:
    absent = [
        (capture.start, capture.stop)
        for capture in record.captures
        if capture.state not in PRESENT_STATES and capture.state != "not_fed"
    ]
    token, stop = absent[0]
    for start, end in absent[1:]:
        if start == stop:
            stop = end
    return WorstSample(key=record.key, missing=missing, tokens=record.num_tokens, token=token, stop=stop)


def _pieces(record: RouteRecord) -> Iterator[tuple[int, int, Span, Capture]]:
    """``[begin, end)`` of a record's own rows with one span and one capture each, in order, in absolute positions."""
    spans, captures = iter(record.spans), iter(record.captures)
    span, capture = next(spans), next(captures)
    at = 0
    while True:
        end = min(span.stop, capture.stop)
        if end > record.routes_start:
            yield max(at, record.routes_start), end, span, capture
        at = end
        if at == record.num_tokens:
            return
        span = next(spans) if span.stop == at else span
        capture = next(captures) if capture.stop == at else capture


def _frozen(array: NDArray[np.int64]) -> NDArray[np.int64]:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


# ----------------------------------------------------------------------------------------------------------------------
# Measures of a load
# ----------------------------------------------------------------------------------------------------------------------


def shares(load_LE: NDArray[np.int64]) -> NDArray[np.float64]:
    """Each expert's share of its layer's load; zeros for a layer without any."""
    total_L1 = load_LE.sum(axis=-1, keepdims=True)
    return np.asarray(load_LE / np.where(total_L1 > 0, total_L1, 1))


def entropy(load_LE: NDArray[np.int64]) -> NDArray[np.float64]:
    """Entropy of each layer's load in nats; 0.0 for a layer without any."""
    share_LE = shares(load_LE)
    return np.asarray(-(share_LE * np.log(np.where(share_LE > 0, share_LE, 1.0))).sum(axis=-1))


def effective_experts(load_LE: NDArray[np.int64]) -> NDArray[np.float64]:
    """``exp(entropy)``: how many equally used experts would have it. 0.0 for a layer without any load."""
    return np.asarray(np.where(load_LE.sum(axis=-1) > 0, np.exp(entropy(load_LE)), 0.0))


def dead_experts(load_LE: NDArray[np.int64], experts_L: NDArray[np.int64]) -> NDArray[np.int64]:
    """Experts of each layer that were never chosen; 0 for a layer without any load, of which nothing is known."""
    used_L = (load_LE > 0).sum(axis=-1)
    return np.asarray(np.where(used_L > 0, experts_L - used_L, 0))


def imbalance(load_LE: NDArray[np.int64], experts_L: NDArray[np.int64]) -> NDArray[np.float64]:
    """Largest load over the mean load of each layer; 1.0 is balance, and what a layer without any load has."""
    mean_L = load_LE.sum(axis=-1) / experts_L
    return np.asarray(np.where(mean_L > 0, load_LE.max(axis=-1) / np.where(mean_L > 0, mean_L, 1.0), 1.0))


def gini(load_LE: NDArray[np.int64], experts_L: NDArray[np.int64]) -> NDArray[np.float64]:
    """Gini coefficient of each layer's load: 0.0 where all experts have the same, near 1.0 where one has all."""
    ascending_LE = np.sort(load_LE, axis=-1)
    padding_L = load_LE.shape[-1] - experts_L  # they sort to the front, with a load of 0
    rank_LE = np.arange(1, load_LE.shape[-1] + 1) - padding_L[:, None]
    total_L = load_LE.sum(axis=-1)
    weighted_L = (np.where(rank_LE > 0, rank_LE, 0) * ascending_LE).sum(axis=-1)
    return np.asarray(
        np.where(
            total_L > 0,
            2 * weighted_L / (experts_L * np.where(total_L > 0, total_L, 1)) - (experts_L + 1) / experts_L,
            0.0,
        )
    )


def divergence(load_LE: NDArray[np.int64], other_LE: NDArray[np.int64]) -> NDArray[np.float64]:
    """Jensen-Shannon divergence of two loads, layer by layer, in nats: 0.0 for equal shares, log 2 for disjoint ones.

    0.0 where either has no load: nothing is known of it.
    """
    left_LE, right_LE = shares(load_LE), shares(other_LE)
    middle_LE = (left_LE + right_LE) / 2
    known_L = (load_LE.sum(axis=-1) > 0) & (other_LE.sum(axis=-1) > 0)
    parts = [
        (share_LE * np.log(np.where(share_LE > 0, share_LE, 1.0) / np.where(middle_LE > 0, middle_LE, 1.0))).sum(
            axis=-1
        )
        for share_LE in (left_LE, right_LE)
    ]
    return np.asarray(np.where(known_L, np.maximum((parts[0] + parts[1]) / 2, 0.0), 0.0))
