"""One pass over records: the counts of ``RouteStatistics``, in memory that does not grow with the data.

Owns which token of a record is counted where. Knows records and sources, not what the counts mean. Memory: the tables
(L * E int64 for each kind and weights version, L * E * E for pairs), one record, and blocks of it.

Axes: S tokens, L captured layers, K top-k slots, E experts, P bins of absolute position, H powers of two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from routeplane.errors import refused
from routeplane.inspect.statistics import (
    POSITION_BIN,
    POSITION_BINS,
    GroupKey,
    RouteStatistics,
    Run,
    WorstSample,
    worst_of,
)
from routeplane.inspect.tally import count_load, count_overlap, count_pairs
from routeplane.record.coverage import Coverage
from routeplane.record.spans import PRESENT_STATES, Capture, Span, SpanKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.record import RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = ["Collector", "collect"]

#: Bytes of the table of pairs beyond which it is left out unless asked for: 48 layers of 256 experts stay below.
MAX_PAIRS_BYTES = 64 << 20
#: Every how many tokens pairs are counted: K * (K - 1) / 2 counts a row make them the dearest statistic by far.
PAIRS_EVERY = 8


def collect(records: Iterable[RouteRecord], spec: RouteSpec, *, pairs_every: int | None = None) -> RouteStatistics:
    """Statistics of ``records``, any iterable of them: a reader, an archive's values, a list.

    ``spec``: theirs. ``pairs_every``: count pairs of experts on every n-th token of a record, 0 for not at all; the
    default is PAIRS_EVERY, or 0 where the table would pass MAX_PAIRS_BYTES. Raises SpecError for a record of another
    spec, UsageError, and what the iteration raises.
    """
    collector = Collector(spec, pairs_every=pairs_every)
    for record in records:
        collector.add(record)
    return collector.result()


class Collector:
    """Counts records as they come; ``result()`` is what passed so far, and counting may go on after it."""

    def __init__(self, spec: RouteSpec, *, pairs_every: int | None = None) -> None:
        width = max(spec.experts_per_layer)
        if pairs_every is None:
            pairs_every = PAIRS_EVERY if spec.num_layers * width * width * 8 <= MAX_PAIRS_BYTES else 0
        if pairs_every < 0:
            raise refused("pairs_every of at least 0", f"{pairs_every}")
        self._spec = spec
        self._width = width
        self._pairs_every = pairs_every
        self._coverage = Coverage()
        self._states: dict[SpanKind, dict[str, int]] = {}
        self._load: dict[GroupKey, NDArray[np.int64]] = {}
        self._rows: dict[GroupKey, NDArray[np.int64]] = {}
        pairs_shape = (spec.num_layers, width, width) if pairs_every else (0, width, width)
        self._pairs_LEE = np.zeros(pairs_shape, dtype=np.int64)
        self._shared_L = np.zeros(spec.num_layers, dtype=np.int64)
        self._neighbours_L = np.zeros(spec.num_layers, dtype=np.int64)
        self._runs_H = np.zeros(64, dtype=np.int64)
        self._longest: Run | None = None
        self._positions_P2 = np.zeros((POSITION_BINS, 2), dtype=np.int64)
        self._worst: tuple[WorstSample, ...] = ()

    def add(self, record: RouteRecord) -> None:
        """Count one record; rows that stand in another record (``prefix``) are counted there. Raises SpecError."""
        self._spec.require_same_geometry(record.spec, where=f"sample {record.sample_id}")
        start = record.routes_start
        for begin, end, span, capture in _pieces(record):
            self._count_states(span.kind, capture.state, end - begin)
            self._count_positions(begin, end, capture)
            key = (span.kind, capture.weights_version)
            load_LE, rows_L = self._tables(key)
            count_load(record.routes[begin - start : end - start], load_LE, rows_L=rows_L)
        if self._pairs_every:
            first = -start % self._pairs_every  # by absolute position, however the record is cut
            count_pairs(np.ascontiguousarray(record.routes[first :: self._pairs_every]), self._pairs_LEE)
        self._count_overlap(record)
        coverage = record.coverage()
        self._coverage = self._coverage.merge(coverage)
        if coverage.missing:
            worst = WorstSample(key=record.key, missing=coverage.missing, tokens=record.num_tokens)
            self._worst = worst_of((*self._worst, worst))

    def result(self) -> RouteStatistics:
        """The counts so far, as a value with arrays of its own."""
        return RouteStatistics(
            spec=self._spec,
            coverage=self._coverage,
            states={kind: dict(counts) for kind, counts in self._states.items()},
            load={key: _frozen(load_LE) for key, load_LE in self._load.items()},
            rows={key: _frozen(rows_L) for key, rows_L in self._rows.items()},
            pairs_every=self._pairs_every,
            pairs_LEE=_frozen(self._pairs_LEE + self._pairs_LEE.transpose(0, 2, 1)),
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
        equal_S = np.zeros(len(record.routes), dtype=np.int32)
        count_overlap(record.routes, shared_L=self._shared_L, neighbours_L=self._neighbours_L, equal_S=equal_S)
        # a run of n equal rows is n - 1 rows that equal the one before, in all layers
        repeats_S = equal_S == self._spec.num_layers
        if not repeats_S.any():
            return
        edges = np.flatnonzero(np.diff(np.concatenate([[False], repeats_S, [False]]).astype(np.int8)))
        starts, lengths = edges[::2], edges[1::2] - edges[::2] + 1
        self._runs_H += np.bincount(np.log2(lengths).astype(np.int64), minlength=64)
        best = int(lengths.argmax())
        run = Run(length=int(lengths[best]), sample=record.sample_id, token=record.routes_start + int(starts[best]) - 1)
        self._longest = run if self._longest is None else max(self._longest, run)


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
