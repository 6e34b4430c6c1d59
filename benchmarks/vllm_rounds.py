"""The rounds behind ``bench_vllm``, in a process of their own: the engine reads its environment when it starts.

Prints one JSON object: name -> list of CPU seconds per engine step, one per round, all ways in each round. Every way
generates the same 64 sequences; engines differ in their scheduler alone and live side by side. CPU time of the process
is that of the engine, the front end and the writer together. Apart from it, by the clocks of threads: that of the
writer's thread (``thread``), and that of the two methods in which schedulers differ (``scheduler, discarding`` and
``scheduler, writing``).

Two geometries: ``tiny``, whose steps are as short as an engine's can be, and ``serving``, whose steps take as long as
those of a large model on a GPU (25 ms and more) and whose sequences are longer than a few words.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from vllm import LLM, SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from routeplane.capture import vllm as capture
from routeplane.capture.vllm import request_args, spec_from_vllm, start_engine, stop_engine
from routeplane.capture.vllm.scheduler import RouteScheduler
from routeplane.stream import new_stream

SEQUENCES, PROMPT = 64, 16
GENERATED = {"tiny": 48, "serving": 128}
WAYS = {
    "tiny": ("capture off", "discarded inside", "written inside", "discarded beside", "written beside"),
    "serving": ("discarded inside", "written inside", "discarded beside"),
}

MODEL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "mlp_only_layers": [1],
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": None,
}
#: What ``serving`` has in other measure.
LARGER: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_experts": 32,
}


class Discarding(AsyncScheduler):  # type: ignore[misc]  # vLLM's types are not followed
    """Capture on, and every row thrown away where ``RouteScheduler`` takes it."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's own, without rows."""
        made = super().update_from_output(scheduler_output, model_runner_output)
        for client in made.values():
            for output in client.outputs:
                output.routed_experts = None
        return made


class Timed:
    """Adds up what the methods that ``RouteScheduler`` changes take of the engine's thread."""

    seconds = 0.0

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Once a step."""
        started = time.thread_time()
        made = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]  # of the scheduler beside it
        type(self).seconds += time.thread_time() - started
        return made

    def add_request(self, request: Any) -> None:
        """Once a sequence."""
        started = time.thread_time()
        super().add_request(request)  # type: ignore[misc]
        type(self).seconds += time.thread_time() - started


class TimedDiscarding(Timed, Discarding):
    """What the writer's is compared with."""


class TimedWriting(Timed, RouteScheduler):
    """The writer's."""


def _writer_seconds() -> float:
    """CPU time of the writer's thread so far."""
    [thread] = [one for one in threading.enumerate() if one.name == "routeplane-writer"]
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def _engines(folder: Path, geometry: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model_config = MODEL if geometry == "tiny" else {**MODEL, **LARGER}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**model_config)).save_pretrained(folder / "model")
    common: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_batched_tokens": 1024}
    writer = {"place": str(folder / "inside"), "run": "bench"}
    model = str(folder / "model")
    bare = {"block_size": 32, "enforce_eager": True, "enable_chunked_prefill": False, "skip_tokenizer_init": True}
    off = {"off": LLM(model, **bare, **common)} if "capture off" in WAYS[geometry] else {}
    return {
        **off,
        "plain": start_engine(model, **common),
        "discarding": start_engine(model, scheduler_cls=TimedDiscarding, **common),
        "writing": start_engine(
            model,
            scheduler_cls=TimedWriting,
            additional_config={"routeplane": writer},
            **common,
        ),
    }


def _rounds(count: int, geometry: str) -> dict[str, list[float]]:
    folder = Path(tempfile.mkdtemp(prefix="routeplane-bench-"))
    engines, generated = _engines(folder, geometry), GENERATED[geometry]
    spec = spec_from_vllm(engines["plain"])
    prompts = [
        {"prompt_token_ids": [4 + (7 * at + 13 * one) % 500 for at in range(PROMPT)]} for one in range(SEQUENCES)
    ]
    serial = iter(range(10**9))

    def generate(engine: str) -> list[Any]:
        number = next(serial)
        llm = engines[engine]
        llm.reset_prefix_cache()
        params = [
            SamplingParams(
                max_tokens=generated,
                temperature=1.0,
                seed=one,
                ignore_eos=True,
                detokenize=False,
                extra_args=request_args(sample_id=f"{number}-{one}", weights_version=1),
            )
            for one in range(SEQUENCES)
        ]
        made: list[Any] = llm.generate(prompts, params, use_tqdm=False)
        return made

    with new_stream(folder / "beside.arrows", spec) as sink:

        def beside() -> None:
            number = next(serial)
            for output in generate("plain"):
                for record in capture.records(
                    output, spec, sample_id=f"{number}-{output.request_id}", weights_version=1
                ):
                    sink.write(record)

        ways: dict[str, Callable[[], object]] = {
            "capture off": lambda: generate("off"),
            "discarded inside": lambda: generate("discarding"),
            "written inside": lambda: generate("writing"),
            "discarded beside": lambda: generate("plain"),
            "written beside": beside,
        }
        clocks: dict[str, Callable[[], float]] = {
            "thread": _writer_seconds,
            "scheduler, discarding": lambda: TimedDiscarding.seconds,
            "scheduler, writing": lambda: TimedWriting.seconds,
        }
        spent: dict[str, list[float]] = {name: [] for name in (*WAYS[geometry], *clocks)}
        order, shuffle = list(WAYS[geometry]), random.Random(0).shuffle
        for counted in [False] * 2 + [True] * count:
            shuffle(order)
            before = {name: clock() for name, clock in clocks.items()}
            for name in order:
                started = time.process_time()
                ways[name]()
                if counted:
                    spent[name].append((time.process_time() - started) / (generated + 1))
            for name, clock in clocks.items() if counted else ():
                spent[name].append((clock() - before[name]) / (generated + 1))
    stop_engine(engines["writing"])
    return spent


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write("\n" + json.dumps(_rounds(int(sys.argv[1]), sys.argv[2])) + "\n")
