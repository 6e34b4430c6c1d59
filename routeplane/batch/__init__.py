"""Tensors of one training step: plan which token stands in which row, cut what one rank needs, gather the rows.

The names below need torch and load on first use; ``batch.layouts`` (what another stack's batch means) does without.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routeplane.batch.batch import RouteBatch, token_logprobs
    from routeplane.batch.budget import budget_groups
    from routeplane.batch.collation import collate, microbatches
    from routeplane.batch.dataset import RecordDataset
    from routeplane.batch.loader import prefetch
    from routeplane.batch.matching import join
    from routeplane.batch.plan import TokenPlan
    from routeplane.batch.pool import BatchBuffers
    from routeplane.batch.shard import Shard

__all__ = [
    "BatchBuffers",
    "RecordDataset",
    "RouteBatch",
    "Shard",
    "TokenPlan",
    "budget_groups",
    "collate",
    "join",
    "microbatches",
    "prefetch",
    "token_logprobs",
]

#: Where each name is defined. No module here has the name of what the package exports: importing it would shadow that.
_HOMES = {
    "BatchBuffers": "pool",
    "RecordDataset": "dataset",
    "RouteBatch": "batch",
    "Shard": "shard",
    "TokenPlan": "plan",
    "budget_groups": "budget",
    "collate": "collation",
    "join": "matching",
    "microbatches": "collation",
    "prefetch": "loader",
    "token_logprobs": "batch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"routeplane.batch.{_HOMES[name]}"), name)
