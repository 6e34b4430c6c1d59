"""A batch with the four attributes that replay asks for, and nothing else; rows are made by hand.

Axes: N token rows, L captured layers, K top-k slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from routeplane.spec import RouteSpec

__all__ = ["PlainBatch", "plain_batch", "random_routes"]


@dataclass(frozen=True, kw_only=True)
class PlainBatch:
    """int16 routes ``[N, L, K]`` under a spec."""

    spec: RouteSpec
    routes_NLK: torch.Tensor
    unexplained_missing: int = 0

    @property
    def num_rows(self) -> int:
        """N."""
        return int(self.routes_NLK.shape[0])

    def layer(self, layer_id: int) -> torch.Tensor:
        """The rows of one layer, int16 ``[N, K]``, a view."""
        return self.routes_NLK[:, self.spec.slot(layer_id)]


def plain_batch(spec: RouteSpec, rows: Mapping[int, torch.Tensor], *, unexplained_missing: int = 0) -> PlainBatch:
    """A batch from ids ``[N, K]`` by layer."""
    stacked = torch.stack([rows[layer] for layer in spec.layer_ids], dim=1).to(torch.int16)
    return PlainBatch(spec=spec, routes_NLK=stacked, unexplained_missing=unexplained_missing)


def random_routes(spec: RouteSpec, num_rows: int, *, seed: int, missing: float = 0.0) -> PlainBatch:
    """Legal rows drawn uniformly and apart for each layer; a share of them MISSING, each layer for itself."""
    rng = np.random.default_rng(seed)
    rows = {}
    for layer, width in zip(spec.layer_ids, spec.experts_per_layer, strict=True):
        ids_NK = np.stack([rng.permutation(width)[: spec.top_k] for _ in range(num_rows)])
        ids_NK[rng.random(num_rows) < missing] = -1
        rows[layer] = torch.from_numpy(ids_NK)
    return plain_batch(spec, rows)
