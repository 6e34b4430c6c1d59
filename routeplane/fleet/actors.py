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
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from routeplane.errors import ErrorKind, FleetError, RouteplaneError, refused
from routeplane.fleet.endpoints import (
    WILDCARDS,
    EndpointKeeper,
    Endpoints,
    EndpointState,
    KeptEndpoint,
    ServerState,
)
from routeplane.fleet.engine import EngineConfig, EngineStatus, EngineWorker
from routeplane.fleet.environment import MAX_ROLLOUTS, EnvironmentConfig, EnvironmentWorker, build_config
from routeplane.fleet.teardown import MARK, Process, children_of, end_processes, marked_with, process_of
from routeplane.record.spec import RouteSpec

__all__ = [
    "ActorHandle",
    "ActorOptions",
    "EngineHandle",
    "EnvironmentHandle",
    "build_environment_actor",
    "start_actor",
    "start_engine",
]

#: Seconds that an actor has for an orderly end before it is killed.
CLOSE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorOptions:
    """How an actor is made.

    ``ray``: Ray's own options, kept as given (``num_gpus``, ``scheduling_strategy``, ``runtime_env``). ``timeout``:
    seconds until the actor is placed and has answered; a cluster without the resource never places it. ``venv``: the
    root of the virtual environment that child processes use, default this interpreter's; environments only. Raises
    UsageError (ARGUMENT) for a ``venv`` that is not such a folder, and for one beside VIRTUAL_ENV in ``ray``.

    >>> ActorOptions(ray={"num_cpus": 1}, timeout=30.0).venv is None
    True
    """

    ray: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 120.0
    venv: str | None = None

    def __post_init__(self) -> None:
        if self.venv is None:
            return
        if not (Path(self.venv) / "pyvenv.cfg").is_file():
            raise refused("venv as the root of a virtual environment (a folder with pyvenv.cfg)", repr(self.venv))
        given = dict((self.ray.get("runtime_env") or {}).get("env_vars") or {})
        both = sorted({"VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT"} & given.keys())
        if both:
            raise refused("venv or the variables that it sets, not both", f"venv and {', '.join(both)}")


_DEFAULTS = ActorOptions()


class ActorHandle:
    """One actor of ours: calls that raise typed errors, and an end that leaves no process behind. Owns the actor.

    Example::

        handle = await start_actor(Trainer, [spec], name="trainer")
        loss = await handle.call("step", arguments=[batch])
        handle.close()
    """

    def __init__(self, actor: Any, name: str, *, place: _Place) -> None:
        self._actor = actor
        self.name = name
        self._place = place
        self._closed = False

    @property
    def pid(self) -> int:
        """The actor's process on its node."""
        return self._place.process.pid

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
        below = _on_node(self._place.node, children_of, self.pid) or ()
        with contextlib.suppress(FleetError):  # it is dead, or does not answer: killed all the same
            self.call_blocking("close", timeout=CLOSE_SECONDS)
        ray.kill(self._actor, no_restart=True)
        # children of an actor that died before have another parent now: they are found by the mark
        _on_node(self._place.node, _end_left, (self._place.process, *below), self._place.mark)


class EngineHandle(ActorHandle):
    """An engine's actor and the keeper of its endpoint, seen from the driver. Owns both.

    The keeper is an actor of its own on the engine's node: it holds the listening socket, so that callers get 503, and
    are never refused, while the engine loads, is gone, or comes back.

    Example::

        engine = await start_engine(config, 0, options=ActorOptions(ray={"num_gpus": 1}))
        url = (await engine.reserve()).url  # other tasks may use it from here on
        await engine.load()
        await engine.serve()
    """

    def __init__(
        self, actor: Any, name: str, *, place: _Place, config: EngineConfig, shard: int, options: ActorOptions
    ) -> None:
        super().__init__(actor, name, place=place)
        self._config, self._shard, self._options = config, shard, options
        self._keeper: ActorHandle | None = None
        self._kept: KeptEndpoint | None = None

    async def reserve(self) -> EndpointState:
        """Listen now; the URL is known from here on. Raises FleetError (NO_PORT), UsageError for a host that no other
        node reaches.
        """
        if self._keeper is None:
            await self._keep()
        return await self.state()

    async def load(self) -> None:
        """Load weights and probe."""
        await self.call("load")

    async def serve(self) -> EngineStatus:
        """Answer requests from here on. Raises FleetError (CLOSED) before ``reserve``, (NOT_READY) before ``load``."""
        status: EngineStatus = await self.call("serve", arguments=[self._require_kept()])
        return status

    async def state(self) -> EndpointState:
        """URL and state of the shard now; ``degraded`` once its engine or its server is gone. Raises as ``serve``."""
        url = self._require_kept().url
        if self._keeper is None:
            return EndpointState(shard=self._shard, url=url, state=ServerState.CLOSED)
        state: ServerState = await self._keeper.call("state")
        if state is ServerState.SERVING and not await self._is_serving():
            state = ServerState.DEGRADED
        return EndpointState(shard=self._shard, url=url, state=state)

    async def drain(self, timeout: float) -> int:
        """Wait for what is in flight; how many requests are left."""
        return int(await self.call("drain", arguments=[timeout]))

    async def restart(self) -> EngineStatus:
        """End what is left of the engine, and bring up another in its place, at its old URL and on its old node."""
        node = self._place.node
        await asyncio.to_thread(super().close)
        again = await start_engine(self._config, self._shard, name=self.name, options=_on(node, self._options))
        self._actor, self._place = again._actor, again._place
        self._closed = False
        try:
            await self.reserve()
        except FleetError:  # the keeper is gone too: another one, at the old port
            await asyncio.to_thread(self._close_keeper)
            await self.reserve()
        await self.load()
        return await self.serve()

    def close(self) -> None:
        """End the engine, then free its port. Idempotent."""
        try:
            super().close()
        finally:
            self._close_keeper()

    def _close_keeper(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()

    async def _keep(self) -> None:
        config = self._config
        address = self._place.address
        if _is_loopback(config.host) and self._place.node != ray.get_runtime_context().get_node_id():
            raise refused(
                f"EngineConfig.host that other nodes reach, as shard {self._shard} runs on node {address}",
                repr(config.host),
            )
        advertise = config.advertise or (address if config.host in WILDCARDS else None)
        keeper = await start_actor(
            EndpointKeeper,
            [config.host, config.port_range],
            name=f"{self.name}-endpoint",
            options=_on(self._place.node, _beside(self._options)),
        )
        try:
            self._kept = await keeper.call("reserve", arguments=[advertise, self._port()])
        except BaseException:
            await _finish(asyncio.to_thread(keeper.close))
            raise
        self._keeper = keeper

    async def _is_serving(self) -> bool:
        try:
            return bool(await self.call("is_serving"))
        except FleetError:
            return False

    def _require_kept(self) -> KeptEndpoint:
        if self._kept is None:
            raise FleetError(f"expected an endpoint of {self.name} that was reserved, got none", kind=ErrorKind.CLOSED)
        return self._kept

    def _port(self) -> int | None:
        return None if self._kept is None else urlsplit(self._kept.url).port


class EnvironmentHandle(ActorHandle):
    """An environment's actor that was started and has its tokenizer. ``config``: what it was built with.

    Example::

        environment = await build_environment_actor({}, endpoints, factory="package.module:make", captured=spec)
        answer = await environment.rollout({"prompt": [1, 2, 3]})
        environment.close()
    """

    def __init__(self, actor: Any, name: str, *, place: _Place, config: EnvironmentConfig) -> None:
        super().__init__(actor, name, place=place)
        self.config = config

    async def rollout(self, example: Any) -> Any:
        """Answer one example. Raises RouteplaneError for bad data, FleetError (ENVIRONMENT) for the environment's own
        failures, (ACTOR_LOST) where the actor is gone.
        """
        return await self.call("rollout", arguments=[example])

    async def is_healthy(self) -> bool:
        """Whether it can answer now."""
        return bool(await self.call("is_healthy"))


async def start_actor(
    worker: type, arguments: Sequence[Any], *, name: str, options: ActorOptions = _DEFAULTS
) -> ActorHandle:
    """The handle of a Ray actor of ``worker(*arguments)``, once it is placed and answers. The caller closes it.

    Actors are not restarted by Ray: a restarted one would have lost its engine, its socket and its state. Where this
    raises, or is cancelled, the actor is gone. Raises FleetError: NOT_READY after ``options.timeout`` seconds,
    ACTOR_LOST where it cannot be placed or died.

    Example, inside a task of a plan::

        trainer = await context.acquire(partial(start_actor, Trainer, [spec], name="trainer"), ActorHandle.close)
    """
    actor, place = await _started(worker, arguments, name, options)
    return ActorHandle(actor, name, place=place)


async def start_engine(
    config: EngineConfig, shard: int, *, name: str | None = None, options: ActorOptions = _DEFAULTS
) -> EngineHandle:
    """The actor of one engine shard, not reserved yet. Raises as ``start_actor``. The caller closes the handle.

    Example, inside a task of a plan::

        engine = await context.acquire(partial(start_engine, config, 0), EngineHandle.close)
    """
    title = name or f"engine-{shard}"
    actor, place = await _started(EngineWorker, [config, shard], title, options)
    return EngineHandle(actor, title, place=place, config=config, shard=shard, options=options)


async def build_environment_actor(
    settings: Mapping[str, Any],
    endpoints: Endpoints,
    *,
    factory: str,
    captured: RouteSpec | None,
    tokenizer: Any = None,
    options: ActorOptions = _DEFAULTS,
    name: str = "environment",
) -> EnvironmentHandle:
    """Configuration, runtime environment, placement, start and tokenizer of an environment actor, for every set-up.

    ``settings``, ``endpoints``, ``captured``: as ``build_config``; URLs of engines that still load are fine.
    ``factory``: as EnvironmentWorker. ``tokenizer``: pickled once and installed once. VIRTUAL_ENV and
    UV_PROJECT_ENVIRONMENT are set to ``options.venv``; nothing else of the driver's environment is copied by this
    function.

    The caller closes the handle. If anything fails here, the actor is gone, and the first error is the one that is
    raised; what its teardown said stands beside it as a note.

    Example, inside a task of a plan::

        make = partial(build_environment_actor, {}, endpoints, factory="package.module:make", captured=spec)
        environment = await context.acquire(make, EnvironmentHandle.close)
    """
    built = build_config(settings, endpoints, captured=captured)
    root = options.venv or sys.prefix
    variables = {"VIRTUAL_ENV": root, "UV_PROJECT_ENVIRONMENT": root}
    own = ActorOptions(ray={"max_concurrency": MAX_ROLLOUTS, **_with_variables(options.ray, variables)})
    actor, place = await _started(EnvironmentWorker, [built, factory], name, replace(own, timeout=options.timeout))
    handle = EnvironmentHandle(actor, name, place=place, config=built)
    try:
        await handle.call("start", arguments=[None if tokenizer is None else pickle.dumps(tokenizer)])
    except BaseException:
        await _finish(asyncio.to_thread(handle.close))
        raise
    return handle


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where an actor runs: its node, the node's address, its process, and the mark that its descendants bear."""

    node: str
    address: str
    process: Process
    mark: str


async def _started(worker: type, arguments: Sequence[Any], name: str, options: ActorOptions) -> tuple[Any, _Place]:
    """An actor that answers, and its place. Each bears a mark of its own in its environment."""
    mark = uuid.uuid4().hex
    fixed = {"max_restarts": 0, "max_task_retries": 0}
    settings = {"num_cpus": 0, **_with_variables(options.ray, {MARK: mark}), **fixed}
    actor = ray.remote(worker).options(**settings).remote(*arguments)
    try:
        async with asyncio.timeout(options.timeout):
            node, address, process = await actor.__ray_call__.remote(_where)
    except TimeoutError as error:
        await _finish(asyncio.to_thread(_end_unplaced, actor, mark))
        wanted = {key: value for key, value in options.ray.items() if key != "runtime_env"}
        raise FleetError(
            f"expected actor {name} to be placed and to answer within {options.timeout} s, got no answer "
            f"(asked of Ray: {wanted or 'nothing'})",
            kind=ErrorKind.NOT_READY,
        ) from error
    except RayError as error:
        await _finish(asyncio.to_thread(_end_unplaced, actor, mark))
        raise _ours(error, name) from error
    except BaseException:  # cancelled, above all
        await _finish(asyncio.to_thread(_end_unplaced, actor, mark))
        raise
    return actor, _Place(node=node, address=address, process=process, mark=mark)


async def _finish(work: Awaitable[object]) -> None:
    """Await work that must end although this task is cancelled, perhaps repeatedly."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)


def _end_unplaced(actor: Any, mark: str) -> None:
    """End an actor whose place is not known, and what it started, on every node that is alive."""
    ray.kill(actor, no_restart=True)
    _on_nodes([node["NodeID"] for node in ray.nodes() if node["Alive"]], _end_left, (), mark)


def _on_node(node: str, work: Any, *arguments: Any) -> Any:
    """Run ``work`` on a node; None where that node is gone, and its processes with it."""
    return _on_nodes([node], work, *arguments)[0]


def _on_nodes(nodes: Sequence[str], work: Any, *arguments: Any) -> list[Any]:
    """The same on several at once: a large cluster takes no longer than a small one."""
    remote = ray.remote(work)
    tasks = []
    for node in nodes:
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        tasks.append(remote.options(num_cpus=0, max_retries=0, scheduling_strategy=place).remote(*arguments))
    ray.wait(tasks, num_returns=len(tasks), timeout=3 * CLOSE_SECONDS)
    return [_result(task) for task in tasks]


def _result(task: Any) -> Any:
    try:
        return ray.get(task, timeout=0)
    except RayError:
        return None


def _beside(options: ActorOptions) -> ActorOptions:
    """Of an actor's options what an actor beside it needs: the code, and none of its resources."""
    environment = options.ray.get("runtime_env")
    return ActorOptions(ray={"runtime_env": environment} if environment else {}, timeout=options.timeout)


def _on(node: str, options: ActorOptions) -> ActorOptions:
    """The same on one node; a placement group has its node already."""
    strategy = options.ray.get("scheduling_strategy")
    if isinstance(strategy, PlacementGroupSchedulingStrategy) or "placement_group" in options.ray:
        return options
    return replace(
        options, ray={**options.ray, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
    )


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _with_variables(options: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """Ray's options with variables added to the actor's environment; the user's own win, but for the mark."""
    environment = dict(options.get("runtime_env") or {})
    given = dict(environment.get("env_vars") or {})
    own = {MARK: variables[MARK]} if MARK in variables else {}
    return {**options, "runtime_env": {**environment, "env_vars": {**variables, **given, **own}}}


def _ours(error: RayError, name: str) -> RouteplaneError:
    """Ray's error as ours: what an actor raised of ours as it is, a dead actor and anything else as FleetError."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, RouteplaneError):
        return error.cause
    # an actor that cannot be placed is told as either, by which of its creation and the first call came first
    if isinstance(error, RayActorError | ActorUnschedulableError):
        return FleetError(f"expected actor {name} to be alive, got: {error}", kind=ErrorKind.ACTOR_LOST)
    cause = error.cause if isinstance(error, RayTaskError) else error
    return FleetError(f"expected {name} to answer, got {type(cause).__name__}: {error}", kind=ErrorKind.ACTOR_FAILED)


def _where(_: Any) -> tuple[str, str, Process]:
    pid = os.getpid()
    # started=0 where the machine has no /proc: it matches no process, so none is ended by it
    process = process_of(pid) or Process(pid=pid, started=0)
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), process


def _end_left(left: tuple[Process, ...], mark: str) -> int:
    return len(end_processes((*left, *marked_with(mark))))
