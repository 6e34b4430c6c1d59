"""What a report shows, gathered in one pass over the records: statistics by part, flips by place, gaps, samples.

A part is one source of several (a step, a run, a file). Memory does not grow with the data, but for a bounded table of
samples and the few records that are shown token by token. Knows no page and no chart.

Axes: L common layers, X bins of absolute position, G bins of the absolute log-probability gap.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.inspect.compare import AlignedRows, RouteDiff, compare
from routeplane.inspect.diagnose import Examiner, Finding, find_findings
from routeplane.inspect.statistics import POSITION_BIN, Collector, RouteStatistics

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.record import RecordKey, RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = ["GAP_EDGES", "REPLAY_LOGPROBS", "Overview", "PartView", "SampleRow", "survey"]

#: Column of the other side with its log-probabilities under replay; its ``logprobs`` are those of live routes.
REPLAY_LOGPROBS = "replay_logprobs"
#: Edges of the bins of |log-probability gap|: a third of a decade each, the first from 0.
GAP_EDGES: NDArray[np.float64] = np.concatenate([[0.0], 10.0 ** np.arange(-6, 2.01, 1 / 3)])
#: Samples of the table, and records that are kept to be shown token by token.
MAX_SAMPLES, MAX_SHOWN = 1_500, 4
#: Bins of position that are kept; the last is open.
_MAX_BINS = 8_192


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRow:
    """One sample of the table, in order of arrival. ``gaps``: mean |gap| live and under replay, None where unknown."""

    part: int
    key: RecordKey
    tokens: int
    missing: int
    versions: tuple[int, ...]
    flipped: int = 0
    compared: int = 0
    gaps: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True, kw_only=True, eq=False)
class PartView:
    """One part. ``flips_LX2``: compared and flipped rows by layer and position; ``gaps_2G``: tokens by gap, live and
    under replay; ``gap_sums``: sum of |gap| and tokens, for each."""

    name: str
    statistics: RouteStatistics
    flips_LX2: NDArray[np.int64]
    gaps_2G: NDArray[np.int64]
    gap_sums: tuple[tuple[float, int], tuple[float, int]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Overview:
    """All of a report. ``shown``: the records with the most faults, each with its counterpart on the other side.

    >>> from routeplane.inspect import collect
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec()
    >>> record = watermarked_record(0, num_tokens=3, spec=spec)
    >>> Overview.of(collect([record], spec)).num_samples
    1
    """

    spec: RouteSpec
    parts: tuple[PartView, ...]
    statistics: RouteStatistics
    diff: RouteDiff | None
    findings: tuple[Finding, ...]
    samples: tuple[SampleRow, ...]
    num_samples: int
    shown: tuple[tuple[RouteRecord, RouteRecord | None], ...]

    @classmethod
    def of(cls, statistics: RouteStatistics, *, name: str = "run") -> Overview:
        """One part of statistics that were counted elsewhere: no samples, no other side."""
        layers = statistics.spec.num_layers
        part = PartView(
            name=name,
            statistics=statistics,
            flips_LX2=np.zeros((layers, 0, 2), dtype=np.int64),
            gaps_2G=np.zeros((2, len(GAP_EDGES)), dtype=np.int64),
            gap_sums=((0.0, 0), (0.0, 0)),
        )
        return cls(
            spec=statistics.spec,
            parts=(part,),
            statistics=statistics,
            diff=None,
            findings=tuple(find_findings(statistics)),
            samples=(),
            num_samples=statistics.coverage.records,
            shown=(),
        )


def survey(
    parts: Iterable[tuple[str, Iterable[RouteRecord]]],
    spec: RouteSpec,
    *,
    against: Iterable[RouteRecord] | Mapping[RecordKey, RouteRecord] | None = None,
    against_spec: RouteSpec | None = None,
) -> Overview:
    """Gather everything that a report shows, in one pass over each side.

    Args:
        parts: Names of parts (steps, runs, files), each with its records.
        spec: Theirs.
        against: Another capture of the same samples; a mapping is looked up by key.
        against_spec: Its spec; ``spec`` by default.

    Returns:
        Values of their own, but for the records in ``shown``.

    Raises:
        SpecError: No layer is common, or geometries differ; and what the iterations raise.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec(layers=(1, 2))
    >>> records = [watermarked_record(index, num_tokens=8, spec=spec) for index in range(3)]
    >>> overview = survey([("step-0", records)], spec, against=records)
    >>> overview.num_samples, overview.diff.same
    (3, True)
    """
    gathered = _Survey(spec, against_spec or spec)
    if against is None:
        for _ in gathered.tap(parts):
            pass
        return gathered.result(None)
    diff = compare(gathered.tap(parts), against, specs=(spec, against_spec or spec), watch=gathered.pair)
    return gathered.result(diff)


@dataclass(kw_only=True)
class _Part:
    """The tables of one part while it is read."""

    name: str
    collector: Collector
    flips_LX2: NDArray[np.int64]
    gaps_2G: NDArray[np.int64] = field(default_factory=lambda: np.zeros((2, len(GAP_EDGES)), dtype=np.int64))
    gap_sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros((2, 2)))


class _Survey:
    """Counts records of parts, and pairs of records, as they come."""

    def __init__(self, spec: RouteSpec, against: RouteSpec) -> None:
        self._spec = spec
        self._layer_ids = RouteDiff.empty(spec, against).layer_ids
        self._examiner = Examiner(layer_ids=self._layer_ids)
        self._parts: list[_Part] = []
        self._part_of: dict[RecordKey, int] = {}
        self._samples: dict[RecordKey, SampleRow] = {}
        self._count = 0
        self._worst: list[tuple[int, int, RouteRecord, RouteRecord | None]] = []

    def tap(self, parts: Iterable[tuple[str, Iterable[RouteRecord]]]) -> Iterator[RouteRecord]:
        """The records of all parts, counted as they pass."""
        for name, records in parts:
            layers = len(self._layer_ids)
            part = _Part(name=name, collector=Collector(self._spec), flips_LX2=np.zeros((layers, 0, 2), dtype=np.int64))
            self._parts.append(part)
            for record in records:
                self._part_of[record.key] = len(self._parts) - 1
                self._add(part, record)
                yield record

    def _add(self, part: _Part, record: RouteRecord) -> None:
        part.collector.add(record)
        coverage = record.coverage()
        versions = {capture.weights_version for capture in record.captures} - {None}
        self._count += 1
        if len(self._samples) < MAX_SAMPLES:
            self._samples[record.key] = SampleRow(
                part=len(self._parts) - 1,
                key=record.key,
                tokens=record.num_tokens,
                missing=coverage.missing,
                versions=tuple(sorted(version for version in versions if version is not None)),
            )
        self._show(coverage.missing * record.spec.num_layers, record, None)

    def pair(self, left: RouteRecord, right: RouteRecord, *, rows: AlignedRows) -> None:
        """Count one pair; the ``watch`` of ``compare``."""
        self._examiner.add(left, right, rows=rows)
        part = self._parts[self._part_of[left.key]]
        _add_flips(part, rows)
        gaps = tuple(_add_gap(part, which, gap_S) for which, gap_S in enumerate(_gaps(left, right)))
        flipped = int(rows.flipped_SL.sum())
        if left.key in self._samples:
            row = self._samples[left.key]
            self._samples[left.key] = SampleRow(
                part=row.part,
                key=row.key,
                tokens=row.tokens,
                missing=row.missing,
                versions=row.versions,
                flipped=flipped,
                compared=int(rows.both_SL.sum()),
                gaps=(gaps[0], gaps[1]),
            )
        self._show(flipped + left.coverage().missing * left.spec.num_layers, left, right)

    def _show(self, faults: int, record: RouteRecord, other: RouteRecord | None) -> None:
        self._worst = [entry for entry in self._worst if entry[2].key != record.key]
        heapq.heappush(self._worst, (faults, -self._count, record, other))
        if len(self._worst) > MAX_SHOWN:
            heapq.heappop(self._worst)

    def result(self, diff: RouteDiff | None) -> Overview:
        """Everything so far."""
        parts = tuple(
            PartView(
                name=part.name,
                statistics=part.collector.result(),
                flips_LX2=part.flips_LX2,
                gaps_2G=part.gaps_2G,
                gap_sums=_sums(part),
            )
            for part in self._parts
        )
        statistics = reduce(RouteStatistics.merge, (part.statistics for part in parts), Collector(self._spec).result())
        worst = sorted(self._worst, key=lambda entry: (-entry[0], -entry[1]))
        return Overview(
            spec=self._spec,
            parts=parts,
            statistics=statistics,
            diff=diff,
            findings=tuple(find_findings(statistics, diff=diff, examiner=None if diff is None else self._examiner)),
            samples=tuple(self._samples.values()),
            num_samples=self._count,
            shown=tuple((record, other) for _, _, record, other in worst),
        )


def _sums(part: _Part) -> tuple[tuple[float, int], tuple[float, int]]:
    (live, live_tokens), (replayed, replayed_tokens) = part.gap_sums.tolist()
    return (live, int(live_tokens)), (replayed, int(replayed_tokens))


def _add_flips(part: _Part, rows: AlignedRows) -> None:
    tokens = len(rows.left_SLK)
    if not tokens:
        return
    bins_S = np.minimum((rows.start + np.arange(tokens)) // POSITION_BIN, _MAX_BINS - 1)
    last = int(bins_S[-1]) + 1
    if part.flips_LX2.shape[1] < last:
        more = last - part.flips_LX2.shape[1]
        part.flips_LX2 = np.pad(part.flips_LX2, ((0, 0), (0, more), (0, 0)))
    edges = np.flatnonzero(np.diff(bins_S, prepend=bins_S[0] - 1))
    for column, flags_SL in enumerate((rows.both_SL, rows.flipped_SL)):
        part.flips_LX2[:, bins_S[edges], column] += np.add.reduceat(flags_SL, edges, axis=0, dtype=np.int64).T


def _gaps(left: RouteRecord, right: RouteRecord) -> tuple[NDArray[np.float64] | None, NDArray[np.float64] | None]:
    """|log-probability gap| of each token whose two sides are known: live, and under replay."""
    if left.logprobs is None:
        return None, None
    # tokens of a delta may begin where its rows do
    start, stop = max(left.tokens_start, right.tokens_start), min(left.num_tokens, right.num_tokens)
    mine, other = (slice(start - one.tokens_start, max(start, stop) - one.tokens_start) for one in (left, right))
    same_S = left.token_ids[mine] == right.token_ids[other]
    length = len(same_S) if same_S.all() else int(same_S.argmin())
    mine_S = left.logprobs[mine][:length].astype(np.float64)

    def gap(theirs: Any) -> NDArray[np.float64] | None:
        if theirs is None:
            return None
        found_S = np.abs(mine_S - np.asarray(theirs[other][:length], dtype=np.float64))
        return np.asarray(found_S[~np.isnan(found_S)])

    return gap(right.logprobs), gap(right.columns.get(REPLAY_LOGPROBS))


def _add_gap(part: _Part, which: int, gap_S: NDArray[np.float64] | None) -> float | None:
    if gap_S is None or not len(gap_S):
        return None
    bins_S = np.searchsorted(GAP_EDGES, gap_S, side="right") - 1
    part.gaps_2G[which] += np.bincount(bins_S, minlength=len(GAP_EDGES))
    part.gap_sums[which] += gap_S.sum(), len(gap_S)
    return float(gap_S.mean())
