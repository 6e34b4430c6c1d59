"""The starts behind ``bench_fleet``, in a process of their own: one Ray cluster for all, new actors for each.

Prints one JSON object: for each way its rounds, each with seconds until the first rollout was answered and its
timeline.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from dataclasses import replace
from typing import Any

import ray

from routeplane.cli.demo import DemoOptions
from routeplane.cli.demo.ray_fleet import fleet_plan, prepare
from routeplane.cli.demo.rollout import demo_prompts
from routeplane.fleet.startup import Plan, start_async


def main(rounds: int) -> None:
    """``rounds`` of each way, in turn. The overlapped one is first, so that caches that are cold are against it."""
    ray.init(
        address="local",
        object_store_memory=200 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    found: dict[str, list[dict[str, Any]]] = {"overlapped": [], "serial": []}
    try:
        with tempfile.TemporaryDirectory(prefix="routeplane-bench-") as folder:
            options = DemoOptions(out=folder, fleet=True, progress=False)
            spec = prepare(options)
            plan = fleet_plan(options, spec)
            # what every task has to itself lets none run beside another
            serial = Plan(tasks=tuple(replace(task, resources=("machine",)) for task in plan.tasks))
            for _ in range(rounds):
                for name, each in (("overlapped", plan), ("serial", serial)):
                    found[name].append(asyncio.run(first_rollout(each, options)))
    finally:
        ray.shutdown()
    sys.stdout.write(json.dumps(found) + "\n")


async def first_rollout(plan: Plan, options: DemoOptions) -> dict[str, Any]:
    """Start, roll out once, close; closing is not counted."""
    began = time.perf_counter()
    fleet = await start_async(plan)
    try:
        started = time.perf_counter()
        example = {"index": 0, "seed": 0, "prompt": demo_prompts(1, options.prompt_tokens)[0]}
        await fleet["environment"].rollout(example)
        ended = time.perf_counter()
    finally:
        await asyncio.to_thread(fleet.close)
    return {"seconds": ended - began, "rollout": ended - started, "timeline": fleet.timeline.to_dict()}


if __name__ == "__main__":
    main(int(sys.argv[1]))
