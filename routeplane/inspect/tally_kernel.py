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

__all__ = ["count_load", "count_overlap", "count_pairs", "shared_ids"]

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
    equal_S: NDArray[np.int32],
) -> None:
    """Add what neighbouring rows share, in place; see ``tally``."""
    mark_E = np.empty(max(1, int(routes_SLK.max(initial=-1)) + 1), dtype=np.int64)
    _count_overlap(routes_SLK, shared_L, neighbours_L, equal_S, mark_E)


def count_pairs(routes_SLK: NDArray[np.int16], pairs_LEE: NDArray[np.int64]) -> None:
    """Add co-activations to ``pairs_LEE``, in place; see ``tally``."""
    _count_pairs(routes_SLK, pairs_LEE)


@compiled
def _count_load(routes_SLK: Any, load_LE: Any, rows_L: Any) -> None:
    tokens, layers, slots = routes_SLK.shape
    for begin in range(0, tokens, _BLOCK_TOKENS):
        for layer in range(layers):
            for token in range(begin, min(begin + _BLOCK_TOKENS, tokens)):
                if routes_SLK[token, layer, 0] >= 0:
                    rows_L[layer] += 1
                    for slot in range(slots):
                        load_LE[layer, routes_SLK[token, layer, slot]] += 1


@compiled
def _count_pairs(routes_SLK: Any, pairs_LEE: Any) -> None:
    tokens, layers, slots = routes_SLK.shape
    for begin in range(0, tokens, _BLOCK_TOKENS):
        for layer in range(layers):
            for token in range(begin, min(begin + _BLOCK_TOKENS, tokens)):
                if routes_SLK[token, layer, 0] >= 0:
                    for slot in range(slots):
                        chosen = routes_SLK[token, layer, slot]
                        for other in range(slot):
                            pairs_LEE[layer, routes_SLK[token, layer, other], chosen] += 1


@compiled
def _count_overlap(routes_SLK: Any, shared_L: Any, neighbours_L: Any, equal_S: Any, mark_E: Any) -> None:
    tokens, layers, slots = routes_SLK.shape
    for begin in range(0, tokens, _BLOCK_TOKENS):
        for layer in range(layers):
            # the token at which an expert was last chosen; the row before the block is looked at again
            mark_E[:] = -2
            previous = begin > 0 and routes_SLK[begin - 1, layer, 0] >= 0
            if previous:
                for slot in range(slots):
                    mark_E[routes_SLK[begin - 1, layer, slot]] = begin - 1
            for token in range(begin, min(begin + _BLOCK_TOKENS, tokens)):
                present = routes_SLK[token, layer, 0] >= 0
                if present:
                    shared = 0
                    for slot in range(slots):
                        chosen = routes_SLK[token, layer, slot]
                        shared += mark_E[chosen] == token - 1
                        mark_E[chosen] = token
                    if previous:
                        neighbours_L[layer] += 1
                        shared_L[layer] += shared
                        equal_S[token] += shared == slots
                previous = present


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
