"""Rows checked, counted and laid out by compiled loops, for arrays as numpy has them.

The way to ``vectors`` (extra ``numba``): plans what a loop is given, by address, and looks at what is left over.
Locates nothing, and knows no spec: ``validate`` loads this file where numba is installed, and finds the rows in numpy
where the verdict is no.

Axes: S tokens, L layers, K top-k slots, P rows of the table of limits, R runs of layers.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from routeplane.record.kernels import vectors
from routeplane.record.kernels.vectors import (
    ASIDE_ALIGN,
    MAX_TOP_K,
    VECTOR_BYTES,
    VECTORS,
    lay,
    move,
    present_steps,
    steps_are_legal,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "MAX_TOP_K",
    "count_present",
    "lay_rows",
    "move_rows",
    "present_parts",
    "quiet_records",
    "rows_are_legal",
    "shows_enough",
]


def rows_are_legal(rows: NDArray[Any], widths: tuple[int, ...]) -> bool:
    """Whether every row of ``rows`` ``[S, L, K]`` is all MISSING, or in range and pairwise distinct.

    ``rows``: C-contiguous, int16 in native order (MISSING is -1) or uint8 as the ``narrow`` encoding stores it (MISSING
    is a whole row of 0xFF), at any address, K of at most MAX_TOP_K; only read. ``widths``: E of each of the L layers,
    at most 256 for uint8. Exactly ``validate.all_legal`` of the (widened) rows. The caller has checked all that. The
    first call for a type and K compiles, or loads what an earlier process compiled.
    """
    count, top_k = rows.size // rows.shape[2], rows.shape[2]
    how = _plan(widths, top_k, rows.dtype.char)
    steps = max(0, (count - how.spare) // how.step)
    if steps and not steps_are_legal((rows.ctypes.data, steps, how.address, how.period, 0), how.row):
        return False
    done = steps * how.step
    steps = -(-(count - done) // how.step)
    tail = np.empty((steps * how.step + how.spare, top_k), dtype=rows.dtype)
    tail.view(f"i{rows.itemsize}").fill(-1)
    tail[: count - done] = rows.reshape(-1, top_k)[done:]
    return bool(steps_are_legal((tail.ctypes.data, steps, how.address, how.period, done % how.period), how.row))


def count_present(rows: NDArray[Any], widths: tuple[int, ...], *, first: int, most: int) -> tuple[int, bool]:
    """How many rows from row ``first`` on are legal and not MISSING; and whether a row that is not ended the count.

    Rows are counted over tokens and layers, from 0, and looked at in steps of some 100 rows: at most ``most`` rows are,
    and where nothing ended the count, less than two steps of these are left out. ``rows``, ``widths``: as in
    ``rows_are_legal``.
    """
    count, top_k = rows.size // rows.shape[2], rows.shape[2]
    how = _plan(widths, top_k, rows.dtype.char)
    steps = min(most, count - first - how.spare) // how.step
    if steps <= 0:
        return 0, False
    address = rows.ctypes.data + first * top_k * rows.itemsize
    done = int(present_steps((address, steps, how.address, how.period, first % how.period), how.row))
    return done * how.step, done < steps


def present_parts(
    flat: NDArray[Any],
    widths: tuple[int, ...],
    *,
    top_k: int,
    first: NDArray[np.int64],
    rows: NDArray[np.int64],
    absent: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Which parts hold ``rows`` legal rows that are there, and ``absent`` MISSING ones behind them: fresh bool.

    ``flat``: ids of all rows, int16 or narrow, aligned, read-only; a part begins at its row ``first``, counted over
    tokens and layers, with layer 0 at row 0. ``widths``, ``top_k``: as in ``rows_are_legal``. The caller has checked
    all that.
    """
    how = _plan(widths, top_k, flat.dtype.char)
    right = np.empty(len(first), dtype=np.bool_)
    missing = -1 if flat.dtype == np.int16 else 0xFF
    arrays = (flat, how.limits.reshape(-1), flat.ctypes.data, how.address)
    vectors.present_rows((*arrays, how.period, how.spare, missing, first, rows, absent, right), how.row)
    return right


def quiet_records(
    flat: NDArray[Any],
    token_ids: NDArray[np.int32],
    *,
    shape: tuple[int, int],
    first: NDArray[np.int64],
    ids: NDArray[np.int64],
    tokens: NDArray[np.int64],
    how: tuple[int, int, int, int, int],
) -> NDArray[np.bool_]:
    """``shows_enough`` of several records at once, without rows that are MISSING: fresh bool.

    ``flat``: as in ``present_parts``, of ``shape`` layers and slots a token; ``token_ids``: read-only. A record has
    ``tokens`` rows, from token ``first`` of ``flat`` and token ``ids`` of ``token_ids`` on. ``how``: layer, width,
    step, least_rows and looks. The caller has checked all that.
    """
    quiet = np.empty(len(first), dtype=np.bool_)
    vectors.quiet_records((flat, *shape, token_ids, first, ids, tokens, _NO_TOKENS, quiet), how)
    return quiet


def shows_enough(
    rows: NDArray[Any],
    *,
    absent: NDArray[np.int64],
    token_ids: NDArray[np.int32],
    layer: int,
    width: int,
    step: int,
    least_rows: int,
    looks: int,
) -> bool:
    """Whether nothing is suspect in the rows of a first look for alarms. False says nothing.

    Looks at the very rows that ``alarms`` looks at first; what an alarm is, and the last word on it, are ``alarms``'s.
    Two dozen calls of numpy, each with its own way into the caches, take longer than all of it.

    ``rows``: int16 or narrow ``[S, L, K]``, C-contiguous. ``absent``: tokens to leave out, in ascending order;
    ``token_ids``: ``[S]``, or none: tokens that repeat the one before are left out too. Of what is kept, no two
    neighbours of every ``step``-th row may be equal in the layer at slot ``layer``; and from ``least_rows`` kept rows
    on, ``looks`` evenly spaced ones must use K + K // 2 + 1 experts in each layer, counted by how often two choices
    agree, and some id must be in the upper half. ``width``: E of the widest layer; an id outside is suspect. The
    caller has checked types and lengths.
    """
    # one type each, so that no second version is compiled
    rows, absent, token_ids = _frozen(rows), _frozen(absent), _frozen(token_ids)
    return bool(vectors.shows_enough((rows, absent, token_ids), (layer, width, step, least_rows, looks)))


def _frozen(values: NDArray[Any]) -> NDArray[Any]:
    if values.flags.writeable:
        values = values.view()
        values.flags.writeable = False
    return values


_NO_TOKENS = _frozen(np.empty(0, dtype=np.int64))


def lay_rows(rows: NDArray[Any], slots: tuple[int, ...], *, out: NDArray[np.int16], past_caches: bool = False) -> None:
    """``out[t, i] = rows[t, slots[i]]`` for legal rows, widened to int16.

    ``rows``: ``[S, L, K]`` as in ``rows_are_legal``; legal, which tells a MISSING narrow row by two of its bytes (by
    one where K = 1, which has no expert 255); of an illegal one, illegal rows come out. ``out``: int16 ``[S,
    len(slots), K]``, C-contiguous, of other memory. ``past_caches``: as in ``rows.lay_out``. The caller has checked all
    that, and that the slots exist.
    """
    tokens, layers, top_k = rows.shape
    # one run over all tokens where nothing is left out
    whole = slots == tuple(range(layers))
    runs_R2 = np.asarray([[0, tokens * layers]]) if whole else _runs_of(slots)
    row, stride = (rows.dtype.type(0),) * top_k, layers * top_k * rows.itemsize
    times, runs = 1 if whole else tokens, len(runs_R2)
    # Where every vector begins on such a boundary. Not between runs, where both kinds of writes would share a line of
    # the caches: that takes 20 times as long.
    apart = VECTOR_BYTES // rows.itemsize // top_k * top_k * 2
    aside = past_caches and whole and apart % ASIDE_ALIGN == out.ctypes.data % ASIDE_ALIGN == 0
    lay((rows.ctypes.data, out.ctypes.data, times, stride, runs_R2.ctypes.data, runs, aside), row)


def move_rows(
    rows: NDArray[Any],
    out: NDArray[Any],
    *,
    widths: tuple[int, ...],
    slots: tuple[int, ...],
    into: tuple[int, ...],
    filler: NDArray[np.int16] | None = None,
) -> NDArray[np.bool_]:
    """``out[t, into[i]] = rows[t, slots[i]]`` for all L layers, between integers of any two types.

    ``rows``, ``out``: ``[S, D, K]`` with a D of its own each, in native order, the rows of a token side by side in
    memory, and of other memory. ``widths``: E of each of the L layers, K of at most MAX_TOP_K. ``filler``: ``[K]``,
    what every other layer of ``out`` becomes; default: they stay as they are. The caller has checked all that, and that
    the slots exist.

    Returns which tokens hold a row that is MISSING or not legal, fresh bool ``[S]``; an id that int16 does not hold is
    not legal, and becomes some other one. Bytes are ids, and never MISSING.
    """
    marks, row = np.empty(len(rows), dtype=np.bool_), (np.int16(0),) * rows.shape[2]
    limits, runs = _limits(widths, rows.shape[2]), _moves_of(slots, into)
    others = _runs_of(_others(into, out.shape[1]) if filler is not None else ())
    work = (rows.ctypes.data, out.ctypes.data, limits.ctypes.data, marks.ctypes.data, len(rows), rows.strides[0])
    work_more = (out.strides[0], runs.ctypes.data, len(runs), 0 if filler is None else filler.ctypes.data)
    # by their widths: numba knows one of the C types of a width
    source, target = (np.dtype(each.dtype.str).type(0) for each in (rows, out))
    move((*work, *work_more, others.ctypes.data, len(others)), (row, source, target))
    return marks


@lru_cache(maxsize=64)
def _others(slots: tuple[int, ...], depth: int) -> tuple[int, ...]:
    return tuple(sorted(set(range(depth)) - set(slots)))


@lru_cache(maxsize=64)
def _limits(widths: tuple[int, ...], top_k: int) -> NDArray[np.int16]:
    """The largest id of each lane of a token's rows."""
    limits = np.repeat(np.asarray(widths) - 1, top_k).astype(np.int16)
    limits.flags.writeable = False
    return limits


@lru_cache(maxsize=64)
def _moves_of(slots: tuple[int, ...], into: tuple[int, ...]) -> NDArray[np.int64]:
    """Slots that are neighbours on both sides as ``[first, first of out, rows]``, in order."""
    steps = zip(pairwise(slots), pairwise(into), strict=True)
    starts = [0, *(at for at, ((a, b), (c, d)) in enumerate(steps, 1) if (b, d) != (a + 1, c + 1))]
    runs = [[slots[a], into[a], b - a] for a, b in pairwise([*starts, len(slots)])]
    runs_R3 = np.asarray(runs, dtype=np.int64)
    runs_R3.flags.writeable = False
    return runs_R3


@lru_cache(maxsize=64)
def _runs_of(slots: tuple[int, ...]) -> NDArray[np.int64]:
    """Neighbouring slots as ``[first, rows]``, in order."""
    starts = [at for at, slot in enumerate(slots) if at == 0 or slot != slots[at - 1] + 1]
    runs = [[slots[a], b - a] for a, b in pairwise([*starts, len(slots)])]
    runs_R2 = np.asarray(runs, dtype=np.int64).reshape(-1, 2)
    runs_R2.flags.writeable = False
    return runs_R2


class _Plan(NamedTuple):
    """How rows of one type and K are looked at: what a call would otherwise work out each time."""

    step: int  # rows of a step
    spare: int  # rows that must follow a step: its last vector reads past its rows, up to its own width
    limits: NDArray[Any]  # the largest legal id of each lane, for a step that begins at any of ``period`` rows
    address: int  # of the limits
    period: int  # whole tokens and at least one step, so that one subtraction keeps the phase in range
    row: tuple[Any, ...]


@lru_cache(maxsize=64)
def _plan(widths: tuple[int, ...], top_k: int, kind: str) -> _Plan:
    dtype = np.dtype(kind)
    lanes = VECTOR_BYTES // dtype.itemsize
    step = lanes // top_k * VECTORS
    period = len(widths) * -(-step // len(widths))
    rows_P = np.arange(period + step + VECTOR_BYTES) % len(widths)
    limits_PK = np.repeat(np.asarray(widths)[rows_P, None] - 1, top_k, axis=1).astype(kind)
    limits_PK.flags.writeable = False
    row = (dtype.type(0),) * top_k
    return _Plan(step, -(-lanes // top_k), limits_PK, limits_PK.ctypes.data, period, row)
