"""Name the cause: what is wrong with a run, in which sample, from which token, in which layers, and how sure that is.

One side alone shows missing rows, constant layers, repeated rows, unused experts, drift. Two sides show more: where
they disagree, ``Examiner`` tries what could have happened to the rows (late or early by some tokens, another layer's
rows, a buffer that was not written, another sample's rows, another router), and keeps the alternative that explains
them. Honest differences between kernels are spread evenly and are a note, not a warning.

Thresholds are named constants with their reasons. A finding is a hint to a person, never a verdict that stops a run
(those are ``validate``'s and ``admit``'s). Knows statistics and aligned rows; knows no file.

Axes: S tokens, L common layers, K top-k slots.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from routeplane.errors import check_type
from routeplane.inspect.compare import AlignedRows, RouteDiff, Segment, best_segment, longest_run, windows
from routeplane.inspect.statistics import RouteStatistics, dead_experts, shared_ids
from routeplane.record.spec import MISSING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from routeplane.record.record import RouteRecord

__all__ = ["LEAST_TOKENS", "Examiner", "Finding", "Kind", "differences", "find_findings", "order_findings"]

#: Share of missing rows from which replay leaves a noticeable part of a batch to the live router.
MISSING_SHARE = 0.01
#: Tokens of equal rows in all layers that healthy captures do not show (``alarms``: greedy decoding repeats 2).
LONGEST_RUN = 32
#: Mean rows for each expert below which an unused one is chance: the chance of none is exp(-20) at 20 rows.
ROWS_PER_EXPERT = 20
#: Jensen-Shannon divergence (nats) of a layer's load between two weights versions: 0 is none, 0.69 is disjoint.
DRIFT = 0.05

#: Tokens that a fault must cover to be named. Shorter ones are within what near-ties do by chance.
LEAST_TOKENS = 12
#: Tokens of the window in which a sample's agreement is screened before alternatives are tried.
_WINDOW = 16
#: Agreement of a window, over the layer's median, below which a sample is looked at closely.
_SCREEN = 0.75
#: How much better (in shared ids) an alternative must explain the rows than reading them as they are.
_BETTER = 0.2
#: Token shifts that are tried, in both directions.
_SHIFTS = (1, 2, 3, 4)
#: Drop of agreement (share of shared ids) that another router explains and near-ties do not.
_DROP = 0.2
#: Drop of the share of ids in the same slot: near-ties exchange neighbours, which leaves most ids where they were.
_REORDERED = 0.4
#: Of the way from chance to the usual agreement: what is above is another router's rows, not other tokens' rows.
_PARTLY = 0.15
#: Bytes of rows of earlier samples that are held to find out whose rows a stale buffer shows.
_HELD_BYTES = 64 << 20
#: Samples without an explanation that are held to be compared with one another.
_HELD_SAMPLES = 64

Kind = Literal[
    "nothing_recorded",
    "missing_rows",
    "constant_layer",
    "repeated_rows",
    "frozen_layer",
    "stale_buffer",
    "token_shift",
    "call_boundary",
    "layer_shift",
    "slot_order",
    "swapped_samples",
    "mixed_versions",
    "unrelated_rows",
    "expert_count",
    "unused_experts",
    "drift",
    "unmatched_samples",
    "token_mismatch",
    "near_ties",
]
_ORDER = ("error", "warning", "note")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing to look at.

    ``sample``, ``token``, ``stop``, ``layers``: the place: tokens ``[token, stop)`` of a sample, in these decoder
    layers; None or empty where it is the whole run's. ``tokens``: how many tokens it concerns. ``agreement``: share of
    expert ids that both sides have in common there, read as this finding says and as they are. ``votes``: tokens that
    are explained better so, and worse. Example: ``find_findings(statistics)[0].title``.
    """

    severity: Literal["error", "warning", "note"]
    kind: Kind
    title: str
    detail: str
    sample: str | None = None
    token: int | None = None
    stop: int | None = None
    layers: tuple[int, ...] = ()
    tokens: int = 0
    agreement: tuple[float, float] | None = None
    votes: tuple[int, int] | None = None

    @property
    def where(self) -> str:
        """The place in words."""
        parts = [f"sample {self.sample}"] if self.sample is not None else []
        if self.token is not None and self.stop is not None and self.stop > self.token + 1:
            parts.append(f"tokens {self.token} to {self.stop - 1}")
        elif self.token is not None:
            parts.append(f"token {self.token}")
        if self.layers:
            parts.append(f"layer{'s' if len(self.layers) > 1 else ''} {_few(self.layers)}")
        return ", ".join(parts)

    @property
    def confidence(self) -> str:
        """How sure, in words; empty for what was counted and needs no test."""
        said = []
        if self.agreement is not None:
            said.append(f"agreement {self.agreement[0]:.1%} read so, {self.agreement[1]:.1%} as is")
        if self.votes is not None:
            said.append(f"better in {self.votes[0]} of {sum(self.votes)} tokens")
        return "; ".join(said)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            **asdict(self),
            "where": self.where,
            "confidence": self.confidence,
            "layers": list(self.layers),
            "agreement": None if self.agreement is None else [round(share, 6) for share in self.agreement],
            "votes": None if self.votes is None else list(self.votes),
        }


def find_findings(
    statistics: RouteStatistics, *, diff: RouteDiff | None = None, examiner: Examiner | None = None
) -> list[Finding]:
    """What stands out, what most likely caused the most first; only notes for a healthy run.

    ``diff`` and ``examiner``: of the same records against another side, from ``compare(..., watch=examiner.add)``.

    >>> from routeplane.inspect import collect
    >>> from routeplane.testing.builders import watermarked_spec
    >>> find_findings(collect([], watermarked_spec()))[0].kind
    'nothing_recorded'
    """
    check_type(statistics, RouteStatistics, expected="RouteStatistics")
    found = examiner.findings() if examiner is not None else []
    found = [*found, *_missing(statistics), *_constant(statistics), *_expert_count(statistics), *_runs(statistics)]
    found += differences(diff) if diff is not None else []
    return order_findings([*found, *_dead(statistics), *_drift(statistics)])


def order_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Errors first, then warnings, then notes; within one severity as given."""
    return sorted(findings, key=lambda finding: _ORDER.index(finding.severity))


# ----------------------------------------------------------------------------------------------------------------------
# Two sides: what happened to the rows
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Suspect:
    """A pair whose disagreement nothing explains so far; ``low``: where, in tokens of its aligned rows."""

    left: RouteRecord
    rows: AlignedRows
    agreement_S: NDArray[np.float64]
    explained_S: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class _SlotOrder:
    """One pair: share of ids in the same slot, by token."""

    sample: str
    start: int
    share_S: NDArray[np.float64]


@dataclass(kw_only=True, eq=False)
class Examiner:
    """Looks at every pair of records and keeps what explains their disagreement.

    Example: ``compare(left, right, watch=Examiner(layer_ids=ids).add)``; ``layer_ids`` are those that both sides have
    (``RouteDiff.layer_ids``). Pairs that agree cost one look at their shared ids. Holds up to 64 MB of rows of earlier
    samples, and 64 pairs.
    """

    layer_ids: tuple[int, ...]
    _found: list[Finding] = field(default_factory=list)
    _suspects: list[_Suspect] = field(default_factory=list)
    _earlier: deque[tuple[RouteRecord, AlignedRows]] = field(default_factory=deque)
    _held: int = 0
    _agreements: list[tuple[float, float, int]] = field(default_factory=list)
    _orders: list[_SlotOrder] = field(default_factory=list)

    def add(self, left: RouteRecord, right: RouteRecord, *, rows: AlignedRows) -> None:
        """Look at one pair. ``rows``: theirs, of ``layer_ids``."""
        if rows.both_SL.any():
            agreement_S = rows.agreement_S
            explained_S = np.zeros(len(agreement_S), dtype=np.bool_)
            if self._is_suspicious(rows):
                self._explain(left, rows, explained_S)
            known_S = ~np.isnan(agreement_S) & ~explained_S
            self._note_agreement(agreement_S[known_S])
            if known_S.sum() >= LEAST_TOKENS and len(self._suspects) < _HELD_SAMPLES:
                self._suspects.append(_Suspect(left=left, rows=rows, agreement_S=agreement_S, explained_S=explained_S))
                self._suspects.sort(key=_lowest)
            self._look_at_order(left, rows, explained_S)
        self._remember(left, rows)

    def findings(self) -> list[Finding]:
        """What was found, the finding that concerns most tokens first."""
        found = [*self._found, *self._swaps_and_drops(), *self._order_changes()]
        return sorted(found, key=lambda finding: -finding.tokens)

    # ---- one pair ---------------------------------------------------------------------------------------------------

    def _is_suspicious(self, rows: AlignedRows) -> bool:
        """Whether some window of some layer agrees much less than the layer does, or the layers less than half."""
        slots = rows.left_SLK.shape[2]
        if rows.shared_SL.sum() < 0.5 * slots * rows.both_SL.sum():
            return True
        width = min(_WINDOW, len(rows.shared_SL))
        shared_NL, both_NL = windows(rows.shared_SL, width), windows(rows.both_SL, width)
        enough_NL = both_NL >= width / 2
        share_NL = np.where(enough_NL, shared_NL / np.maximum(both_NL * slots, 1), 1.0)
        return bool((share_NL < _SCREEN * np.median(share_NL, axis=0)).any())

    def _explain(self, left: RouteRecord, rows: AlignedRows, explained_S: NDArray[np.bool_]) -> None:
        """Take the best explanation of what is left, again and again, until none is good."""
        for look in (self._stuck, self._stale):
            found = look(left, rows)
            for finding, segment in found:
                self._found.append(finding)
                explained_S[segment.start : segment.stop] = True
        for _ in range(3):
            best = max(self._shifts(left, rows, explained_S), key=lambda pair: pair[1].gain, default=None)
            if best is None:
                return
            self._found.append(best[0])
            explained_S[best[1].start : best[1].stop] = True

    def _shifts(
        self, left: RouteRecord, rows: AlignedRows, explained_S: NDArray[np.bool_]
    ) -> Iterator[tuple[Finding, Segment]]:
        """Every shift by tokens or layers that is better than the rows as they are."""
        mine, theirs = rows.left_SLK, rows.right_SLK
        for distance in (sign * step for step in _SHIFTS for sign in (1, -1)):
            if len(mine) <= abs(distance):
                continue
            moved = np.full_like(theirs, MISSING)
            here, there = _overlap(distance, len(mine))
            moved[here] = theirs[there]
            direction = "late" if distance > 0 else "early"
            title = f"rows are {_count(abs(distance), 'token')} {direction}"
            yield from self._alternative(left, rows, moved, explained_S, kind="token_shift", title=title)
        for distance in (1, -1):
            if mine.shape[1] <= 1:
                continue
            moved = np.full_like(theirs, MISSING)
            here, there = _overlap(distance, mine.shape[1])
            moved[:, here] = theirs[:, there]
            title = f"every layer has the rows of the layer {'before' if distance > 0 else 'after'} it"
            yield from self._alternative(left, rows, moved, explained_S, kind="layer_shift", title=title)

    def _alternative(
        self,
        left: RouteRecord,
        rows: AlignedRows,
        moved_SLK: NDArray[np.int16],
        explained_S: NDArray[np.bool_],
        *,
        kind: Kind,
        title: str,
    ) -> Iterator[tuple[Finding, Segment]]:
        """``moved_SLK``: the right side's rows, where this alternative says that they belong."""
        slots = rows.left_SLK.shape[2]
        comparable_SL = rows.both_SL & (moved_SLK[:, :, 0] != MISSING) & ~explained_S[:, None]
        so_S = np.where(comparable_SL, shared_ids(rows.left_SLK, moved_SLK), 0).sum(axis=1)
        as_is_S = np.where(comparable_SL, rows.shared_SL, 0).sum(axis=1)
        segment = best_segment((so_S - as_is_S).astype(np.float64))
        if segment is None or segment.stop - segment.start < LEAST_TOKENS:
            return
        here = slice(segment.start, segment.stop)
        total = max(int(comparable_SL[here].sum()) * slots, 1)
        agreement = int(so_S[here].sum()) / total, int(as_is_S[here].sum()) / total
        votes = int((so_S > as_is_S)[here].sum()), int((so_S < as_is_S)[here].sum())
        if agreement[0] - agreement[1] < _BETTER or votes[0] < 4 * votes[1]:
            return
        token = rows.start + segment.start
        call = next((c.call for c in left.captures if c.start == token and token > 0), None)
        if call is not None and kind == "token_shift":
            kind, title = "call_boundary", f"{title} from the start of call {call} on"
        yield (
            Finding(
                severity="error",
                kind=kind,
                title=f"{title}, from token {token} of sample {left.sample_id}" if call is None else title,
                detail="the rows are legal and have the right shape, and belong elsewhere: "
                + ("the join of calls is off" if kind == "call_boundary" else "the capture's index is off"),
                sample=left.sample_id,
                token=token,
                stop=rows.start + segment.stop,
                layers=self.layer_ids if kind == "layer_shift" else (),
                tokens=segment.stop - segment.start,
                agreement=agreement,
                votes=votes,
            ),
            segment,
        )

    def _stuck(self, left: RouteRecord, rows: AlignedRows) -> Iterator[tuple[Finding, Segment]]:
        """Rows that repeat the row before on the left, where the right side moves on: in all layers, or in some."""
        slots = rows.left_SLK.shape[2]
        repeats_SL: NDArray[np.bool_] = np.zeros((len(rows.both_SL), len(self.layer_ids)), dtype=np.bool_)
        both_SL = rows.both_SL[1:] & rows.both_SL[:-1]
        mine_SL = both_SL & (shared_ids(rows.left_SLK[1:], rows.left_SLK[:-1]) == slots)
        theirs_SL = both_SL & (shared_ids(rows.right_SLK[1:], rows.right_SLK[:-1]) == slots)
        repeats_SL[1:] = mine_SL
        moves_SL = np.zeros_like(repeats_SL)
        moves_SL[1:] = both_SL & ~theirs_SL
        everywhere = longest_run(np.asarray(repeats_SL.all(axis=1)))
        if _is_run(everywhere, np.asarray(moves_SL.any(axis=1))):
            yield self._repeated(left, rows, everywhere), everywhere
            return
        for segment, layers in _by_segment(
            {
                self.layer_ids[slot]: run
                for slot in range(repeats_SL.shape[1])
                if _is_run(run := longest_run(repeats_SL[:, slot]), moves_SL[:, slot])
            }
        ):
            yield (
                Finding(
                    severity="error",
                    kind="frozen_layer",
                    title=f"{_count(len(layers), 'layer')} repeat one row from token {rows.start + segment.start} of "
                    f"sample {left.sample_id}",
                    detail="the other side's rows change there: this layer's buffer is not written",
                    sample=left.sample_id,
                    token=rows.start + segment.start,
                    stop=rows.start + segment.stop,
                    layers=layers,
                    tokens=segment.stop - segment.start,
                ),
                # the other layers are not explained by it
                Segment(
                    start=segment.start,
                    stop=segment.start if len(layers) < len(self.layer_ids) else segment.stop,
                    gain=0.0,
                ),
            )

    def _repeated(self, left: RouteRecord, rows: AlignedRows, run: Segment) -> Finding:
        return Finding(
            severity="error",
            kind="repeated_rows",
            title=f"{run.stop - run.start} tokens repeat the rows of the token before, in all layers",
            detail="the other side's rows change there: the buffer was not written",
            sample=left.sample_id,
            token=rows.start + run.start,
            stop=rows.start + run.stop,
            tokens=run.stop - run.start,
        )

    def _stale(self, left: RouteRecord, rows: AlignedRows) -> Iterator[tuple[Finding, Segment]]:
        """Rows that an earlier sample had at the same positions, under other tokens."""
        for earlier, theirs in reversed(self._earlier):
            first = max(rows.start, theirs.start)
            stop = min(rows.start + len(rows.left_SLK), theirs.start + len(theirs.left_SLK))
            if stop - first < LEAST_TOKENS:
                continue
            mine_SLK = rows.left_SLK[first - rows.start : stop - rows.start]
            same_S = (mine_SLK == theirs.left_SLK[first - theirs.start : stop - theirs.start]).all(axis=(1, 2))
            same_S &= (mine_SLK[:, :, 0] != MISSING).any(axis=1)
            # a prompt that both share has equal rows honestly
            known = max(left.tokens_start, earlier.tokens_start)  # tokens of a delta may begin with its rows
            ours = [one.token_ids[known - one.tokens_start : stop - one.tokens_start] for one in (left, earlier)]
            common = np.flatnonzero(ours[0] != ours[1])
            prefix = known + int(common[0]) if len(common) else stop
            same_S[: max(0, prefix - first)] = False
            run = longest_run(same_S)
            if run.stop - run.start >= LEAST_TOKENS:
                offset = first - rows.start
                found = Segment(start=run.start + offset, stop=run.stop + offset, gain=run.gain)
                yield (
                    Finding(
                        severity="error",
                        kind="stale_buffer",
                        title=f"{found.stop - found.start} tokens have rows that sample {earlier.sample_id} had there",
                        detail="their tokens differ: an earlier request's rows were read from a buffer that was not "
                        "written again",
                        sample=left.sample_id,
                        token=rows.start + found.start,
                        stop=rows.start + found.stop,
                        tokens=found.stop - found.start,
                    ),
                    found,
                )
                return

    def _remember(self, left: RouteRecord, rows: AlignedRows) -> None:
        self._earlier.append((left, rows))
        self._held += rows.left_SLK.nbytes
        while self._held > _HELD_BYTES and len(self._earlier) > 1:
            self._held -= self._earlier.popleft()[1].left_SLK.nbytes

    # ---- all pairs --------------------------------------------------------------------------------------------------

    def _note_agreement(self, agreement_N: NDArray[np.float64]) -> None:
        if len(agreement_N):
            self._agreements.append((float(np.median(agreement_N)), float(agreement_N.std()), len(agreement_N)))

    def _swaps_and_drops(self) -> Iterator[Finding]:
        """Pairs that agree by chance alone, against each other; and those that agree less from some token on."""
        if not self._agreements:
            return
        usual = float(np.median([median for median, _, _ in self._agreements]))
        swapped: set[int] = set()
        far = [
            index
            for index, suspect in enumerate(self._suspects)
            if np.nanmean(np.where(suspect.explained_S, np.nan, suspect.agreement_S)) < usual - _BETTER
            or np.nanmean(np.where(suspect.explained_S, np.nan, suspect.agreement_S)) < 0.5
        ]
        for place, index in enumerate(far):
            for other in far[place + 1 :]:
                finding = self._swap(self._suspects[index], self._suspects[other])
                if finding is not None and index not in swapped and other not in swapped:
                    swapped |= {index, other}
                    yield finding
        for index, suspect in enumerate(self._suspects):
            if index not in swapped:
                yield from self._drop(suspect, usual)

    def _swap(self, one: _Suspect, two: _Suspect) -> Finding | None:
        """Whether two samples agree with each other's other side."""
        shares = []
        for mine, theirs in ((one, two), (two, one)):
            start = max(mine.rows.start, theirs.rows.start)
            stop = min(s.rows.start + len(s.rows.left_SLK) for s in (mine, theirs))
            if stop - start < LEAST_TOKENS:
                return None
            left = mine.rows.left_SLK[start - mine.rows.start : stop - mine.rows.start]
            right = theirs.rows.right_SLK[start - theirs.rows.start : stop - theirs.rows.start]
            both_SL = (left[:, :, 0] != MISSING) & (right[:, :, 0] != MISSING)
            total = max(int(both_SL.sum()) * left.shape[2], 1)
            shares.append(int(np.where(both_SL, shared_ids(left, right), 0).sum()) / total)
        as_is = float(np.nanmean(np.concatenate([one.agreement_S, two.agreement_S])))
        if min(shares) - as_is < _BETTER:
            return None
        first, second = sorted((one, two), key=lambda suspect: suspect.left.key)
        return Finding(
            severity="error",
            kind="swapped_samples",
            title=f"samples {first.left.sample_id} and {second.left.sample_id} have each other's rows",
            detail="the rows of one stand under the name of the other",
            sample=first.left.sample_id,
            token=first.rows.start,
            stop=first.rows.start + len(first.agreement_S),
            tokens=len(first.agreement_S) + len(second.agreement_S),
            agreement=(float(np.mean(shares)), as_is),
        )

    def _drop(self, suspect: _Suspect, usual: float) -> Iterator[Finding]:
        """Tokens from which on the two sides agree sharply less than the run does, and nothing else explains it."""
        agreement_S = np.where(suspect.explained_S, np.nan, suspect.agreement_S)
        known = np.flatnonzero(~np.isnan(agreement_S))
        values_N = agreement_S[known]
        low = float(windows(values_N[:, None], min(_WINDOW, len(values_N)))[:, 0].min()) / min(_WINDOW, len(values_N))
        if usual - low < _DROP:
            return
        segment = Segment(start=0, stop=0, gain=0.0)
        for _ in range(2):
            found = best_segment((usual + low) / 2 - values_N)
            if found is None or found.stop - found.start < LEAST_TOKENS:
                return
            segment, low = found, float(values_N[found.start : found.stop].mean())
        rest_N = np.concatenate([values_N[: segment.start], values_N[segment.stop :]])
        spread = max(float(rest_N.std()) if len(rest_N) else 0.0, 0.02)
        if usual - low < max(_DROP, 4 * spread) or not _is_sharp(values_N, segment, usual - low):
            return
        chance = suspect.rows.chance_agreement()
        partly = low > chance + _PARTLY * (usual - chance)
        start, stop = int(known[segment.start]), int(known[segment.stop - 1]) + 1
        yield Finding(
            severity="error" if not partly else "warning",
            kind="mixed_versions" if partly else "unrelated_rows",
            title=(
                f"another router chose {_count(stop - start, 'token')} of sample {suspect.left.sample_id}"
                if partly
                else f"the rows of {_count(stop - start, 'token')} of sample {suspect.left.sample_id} are unrelated"
            ),
            detail=(
                f"the sides share {low:.1%} of the ids there and {usual:.1%} elsewhere, {chance:.1%} by chance: "
                + ("probably other weights than declared" if partly else "no shift or other sample explains them")
            ),
            sample=suspect.left.sample_id,
            token=suspect.rows.start + start,
            stop=suspect.rows.start + stop,
            tokens=stop - start,
            agreement=(usual, low),
        )

    # ---- order within rows ------------------------------------------------------------------------------------------

    def _look_at_order(self, left: RouteRecord, rows: AlignedRows, explained_S: NDArray[np.bool_]) -> None:
        """Share of ids in the same slot, over the rows of each token that are equal as sets; NaN without any."""
        slots = rows.left_SLK.shape[2]
        equal_SL = rows.both_SL & (rows.shared_SL == slots) & ~explained_S[:, None]
        same_S = ((rows.left_SLK == rows.right_SLK).sum(axis=2) * equal_SL).sum(axis=1)
        ids_S = equal_SL.sum(axis=1) * slots
        order = _SlotOrder(
            sample=left.sample_id, start=rows.start, share_S=np.where(ids_S > 0, same_S / np.maximum(ids_S, 1), np.nan)
        )
        if ids_S.any():
            self._orders.append(order)
            self._orders.sort(key=lambda order: float(np.nanmean(order.share_S)))
            del self._orders[_HELD_SAMPLES:]

    def _order_changes(self) -> Iterator[Finding]:
        """Where the slots of equal rows begin to stand in another order; nowhere, if they do all through the run."""
        if not self._orders:
            return
        usual = float(np.median([np.nanmedian(order.share_S) for order in self._orders]))
        for order in self._orders:
            known_S = ~np.isnan(order.share_S)
            lowest = float(np.nanquantile(order.share_S, 0.02))
            segment = best_segment(np.where(known_S, (usual + lowest) / 2 - order.share_S, 0.0))
            if segment is None or segment.stop - segment.start < LEAST_TOKENS:
                continue
            share = float(np.nanmean(order.share_S[segment.start : segment.stop]))
            if usual - share < _REORDERED:
                continue
            yield Finding(
                severity="warning",
                kind="slot_order",
                title=f"{segment.stop - segment.start} tokens list the same experts in another slot order",
                detail="sets of experts are equal, so gates are right; whatever is stored by slot, such as "
                "route_weights, belongs to other experts there",
                sample=order.sample,
                token=order.start + segment.start,
                stop=order.start + segment.stop,
                tokens=segment.stop - segment.start,
                agreement=(usual, share),
            )


def _lowest(suspect: _Suspect) -> float:
    values_S = np.where(suspect.explained_S, 1.0, np.nan_to_num(suspect.agreement_S, nan=1.0))
    return float(values_S.mean())


def _is_run(run: Segment, moves_S: NDArray[np.bool_]) -> bool:
    """Whether a run of repeated rows is long, and the other side moves on in most of it."""
    length = run.stop - run.start
    return length >= LEAST_TOKENS and int(moves_S[run.start : run.stop].sum()) >= length / 2


def _by_segment(runs: dict[int, Segment]) -> Iterator[tuple[Segment, tuple[int, ...]]]:
    """Layers with the same run together."""
    layers: dict[tuple[int, int], list[int]] = {}
    for layer, run in runs.items():
        layers.setdefault((run.start, run.stop), []).append(layer)
    for (start, stop), group in layers.items():
        yield Segment(start=start, stop=stop, gain=float(stop - start)), tuple(group)


def _is_sharp(values_N: NDArray[np.float64], segment: Segment, drop: float) -> bool:
    """Whether the agreement falls within a few tokens: compounding flips make it fall gradually."""
    for edge, outside, inside in (
        (segment.start, slice(max(0, segment.start - 8), segment.start), slice(segment.start, segment.start + 8)),
        (len(values_N) - segment.stop, slice(segment.stop, segment.stop + 8), slice(segment.stop - 8, segment.stop)),
    ):
        if edge >= 4 and values_N[outside].mean() - values_N[inside].mean() < 0.6 * drop:
            return False
    return True


def _overlap(distance: int, length: int) -> tuple[slice, slice]:
    """Places of a sequence that has moved by ``distance``, and where they came from."""
    if distance > 0:
        return slice(distance, length), slice(0, length - distance)
    return slice(0, length + distance), slice(-distance, length)


# ----------------------------------------------------------------------------------------------------------------------
# One side
# ----------------------------------------------------------------------------------------------------------------------


def _missing(statistics: RouteStatistics) -> list[Finding]:
    coverage = statistics.coverage
    if coverage.total == 0:
        detail = "the source holds no token"
        return [Finding(severity="error", kind="nothing_recorded", title="nothing was recorded", detail=detail)]
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
            kind="missing_rows",
            title=f"{coverage.missing} rows are missing ({coverage.missing_share:.2%} of those that were fed)",
            detail=f"by state: {states}; the trainer's own router decides there. Most in sample "
            f"{worst.key.sample_id}: {worst.missing} of {worst.tokens} tokens",
            sample=worst.key.sample_id,
            token=worst.token,
            stop=worst.stop,
            tokens=coverage.missing,
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
            kind="constant_layer",
            title=f"{_count(len(layers), 'layer')} always choose the same {top_k} experts",
            detail="a healthy router does not; the capture of these layers is probably not connected",
            layers=tuple(layers),
        )
    ]


def _expert_count(statistics: RouteStatistics) -> list[Finding]:
    """All ids of all layers below half of E: with this many ids, a router of E experts does not do that."""
    load_LE = statistics.load_of()
    used = np.flatnonzero(load_LE.any(axis=0))
    width = int(statistics.experts_L.min())
    if not len(used) or load_LE.sum() < ROWS_PER_EXPERT * width or int(used[-1]) >= width // 2:
        return []
    return [
        Finding(
            severity="error",
            kind="expert_count",
            title=f"no id is above {int(used[-1])}, and the spec says {width} experts",
            detail=f"{int(load_LE.sum()):,} ids in {len(load_LE)} layers: the spec names another model, or ids are "
            "those of one expert-parallel rank",
            layers=statistics.spec.layer_ids,
            tokens=statistics.coverage.total,
        )
    ]


def _runs(statistics: RouteStatistics) -> list[Finding]:
    run = statistics.longest_run
    if run is None or run.length <= LONGEST_RUN:
        return []
    return [
        Finding(
            severity="warning",
            kind="repeated_rows",
            title=f"{run.length} consecutive tokens have equal rows in all layers",
            detail="their tokens differ, so a buffer was not written",
            sample=run.sample,
            token=run.token + 1,
            stop=run.token + run.length,
            tokens=run.length - 1,
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
            kind="unused_experts",
            title=f"{int((dead_L * enough_L).sum())} experts were never chosen, in {_count(len(layers), 'layer')}",
            detail=f"most in layer {statistics.spec.layer_ids[worst]}: {most}",
            layers=tuple(layers),
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
            kind="drift",
            title=f"routing moved between weights versions ({len(moved)} of {len(statistics.drift())} steps)",
            detail=f"most from version {largest.before} to {largest.after}: {largest.divergence_L.max():.3f} nats",
            layers=(layer,),
        )
    ]


# ----------------------------------------------------------------------------------------------------------------------
# Two sides: counts
# ----------------------------------------------------------------------------------------------------------------------


def differences(diff: RouteDiff) -> list[Finding]:
    """What the counts of a difference say: unmatched samples, other tokens, near-ties."""
    found = []
    if diff.left_only or diff.right_only:
        keys = [key.sample_id for key in (*diff.left_only_keys, *diff.right_only_keys)]
        found.append(
            Finding(
                severity="error",
                kind="unmatched_samples",
                title=f"{_count(diff.left_only + diff.right_only, 'sample')} on one side only",
                detail=f"{diff.left_only} here, {diff.right_only} there: {_few(keys)}",
                sample=keys[0] if keys else None,
            )
        )
    if diff.token_mismatches:
        sample = next((item for item in diff.worst if item.token_mismatch is not None), None)
        found.append(
            Finding(
                severity="error",
                kind="token_mismatch",
                title=f"{_count(diff.token_mismatches, 'sample')} with other tokens on the two sides",
                detail="rows after the first token that differs were not compared",
                sample=None if sample is None else sample.key.sample_id,
                token=None if sample is None else sample.token_mismatch,
            )
        )
    if diff.flipped_share:
        found.append(_flips(diff))
    return found


def _flips(diff: RouteDiff) -> Finding:
    """Counted, and not judged: what near-ties do under other kernels is what replay is there for."""
    shared, union = int(diff.shared_L.sum()), int(diff.union_L.sum())
    share = 2 * shared / max(union + shared, 1)  # union and intersection together are the ids of both rows
    return Finding(
        severity="note",
        kind="near_ties",
        title=f"the two sides chose different experts in {diff.flipped_share:.2%} of the rows",
        detail=f"and share {share:.2%} of all expert ids; a trainer without replay would train on these",
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _few(items: Sequence[object]) -> str:
    shown = ", ".join(str(item) for item in items[:8])
    return f"{shown} and {len(items) - 8} more" if len(items) > 8 else shown
