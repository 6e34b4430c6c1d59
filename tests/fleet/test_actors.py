"""Actors on a real cluster: one builder for every set-up, typed errors across Ray, and no process left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from routeplane.errors import DataError, ErrorKind, FleetError, UsageError
from routeplane.fleet.actors import ActorHandle, ActorOptions, EnvironmentHandle, build_environment_actor, start_actor
from routeplane.fleet.endpoints import Endpoints, reserve
from routeplane.fleet.environment import EnvironmentWorker
from routeplane.fleet.startup import Plan, Task, TaskContext, start
from routeplane.fleet.teardown import Process, children_of, process_of
from routeplane.record.spec import RouteSpec
from tests.fleet.workers import has_ended
from tests.ray_cluster import local_cluster

# one worker for all files that start a cluster: at most one at a time
pytestmark = pytest.mark.xdist_group("ray")

SPEC = RouteSpec(num_experts=64, top_k=4, layer_ids=(0, 1))
URLS = Endpoints.of(["http://127.0.0.1:1/v1"])
FACTORY = "tests.fleet.workers:child"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A cluster whose driver has a secret in its environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("VIRTUAL_ENV", raising=False)
        with local_cluster(object_store_bytes=100 * 2**20):
            # set after the workers' parents started: only a copy of the driver's environment would carry it
            patch.setenv("FLEET_TESTS_SECRET", "token")
            yield


def built(config: Mapping[str, Any], *, endpoints: Endpoints = URLS, **options: Any) -> EnvironmentHandle:
    """The builder, from a test without a loop."""
    options.setdefault("captured", SPEC)
    return asyncio.run(build_environment_actor(config, endpoints, factory=FACTORY, **options))


def asked(handle: EnvironmentHandle, example: Any = None) -> Any:
    """One rollout."""
    return asyncio.run(handle.rollout(example))


def command_of(process: Process) -> bytes:
    """The command line of a process; empty where it has ended."""
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_bytes()
    except OSError:
        return b""


def known(pid: int) -> Process:
    """A process that runs now."""
    found = process_of(pid)
    assert found is not None
    return found


# ----------------------------------------------------------------------------------------------------------------------
# One builder
# ----------------------------------------------------------------------------------------------------------------------


def test_every_set_up_gets_its_environment_from_one_function() -> None:
    """GRPO with loaded engines, distillation without capture, a single controller whose engines still load."""
    with reserve("127.0.0.1", (18_700, 18_800)) as deferred:
        set_ups: dict[str, dict[str, Any]] = {
            "grpo": {"endpoints": URLS, "captured": SPEC, "tokenizer": "the tokenizer"},
            "distillation": {"endpoints": URLS, "captured": None, "tokenizer": "the tokenizer"},
            "single-controller": {
                "endpoints": Endpoints.of([deferred.url]),
                "captured": SPEC,
                "tokenizer": "the tokenizer",
            },
        }
        seen = {}
        for name, options in set_ups.items():
            handle = built({}, name=name, **options)
            seen[name] = asked(handle)
            handle.close()
    assert {"grpo": True, "distillation": False, "single-controller": True} == {
        name: answer["required"] for name, answer in seen.items()
    }
    assert (deferred.url,) == seen["single-controller"]["urls"]
    assert {"the tokenizer"} == {answer["tokenizer"] for answer in seen.values()}


def test_children_get_the_root_of_the_virtual_environment_and_no_copy_of_ours() -> None:
    """VIRTUAL_ENV is a folder and not an interpreter; the driver's secrets stay with the driver."""
    handle = built({}, options=ActorOptions(ray={"runtime_env": {"env_vars": {"FLEET_TESTS_GIVEN": "kept"}}}))
    answer = asked(handle)
    handle.close()
    assert [sys.prefix, sys.prefix] == answer["venv"]
    assert (None, "kept") == (answer["secret"], answer["given"])


def test_placement_is_kept() -> None:
    """A node that is not there cannot be replaced by another."""
    nowhere = NodeAffinitySchedulingStrategy("a" * 56, soft=False)
    with pytest.raises(FleetError) as caught:
        built({}, options=ActorOptions(ray={"scheduling_strategy": nowhere}))
    assert ErrorKind.ACTOR_LOST == caught.value.kind
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    handle = built({}, options=ActorOptions(ray={"scheduling_strategy": here}))
    assert asyncio.run(handle.is_healthy())
    handle.close()


def test_a_key_that_the_environment_does_not_consume_is_refused() -> None:
    """A misspelt key would silently be the default: the factory declares what it consumes."""
    with pytest.raises(UsageError, match=r"expected keys that .*:child consumes \(fail, hang\), got strangr"):
        built({"strangr": 1})


def test_a_tokenizer_that_the_environment_does_not_take_is_refused() -> None:
    """An environment without set_tokenizer would drop it in silence."""
    with pytest.raises(UsageError, match="expected an environment with set_tokenizer"):
        asyncio.run(
            build_environment_actor({}, URLS, factory="tests.fleet.workers:plain", captured=None, tokenizer="t")
        )


@pytest.mark.parametrize("venv", [sys.executable, "/no/such/folder"])
def test_what_is_not_the_root_of_an_environment_is_refused(venv: str) -> None:
    """An interpreter, and a folder that is not there."""
    with pytest.raises(UsageError, match="expected venv as the root of a virtual environment"):
        ActorOptions(venv=venv)


def test_the_root_is_said_once() -> None:
    """One of the two would win in silence."""
    with pytest.raises(UsageError, match="not both"):
        ActorOptions(venv=sys.prefix, ray={"runtime_env": {"env_vars": {"VIRTUAL_ENV": "/x"}}})


def test_an_actor_that_cannot_be_placed_ends_in_its_time() -> None:
    """A cluster without the resource: the error names what was asked for, and no actor is left pending."""
    options = ActorOptions(ray={"num_gpus": 1}, timeout=1.0)
    with pytest.raises(FleetError, match=r"engine.* within 1\.0 s.*num_gpus") as caught:
        asyncio.run(start_actor(EnvironmentWorker, [None, FACTORY], name="engine", options=options))
    assert ErrorKind.NOT_READY == caught.value.kind


def test_a_plan_whose_actor_cannot_be_placed_ends_in_the_tasks_time() -> None:
    """The task's bound is shorter than the actor's: cancellation reaches Ray, and nothing of the actor is left."""

    async def engine(context: TaskContext) -> object:
        make = partial(
            start_actor, EnvironmentWorker, [None, FACTORY], name="engine", options=ActorOptions(ray={"num_gpus": 1})
        )
        return await context.acquire(make, ActorHandle.close)

    with pytest.raises(FleetError, match=r"expected task engine to end within 0\.5 s"):
        start(Plan(tasks=(Task(name="engine", run=engine, timeout=0.5),)))


def test_an_actor_is_gone_when_a_failed_start_returns() -> None:
    """Another task fails while the actor is being placed: its process has ended before the error is raised."""

    async def actor(context: TaskContext) -> object:
        return await context.acquire(
            partial(start_actor, EnvironmentWorker, [None, FACTORY], name="actor"), ActorHandle.close
        )

    async def fail(context: TaskContext) -> None:
        await asyncio.sleep(0.05)
        raise OSError("no such model")

    for _ in range(3):
        with pytest.raises(FleetError, match="no such model"):
            start(Plan(tasks=(Task(name="actor", run=actor), Task(name="fail", run=fail))))
        assert [] == [
            process for process in children_of(os.getpid()) if b"ray::EnvironmentWorker" in command_of(process)
        ]


# ----------------------------------------------------------------------------------------------------------------------
# Faults
# ----------------------------------------------------------------------------------------------------------------------


def test_a_start_that_fails_leaves_no_process_and_its_own_error() -> None:
    """The first error is the one that is raised; the server below the actor is gone."""
    with pytest.raises(FleetError, match="no such tool") as caught:
        built({"fail": True})
    assert ErrorKind.ENVIRONMENT == caught.value.kind
    server = int(caught.value.message.partition("; server ")[2].split()[0].split("\n")[0])
    found = process_of(server)
    assert found is None or has_ended(found)


def test_errors_cross_as_what_they_are() -> None:
    """Bad data is DataError; an actor that died is lost, and says so."""
    handle = built({})
    with pytest.raises(DataError) as data:
        asked(handle, "data")
    assert ErrorKind.ROUTES_MISSING == data.value.kind
    assert asyncio.run(handle.is_healthy())
    with pytest.raises(FleetError) as lost:
        asked(handle, "die")
    assert ErrorKind.ACTOR_LOST == lost.value.kind
    handle.close()


def test_close_ends_the_actor_and_everything_below_it() -> None:
    """The environment leaves its server running; the handle does not."""
    handle = built({})
    answer = asked(handle)
    processes = [known(answer["pid"]), known(answer["server"])]
    handle.close()
    handle.close()
    assert [True, True] == [has_ended(process) for process in processes]
    with pytest.raises(FleetError):
        asked(handle)


def test_a_killed_actor_is_closed_without_an_error() -> None:
    """SIGKILL from outside: nothing is left to end in order, and its orphans are found by their mark."""
    handle = built({})
    process = known(asked(handle)["pid"])
    below = children_of(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    handle.close()
    assert below
    assert [True] * (1 + len(below)) == [has_ended(each) for each in (process, *below)]


def test_a_plan_that_fails_takes_its_actors_along() -> None:
    """The environment is up when another task fails: its processes end, and the failure is the one that is told."""
    processes: list[Process] = []

    async def environment(context: TaskContext) -> None:
        build = partial(build_environment_actor, {}, URLS, factory=FACTORY, captured=None)
        handle = await context.acquire(build, EnvironmentHandle.close)
        answer = await handle.rollout(None)
        processes.extend([known(answer["pid"]), known(answer["server"])])

    async def engine(context: TaskContext) -> None:
        raise OSError("no such model")

    tasks = (Task(name="environment", run=environment), Task(name="engine", run=engine, needs=("environment",)))
    with pytest.raises(FleetError, match="task engine: OSError: no such model"):
        start(Plan(tasks=tasks))
    assert [True, True] == [has_ended(process) for process in processes]
