"""Ray actors of a fleet, built in one place: engines, the environment, and anything that one function makes.

``build_environment_actor`` is the only way to an environment actor, whatever the algorithm around it, so that set-ups
cannot drift apart. Handles own their actor: ``close`` ends it, whatever state it is in, and every process below it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import sys
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from routeplane.errors import ErrorKind, FleetError, RouteplaneError
from routeplane.fleet.endpoints import Endpoints, EndpointState
from routeplane.fleet.engine import EngineConfig, EngineStatus, EngineWorker
from routeplane.fleet.environment import MAX_ROLLOUTS, EnvironmentConfig, EnvironmentWorker, build_config
from routeplane.fleet.processes import MARK, Process, children_of, end_processes, marked_with, process_of
from routeplane.record.spec import RouteSpec

__all__ = ["ActorHandle", "EngineHandle", "EnvironmentHandle", "build_environment_actor", "start_actor", "start_engine"]

#: Seconds that an actor has for an orderly end before it is killed.
CLOSE_SECONDS = 10.0


class ActorHandle:
    """One actor of ours: calls that raise typed errors, and an end that leaves no process behind. Owns the actor."""

    def __init__(self, actor: Any, name: str) -> None:
        self._actor = actor
        self.name = name
        self._node, self._process, self._mark = self._locate()
        self._closed = False

    @property
    def pid(self) -> int:
        """The actor's process on its node."""
        return self._process.pid

    async def call(self, method: str, *, arguments: Sequence[Any] = ()) -> Any:
        """Call a method and await it. Errors of ours arrive as themselves; a dead actor is FleetError (ACTOR_LOST)."""
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except RayError as error:
            raise _ours(error, self.name) from error

    def call_blocking(self, method: str, *, arguments: Sequence[Any] = (), timeout: float | None = None) -> Any:
        """The same from a thread. Raises FleetError (NOT_READY) where it takes longer than ``timeout`` seconds."""
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=timeout)
        except GetTimeoutError as error:
            raise FleetError(
                f"expected {method} of {self.name} within {timeout} s, got no answer", kind=ErrorKind.NOT_READY
            ) from error
        except RayError as error:
            raise _ours(error, self.name) from error

    def close(self) -> None:
        """End the actor: in order if it answers, killed if not; then whatever process it left. Idempotent."""
        if self._closed:
            return
        self._closed = True
        below = self._on_node(children_of, self.pid) or ()
        with contextlib.suppress(FleetError):  # it is dead, or does not answer: killed all the same
            self.call_blocking("close", timeout=CLOSE_SECONDS)
        ray.kill(self._actor, no_restart=True)
        # below an actor that died before nobody is found by parent, hence the mark
        self._on_node(_end_left, (self._process, *below), self._mark)

    def _locate(self) -> tuple[str, Process, str]:
        try:
            place: tuple[str, Process, str] = ray.get(self._actor.__ray_call__.remote(_where))
        except RayError as error:
            raise _ours(error, self.name) from error
        return place

    def _on_node(self, work: Any, *arguments: Any) -> Any:
        """Run ``work`` on the actor's node; None where that node is gone, and the processes with it."""
        place = NodeAffinitySchedulingStrategy(self._node, soft=False)
        task = ray.remote(work).options(num_cpus=0, max_retries=0, scheduling_strategy=place)
        try:
            return ray.get(task.remote(*arguments), timeout=3 * CLOSE_SECONDS)
        except RayError:
            return None


class EngineHandle(ActorHandle):
    """An engine's actor, seen from the driver; methods as ``EngineWorker``'s."""

    def __init__(self, actor: Any, name: str, *, config: EngineConfig, shard: int, options: Mapping[str, Any]) -> None:
        super().__init__(actor, name)
        self._config, self._shard, self._options = config, shard, dict(options)
        self._reserved: EndpointState | None = None

    async def reserve(self) -> EndpointState:
        """Listen now; the URL is known from here on."""
        state: EndpointState = await self.call("reserve", arguments=[self._port()])
        self._reserved = state
        return state

    async def load(self) -> None:
        """Load weights and probe."""
        await self.call("load")

    async def serve(self) -> EngineStatus:
        """Answer requests from here on."""
        status: EngineStatus = await self.call("serve")
        return status

    async def drain(self, timeout: float) -> int:
        """Wait for what is in flight; how many requests are left."""
        return int(await self.call("drain", arguments=[timeout]))

    async def restart(self) -> EngineStatus:
        """End what is left of the engine, and bring up another in its place, at its old URL."""
        await asyncio.to_thread(self.close)
        again = await asyncio.to_thread(start_engine, self._config, self._shard, name=self.name, options=self._options)
        self._actor, self._node, self._process, self._mark = again._actor, again._node, again._process, again._mark
        self._closed = False
        await self.reserve()
        await self.load()
        return await self.serve()

    def _port(self) -> int | None:
        if self._reserved is None:
            return None
        return int(self._reserved.url.rpartition(":")[2].partition("/")[0])


class EnvironmentHandle(ActorHandle):
    """An environment's actor that was started and has its tokenizer. ``config``: what it was built with."""

    def __init__(self, actor: Any, name: str, *, config: EnvironmentConfig) -> None:
        super().__init__(actor, name)
        self.config = config

    async def rollout(self, example: Any) -> Any:
        """Answer one example. Raises RouteplaneError for bad data, FleetError (ENVIRONMENT) for the environment's own
        failures, (ACTOR_LOST) where the actor is gone.
        """
        return await self.call("rollout", arguments=[example])

    async def is_healthy(self) -> bool:
        """Whether it can answer now."""
        return bool(await self.call("is_healthy"))


def start_actor(worker: type, arguments: Sequence[Any], *, options: Mapping[str, Any] | None = None) -> Any:
    """A Ray actor of ``worker(*arguments)``; ``options`` are Ray's (resources, scheduling_strategy, runtime_env).

    Actors are not restarted behind our back: a restarted one would have lost its engine, its socket and its state.
    Each bears a mark of its own in its environment, by which whatever it started is found once it is gone.
    """
    environment = dict((options or {}).get("runtime_env") or {})
    environment["env_vars"] = {**environment.get("env_vars", {}), MARK: uuid.uuid4().hex}
    fixed = {"runtime_env": environment, "max_restarts": 0, "max_task_retries": 0}
    settings = {"num_cpus": 0, **(options or {}), **fixed}
    return ray.remote(worker).options(**settings).remote(*arguments)


def start_engine(
    config: EngineConfig, shard: int, *, name: str | None = None, options: Mapping[str, Any] | None = None
) -> EngineHandle:
    """The actor of one engine shard, not reserved yet. The caller closes the handle."""
    title = name or f"engine-{shard}"
    actor = start_actor(EngineWorker, [config, shard], options=options)
    return EngineHandle(actor, title, config=config, shard=shard, options=options or {})


async def build_environment_actor(
    config: Mapping[str, Any],
    endpoints: Endpoints,
    *,
    factory: str,
    captured: RouteSpec | None,
    known: Collection[str] | None = None,
    tokenizer: Any = None,
    venv: str | None = None,
    options: Mapping[str, Any] | None = None,
    name: str = "environment",
) -> EnvironmentHandle:
    """Configuration, runtime environment, placement, start and tokenizer of an environment actor, for every set-up.

    ``config``, ``endpoints``, ``captured``, ``known``: as ``build_config``; URLs of engines that still load are fine.
    ``factory``: as EnvironmentWorker. ``tokenizer``: pickled once and installed once. ``venv``: the *root* of the
    virtual environment that child servers use, default this interpreter's; set as VIRTUAL_ENV and
    UV_PROJECT_ENVIRONMENT, and nothing else of the driver's environment is copied. ``options``: Ray's, kept as given (a
    scheduling strategy above all), their ``runtime_env`` merged.

    The caller closes the handle. If anything fails here, the actor is gone, and the first error is the one that is
    raised; what its teardown said stands beside it as a note.
    """
    built = build_config(config, endpoints, captured=captured, known=known)
    actor = start_actor(
        EnvironmentWorker,
        [built, factory],
        options={"max_concurrency": MAX_ROLLOUTS, **(options or {}), "runtime_env": _runtime_env(options, venv)},
    )
    handle = await asyncio.to_thread(EnvironmentHandle, actor, name, config=built)
    try:
        await handle.call("start")
        if tokenizer is not None:
            await handle.call("set_tokenizer", arguments=[pickle.dumps(tokenizer)])
    except BaseException:
        handle.close()
        raise
    return handle


def _runtime_env(options: Mapping[str, Any] | None, venv: str | None) -> dict[str, Any]:
    given = dict((options or {}).get("runtime_env") or {})
    root = venv or sys.prefix
    return {
        **given,
        "env_vars": {"VIRTUAL_ENV": root, "UV_PROJECT_ENVIRONMENT": root, **given.get("env_vars", {})},
    }


def _ours(error: RayError, name: str) -> RouteplaneError:
    """Ray's error as ours: what an actor raised of ours as it is, a dead actor and anything else as FleetError."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, RouteplaneError):
        return error.cause
    # an actor that cannot be placed is told as either, by which of its creation and the first call came first
    if isinstance(error, RayActorError | ActorUnschedulableError):
        return FleetError(f"expected actor {name} to be alive, got: {error}", kind=ErrorKind.ACTOR_LOST)
    cause = error.cause if isinstance(error, RayTaskError) else error
    return FleetError(f"expected {name} to answer, got {type(cause).__name__}: {error}", kind=ErrorKind.ACTOR_FAILED)


def _where(_: Any) -> tuple[str, Process, str]:
    context = ray.get_runtime_context()
    pid = os.getpid()
    # started=0 where there is no /proc: nobody is found by it, and nobody is ended by it
    process = process_of(pid) or Process(pid=pid, started=0)
    return context.get_node_id(), process, context.runtime_env.get("env_vars", {}).get(MARK, "")


def _end_left(left: tuple[Process, ...], mark: str) -> int:
    # an actor that somebody else made bears no mark
    return len(end_processes((*left, *(marked_with(mark) if mark else ()))))
