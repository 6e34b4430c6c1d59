"""What runs in the actors of the fleet's tests, found there by name."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from routeplane.errors import DataError, ErrorKind
from routeplane.fleet.environment import EnvironmentConfig
from routeplane.fleet.teardown import Process, is_alive


class Child:
    """An environment with a server process below it, as real ones have."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._server: subprocess.Popen[bytes] | None = None
        self._tokenizer: Any = None

    def start(self) -> None:
        """Start the server; fail afterwards, or never return, where the configuration says so."""
        self._server = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        if self._config.settings.get("hang"):
            Path(self._config.settings["hang"]).write_text(f"{os.getpid()} {self._server.pid}", encoding="utf-8")
            threading.Event().wait()
        if self._config.settings.get("fail"):
            raise RuntimeError(f"no such tool; server {self._server.pid}")

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Keep it."""
        self._tokenizer = tokenizer

    def rollout(self, example: Any) -> Any:
        """Say what this actor is; or fail, or die, as asked."""
        if example == "data":
            raise DataError("expected rows, got none", kind=ErrorKind.ROUTES_MISSING)
        if example == "die":
            os._exit(1)
        return {
            "pid": os.getpid(),
            "server": 0 if self._server is None else self._server.pid,
            "venv": [os.environ.get("VIRTUAL_ENV"), os.environ.get("UV_PROJECT_ENVIRONMENT")],
            "secret": os.environ.get("FLEET_TESTS_SECRET"),
            "given": os.environ.get("FLEET_TESTS_GIVEN"),
            "tokenizer": self._tokenizer,
            "urls": self._config.endpoints.urls,
            "required": self._config.require_routes,
        }

    def is_healthy(self) -> bool:
        """While the server runs."""
        return self._server is not None and self._server.poll() is None

    def close(self) -> None:
        """Leave the server alone: the code that ends the actor must find it."""


def has_ended(process: Process) -> bool:
    """Sleep until the kernel says that a process ended (``kill`` returns before it did), half a minute at most."""
    if not is_alive(process):
        return True
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 30.0)[0])
    finally:
        os.close(handle)


async def pid_of(plane: Any) -> int:
    """The process of a plane's actor."""
    return int(await plane._actor.__ray_call__.remote(_pid))


def _pid(_: Any) -> int:
    return os.getpid()


def child(config: EnvironmentConfig) -> Child:
    """The factory."""
    return Child(config)


child.consumes = ("fail", "hang")  # type: ignore[attr-defined]


class Plain:
    """An environment without a tokenizer."""

    def start(self) -> None:
        """Nothing to start."""

    def rollout(self, example: Any) -> Any:
        """The example itself."""
        return example

    def is_healthy(self) -> bool:
        """Always."""
        return True

    def close(self) -> None:
        """Nothing to close."""


def plain(config: EnvironmentConfig) -> Plain:
    """The factory of one that takes no tokenizer and no keys."""
    return Plain()


plain.consumes = ()  # type: ignore[attr-defined]
