"""Calls of one rollout joined into records, by absolute token offset and token identity.

A call extends the sequence when its prompt begins with every token before it; then its rows take their absolute places,
and the row of the previous turn's last token, which no call could bring then, comes from this one. Rows are never
concatenated. Two passes: a plan over token ids alone, then one fill of arrays of their final size.

Axes: S token positions of a segment, R rows of a call, L captured layers, K top-k slots.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from routeplane.errors import DataError, ErrorKind, UsageError
from routeplane.record.calls import ModelCall
from routeplane.record.counts import Counts, rule
from routeplane.record.coverage import Coverage
from routeplane.record.record import RouteRecord
from routeplane.record.spans import STATES, Capture, CaptureState, Span
from routeplane.record.validate import check_routes, missing_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.spec import RouteSpec

__all__ = ["Assembly", "AssemblyReport", "assemble"]

_CODE: dict[CaptureState, int] = {state: code for code, state in enumerate(STATES)}
_UNKNOWN = len(STATES)
# How much of a row is there: nothing, some layers, every layer.
_ABSENT, _SOME, _WHOLE = 0, 1, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class AssemblyReport(Counts):
    """What assembling decided, in counts. In ``overlap_rows`` and ``drift_rows`` a row is one token in one layer."""

    SCOPE: ClassVar[str] = "assembly_"

    calls: int = 0
    records: int = field(default=0, metadata=rule(scalar=None))  # as the coverage has them
    breaks: int = field(
        default=0, metadata=rule(scalar="context_breaks")
    )  # prompts that did not extend what came before
    overlap_rows: int = 0  # captured twice and compared
    drift_rows: int = 0  # ... and different as sets
    boundary_tokens: int = 0  # tokens whose row an earlier call lacked and a later one brought
    coverage: Coverage = field(default_factory=Coverage)

    def derived(self) -> dict[str, float]:
        """The share of compared rows that differ."""
        return {"drift_share": self.drift_rows / self.overlap_rows if self.overlap_rows else 0.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembly:
    """The records of one rollout, one per segment, and what was decided on the way."""

    records: tuple[RouteRecord, ...]
    report: AssemblyReport


def assemble(
    calls: Iterable[ModelCall],
    spec: RouteSpec,
    *,
    sample_id: str,
    attempt: int = 0,
    group: str | None = None,
    overlap: Literal["keep_first", "keep_last"] = "keep_first",
    on_break: Literal["raise", "split"] = "raise",
    on_missing: Literal["mark", "raise"] = "mark",
    attributes: Mapping[str, str] | None = None,
) -> Assembly:
    """Join calls, in the order they were made, into one record per unbroken context.

    ``overlap``: which capture stays where two calls bring the same row; differences are counted either way (a bfloat16
    re-prefill flips about 2% of rows per layer, so equality is no rule). Both decide between captures of equal reach,
    and token by token: rows in all layers replace rows in some, which replace none, under either; captures of different
    layers are not mixed, so that ``captures`` says exactly who brought a row (``merge_layers`` joins pipeline stages).
    ``on_break``: what a prompt does that is no extension of the tokens before it. ``on_missing``: whether rows that
    were fed and did not come are marked with their state or refused.

    Every call is verified first. Copies: each record owns its arrays. Raises DataError naming call and token,
    UsageError for an unknown policy.
    """
    _check_policies(overlap=overlap, on_break=on_break, on_missing=on_missing)
    verified = [_checked(call, spec) for call in calls]
    segments = _plan(verified, split=on_break == "split")
    records, report = [], AssemblyReport(calls=len(verified), breaks=len(segments) - 1)
    for index, segment in enumerate(segments):
        fill = _Fill(segment, spec)
        for position in range(len(segment)):
            fill.add(position, keep_last=overlap == "keep_last")
        captures = fill.captures()
        if on_missing == "raise":
            _refuse_missing(captures, sample_id)
        record = RouteRecord(
            sample_id=sample_id,
            attempt=attempt,
            segment=index,
            group=group,
            token_ids=segment[-1].token_ids,
            routes=fill.routes_SLK,
            spans=_spans(segment),
            captures=captures,
            spec=spec,
            logprobs=_logprobs(segment),
            attributes=_attributes(segment, attributes),
            columns=_columns(segment),
        )
        records.append(record)
        found = replace(fill.counts, records=1, coverage=record.coverage())
        report = report.merge(found)
    return Assembly(records=tuple(records), report=report)


def _check_policies(*, overlap: str, on_break: str, on_missing: str) -> None:
    allowed = {"overlap": ("keep_first", "keep_last"), "on_break": ("raise", "split"), "on_missing": ("mark", "raise")}
    for name, value in (("overlap", overlap), ("on_break", on_break), ("on_missing", on_missing)):
        if value not in allowed[name]:
            raise UsageError(f"expected {name} of {allowed[name]}, got {value!r}", kind=ErrorKind.ARGUMENT)


def _checked(call: ModelCall, spec: RouteSpec) -> ModelCall:
    """The call, verified, with its layers known and its rows legal under ``spec``."""
    call.verify()
    layers = spec.layer_ids if call.layer_ids is None else call.layer_ids
    unknown = sorted(set(layers) - set(spec.layer_ids))
    if unknown or len(set(layers)) != len(layers):
        raise DataError(
            f"expected layers among {list(spec.layer_ids)}, each once, got {list(layers)} @ call {call.call_id}",
            kind=ErrorKind.LAYERS,
        )
    if call.routes is not None:
        ordered = layers == tuple(sorted(layers))
        routes_RLK = call.routes if ordered else call.routes[:, np.argsort(layers)]
        check_routes(routes_RLK, spec.select(layers), first_token=call.first_row, sample=call.call_id)
    return call


def _plan(calls: Sequence[ModelCall], *, split: bool) -> list[list[ModelCall]]:
    """Group calls into segments: within one, each prompt begins with every token before it."""
    if not calls:
        raise DataError("expected at least one call, got none", kind=ErrorKind.ROUTES_MISSING)
    seen: set[str] = set()
    segments: list[list[ModelCall]] = []
    for call in calls:
        if call.call_id in seen:
            raise DataError(f"expected each call once, got {call.call_id!r} twice", kind=ErrorKind.DUPLICATE_KEY)
        seen.add(call.call_id)
        broken = _break(segments[-1][-1], call) if segments else None
        if segments and broken is None:
            segments[-1].append(call)
        elif broken is None or split:
            segments.append([call])
        else:
            raise DataError(f"{broken} @ call {call.call_id}", kind=ErrorKind.CONTEXT_BREAK)
    return segments


def _break(before: ModelCall, call: ModelCall) -> str | None:
    """Why ``call`` does not extend ``before``, or None."""
    tokens_S, prompt_P = before.token_ids, call.prompt_ids
    common = min(len(tokens_S), len(prompt_P))
    differs = np.flatnonzero(tokens_S[:common] != prompt_P[:common])
    if differs.size:
        at = int(differs[0])
        return f"expected token {tokens_S[at]} at position {at} as call {before.call_id} left it, got {prompt_P[at]}"
    if len(prompt_P) < len(tokens_S):
        return f"expected a prompt of at least the {len(tokens_S)} tokens so far, got {len(prompt_P)}"
    if call.media[: len(before.media)] != before.media:
        return f"expected media that begin with {list(before.media)}, got {list(call.media)}"
    return None


class _Fill:
    """The arrays of one segment while calls are written into them, each row at its absolute place."""

    def __init__(self, segment: Sequence[ModelCall], spec: RouteSpec) -> None:
        self._segment = segment
        self._spec = spec
        size = segment[-1].num_tokens
        self.routes_SLK = spec.missing_rows(size)
        self.counts = AssemblyReport()
        self._rank_S = np.full(size, _ABSENT, dtype=np.int8)
        self._state_S = np.full(size, _UNKNOWN, dtype=np.int8)
        self._call_S = np.zeros(size, dtype=np.int32)
        self._cached_S = np.zeros(size, dtype=np.bool_)

    def add(self, position: int, *, keep_last: bool) -> None:
        call = self._segment[position]
        if call.routes is not None and len(call.routes):
            self._take(position, call, keep_last=keep_last)
        # A call that generated nothing fed its whole prompt; otherwise its last token was only sampled.
        fed = call.num_tokens if len(call.generation_ids) == 0 else call.num_tokens - 1
        unexplained_S = np.flatnonzero((self._rank_S[:fed] == _ABSENT) & (self._state_S[:fed] == _UNKNOWN))
        self._state_S[unexplained_S] = _CODE[call.loss or "not_captured"]
        self._call_S[unexplained_S] = position

    def _take(self, position: int, call: ModelCall, *, keep_last: bool) -> None:
        where = slice(call.first_row, call.rows_stop)
        new_RLK = self._on_spec_layers(call)
        new_rank_R, old_rank_R = _rank(new_RLK), self._rank_S[where]
        self._count_drift(self.routes_SLK[where], new_RLK, (new_rank_R > _ABSENT) & (old_rank_R > _ABSENT))
        better_R = new_rank_R > old_rank_R
        filled = int(np.count_nonzero(better_R & (old_rank_R == _ABSENT) & self._known(where, position)))
        self.counts = replace(self.counts, boundary_tokens=self.counts.boundary_tokens + filled)
        taken_R = better_R | (keep_last & (new_rank_R == old_rank_R) & (new_rank_R > _ABSENT))
        at_S = np.flatnonzero(taken_R) + call.first_row
        self.routes_SLK[at_S] = new_RLK[taken_R]
        self._rank_S[at_S] = new_rank_R[taken_R]
        self._call_S[at_S] = position
        self._cached_S[at_S] = at_S < call.cached
        whole = np.where(at_S < call.cached, _CODE["cached"], _CODE["captured"])
        self._state_S[at_S] = np.where(new_rank_R[taken_R] == _WHOLE, whole, _CODE["partial"])

    def _known(self, where: slice, position: int) -> NDArray[np.bool_]:
        """Which positions an earlier call already held."""
        before = self._segment[position - 1].num_tokens if position else 0
        return np.arange(where.start, where.stop) < before

    def _on_spec_layers(self, call: ModelCall) -> NDArray[np.int16]:
        """The call's rows on the spec's layer axis; layers it did not capture are MISSING. A view where nothing
        moves."""
        routes_RLK = call.routes
        if routes_RLK is None or call.layer_ids is None or call.layer_ids == self._spec.layer_ids:
            return routes_RLK if routes_RLK is not None else self._spec.missing_rows(0)
        placed = self._spec.missing_rows(len(routes_RLK))
        placed[:, [self._spec.slot(layer) for layer in call.layer_ids]] = routes_RLK
        return placed

    def _count_drift(self, old_RLK: NDArray[np.int16], new_RLK: NDArray[np.int16], both_R: NDArray[np.bool_]) -> None:
        if not both_R.any():
            return
        old_NLK, new_NLK = old_RLK[both_R], new_RLK[both_R]
        present_NL = ~missing_rows(old_NLK) & ~missing_rows(new_NLK)
        suspects_NL = present_NL & (old_NLK != new_NLK).any(axis=2)
        drift = (np.sort(old_NLK[suspects_NL], axis=1) != np.sort(new_NLK[suspects_NL], axis=1)).any(axis=1)
        self.counts = replace(
            self.counts,
            overlap_rows=self.counts.overlap_rows + int(present_NL.sum()),
            drift_rows=self.counts.drift_rows + int(drift.sum()),
        )

    def captures(self) -> tuple[Capture, ...]:
        """Runs of equal (call, state). What is still unexplained at the end was never fed."""
        state_S, call_S = self._state_S.copy(), self._call_S.copy()
        left = state_S == _UNKNOWN
        state_S[left], call_S[left] = _CODE["not_fed"], len(self._segment) - 1
        same_run = (np.diff(state_S) == 0) & (np.diff(call_S) == 0) & (np.diff(self._cached_S.astype(np.int8)) == 0)
        edges = np.flatnonzero(~same_run) + 1
        bounds = [0, *edges.tolist(), len(state_S)]
        return tuple(
            self._capture(start, stop, STATES[int(state_S[start])], self._segment[int(call_S[start])])
            for start, stop in itertools.pairwise(bounds)
        )

    def _capture(self, start: int, stop: int, state: CaptureState, call: ModelCall) -> Capture:
        # Cached rows may come from weights before an update; rows that are not there come from none.
        known = state in ("captured", "partial") and not self._cached_S[start]
        version = call.weights_version if known else None
        return Capture(start=start, stop=stop, call=call.call_id, weights_version=version, state=state)


def _rank(routes_RLK: NDArray[np.int16]) -> NDArray[np.int8]:
    missing_RL = missing_rows(routes_RLK)
    return np.where(missing_RL.all(axis=1), _ABSENT, np.where(missing_RL.any(axis=1), _SOME, _WHOLE)).astype(np.int8)


def _refuse_missing(captures: Iterable[Capture], sample_id: str) -> None:
    for capture in captures:
        if capture.state not in ("captured", "cached", "not_fed"):
            raise DataError(
                f"expected rows for tokens [{capture.start}, {capture.stop}), got none: {capture.state} "
                f"in call {capture.call} @ sample {sample_id}",
                kind=ErrorKind.ROUTES_MISSING,
            )


def _spans(segment: Sequence[ModelCall]) -> tuple[Span, ...]:
    spans: list[Span] = []
    at = 0
    for call in segment:
        prompt, stop = len(call.prompt_ids), call.num_tokens
        if prompt > at:
            spans.append(Span(start=at, stop=prompt, kind="prompt", call=call.call_id, weights_version=None))
        if stop > prompt:
            version = call.weights_version
            spans.append(Span(start=prompt, stop=stop, kind="generation", call=call.call_id, weights_version=version))
        at = stop
    return tuple(spans)


def _logprobs(segment: Sequence[ModelCall]) -> NDArray[np.float32] | None:
    if all(call.logprobs is None for call in segment):
        return None
    logprobs_S = np.full(segment[-1].num_tokens, np.nan, dtype=np.float32)
    for call in segment:
        if call.logprobs is not None:
            logprobs_S[len(call.prompt_ids) : call.num_tokens] = call.logprobs
    return logprobs_S


def _attributes(segment: Sequence[ModelCall], given: Mapping[str, str] | None) -> dict[str, str]:
    media = segment[-1].media
    return {**(given or {}), **({"media": json.dumps(list(media))} if media else {})}


def _columns(segment: Sequence[ModelCall]) -> dict[str, NDArray[Any]]:
    """Token columns; each call gives the values of the tokens it brought. All calls must carry the same ones."""
    types = {name: values.dtype for name, values in segment[0].columns.items()}
    for call in segment:
        found = {name: values.dtype for name, values in call.columns.items()}
        if found != types:
            raise DataError(
                f"expected token columns {types} in every call, got {found} @ call {call.call_id}",
                kind=ErrorKind.TOKEN_COLUMN,
            )
    starts = [0, *(call.num_tokens for call in segment)]
    return {
        name: np.concatenate([call.columns[name][start:] for start, call in zip(starts, segment, strict=False)])
        for name in types
    }
