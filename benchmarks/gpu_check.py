"""What replay does on a GPU, in less than eight minutes: ``python -m benchmarks.gpu_check``, or ``make gpu-check``.

A Qwen3-MoE with random weights, bfloat16, packed sequences. One line a check, ``held``, ``MISSED`` or ``not run`` with
the reason; exits with 1 where one was missed, with 2 where there is no GPU. ``--device cpu --small`` runs what a CPU
can tell, which is how the tests know that the script works.

Axes: T packed tokens, L MoE layers, K top-k slots.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from routeplane.batch import RouteBatch
from routeplane.record.spec import RouteSpec
from routeplane.replay import transformers as gates

__all__ = ["Check", "Sizes", "checks", "main"]

#: Implementations of Transformers' experts: one loop, one batched product, one grouped kernel.
EXPERTS = ("eager", "batched_mm", "grouped_mm")
#: A replayed step may take this share of a live one, and this many bytes beyond it and the batch's routes.
MAX_STEP, MAX_BYTES = 1.03, 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the model and its batch are."""

    layers: int = 16
    hidden: int = 1_024
    experts: int = 64
    top_k: int = 8
    sequences: int = 8
    length: int = 1_024
    rounds: int = 15


SMALL = Sizes(layers=2, hidden=32, experts=8, top_k=2, sequences=2, length=12, rounds=2)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the table; ``held`` is None where nothing was run."""

    name: str
    held: bool | None
    figure: str

    def __str__(self) -> str:
        verdict = {True: "held", False: "MISSED", None: "not run"}[self.held]
        return f"{self.name:<34} {verdict:<8} {self.figure}"


class _Bench:
    """A model, its spec, and a packed batch of random routes on one device."""

    def __init__(self, device: str, sizes: Sizes) -> None:
        self.device, self.sizes = torch.device(device), sizes
        torch.manual_seed(0)
        config_type: Any = Qwen3MoeConfig
        config = config_type(
            vocab_size=512,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.hidden,
            moe_intermediate_size=sizes.hidden // 2,
            num_hidden_layers=sizes.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=max(8, sizes.hidden // 8),
            num_experts=sizes.experts,
            num_experts_per_tok=sizes.top_k,
        )
        model: Any = Qwen3MoeForCausalLM(config)
        self.model = model.to(self.device, torch.bfloat16).train()
        self.spec = RouteSpec.from_hf_config(config)
        self.batch = self._random_batch()

    def _random_batch(self) -> RouteBatch:
        sizes, rng = self.sizes, np.random.default_rng(0)
        tokens = sizes.sequences * sizes.length
        order = rng.random((tokens, sizes.layers, sizes.experts)).argsort(axis=-1)
        return RouteBatch.from_tensors(
            torch.from_numpy(order[..., : sizes.top_k].astype(np.int16)),
            torch.from_numpy(rng.integers(1, 512, tokens)),
            spec=self.spec,
            cu_seqlens=list(range(0, tokens + 1, sizes.length)),
        ).to(self.device)

    def step(self, forward: Callable[..., Any] | None = None) -> torch.Tensor:
        """Forward and backward; the logits."""
        self.model.zero_grad()
        logits: torch.Tensor = (forward or self.model)(**self.batch.model_inputs()).logits
        torch.autograd.backward(logits.float().square().mean())
        return logits.detach()

    def wait(self) -> None:
        """Let the device end its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def checks(device: str, sizes: Sizes) -> Iterator[Check]:
    """Run each check on ``device``, one after another; one that needs a GPU is not run elsewhere."""
    bench = _Bench(device, sizes)
    for experts in EXPERTS:
        bench.model.set_experts_implementation(experts)
        yield _own_routes(bench, experts)
    yield _forced_rows(bench)
    for name, run in (("no wait for the device", _waits), ("peak memory", _memory), ("whole graphs", _graphs)):
        if bench.device.type == "cuda":
            yield run(bench)
        else:
            yield Check(name=name, held=None, figure="needs a GPU")
    yield _step_ratio(bench)


def _own_routes(bench: _Bench, experts: str) -> Check:
    """A forward that is forced to the model's own choice is the live forward, to the last bit."""
    inputs = bench.batch.model_inputs()
    with torch.no_grad(), gates.attach(bench.model, bench.spec) as handle:
        live = bench.model(**inputs).logits
        with handle.recording(None) as own:
            bench.model(**inputs)
        with handle.replaying(own):
            replayed = bench.model(**inputs).logits
    apart = float((live - replayed).abs().max())
    return Check(name=f"own routes, {experts}", held=apart == 0.0, figure=f"largest difference {apart:.3g}")


def _forced_rows(bench: _Bench) -> Check:
    """Every row of the batch is forced, in every layer."""
    with gates.attach(bench.model, bench.spec) as handle:
        with handle.replaying(bench.batch):
            bench.step()
        report = handle.report()
    expected = bench.sizes.sequences * bench.sizes.length * bench.sizes.layers
    forced = sum(gate.forced_rows for gate in report.gates)
    return Check(name="forced rows", held=forced == expected, figure=f"{forced} of {expected}")


def _waits(bench: _Bench) -> Check:
    """A replayed step waits for the device no more often than a live one."""
    live = _count_waits(bench.step)
    with gates.attach(bench.model, bench.spec) as handle:
        with handle.replaying(bench.batch):
            bench.step()  # the first packed batch has the model looked at
        with handle.replaying(bench.batch):
            replayed = _count_waits(bench.step)
    return Check(name="no wait for the device", held=replayed <= live, figure=f"{replayed} waits, {live} live")


def _count_waits(work: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in caught)


def _memory(bench: _Bench) -> Check:
    """The peak of a replayed step beyond that of a live one is the batch's routes and a little."""
    live = _peak(bench.step)
    with gates.attach(bench.model, bench.spec) as handle, handle.replaying(bench.batch):
        beyond = _peak(bench.step) - live
    routes = bench.batch.routes.nbytes
    held = beyond <= routes + MAX_BYTES
    figure = f"{beyond / 2**20:.1f} MiB beyond live, routes {routes / 2**20:.1f}"
    return Check(name="peak memory", held=held, figure=figure)


def _peak(work: Callable[[], object]) -> int:
    work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def _graphs(bench: _Bench) -> Check:
    """A model compiled whole, into CUDA graphs, follows the rows as the plain one does."""
    with gates.attach(bench.model, bench.spec) as handle, handle.replaying(bench.batch):
        plain = bench.step()
    compiled = torch.compile(bench.model, fullgraph=True, mode="reduce-overhead")
    begin_step: Any = torch.compiler.cudagraph_mark_step_begin
    with gates.attach(bench.model, bench.spec, mode="compiled") as handle:
        found = plain
        for _ in range(3):  # traced, recorded, replayed
            begin_step()
            with handle.replaying(bench.batch):
                found = bench.step(compiled).clone()
        forced = sum(gate.forced_rows for gate in handle.report().gates)
    apart = float((plain - found).float().norm() / plain.float().norm())
    return Check(name="whole graphs", held=apart < 0.05 and forced > 0, figure=f"relative difference {apart:.3g}")


def _step_ratio(bench: _Bench) -> Check:
    """Time of a replayed step over that of a live one: medians of interleaved rounds."""
    spent: dict[str, list[float]] = {"live": [], "replayed": []}
    with gates.attach(bench.model, bench.spec) as handle:

        def replayed() -> None:
            with handle.replaying(bench.batch):
                bench.step()

        ways: dict[str, Callable[[], object]] = {"live": bench.step, "replayed": replayed}
        for work in ways.values():
            work()
        for _ in range(bench.sizes.rounds):
            for name, work in ways.items():
                bench.wait()
                start = perf_counter()
                work()
                bench.wait()
                spent[name].append(perf_counter() - start)
    ratio = median(spent["replayed"]) / median(spent["live"])
    if bench.device.type != "cuda":
        return Check(name="step", held=None, figure=f"needs a GPU; here {ratio:.3f} of a live one")
    return Check(name="step", held=ratio <= MAX_STEP, figure=f"{ratio:.3f} of a live one")


def main(arguments: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="What replay does on a GPU.")
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("GPU: not run: torch sees none", file=sys.stderr)
        return 2
    missed = False
    for check in checks(options.device, SMALL if options.small else Sizes()):
        print(check, flush=True)
        missed |= check.held is False
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
