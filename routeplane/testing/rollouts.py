"""Multi-turn rollouts as an engine and a harness make them, with what is true of every call.

Owns the strategy ``rollouts``. Rows are watermarks of segment, token and layer, so that a misplaced row differs
from every true row; what a re-prefill computes differently is a watermark of the call. Knows base and the
builders; never assembles.

Axes: S token positions of a segment (or of a call), R rows of a call, L captured layers, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from routeplane.record.calls import ModelCall, RowLoss
from routeplane.record.spec import MISSING, RouteSpec
from routeplane.testing.builders import watermark, watermarked_spec

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MAX_TURNS", "Rollout", "Turn", "rollouts"]

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
        columns=_columns(position, token_S) if context.columns else {},
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


def _columns(position: int, token_S: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Two token columns whose values name call and token."""
    return {"place": (100 * position + token_S).astype(np.int32), "is_odd": token_S % 2 == 1}
