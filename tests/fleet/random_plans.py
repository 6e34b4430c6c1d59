"""Start random plans that fail, are cancelled or interrupted at a random step; print what is left behind by each.

Run as ``python -m tests.fleet.random_plans FIRST_SEED COUNT``. Tasks acquire real things: a reserved endpoint, a child
process, a thread, from functions and from coroutine functions. One line of JSON at the end: outcomes, and leftovers.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter

from routeplane.errors import FleetError
from routeplane.fleet.endpoints import Endpoint, reserve
from routeplane.fleet.startup import Plan, Task, TaskContext, start
from routeplane.fleet.teardown import children_of

PORTS = (24_100, 24_140)


class PlanFailed(Exception):
    """What a task of these plans raises."""


def end_child(process: subprocess.Popen[bytes]) -> None:
    """Kill a child and wait for it."""
    process.kill()
    process.wait()


async def end_child_in_loop(process: subprocess.Popen[bytes]) -> None:
    """The same as a coroutine function."""
    await asyncio.sleep(0.001)
    end_child(process)


class Ticker:
    """A thread that runs until it is closed."""

    def __init__(self) -> None:
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._end.wait, name="routeplane-ticker")
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join()


def random_task(rng: random.Random, name: str, needs: tuple[str, ...], *, fails: bool) -> Task:
    """A task that acquires up to three things with pauses between, and may fail at one of its steps."""
    kinds = [rng.choice(["endpoint", "child", "child in loop", "thread"]) for _ in range(rng.randint(1, 3))]
    pauses = [rng.random() * 0.01 for _ in kinds]
    at = rng.randrange(len(kinds) + 1) if fails else -1

    async def run(context: TaskContext) -> str:
        for step, (kind, pause) in enumerate(zip(kinds, pauses, strict=True)):
            if step == at:
                raise PlanFailed(name)
            await acquire(context, kind, pause)
        if at == len(kinds):
            raise PlanFailed(name)
        return name

    return Task(name=name, run=run, needs=needs, timeout=rng.choice([None, 5.0, 0.02]))


async def acquire(context: TaskContext, kind: str, pause: float) -> None:
    """One real thing; half of the pause lies before it exists and half behind."""

    def child() -> subprocess.Popen[bytes]:
        time.sleep(pause)
        return subprocess.Popen(["sleep", "600"])

    def endpoint() -> Endpoint:
        time.sleep(pause)
        return reserve("127.0.0.1", PORTS)

    async def child_in_loop() -> subprocess.Popen[bytes]:
        await asyncio.sleep(pause)
        return subprocess.Popen(["sleep", "600"])

    if kind == "endpoint":
        await context.acquire(endpoint, Endpoint.close)
    elif kind == "child":
        await context.acquire(child, end_child)
    elif kind == "child in loop":
        await context.acquire(child_in_loop, end_child_in_loop)
    else:
        await context.acquire(Ticker, Ticker.close)
    await asyncio.sleep(pause)


def run_plan(seed: int) -> str:
    """Start one plan, close it where it came up; how it ended."""
    rng = random.Random(seed)
    names = [f"t{index}" for index in range(rng.randint(1, 5))]
    ending = rng.choice(["none", "failure", "interrupt", "interrupts"])
    tasks = tuple(
        random_task(
            rng,
            name,
            tuple(rng.sample(names[:index], k=rng.randint(0, min(index, 2)))),
            fails=ending == "failure" and rng.random() < 0.6,
        )
        for index, name in enumerate(names)
    )
    times = [rng.random() * 0.08 for _ in range({"interrupt": 1, "interrupts": 4}.get(ending, 0))]
    timers = [threading.Timer(each, os.kill, (os.getpid(), signal.SIGINT)) for each in times]
    outcome = "up"
    for timer in timers:
        timer.start()
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with start(Plan(tasks=tasks)):
            time.sleep(rng.random() * 0.02)
    except FleetError as error:
        outcome = str(error.kind)
    except KeyboardInterrupt:
        outcome = "interrupted"
    finally:
        signal.signal(signal.SIGINT, dropped)
    for timer in timers:
        timer.join()
    return outcome


def dropped(_number: int, _frame: object) -> None:
    """An interrupt that comes too late for its plan."""


def leftovers() -> dict[str, int]:
    """Threads, child processes and listening ports of these plans that are there now."""
    ports = 0
    for port in range(*PORTS):
        with socket.socket() as probe:
            ports += probe.connect_ex(("127.0.0.1", port)) == 0
    threads = [each for each in threading.enumerate() if each.name.startswith("routeplane-")]
    return {"threads": len(threads), "processes": len(children_of(os.getpid())), "ports": ports}


def main() -> None:
    """Run the plans of the command line."""
    signal.signal(signal.SIGINT, dropped)
    first, count = int(sys.argv[1]), int(sys.argv[2])
    outcomes: Counter[str] = Counter()
    left: list[dict[str, int]] = []
    for seed in range(first, first + count):
        outcomes[run_plan(seed)] += 1
        found = leftovers()
        if any(found.values()):
            left.append({"seed": seed, **found})
    sys.stdout.write(json.dumps({"outcomes": outcomes, "left": left}) + "\n")


if __name__ == "__main__":
    main()
