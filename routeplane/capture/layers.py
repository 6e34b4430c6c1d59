"""The layer axis of an engine's arrays, turned into rows of a spec, and whether capture worked at all.

What the axis counts is declared and never guessed from its length. A dense layer's slots must be empty and a router's
slots must not be; whether a row is legal is judged by ``record.validate`` when a record is made. Pure numpy, no IO.
Knows no engine package and no encoding.

Axes: R rows that came, S token positions, D decoder layers of the engine, L captured layers, K top-k slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from routeplane.errors import CaptureError, DataError, ErrorKind, Problem, SpecError, refused
from routeplane.record.parse import as_integers
from routeplane.record.spec import MISSING

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.spec import RouteSpec

__all__ = [
    "LayerAxis",
    "LayerOrder",
    "orders_of_axis",
    "rows_from_axis",
    "rows_from_layers",
    "rows_from_slots",
    "rows_without_filler",
]

#: What axis 1 of an engine's array counts: every decoder layer, or the spec's layers alone.
LayerAxis = Literal["decoder", "captured"]

# With K = 1 a row of zeros is expert 0, so a layer of zeros is judged by the chance that a written one would be. Where
# other layers vary: (the share of the commonest expert in the layer that varies least) ** (how many different rows they
# show), that one expert takes all, by 1 / E, that it is expert 0. Where all are zero: that of one row, if experts were
# equally likely. The bound lies below what honest layers of tiny top-1 models show (``tests.capture.top_1``, and
# ``tests.trust.alarm_rates`` for vLLM): behind repeated tokens, layers collapse more the deeper they lie.
_CHANCE = 1e-8
_CHANCE_OF_ALL = 1e-5
_MANY_ROWS = 64


def rows_from_layers(
    layers: NDArray[Any], spec: RouteSpec, *, first_row: int = 0, call: str | None = None
) -> NDArray[np.int16]:
    """The rows of ``spec.layer_ids`` out of an engine's array ``[R, D, K]`` with one slot per decoder layer.

    ``layers``: any integer type; ids are widened or narrowed to int16 after a look at their range. ``first_row`` (the
    token of row 0) and ``call`` serve the messages. Returns read-only int16 ``[R, L, K]``: a view of ``layers`` where
    it is int16 already and the captured layers lie side by side, else memory of its own.

    Raises SpecError where D or K is not the spec's geometry. Raises CaptureError with every finding: DENSE_SLOT where a
    layer outside the spec holds ids, UNCAPTURED_SLOT where a captured layer holds rows that were never written: all
    zero, as the engine's buffer began (for K = 1, where that is a legal row: a layer of nothing else while others
    vary). Raises DataError for other than integers of rank 3 (DTYPE, SHAPE) and for ids beyond int16 (VALUE_RANGE).

    >>> from routeplane import RouteSpec
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(1,))
    >>> rows_from_layers(np.asarray([[[0, 0], [3, 1]]]), spec).tolist()
    [[[3, 1]]]
    """
    layers_RDK = np.asarray(layers)
    _check_layout(layers_RDK, spec, call)
    return _captured_layers(layers_RDK, spec, first_row=first_row, call=call)


def _captured_layers(
    layers_RDK: NDArray[Any],
    spec: RouteSpec,
    *,
    missing_R: NDArray[np.bool_] | None = None,
    first_row: int,
    call: str | None,
) -> NDArray[np.int16]:
    """``missing_R``: rows that may be -1 in dense slots too."""
    _check_dense_slots(layers_RDK, spec, missing_R=missing_R, first_row=first_row, call=call)
    narrow_RLK = layers_RDK[:, _slots(spec.layer_ids)]
    _check_written(narrow_RLK, spec, first_row, call)
    return as_integers(narrow_RLK, np.int16, what=_named("routes", call), ndim=3)


def rows_from_slots(
    slots: NDArray[Any], spec: RouteSpec, *, first_row: int = 0, call: str | None = None
) -> NDArray[np.int16]:
    """The rows of an array ``[R, L, K]`` that has exactly the captured layers, in the spec's order.

    ``slots``: any integer type; ids are looked at layer by layer before they are cast: -1 (MISSING) or below that
    layer's width, else DataError (ID_OUT_OF_RANGE, or PARTIAL_ROW below -1). Returns read-only int16, a view where it
    was that already. Raises SpecError (LAYERS, SHAPE) for another geometry, CaptureError (UNCAPTURED_SLOT) for rows
    that were never written, as ``rows_from_layers``.

    >>> from routeplane import RouteSpec
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(1,))
    >>> rows_from_slots(np.asarray([[[3, 1]], [[-1, -1]]]), spec).tolist()
    [[[3, 1]], [[-1, -1]]]
    """
    slots_RLK = np.asarray(slots)
    what = _named("routes", call)
    _check_kind(slots_RLK, what)
    if slots_RLK.shape[2] != spec.top_k:
        raise SpecError(f"expected {what} with top_k={spec.top_k}, got {slots_RLK.shape[2]}", kind=ErrorKind.SHAPE)
    if slots_RLK.shape[1] != spec.num_layers:
        raise SpecError(
            f"expected {what} with the {spec.num_layers} captured layers {list(spec.layer_ids)}, got "
            f"{slots_RLK.shape[1]}: for one slot per decoder layer say axis='decoder'",
            kind=ErrorKind.LAYERS,
        )
    _check_range(slots_RLK, spec, slots=range(spec.num_layers), first_row=first_row, call=call)
    _check_written(slots_RLK, spec, first_row, call)
    return as_integers(slots_RLK, np.int16, what=what, ndim=3)


def rows_from_axis(
    routes: NDArray[Any], spec: RouteSpec, *, axis: LayerAxis = "decoder", first_row: int = 0, call: str | None = None
) -> NDArray[np.int16]:
    """``rows_from_layers`` (``axis="decoder"``) or ``rows_from_slots`` (``"captured"``).

    Rows that are -1 throughout, in dense slots too, are MISSING: no engine has such a row, and harnesses write it where
    none came.

    >>> from routeplane import RouteSpec
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(1,))
    >>> rows_from_axis(np.asarray([[[0, 0], [3, 1]], [[-1, -1], [-1, -1]]]), spec).tolist()
    [[[3, 1]], [[-1, -1]]]
    """
    if axis not in ("decoder", "captured"):
        raise refused("axis of ('decoder', 'captured')", repr(axis))
    if axis == "captured":
        return rows_from_slots(routes, spec, first_row=first_row, call=call)
    layers_RDK = np.asarray(routes)
    _check_layout(layers_RDK, spec, call)
    _check_range(layers_RDK, spec, slots=spec.layer_ids, first_row=first_row, call=call)
    missing_R = None
    if layers_RDK.dtype.kind == "i" and layers_RDK.size and layers_RDK.shape[1] > spec.num_layers:
        missing_R = layers_RDK.max(axis=(1, 2)) == MISSING
    return _captured_layers(layers_RDK, spec, missing_R=missing_R, first_row=first_row, call=call)


def rows_without_filler(
    routes: NDArray[Any],
    spec: RouteSpec,
    *,
    captured: Sequence[tuple[int, int]],
    axis: LayerAxis = "decoder",
    first_token: int = 0,
    call: str | None = None,
) -> NDArray[np.int16]:
    """The rows of an array ``[S, D, K]`` inside the intervals ``captured``, MISSING everywhere else: fresh int16
    ``[S, L, K]``.

    ``captured``: ``[start, stop)`` of the positions that an engine was asked about, in order and apart. What stands
    outside is not looked at. ``first_token``: the token of row 0, for the messages. Raises UsageError for other
    intervals, and as ``wire.rows_from_axis``.

    >>> from routeplane import RouteSpec
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(1,))
    >>> routes = np.asarray([[[3, 1]], [[0, 1]]])
    >>> rows_without_filler(routes, spec, captured=[(0, 1)], axis="captured").tolist()
    [[[3, 1]], [[-1, -1]]]
    """
    array_SDK = np.asarray(routes)
    bounds = [0, *itertools.chain.from_iterable(captured), len(array_SDK)]
    if any(a > b for a, b in itertools.pairwise(bounds)):
        raise refused(f"intervals in order, inside [0, {len(array_SDK)})", f"{list(captured)[:8]}")
    rows_SLK = spec.missing_rows(len(array_SDK))
    for start, stop in captured:
        rows_SLK[start:stop] = rows_from_axis(
            array_SDK[start:stop], spec, axis=axis, first_row=first_token + start, call=call
        )
    return rows_SLK


class LayerOrder(NamedTuple):
    """An order that a layer axis has by mistake: layer ``d`` stands in slot ``source[d]``.

    ``by``: how far all layers moved, around the end; None where the axis is reversed.

    >>> str(LayerOrder(source=(1, 2, 0), by=1))
    'layers that stand 1 too high'
    """

    source: tuple[int, ...]
    by: int | None

    def __str__(self) -> str:
        if self.by is None:
            return "the last layer first"
        return f"layers that stand {abs(self.by)} too {'high' if self.by > 0 else 'low'}"


def orders_of_axis(depth: int) -> list[LayerOrder]:
    """The orders that an axis of ``depth`` layers has by mistake, the shortest moves first, and the reversed axis last.

    >>> [order.source for order in orders_of_axis(3)]
    [(2, 0, 1), (1, 2, 0), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    """
    shifts = [by for by in sorted(range(1 - depth, depth), key=abs) if by]
    moved = [LayerOrder(tuple((layer + by) % depth for layer in range(depth)), by) for by in shifts]
    return [*moved, LayerOrder(tuple(reversed(range(depth))), None)]


def _check_range(
    routes_RXK: NDArray[Any], spec: RouteSpec, *, slots: Sequence[int], first_row: int, call: str | None
) -> None:
    """Raise DataError unless every id of the captured layers is -1 or in ``[0, E)``; before any cast, any copy."""
    if routes_RXK.size == 0 or _within(routes_RXK, min(spec.experts_per_layer)):
        return
    for slot, layer, width in zip(slots, spec.layer_ids, spec.experts_per_layer, strict=True):
        ids_RK = routes_RXK[:, slot]
        if _within(ids_RK, width):
            continue
        low, high = int(ids_RK.min()), int(ids_RK.max())
        problem = Problem(
            kind=ErrorKind.ID_OUT_OF_RANGE if high >= width else ErrorKind.PARTIAL_ROW,
            message=f"expected ids in [0, {width}) or {MISSING}, got [{low}, {high}]",
            sample=call,
            token=first_row + int(ids_RK.max(axis=1).argmax() if high >= width else ids_RK.min(axis=1).argmin()),
            layer=layer,
        )
        raise DataError.from_problems([problem], what="ids that the router does not have")


def _within(ids: NDArray[Any], width: int) -> bool:
    return int(ids.max()) < width and int(ids.min()) >= MISSING


def _named(what: str, call: str | None) -> str:
    return what if call is None else f"{what} of call {call}"


def _check_kind(routes: NDArray[Any], what: str) -> None:
    if routes.dtype.kind not in "iu":
        raise DataError(f"expected {what} of an integer type, got {routes.dtype}", kind=ErrorKind.DTYPE)
    if routes.ndim != 3:
        raise DataError(f"expected {what} [rows, layers, top_k], got shape {list(routes.shape)}", kind=ErrorKind.SHAPE)


def _check_layout(layers_RDK: NDArray[Any], spec: RouteSpec, call: str | None) -> None:
    what = _named("routes", call)
    _check_kind(layers_RDK, what)
    _, depth, top_k = layers_RDK.shape
    if top_k != spec.top_k:
        raise SpecError(f"expected {what} with top_k={spec.top_k}, got {top_k}", kind=ErrorKind.SHAPE)
    # An axis of MoE layers alone is never long enough to pass for one of all layers, unless they are the same.
    if depth <= spec.layer_ids[-1]:
        raise SpecError(
            f"expected {what} with a slot for every decoder layer, {spec.layer_ids[-1] + 1} at least "
            f"(captured: {list(spec.layer_ids)}), got {depth}",
            kind=ErrorKind.LAYERS,
        )
    if spec.decoder_layers not in (None, depth):
        raise SpecError(
            f"expected {what} with a slot for each of the decoder's {spec.decoder_layers} layers, got {depth}",
            kind=ErrorKind.LAYERS,
        )


def _slots(layer_ids: tuple[int, ...]) -> slice | list[int]:
    """An index of axis D; a slice, hence a view, where the layers lie side by side."""
    if layer_ids[-1] - layer_ids[0] + 1 == len(layer_ids):
        return slice(layer_ids[0], layer_ids[-1] + 1)
    return list(layer_ids)


def _check_dense_slots(
    layers_RDK: NDArray[Any],
    spec: RouteSpec,
    *,
    missing_R: NDArray[np.bool_] | None,
    first_row: int,
    call: str | None,
) -> None:
    dense = sorted(set(range(layers_RDK.shape[1])) - set(spec.layer_ids))
    problems = [
        Problem(
            kind=ErrorKind.DENSE_SLOT,
            message=f"expected zeros in a layer without a router, got {layers_RDK[row, layer].tolist()}",
            sample=call,
            token=first_row + row,
            layer=layer,
        )
        for layer in dense
        if (row := _first_filled(layers_RDK[:, layer], missing_R)) is not None
    ]
    if problems:
        raise CaptureError.from_problems(problems, what="the engine's layers are not the spec's")


def _first_filled(ids_RK: NDArray[Any], missing_R: NDArray[np.bool_] | None) -> int | None:
    """The first row of a layer with ids other than zeros, or other than -1 in a row that may be MISSING. A layer at a
    time, and no copy: all dense layers together can be the whole payload."""
    if not ids_RK.any():
        return None
    filled_R = np.asarray(ids_RK.any(axis=1))
    if missing_R is not None:
        filled_R &= ~missing_R | (ids_RK != MISSING).any(axis=1)
    return _first(filled_R)


def _check_written(narrow_RLK: NDArray[Any], spec: RouteSpec, first_row: int, call: str | None) -> None:
    if spec.top_k > 1 and (narrow_RLK[..., 0] | narrow_RLK[..., 1]).all():
        return  # nearly always: a row of zeros begins with two of them
    empty_RL = _unwritten_top_1(narrow_RLK, spec) if spec.top_k == 1 else np.asarray(~narrow_RLK.any(axis=2))
    problems = [
        Problem(
            kind=ErrorKind.UNCAPTURED_SLOT,
            message=f"expected {spec.top_k} chosen experts, got zeros in {np.count_nonzero(empty_RL[:, slot])} of "
            f"{len(empty_RL)} rows",
            sample=call,
            token=first_row + row,
            layer=layer,
        )
        for slot, layer in enumerate(spec.layer_ids)
        if (row := _first(empty_RL[:, slot])) is not None
    ]
    if problems:
        raise CaptureError.from_problems(problems, what="capture not bound to these layers, or not for every row")


def _unwritten_top_1(narrow_RLK: NDArray[Any], spec: RouteSpec) -> NDArray[np.bool_]:
    """Which rows and layers were never written, for K = 1: whole layers, judged by what the other layers show."""
    zero_L = np.asarray(~narrow_RLK.any(axis=(0, 2)))
    none_RL = np.zeros(narrow_RLK.shape[:2], dtype=np.bool_)
    if not zero_L.any() or len(narrow_RLK) == 0:
        return none_RL
    if zero_L.all():
        chance = prod(1.0 / width for width in spec.experts_per_layer)
        judged = len(narrow_RLK) >= _MANY_ROWS or chance < _CHANCE_OF_ALL
    else:
        varied_VL = np.unique(narrow_RLK[:, ~zero_L, 0], axis=0)
        common = max(int(np.bincount(ids_V).max()) for ids_V in varied_VL.T)
        alone = ((common + 1) / (len(varied_VL) + 1)) ** len(varied_VL)
        judged = alone / min(spec.experts_per_layer) < _CHANCE
    return none_RL | (zero_L & judged)


def _first(flags_R: NDArray[np.bool_]) -> int | None:
    return int(flags_R.argmax()) if flags_R.any() else None
