"""How often an honest top-1 model looks as if a layer had never been captured: ``python -m tests.capture.top_1``.

Tiny random models with one expert per token, whose routers collapse far more often than trained ones do. A layer counts
as an honest look; a false alarm is an honest layer that ``capture.layers`` takes for unwritten. Any layer with one
expert throughout is looked at, relabelled so that this expert is 0, which makes the case E times as frequent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from numpy.typing import NDArray
from transformers import (
    Llama4ForCausalLM,
    Llama4TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    ZayaConfig,
    ZayaForCausalLM,
)

from routeplane.capture.layers import rows_from_slots
from routeplane.capture.transformers import taping
from routeplane.errors import CaptureError
from routeplane.record.spec import RouteSpec

__all__ = ["honest_rows", "measure", "table"]

FAMILIES = ("Llama-4", "ZAYA", "Qwen3-MoE")
EXPERTS = (4, 16, 64)
LENGTHS = (5, 8, 16, 32, 64, 200)

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
    made: Any
    if family == "Llama-4":
        config: Any = Llama4TextConfig(
            **more, intermediate_size_mlp=64, num_local_experts=experts, interleave_moe_layer_step=1
        )
        made = Llama4ForCausalLM(config)
    elif family == "ZAYA":
        more |= {"layer_types": ["hybrid"] * LAYERS, "router_hidden_size": 16}
        made = ZayaForCausalLM(ZayaConfig(**more, num_experts=experts, moe_intermediate_size=32))
    else:
        made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**more, num_experts=experts, moe_intermediate_size=32))
    made.eval()
    model: torch.nn.Module = made
    return model


def honest_rows(*, seeds: int) -> Iterator[tuple[str, int, NDArray[Any]]]:
    """The family, the number of experts, and the choices ``[S, L]`` for prompts of random tokens, wide and narrow."""
    for family in FAMILIES:
        for experts in EXPERTS:
            for seed in range(seeds):
                model = _model(family, experts, seed=seed)
                spec = RouteSpec.from_model(model)
                with taping(model, spec) as tape, torch.no_grad():
                    for length in LENGTHS:
                        for words in (512, 8):
                            model(input_ids=torch.randint(1, words, (1, length)), use_cache=False)
                # ZAYA's router is wider by an expert that does nothing
                yield from ((family, experts, chosen_SLK[:, :, 0]) for chosen_SLK in tape.forwards())


def _alarms(rows_SL: NDArray[Any], experts: int) -> bool:
    spec = RouteSpec(num_experts=experts + 1, top_k=1, layer_ids=tuple(range(rows_SL.shape[1])))
    try:
        rows_from_slots(rows_SL[:, :, None], spec)
    except CaptureError:
        return True
    return False


def measure(*, seeds: int = 16) -> dict[str, Counter[Any]]:
    """Count honest layers, those taken for unwritten, and layers that were zeroed and found, by experts and rows."""
    found = {name: Counter[Any]() for name in ("looks", "false alarms", "relabelled", "zeroed", "found")}
    for family, experts, rows_SL in honest_rows(seeds=seeds):
        found["looks"][family] += rows_SL.shape[1]
        found["false alarms"][family] += _alarms(rows_SL, experts)
        for layer in range(rows_SL.shape[1]):
            zeroed_SL = rows_SL.copy()
            zeroed_SL[:, layer] = 0
            if (rows_SL[:, layer] == rows_SL[0, layer]).all():
                found["relabelled"][family] += _alarms(zeroed_SL, experts)
                continue
            found["zeroed"][experts, len(rows_SL)] += 1
            found["found"][experts, len(rows_SL)] += _alarms(zeroed_SL, experts)
    return found


def table(found: dict[str, Counter[Any]]) -> list[str]:
    """The measurement as the lines of a table."""
    lines = [
        f"{family}: {found['looks'][family]} honest layers, {found['false alarms'][family]} taken for unwritten "
        f"({found['relabelled'][family]} if the expert of a constant layer were 0)"
        for family in FAMILIES
    ]
    lines.append(f"| experts | {' | '.join(f'{rows} rows' for rows in LENGTHS)} |")
    for experts in EXPERTS:
        shares = [found["found"][experts, rows] / max(found["zeroed"][experts, rows], 1) for rows in LENGTHS]
        lines.append(f"| {experts} | {' | '.join(f'{share:.0%}' for share in shares)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table(measure())))  # noqa: T201
