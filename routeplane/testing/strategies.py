"""Hypothesis strategies for what routeplane carries: specs, legal routes, named corruptions, records, whole rollouts,
conversations, sealed blocks, sampling masks.

Every draw is small, valid and the caller's; what is drawn beside the data (a corruption's kind, a rollout's true rows)
is the expectation to test against. Arrays shrink towards few tokens, ids 0..K-1 and nothing missing. Needs the extra
``testing``; knows base only.

Axes: S token positions, R rows of a call, L captured layers, K top-k slots.

``rollouts`` are multi-turn rollouts as an engine and a harness make them, with what is true of every call. Their rows
are watermarks of segment, token and layer; what a re-prefill computes differently is a watermark of the call.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from routeplane.errors import ErrorKind
from routeplane.record.aligned import MASK_STATES, AlignedColumn, Alignment, ColumnType, read_column
from routeplane.record.calls import ModelCall, RowLoss
from routeplane.record.prefixes import as_delta
from routeplane.record.record import Prefix, RouteRecord
from routeplane.record.spans import PRESENT_STATES, STATES, Capture, CaptureState, Span, SpanKind
from routeplane.record.spec import MAX_EXPERTS, MISSING, RouteSpec
from routeplane.stream import new_stream
from routeplane.testing.builders import watermark, watermarked_spec

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "CORRUPTIONS",
    "MAX_TURNS",
    "Block",
    "Conversation",
    "Corruption",
    "Rollout",
    "Turn",
    "aligned_columns",
    "blocks",
    "conversations",
    "corruptions",
    "names",
    "records",
    "rollouts",
    "routes",
    "sampling_masks",
    "specs",
]

# Widths at which a narrower type, the narrow encoding or int16 itself ends.
_EDGE_WIDTHS = (127, 128, 129, 254, 255, 256, 257, 512, MAX_EXPERTS)

_COLUMN_TYPES = ("i1", "u1", "<i2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "?")

_LOGPROBS = st.floats(max_value=0, width=32) | st.just(np.nan)
_ENCODINGS: tuple[Literal["plain", "auto"], ...] = ("plain", "auto")
_KINDS: tuple[SpanKind, ...] = ("prompt", "generation")
_ALIGNMENTS: tuple[Alignment, ...] = ("fed", "sampled")
_FORMS = ("plain", "number", "array", "row", "list")  # of a column; a plain one declares nothing, as those of 1.0


def names(*, min_size: int = 1) -> st.SearchStrategy[str]:
    """Short texts that utf-8 can carry, from all of Unicode."""
    return st.text(st.characters(codec="utf-8"), min_size=min_size, max_size=6)


@st.composite
def specs(
    draw: st.DrawFn,
    *,
    min_layers: int = 1,
    max_layers: int = 3,
    min_top_k: int = 1,
    max_top_k: int = 5,
    min_experts: int = 1,
    max_experts: int = MAX_EXPERTS,
) -> RouteSpec:
    """Geometries: one width or one per layer, often at the edge of a type; layers with gaps; named or not."""
    top_k = draw(st.integers(min_top_k, max_top_k))
    low = max(top_k, min_experts)
    edges = [width for width in _EDGE_WIDTHS if low <= width <= max_experts]
    widths = st.integers(low, min(low + 12, max_experts))
    widths = st.one_of(widths, st.sampled_from(edges)) if edges else widths
    layer_ids = sorted(draw(st.sets(st.integers(0, 95), min_size=min_layers, max_size=max_layers)))
    per_layer = draw(st.booleans())
    return RouteSpec(
        num_experts=tuple(draw(widths) for _ in layer_ids) if per_layer else draw(widths),
        top_k=top_k,
        layer_ids=tuple(layer_ids),
        model=draw(st.sampled_from(["", "tiny-moe", "модель"])),
    )


@st.composite
def routes(
    draw: st.DrawFn, spec: RouteSpec, *, tokens: st.SearchStrategy[int] | None = None, missing: bool = True
) -> NDArray[np.int16]:
    """Legal routes int16 ``[S, L, K]`` of their own memory; with ``missing``, any row may be MISSING.

    ``tokens``: how many, default 0 to 6. Every set of ids can come, in many orders within the row.
    """
    size = draw(st.integers(0, 6) if tokens is None else tokens)
    shape = (size, *spec.row_shape)
    raw_SLK = draw(arrays(np.int64, shape, elements=st.integers(0, MAX_EXPERTS - 1)))
    spare_L11 = np.asarray(spec.experts_per_layer)[:, None] - spec.top_k + 1
    # sorted draws with repetition from E - K + 1 values, plus 0..K-1, are exactly the sets of K distinct ids below E
    sorted_SLK = np.sort(raw_SLK % spare_L11, axis=2) + np.arange(spec.top_k)
    routes_SLK: NDArray[np.int16] = sorted_SLK.astype(np.int16)[:, :, draw(st.permutations(range(spec.top_k)))]
    if missing:
        routes_SLK[draw(arrays(np.bool_, shape[:2], elements=st.booleans()))] = MISSING
    return routes_SLK


# ----------------------------------------------------------------------------------------------------------------------
# Corruptions
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Corruption:
    """Routes that are illegal under ``spec`` in exactly one row, or as a whole (``token`` and ``layer`` None then).

    ``kind``: what must be found. ``layer``: a decoder-layer id.
    """

    name: str
    spec: RouteSpec
    routes: NDArray[Any]
    kind: ErrorKind
    token: int | None = None
    layer: int | None = None


@dataclass(frozen=True, kw_only=True)
class _RowRule:
    """How a legal row of K ids, none MISSING, becomes an illegal one; ``draw`` picks slots and values."""

    kind: ErrorKind
    corrupt: Callable[[st.DrawFn, NDArray[np.int16], int], Sequence[int] | NDArray[np.int16]]
    min_top_k: int = 1
    min_experts: int = 1
    max_experts: int = MAX_EXPERTS


def _put(draw: st.DrawFn, row_K: NDArray[np.int16], value: int) -> NDArray[np.int16]:
    changed_K = row_K.copy()
    changed_K[draw(st.integers(0, len(row_K) - 1))] = value
    return changed_K


def _duplicate(draw: st.DrawFn, row_K: NDArray[np.int16], width: int) -> NDArray[np.int16]:
    source, target = draw(st.permutations(range(len(row_K))))[:2]
    changed_K = row_K.copy()
    changed_K[target] = row_K[source]
    return changed_K


_ROW_RULES: dict[str, _RowRule] = {
    "duplicate_id": _RowRule(kind=ErrorKind.DUPLICATE_ID, min_top_k=2, corrupt=_duplicate),
    "all_zero": _RowRule(kind=ErrorKind.DUPLICATE_ID, min_top_k=2, corrupt=lambda draw, row_K, width: 0 * row_K),
    "one_slot_missing": _RowRule(
        kind=ErrorKind.PARTIAL_ROW, min_top_k=2, corrupt=lambda draw, row_K, width: _put(draw, row_K, MISSING)
    ),
    "one_slot_left": _RowRule(
        kind=ErrorKind.PARTIAL_ROW,
        min_top_k=2,
        corrupt=lambda draw, row_K, width: _put(draw, np.full_like(row_K, MISSING), int(row_K[0])),
    ),
    "other_negative": _RowRule(
        kind=ErrorKind.PARTIAL_ROW,
        corrupt=lambda draw, row_K, width: _put(draw, row_K, draw(st.integers(-(2**15), -2))),
    ),
    "all_minus_two": _RowRule(kind=ErrorKind.PARTIAL_ROW, corrupt=lambda draw, row_K, width: 0 * row_K - 2),
    "first_id_outside": _RowRule(
        kind=ErrorKind.ID_OUT_OF_RANGE, corrupt=lambda draw, row_K, width: _put(draw, row_K, width)
    ),
    "far_outside": _RowRule(
        kind=ErrorKind.ID_OUT_OF_RANGE,
        corrupt=lambda draw, row_K, width: _put(draw, row_K, draw(st.integers(width, 2**15 - 1))),
    ),
    "filler_255": _RowRule(
        kind=ErrorKind.ID_OUT_OF_RANGE, max_experts=255, corrupt=lambda draw, row_K, width: _put(draw, row_K, 255)
    ),
    # ids 128..254 read as int8; 255 would read as -1
    "wrapped_int8": _RowRule(
        kind=ErrorKind.PARTIAL_ROW,
        min_experts=129,
        corrupt=lambda draw, row_K, width: _put(draw, row_K, draw(st.integers(128, min(width, 255) - 1)) - 256),
    ),
}

_ARRAY_RULES: dict[str, tuple[ErrorKind, Callable[[NDArray[np.int16]], NDArray[Any]]]] = {
    "layer_dropped": (ErrorKind.SHAPE, lambda routes_SLK: routes_SLK[:, :-1]),
    "layer_added": (ErrorKind.SHAPE, lambda routes_SLK: np.concatenate([routes_SLK[:, :1], routes_SLK], axis=1)),
    "slot_dropped": (ErrorKind.SHAPE, lambda routes_SLK: routes_SLK[:, :, :-1]),
    "slot_added": (ErrorKind.SHAPE, lambda routes_SLK: np.concatenate([routes_SLK, routes_SLK[:, :, :1]], axis=2)),
    "flattened": (ErrorKind.SHAPE, lambda routes_SLK: routes_SLK.reshape(len(routes_SLK), -1)),
    "batched": (ErrorKind.SHAPE, lambda routes_SLK: routes_SLK[None]),
    "floating": (ErrorKind.DTYPE, lambda routes_SLK: routes_SLK.astype(np.float32)),
    "boolean": (ErrorKind.DTYPE, lambda routes_SLK: routes_SLK.astype(np.bool_)),
}

#: Every corruption that ``corruptions`` knows, by name.
CORRUPTIONS: tuple[str, ...] = (*_ROW_RULES, *_ARRAY_RULES)


@st.composite
def corruptions(draw: st.DrawFn, *, which: Sequence[str] = CORRUPTIONS) -> Corruption:
    """Legal routes with one named corruption, and what must be said of it."""
    name = draw(st.sampled_from(which))
    if name in _ARRAY_RULES:
        spec = draw(specs())
        kind, change = _ARRAY_RULES[name]
        return Corruption(name=name, spec=spec, routes=change(draw(routes(spec, tokens=st.integers(1, 6)))), kind=kind)
    rule = _ROW_RULES[name]
    spec = draw(specs(min_top_k=rule.min_top_k, min_experts=rule.min_experts, max_experts=rule.max_experts))
    routes_SLK = draw(routes(spec, tokens=st.integers(1, 6)))
    token, slot = draw(st.integers(0, len(routes_SLK) - 1)), draw(st.integers(0, spec.num_layers - 1))
    legal_SLK = draw(routes(spec, tokens=st.just(1), missing=False))
    routes_SLK[token, slot] = rule.corrupt(draw, legal_SLK[0, slot], spec.experts_per_layer[slot])
    return Corruption(name=name, spec=spec, routes=routes_SLK, kind=rule.kind, token=token, layer=spec.layer_ids[slot])


# ----------------------------------------------------------------------------------------------------------------------
# Records
# ----------------------------------------------------------------------------------------------------------------------


@st.composite
def records(
    draw: st.DrawFn,
    *,
    spec: RouteSpec | None = None,
    max_tokens: int = 6,
    prefixes: bool = True,
    format: Literal["1.0", "1.1"] = "1.1",
) -> RouteRecord:
    """Valid records of 1 to ``max_tokens`` tokens, in every capture state, with NaN among the log-probabilities.

    They may have columns as ``aligned_columns`` draws them, of numbers that declare nothing under ``format="1.0"``.
    With ``prefixes``, some are deltas whose first rows stand in a record that is not available.
    """
    spec = draw(specs()) if spec is None else spec
    size = draw(st.integers(1, max_tokens))
    states = _states(draw, spec, size=size)
    start = draw(st.integers(0, size)) if prefixes and draw(st.booleans()) else 0
    return RouteRecord(
        sample_id=draw(names()),
        attempt=draw(st.integers(0, 3) | st.just(2**31 - 1)),
        segment=draw(st.integers(0, 3) | st.just(2**31 - 1)),
        group=draw(st.none() | names()),
        token_ids=draw(arrays(np.int32, size, elements=st.integers(0, 2**31 - 1))),
        routes=_rows_of(draw, spec, states=states)[start:],
        routes_start=start,
        prefix=_prefix(draw, start) if start else None,
        spans=_spans(draw, size),
        captures=_captures(draw, states),
        spec=spec,
        logprobs=draw(
            st.none() | arrays(np.float32, size, elements=st.floats(max_value=0, width=32) | st.just(np.nan))
        ),
        # the attribute "slice" has a grammar of its own
        attributes=draw(st.dictionaries(names().filter(lambda name: name != "slice"), names(min_size=0), max_size=2)),
        columns=draw(_columns(spec, size, forms=("plain",) if format == "1.0" else _FORMS)),
    )


def _states(draw: st.DrawFn, spec: RouteSpec, *, size: int) -> list[CaptureState]:
    # one layer is there or not: no row is partial
    never = {"not_fed"} if spec.num_layers > 1 else {"not_fed", "partial"}
    inner: list[CaptureState] = [state for state in STATES if state not in never]
    states = draw(st.lists(st.sampled_from(inner), min_size=size, max_size=size))
    if draw(st.booleans()):
        states[-1] = "not_fed"
    return states


def _rows_of(draw: st.DrawFn, spec: RouteSpec, *, states: Sequence[CaptureState]) -> NDArray[np.int16]:
    routes_SLK = draw(routes(spec, tokens=st.just(len(states)), missing=False))
    for token, state in enumerate(states):
        if state == "partial":
            some = st.sets(st.integers(0, spec.num_layers - 1), min_size=1, max_size=spec.num_layers - 1)
            routes_SLK[token, sorted(draw(some))] = MISSING
        elif state not in PRESENT_STATES:
            routes_SLK[token] = MISSING
    return routes_SLK


def _cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    inner = draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else set()
    return list(pairwise([0, *sorted(inner), size]))


def _versions() -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(-(2**63), 2**63 - 1)


def _spans(draw: st.DrawFn, size: int) -> tuple[Span, ...]:
    kinds = st.sampled_from(_KINDS)
    roles = st.none() | st.sampled_from(("user", "assistant", "tool", ""))
    return tuple(
        Span(
            start=start,
            stop=stop,
            kind=draw(kinds),
            role=draw(roles),
            call=draw(names(min_size=0)),
            weights_version=draw(_versions()),
        )
        for start, stop in _cuts(draw, size)
    )


def _captures(draw: st.DrawFn, states: Sequence[CaptureState]) -> tuple[Capture, ...]:
    changes = {token for token in range(1, len(states)) if states[token] != states[token - 1]}
    more = draw(st.sets(st.integers(1, len(states) - 1), max_size=2)) if len(states) > 1 else set()
    bounds = [0, *sorted(changes | more), len(states)]
    return tuple(
        Capture(
            start=start,
            stop=stop,
            call=draw(names(min_size=0)),
            weights_version=draw(_versions()) if states[start] in ("captured", "partial") else None,
            state=states[start],
        )
        for start, stop in pairwise(bounds)
    )


def _prefix(draw: st.DrawFn, stop: int) -> Prefix:
    return Prefix(
        sample_id=draw(names()),
        attempt=draw(st.integers(0, 3)),
        segment=draw(st.integers(0, 3)),
        stop=stop,
        checksum=draw(st.integers(0, 2**64 - 1)),
    )


def aligned_columns(spec: RouteSpec, tokens: int) -> st.SearchStrategy[dict[str, AlignedColumn]]:
    """Up to two columns of ``tokens`` entries by name, for a record of ``spec`` or a call: every form and value type.

    An entry is a number, an array of one shape, an array ``[L, K]`` over the routes' own axes, or a list; either
    alignment; nullable or not, or a number that declares nothing. Floats may be NaN. No name is one with rules.

    >>> from routeplane import RouteSpec
    >>> strategy = aligned_columns(RouteSpec(num_experts=8, top_k=2, layer_ids=(0, 1)), 3)
    """
    return _columns(spec, tokens, forms=_FORMS)


@st.composite
def _columns(draw: st.DrawFn, spec: RouteSpec, size: int, *, forms: Sequence[str]) -> dict[str, AlignedColumn]:
    plain = names().map(lambda name: f"x_{name}")  # no name of the format's own begins so
    found = draw(st.dictionaries(plain, st.sampled_from(forms), max_size=2))
    return {name: _column(draw, spec, size, form=form) for name, form in found.items()}


def _column(draw: st.DrawFn, spec: RouteSpec, size: int, *, form: str) -> AlignedColumn:
    dtype = np.dtype(draw(st.sampled_from([kind for kind in _COLUMN_TYPES if kind != "?" or form in _FORMS[:2]])))
    if form == "plain":
        return read_column(ColumnType(dtype=dtype.name), draw(arrays(dtype, size)), offsets=None, valid=None, name="x")
    aligned, nullable = draw(st.sampled_from(_ALIGNMENTS)), draw(st.booleans())
    if form == "list":
        entries = arrays(dtype, st.integers(0, 3))
        lists = draw(st.lists(st.none() | entries if nullable else entries, min_size=size, max_size=size))
        return AlignedColumn.of_lists(lists, dtype=dtype.name, aligned=aligned, nullable=nullable)
    shape, axes = {"number": ((), ()), "array": ((1, 2), ("y", "x")), "row": (spec.row_shape, ("layers", "topk"))}[form]
    valid = draw(arrays(np.bool_, size)) if nullable else None
    return AlignedColumn.of(draw(arrays(dtype, (size, *shape))), aligned=aligned, axes=axes, valid=valid)


@st.composite
def sampling_masks(
    draw: st.DrawFn, token_ids: Sequence[int], *, prompt: int = 0, vocab_size: int = 2**31 - 1
) -> dict[str, AlignedColumn]:
    """The columns ``sampling_mask`` and ``sampling_mask_state`` of a sequence: what its tokens were drawn from.

    Tokens before ``prompt`` were not sampled and have no list. A list has 1 to 4 ids below ``vocab_size``, the sampled
    one among them; it may be capped, and others are full or unknown. Shrinks towards unknown.

    >>> strategy = sampling_masks([5, 6, 7], prompt=1, vocab_size=50)
    """
    lists: list[list[int]] = []
    codes: list[int] = []
    for at, token in enumerate(token_ids):
        state = draw(st.sampled_from(MASK_STATES)) if at >= prompt else "unknown"
        others = draw(st.sets(st.integers(0, vocab_size - 1), max_size=3)) if state in ("listed", "capped") else None
        lists.append([] if others is None else sorted({int(token), *others}))
        codes.append(MASK_STATES.index(state))
    return {
        "sampling_mask": AlignedColumn.of_lists(lists, dtype="int32", aligned="sampled", axis="kept"),
        "sampling_mask_state": AlignedColumn.of(np.asarray(codes, dtype=np.uint8), aligned="sampled"),
    }


# ----------------------------------------------------------------------------------------------------------------------
# Blocks
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """The content of one sealed block.

    ``whole``: the records that it means, in order. ``stored``: the same as they stand in it; some are deltas of
    records before them in the block.
    """

    spec: RouteSpec
    whole: tuple[RouteRecord, ...]
    stored: tuple[RouteRecord, ...]
    encoding: Literal["plain", "auto"]

    def sealed(self) -> bytes:
        """The block as a whole v1 stream, with its trailer."""
        out = io.BytesIO()
        with new_stream(out, self.spec, encoding=self.encoding) as sink:
            for record in self.stored:
                sink.write(record)
        return out.getvalue()


@st.composite
def blocks(draw: st.DrawFn, *, spec: RouteSpec | None = None, max_rollouts: int = 2) -> Block:
    """Blocks of 1 to ``max_rollouts`` rollouts, each recorded after some of its turns, later ones as deltas.

    Records as ``records`` draws them; several rollouts have no token columns. Shrinks towards one record of one token.

    >>> strategy = blocks(max_rollouts=1)
    """
    spec = draw(specs()) if spec is None else spec
    whole: list[RouteRecord] = []
    stored: list[RouteRecord] = []
    count = draw(st.integers(1, max_rollouts))
    for rollout in range(count):
        last = draw(records(spec=spec, prefixes=False))
        if count > 1:  # the records of a stream have the same columns
            last = replace(last, columns={}, checksum=None)
        stops = sorted(draw(st.sets(st.integers(1, last.num_tokens), max_size=2)) | {last.num_tokens})
        bases: tuple[RouteRecord, RouteRecord] | None = None
        for turn, stop in enumerate(stops):
            part = last.slice(0, stop)
            one = replace(part, sample_id=f"rollout-{rollout}", attempt=turn, segment=0, attributes={}, checksum=None)
            kept = one if bases is None or draw(st.booleans()) else as_delta(one, bases[0], stored=bases[1])
            bases = (one, kept)
            whole.append(one)
            stored.append(kept)
    encoding: Literal["plain", "auto"] = draw(st.sampled_from(_ENCODINGS))
    return Block(spec=spec, whole=tuple(whole), stored=tuple(stored), encoding=encoding)


# ----------------------------------------------------------------------------------------------------------------------
# Rollouts
# ----------------------------------------------------------------------------------------------------------------------

#: Calls of one rollout, at most.
MAX_TURNS = 5

_LOSSES: tuple[RowLoss, ...] = ("aborted", "lost", "not_captured")
# watermark samples: the true rows of segments 0 and 1, then the drift of each call
_FIRST_DRIFT_SAMPLE = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Turn:
    """One call, and what is true of it.

    ``segment``: the unbroken context it belongs to. ``rows_SLK``: what its forward computed for each of the call's
    tokens. ``brought_SL``: which of these rows the call brought, on the spec's layers.
    """

    call: ModelCall
    segment: int
    rows_SLK: NDArray[np.int16]
    brought_SL: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """The calls of one rollout in order, and the truth: the tokens of every segment, the true row of every token.

    ``token_ids`` holds one int32 array per segment. More than one segment means that a prompt did not extend what came
    before it.
    """

    spec: RouteSpec
    turns: tuple[Turn, ...]
    token_ids: tuple[NDArray[np.int32], ...]

    @property
    def calls(self) -> tuple[ModelCall, ...]:
        """What ``assemble`` takes."""
        return tuple(turn.call for turn in self.turns)

    def segment(self, index: int) -> tuple[Turn, ...]:
        """The turns of one segment."""
        return tuple(turn for turn in self.turns if turn.segment == index)

    def true_rows(self, index: int) -> NDArray[np.int16]:
        """Fresh int16 ``[S, L, K]``: the row of every token of a segment, as its first forward computed it."""
        return _watermarks(self.spec, index, len(self.token_ids[index]))


@dataclass(kw_only=True)
class _Context:
    """What the harness holds between two calls."""

    tokens: list[int] = field(default_factory=list)
    media: tuple[str, ...] = ()
    version: int = 0
    held: int = 0  # one past the last token for which a row came
    segment: int = 0
    columns: bool = False
    can_break: bool = True


@st.composite
def rollouts(draw: st.DrawFn, *, spec: RouteSpec | None = None, breaks: bool = True) -> Rollout:
    """Rollouts of 1 to MAX_TURNS calls and at most 40 tokens.

    By choice: prompts that add nothing, generations of no tokens, the last token fed or not, rows left out at the front
    or absent for a declared reason, calls without routes, some layers only, holes, a prefix cache, re-prefills that
    differ or merely come in another order, media, token columns, and (``breaks``) one context break. ``spec``: as
    ``watermarked_spec`` makes them, layers below 64.
    """
    if spec is None:
        layers = draw(st.sets(st.integers(0, 63), min_size=1, max_size=3))
        spec = watermarked_spec(layers=sorted(layers), top_k=draw(st.integers(1, 3)))
    context = _Context(columns=draw(st.booleans()), can_break=breaks)
    turns: list[Turn] = []
    token_ids: list[NDArray[np.int32]] = []
    for position in range(draw(st.integers(1, MAX_TURNS))):
        turns.append(_turn(draw, spec, context=context, position=position))
        token_ids[context.segment :] = [turns[-1].call.token_ids.copy()]
    return Rollout(spec=spec, turns=tuple(turns), token_ids=tuple(token_ids))


def _turn(draw: st.DrawFn, spec: RouteSpec, *, context: _Context, position: int) -> Turn:
    known = 0 if _breaks(draw, context, position=position) else len(context.tokens)
    if draw(st.booleans()):
        context.media = (*context.media, f"sha256:{position}")
    start = len(context.tokens)
    prompt = start + draw(st.integers(0, 3))
    total = prompt + draw(st.integers(0 if prompt else 1, 4))
    context.tokens += [1_000 * (position + 1) + token for token in range(start, total)]
    context.version += draw(st.integers(0, 1))
    rows_SLK = _computed(draw, spec, context=context, position=position, known=known)
    brought_SL, capture = _capture(draw, rows_SLK, spec=spec, generated=total - prompt, held=context.held)
    held_S = np.flatnonzero(brought_SL.any(axis=1))
    context.held = max(context.held, int(held_S[-1]) + 1 if held_S.size else 0)
    token_S = np.arange(total)
    call = ModelCall(
        prompt_ids=np.asarray(context.tokens[:prompt], dtype=np.int32),
        generation_ids=np.asarray(context.tokens[prompt:], dtype=np.int32),
        weights_version=draw(st.sampled_from([context.version, None])),
        call_id=f"call-{position}",
        logprobs=_logprobs(context.segment, token_S[prompt:]) if draw(st.booleans()) else None,
        media=context.media,
        columns=_turn_columns(position, token_S) if context.columns else {},
        **capture,
    )
    return Turn(call=call, segment=context.segment, rows_SLK=rows_SLK, brought_SL=brought_SL)


def _breaks(draw: st.DrawFn, context: _Context, *, position: int) -> bool:
    """Whether this call is the one that does not extend what came before; then ``context`` is cut back."""
    if not (context.can_break and context.tokens and draw(st.integers(0, 3)) == 3):
        return False
    how = draw(st.sampled_from(["shorter", "edited", *(["other_media"] if context.media else [])]))
    if how == "shorter":
        # at least one token less, and whatever follows has ids that no earlier call gave
        del context.tokens[draw(st.integers(0, len(context.tokens) - 1)) :]
    elif how == "edited":
        context.tokens[draw(st.integers(0, len(context.tokens) - 1))] += 500_000
    else:
        context.media = (*context.media[:-1], f"sha256:other-{position}")
    context.can_break, context.held = False, 0
    context.segment += 1
    return True


def _watermarks(spec: RouteSpec, sample: int, total: int) -> NDArray[np.int16]:
    layer_L1 = np.asarray(spec.layer_ids)[:, None]
    return watermark(sample, np.arange(total)[:, None, None], layer=layer_L1, k=np.arange(spec.top_k))


def _computed(draw: st.DrawFn, spec: RouteSpec, *, context: _Context, position: int, known: int) -> NDArray[np.int16]:
    """The rows of one forward; of ``known`` tokens some differ from the first forward's, or have another order."""
    total = len(context.tokens)
    rows_SLK = _watermarks(spec, context.segment, total)
    if known and draw(st.booleans()):
        drifts_SL = draw(arrays(np.bool_, (known, spec.num_layers)))
        drifted_SLK = _watermarks(spec, _FIRST_DRIFT_SAMPLE + position, total)
        rows_SLK[:known][drifts_SL] = drifted_SLK[:known][drifts_SL]
    if known and draw(st.booleans()):
        turned_S = np.flatnonzero(draw(arrays(np.bool_, known)))
        rows_SLK[turned_S] = rows_SLK[turned_S, :, ::-1]
    return rows_SLK


def _capture(
    draw: st.DrawFn, rows_SLK: NDArray[np.int16], *, spec: RouteSpec, generated: int, held: int
) -> tuple[NDArray[np.bool_], Mapping[str, Any]]:
    """Which rows come, and the fields of the call that carry them."""
    total = len(rows_SLK)
    brought_SL = np.zeros((total, spec.num_layers), dtype=np.bool_)
    loss = draw(st.none() | st.sampled_from(_LOSSES)) if draw(st.booleans()) else None
    fed = total if not generated or draw(st.booleans()) else total - 1
    declared = {"loss": loss, "rows": "all" if generated and fed == total else "but_last"}
    if draw(st.integers(0, 5)) == 5:
        return brought_SL, {"routes": None, **declared}
    first, stop = _rows(draw, fed=fed, held=held, short=loss is not None)
    slots = list(range(spec.num_layers))
    named = draw(st.booleans())
    if named:
        slots = draw(st.lists(st.sampled_from(slots), min_size=1, unique=True))
    brought_SL[first:stop, slots] = True
    if draw(st.integers(0, 3)) == 3:
        brought_SL &= draw(arrays(np.bool_, brought_SL.shape))
    routes_SLK = np.where(brought_SL[:, :, None], rows_SLK, np.int16(MISSING))
    return brought_SL, {
        "routes": routes_SLK[first:stop, slots],
        "first_row": first,
        "layer_ids": tuple(spec.layer_ids[slot] for slot in slots) if named else None,
        "cached": draw(st.integers(0, stop)) if draw(st.booleans()) else 0,
        **declared,
    }


def _rows(draw: st.DrawFn, *, fed: int, held: int, short: bool) -> tuple[int, int]:
    """``[first, stop)``: what the engine returns of a call's rows."""
    stop = draw(st.integers(0, fed)) if short else fed
    first = draw(st.sampled_from([0, min(held, stop), draw(st.integers(0, stop))]))
    return first, stop


def _logprobs(segment: int, token_G: NDArray[np.int64]) -> NDArray[np.float32]:
    return -(1 + segment + token_G / 1_024).astype(np.float32)


def _turn_columns(position: int, token_S: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Two token columns whose values name call and token."""
    return {"place": (100 * position + token_S).astype(np.int32), "is_odd": token_S % 2 == 1}


# ----------------------------------------------------------------------------------------------------------------------
# Conversations
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Conversation:
    """Messages in order, each a role with its token ids, and the call that wrote each of the assistant's.

    ``routes``: the true row of every token, int16 ``[S, L, K]``.
    """

    spec: RouteSpec
    messages: tuple[tuple[str, tuple[int, ...]], ...]
    calls: tuple[ModelCall, ...]
    routes: NDArray[np.int16]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens, in order."""
        return tuple(token for _, ids in self.messages for token in ids)


@st.composite
def conversations(draw: st.DrawFn, *, spec: RouteSpec | None = None, max_turns: int = 3) -> Conversation:
    """Conversations of 1 to ``max_turns`` answers: a system prompt or none, then a user or a tool before each answer.

    Nothing is lost and no context breaks (``rollouts`` draw what goes wrong): the calls assemble to one record, with
    ``routes`` for every token but the last. Later calls may leave out the rows that came before. Weights may change
    between turns. Shrinks towards one question and one answer of a token each.

    >>> strategy = conversations(max_turns=2)
    """
    if spec is None:
        layers = draw(st.sets(st.integers(0, 63), min_size=1, max_size=3))
        spec = watermarked_spec(layers=sorted(layers), top_k=draw(st.integers(1, 3)))
    sizes = st.integers(1, 4)
    turns = draw(st.integers(1, max_turns))
    roles = ["system"] if draw(st.booleans()) else []
    for turn in range(turns):
        roles += [draw(st.sampled_from(("user", "tool"))) if turn else "user", "assistant"]
    ids = [draw(st.lists(st.integers(0, 2**31 - 1), min_size=(size := draw(sizes)), max_size=size)) for _ in roles]
    messages = tuple((role, tuple(tokens)) for role, tokens in zip(roles, ids, strict=True))
    rows_SLK = _watermarks(spec, 0, sum(map(len, ids)))
    calls: list[ModelCall] = []
    start, version = 0, 0
    for role, tokens in messages:
        if role == "assistant":
            trimmed: bool = draw(st.booleans()) if calls else False
            held = calls[-1].num_tokens - 1 if trimmed else 0
            version += draw(st.integers(0, 1))
            calls.append(_answer(rows_SLK, messages, start=start, size=len(tokens), first_row=held, version=version))
        start += len(tokens)
    return Conversation(spec=spec, messages=messages, calls=tuple(calls), routes=rows_SLK)


def _answer(
    rows_SLK: NDArray[np.int16],
    messages: Sequence[tuple[str, tuple[int, ...]]],
    *,
    start: int,
    size: int,
    first_row: int,
    version: int,
) -> ModelCall:
    token_S = np.asarray([token for _, ids in messages for token in ids], dtype=np.int32)
    stop = start + size
    return ModelCall(
        prompt_ids=token_S[:start],
        generation_ids=token_S[start:stop],
        routes=rows_SLK[first_row : stop - 1].copy(),
        first_row=first_row,
        weights_version=version,
        call_id=f"answer-{start}",
    )
