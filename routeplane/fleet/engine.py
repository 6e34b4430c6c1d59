"""An engine as an actor: loaded in minutes, probed before its first request, served on a socket that outlives it.

``EngineWorker`` runs in the actor's process and event loop; ``EngineConfig`` is what it is told. ``serve_app`` serves
an ASGI application on a reserved endpoint, by uvicorn. Knows no plan and no other actor. Ray makes an actor of it in
``actors``.
"""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import uvicorn

from routeplane.errors import ErrorKind, FleetError, UsageError, refused
from routeplane.fleet.endpoints import BorrowedEndpoint, Endpoint, EndpointState, KeptEndpoint, ServerState
from routeplane.fleet.teardown import Process, children_of

if TYPE_CHECKING:
    from routeplane.record.spec import RouteSpec

__all__ = ["EngineConfig", "EngineStatus", "EngineWorker", "ServedApp", "WorkerHook", "serve_app"]


def _nothing() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One shard of an engine.

    ``model``: a folder as ``save_pretrained`` writes it. ``spec``: what its routes mean; None captures nothing, and
    then no environment may demand routes. ``host``, ``port_range``: where it listens; a loopback host is refused for an
    engine on another node than the driver's. ``advertise``: the host in its URL; None: ``host``, or the address of the
    engine's node where ``host`` binds all interfaces. ``options``: further arguments of vLLM's server. ``middleware``:
    dotted name of ``make(app, spec, shard) -> app``, such as one that ships routes. ``hook``: dotted name of
    ``hook(worker)``, which runs in *every* worker process after the load, not in rank 0 alone; it takes vLLM's
    ``worker_extension_cls``, which ``options`` must then leave alone. ``min_agreement``: as in ``probe``. Raises
    UsageError (ARGUMENT).

    >>> config = EngineConfig(model="/models/policy", spec=None, port_range=(20_000, 20_100), options={"seed": 0})
    >>> config.host, config.served_name
    ('127.0.0.1', 'policy')
    """

    model: str
    spec: RouteSpec | None
    host: str = "127.0.0.1"
    advertise: str | None = None
    port_range: tuple[int, int] = (20_000, 21_000)
    served_name: str = "policy"
    options: Mapping[str, Any] = field(default_factory=_nothing, repr=False)
    middleware: str | None = None
    hook: str | None = None
    min_agreement: float = 0.5

    def __post_init__(self) -> None:
        # plain dictionaries cross processes, proxies do not
        object.__setattr__(self, "options", dict(self.options))
        if self.hook is not None and self.options.get("worker_extension_cls"):
            raise refused("a hook or options with worker_extension_cls, not both", "both")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStatus:
    """What a shard says of itself. ``probed_rows`` and ``agreement``: of the probe, None without capture.

    ``processes``: those of its engine, which must be gone after ``close``.
    """

    endpoint: EndpointState
    probed_rows: int | None
    agreement: float | None
    processes: tuple[Process, ...]


class EngineWorker:
    """One engine: ``load()`` is heavy, ``serve()`` opens, ``drain()`` and ``close()`` end it."""

    def __init__(self, config: EngineConfig, shard: int) -> None:
        self._config = config
        self._shard = shard
        self._endpoint: BorrowedEndpoint | None = None
        self._engine: Any = None
        self._served: ServedApp | None = None
        self._probe: Any = None

    async def is_serving(self) -> bool:
        """Whether its server accepts and its engine's core lives."""
        return self._served is not None and not self._served.ended and not self._engine.engine.errored

    async def load(self) -> None:
        """Load the weights, run the hook in every worker, and probe: routes come back as promised, before step 0.

        Raises as ``capture.vllm.load_engine`` and ``probe`` do.
        """
        from routeplane.capture.vllm.api_server import load_engine

        config = self._config
        options = dict(config.options)
        if config.hook is not None:
            _find(config.hook)  # a wrong name is told before minutes of loading
            options["worker_extension_cls"] = f"{WorkerHook.__module__}.{WorkerHook.__qualname__}"
        self._engine = await load_engine(
            config.model, spec=config.spec, served_name=config.served_name, options=options
        )
        if config.hook is not None:
            await self._engine.engine.collective_rpc("routeplane_run_hook", args=(config.hook,))
        self._probe = await self._engine.probe(min_agreement=config.min_agreement)

    async def serve(self, kept: KeptEndpoint) -> EngineStatus:
        """Accept on the socket that a keeper holds, with vLLM's OpenAI server.

        Raises FleetError (NOT_READY) before ``load``, and where the keeper does not lend.
        """
        if self._engine is None:
            raise FleetError("expected an engine that was loaded, got none", kind=ErrorKind.NOT_READY)
        app = _unless_dead(await self._engine.build_app(), self._engine.engine)
        if self._config.middleware is not None:
            app = _find(self._config.middleware)(app, self._config.spec, self._shard)
        self._endpoint = BorrowedEndpoint(kept)
        self._served = await serve_app(app, self._endpoint)
        return EngineStatus(
            endpoint=EndpointState(shard=self._shard, url=kept.url, state=ServerState.SERVING),
            probed_rows=None if self._probe is None else self._probe.rows,
            agreement=None if self._probe is None else self._probe.agreement,
            processes=children_of(os.getpid()),
        )

    async def drain(self, timeout: float) -> int:
        """Wait until no request is in flight, for ``timeout`` seconds at most; how many are left."""
        if self._engine is None:
            return 0
        try:
            async with asyncio.timeout(timeout):
                while self._engine.unfinished():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            pass
        return int(self._engine.unfinished())

    async def close(self) -> None:
        """Give the endpoint back, then end server and engine. Idempotent."""
        served, self._served = self._served, None
        if self._endpoint is not None:
            self._endpoint.give_back()  # new callers get 503 from here on; what is in flight is answered
        if served is not None:
            await served.close()
        if self._endpoint is not None:
            self._endpoint.close()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()


class WorkerHook:
    """What vLLM mixes into each worker of an engine with a hook: functions themselves do not cross to its processes."""

    def routeplane_run_hook(self, name: str) -> None:
        """Call the function of a dotted name with this worker."""
        _find(name)(self)


def _unless_dead(app: Any, engine: Any) -> Any:
    """The application, and 503 for every request once the engine's core is gone: vLLM's ``/models`` says 200 then."""

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and engine.errored:
            headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "degraded: the engine is gone"}\n'})
            return
        await app(scope, receive, send)

    return guarded


def _find(name: str) -> Any:
    """The function of a dotted name, ``package.module:function``. Raises UsageError."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UsageError(f"expected a name like package.module:function, got {name!r}", kind=ErrorKind.ARGUMENT)
    return getattr(importlib.import_module(module), attribute)


async def serve_app(app: Any, endpoint: Endpoint | BorrowedEndpoint, *, timeout: float = 60.0) -> ServedApp:
    """Hand the endpoint's socket to a server of ``app`` and wait until it accepts; marks the endpoint serving.

    Raises FleetError: NOT_READY where that takes longer than ``timeout`` seconds or the application ends first.
    """
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=5))
    task = asyncio.create_task(server.serve(sockets=[endpoint.hand_over()]))
    served = ServedApp(server, task)
    try:
        async with asyncio.timeout(timeout):
            while not server.started and not task.done():
                await asyncio.sleep(0.01)
    except TimeoutError as error:
        await served.close()
        raise FleetError(
            f"expected a server on {endpoint.url} within {timeout} s, got none", kind=ErrorKind.NOT_READY
        ) from error
    if not server.started:
        raise FleetError(
            f"expected a server on {endpoint.url}, got an application that ended at its start",
            kind=ErrorKind.NOT_READY,
        ) from (None if task.cancelled() else task.exception())
    endpoint.mark_serving()
    return served


class ServedApp:
    """A server that accepts, as a task of the event loop that made it."""

    def __init__(self, server: uvicorn.Server, task: asyncio.Task[None]) -> None:
        self._server = server
        self._task = task

    @property
    def ended(self) -> bool:
        """Whether the server is gone."""
        return self._task.done()

    async def close(self) -> None:
        """Accept no more, let what is in flight finish for a few seconds, and end. Idempotent."""
        self._server.should_exit = True
        await asyncio.wait([self._task])
