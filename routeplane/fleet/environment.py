"""The environment server: its configuration, built in one place, and the worker that runs it.

``build_config`` copies what a user wrote and adds what follows from the engine; it reads nothing else and changes
nothing. ``EnvironmentWorker`` runs in an actor's process. Any environment fits that is made of a configuration and
answers rollouts (``Environment``). Knows no Ray: ``actors`` makes an actor of it.
"""

from __future__ import annotations

import copy
import importlib
import pickle
import traceback
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from routeplane.errors import ErrorKind, FleetError, RouteplaneError, UsageError, refused
from routeplane.fleet.endpoints import Endpoints
from routeplane.record.spec import RouteSpec

__all__ = ["ALL_KEYS", "MAX_ROLLOUTS", "Environment", "EnvironmentConfig", "EnvironmentWorker", "build_config"]

#: What a factory declares that passes every key on to a part which checks them itself.
ALL_KEYS = "all keys"
#: Rollouts that an environment answers at a time.
MAX_ROLLOUTS = 256


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """What an environment is started with. Every value is a copy.

    ``endpoints``: of the engine, in shard order; empty where there is none. ``require_routes``: whether a rollout
    without routes is an error, which follows from what the engine captures and from nothing else. ``settings``: the
    environment's own mapping, of which every key is one that its factory declared. ``build_config`` makes it.

    >>> EnvironmentConfig(endpoints=Endpoints(), require_routes=False, settings={"max_steps": 8}).settings["max_steps"]
    8
    """

    endpoints: Endpoints
    require_routes: bool
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)


class Environment(Protocol):
    """What a factory makes of an EnvironmentConfig; every method may block."""

    def start(self) -> None:
        """Bring it up; heavy."""

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Keep a tokenizer; only called where one is given, and then required."""

    def rollout(self, example: Any) -> Any:
        """Answer one example; several may run at once."""

    def is_healthy(self) -> bool:
        """Whether it can answer now."""

    def close(self) -> None:
        """Take it down. Idempotent, and safe after a ``start`` that failed."""


def build_config(settings: Mapping[str, Any], endpoints: Endpoints, *, captured: RouteSpec | None) -> EnvironmentConfig:
    """Put together what an environment is started with. A pure function; the caller's mapping is copied deeply.

    ``captured``: the spec that the engine was configured to capture, None where it captures none (a distillation
    set-up): then no routes are demanded. Raises UsageError: PLAN for routes that are captured and no endpoint to ask,
    ARGUMENT for keys that are not strings. That the environment consumes every key is checked where its factory is.

    Example::

        >>> from routeplane import RouteSpec
        >>> spec = RouteSpec(num_experts=64, top_k=2, layer_ids=(0, 1))
        >>> config = build_config({"max_steps": 8}, Endpoints.of(["http://127.0.0.1:21000/v1"]), captured=spec)
        >>> config.require_routes, config.settings
        (True, {'max_steps': 8})
    """
    if captured is not None and not endpoints:
        raise UsageError("expected an endpoint of the engine whose routes are captured, got none", kind=ErrorKind.PLAN)
    strange = [key for key in settings if not isinstance(key, str)]
    if strange:
        raise refused("settings with strings as keys", f"{strange}")
    return EnvironmentConfig(
        endpoints=endpoints, require_routes=captured is not None, settings=copy.deepcopy(dict(settings))
    )


class EnvironmentWorker:
    """Runs one environment. ``start`` once, ``rollout`` as often as wanted, ``close``.

    ``factory``: dotted name ``package.module:function`` of ``make(config) -> Environment``, found in this process. The
    function declares what it consumes, ``make.consumes = {"max_steps", ...}`` or ALL_KEYS; a key that it does not
    consume is refused before anything is made. Errors leave as ours and pickle: RouteplaneError as it is (data is at
    fault), anything else as FleetError (ENVIRONMENT) with its words.
    """

    def __init__(self, config: EnvironmentConfig, factory: str) -> None:
        self.config = config
        self._factory = factory
        self._environment: Environment | None = None
        # one for each call that the actor lets in at a time; they are made as they are needed
        self._threads = ThreadPoolExecutor(MAX_ROLLOUTS, thread_name_prefix="routeplane-environment")

    def start(self, tokenizer: bytes | None) -> None:
        """Make the environment, bring it up, and install the tokenizer (pickled) for the life of this actor, once:
        megabytes that must not cross with every call.

        Raises UsageError for a factory's name that is none, and before anything heavy for an environment that does not
        take the tokenizer; FleetError.
        """
        module, _, attribute = self._factory.partition(":")
        if not module or not attribute:
            raise refused("a factory like package.module:function", repr(self._factory))
        self._environment = self._ours("making the environment", self._make, module, attribute)
        if tokenizer is not None and not hasattr(self._environment, "set_tokenizer"):
            raise refused("an environment with set_tokenizer, since a tokenizer is given", self._factory)
        self._ours("starting the environment", self._up().start)
        if tokenizer is not None:
            self._ours("installing the tokenizer", self._up().set_tokenizer, pickle.loads(tokenizer))

    def rollout(self, example: Any) -> Any:
        """Answer one example."""
        return self._ours("a rollout", self._up().rollout, example)

    def is_healthy(self) -> bool:
        """Whether it is up and can answer."""
        return self._environment is not None and bool(self._ours("a health check", self._environment.is_healthy))

    def close(self) -> None:
        """Take the environment down. Idempotent."""
        environment, self._environment = self._environment, None
        if environment is not None:
            self._ours("closing the environment", environment.close)
        self._threads.shutdown(wait=False)

    def _make(self, module: str, attribute: str) -> Environment:
        factory = getattr(importlib.import_module(module), attribute)
        _check_keys(self.config.settings, getattr(factory, "consumes", None), self._factory)
        made: Environment = factory(self.config)
        return made

    def _up(self) -> Environment:
        if self._environment is None:
            raise FleetError("expected an environment that was started, got none", kind=ErrorKind.ENVIRONMENT)
        return self._environment

    def _ours(self, what: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call foreign code; what it raises leaves as an error of ours, whose class every process can load.

        A future carries whatever was raised, so that nothing needs to be named that only the environment knows.
        """
        done: Future[Any] = self._threads.submit(call, *arguments)
        error = done.exception()
        if error is None:
            return done.result()
        if isinstance(error, RouteplaneError):
            raise error
        words = "".join(traceback.format_exception(error)).strip()
        raise FleetError(
            f"expected {what} to succeed, got {type(error).__name__}: {error}\n{words}", kind=ErrorKind.ENVIRONMENT
        )


def _check_keys(settings: Mapping[str, Any], consumed: Collection[str] | str | None, factory: str) -> None:
    """Raise UsageError (ARGUMENT) for keys that the factory did not declare, and for a factory that declares none."""
    if consumed == ALL_KEYS:
        return
    if consumed is None or isinstance(consumed, str):
        raise refused(
            f"{factory} to declare the keys that it consumes (an attribute `consumes` of the function)",
            "none" if consumed is None else repr(consumed),
        )
    unknown = sorted(set(settings) - set(consumed))
    if unknown:
        raise refused(
            f"keys that {factory} consumes ({', '.join(sorted(consumed)) or 'none'})", f"{', '.join(unknown)}"
        )
