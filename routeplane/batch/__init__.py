"""Tensors of one training step: plan which token stands in which row, cut what one rank needs, gather the rows.

The names below need torch and load on first use; ``batch.layouts`` (what another stack's batch means) does without.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routeplane.batch.batch import RouteBatch, token_logprobs
    from routeplane.batch.collate import collate, microbatches

__all__ = ["RouteBatch", "collate", "microbatches", "token_logprobs"]

_HOMES = {
    "RouteBatch": "batch",
    "collate": "collate",
    "microbatches": "collate",
    "token_logprobs": "batch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"routeplane.batch.{_HOMES[name]}"), name)
