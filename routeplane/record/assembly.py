"""Calls of one rollout joined into records, by absolute token offset and token identity.

A call extends the sequence when its prompt begins with every token before it; then its rows take their absolute places,
and the row of the previous turn's last token, which no call could bring then, comes from this one. Rows are never
concatenated. Two passes: a plan over token ids alone, then one fill of arrays of their final size.

Axes: S token positions of a segment, R rows of a call, L captured layers, K top-k slots.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from routeplane.errors import DataError, ErrorKind, UsageError, refused
from routeplane.record.aligned import AlignedColumn, aligned_columns, concatenate_columns
from routeplane.record.calls import ModelCall
from routeplane.record.counts import Counts, rule
from routeplane.record.parse import as_integers, check_text, settle
from routeplane.record.record import RouteRecord
from routeplane.record.spans import STATES, Capture, CaptureState, Coverage, RecordKey, Span, stale_kv
from routeplane.record.validate import find_problems, missing_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.spec import RouteSpec

__all__ = ["Assembly", "AssemblyReport", "UnfedTokens", "assemble", "beside_rows"]

_CODE: dict[CaptureState, int] = {state: code for code, state in enumerate(STATES)}
_UNKNOWN = len(STATES)
# How much of a row is there: nothing, some layers, every layer.
_ABSENT, _SOME, _WHOLE = 0, 1, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class AssemblyReport(Counts):
    """What assembling decided, in counts. In ``overlap_rows`` and ``drift_rows`` a row is one token in one layer.

    >>> AssemblyReport(overlap_rows=8, drift_rows=2).derived()
    {'drift_share': 0.25}
    """

    SCOPE: ClassVar[str] = "assembly_"

    calls: int = 0
    records: int = field(default=0, metadata=rule(scalar=None))  # as the coverage has them
    breaks: int = field(
        default=0, metadata=rule(scalar="context_breaks")
    )  # prompts that did not extend what came before
    overlap_rows: int = 0  # captured twice and compared
    drift_rows: int = 0  # ... and different as sets
    boundary_tokens: int = 0  # tokens whose row an earlier call lacked and a later one brought
    stale_kv_rows: int = 0  # computed by other weights than those that filled the KV cache before them
    replaced_rows: int = 0  # of an earlier call, whose place a later one's took
    drift_values: int = 0  # entries of fed columns that two calls brought, and differently
    coverage: Coverage = field(default_factory=Coverage)

    def derived(self) -> dict[str, float]:
        """The share of compared rows that differ."""
        return {"drift_share": self.drift_rows / self.overlap_rows if self.overlap_rows else 0.0}


@dataclass(frozen=True, kw_only=True, eq=False)
class UnfedTokens:
    """Tokens that an environment or a template appended behind the last call: in the record, never fed to the model.

    ``token_ids``: int32, at least one. ``role``: a chat role. ``call_id``: what spans and captures call them by.
    ``columns``: one entry per token, for every column of the calls. Raises DataError.

    >>> UnfedTokens(token_ids=[5, 6], role="tool", call_id="observation").role
    'tool'
    """

    token_ids: NDArray[Any]
    role: str | None = None
    call_id: str
    columns: Mapping[str, Any] = field(default_factory=dict)  # takes arrays too; AlignedColumn by name ever after

    def __post_init__(self) -> None:
        token_ids = as_integers(self.token_ids, np.int32, what="token_ids", ndim=1)
        if len(token_ids) == 0:
            raise DataError("expected at least one token that was not fed, got none", kind=ErrorKind.SHAPE)
        check_text(self.call_id, "call_id")
        settle(self, token_ids=token_ids, columns=aligned_columns(self.columns, len(token_ids)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembly:
    """The records of one rollout, one per segment, and what was decided on the way.

    >>> Assembly(records=(), report=AssemblyReport(breaks=1)).report.breaks
    1
    """

    records: tuple[RouteRecord, ...]
    report: AssemblyReport


def assemble(
    calls: Iterable[ModelCall | UnfedTokens],
    spec: RouteSpec,
    *,
    sample_id: str | RecordKey,
    group: str | None = None,
    overlap: Literal["keep_first", "keep_last"] = "keep_first",
    on_break: Literal["raise", "split"] = "raise",
    on_missing: Literal["mark", "raise"] = "mark",
    attributes: Mapping[str, str] | None = None,
) -> Assembly:
    """Join calls, in the order they were made, into one record per unbroken context.

    ``sample_id``: the records' name; a RecordKey says their attempt too, and the segment of the first one (0 and 0
    without). ``group``: ties the samples of one prompt.
    ``overlap``: which capture stays where two calls bring the same row; differences are counted either way (a bfloat16
    re-prefill flips about 2% of rows per layer, so equality is not required). Both policies decide token by token,
    between captures of equal reach. Under either, rows in all layers replace rows in some, which replace none; captures
    of different layers are not mixed, so that ``captures`` names the exact source of a row (``merge_layers`` joins
    pipeline stages).
    ``on_break``: what happens where a prompt does not extend the tokens before it. ``on_missing``: whether rows that
    were fed and did not come are marked with their state or refused. The last of ``calls`` may be UnfedTokens; behind
    a call that was aborted before it sampled a token, ``on_missing`` decides about them too. A token inside a record
    whose row no call brought is ``lost``, unless its call was made without capture.

    Every call is verified first. Copies: each record owns its arrays. Raises DataError naming call, token and
    sample, UsageError for an unknown policy.

    >>> from routeplane import ModelCall, RouteSpec
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0,))
    >>> call = ModelCall(
    ...     prompt_ids=[5, 6], generation_ids=[7], routes=[[[3, 1]], [[0, 5]]], weights_version=1, call_id="c"
    ... )
    >>> [record] = assemble([call], spec, sample_id=RecordKey("s", 2, 0)).records
    >>> str(record.key), record.coverage().missing_share
    ('s/2/0', 0.0)
    """
    key = sample_id if isinstance(sample_id, RecordKey) else RecordKey(sample_id, 0, 0)
    _check_policies(overlap=overlap, on_break=on_break, on_missing=on_missing)
    with _naming(key.sample_id):
        made, tail = _split_tail(list(calls))
        verified = [_checked(call, spec) for call in made]
        segments = _plan(verified, split=on_break == "split")
        records, report = [], AssemblyReport(calls=len(verified), breaks=len(segments) - 1)
        for index, segment in enumerate(segments):
            unfed = tail if index == len(segments) - 1 else None
            fill = _Fill(segment, spec, unfed)
            for position in range(len(segment)):
                fill.add(position, keep_last=overlap == "keep_last")
            captures = fill.captures()
            if on_missing == "raise":
                _refuse_missing(captures)
            record = RouteRecord(
                sample_id=key.sample_id,
                attempt=key.attempt,
                segment=key.segment + index,
                group=group,
                token_ids=_tokens(segment, unfed),
                routes=fill.routes_SLK,
                captures=captures,
                spec=spec,
                columns=fill.columns(),
                **beside_rows(segment, unfed, attributes=attributes),
            )
            records.append(record)
            stale = _stale_kv_rows(segment, captures)
            report = report.merge(replace(fill.counts, records=1, coverage=record.coverage(), stale_kv_rows=stale))
    return Assembly(records=tuple(records), report=report)


@contextmanager
def _naming(sample_id: str) -> Iterator[None]:
    """Name the sample in errors of its calls, which know their own names alone."""
    try:
        yield
    except DataError as error:
        raise error.of_sample(sample_id) from error


def _split_tail(given: list[ModelCall | UnfedTokens]) -> tuple[list[ModelCall], UnfedTokens | None]:
    tail = given[-1] if given and isinstance(given[-1], UnfedTokens) else None
    calls = given if tail is None else given[:-1]
    if any(isinstance(call, UnfedTokens) for call in calls):
        raise DataError("expected tokens that were not fed behind the last call alone", kind=ErrorKind.CONTEXT_BREAK)
    made = [call for call in calls if isinstance(call, ModelCall)]
    if len(made) < len(calls):
        raise refused("ModelCalls", ", ".join(sorted({type(call).__name__ for call in calls})))
    return made, tail


def _tokens(segment: Sequence[ModelCall], unfed: UnfedTokens | None) -> NDArray[np.int32]:
    token_S = segment[-1].token_ids
    return token_S if unfed is None else np.concatenate([token_S, unfed.token_ids])


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
        found = find_problems(routes_RLK, spec.select(layers), first_token=call.first_row)
        if found:
            raise DataError.from_problems(found, what=f"illegal routes of call {call.call_id}")
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

    def __init__(self, segment: Sequence[ModelCall], spec: RouteSpec, unfed: UnfedTokens | None = None) -> None:
        self._segment = segment
        self._spec = spec
        self._unfed = unfed
        size = segment[-1].num_tokens + (0 if unfed is None else len(unfed.token_ids))
        _check_columns(segment, unfed)
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
        fed = call.num_fed
        unexplained_S = np.flatnonzero((self._rank_S[:fed] == _ABSENT) & (self._state_S[:fed] == _UNKNOWN))
        self._state_S[unexplained_S] = _CODE[call.loss or "not_captured"]
        if position > 0 and call.loss is None and _brings_rows(call):
            # a first call may leave out rows of a prefix; a later one left out what no other brings
            self._state_S[unexplained_S[unexplained_S < call.first_row]] = _CODE["lost"]
        self._call_S[unexplained_S] = position

    def _take(self, position: int, call: ModelCall, *, keep_last: bool) -> None:
        where = slice(call.first_row, call.rows_stop)
        new_RLK = self._on_spec_layers(call)
        new_rank_R, old_rank_R = _rank(new_RLK), self._rank_S[where]
        self._count_column_drift(call, position, (new_rank_R > _ABSENT) & (old_rank_R > _ABSENT))
        self._count_drift(self.routes_SLK[where], new_RLK, (new_rank_R > _ABSENT) & (old_rank_R > _ABSENT))
        better_R = new_rank_R > old_rank_R
        filled = int(np.count_nonzero(better_R & (old_rank_R == _ABSENT) & self._known(where, position)))
        self.counts = replace(self.counts, boundary_tokens=self.counts.boundary_tokens + filled)
        taken_R = better_R | (keep_last & (new_rank_R == old_rank_R) & (new_rank_R > _ABSENT))
        replaced = self.counts.replaced_rows + int(np.count_nonzero(taken_R & (old_rank_R > _ABSENT)))
        self.counts = replace(self.counts, replaced_rows=replaced)
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

    def _count_column_drift(self, call: ModelCall, position: int, both_R: NDArray[np.bool_]) -> None:
        """Count entries of fed columns that this call and the one whose row stands both brought, and differently."""
        fed = [name for name, column in call.columns.items() if column.type.aligned == "fed"]
        if not fed or not both_R.any():
            return
        at_S = np.flatnonzero(both_R) + call.first_row
        found = 0
        for name in fed:
            for token in at_S.tolist():
                theirs = self._segment[int(self._call_S[token])].columns[name][token : token + 1]
                found += not theirs.equals(call.columns[name][token : token + 1])
        self.counts = replace(self.counts, drift_values=self.counts.drift_values + found)

    def columns(self) -> dict[str, AlignedColumn]:
        """Aligned columns: a fed one has the entry of the call whose row stands, others that of the call that brought
        the token."""
        starts = [0, *(call.num_tokens for call in self._segment)]
        found: dict[str, AlignedColumn] = {}
        for name, column in self._segment[0].columns.items():
            parts = [self._column(call, name) for call in self._segment]
            cuts = [part[start:] for start, part in zip(starts, parts, strict=False)]
            tail = [] if self._unfed is None else [self._unfed.columns[name]]
            where = f"call {self._segment[-1].call_id}"
            joined = concatenate_columns([*cuts, *tail], name=name, where=where)
            if column.type.aligned == "fed":
                joined = self._fed_column(joined, parts, name)
            found[name] = joined
        return found

    def _column(self, call: ModelCall, name: str) -> AlignedColumn:
        layers = self._spec.layer_ids if call.layer_ids is None else call.layer_ids
        slots = [self._spec.slot(layer) for layer in layers]
        column: AlignedColumn = call.columns[name]
        return column.place_layers(slots, self._spec.num_layers, name=name)

    def _fed_column(self, joined: AlignedColumn, parts: Sequence[AlignedColumn], name: str) -> AlignedColumn:
        """Entries of tokens whose row a later call brought, from that call."""
        # as one list of entries, of which each token has its place
        offsets = np.cumsum([len(joined), *(len(part) for part in parts)])
        place_S = np.arange(len(joined))
        rows_S = np.flatnonzero(self._rank_S > _ABSENT)
        place_S[rows_S] = offsets[self._call_S[rows_S]] + rows_S
        return concatenate_columns([joined, *parts], name=name, where="assembly").take(place_S)

    def captures(self) -> tuple[Capture, ...]:
        """Runs of equal (call, state, version). What is still unexplained at the end was never fed."""
        state_S, call_S = self._state_S.copy(), self._call_S.copy()
        left = state_S == _UNKNOWN
        state_S[left], call_S[left] = _CODE["not_fed"], len(self._segment) - 1
        same_run = (np.diff(state_S) == 0) & (np.diff(call_S) == 0) & (np.diff(self._cached_S.astype(np.int8)) == 0)
        edges = np.flatnonzero(~same_run) + 1
        tail = [] if self._unfed is None else [len(state_S) - len(self._unfed.token_ids)]
        bounds = sorted({0, *edges.tolist(), *tail, len(state_S)})
        found: list[Capture] = []
        for start, stop in itertools.pairwise(bounds):
            if tail and start == tail[0] and self._unfed is not None:
                found += self._unfed_captures(start, stop, call=self._unfed.call_id)
            else:
                found += self._captures(start, stop, STATES[int(state_S[start])], self._segment[int(call_S[start])])
        return tuple(found)

    def _unfed_captures(self, start: int, stop: int, *, call: str) -> list[Capture]:
        """Those of the tokens behind the last call: not fed.

        Where no call sampled a token (the first one was aborted before), all but the last one are marked as the call's
        rows are that did not come: tokens of a prompt count as fed until one is sampled.
        """
        sampled = any(len(each.generation_ids) for each in self._segment)
        last = start if sampled else stop - 1
        state = self._segment[-1].loss or "not_captured"
        marked = [Capture(start=start, stop=last, call=call, weights_version=None, state=state)] if start < last else []
        return [*marked, Capture(start=last, stop=stop, call=call, weights_version=None, state="not_fed")]

    def _captures(self, start: int, stop: int, state: CaptureState, call: ModelCall) -> list[Capture]:
        """One capture per version of the weights."""
        # Cached rows may come from weights before an update; rows that are not there come from none.
        known = state in ("captured", "partial") and not self._cached_S[start]
        spans = call.row_versions() if known else ((start, stop, None),)
        return [
            Capture(
                start=max(start, first), stop=min(stop, last), call=call.call_id, weights_version=version, state=state
            )
            for first, last, version in spans
            if first < stop and last > start
        ]


def _stale_kv_rows(segment: Sequence[ModelCall], captures: Sequence[Capture]) -> int:
    """Rows after an update inside their call, or of a call that found rows of other weights in the prefix cache."""
    stale = {token for start, stop in stale_kv(captures) for token in range(start, stop)}
    before: set[int] = set()
    reached: dict[str, set[int]] = {}
    for call in segment:
        reached[call.call_id] = set(before) if call.cached else set()
        before |= {version for _, _, version in call.row_versions() if version is not None}
    for capture in captures:
        known = capture.state in ("captured", "partial") and capture.weights_version is not None
        if known and reached.get(capture.call, set()) - {capture.weights_version}:
            stale |= set(range(capture.start, capture.stop))
    return len(stale)


def _brings_rows(call: ModelCall) -> bool:
    return call.routes is not None and bool((_rank(call.routes) > _ABSENT).any())


def _rank(routes_RLK: NDArray[np.int16]) -> NDArray[np.int8]:
    missing_RL = missing_rows(routes_RLK)
    return np.where(missing_RL.all(axis=1), _ABSENT, np.where(missing_RL.any(axis=1), _SOME, _WHOLE)).astype(np.int8)


def _refuse_missing(captures: Iterable[Capture]) -> None:
    for capture in captures:
        if capture.state not in ("captured", "cached", "not_fed"):
            raise DataError(
                f"expected rows for tokens [{capture.start}, {capture.stop}), got none: {capture.state} "
                f"@ call {capture.call}",
                kind=ErrorKind.ROUTES_MISSING,
            )


def beside_rows(
    segment: Sequence[ModelCall], unfed: UnfedTokens | None, *, attributes: Mapping[str, str] | None
) -> dict[str, Any]:
    """What the record of some calls holds beside its rows: its spans, log-probabilities and attributes."""
    media = segment[-1].media
    return {
        "spans": _spans(segment, unfed),
        "logprobs": _logprobs(segment, unfed),
        "attributes": {**(attributes or {}), **({"media": json.dumps(list(media))} if media else {})},
    }


def _spans(segment: Sequence[ModelCall], unfed: UnfedTokens | None) -> tuple[Span, ...]:
    spans: list[Span] = []
    at = 0
    for call in segment:
        prompt = len(call.prompt_ids)
        if prompt > at:
            spans.append(Span(start=at, stop=prompt, kind="prompt", call=call.call_id, weights_version=None))
        spans += [
            Span(
                start=start,
                stop=stop,
                kind="generation",
                call=call.call_id,
                weights_version=version,
                sampling=call.sampling,
            )
            for start, stop, version in call.version_spans()
        ]
        at = call.num_tokens
    if unfed is not None:
        stop = at + len(unfed.token_ids)
        spans.append(
            Span(start=at, stop=stop, kind="prompt", role=unfed.role, call=unfed.call_id, weights_version=None)
        )
    return tuple(spans)


def _logprobs(segment: Sequence[ModelCall], unfed: UnfedTokens | None) -> NDArray[np.float32] | None:
    if all(call.logprobs is None for call in segment):
        return None
    size = segment[-1].num_tokens + (0 if unfed is None else len(unfed.token_ids))
    logprobs_S = np.full(size, np.nan, dtype=np.float32)
    for call in segment:
        if call.logprobs is not None:
            logprobs_S[len(call.prompt_ids) : call.num_tokens] = call.logprobs
    return logprobs_S


def _check_columns(segment: Sequence[ModelCall], unfed: UnfedTokens | None) -> None:
    """Every call, and what follows the last, must carry the same columns; calls of some layers differ in these."""
    types = _kinds(segment[0].columns)
    for part in (*segment, *(() if unfed is None else (unfed,))):
        found = _kinds(part.columns)
        if found != types:
            raise DataError(
                f"expected token columns {types} in every call, got {found} @ call {part.call_id}",
                kind=ErrorKind.TOKEN_COLUMN,
            )


def _kinds(columns: Mapping[str, AlignedColumn]) -> dict[str, str]:
    """Types by name, without the number of layers."""
    return {
        name: f"{column.dtype} {list(column.type.axes)} {column.type.aligned} nullable={column.type.nullable}"
        for name, column in columns.items()
    }
