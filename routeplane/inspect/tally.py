"""Counting rows: how often each expert was chosen, with which others, and how much of the row before came again.

Pure functions of arrays that add to tables in place. Knows no record and no statistic. Compiled loops do the work where
numba is installed; numpy says the same, and is what they are tested against.

Axes: S tokens, L captured layers, K top-k slots, E experts (the widest layer's).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "count_load",
    "count_overlap",
    "count_pairs",
    "plain_load",
    "plain_overlap",
    "plain_pairs",
    "plain_shared",
    "shared_ids",
]

# Rows that numpy compares at once: K * K bytes for each row and layer.
_BLOCK_TOKENS = 256


def count_load(routes_SLK: NDArray[np.int16], load_LE: NDArray[np.int64], *, rows_L: NDArray[np.int64]) -> None:
    """Add every id of the present rows to ``load_LE`` and their number to ``rows_L``, in place.

    ``routes_SLK``: legal rows, those that are MISSING counted nowhere; only read.
    """
    kernel = _kernel()
    (plain_load if kernel is None else kernel.count_load)(routes_SLK, load_LE, rows_L=rows_L)


def count_pairs(routes_SLK: NDArray[np.int16], pairs_LEE: NDArray[np.int64]) -> None:
    """Add to ``pairs_LEE[l, i, j]`` the rows of layer l that hold i in an earlier slot than j, in place.

    Add the transpose for unordered pairs.
    """
    kernel = _kernel()
    (plain_pairs if kernel is None else kernel.count_pairs)(routes_SLK, pairs_LEE)


def count_overlap(
    routes_SLK: NDArray[np.int16],
    *,
    shared_L: NDArray[np.int64],
    neighbours_L: NDArray[np.int64],
    repeats_S: NDArray[np.bool_],
    first: int,
    every: int,
) -> None:
    """Add what neighbouring rows share, in place; the rows are one sequence.

    ``shared_L``: ids that the row before, of the same layer, holds too, over the ``neighbours_L`` rows of which both
    are present; of tokens ``first``, ``first + every`` and so on. ``repeats_S`` is set where the rows of a token are,
    as sets, in all layers those of the token before it; of every token.
    """
    kernel = _kernel()
    count = plain_overlap if kernel is None else kernel.count_overlap
    count(routes_SLK, shared_L=shared_L, neighbours_L=neighbours_L, repeats_S=repeats_S, first=first, every=every)


def shared_ids(left_SLK: NDArray[np.int16], right_SLK: NDArray[np.int16]) -> NDArray[np.int32]:
    """How many ids rows at the same place share, int32 ``[S, L]`` of its own; both arrays hold present, legal rows.

    A place where either row is MISSING gives a number without meaning.
    """
    kernel = _kernel()
    return plain_shared(left_SLK, right_SLK) if kernel is None else kernel.shared_ids(left_SLK, right_SLK)


@cache
def _kernel() -> Any:
    """The module of compiled loops, loaded when first asked for; None where numba is not installed."""
    try:
        from routeplane.inspect import tally_kernel
    except ImportError:
        return None
    return tally_kernel


def plain_load(routes_SLK: NDArray[np.int16], load_LE: NDArray[np.int64], *, rows_L: NDArray[np.int64]) -> None:
    """``count_load`` in numpy."""
    present_SL = routes_SLK[:, :, 0] >= 0
    rows_L += present_SL.sum(axis=0)
    for layer in range(routes_SLK.shape[1]):
        ids = routes_SLK[present_SL[:, layer], layer].ravel()
        load_LE[layer] += np.bincount(ids, minlength=load_LE.shape[1])


def plain_pairs(routes_SLK: NDArray[np.int16], pairs_LEE: NDArray[np.int64]) -> None:
    """``count_pairs`` in numpy."""
    present_SL = routes_SLK[:, :, 0] >= 0
    width = pairs_LEE.shape[1]
    for layer in range(routes_SLK.shape[1]):
        rows_NK = routes_SLK[present_SL[:, layer], layer].astype(np.int64)
        for slot in range(rows_NK.shape[1]):
            for other in range(slot):
                cells = rows_NK[:, other] * width + rows_NK[:, slot]
                pairs_LEE[layer] += np.bincount(cells, minlength=width * width).reshape(width, width)


def plain_overlap(
    routes_SLK: NDArray[np.int16],
    *,
    shared_L: NDArray[np.int64],
    neighbours_L: NDArray[np.int64],
    repeats_S: NDArray[np.bool_],
    first: int,
    every: int,
) -> None:
    """``count_overlap`` in numpy."""
    tokens, _, slots = routes_SLK.shape
    present_SL = routes_SLK[:, :, 0] >= 0
    for begin in range(1, tokens, _BLOCK_TOKENS):
        here = slice(begin, min(begin + _BLOCK_TOKENS, tokens))
        before = slice(begin - 1, here.stop - 1)
        same_SL = plain_shared(routes_SLK[here], routes_SLK[before])
        both_SL = present_SL[here] & present_SL[before]
        repeats_S[here] = ((same_SL == slots) & both_SL).all(axis=1)
        numbers = np.arange(begin, here.stop)
        counted = (numbers >= first) & ((numbers - first) % every == 0)
        shared_L += (same_SL * both_SL)[counted].sum(axis=0)
        neighbours_L += both_SL[counted].sum(axis=0)


def plain_shared(left_SLK: NDArray[np.int16], right_SLK: NDArray[np.int16]) -> NDArray[np.int32]:
    """``shared_ids`` in numpy: K * K comparisons for each row."""
    shared_SL = np.empty(left_SLK.shape[:2], dtype=np.int32)
    for begin in range(0, len(left_SLK), _BLOCK_TOKENS):
        here = slice(begin, begin + _BLOCK_TOKENS)
        shared_SL[here] = (left_SLK[here, :, :, None] == right_SLK[here, :, None, :]).any(axis=3).sum(axis=2)
    return shared_SL
