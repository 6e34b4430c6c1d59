"""Copying rows of per-record arrays into a batch, run by run: the memory side of a plan.

Owns what is allocated and what is read; decides nothing about order. Knows numpy alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from routeplane.batch.slots import PADDING, Run
from routeplane.errors import refused
from routeplane.record.rows import copy_slots, lay_out
from routeplane.record.spec import MISSING, RouteSpec

__all__ = ["gather_routes", "gather_runs"]


def gather_runs(
    runs: Iterable[Run],
    columns: Sequence[NDArray[Any]],
    *,
    shape: tuple[int, ...],
    fill: bool | int | float,
    dtype: DTypeLike | None = None,
    slots: Sequence[int] | None = None,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Arrays of one dtype and equal further axes, laid out by runs that tile the rows of ``shape``.

    Arguments as in ``TokenPlan.gather``, which has checked the columns. Raises UsageError (ARGUMENT) before any
    allocation.
    """
    source = columns[0]
    target = np.dtype(source.dtype if dtype is None else dtype).newbyteorder("=")
    if not np.can_cast(source.dtype, target, "safe"):
        raise refused(f"a dtype that holds every {source.dtype}", f"{target}")
    picked = None if slots is None else _check_slots(slots, source.shape)
    trailing = source.shape[1:] if slots is None else (len(slots), *source.shape[2:])
    cell = _fill_value(fill, target)
    if out is None:
        out = np.empty((*shape, *trailing), dtype=target)
    elif out.shape != (*shape, *trailing) or out.dtype != target or not out.flags.c_contiguous:
        raise refused(f"out as C-contiguous {target} {[*shape, *trailing]}", f"{out.dtype} {list(out.shape)}")
    out_N = out.reshape(int(np.prod(shape)), *trailing)
    for record, token, row, count in runs:
        rows = slice(row, row + count)
        if record == PADDING:
            out_N[rows] = cell
        elif picked is None:
            out_N[rows] = columns[record][token : token + count]
        else:
            _copy_slots(columns[record][token : token + count], picked, out_N[rows])
    return out


def gather_routes(
    runs: Iterable[Run],
    columns: Sequence[NDArray[Any]],
    *,
    spec: RouteSpec,
    shape: tuple[int, ...],
    slots: Sequence[int] | None,
    out: NDArray[np.int16] | None = None,
) -> NDArray[np.int16]:
    """``gather_runs`` of legal rows as records hold them, int16 or narrow, MISSING at padding: int16.

    Narrow rows are widened on their way, once, and only those that are laid out. ``spec``: of the columns.
    """
    picked = tuple(range(spec.num_layers)) if slots is None else tuple(_check_slots(slots, columns[0].shape).tolist())
    full = (*shape, len(picked), spec.top_k)
    if out is None:
        out = np.empty(full, dtype=np.int16)
    elif out.shape != full or out.dtype != np.int16 or not out.flags.c_contiguous:
        raise refused(f"out as C-contiguous int16 {list(full)}", f"{out.dtype} {list(out.shape)}")
    out_NLK = out.reshape(int(np.prod(shape)), *full[len(shape) :])
    for record, token, row, count in runs:
        if record == PADDING:
            out_NLK[row : row + count] = MISSING
        else:
            lay_out(columns[record], spec, tokens=(token, token + count), slots=picked, out=out_NLK[row : row + count])
    return out


def _check_slots(slots: Sequence[int], shape: tuple[int, ...]) -> NDArray[np.int64]:
    if len(shape) < 2 or len(slots) == 0 or min(slots) < 0 or max(slots) >= shape[1]:
        raise refused(f"slots of axis 1 of an array of shape {list(shape)}", f"{list(slots)}")
    return np.asarray(slots, dtype=np.int64)


def _copy_slots(part: NDArray[Any], slots: NDArray[np.int64], out: NDArray[Any]) -> None:
    """``out[...] = part[:, slots]`` for arrays ``[rows, slot, ...]``; the slots exist."""
    if part.dtype != out.dtype or not part.flags.c_contiguous:
        out[...] = part[:, slots]
        return
    copy_slots(part, slots, out=out)


def _fill_value(fill: bool | int | float, dtype: np.dtype[Any]) -> NDArray[Any]:
    whole = dtype.kind in "iub"
    try:
        cell = np.full((), int(fill) if whole else fill, dtype=dtype)
    except (OverflowError, ValueError):
        raise refused(f"a fill that {dtype} holds", repr(fill)) from None
    if whole and cell.item() != fill:  # int() drops a fraction, bool keeps one bit
        raise refused(f"a fill that {dtype} holds", repr(fill))
    return cell
