"""An ASGI application served on a reserved endpoint, in the caller's event loop; the one importer of uvicorn.

Owns start, drain and end of the server. The endpoint stays the caller's: its port outlives the server.
"""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn

from routeplane.errors import ErrorKind, FleetError
from routeplane.fleet.endpoints import Endpoint

__all__ = ["ServedApp", "serve_app"]


async def serve_app(app: Any, endpoint: Endpoint, *, timeout: float = 60.0) -> ServedApp:
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
