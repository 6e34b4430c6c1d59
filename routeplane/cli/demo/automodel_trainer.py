"""Stage two of the demo with NeMo Automodel as the trainer, on a CPU where there is no GPU.

Automodel reads the engine's checkpoint through its own state-dict adapter. Its Qwen3-MoE asks for the current CUDA
device when it is built; where torch has none, ``_without_cuda`` answers for the moment of building, and the rotary
embedding is moved. Nothing of this is needed on a GPU, and nothing of it is in the library.

Run as ``python -m routeplane.cli.demo.automodel_trainer OPTIONS_JSON``; what it prints is ``demo_scoring``'s.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.qwen3_moe.model import Qwen3MoeForCausalLM
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig

from routeplane.cli.demo.scoring import TrainerModel, run_stage
from routeplane.replay import automodel as gates

if TYPE_CHECKING:
    from routeplane.batch.batch import RouteBatch
    from routeplane.cli.demo import DemoOptions

__all__ = ["load", "main"]


def _without_cuda() -> AbstractContextManager[object]:
    if torch.cuda.is_available():
        return nullcontext()
    return mock.patch.object(torch.cuda, "current_device", return_value=0)


def load(options: DemoOptions) -> TrainerModel:
    """The model that the engine used, in float32."""
    config: Any = Qwen3MoeConfig.from_pretrained(options.model_dir, dtype=torch.float32)
    gates.check_setup(engine=options.engine.partition("-")[0], architectures=config.architectures)
    backend = BackendConfig(
        attn="sdpa", linear="torch", rms_norm="torch", rope_fusion=False, experts="torch", dispatcher="torch"
    )
    with _without_cuda():
        model: Any = Qwen3MoeForCausalLM(config, backend=backend)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.model.rotary_emb.device = device
    weights = load_file(Path(options.model_dir) / "model.safetensors")
    model.load_state_dict(model.state_dict_adapter.from_hf(weights))
    model.float().to(device).train(False)

    def logits(micro: RouteBatch) -> torch.Tensor:
        # padding stands on the right, where a causal mask hides it
        found: torch.Tensor = model(micro.token_ids.to(device), position_ids=micro.position_ids.to(device)).logits
        return found.cpu()

    return TrainerModel(layout="padded", logits=logits, attach=partial(gates.attach, model))


def main(arguments: Sequence[str]) -> None:
    """Run the stage with the options given as JSON."""
    run_stage(arguments, load)


if __name__ == "__main__":
    main(sys.argv[1:])
