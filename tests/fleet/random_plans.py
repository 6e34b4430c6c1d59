"""Start random plans that fail, are cancelled or interrupted at a random step; print what is left behind by each.

Run as ``python -m tests.fleet.random_plans FIRST_SEED COUNT [actors]``. Tasks acquire real things: a reserved endpoint,
a child process, a thread, from functions and from coroutine functions; with ``actors``, Ray actors too, some of which
cannot be placed. Interrupts and cancellations come once or repeatedly, in the start, while all is up, and in teardown.
One line of JSON at the end: outcomes, and leftovers.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from functools import partial
from pathlib import Path

import ray

from routeplane.errors import FleetError
from routeplane.fleet.endpoints import Endpoint, reserve
from routeplane.fleet.startup import Plan, Task, TaskContext, start, start_async
from routeplane.fleet.teardown import children_of, is_alive
from tests.ray_cluster import local_cluster

PORTS = (24_100, 24_140)
KINDS = ("endpoint", "child", "child in loop", "thread")
ACTORS = ("actor", "actor", "actor nowhere")


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


class Idle:
    """An actor."""

    def close(self) -> None:
        """Nothing to close."""


def random_task(
    rng: random.Random, name: str, needs: tuple[str, ...], *, fails: bool, kinds: tuple[str, ...] = KINDS
) -> Task:
    """A task that acquires up to three things with pauses between, and may fail at one of its steps."""
    chosen = [rng.choice(kinds) for _ in range(rng.randint(1, 3))]
    pauses = [rng.random() * 0.01 for _ in chosen]
    at = rng.randrange(len(chosen) + 1) if fails else -1

    async def run(context: TaskContext) -> str:
        for step, (kind, pause) in enumerate(zip(chosen, pauses, strict=True)):
            if step == at:
                raise PlanFailed(name)
            await acquire(context, kind, pause)
        if at == len(chosen):
            raise PlanFailed(name)
        return name

    slow = any(kind in ACTORS for kind in chosen)
    return Task(name=name, run=run, needs=needs, timeout=rng.choice([None, 5.0, 0.5 if slow else 0.02]))


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
    elif kind in ACTORS:
        from routeplane.fleet.actors import ActorHandle, ActorOptions, start_actor

        options = ActorOptions(ray={"num_gpus": 1} if kind == "actor nowhere" else {}, timeout=3.0)
        await context.acquire(partial(start_actor, Idle, [], name="idle", options=options), ActorHandle.close)
    else:
        await context.acquire(Ticker, Ticker.close)
    await asyncio.sleep(pause)


def random_plan(rng: random.Random, ending: str, kinds: tuple[str, ...]) -> Plan:
    """One to five tasks with needs among them; with the ending "failure" most of them fail."""
    names = [f"t{index}" for index in range(rng.randint(1, 5))]
    return Plan(
        tasks=tuple(
            random_task(
                rng,
                name,
                tuple(rng.sample(names[:index], k=rng.randint(0, min(index, 2)))),
                fails=ending == "failure" and rng.random() < 0.6,
                kinds=kinds,
            )
            for index, name in enumerate(names)
        )
    )


def run_plan(seed: int, *, actors: bool) -> str:
    """Start one plan, close it where it came up; how it ended."""
    rng = random.Random(seed)
    ending = rng.choice(["none", "failure", "interrupt", "interrupts", "cancel", "cancels"])
    plan = random_plan(rng, ending, (*KINDS, *ACTORS) if actors else KINDS)
    # actors take their time: signals come as late as in their teardown
    longest = 4.0 if actors else 0.08
    count = {"interrupt": 1, "interrupts": 4, "cancel": 1, "cancels": 4}.get(ending, 0)
    times = sorted(rng.random() * longest for _ in range(count))
    stay = rng.random() * longest / 4
    if ending.startswith("cancel"):
        return asyncio.run(run_cancelled(plan, times, stay))
    timers = [threading.Timer(each, os.kill, (os.getpid(), signal.SIGINT)) for each in times]
    outcome = "up"
    for timer in timers:
        timer.start()
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with start(plan):
            time.sleep(stay)
    except FleetError as error:
        outcome = str(error.kind)
    except KeyboardInterrupt:
        outcome = "interrupted"
    finally:
        signal.signal(signal.SIGINT, dropped)
    for timer in timers:
        timer.join()
    return outcome


async def run_cancelled(plan: Plan, times: list[float], stay: float) -> str:
    """The same inside a program's own loop, cancelled at these times."""

    async def run() -> str:
        async with await start_async(plan):
            await asyncio.sleep(stay)
        return "up"

    task = asyncio.create_task(run())
    before = 0.0
    for each in times:
        await asyncio.wait([task], timeout=each - before)
        before = each
        task.cancel()
    try:
        return await task
    except FleetError as error:
        return str(error.kind)
    except asyncio.CancelledError:
        return "cancelled"


def dropped(_number: int, _frame: object) -> None:
    """An interrupt that comes too late for its plan."""


def leftovers(before: set[int]) -> dict[str, int]:
    """Threads, processes, actors and listening ports of these plans that are there now.

    Ray's own workers are not among the processes: they come and go as Ray likes. One that Ray had begun for an actor
    that is gone stays idle for a second.
    """
    ports = 0
    for port in range(*PORTS):
        with socket.socket() as probe:
            ports += probe.connect_ex(("127.0.0.1", port)) == 0
    threads = [each for each in threading.enumerate() if each.name.startswith("routeplane-")]
    below = [each for each in children_of(os.getpid()) if each.pid not in before and is_alive(each)]
    commands = [command for each in below if (command := read(f"/proc/{each.pid}/cmdline"))]
    processes = [command for command in commands if b"ray" not in command]
    running = [command for command in commands if command.startswith(b"ray::Idle")]
    return {"threads": len(threads), "processes": len(processes), "actors": len(running) + alive(), "ports": ports}


def alive() -> int:
    """Actors that Ray knows of and that are not dead: those that wait for their place, too."""
    if not ray.is_initialized():
        return 0
    return len([each for each in ray._private.state.actors().values() if each["State"] != "DEAD"])


def read(path: str) -> bytes:
    """A file's content; empty where its process ended."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def main() -> None:
    """Run the plans of the command line."""
    signal.signal(signal.SIGINT, dropped)
    first, count, actors = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["actors"]
    outcomes: Counter[str] = Counter()
    left: list[dict[str, int]] = []
    with local_cluster(object_store_bytes=100 * 2**20) if actors else contextlib.nullcontext():
        before = {each.pid for each in children_of(os.getpid())}
        for seed in range(first, first + count):
            outcomes[run_plan(seed, actors=actors)] += 1
            found = leftovers(before)
            if any(found.values()):
                left.append({"seed": seed, **found})
            if actors:
                sys.stderr.write(f"plan {seed}: {dict(outcomes)}, left by {len(left)}: {left[-1:]}\n")
    sys.stdout.write(json.dumps({"outcomes": outcomes, "left": left}) + "\n")


if __name__ == "__main__":
    main()
