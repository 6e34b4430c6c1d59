"""The fleet's bars, measured on a real cluster with a real engine; a table of figures. Run by ``make fleet-bars``.

What is left behind by random plans, how long an actor that cannot be placed lasts beyond its timeout, how soon a killed
engine core shows, how callers fare while an engine is killed and restarted, and whether inputs that mean nothing are
refused. Exits with 1 where a bar does not hold.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from routeplane.errors import DataError, FleetError, UsageError
from routeplane.fleet import ActorOptions, Endpoints, EngineConfig, build_config, reserve, start_actor, start_engine
from routeplane.fleet.actors import EngineHandle
from routeplane.fleet.endpoints import ServerState
from routeplane.fleet.environment import EnvironmentWorker
from routeplane.fleet.gym_environment import make_environment
from routeplane.fleet.teardown import children_of
from tests.capture.vllm_engine import QWEN3_MOE
from tests.fleet.callers import Callers
from tests.fleet.random_plans import Idle
from tests.fleet.test_engine_actor import ENGINE, SETTINGS, code_of, spec_of
from tests.fleet.test_gym import NEMO_RL_KEYS
from tests.ray_cluster import local_cluster

ROOT = Path(__file__).parents[2]
URLS = Endpoints.of(["http://127.0.0.1:1/v1"])


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the table."""

    what: str
    found: str
    bar: str
    holds: bool


def random_plans(count: int, *arguments: str) -> Figure:
    """Plans that fail, are cancelled or interrupted; what they leave."""
    command = [sys.executable, "-m", "tests.fleet.random_plans", "0", str(count), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    said = json.loads(done.stdout.splitlines()[-1])
    kinds = "ports, threads, actors, processes" if arguments else "ports, threads, processes"
    return Figure(
        what=f"{count} random plans {said['outcomes']}: {kinds} left",
        found=f"{len(said['left'])} plans left some",
        bar="0",
        holds=not said["left"],
    )


def unplaceable(timeout: float) -> Figure:
    """Seconds beyond its timeout that an actor which cannot be placed lasts."""
    options = ActorOptions(ray={"num_gpus": 1}, timeout=timeout)
    beyond = []
    for _ in range(5):
        before = time.monotonic()
        try:
            asyncio.run(start_actor(Idle, [], name="idle", options=options))
        except FleetError:
            beyond.append(time.monotonic() - before - timeout)
    found = f"{max(beyond):.2f} s beyond {timeout} s, the longest of {len(beyond)}"
    return Figure(what="an actor that cannot be placed", found=found, bar="2 s", holds=max(beyond) <= 2)


async def up(engine: EngineHandle) -> str:
    """Bring an engine up; its URL."""
    url = (await engine.reserve()).url
    await engine.load()
    await engine.serve()
    return url


def killed_core(config: EngineConfig) -> Figure:
    """Seconds from SIGKILL of what is below the engine's actor to 503 and ``degraded``."""
    variables = {**SETTINGS, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    options = ActorOptions(ray={"runtime_env": {"env_vars": variables}})
    engine = asyncio.run(start_engine(config, 0, options=options))
    try:
        url = asyncio.run(up(engine))
        for process in children_of(engine.pid):
            os.kill(process.pid, signal.SIGKILL)
        before = time.monotonic()
        while code_of(f"{url}/models") == 200 or asyncio.run(engine.state()).state is not ServerState.DEGRADED:
            time.sleep(0.02)
        seconds = time.monotonic() - before
    finally:
        engine.close()
    return Figure(what="a killed core: 503 and degraded", found=f"{seconds:.2f} s", bar="2 s", holds=seconds <= 2)


def restarted(config: EngineConfig) -> list[Figure]:
    """How callers are answered while the engine's process is killed and another comes up, and while one is ended."""
    options = ActorOptions(ray={"runtime_env": {"env_vars": SETTINGS}})
    engine = asyncio.run(start_engine(config, 0, options=options))
    figures = []
    try:
        url = asyncio.run(up(engine))
        for what in ("killed", "ended"):
            with Callers(url, pause=0.1) as callers:
                time.sleep(0.5)
                if what == "killed":
                    os.kill(engine.pid, signal.SIGKILL)
                asyncio.run(engine.restart())
                time.sleep(0.5)
            answers = {str(name): count for name, count in callers.answers.items()}
            holds = not callers.answers["refused"] and set(callers.answers) <= {200, 503, "cut"}
            figures.append(
                Figure(what=f"an engine {what}, restarted: {answers}", found="", bar="0 refused", holds=holds)
            )
    finally:
        engine.close()
    return figures


def strict_inputs(config: EngineConfig) -> Figure:
    """Inputs that mean nothing, and whether each is UsageError."""
    needs_keys = "tests.fleet.test_environment:counting"
    inputs: list[Callable[[], Any]] = [
        lambda: Endpoints.of([None]),  # type: ignore[list-item]
        lambda: Endpoints.of([""]),
        lambda: Endpoints.of("http://127.0.0.1:1/v1"),
        lambda: reserve("0.0.0.0", (20_000, 20_100)),
        lambda: ActorOptions(venv=sys.executable),
        lambda: ActorOptions(venv="/no/such/folder"),
        lambda: ActorOptions(venv=sys.prefix, ray={"runtime_env": {"env_vars": {"VIRTUAL_ENV": "/x"}}}),
        lambda: replace(config, hook="a:b", options={"worker_extension_cls": "a.B"}),
        lambda: EnvironmentWorker(build_config({"fali": 1}, URLS, captured=None), needs_keys).start(None),
        *(partial(make_environment, build_config({key: 1}, URLS, captured=None)) for key in NEMO_RL_KEYS),
    ]
    refused = 0
    for each in inputs:
        try:
            each()
        except UsageError:
            refused += 1
        except (DataError, FleetError):
            pass
    return Figure(
        what="strict inputs that are UsageError",
        found=f"{refused} of {len(inputs)}",
        bar="all",
        holds=refused == len(inputs),
    )


def main() -> None:
    """Measure all and print the table."""
    plans = int(sys.argv[1]) if sys.argv[1:] else 200
    figures = [random_plans(plans), random_plans(plans, "actors")]
    with tempfile.TemporaryDirectory() as folder, local_cluster(object_store_bytes=100 * 2**20):
        torch.manual_seed(0)
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN3_MOE))
        model.eval().save_pretrained(folder)
        config = EngineConfig(
            model=folder, spec=spec_of(Path(folder)), port_range=(19_200, 19_300), options={**ENGINE, "seed": 0}
        )
        figures += [strict_inputs(config), unplaceable(2.0), killed_core(config), *restarted(config)]
    for figure in figures:
        holds = "holds" if figure.holds else "FAILS"
        sys.stdout.write(f"{holds}  {figure.what}: {figure.found} (bar: {figure.bar})\n")
    sys.exit(not all(figure.holds for figure in figures))


if __name__ == "__main__":
    main()
