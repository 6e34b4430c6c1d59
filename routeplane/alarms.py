"""Statistics of legal rows that a healthy capture does not show: reported by default, an error only by choice.

Every reader asks, so the common answer, none, has to be cheap: each alarm is first looked for in a part of the rows in
which a true case shows, and confirmed in full only there.

Axes: S tokens, N rows looked at, L captured layers, K top-k slots, E experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from routeplane.errors import ErrorKind, Problem, UsageError
from routeplane.spec import MISSING
from routeplane.validate import missing_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.spec import RouteSpec

__all__ = ["find_alarms"]

# Rows of the first look at a layer. Few draws show fewer effective experts than there are, never more on average, so a
# layer that shows enough has them; one that does not is looked at in full.
_FIRST_LOOK = 16


def find_alarms(
    routes: NDArray[np.int16],
    spec: RouteSpec,
    *,
    token_ids: NDArray[np.int32] | None = None,
    first_token: int = 0,
    sample: str | None = None,
    longest_run: int = 32,
    least_rows: int = 64,
) -> list[Problem]:
    """Statistics of legal ``routes`` ``[S, L, K]`` that point at a broken capture, as ``alarm`` problems.

    * identical rows: more than ``longest_run`` consecutive tokens with the same rows in *all* layers (a stale buffer);
    * constant layer: one layer gives the same row for all of at least ``least_rows`` tokens (an unbound kernel);
    * entropy collapse: fewer than K + 1 effective experts in a layer over at least ``least_rows`` tokens. A layer that
      shows more in 16 evenly spaced rows is not looked at further.

    Tokens that lack a row in any layer are left out. A layer with E == K has one set of ids to give, and is left out.
    Runs of one repeated token are honest (measured: 64 equal tokens give 64 equal rows; greedy decoding repeats at most
    2 rows in all layers), so with ``token_ids`` ``[S]`` positions that repeat their predecessor are left out. Raises
    UsageError for token ids of another length.
    """
    if token_ids is not None and len(token_ids) != len(routes):
        raise UsageError(
            f"expected one token id for each of {len(routes)} rows, got {len(token_ids)}", kind=ErrorKind.ARGUMENT
        )
    choosing = [slot for slot, width in enumerate(spec.experts_per_layer) if width > spec.top_k]
    if not choosing:
        return []
    keep_S = _present(routes)
    if token_ids is not None and len(token_ids) > 1:
        keep_S[1:] &= token_ids[1:] != token_ids[:-1]
    kept = np.flatnonzero(keep_S)
    found = _run_alarm(routes, kept, choosing, longest_run)
    if len(kept) >= least_rows:
        spaced = np.linspace(0, len(kept) - 1, min(_FIRST_LOOK, len(kept)), dtype=np.int64)
        suspects = _suspects(routes[kept[spaced]], spec)
        for slot in (slot for slot in choosing if suspects[slot]):
            found += _layer_alarms(routes[kept, slot], spec, spec.layer_ids[slot])
    return [_placed(problem, first_token=first_token, sample=sample) for problem in found]


def _present(routes_SLK: NDArray[np.int16]) -> NDArray[np.bool_]:
    """Tokens with a row in every layer. Nearly always all but the last; the smallest id tells that fastest."""
    keep_S = np.ones(len(routes_SLK), dtype=np.bool_)
    if len(routes_SLK) > 1 and routes_SLK[:-1].min() == MISSING:
        return np.asarray(~missing_rows(routes_SLK).any(axis=1))
    keep_S[-1:] = ~missing_rows(routes_SLK[-1:]).any(axis=1)
    return keep_S


def _run_alarm(
    routes_SLK: NDArray[np.int16], kept: NDArray[np.int64], choosing: list[int], longest_run: int
) -> list[Problem]:
    """The longest run of equal rows in all layers: a part of some run in any one layer, so one layer is asked first."""
    best, start = longest_run, -1
    for first, last in _runs(routes_SLK[kept, choosing[0]][:, None], longest_run):
        stretch_NLK = routes_SLK[kept[first:last]][:, choosing]
        for a, b in _runs(stretch_NLK, best):
            if b - a > best:
                best, start = b - a, first + a
    if start < 0:
        return []
    message = f"expected at most {longest_run} consecutive tokens with equal rows in all layers, got {best}"
    return [Problem(kind=ErrorKind.IDENTICAL_ROWS, message=message, token=int(kept[start]), severity="alarm")]


def _runs(rows_NLK: NDArray[np.int16], longer_than: int) -> list[tuple[int, int]]:
    """``[first, last)`` of the runs of equal rows that are longer than that, in order."""
    if len(rows_NLK) <= longer_than:
        return []
    changes = np.flatnonzero((rows_NLK[1:] != rows_NLK[:-1]).any(axis=(1, 2))) + 1
    bounds = np.concatenate([[0], changes, [len(rows_NLK)]])
    long = np.flatnonzero(np.diff(bounds) > longer_than)
    return [(int(bounds[index]), int(bounds[index + 1])) for index in long]


def _suspects(rows_NLK: NDArray[np.int16], spec: RouteSpec) -> NDArray[np.bool_]:
    """Layers, bool ``[L]``, that use few experts in the rows of a first look. A constant one uses K."""
    layers, width = spec.num_layers, max(spec.experts_per_layer)
    ids = rows_NLK.astype(np.int64) + (np.arange(layers) * width)[None, :, None]
    load_LE = np.bincount(ids.ravel(), minlength=layers * width).reshape(layers, width)
    return np.asarray(_effective(load_LE) < spec.top_k + 1)


def _effective(load_LE: NDArray[np.int64]) -> NDArray[np.float64]:
    """The exponential of the entropy of each layer's load: how many equally used experts would have it."""
    share_LE = load_LE / load_LE.sum(axis=1, keepdims=True)
    bits_LE = share_LE * np.log(np.where(share_LE > 0, share_LE, 1.0))
    return np.asarray(np.exp(-bits_LE.sum(axis=1)))


def _layer_alarms(rows_NK: NDArray[np.int16], spec: RouteSpec, layer: int) -> list[Problem]:
    if (rows_NK == rows_NK[0]).all():
        message = f"expected rows that vary over {len(rows_NK)} tokens, got {rows_NK[0].tolist()} throughout"
        return [Problem(kind=ErrorKind.CONSTANT_LAYER, message=message, layer=layer, severity="alarm")]
    effective = float(_effective(np.bincount(rows_NK.ravel())[None])[0])
    # A gate that uses hardly more experts than it must; a router no wider than K + 1 cannot do otherwise.
    if effective < spec.top_k + 1 < spec.experts_per_layer[spec.slot(layer)]:
        message = f"expected at least {spec.top_k + 1} effective experts, got {effective:.2f}"
        return [Problem(kind=ErrorKind.ENTROPY_COLLAPSE, message=message, layer=layer, severity="alarm")]
    return []


def _placed(problem: Problem, *, first_token: int, sample: str | None) -> Problem:
    token = None if problem.token is None else problem.token + first_token
    return replace(problem, token=token, sample=sample)
