"""What a report shows, gathered in one pass over the records: statistics by part, flips by place, gaps, samples.

A part is one source of several (a step, a run, a file). Memory does not grow with the data, but for a bounded table of
samples and the few records that are shown token by token. Where a trainer scored with and without what the engine did,
``Attribution`` says how much of the mismatch each of these is. Knows no page and no chart.

Axes: L common layers, X bins of absolute position, G bins of the absolute log-probability gap, T tokens.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from itertools import combinations
from math import comb
from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.errors import check_type, refused
from routeplane.inspect.compare import AlignedRows, RouteDiff, compare
from routeplane.inspect.diagnose import Examiner, Finding, find_findings
from routeplane.inspect.statistics import POSITION_BIN, Collector, RouteStatistics
from routeplane.record.record import checked_records

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.record import RecordKey, RouteRecord
    from routeplane.record.spec import RouteSpec

__all__ = [
    "FACTORS",
    "GAP_EDGES",
    "REPLAY_LOGPROBS",
    "Attribution",
    "Effect",
    "Overview",
    "PartView",
    "SampleRow",
    "icepop_weights",
    "survey",
    "tis_weights",
    "treatment_column",
]

#: What a trainer can take over from the engine, in the order in which a column's name has them: recorded routes, the
#: ids that sampling kept, recorded routing weights, and the model's weights of the version that sampled.
FACTORS = ("routes", "masks", "weights", "versions")


def treatment_column(factors: Iterable[str]) -> str:
    """The other side's column of log-probabilities with these factors taken over; without any, ``logprobs``.

    >>> treatment_column(["masks", "routes"])
    'logprobs_routes_masks'
    """
    return "_".join(["logprobs", *sorted(factors, key=FACTORS.index)])


#: Column of the other side with its log-probabilities under replay; its ``logprobs`` are those of live routes.
REPLAY_LOGPROBS = treatment_column(["routes"])
#: Edges of the bins of |log-probability gap|: a third of a decade each, the first from 0.
GAP_EDGES: NDArray[np.float64] = np.concatenate([[0.0], 10.0 ** np.arange(-6, 2.01, 1 / 3)])
#: Samples of the table, and records that are kept to be shown token by token.
MAX_SAMPLES, MAX_SHOWN = 1_500, 4
#: Bins of position that are kept; the last is open.
_MAX_BINS = 8_192


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRow:
    """One sample of the table, in order of arrival."""

    part: int
    key: RecordKey
    tokens: int
    missing: int
    versions: tuple[int, ...]
    flipped: int = 0
    compared: int = 0


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

    ``attribution``: where ``survey`` was asked for it.

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
    attribution: Attribution | None = None

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
    attribute: bool = False,
) -> Overview:
    """Gather everything that a report shows, in one pass over each side.

    Args:
        parts: Names of parts (steps, runs, files), each with its records.
        spec: Theirs.
        against: Another capture of the same samples; a mapping is looked up by key.
        against_spec: Its spec; ``spec`` by default.
        attribute: Whether to attribute the mismatch of log-probabilities to the factors that ``against`` switched.

    Returns:
        Values of their own, but for the records in ``shown``.

    Raises:
        SpecError: No layer is common, or geometries differ; and what the iterations raise.
        UsageError: Nothing to attribute to, or not every combination of factors was scored.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec(layers=(1, 2))
    >>> records = [watermarked_record(index, num_tokens=8, spec=spec) for index in range(3)]
    >>> overview = survey([("step-0", records)], spec, against=records)
    >>> overview.num_samples, overview.diff.same
    (3, True)
    """
    if attribute and against is None:
        raise refused("the trainer's side (against) to attribute a mismatch", "none")
    gathered = _Survey(spec, against_spec or spec, _Attributor() if attribute else None)
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

    def __init__(self, spec: RouteSpec, against: RouteSpec, attributor: _Attributor | None) -> None:
        self._spec = spec
        self._attributor = attributor
        self._layer_ids = RouteDiff.empty(spec, against).layer_ids
        self._examiner = Examiner(layer_ids=self._layer_ids)
        self._parts: list[_Part] = []
        self._part_of: dict[RecordKey, int] = {}
        self._samples: dict[RecordKey, SampleRow] = {}
        self._count = 0
        self._worst: list[tuple[int, int, RouteRecord, RouteRecord | None]] = []

    def tap(self, parts: Iterable[tuple[str, Iterable[RouteRecord]]]) -> Iterator[RouteRecord]:
        """The records of all parts, counted as they pass."""
        for part_of_run in parts:
            check_type(part_of_run, tuple, expected="parts (name, records)")
            name, records = part_of_run
            layers = len(self._layer_ids)
            part = _Part(name=name, collector=Collector(self._spec), flips_LX2=np.zeros((layers, 0, 2), dtype=np.int64))
            self._parts.append(part)
            for record in checked_records(records):
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
        if self._attributor is not None:
            self._attributor.add(left, right)
        part = self._parts[self._part_of[left.key]]
        _add_flips(part, rows)
        _add_gaps(part, left, right)
        flipped = int(rows.flipped_SL.sum())
        if left.key in self._samples:
            row = self._samples[left.key]
            self._samples[left.key] = replace(row, flipped=flipped, compared=int(rows.both_SL.sum()))
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
            attribution=None if self._attributor is None else self._attributor.result(),
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


def _add_gaps(part: _Part, left: RouteRecord, right: RouteRecord) -> None:
    """|log-probability gap| of each token whose two sides are known: live, and under replay."""
    if left.logprobs is None:
        return
    mine, other = _shared(left, right)
    mine_S = left.logprobs[mine].astype(np.float64)
    for which, theirs in enumerate((right.logprobs, right.columns.get(REPLAY_LOGPROBS))):
        if theirs is None:
            continue
        gap_S = np.abs(mine_S - np.asarray(theirs[other], dtype=np.float64))
        gap_S = gap_S[~np.isnan(gap_S)]
        bins_S = np.searchsorted(GAP_EDGES, gap_S, side="right") - 1
        part.gaps_2G[which] += np.bincount(bins_S, minlength=len(GAP_EDGES))
        part.gap_sums[which] += gap_S.sum(), len(gap_S)


def _shared(left: RouteRecord, right: RouteRecord) -> tuple[slice, slice]:
    """Where the token columns of each hold the tokens that both have, up to the first that differs."""
    # tokens of a delta may begin where its rows do
    start, stop = max(left.tokens_start, right.tokens_start), min(left.num_tokens, right.num_tokens)
    mine, other = (slice(start - one.tokens_start, max(start, stop) - one.tokens_start) for one in (left, right))
    same_S = left.token_ids[mine] == right.token_ids[other]
    length = len(same_S) if same_S.all() else int(same_S.argmin())
    return slice(mine.start, mine.start + length), slice(other.start, other.start + length)


# ----------------------------------------------------------------------------------------------------------------------
# What a mismatch is due to
# ----------------------------------------------------------------------------------------------------------------------

#: Truncated importance sampling: larger ratios count as this.
TIS_BOUND = 2.0
#: IcePop-style masking: tokens of other ratios are left out of the loss.
ICEPOP_BAND = (0.5, 5.0)


def tis_weights(ratio_T: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ratios of trainer to engine as truncated importance sampling weighs them."""
    return np.minimum(ratio_T, TIS_BOUND)


def icepop_weights(ratio_T: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ratios of trainer to engine, 0 for the tokens that IcePop leaves out."""
    return np.where((ratio_T >= ICEPOP_BAND[0]) & (ratio_T <= ICEPOP_BAND[1]), ratio_T, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """How much of a mean over tokens something makes; ``low`` and ``high``: 95% over samples."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3e} [{self.low:.3e}, {self.high:.3e}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Attribution:
    """What the mismatch of sampled tokens is due to: the k3 estimate of KL(engine || trainer), ``E[r - 1 - log r]``.

    ``total``: with nothing taken over from the engine; ``effects``: of each factor, its Shapley value: what taking it
    over removes, as the mean over all orders; ``residual``: what is left with all of them. They sum to the total.
    ``unknown``: what cannot be identified, and which input would. ``touched``: shares of tokens that TIS and IcePop
    would not weigh by their ratio, with nothing and with everything taken over.
    """

    samples: int
    tokens: int
    total: Effect
    effects: Mapping[str, Effect]
    residual: Effect
    unknown: Mapping[str, str]
    touched: Mapping[str, tuple[float, float]]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "samples": self.samples,
            "tokens": self.tokens,
            "total": asdict(self.total),
            "effects": {factor: asdict(effect) for factor, effect in self.effects.items()},
            "residual": asdict(self.residual),
            "not_identifiable": dict(self.unknown),
            "touched": {how: {"nothing": before, "all": after} for how, (before, after) in self.touched.items()},
        }

    def lines(self) -> list[str]:
        """A line for each number, for people."""
        named = {"total": self.total, **self.effects, "residual": self.residual}
        lines = [f"mismatch (k3) of {self.tokens:,} sampled tokens of {self.samples:,} samples, 95% over samples:"]
        for name, effect in named.items():
            share = f"{effect.mean / self.total.mean:7.1%}" if self.total.mean else "      -"
            lines.append(f"  {name:<9} {share}  {effect}")
        lines += [f"  {name:<9} not identifiable: {why}" for name, why in self.unknown.items()]
        lines += [
            f"  {how} would touch {before:.2%} of tokens, {after:.2%} with {' and '.join(self.effects)}"
            for how, (before, after) in self.touched.items()
        ]
        return lines


_Cell = tuple[str, ...]
_NO_COLUMN = "no log-probabilities with and without it"
_STALE = "no log-probabilities under the weights that sampled (a column logprobs_versions, and its combinations)"


class _Attributor:
    """Sums of pairs of records whose other side scored every combination of some factors."""

    def __init__(self) -> None:
        self._factors: _Cell | None = None
        self._masked = False
        self._samples = self._tokens = 0
        self._tokens_squared = 0
        # by quantity: its sum, of its square by sample, and of its product with the sample's tokens
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._touched: Counter[tuple[str, bool]] = Counter()

    def add(self, left: RouteRecord, right: RouteRecord) -> None:
        """Count the sampled tokens of a pair."""
        factors = tuple(factor for factor in FACTORS if any(factor in _factors_of(name) for name in right.columns))
        if self._factors is None:
            self._factors = factors
        cells = [cell for size in range(len(factors) + 1) for cell in combinations(factors, size)]
        lacking = [treatment_column(cell) for cell in cells if _scores(right, cell) is None]
        if factors != self._factors or not factors or lacking or left.logprobs is None:
            wanted = f"log-probabilities of both sides, with every combination of {', '.join(factors or FACTORS[:3])}"
            got = f"none in {', '.join(lacking)}" if lacking else "none of the engine" if factors else "none"
            raise refused(f"{wanted} @ record {left.key}", got)
        self._masked = self._masked or "sampling_mask" in left.columns
        mine, other = _shared(left, right)
        engine_S = left.logprobs[mine].astype(np.float64)
        gaps = {cell: np.asarray(_scores(right, cell)[other], dtype=np.float64) - engine_S for cell in cells}
        known_S = _sampled(left)[mine] & ~np.any([np.isnan(gap_S) for gap_S in gaps.values()], axis=0)
        if known_S.any():
            self._count({cell: gap_S[known_S] for cell, gap_S in gaps.items()}, factors)

    def _count(self, gaps: Mapping[_Cell, NDArray[np.float64]], factors: _Cell) -> None:
        k3 = {cell: float((np.exp(gap_T) - 1.0 - gap_T).sum()) for cell, gap_T in gaps.items()}
        tokens = len(gaps[()])
        for name, value in {"total": k3[()], "residual": k3[factors], **_shapley(k3, factors)}.items():
            self._sums.setdefault(name, np.zeros(3))[...] += value, value**2, value * tokens
        self._samples, self._tokens = self._samples + 1, self._tokens + tokens
        self._tokens_squared += tokens**2
        for all_of, cell in ((False, ()), (True, factors)):
            ratio_T = np.exp(gaps[cell])
            self._touched["TIS", all_of] += int((tis_weights(ratio_T) != ratio_T).sum())
            self._touched["IcePop", all_of] += int((icepop_weights(ratio_T) != ratio_T).sum())

    def result(self) -> Attribution:
        """Means over tokens. Raises UsageError (ARGUMENT) where no token was scored by both sides."""
        if self._factors is None or not self._tokens:
            raise refused("sampled tokens with log-probabilities of both sides", "none")
        effects = {name: self._effect(name) for name in self._sums}
        switched = set(self._factors)
        unknown = {factor: _NO_COLUMN for factor in FACTORS[:3] if factor not in switched}
        if "masks" in unknown and not self._masked:
            unknown["masks"] = "the records have no sampling masks"
        needed = ["routes", *(["masks"] if self._masked else []), "versions"]
        if "versions" not in switched:
            unknown["staleness"] = _STALE
        if not switched.issuperset(needed):
            apart = ", ".join(factor for factor in needed if factor not in switched)
            unknown["numerics"] = f"the residual holds them together with what was not taken over ({apart})"
        return Attribution(
            samples=self._samples,
            tokens=self._tokens,
            total=effects["total"],
            effects={factor: effects[factor] for factor in self._factors},
            residual=effects["residual"],
            unknown=unknown,
            touched={
                how: (self._touched[how, False] / self._tokens, self._touched[how, True] / self._tokens)
                for how in ("TIS", "IcePop")
            },
        )

    def _effect(self, name: str) -> Effect:
        """The mean over tokens, and its interval: tokens of one sample are not independent of each other."""
        value, squared, product = self._sums[name].tolist()
        mean = value / self._tokens
        spread = max(0.0, squared - 2 * mean * product + mean**2 * self._tokens_squared)
        half = 1.96 * (spread * self._samples / max(1, self._samples - 1)) ** 0.5 / self._tokens
        return Effect(mean=mean, low=mean - half, high=mean + half)


def _factors_of(column: str) -> list[str]:
    name, *factors = column.split("_")
    return factors if name == "logprobs" and factors and set(factors) <= set(FACTORS) else []


def _scores(right: RouteRecord, cell: _Cell) -> Any:
    return right.columns.get(treatment_column(cell)) if cell else right.logprobs


def _sampled(record: RouteRecord) -> NDArray[np.bool_]:
    """Which of a record's own tokens the policy sampled."""
    found_S = np.zeros(record.num_tokens, dtype=np.bool_)
    for span in record.spans:
        found_S[span.start : span.stop] = span.kind == "generation"
    return found_S[record.tokens_start :]


def _shapley(values: Mapping[_Cell, float], factors: _Cell) -> dict[str, float]:
    """What each factor removes of a value, as the mean over all orders in which factors can be added."""
    found = dict.fromkeys(factors, 0.0)
    for factor in factors:
        others = [other for other in factors if other != factor]
        for size in range(len(factors)):
            weight = 1.0 / (len(factors) * comb(len(others), size))
            for cell in combinations(others, size):
                joined = tuple(each for each in factors if each in (*cell, factor))
                found[factor] += weight * (values[cell] - values[joined])
    return found
