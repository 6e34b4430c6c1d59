"""Taking down: everything once, last first, bounded, of any kind, under signals; nothing is left by any start."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from routeplane.errors import FleetError
from routeplane.fleet.startup import Plan, Task, TaskContext, start, start_async
from routeplane.fleet.teardown import Closers

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "arguments", [(), pytest.param(("actors",), marks=[pytest.mark.slow, pytest.mark.xdist_group("ray")])], ids=str
)
def test_random_plans_leave_nothing_behind(arguments: tuple[str, ...]) -> None:
    """200 plans that fail, run out of time, are cancelled or interrupted at random steps, also repeatedly: no thread,
    process, actor or port is left."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fleet.random_plans", "0", "200", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    said = json.loads(done.stdout.splitlines()[-1])
    assert [] == said["left"]
    assert {"up", "start_failed", "interrupted", "cancelled"} == set(said["outcomes"])
    # actors take longer than most plans with them last
    assert min(said["outcomes"].values()) >= (3 if arguments else 20)


def test_a_thing_that_appears_after_its_task_was_cancelled_is_closed() -> None:
    """The thread that makes it cannot be ended: teardown waits for it."""
    closed: list[str] = []
    begun, may_end = threading.Event(), threading.Event()

    def make() -> str:
        begun.set()
        may_end.wait()
        return "thing"

    async def slow(context: TaskContext) -> None:
        await context.acquire(make, closed.append)

    async def fail(context: TaskContext) -> None:
        await asyncio.to_thread(begun.wait)
        threading.Timer(0.1, may_end.set).start()
        raise OSError("first")

    with pytest.raises(FleetError, match="OSError: first"):
        start(Plan(tasks=(Task(name="slow", run=slow), Task(name="fail", run=fail))))
    assert ["thing"] == closed


def test_what_make_raises_is_the_tasks_error() -> None:
    """From a function as from a coroutine function; nothing is registered."""

    def broken() -> None:
        raise OSError("no port")

    async def broken_too() -> None:
        raise OSError("no actor")

    for make, said in ((broken, "no port"), (broken_too, "no actor")):

        async def run(context: TaskContext, make: object = make) -> None:
            await context.acquire(make, lambda _: pytest.fail("closed"))  # type: ignore[arg-type]

        with pytest.raises(FleetError, match=f"OSError: {said}"):
            start(Plan(tasks=(Task(name="a", run=run),)))


def test_a_coroutine_function_is_awaited_in_the_loop_that_made_the_thing() -> None:
    """A server's task belongs to its loop: closed elsewhere it would fail."""
    loops: list[asyncio.AbstractEventLoop] = []

    async def up(context: TaskContext) -> None:
        made = asyncio.get_running_loop().create_future()

        async def close() -> None:
            loops.append(asyncio.get_running_loop())
            made.set_result(None)
            await made

        context.defer(close)

    async def main() -> asyncio.AbstractEventLoop:
        async with await start_async(Plan(tasks=(Task(name="up", run=up),))):
            pass
        return asyncio.get_running_loop()

    assert [asyncio.run(main())] == loops


def test_a_coroutine_function_is_awaited_after_its_loop_ended() -> None:
    """`start` has no loop once it returned: the closer runs in one of its own."""
    closed: list[str] = []

    async def up(context: TaskContext) -> None:
        async def close() -> None:
            await asyncio.sleep(0)
            closed.append("up")

        context.defer(close)

    with start(Plan(tasks=(Task(name="up", run=up),))):
        assert [] == closed
    assert ["up"] == closed


def test_a_closer_that_never_ends_is_told_and_stops_no_other() -> None:
    """It has its seconds; then the next one is called."""
    closed: list[str] = []
    never = threading.Event()
    closers = Closers()
    closers.add(lambda: closed.append("first"), what="first")
    closers.add(never.wait, what="stuck", timeout=0.05)
    try:
        problems = closers.take_down()
    finally:
        never.set()
    assert ["stuck: expected to close within 0.05 s, still closing"] == [problem.message for problem in problems]
    assert ["first"] == closed
    assert [] == closers.take_down()


INTERRUPTED_TWICE = """
import asyncio, os, signal, threading, time
from routeplane.fleet.startup import Plan, Task, start

signal.signal(signal.SIGINT, signal.default_int_handler)

def slow(name):
    def close():
        print("closing", name, flush=True)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        print("closed", name, flush=True)
    return close

async def up(context):
    context.defer(slow(context.name))

tasks = (Task(name="a", run=up), Task(name="b", run=up, needs=("a",)), Task(name="c", run=up, needs=("b",)))
with start(Plan(tasks=tasks)):
    os.kill(os.getpid(), signal.SIGINT)
"""


def test_interrupts_in_teardown_skip_no_closer() -> None:
    """Each closer is interrupted once more: all of them run, in order, and the process ends by KeyboardInterrupt."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_TWICE],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert [f"{verb} {name}" for name in "cba" for verb in ("closing", "closed")] == done.stdout.splitlines()
    assert "KeyboardInterrupt" in done.stderr
    assert done.returncode in (1, -signal.SIGINT, 128 + signal.SIGINT)


def test_a_failure_beside_a_cancellation_is_told() -> None:
    """The start is cancelled, and a task fails while it ends: a note beside, not a task whose error is never seen."""

    async def fail(context: TaskContext) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise OSError("no device") from None

    async def main() -> None:
        task = asyncio.create_task(start_async(Plan(tasks=(Task(name="a", run=fail),))))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert ["task a failed meanwhile: OSError: no device"] == caught.value.__notes__

    asyncio.run(main())


def test_cancelling_a_start_repeatedly_skips_no_closer() -> None:
    """In a program with its own loop: every cancellation is remembered, none ends the teardown."""
    closed: list[str] = []

    async def up(context: TaskContext) -> None:
        async def close() -> None:
            await asyncio.sleep(0.1)
            closed.append(context.name)

        context.defer(close)
        await asyncio.Event().wait()

    async def main() -> None:
        task = asyncio.create_task(start_async(Plan(tasks=(Task(name="a", run=up), Task(name="b", run=up)))))
        for _ in range(5):
            await asyncio.sleep(0.02)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert {"a", "b"} == set(closed)
