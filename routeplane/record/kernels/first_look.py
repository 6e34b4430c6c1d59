"""The first look for alarms, compiled: whether some rows of a sequence show enough for it to be sound.

Owns the one use of numba for alarms (extra ``numba``). Looks at the very rows that ``alarms`` looks at first, and says
no more than that nothing is suspect there; what an alarm is, and the last word on it, are ``alarms``'s. Two dozen calls
of numpy, each with its own way into the caches, take longer than all of it. Loaded by ``kernels``.

Axes: S tokens, L captured layers, K top-k slots, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.record.kernels.vectors import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["shows_enough"]


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
    """Whether nothing is suspect in the rows of a first look. False says nothing.

    ``rows``: int16 or narrow ``[S, L, K]``, C-contiguous. ``absent``: tokens to leave out, in ascending order;
    ``token_ids``: ``[S]``, or none: tokens that repeat the one before are left out too. Of what is kept, no two
    neighbours of every ``step``-th row may be equal in the layer at slot ``layer``; and from ``least_rows`` kept rows
    on, ``looks`` evenly spaced ones must use more than K + 1 experts in each layer, counted by how often two choices
    agree. ``width``: E of the widest layer; an id outside is suspect. The caller has checked types and lengths.
    """
    # one type each, so that no second version is compiled
    rows, absent, token_ids = _frozen(rows), _frozen(absent), _frozen(token_ids)
    return bool(_shows_enough(rows, absent, token_ids, layer, width, step, least_rows, looks))


def _frozen(values: NDArray[Any]) -> NDArray[Any]:
    if values.flags.writeable:
        values = values.view()
        values.flags.writeable = False
    return values


@compiled
def _shows_enough(
    rows: Any, absent: Any, token_ids: Any, layer: int, width: int, step: int, least_rows: int, looks: int
) -> bool:
    tokens, layers, top_k = rows.shape
    kept = np.empty(tokens, dtype=np.int64)
    count = next_absent = 0
    for token in range(tokens):
        if next_absent < len(absent) and absent[next_absent] == token:
            next_absent += 1
        elif token == 0 or len(token_ids) == 0 or token_ids[token] != token_ids[token - 1]:
            kept[count] = token
            count += 1
    for at in range(step, count, step):
        here, before, differs = kept[at], kept[at - step], False
        for slot in range(top_k):
            differs |= rows[here, layer, slot] != rows[before, layer, slot]
        if not differs:
            return False
    if count < least_rows:
        return True
    looks = min(looks, count)
    draws = looks * top_k
    load_LE = np.zeros((layers, width), dtype=np.int32)
    agreeing_L = np.zeros(layers, dtype=np.int64)
    for look in range(looks):
        token = kept[look * (count - 1) // max(1, looks - 1)]
        for place in range(layers):
            for slot in range(top_k):
                expert = rows[token, place, slot]
                if expert < 0 or expert >= width:
                    return False
                # the sum of squares grows by this much when a load grows by one
                agreeing_L[place] += 2 * load_LE[place, expert] + 1
                load_LE[place, expert] += 1
    return bool(draws * draws >= (top_k + 1) * agreeing_L.max())
