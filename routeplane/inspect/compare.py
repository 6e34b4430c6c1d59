"""Two sources side by side, sample by sample: where do they choose other experts?

Owns matching by key, alignment by token identity, and the counts. Engine against trainer, policy against policy, one
capture against another: whatever wrote them, equal keys are the same sequence. Knows no file.

Rows are compared as sets: the order within a row carries no meaning. Axes: S tokens, L common layers, K top-k slots,
P bins of absolute position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from routeplane.errors import DataError, ErrorKind, SpecError, UsageError, check_type
from routeplane.inspect.statistics import POSITION_BIN, POSITION_BINS, SAME, TABLE, shared_ids
from routeplane.record.counts import Counts, rule
from routeplane.record.record import RecordKey, RouteRecord
from routeplane.record.spans import stale_kv
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.record.validate import as_float32

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "AlignedRows",
    "Divergence",
    "RouteDiff",
    "Segment",
    "align",
    "best_segment",
    "compare",
    "compare_records",
    "longest_run",
    "windows",
]

#: Samples that are kept by name: those that differ most, and those on one side alone.
MAX_NAMED = 16
#: Bytes of routes that wait for their partner where the sources come in other orders.
MAX_HELD_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """One sample that differs. ``token`` and ``layer``: of its first row that does, by position, then by layer.

    ``flipped`` of ``compared`` rows (one token in one layer) differ. ``token_mismatch``: the first position whose token
    ids differ, None where none does; rows from there on belong to other sequences and are not compared.

    >>> Divergence(key=RecordKey("a", 0, 0), flipped=3, compared=96, token=7, layer=2).token
    7
    """

    key: RecordKey
    flipped: int
    compared: int
    token: int | None = None
    layer: int | None = None
    token_mismatch: int | None = None


def _named(left: tuple[RecordKey, ...], right: tuple[RecordKey, ...]) -> tuple[RecordKey, ...]:
    return tuple(sorted((*left, *right)))[:MAX_NAMED]


def _most_flipped(found: Divergence) -> tuple[int, RecordKey]:
    return (-found.flipped, found.key)


def _first(left: tuple[int, ...], _: tuple[int, ...]) -> tuple[int, ...]:
    return left


def _worst(left: tuple[Divergence, ...], right: tuple[Divergence, ...]) -> tuple[Divergence, ...]:
    return tuple(sorted((*left, *right), key=_most_flipped)[:MAX_NAMED])


@dataclass(frozen=True, kw_only=True, eq=False)
class RouteDiff(Counts):
    """Counts over the samples that both sides have; merges over parts.

    ``compared_L``, ``equal_L``, ``shared_L``: rows that both have, those equal as sets, and ids in common, by layer of
    ``layer_ids``. ``union_L``: ids in either, so that ``shared_L / union_L`` is the Jaccard index over all rows.
    ``positions_P2``: compared and flipped rows by absolute position. ``one_sided_rows``: rows that one side alone has.
    ``stale_kv_rows``, ``stale_kv_flipped``: compared and flipped rows that an engine computed over a KV cache of older
    weights, whose flips are not of numerics (``record.spans.stale_kv``). ``weighted_rows``, ``weighted_equal``: rows of
    the same experts whose routing weights both sides have, in one meaning, and those where every expert has the same
    weight; ``weights_apart``: the largest difference of one expert's. ``same`` is about routes alone.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec()
    >>> record = watermarked_record(0, num_tokens=3, spec=spec)
    >>> RouteDiff.empty(spec, spec).samples
    0
    """

    SCOPE: ClassVar[str] = "diff_"

    layer_ids: tuple[int, ...] = field(metadata=SAME)
    layers_left_only: tuple[int, ...] = field(metadata=rule(scalar=None, merge=_first), default=())
    layers_right_only: tuple[int, ...] = field(metadata=rule(scalar=None, merge=_first), default=())
    samples: int = 0
    equal_samples: int = field(metadata=TABLE, default=0)
    compared_L: NDArray[np.int64] = field(metadata=TABLE)
    equal_L: NDArray[np.int64] = field(metadata=TABLE)
    shared_L: NDArray[np.int64] = field(metadata=TABLE)
    union_L: NDArray[np.int64] = field(metadata=TABLE)
    positions_P2: NDArray[np.int64] = field(metadata=TABLE)
    one_sided_rows: int = 0
    token_mismatches: int = 0
    stale_kv_rows: int = 0
    stale_kv_flipped: int = 0
    weighted_rows: int = 0
    weighted_equal: int = 0
    weights_apart: float = field(default=0.0, metadata=rule(merge=max))
    left_only: int = field(metadata=TABLE, default=0)
    right_only: int = field(metadata=TABLE, default=0)
    left_only_keys: tuple[RecordKey, ...] = field(metadata=rule(scalar=None, merge=_named), default=())
    right_only_keys: tuple[RecordKey, ...] = field(metadata=rule(scalar=None, merge=_named), default=())
    worst: tuple[Divergence, ...] = field(metadata=rule(scalar=None, merge=_worst), default=())

    @classmethod
    def empty(cls, left: RouteSpec, right: RouteSpec) -> RouteDiff:
        """Nothing compared yet. Raises SpecError where no layer is common, or E, K or the id space differ on one."""
        common = tuple(layer_id for layer_id in left.layer_ids if layer_id in right.layer_ids)
        if not common:
            raise SpecError(
                f"expected a layer that both have, got {list(left.layer_ids)} and {list(right.layer_ids)}",
                kind=ErrorKind.SPEC_MISMATCH,
            )
        left.select(common).require_same_geometry(right.select(common), where="the other side")
        counts = np.zeros(len(common), dtype=np.int64)
        return cls(
            layer_ids=common,
            layers_left_only=tuple(layer_id for layer_id in left.layer_ids if layer_id not in common),
            layers_right_only=tuple(layer_id for layer_id in right.layer_ids if layer_id not in common),
            compared_L=counts,
            equal_L=counts,
            shared_L=counts,
            union_L=counts,
            positions_P2=np.zeros((POSITION_BINS, 2), dtype=np.int64),
        )

    @property
    def same(self) -> bool:
        """Whether both sides have the same samples, layers, tokens and rows."""
        return self.equal_samples == self.samples and not (
            self.left_only or self.right_only or self.layers_left_only or self.layers_right_only
        )

    @property
    def flipped_share(self) -> float:
        """Share of compared rows that are other sets; 0.0 without any."""
        compared = int(self.compared_L.sum())
        return 1.0 - int(self.equal_L.sum()) / compared if compared else 0.0

    @property
    def fresh_flipped_share(self) -> float:
        """The same share, of the rows that no update under way stands behind."""
        compared = int(self.compared_L.sum()) - self.stale_kv_rows
        flipped = int(self.compared_L.sum() - self.equal_L.sum()) - self.stale_kv_flipped
        return flipped / compared if compared else 0.0

    def __repr__(self) -> str:
        return (
            f"RouteDiff({self.samples} samples, {self.equal_samples} equal, {self.flipped_share:.2%} of rows flipped)"
        )

    def layers(self) -> list[dict[str, Any]]:
        """One JSON-ready row for each common layer."""
        return [
            {
                "layer": layer_id,
                "compared": int(self.compared_L[slot]),
                "equal_share": _ratio(self.equal_L[slot], self.compared_L[slot]),
                "jaccard": _ratio(self.shared_L[slot], self.union_L[slot]),
            }
            for slot, layer_id in enumerate(self.layer_ids)
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "same": self.same,
            "samples": self.samples,
            "equal_samples": self.equal_samples,
            "compared_rows": int(self.compared_L.sum()),
            "flipped_share": round(self.flipped_share, 9),
            "one_sided_rows": self.one_sided_rows,
            "token_mismatches": self.token_mismatches,
            "stale_kv_rows": self.stale_kv_rows,
            "stale_kv_flipped": self.stale_kv_flipped,
            "fresh_flipped_share": round(self.fresh_flipped_share, 9),
            "weighted_rows": self.weighted_rows,
            "weighted_equal": self.weighted_equal,
            "weights_apart": round(self.weights_apart, 9),
            "left_only": self.left_only,
            "right_only": self.right_only,
            "left_only_keys": [list(key) for key in self.left_only_keys],
            "right_only_keys": [list(key) for key in self.right_only_keys],
            "layers_left_only": list(self.layers_left_only),
            "layers_right_only": list(self.layers_right_only),
            "layers": self.layers(),
            "positions": [
                {"from": place * POSITION_BIN, "compared": int(compared), "flipped": int(flipped)}
                for place, (compared, flipped) in enumerate(self.positions_P2)
                if compared
            ],
            "worst": [{**asdict(found), "key": list(found.key)} for found in self.worst],
        }

    def derived(self) -> dict[str, float]:
        """Rows, shares and samples without a partner, for a metrics logger."""
        return {
            "rows": float(self.compared_L.sum()),
            "flipped_share": self.flipped_share,
            "fresh_flipped_share": self.fresh_flipped_share,
            "jaccard": _ratio(self.shared_L.sum(), self.union_L.sum()),
            "unmatched_samples": float(self.left_only + self.right_only),
        }


def compare_records(left: RouteRecord, right: RouteRecord) -> RouteDiff:
    """The difference of one sample. Rows before either's ``routes_start`` are not compared. Raises SpecError.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec(layers=(1, 2))
    >>> records = [watermarked_record(index, num_tokens=8, spec=spec) for index in range(3)]
    >>> compare_records(records[0], records[0]).same
    True
    """
    for side in (left, right):
        check_type(side, RouteRecord, expected="a RouteRecord")
    total = RouteDiff.empty(left.spec, right.spec)
    return total.merge(_count(left, align(left, right, layer_ids=total.layer_ids), total.layer_ids))


def compare(
    left: Iterable[RouteRecord],
    right: Iterable[RouteRecord] | Mapping[RecordKey, RouteRecord],
    *,
    specs: tuple[RouteSpec, RouteSpec],
    max_held_bytes: int = MAX_HELD_BYTES,
    watch: Callable[..., object] | None = None,
) -> RouteDiff:
    """Match by key and count, in one pass over each side.

    ``watch(left, right, rows=AlignedRows)`` is given every pair, such as ``Examiner.add`` of ``diagnose``.

    ``right`` as a mapping (an archive) is looked up, so that its order does not matter. Of two streams, records whose
    partner has not come are held; in the same order that is none. Raises UsageError (TOO_LONG) where more than
    ``max_held_bytes`` wait, DataError (DUPLICATE_KEY), SpecError.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec(layers=(1, 2))
    >>> records = [watermarked_record(index, num_tokens=8, spec=spec) for index in range(3)]
    >>> found = compare(records, records[:2], specs=(spec, spec))
    >>> found.samples, found.equal_samples, found.left_only
    (2, 2, 1)
    """
    total = RouteDiff.empty(*specs)
    pairs = _look_up(left, right) if isinstance(right, Mapping) else _in_step(left, right, max_held_bytes)
    for mine, theirs in pairs:
        if mine is not None and theirs is not None:
            rows = align(mine, theirs, layer_ids=total.layer_ids)
            total = total.merge(_count(mine, rows, total.layer_ids))
            if watch is not None:
                watch(mine, theirs, rows=rows)
        elif mine is not None:
            total = _one_sided(total, "left_only", mine.key)
        elif theirs is not None:
            total = _one_sided(total, "right_only", theirs.key)
    return total


_Pair = tuple[RouteRecord | None, RouteRecord | None]


def _look_up(left: Iterable[RouteRecord], right: Mapping[RecordKey, RouteRecord]) -> Iterator[_Pair]:
    seen: set[RecordKey] = set()
    for record in left:
        check_type(record, RouteRecord, expected="a RouteRecord")
        _see(record.key, seen)
        yield record, right.get(record.key)
    for key in right:
        if key not in seen:
            yield None, right[key]


def _in_step(left: Iterable[RouteRecord], right: Iterable[RouteRecord], max_held_bytes: int) -> Iterator[_Pair]:
    """Take turns, so that two streams in one order hold nothing."""
    sides = (iter(left), iter(right))
    held: tuple[dict[RecordKey, RouteRecord], dict[RecordKey, RouteRecord]] = ({}, {})
    seen: tuple[set[RecordKey], set[RecordKey]] = (set(), set())
    waiting, open_sides = 0, [0, 1]
    while open_sides:
        for side in tuple(open_sides):
            record = next(sides[side], None)
            if record is None:
                open_sides.remove(side)
                continue
            check_type(record, RouteRecord, expected="a RouteRecord")
            _see(record.key, seen[side])
            partner = held[1 - side].pop(record.key, None)
            if partner is not None:
                waiting -= partner.routes.nbytes
                yield (record, partner) if side == 0 else (partner, record)
                continue
            if 1 - side not in open_sides:
                yield (record, None) if side == 0 else (None, record)
                continue
            held[side][record.key] = record
            waiting += record.routes.nbytes
            if waiting > max_held_bytes:
                raise UsageError(
                    f"expected samples of both sides in about one order, got {waiting} bytes waiting for their "
                    "partner: convert one side to an archive, which is looked up by key",
                    kind=ErrorKind.TOO_LONG,
                )
    yield from ((record, None) for record in held[0].values())
    yield from ((None, record) for record in held[1].values())


def _see(key: RecordKey, seen: set[RecordKey]) -> None:
    if key in seen:
        raise DataError(f"expected every key once, got {key} twice", kind=ErrorKind.DUPLICATE_KEY)
    seen.add(key)


@dataclass(frozen=True, kw_only=True, eq=False)
class AlignedRows:
    """The rows of two records that can be compared: same token, same layer, int16 ``[S, L, K]``, copies.

    They begin at token ``start`` and end before the first one whose ids differ; ``mismatch`` is its position, or the
    shorter record's end where one goes on, and None where the sequences are the same.
    """

    start: int
    mismatch: int | None
    left_SLK: NDArray[np.int16]
    right_SLK: NDArray[np.int16]
    stale_kv: tuple[tuple[int, int], ...] = ()
    #: routing weights of both, float32 ``[S, L, K]`` by slot; None unless both have some, of one meaning
    weights: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None

    def weights_apart(self) -> NDArray[np.float32]:
        """The largest difference of an expert's weight, of the M rows that are the same experts in any order."""
        if self.weights is None:
            return np.empty(0, dtype=np.float32)
        same_SL = self.both_SL & ~self.flipped_SL
        left, right = (
            np.take_along_axis(weights_SLK[same_SL], ids_SLK[same_SL].argsort(axis=1), axis=1)
            for ids_SLK, weights_SLK in zip((self.left_SLK, self.right_SLK), self.weights, strict=True)
        )
        return np.asarray(np.abs(left - right).max(axis=1, initial=0.0), dtype=np.float32)

    @property
    def stale_S(self) -> NDArray[np.bool_]:
        """Whether either side computed the row over a KV cache of older weights."""
        token_S = self.start + np.arange(len(self.left_SLK))
        inside = [(token_S >= start) & (token_S < stop) for start, stop in self.stale_kv]
        return np.logical_or.reduce(inside) if inside else np.zeros(len(token_S), dtype=np.bool_)

    @cached_property
    def both_SL(self) -> NDArray[np.bool_]:
        """Whether both sides have the row."""
        return np.asarray((self.left_SLK[:, :, 0] != MISSING) & (self.right_SLK[:, :, 0] != MISSING))

    @cached_property
    def shared_SL(self) -> NDArray[np.int32]:
        """Ids that the two rows have in common; 0 where a side has no row."""
        return np.where(self.both_SL, shared_ids(self.left_SLK, self.right_SLK), 0).astype(np.int32)

    @property
    def flipped_SL(self) -> NDArray[np.bool_]:
        """Whether both have the row, as other sets of experts."""
        return np.asarray(self.both_SL & (self.shared_SL < self.left_SLK.shape[2]))

    @property
    def agreement_S(self) -> NDArray[np.float64]:
        """Share of ids in common over the layers of each token; NaN where no layer has both rows."""
        ids_S = self.both_SL.sum(axis=1) * self.left_SLK.shape[2]
        return np.where(ids_S > 0, self.shared_SL.sum(axis=1) / np.maximum(ids_S, 1), np.nan)

    def chance_agreement(self) -> float:
        """Share of ids that rows of tokens far apart have in common."""
        distance = max(1, len(self.left_SLK) // 2)
        left, right = self.left_SLK[distance:], self.right_SLK[:-distance]
        both_SL = (left[:, :, 0] != MISSING) & (right[:, :, 0] != MISSING)
        total = int(both_SL.sum()) * left.shape[2]
        return int(np.where(both_SL, shared_ids(left, right), 0).sum()) / total if total else 0.0


def align(left: RouteRecord, right: RouteRecord, *, layer_ids: Sequence[int]) -> AlignedRows:
    """Cut two records to what both have of ``layer_ids``, by absolute position and token identity."""
    start = max(left.routes_start, right.routes_start)
    shortest = min(left.num_tokens, right.num_tokens)
    known = min(max(left.tokens_start, right.tokens_start), shortest)  # tokens before stand in another record
    mine_S, theirs_S = (one.token_ids[known - one.tokens_start : shortest - one.tokens_start] for one in (left, right))
    differing = np.flatnonzero(mine_S != theirs_S)
    stop = known + int(differing[0]) if len(differing) else shortest
    mine, theirs = (
        record.routes[start - record.routes_start : max(start, stop) - record.routes_start][
            :, [record.spec.slot(layer_id) for layer_id in layer_ids]
        ]
        for record in (left, right)
    )
    mismatch = stop if len(differing) or left.num_tokens != right.num_tokens else None
    stale = (*stale_kv(left.captures), *stale_kv(right.captures))
    weights = _weights(left, right, layer_ids=layer_ids, start=start, stop=max(start, stop))
    return AlignedRows(start=start, mismatch=mismatch, left_SLK=mine, right_SLK=theirs, stale_kv=stale, weights=weights)


def _weights(
    left: RouteRecord, right: RouteRecord, *, layer_ids: Sequence[int], start: int, stop: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
    """The routing weights of the same rows, where both have some and say that they are the same thing."""
    both = all("route_weights" in record.columns for record in (left, right))
    if not both or left.attributes["weights_meaning"] != right.attributes["weights_meaning"]:
        return None
    mine, theirs = (
        as_float32(
            record.columns["route_weights"].values[start - record.tokens_start : stop - record.tokens_start][
                :, [record.spec.slot(layer_id) for layer_id in layer_ids]
            ]
        )
        for record in (left, right)
    )
    return mine, theirs


def _count(left: RouteRecord, rows: AlignedRows, layer_ids: tuple[int, ...]) -> RouteDiff:
    """The counts of one pair."""
    both_SL, shared_SL, flipped_SL = rows.both_SL, rows.shared_SL, rows.flipped_SL
    one_sided = int(((rows.left_SLK[:, :, 0] != MISSING) != (rows.right_SLK[:, :, 0] != MISSING)).sum())
    counts_P = [_by_position(flags_SL.sum(axis=1), rows.start) for flags_SL in (both_SL, flipped_SL)]
    apart_M = rows.weights_apart()
    equal = not flipped_SL.any() and one_sided == 0 and rows.mismatch is None
    return RouteDiff(
        layer_ids=layer_ids,
        samples=1,
        equal_samples=int(equal),
        compared_L=both_SL.sum(axis=0),
        equal_L=(both_SL & ~flipped_SL).sum(axis=0),
        shared_L=shared_SL.sum(axis=0),
        union_L=np.where(both_SL, 2 * left.spec.top_k - shared_SL, 0).sum(axis=0),
        positions_P2=np.stack(counts_P, axis=1),
        one_sided_rows=one_sided,
        token_mismatches=int(rows.mismatch is not None),
        stale_kv_rows=int(both_SL[rows.stale_S].sum()),
        stale_kv_flipped=int(flipped_SL[rows.stale_S].sum()),
        weighted_rows=len(apart_M),
        weighted_equal=int((apart_M == 0).sum()),
        weights_apart=float(apart_M.max(initial=0.0)),
        worst=() if equal else (_divergence(left.key, rows, layer_ids),),
    )


def _divergence(key: RecordKey, rows: AlignedRows, layer_ids: tuple[int, ...]) -> Divergence:
    flips = np.argwhere(rows.flipped_SL)
    return Divergence(
        key=key,
        flipped=len(flips),
        compared=int(rows.both_SL.sum()),
        token=rows.start + int(flips[0][0]) if len(flips) else None,
        layer=layer_ids[int(flips[0][1])] if len(flips) else None,
        token_mismatch=rows.mismatch,
    )


def _by_position(counts_S: NDArray[Any], start: int) -> NDArray[np.int64]:
    bins_S = np.minimum((start + np.arange(len(counts_S))) // POSITION_BIN, POSITION_BINS - 1)
    counted = np.bincount(bins_S, weights=counts_S, minlength=POSITION_BINS)
    return counted.astype(np.int64)


def _one_sided(total: RouteDiff, side: str, key: RecordKey) -> RouteDiff:
    keys = f"{side}_keys"
    return replace(total, **{side: getattr(total, side) + 1, keys: _named(getattr(total, keys), (key,))})


def _ratio(part: Any, whole: Any) -> float:
    return round(float(part) / float(whole), 9) if whole else 0.0


# ----------------------------------------------------------------------------------------------------------------------
# Runs of tokens
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Tokens ``[start, stop)`` of aligned rows in which an alternative reading is better."""

    start: int
    stop: int
    gain: float


def windows(values_SL: NDArray[Any], width: int) -> NDArray[Any]:
    """Sums over ``width`` consecutive tokens, ``[S - width + 1, L]``."""
    total = np.concatenate([np.zeros((1, values_SL.shape[1])), np.cumsum(values_SL, axis=0)])
    return np.asarray(total[width:] - total[:-width])


def best_segment(gain_S: NDArray[np.float64]) -> Segment | None:
    """The consecutive tokens with the largest sum of gains, without ends that gain nothing; None where none gains."""
    total_S = np.concatenate([[0.0], np.cumsum(gain_S)])
    lowest_S = np.minimum.accumulate(total_S)
    stop = int((total_S - lowest_S).argmax())
    if total_S[stop] <= lowest_S[stop]:
        return None
    # the last place of the minimum: tokens that gain nothing are not part of it
    start = stop - 1 - int((total_S[:stop][::-1]).argmin())
    return Segment(start=start, stop=stop, gain=float(total_S[stop] - total_S[start]))


def longest_run(flags_S: NDArray[np.bool_]) -> Segment:
    """The longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags_S, [False]]).astype(np.int8)))
    if not len(edges):
        return Segment(start=0, stop=0, gain=0.0)
    starts, stops = edges[::2], edges[1::2]
    best = int((stops - starts).argmax())
    return Segment(start=int(starts[best]), stop=int(stops[best]), gain=float(stops[best] - starts[best]))
