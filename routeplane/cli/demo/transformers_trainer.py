"""Stage two of the demo with Transformers as the trainer: packed batches, no checkpoint to convert.

Run as ``python -m routeplane.cli.demo.transformers_trainer OPTIONS_JSON``; what it prints is ``demo_scoring``'s.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import Qwen3MoeForCausalLM

from routeplane.cli.demo.scoring import TrainerModel, run_stage
from routeplane.replay import transformers as gates

if TYPE_CHECKING:
    from routeplane.batch.batch import RouteBatch
    from routeplane.cli.demo import DemoOptions

__all__ = ["load", "main"]


def load(options: DemoOptions) -> TrainerModel:
    """The model that the engine used, in float32."""
    model: Any = Qwen3MoeForCausalLM.from_pretrained(
        options.model_dir, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).train(False)

    def logits(micro: RouteBatch) -> torch.Tensor:
        found: torch.Tensor = model(**micro.model_inputs()).logits
        return found

    return TrainerModel(layout="packed", logits=logits, attach=partial(gates.attach, model))


def main(arguments: Sequence[str]) -> None:
    """Run the stage with the options given as JSON."""
    run_stage(arguments, load)


if __name__ == "__main__":
    main(sys.argv[1:])
