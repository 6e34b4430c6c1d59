"""Failures of a fleet, by killing or blocking real processes: it ends in seconds, says why, and leaves no process.

The engine that is killed while it loads is in ``test_engine_actor``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from routeplane.errors import ErrorKind, FleetError
from routeplane.fleet.actors import EnvironmentHandle, build_environment_actor, start_engine
from routeplane.fleet.endpoints import Endpoints
from routeplane.fleet.engine import EngineConfig
from routeplane.fleet.startup import Plan, Task, TaskContext, start
from routeplane.fleet.teardown import Process, children_of, process_of
from tests.fleet.workers import has_ended
from tests.ray_cluster import SETTINGS, local_cluster

# one worker for all files that start a cluster: at most one at a time
pytestmark = pytest.mark.xdist_group("ray")

ROOT = Path(__file__).parents[2]
URLS = Endpoints.of(["http://127.0.0.1:1/v1"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster for the tests that need one in this process."""
    with local_cluster(object_store_bytes=100 * 2**20):
        yield


def known(pid: int) -> Process:
    """A process that runs now."""
    found = process_of(pid)
    assert found is not None
    return found


def port_of(url: str) -> int:
    """The port of an endpoint's URL."""
    return int(url.rpartition(":")[2].partition("/")[0])


def refuses(port: int) -> bool:
    """Whether no process listens there."""
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) != 0


# ----------------------------------------------------------------------------------------------------------------------
# One process is killed, or never answers
# ----------------------------------------------------------------------------------------------------------------------


def test_an_environment_that_never_answers_ends_in_its_time(cluster: None, tmp_path: Path) -> None:
    """The task's bound ends the plan, and the actor and the server below it are gone."""
    said = tmp_path / "pids"

    async def environment(context: TaskContext) -> None:
        settings = {"hang": str(said)}
        build = partial(build_environment_actor, settings, URLS, factory="tests.fleet.workers:child", captured=None)
        await context.acquire(build, EnvironmentHandle.close)

    with pytest.raises(FleetError, match="expected task environment to end within 8") as caught:
        start(Plan(tasks=(Task(name="environment", run=environment, timeout=8.0),)))
    assert ErrorKind.START_FAILED == caught.value.kind
    pids = [int(pid) for pid in said.read_text().split()]
    assert 2 == len(pids)
    assert [] == [found for pid in pids if (found := process_of(pid)) is not None and not has_ended(found)]


def test_an_engine_whose_port_was_taken_meanwhile_says_so(cluster: None) -> None:
    """Killed, its port taken by somebody else, restarted: refused before anything is loaded, and the actor is gone."""
    config = EngineConfig(model="no model is loaded here", spec=None, port_range=(18_900, 19_000))
    engine = asyncio.run(start_engine(config, 0))
    try:
        port = port_of(asyncio.run(engine.reserve()).url)
        process = known(engine.pid)
        os.kill(process.pid, signal.SIGKILL)
        asyncio.run(asyncio.to_thread(engine.close))
        assert has_ended(process)
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            thief.bind(("127.0.0.1", port))
            thief.listen()
            with pytest.raises(FleetError, match=f"expected port {port}") as caught:
                asyncio.run(engine.restart())
        assert ErrorKind.NO_PORT == caught.value.kind
        again = known(engine.pid)
        assert again != process
    finally:
        engine.close()
    assert has_ended(again)
    assert refuses(port)


# ----------------------------------------------------------------------------------------------------------------------
# SIGINT
# ----------------------------------------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, signal, sys, ray
from functools import partial
from routeplane.fleet.actors import EngineHandle, EnvironmentHandle, build_environment_actor, start_engine
from routeplane.fleet.endpoints import Endpoints
from routeplane.fleet.engine import EngineConfig
from routeplane.fleet.startup import Plan, Task, start

# a job in the background of a shell inherits SIGINT as ignored
signal.signal(signal.SIGINT, signal.default_int_handler)

async def reserved(context):
    config = EngineConfig(model="no model is loaded here", spec=None, port_range=(19_000, 19_100))
    handle = await context.acquire(partial(start_engine, config, 0), EngineHandle.close)
    return Endpoints(states=(await handle.reserve(),))

async def environment(context):
    endpoints = context.results["reserved"]
    build = partial(build_environment_actor, {}, endpoints, factory="tests.fleet.workers:child", captured=None)
    await context.acquire(build, EnvironmentHandle.close)

async def trainer(context):
    if sys.argv[1] == "starting":
        print(context.results["reserved"].urls[0], flush=True)
        await asyncio.Event().wait()

tasks = (
    Task(name="reserved", run=reserved),
    Task(name="environment", run=environment, needs=("reserved",)),
    Task(name="trainer", run=trainer, needs=("environment", "reserved")),
)
ray.init(
    address="local", num_cpus=2, object_store_memory=100 * 2**20, include_dashboard=False, log_to_driver=False,
    logging_level="error",
)
try:
    with start(Plan(tasks=tasks)) as fleet:
        print(fleet["reserved"].urls[0], flush=True)
        input()
finally:
    ray.shutdown()
"""


@pytest.mark.parametrize("phase", ["starting", "running"])
def test_an_interrupt_leaves_no_process_and_no_socket(phase: str, tmp_path: Path) -> None:
    """SIGINT with real actors, during and after the start: every process of the program ends, and its port is free."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(script), phase],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout is not None
        port = port_of(program.stdout.readline().strip())
        assert not refuses(port)
        processes = children_of(program.pid)
        assert len(processes) > 4  # Ray's own, two actors, and the server below one of them
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    assert [] == [process for process in processes if not has_ended(process)]
    assert refuses(port)
