"""Rows that another system wrote where nothing was captured: MISSING by their place, whatever they hold.

``arange(K)`` and zeros are legal routes to somebody, so no value tells filler from a route; only the sender's layout
does. Pure function; knows no sender.

Axes: S token positions, D layers as the sender counts them, L captured layers, K top-k slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from routeplane.capture.wire import LayerAxis, rows_from_axis
from routeplane.errors import refused

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.record.spec import RouteSpec

__all__ = ["rows_without_filler"]


def rows_without_filler(
    routes: NDArray[Any],
    spec: RouteSpec,
    *,
    captured: Sequence[tuple[int, int]],
    axis: LayerAxis = "decoder",
    call: str | None = None,
) -> NDArray[np.int16]:
    """The rows of an array ``[S, D, K]`` inside the intervals ``captured``, MISSING everywhere else: fresh int16
    ``[S, L, K]``.

    ``captured``: ``[start, stop)`` of the positions that an engine was asked about, in order and apart. What stands
    outside is not looked at. Raises UsageError for other intervals, and as ``wire.rows_from_axis``.
    """
    array_SDK = np.asarray(routes)
    bounds = [0, *itertools.chain.from_iterable(captured), len(array_SDK)]
    if any(a > b for a, b in itertools.pairwise(bounds)):
        raise refused(f"intervals in order, inside [0, {len(array_SDK)})", f"{list(captured)[:8]}")
    rows_SLK = spec.missing_rows(len(array_SDK))
    for start, stop in captured:
        rows_SLK[start:stop] = rows_from_axis(array_SDK[start:stop], spec, axis=axis, first_row=start, call=call)
    return rows_SLK
