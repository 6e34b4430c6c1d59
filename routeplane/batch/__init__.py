"""Tensors of one training step: plan which token stands in which row, cut what one rank needs, gather the rows.

The names below need torch and load on first use; ``batch.layouts`` (what another stack's batch means) does without.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routeplane.batch.admission import StepVerdict, admit_step
    from routeplane.batch.batch import RouteBatch
    from routeplane.batch.collation import BatchBuffers, BatchOptions, collate, microbatches
    from routeplane.batch.columns import MaskCounts, prompt_tokens
    from routeplane.batch.dataset import RecordDataset, Shuffle
    from routeplane.batch.layout_writing import to_layout
    from routeplane.batch.layouts import LAYOUTS, LayoutBatch, StackLayout, from_layout
    from routeplane.batch.loader import prefetch
    from routeplane.batch.logprobs import VocabShard, label_logprobs, token_entropy, token_logprobs
    from routeplane.batch.matching import join
    from routeplane.batch.plan import PlanOptions, TokenPlan, budget_groups
    from routeplane.batch.slots import Shard, stage_layers

__all__ = [
    "LAYOUTS",
    "BatchBuffers",
    "BatchOptions",
    "LayoutBatch",
    "MaskCounts",
    "PlanOptions",
    "RecordDataset",
    "RouteBatch",
    "Shard",
    "Shuffle",
    "StackLayout",
    "StepVerdict",
    "TokenPlan",
    "VocabShard",
    "admit_step",
    "budget_groups",
    "collate",
    "from_layout",
    "join",
    "label_logprobs",
    "microbatches",
    "prefetch",
    "prompt_tokens",
    "stage_layers",
    "to_layout",
    "token_entropy",
    "token_logprobs",
]

#: Where each name is defined. No module here has the name of what the package exports: importing it would shadow that.
_HOMES = {
    "LAYOUTS": "layouts",
    "LayoutBatch": "layouts",
    "StackLayout": "layouts",
    "StepVerdict": "admission",
    "from_layout": "layouts",
    "to_layout": "layout_writing",
    "BatchBuffers": "collation",
    "BatchOptions": "collation",
    "PlanOptions": "plan",
    "RecordDataset": "dataset",
    "RouteBatch": "batch",
    "Shard": "slots",
    "Shuffle": "dataset",
    "TokenPlan": "plan",
    "admit_step": "admission",
    "budget_groups": "plan",
    "collate": "collation",
    "join": "matching",
    "microbatches": "collation",
    "prefetch": "loader",
    "prompt_tokens": "columns",
    "stage_layers": "slots",
    "MaskCounts": "columns",
    "VocabShard": "logprobs",
    "label_logprobs": "logprobs",
    "token_entropy": "logprobs",
    "token_logprobs": "logprobs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"routeplane.batch.{_HOMES[name]}"), name)
