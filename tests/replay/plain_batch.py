"""A batch with the four attributes that replay asks for, and nothing else; rows are made by hand.

Axes: N token rows, L captured layers, K top-k slots.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from routeplane.testing.contracts.replay_contract import RowsBatch, rows_batch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from routeplane.record.spec import RouteSpec

__all__ = ["PlainBatch", "plain_batch", "random_routes"]


#: What the contract suite gives its adapters.
PlainBatch = RowsBatch


def plain_batch(spec: RouteSpec, rows: Mapping[int, torch.Tensor], *, unexplained_missing: int = 0) -> PlainBatch:
    """A batch from ids ``[N, K]`` by layer."""
    return replace(rows_batch(spec, rows), unexplained_missing=unexplained_missing)


def random_routes(spec: RouteSpec, num_rows: int, *, seed: int, missing: float = 0.0) -> PlainBatch:
    """Legal rows drawn uniformly and apart for each layer; a share of them MISSING, each layer for itself."""
    rng = np.random.default_rng(seed)
    rows = {}
    for layer, width in zip(spec.layer_ids, spec.experts_per_layer, strict=True):
        ids_NK = np.stack([rng.permutation(width)[: spec.top_k] for _ in range(num_rows)])
        ids_NK[rng.random(num_rows) < missing] = -1
        rows[layer] = torch.from_numpy(ids_NK)
    return plain_batch(spec, rows)
