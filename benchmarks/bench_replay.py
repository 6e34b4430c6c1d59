"""Replay in a training step: 8,192 tokens through four MoE layers, forward and backward, on one thread.

With replay over without, in the same run: entered, forced, checked and left; every token has a
row, and hardly one is what the model would choose. Sequences of 512 tokens lie in rows of their own. ``packed``: 2,048
tokens of four sequences in one row, whose attention would otherwise be most of the step. ``compiled``: both models
under ``torch.compile(backend="aot_eager")``, which traces and does not fuse. Also attaching to 100 MoE layers, probing
included. Memory of a step is measured where it can be counted, on a GPU: ``make gpu-check``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, Literal

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


def batch_of(
    spec: RouteSpec, *, tokens: int, sequences: int, layout: Literal["padded", "packed"] = "padded"
) -> RouteBatch:
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
    return collate(records, spec, layout=layout)


def step_of(model: Any, batch: RouteBatch, *, call: Callable[..., Any] | None = None) -> Callable[[], None]:
    """Forward and backward; ``call``: the model as it is called, where that is another object."""
    inputs, forward = batch.model_inputs(), model if call is None else call

    def step() -> None:
        model.zero_grad()
        forward(**inputs).logits.square().mean().backward()

    return step


def compiled_steps(*, rounds: int) -> float:
    """The same with both models compiled, 2,048 tokens."""
    plain, twin = model_of(layers=4, hidden=128), model_of(layers=4, hidden=128)
    for each in (plain, twin):
        each.set_experts_implementation("grouped_mm")
    spec = RouteSpec.from_hf_config(plain.config)
    batch = batch_of(spec, tokens=2_048, sequences=4)
    calls = [torch.compile(each, backend="aot_eager") for each in (plain, twin)]
    step = step_of(twin, batch, call=calls[1])
    with gates.attach(twin, spec, mode="compiled") as replay:

        def replayed() -> None:
            with replay.replaying(batch):
                step()

        ways = {"plain": step_of(plain, batch, call=calls[0]), "replayed": replayed}
        return 1 / relative_rates(ways, yardstick="plain", rounds=rounds)["replayed"]


def steps(
    *, rounds: int, tokens: int = TOKENS, sequences: int = SEQUENCES, layout: Literal["padded", "packed"] = "padded"
) -> float:
    """Time of the replayed step over that of the plain one."""
    # the same weights twice, so that one model's gates are its own and attaching, measured below, is not in a step
    plain, twin = model_of(layers=4, hidden=128), model_of(layers=4, hidden=128)
    spec = RouteSpec.from_hf_config(plain.config)
    batch = batch_of(spec, tokens=tokens, sequences=sequences, layout=layout)
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
        for name, measure in (
            ("step", steps),
            ("step_packed", partial(steps, tokens=2_048, sequences=4, layout="packed")),
            ("step_compiled", compiled_steps),
        ):
            value = round(measure(rounds=rounds), 3)
            yield Result(name=f"replay/{name}", value=value, unit=RATIO, bar=1.03, higher_is_better=False)
        yield Result(
            name="replay/attach_100_layers",
            value=round(attaching(), 1),
            unit="ms",
            bar=2_000.0,
            higher_is_better=False,
        )
    finally:
        torch.set_num_threads(threads)
