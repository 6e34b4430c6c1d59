"""What other stacks want at padding: filler ids for gates that cannot run live rows.

Owns the ids of ``fill="balanced"``. A pure function of how many padding rows there are; it never sees stored data, and
never a real row. Knows the geometry; knows no plan, no torch.

Axes: P padding rows, L layers, K top-k slots, E experts.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from routeplane.errors import refused
from routeplane.record.spec import RouteSpec

__all__ = ["Fill", "balanced_rows", "check_fill"]

Fill = Literal["missing", "balanced"]


def check_fill(fill: object, spec: RouteSpec, *, expert_parallel: int) -> None:
    """Raise UsageError (ARGUMENT) unless this filler can be made for this geometry."""
    if fill not in ("missing", "balanced"):
        raise refused("fill of ('missing', 'balanced')", repr(fill))
    if isinstance(expert_parallel, bool) or not isinstance(expert_parallel, int) or expert_parallel < 1:
        raise refused("expert_parallel as a positive whole number", repr(expert_parallel))
    for layer, width in zip(spec.layer_ids, spec.experts_per_layer, strict=True):
        if width % expert_parallel:
            raise refused(f"experts that expert_parallel={expert_parallel} divides", f"{width} @ layer {layer}")


def balanced_rows(count: int, spec: RouteSpec, *, expert_parallel: int = 1) -> NDArray[np.int16]:
    """Ids for ``count`` padding rows, spread over experts and expert-parallel ranks: fresh int16 ``[P, L, K]``.

    Number the K slots of the rows one after another, layer after layer from another start, and deal the numbers to
    ranks in turn, then to the experts of each rank in turn (rank ``r`` owns experts ``[r*E/R, (r+1)*E/R)``). So the
    ids of a row are distinct, as K is at most E; no two ranks of a layer differ by more than one assignment, and no two
    experts of a layer either, however few rows there are. Raises UsageError (ARGUMENT) as ``check_fill``.
    """
    check_fill("balanced", spec, expert_parallel=expert_parallel)
    rows_PLK = np.empty((count, *spec.row_shape), dtype=np.int16)
    number_PK = np.arange(count * spec.top_k).reshape(count, spec.top_k)
    for slot, (layer, width) in enumerate(zip(spec.layer_ids, spec.experts_per_layer, strict=True)):
        # a start by layer id, so that a pipeline stage fills its layers as the whole model would; a multiple of the
        # ranks, so that the first row falls on the same ranks in every layer
        dealt_PK = number_PK + layer * expert_parallel
        own = width // expert_parallel
        rows_PLK[:, slot] = dealt_PK % expert_parallel * own + dealt_PK // expert_parallel % own
    return rows_PLK
