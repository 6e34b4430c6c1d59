"""The counting loops of ``tally``, compiled: one pass over the rows of a layer, tables in the cache.

Owns the one use of numba for statistics (extra ``numba``). Loaded by ``tally`` where it can be; numpy does the same
there, slower. Axes: S tokens, L captured layers, K top-k slots, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.record.kernels.vectors import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["count_load", "count_overlap", "shared_ids"]

# Tokens that are counted in one layer before the next layer's turn: 512 rows of one layer lie 512 * L * K * 2 bytes
# apart from end to end (400 KB for 48 layers and 8 slots), so that a block is read from memory once for all layers.
_BLOCK_TOKENS = 512


def count_load(routes_SLK: NDArray[np.int16], load_LE: NDArray[np.int64], *, rows_L: NDArray[np.int64]) -> None:
    """Add every id to ``load_LE`` and every present row to ``rows_L``, in place; see ``tally``."""
    _count_load(routes_SLK, load_LE, rows_L)


def count_overlap(
    routes_SLK: NDArray[np.int16],
    *,
    shared_L: NDArray[np.int64],
    neighbours_L: NDArray[np.int64],
    repeats_S: NDArray[np.bool_],
    first: int,
    every: int,
) -> None:
    """Add what neighbouring rows share, in place; see ``tally``."""
    mark_E = np.full(max(1, int(routes_SLK.max(initial=-1)) + 1), -1, dtype=np.int64)
    _count_overlap(routes_SLK, shared_L, neighbours_L, repeats_S, mark_E, first, every)


@compiled
def _count_load(routes_SLK: Any, load_LE: Any, rows_L: Any) -> None:
    tokens, layers, slots = routes_SLK.shape
    for begin in range(0, tokens, _BLOCK_TOKENS):
        for layer in range(layers):
            load_E = load_LE[layer]
            for token in range(begin, min(begin + _BLOCK_TOKENS, tokens)):
                row_K = routes_SLK[token, layer]
                if row_K[0] >= 0:
                    rows_L[layer] += 1
                    for slot in range(slots):
                        load_E[np.uint64(row_K[slot])] += 1  # unsigned: no look at indices from the end


@compiled
def _count_overlap(
    routes_SLK: Any, shared_L: Any, neighbours_L: Any, repeats_S: Any, mark_E: Any, first: int, every: int
) -> None:
    tokens, layers, slots = routes_SLK.shape
    for token in range(1, tokens):
        counted = token >= first and (token - first) % every == 0
        equal = True
        for layer in range(layers):
            row_K, before_K = routes_SLK[token, layer], routes_SLK[token - 1, layer]
            if row_K[0] < 0 or before_K[0] < 0:
                equal = False
            else:
                stamp = token * layers + layer
                for slot in range(slots):
                    mark_E[np.uint64(before_K[slot])] = stamp
                shared = 0
                for slot in range(slots):
                    shared += mark_E[np.uint64(row_K[slot])] == stamp
                equal &= shared == slots
                if counted:
                    neighbours_L[layer] += 1
                    shared_L[layer] += shared
            if not (equal or counted):
                break  # whether a token's rows repeat is known with the first layer that differs
        repeats_S[token] = equal


def shared_ids(left_SLK: NDArray[np.int16], right_SLK: NDArray[np.int16]) -> NDArray[np.int32]:
    """Ids that rows at the same place share; see ``tally``."""
    shared_SL = np.empty(left_SLK.shape[:2], dtype=np.int32)
    _shared_ids(left_SLK, right_SLK, shared_SL)
    return shared_SL


@compiled
def _shared_ids(left_SLK: Any, right_SLK: Any, shared_SL: Any) -> None:
    tokens, layers, slots = left_SLK.shape
    for token in range(tokens):
        for layer in range(layers):
            shared = 0
            for slot in range(slots):
                chosen = left_SLK[token, layer, slot]
                for other in range(slots):
                    shared += chosen == right_SLK[token, layer, other]
            shared_SL[token, layer] = shared
