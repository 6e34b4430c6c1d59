"""Replay in a training step: 8,192 tokens through four MoE layers, forward and backward, on one thread.

With replay over without, in the same run: entered, forced, checked and left; every token has a
row, and hardly one is what the model would choose. Sequences of 512 tokens lie one after the other, as in a packed
batch, in rows of their own: the cost of attention between them is not measured. Also attaching to 100 MoE
layers, probing included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.measure import Result, relative_rates
from routeplane.batch import RouteBatch, collate
from routeplane.record.record import RouteRecord
from routeplane.record.spans import Capture, Span
from routeplane.record.spec import RouteSpec
from routeplane.replay import transformers as gates

TOKENS, SEQUENCES, EXPERTS, TOP_K = 8_192, 16, 32, 4
RATIO = "x the step's time without replay"


def model_of(*, layers: int, hidden: int) -> Any:
    """A Qwen3-MoE with random weights, single precision."""
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=512,
            hidden_size=hidden,
            intermediate_size=hidden,
            moe_intermediate_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    ).train()


def batch_of(spec: RouteSpec, *, tokens: int, sequences: int) -> RouteBatch:
    """Legal random rows for every token."""
    rng = np.random.default_rng(0)
    length = tokens // sequences
    records = [
        RouteRecord(
            sample_id=f"sample-{index}",
            token_ids=rng.integers(1, 512, length).astype(np.int32),
            routes=rng.random((length, spec.num_layers, EXPERTS)).argsort(axis=-1)[..., :TOP_K].astype(np.int16),
            spans=(Span(start=0, stop=length, kind="prompt", call="call", weights_version=None),),
            captures=(Capture(start=0, stop=length, call="call", weights_version=None, state="captured"),),
            spec=spec,
        )
        for index in range(sequences)
    ]
    return collate(records, spec, layout="padded")


def step_of(model: Any, batch: RouteBatch) -> Callable[[], None]:
    """Forward and backward."""
    inputs = batch.model_inputs()

    def step() -> None:
        model.zero_grad()
        model(**inputs).logits.square().mean().backward()

    return step


def steps(*, rounds: int) -> float:
    """Time of the replayed step over that of the plain one."""
    # the same weights twice, so that one model's gates are its own and attaching, measured below, is not in a step
    plain, twin = model_of(layers=4, hidden=128), model_of(layers=4, hidden=128)
    spec = RouteSpec.from_hf_config(plain.config)
    batch = batch_of(spec, tokens=TOKENS, sequences=SEQUENCES)
    step = step_of(twin, batch)
    with gates.attach(twin, spec) as replay:

        def replayed() -> None:
            with replay.replaying(batch):
                step()

        rates = relative_rates({"plain": step_of(plain, batch), "replayed": replayed}, yardstick="plain", rounds=rounds)
    return 1 / rates["replayed"]


def attaching() -> float:
    """Milliseconds to attach to 100 layers; median of nine."""
    model = model_of(layers=100, hidden=16)
    spec = RouteSpec.from_hf_config(model.config)
    spent = []
    for _ in range(9):
        start = perf_counter()
        handle = gates.attach(model, spec)
        spent.append(perf_counter() - start)
        handle.detach()
    return 1_000 * median(spent)


def main(*, full: bool) -> Iterator[Result]:
    """Measure; ``full`` takes more rounds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rounds = 15 if full else 5
        yield Result(
            name="replay/step",
            value=round(steps(rounds=rounds), 3),
            unit=RATIO,
            bar=1.03,
            higher_is_better=False,
        )
        yield Result(
            name="replay/attach_100_layers",
            value=round(attaching(), 1),
            unit="ms",
            bar=2_000.0,
            higher_is_better=False,
        )
    finally:
        torch.set_num_threads(threads)
