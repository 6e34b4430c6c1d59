"""The demo as a fleet on Ray: engine, environment and trainer come up together; rollouts go over HTTP.

Run as ``python -m routeplane.cli.demo.ray_fleet OPTIONS_JSON``; figures go to stdout as one line of JSON, the timeline
to stderr. The plan says what depends on what; engine, environment and trainer are the library's own actors. The
environment is a conversation with a tool that returns random bytes, over the engine's HTTP interface.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from routeplane.capture import CaptureOptions
from routeplane.capture.http import openai
from routeplane.cli.demo import DemoOptions, carried_bytes, open_sink
from routeplane.cli.demo.rollout import build_model, demo_prompts
from routeplane.cli.demo.scoring import TrainerModel, score_stream
from routeplane.cli.demo.transformers_trainer import load
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
from routeplane.fleet.startup import Fleet, Plan, Setup, Task, TaskContext, start_async
from routeplane.inspect.charts import draw_timeline, encode
from routeplane.record.assembly import assemble
from routeplane.record.spec import RouteSpec

if TYPE_CHECKING:
    from routeplane.fleet.environment import EnvironmentConfig
    from routeplane.fleet.startup import Timeline

__all__ = [
    "TOOL_TOKENS",
    "TURNS",
    "TURN_TOKENS",
    "Conversations",
    "TrainerWorker",
    "fleet_plan",
    "main",
    "make_environment",
    "prepare",
]

#: Seconds for an actor to come up or to end: a laptop that does other work besides imports an engine for minutes.
_PATIENCE = 600.0
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


def fleet_plan(options: DemoOptions, spec: RouteSpec, *, overlapped: bool = True) -> Plan:
    """What depends on what: URLs are there before the engine, so that the environment starts while weights load.

    ``overlapped=False``: the same tasks one after another, to compare with.
    """
    config = EngineConfig(
        model=options.model_dir,
        spec=spec,
        options={"dtype": "bfloat16", "max_model_len": 512, "seed": options.seed, "enable_prefix_caching": False},
    )

    async def reserved(context: TaskContext) -> Any:
        options = ActorOptions(ray={"runtime_env": {"env_vars": _ENGINE_ENV}}, timeout=_PATIENCE)
        make = partial(start_engine, config, 0, options=options)
        engine = await context.acquire(make, EngineHandle.close, timeout=120.0)
        return engine, Endpoints(states=(await engine.reserve(),))

    async def engine(context: TaskContext) -> Any:
        handle, _ = context.results["reserved"]
        await handle.load()
        return await handle.serve()

    async def environment(context: TaskContext) -> Any:
        _, endpoints = context.results["reserved"]
        factory = "routeplane.cli.demo.ray_fleet:make_environment"
        settings: dict[str, Any] = {"factory": factory, "captured": spec, "options": ActorOptions(timeout=_PATIENCE)}
        build = partial(build_environment_actor, {}, endpoints, **settings)
        return await context.acquire(build, EnvironmentHandle.close)

    async def trainer(context: TaskContext) -> ActorHandle:
        patient = ActorOptions(timeout=_PATIENCE)
        make = partial(start_actor, TrainerWorker, [options], name="trainer", options=patient)
        handle: ActorHandle = await context.acquire(make, ActorHandle.close)
        await handle.call("load")
        return handle

    alone = () if overlapped else ("the machine",)
    return Plan(
        tasks=(
            Task(name="reserved", run=reserved, resources=alone),
            Task(name="engine", run=engine, needs=("reserved",), resources=alone, timeout=2 * _PATIENCE),
            Task(name="environment", run=environment, needs=("reserved",), resources=alone, timeout=_PATIENCE),
            Task(name="trainer", run=trainer, resources=alone, timeout=_PATIENCE),
        ),
        setup=Setup(engines=(config,), require_routes=True, carried=spec, replay=spec),
    )


async def _compared(options: DemoOptions, spec: RouteSpec, overlapped: float) -> dict[str, float]:
    """Seconds until all is up, side by side and one task after another; the second start finds warm file caches."""
    plan = fleet_plan(options, spec, overlapped=False)
    async with await start_async(plan, on_change=_say if options.progress else None) as fleet:
        alone = fleet.timeline.seconds
    return {"overlapped": overlapped, "one_after_another": alone, "ratio": alone / overlapped}


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
    compared = {"compare": await _compared(options, spec, timeline.seconds)} if options.compare else {}
    picture = Path(options.out) / "timeline.png"
    picture.write_bytes(encode(draw_timeline(timeline.to_dict()["tasks"]), "png"))
    return {
        **figures,
        "records": records,
        "stream_bytes": carried_bytes(options.stream),
        "seconds": {**seconds, **figures["seconds"]},
        "timeline": timeline.to_dict(),
        **compared,
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


#: Turns of one rollout, tokens that the engine adds in each, and tokens that the "tool" answers with.
TURNS, TURN_TOKENS, TOOL_TOKENS = 3, 24, 8


class Conversations:
    """Asks the engine over HTTP, TURNS times, each time with all that was said and a tool's answer."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._urls = config.endpoints.urls
        self._require_routes = config.require_routes

    def start(self) -> None:
        """Load what this environment plays with; here, nothing."""

    def rollout(self, example: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The engine's responses, one for each turn."""
        rng = random.Random(example["seed"])
        url = self._urls[example["index"] % len(self._urls)]
        history, responses = list(example["prompt"]), []
        for turn in range(TURNS):
            body = {
                "model": "policy",
                "prompt": history,
                "max_tokens": TURN_TOKENS,
                "temperature": 1.0,
                "seed": example["seed"] + turn,
                "logprobs": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            response = _post(f"{url}/completions", body)
            if self._require_routes and "routed_experts" not in response["choices"][0]:
                raise RuntimeError("expected routes in the response, got none")
            responses.append(response)
            history += response["choices"][0]["token_ids"]
            history += [rng.randrange(256) for _ in range(TOOL_TOKENS)]
        return responses

    def is_healthy(self) -> bool:
        """Whether every engine answers."""
        return all(_get(f"{url}/models") for url in self._urls)

    def close(self) -> None:
        """Nothing to take down."""


def make_environment(config: EnvironmentConfig) -> Conversations:
    """The factory that the environment's actor is given by name."""
    return Conversations(config)


make_environment.consumes = ()  # type: ignore[attr-defined]


def _post(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        found: dict[str, Any] = json.loads(response.read())
        return found


def _get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=30) as response:
        found: dict[str, Any] = json.loads(response.read())
        return found


if __name__ == "__main__":
    main(sys.argv[1:])
