"""Statistics of legal rows that a healthy capture does not show: reported by default, an error only by choice.

Every reader asks, so the common answer, none, has to be cheap: each alarm is first looked for in a part of the rows in
which a true case shows, and confirmed in full only there.

Axes: S tokens, N rows looked at, L captured layers, K top-k slots, E experts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import comb
from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.errors import ErrorKind, Problem, check_type, refused
from routeplane.record.parse import frozen_view
from routeplane.record.rows import absent_tokens
from routeplane.record.validate import kernels_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from routeplane.record.spec import RouteSpec

__all__ = ["find_alarms", "first_look"]

# Rows of the first look at a layer. Few draws show fewer effective experts than there are, never more on average, so a
# layer that shows enough has them; one that does not is looked at in full.
_FIRST_LOOK = 16
# More tokens than this with the same rows are an alarm; and layers are looked at from so many rows on.
_LONGEST_RUN, _LEAST_ROWS = 32, 64
# Of the different tokens of a collapsed layer, the share that has one row, its ids in one order. A router that has
# collapsed changes at least the order from token to token; a buffer does not. Measured: ``tests.trust.alarm_rates``.
_SAME_SHARE = 0.9
# How rarely chance alone may leave half of the experts unused in all layers.
_CHANCE = 1e-6
_NO_TOKENS = frozen_view(np.empty(0, dtype=np.int32))


def find_alarms(
    routes: NDArray[Any],
    spec: RouteSpec,
    *,
    absent: NDArray[np.int64] | None = None,
    token_ids: NDArray[np.int32] | None = None,
    first_token: int = 0,
    sample: str | None = None,
    longest_run: int = _LONGEST_RUN,
    least_rows: int = _LEAST_ROWS,
) -> list[Problem]:
    """Statistics of legal ``routes`` ``[S, L, K]``, int16 or narrow, that point at a broken capture, as ``alarm``
    problems.

    * identical rows: more than ``longest_run`` consecutive tokens with the same rows in *all* layers (a stale buffer);
    * constant layer: one layer gives the same row for all of at least ``least_rows`` tokens (an unbound kernel). Where
      K = 1 a router may do so honestly: there, expert 0 (a buffer of zeros) for ``least_rows`` *different* tokens;
    * entropy collapse: fewer than K + K // 2 + 1 effective experts in a layer over at least ``least_rows`` tokens,
      and over at least so many different ones, of which 9 in 10 have one row, the ids in the same order. A layer that
      shows more experts in 16 evenly spaced rows is not looked at further. Not where K = 1;
    * unused experts: over at least ``least_rows`` tokens no layer uses an expert of the upper half, and together they
      use half of the lower half, by a chance below one in a million if experts were numbered anyhow (a router
      that is half as wide).

    Tokens that lack a row in any layer are left out (``absent``: which these are, for a caller that knows:
    ``RouteRecord.absent_tokens``). A layer with E == K has one set of ids to give, and is left out.
    Another request's rows, or those of older weights, look like any: token ids, checksums and a second pass tell them.
    Runs of one repeated token are honest (measured: 64 equal tokens give 64 equal rows; greedy decoding repeats at most
    2 rows in all layers), so with ``token_ids`` ``[S]`` positions that repeat their predecessor are left out. Raises
    UsageError for token ids of another length.

    >>> from routeplane import RouteSpec
    >>> stale = np.tile(np.asarray([[[3, 5]]], dtype=np.int16), (40, 1, 1))
    >>> [problem.message for problem in find_alarms(stale, RouteSpec(num_experts=8, top_k=2, layer_ids=(0,)))]
    ['expected at most 32 consecutive tokens with equal rows in all layers, got 40']
    """
    check_type(routes, np.ndarray, expected="routes as an array [S, L, K]")
    if token_ids is not None and len(token_ids) != len(routes):
        raise refused(f"one token id for each of {len(routes)} rows", f"{len(token_ids)}")
    choosing = _choosing(spec)
    if not choosing:
        return []
    if absent is None:
        absent = absent_tokens(routes)
    kernels = kernels_for(routes, spec)
    if kernels is not None and kernels.shows_enough(
        routes,
        absent=absent,
        token_ids=_NO_TOKENS if token_ids is None else token_ids,
        layer=choosing[0],
        width=max(spec.experts_per_layer),
        step=_step(longest_run),
        least_rows=least_rows,
        looks=_FIRST_LOOK,
    ):
        return []  # nearly always
    keep_S = np.ones(len(routes), dtype=np.bool_)
    keep_S[absent] = False
    if token_ids is not None:
        keep_S[1:] &= token_ids[1:] != token_ids[:-1]
    kept = np.flatnonzero(keep_S)
    found = _run_alarm(routes, kept, choosing, longest_run)
    if len(kept) >= least_rows:
        found += _all_layers(routes, kept, spec=spec, choosing=choosing, token_ids=token_ids, least_rows=least_rows)
    return [_placed(problem, first_token=first_token, sample=sample) for problem in found]


def first_look(spec: RouteSpec) -> tuple[int, int, int, int, int] | None:
    """How ``kernels.quiet_records`` looks for the alarms of ``find_alarms``: layer, width, step, least rows, looks.

    None where there is nothing to look for.
    """
    choosing = _choosing(spec)
    if not choosing:
        return None
    return choosing[0], max(spec.experts_per_layer), _step(_LONGEST_RUN), _LEAST_ROWS, _FIRST_LOOK


@lru_cache(maxsize=64)
def _choosing(spec: RouteSpec) -> tuple[int, ...]:
    """Slots of the layers in which there is something to choose."""
    return tuple(slot for slot, width in enumerate(spec.experts_per_layer) if width > spec.top_k)


@lru_cache(maxsize=64)
def _first_ids(layers: int, width: int) -> NDArray[np.intp]:
    """What makes ids of different layers different: ``[L, 1]``, read-only."""
    return frozen_view((np.arange(layers, dtype=np.intp) * width)[:, None])


def _run_alarm(
    routes_SLK: NDArray[Any], kept: NDArray[np.int64], choosing: tuple[int, ...], longest_run: int
) -> list[Problem]:
    """The longest run of equal rows in all layers."""
    best, start = longest_run, -1
    for first, last in _stretches(routes_SLK[:, choosing[0]], kept, longest_run):
        stretch_NLK = routes_SLK[kept[first:last]][:, choosing]
        for a, b in _runs(stretch_NLK, best):
            if b - a > best:
                best, start = b - a, first + a
    if start < 0:
        return []
    message = f"expected at most {longest_run} consecutive tokens with equal rows in all layers, got {best}"
    return [Problem(kind=ErrorKind.IDENTICAL_ROWS, message=message, token=int(kept[start]), severity="alarm")]


def _step(longest_run: int) -> int:
    """How far apart rows may be so that any longer run holds two of them."""
    return max(1, (longest_run + 1) // 2)


def _stretches(rows_SK: NDArray[Any], kept: NDArray[np.int64], longer_than: int) -> Iterator[tuple[int, int]]:
    """Runs of one layer that are longer than that, ``[first, last)`` in ``kept``: each run in all layers is inside one.

    A longer run holds two neighbours of every ``step``-th row, so these are compared first: one row in 16 is read.
    """
    step = _step(longer_than)
    looked_at_NK = rows_SK[kept[::step]]
    repeats = (looked_at_NK[1:] == looked_at_NK[:-1]).all(axis=1)
    if not repeats.any():
        return
    ends = (np.flatnonzero(repeats) + 1) * step
    # a run reaches less than two steps before the first of its repeats, and less than one beyond the last
    breaks = np.flatnonzero(np.diff(ends) > 3 * step) + 1
    for group in np.split(ends, breaks):
        first, last = max(int(group[0]) - 2 * step, 0), min(int(group[-1]) + step, len(kept))
        yield from ((first + a, first + b) for a, b in _runs(rows_SK[kept[first:last]][:, None], longer_than))


def _runs(rows_NLK: NDArray[Any], longer_than: int) -> list[tuple[int, int]]:
    """``[first, last)`` of the runs of equal rows that are longer than that, in order."""
    if len(rows_NLK) <= longer_than:
        return []
    changes = np.flatnonzero((rows_NLK[1:] != rows_NLK[:-1]).any(axis=(1, 2))) + 1
    bounds = np.concatenate([[0], changes, [len(rows_NLK)]])
    long = np.flatnonzero(np.diff(bounds) > longer_than)
    return [(int(bounds[index]), int(bounds[index + 1])) for index in long]


def _suspects(rows_NLK: NDArray[Any], spec: RouteSpec) -> set[int]:
    """Slots of the layers that use few experts in the rows of a first look. A constant one uses K."""
    layers, width = spec.num_layers, max(spec.experts_per_layer)
    ids = np.add(rows_NLK, _first_ids(layers, width), dtype=np.intp)
    load_LE = np.bincount(ids.ravel(), minlength=layers * width).reshape(layers, width)
    # Never more than the effective number, and found without a logarithm: one over the chance that two choices agree.
    draws = rows_NLK[:, 0].size
    suspects = np.flatnonzero(draws**2 < _few(spec.top_k) * np.einsum("le,le->l", load_LE, load_LE))
    if len(suspects) == 0:
        return set()  # nearly always
    return set(suspects[_effective(load_LE[suspects]) < _few(spec.top_k)].tolist())


def _few(top_k: int) -> int:
    """A layer with fewer effective experts uses hardly more than it must; as in ``kernels.shows_enough``.

    The bound grows with K: two odd rows among the 16 of a first look show 12.7 experts where K = 8.
    """
    return top_k + top_k // 2 + 1


def _effective(load_LE: NDArray[np.int64]) -> NDArray[np.float64]:
    """The exponential of the entropy of each layer's load: how many equally used experts would have it."""
    share_LE = load_LE / load_LE.sum(axis=1, keepdims=True)
    bits_LE = share_LE * np.log(np.where(share_LE > 0, share_LE, 1.0))
    return np.asarray(np.exp(-bits_LE.sum(axis=1)))


def _all_layers(
    routes_SLK: NDArray[Any],
    kept: NDArray[np.int64],
    *,
    spec: RouteSpec,
    choosing: tuple[int, ...],
    token_ids: NDArray[np.int32] | None,
    least_rows: int,
) -> list[Problem]:
    """What layers show over enough rows."""
    looks = min(_FIRST_LOOK, len(kept))
    spaced = np.arange(looks) * (len(kept) - 1) // max(1, looks - 1)
    different = np.arange(len(kept)) if token_ids is None else np.unique(token_ids[kept], return_index=True)[1]
    found: list[Problem] = []
    for slot in sorted(_suspects(routes_SLK[kept[spaced]], spec) & set(choosing)):
        rows_NK, layer = routes_SLK[kept, slot], spec.layer_ids[slot]
        found += _layer_alarms(rows_NK, rows_NK[different], spec=spec, layer=layer, least_rows=least_rows)
    return found + _unused_alarm(routes_SLK, kept, spec, spaced)


def _layer_alarms(
    rows_NK: NDArray[Any], different_MK: NDArray[Any], *, spec: RouteSpec, layer: int, least_rows: int
) -> list[Problem]:
    """What one layer shows. ``different_MK``: its rows where each token counts once."""
    enough, only = len(different_MK) >= least_rows, spec.top_k == 1
    if (rows_NK == rows_NK[0]).all():
        if only and not (enough and rows_NK[0, 0] == 0):
            return []
        message = f"expected rows that vary over {len(rows_NK)} tokens, got {rows_NK[0].tolist()} throughout"
        return [Problem(kind=ErrorKind.CONSTANT_LAYER, message=message, layer=layer, severity="alarm")]
    # a narrower router cannot use more
    if only or not enough or spec.experts_per_layer[spec.slot(layer)] <= _few(spec.top_k):
        return []
    effective = float(_effective(np.bincount(rows_NK.ravel())[None])[0])
    if effective >= _few(spec.top_k):
        return []
    share = float(np.unique(different_MK, axis=0, return_counts=True)[1].max()) / len(different_MK)
    if share < _SAME_SHARE:
        return []
    message = (
        f"expected at least {_few(spec.top_k)} effective experts or varied rows, got {effective:.2f} and one row for "
        f"{share:.0%} of {len(different_MK)} different tokens"
    )
    return [Problem(kind=ErrorKind.ENTROPY_COLLAPSE, message=message, layer=layer, severity="alarm")]


def _unused_alarm(
    routes_SLK: NDArray[Any],
    kept: NDArray[np.int64],
    spec: RouteSpec,
    spaced: NDArray[np.int64],
) -> list[Problem]:
    """No id in the upper half of any layer, beyond chance.

    The numbers of experts mean nothing, so those that a layer uses are as likely as any others: of U experts in use,
    all are in the lower half with the chance C(half, U) / C(E, U), in each layer by itself.
    """
    widths = spec.experts_per_layer
    halves_L1 = np.asarray([(width + 1) // 2 for width in widths])[:, None]
    if (routes_SLK[kept[spaced]] >= halves_L1).any():
        return []  # nearly always
    rows_NLK = routes_SLK[kept]
    # fewer than half of the lower half, over all layers: too few rows to tell, or ids that are made up
    if (rows_NLK >= halves_L1).any() or 4 * len(np.unique(rows_NLK)) < max(widths):
        return []
    chance = 1.0
    for slot, width in enumerate(widths):
        used = len(np.unique(rows_NLK[:, slot]))
        chance *= comb((width + 1) // 2, used) / comb(width, used)
    if chance >= _CHANCE:
        return []
    message = f"expected experts up to {max(spec.experts_per_layer) - 1} in use, got none above {int(rows_NLK.max())}"
    return [Problem(kind=ErrorKind.UNUSED_EXPERTS, message=message, severity="alarm")]


def _placed(problem: Problem, *, first_token: int, sample: str | None) -> Problem:
    token = None if problem.token is None else problem.token + first_token
    return replace(problem, token=token, sample=sample)
