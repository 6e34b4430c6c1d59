"""Start-up: endpoints before servers, plans of tasks, Ray actors, and a teardown that leaves nothing behind.

The names below load on first use: what makes actors needs Ray, what serves needs uvicorn.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routeplane.fleet.actors import (
        ActorHandle,
        ActorOptions,
        EngineHandle,
        EnvironmentHandle,
        build_environment_actor,
        start_actor,
        start_engine,
    )
    from routeplane.fleet.endpoints import Endpoint, Endpoints, EndpointState, ServerState, reserve
    from routeplane.fleet.engine import EngineConfig
    from routeplane.fleet.environment import ALL_KEYS, EnvironmentConfig, build_config
    from routeplane.fleet.startup import (
        Fleet,
        Plan,
        Setup,
        Task,
        TaskContext,
        Timeline,
        check_setup,
        start,
        start_async,
    )

__all__ = [
    "ALL_KEYS",
    "ActorHandle",
    "ActorOptions",
    "Endpoint",
    "EndpointState",
    "Endpoints",
    "EngineConfig",
    "EngineHandle",
    "EnvironmentConfig",
    "EnvironmentHandle",
    "Fleet",
    "Plan",
    "ServerState",
    "Setup",
    "Task",
    "TaskContext",
    "Timeline",
    "build_config",
    "build_environment_actor",
    "check_setup",
    "reserve",
    "start",
    "start_actor",
    "start_async",
    "start_engine",
]

_MODULES = {
    "actors": (
        "ActorHandle",
        "ActorOptions",
        "EngineHandle",
        "EnvironmentHandle",
        "build_environment_actor",
        "start_actor",
        "start_engine",
    ),
    "endpoints": ("Endpoint", "EndpointState", "Endpoints", "ServerState", "reserve"),
    "engine": ("EngineConfig",),
    "environment": ("ALL_KEYS", "EnvironmentConfig", "build_config"),
    "startup": ("Fleet", "Plan", "Setup", "Task", "TaskContext", "Timeline", "check_setup", "start", "start_async"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"routeplane.fleet.{_HOMES[name]}"), name)
