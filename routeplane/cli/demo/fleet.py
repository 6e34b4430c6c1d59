"""The demo as a fleet on Ray: engine, environment and trainer come up together; rollouts go over HTTP.

Run as ``python -m routeplane.cli.demo.fleet OPTIONS_JSON``; figures go to stdout as one line of JSON, the timeline to
stderr. Everything real is elsewhere: this file only says who needs whom.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from routeplane.capture import CaptureOptions
from routeplane.capture.http import openai
from routeplane.cli.demo import DemoOptions
from routeplane.cli.demo.carrier import carried_bytes, open_sink
from routeplane.cli.demo.engine import build_model, demo_prompts
from routeplane.cli.demo.environment import TURNS
from routeplane.cli.demo.scoring import TrainerModel, score_stream
from routeplane.cli.demo.transformers import load
from routeplane.fleet.actors import (
    ActorHandle,
    ActorOptions,
    EngineHandle,
    EnvironmentHandle,
    build_environment_actor,
    start_actor,
    start_engine,
)
from routeplane.fleet.endpoints import Endpoints
from routeplane.fleet.engine import EngineConfig
from routeplane.fleet.startup import Fleet, Plan, Task, TaskContext, start_async
from routeplane.inspect.charts import draw_timeline, encode
from routeplane.record.assembly import assemble
from routeplane.record.spec import RouteSpec

if TYPE_CHECKING:
    from routeplane.fleet.startup import Timeline

__all__ = ["TrainerWorker", "fleet_plan", "main", "prepare"]

#: What vLLM reads at start-up, in the engine's process alone.
_ENGINE_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "auto",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


# ----------------------------------------------------------------------------------------------------------------------
# The trainer
# ----------------------------------------------------------------------------------------------------------------------


class TrainerWorker:
    """The trainer's process: loads its model early, scores a stream when there is one."""

    def __init__(self, options: DemoOptions) -> None:
        self._options = options
        self._trainer: TrainerModel | None = None

    def load(self) -> None:
        """Load the weights."""
        self._trainer = load(self._options)

    def score(self) -> dict[str, Any]:
        """Figures of the stream: live, replayed, and replayed wrongly on purpose."""
        trainer = self._trainer or load(self._options)
        return score_stream(self._options, lambda _: trainer)

    def close(self) -> None:
        """Release the model."""
        self._trainer = None


# ----------------------------------------------------------------------------------------------------------------------
# The plan
# ----------------------------------------------------------------------------------------------------------------------


def fleet_plan(options: DemoOptions, spec: RouteSpec) -> Plan:
    """Who needs whom: URLs are there before the engine, so that the environment starts while weights load."""
    config = EngineConfig(
        model=options.model_dir,
        spec=spec,
        options={"dtype": "bfloat16", "max_model_len": 512, "seed": options.seed, "enable_prefix_caching": False},
    )

    async def reserved(context: TaskContext) -> Any:
        options = ActorOptions(ray={"runtime_env": {"env_vars": _ENGINE_ENV}})
        engine = await context.acquire(partial(start_engine, config, 0, options=options), EngineHandle.close)
        return engine, Endpoints(states=(await engine.reserve(),))

    async def engine(context: TaskContext) -> Any:
        handle, _ = context.results["reserved"]
        await handle.load()
        return await handle.serve()

    async def environment(context: TaskContext) -> Any:
        _, endpoints = context.results["reserved"]
        factory = "routeplane.cli.demo.environment:make_environment"
        build = partial(build_environment_actor, {}, endpoints, factory=factory, captured=spec)
        return await context.acquire(build, EnvironmentHandle.close)

    async def trainer(context: TaskContext) -> ActorHandle:
        make = partial(start_actor, TrainerWorker, [options], name="trainer")
        handle: ActorHandle = await context.acquire(make, ActorHandle.close)
        await handle.call("load")
        return handle

    return Plan(
        tasks=(
            Task(name="reserved", run=reserved),
            Task(name="engine", run=engine, needs=("reserved",), timeout=600),
            Task(name="environment", run=environment, needs=("reserved",), timeout=120),
            Task(name="trainer", run=trainer, timeout=300),
        )
    )


async def _rollouts(fleet: Fleet, options: DemoOptions, spec: RouteSpec) -> int:
    """Run them all at once, assemble each into a record, and write the records; how many."""
    environment = fleet["environment"]
    prompts = demo_prompts(options.sequences, options.prompt_tokens)
    examples = [
        {"index": index, "seed": options.seed + index * TURNS, "prompt": prompt} for index, prompt in enumerate(prompts)
    ]
    answers = await asyncio.gather(*(environment.rollout(example) for example in examples))
    with open_sink(options.stream, spec, transport=options.transport) as sink:
        for index, responses in enumerate(answers):
            calls = [
                call
                for response in responses
                for call in openai.calls(response, spec, weights_version=0, options=CaptureOptions(cached=0))
            ]
            assembly = assemble(calls, spec, sample_id=f"sample-{index}", attributes={"logprobs_mode": "raw"})
            for record in assembly.records:
                sink.write(record)
    return len(answers)


async def _run(options: DemoOptions) -> dict[str, Any]:
    spec = await asyncio.to_thread(prepare, options)
    seconds: dict[str, float] = {}
    fleet = await start_async(fleet_plan(options, spec), on_change=_say if options.progress else None)
    try:
        seconds["start"] = fleet.timeline.seconds
        started = time.perf_counter()
        records = await _rollouts(fleet, options, spec)
        seconds["rollouts"] = time.perf_counter() - started
        figures = await fleet["trainer"].call("score")
        timeline = fleet.timeline
    finally:
        await asyncio.to_thread(fleet.close)
    picture = Path(options.out) / "timeline.png"
    picture.write_bytes(encode(draw_timeline(timeline.to_dict()["tasks"]), "png"))
    return {
        **figures,
        "records": records,
        "stream_bytes": carried_bytes(options.stream),
        "seconds": {**seconds, **figures["seconds"]},
        "timeline": timeline.to_dict(),
        "picture": str(picture),
    }


def prepare(options: DemoOptions) -> RouteSpec:
    """Weights and a tokenizer of bytes, in the folder that engine and trainer load from."""
    build_model(options)
    vocabulary = {f"b{index}": index for index in range(256)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="b0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    make: Any = PreTrainedTokenizerFast
    make(tokenizer_object=tokenizer, unk_token="b0").save_pretrained(options.model_dir)
    return RouteSpec.from_hf_config(json.loads((Path(options.model_dir) / "config.json").read_text(encoding="utf-8")))


def _say(timeline: Timeline) -> None:
    line = ", ".join(f"{task.name} {task.outcome}" for task in timeline.tasks)
    sys.stderr.write(f"\rfleet: {line}\033[K")
    sys.stderr.flush()


def main(arguments: Sequence[str]) -> None:
    """Run with the options given as JSON."""
    options = replace(DemoOptions(**json.loads(arguments[0])), transport="folder")
    ray.init(
        address="local",
        object_store_memory=200 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    try:
        figures = asyncio.run(_run(options))
    finally:
        ray.shutdown()
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
