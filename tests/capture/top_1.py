"""How often an honest top-1 model looks as if a layer had never been captured: ``python -m tests.capture.top_1``.

Tiny random models with one expert per token, whose routers collapse far more often than trained ones do. A layer counts
as an honest look; a false alarm is an honest layer that ``capture.layers`` takes for unwritten. Any layer with one
expert throughout is looked at, relabelled so that this expert is 0, which makes the case E times as frequent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from numpy.typing import NDArray
from transformers import Llama4ForCausalLM, Llama4TextConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from routeplane.capture.layers import rows_from_slots
from routeplane.errors import CaptureError
from routeplane.record.spec import RouteSpec

__all__ = ["honest_rows", "measure"]

LAYERS, HIDDEN = 4, 64
_COMMON = {
    "vocab_size": 512,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "num_experts_per_tok": 1,
}


def _model(family: str, experts: int, *, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    more: dict[str, Any] = {**_COMMON, "initializer_range": 0.1 if seed % 2 else 0.02}
    if family == "llama4":
        config: Any = Llama4TextConfig(
            **more, intermediate_size_mlp=64, num_local_experts=experts, interleave_moe_layer_step=1
        )
        made: Any = Llama4ForCausalLM(config)
    else:
        made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**more, num_experts=experts, moe_intermediate_size=32))
    made.eval()
    model: torch.nn.Module = made
    return model


def honest_rows(*, seeds: int, lengths: tuple[int, ...] = (8, 16, 32, 64, 200)) -> Iterator[tuple[int, NDArray[Any]]]:
    """The number of experts, and the choices ``[S, L]`` of prompts of random tokens, wide and narrow."""
    for family in ("llama4", "qwen3"):
        for experts in (4, 16, 64):
            for seed in range(seeds):
                model, chosen = _model(family, experts, seed=seed), list[torch.Tensor]()

                def keep(module: Any, args: Any, output: Any, into: list[torch.Tensor] = chosen) -> None:
                    into.append((args[0].reshape(-1, HIDDEN) @ module.weight.T).argmax(-1))

                for name, module in model.named_modules():
                    if name.endswith(("feed_forward.router", "mlp.gate")):
                        module.register_forward_hook(keep)
                for length in lengths:
                    for words in (512, 8):
                        chosen.clear()
                        with torch.no_grad():
                            model(input_ids=torch.randint(1, words, (1, length)), use_cache=False)
                        yield experts, torch.stack(chosen, dim=1).numpy()


def _alarms(rows_SL: NDArray[Any], experts: int) -> bool:
    spec = RouteSpec(num_experts=experts, top_k=1, layer_ids=tuple(range(rows_SL.shape[1])))
    try:
        rows_from_slots(rows_SL[:, :, None], spec)
    except CaptureError:
        return True
    return False


def measure(*, seeds: int = 16) -> dict[str, float]:
    """Looks, false alarms as they come and with every constant layer relabelled, and zeroed layers that are found."""
    found = {"looks": 0.0, "false alarms": 0.0, "false alarms, relabelled": 0.0, "zeroed": 0.0, "zeroed, found": 0.0}
    for experts, rows_SL in honest_rows(seeds=seeds):
        found["looks"] += rows_SL.shape[1]
        found["false alarms"] += _alarms(rows_SL, experts)
        for layer in range(rows_SL.shape[1]):
            zeroed_SL = rows_SL.copy()
            zeroed_SL[:, layer] = 0
            if (rows_SL[:, layer] == rows_SL[0, layer]).all():
                found["false alarms, relabelled"] += _alarms(zeroed_SL, experts)
            elif experts >= 16 and len(rows_SL) >= 32:
                found["zeroed"] += 1
                found["zeroed, found"] += _alarms(zeroed_SL, experts)
    return found


if __name__ == "__main__":
    print({name: int(value) for name, value in measure().items()})  # noqa: T201
