"""The environment server: its configuration, built in one place, and the worker that runs it.

``build_config`` splits what a user wrote into ours and the environment's, and copies; it reads nothing else and changes
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

from routeplane.errors import ErrorKind, FleetError, RouteplaneError, UsageError
from routeplane.fleet.endpoints import Endpoints
from routeplane.record.spec import RouteSpec

__all__ = [
    "MAX_ROLLOUTS",
    "OUR_KEYS",
    "Environment",
    "EnvironmentConfig",
    "EnvironmentWorker",
    "build_config",
    "carry_dtype",
]

#: Keys of a user's mapping that steer the actor rather than the environment (the names that NeMo RL's set-ups use).
OUR_KEYS = (
    "tokenizer_config",
    "pad_dynamic_image_shapes",
    "invalid_tool_call_patterns",
    "thinking_tags",
    "use_fastokens",
)
#: Rollouts that an environment answers at a time.
MAX_ROLLOUTS = 256
#: Largest expert id that an int8 holds; NeMo Gym carries wider ids as int16.
_INT8_MAX = 127


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """What an environment is started with. Every value is a copy.

    ``endpoints``: of the engine, in shard order; empty where there is none. ``require_routes``: whether a rollout
    without routes is an error, which follows from what the engine captures and from nothing else. ``routes_dtype``:
    what ids travel as. ``environment``: the environment's own mapping.
    """

    endpoints: Endpoints
    require_routes: bool
    routes_dtype: str
    tokenizer_config: Mapping[str, Any] | None = None
    pad_dynamic_image_shapes: bool = False
    invalid_tool_call_patterns: tuple[str, ...] = ()
    thinking_tags: tuple[str, ...] = ()
    use_fastokens: bool = False
    environment: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """What a factory makes of an EnvironmentConfig; every method may block."""

    def start(self) -> None:
        """Bring it up; heavy."""

    def rollout(self, example: Any) -> Any:
        """Answer one example; several may run at once."""

    def is_healthy(self) -> bool:
        """Whether it can answer now."""

    def close(self) -> None:
        """Take it down. Idempotent, and safe after a ``start`` that failed."""


def build_config(
    config: Mapping[str, Any],
    endpoints: Endpoints,
    *,
    captured: RouteSpec | None,
    known: Collection[str] | None = None,
) -> EnvironmentConfig:
    """Split ``config`` into OUR_KEYS and the environment's part, as deep copies; the caller's mapping is not changed.

    ``captured``: the spec that the engine was configured to capture, None where it captures none (a distillation
    set-up): then no routes are demanded. ``known``: the keys that the environment consumes, None to take all that are
    not ours. Raises UsageError (ARGUMENT), naming them, for keys that neither side consumes and for values of ours of
    another type; (PLAN) for routes that are captured and no endpoint to ask.
    """
    strangers = sorted(key for key in config if key not in OUR_KEYS and known is not None and key not in known)
    if strangers:
        raise UsageError(
            f"expected keys of ours ({', '.join(OUR_KEYS)}) or the environment's "
            f"({', '.join(sorted(known or ()))}), got {', '.join(strangers)}",
            kind=ErrorKind.ARGUMENT,
        )
    if captured is not None and not endpoints:
        raise UsageError("expected an endpoint of the engine whose routes are captured, got none", kind=ErrorKind.PLAN)
    tokenizer = config.get("tokenizer_config")
    return EnvironmentConfig(
        endpoints=endpoints,
        require_routes=captured is not None,
        routes_dtype=carry_dtype(captured),
        tokenizer_config=None
        if tokenizer is None
        else copy.deepcopy(dict(_typed(tokenizer, Mapping, "tokenizer_config"))),
        pad_dynamic_image_shapes=_typed(
            config.get("pad_dynamic_image_shapes", False), bool, "pad_dynamic_image_shapes"
        ),
        invalid_tool_call_patterns=_texts(config, "invalid_tool_call_patterns"),
        thinking_tags=_texts(config, "thinking_tags"),
        use_fastokens=_typed(config.get("use_fastokens", False), bool, "use_fastokens"),
        environment=copy.deepcopy({key: value for key, value in config.items() if key not in OUR_KEYS}),
    )


def carry_dtype(spec: RouteSpec | None) -> str:
    """What ids of a spec travel as in HTTP bodies of NeMo's form: int8 up to 128 experts, else int16.

    Resolved from the one spec that engine and environment share, never from a model's name a second time: two
    resolutions that disagree wrap ids silently. int16 where nothing is captured.
    """
    if spec is None:
        return "int16"
    return "int8" if max(spec.experts_per_layer) - 1 <= _INT8_MAX else "int16"


def _copied(value: Any, key: str) -> dict[str, Any]:
    return copy.deepcopy(dict(_typed(value, Mapping, key)))


def _texts(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    values = config.get(key) or ()
    if isinstance(values, str) or not all(isinstance(value, str) for value in values):
        raise UsageError(f"expected {key} as a list of texts, got {values!r}", kind=ErrorKind.ARGUMENT)
    return tuple(values)


def _typed(value: Any, kind: type, key: str) -> Any:
    if not isinstance(value, kind):
        raise UsageError(f"expected {key} as {kind.__name__}, got {value!r}", kind=ErrorKind.ARGUMENT)
    return value


class EnvironmentWorker:
    """Runs one environment. ``start`` once, ``set_tokenizer`` once, ``rollout`` as often as wanted, ``close``.

    ``factory``: dotted name ``package.module:function`` of ``make(config) -> Environment``, found in this process.
    Errors leave as ours and pickle: RouteplaneError as it is (data is at fault), anything else as FleetError
    (ENVIRONMENT) with its words.
    """

    def __init__(self, config: EnvironmentConfig, factory: str) -> None:
        self.config = config
        self._factory = factory
        self._environment: Environment | None = None
        self._tokenizer: Any = None
        # one for each call that the actor lets in at a time; they are made as they are needed
        self._threads = ThreadPoolExecutor(MAX_ROLLOUTS, thread_name_prefix="routeplane-environment")

    def start(self) -> None:
        """Make the environment and bring it up. Raises UsageError for a name that is none, FleetError."""
        module, _, attribute = self._factory.partition(":")
        if not module or not attribute:
            raise UsageError(
                f"expected a factory like package.module:function, got {self._factory!r}", kind=ErrorKind.ARGUMENT
            )
        self._environment = self._ours("making the environment", self._make, module, attribute)
        self._ours("starting the environment", self._up().start)

    def set_tokenizer(self, pickled: bytes) -> None:
        """Install a tokenizer for the life of this actor: megabytes that must not cross with every call.

        Raises FleetError (ENVIRONMENT) a second time.
        """
        if self._tokenizer is not None:
            raise FleetError("expected one tokenizer, got a second", kind=ErrorKind.ENVIRONMENT)
        self._tokenizer = pickle.loads(pickled)
        install = getattr(self._up(), "set_tokenizer", None)
        if install is not None:
            self._ours("installing the tokenizer", install, self._tokenizer)

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
        made: Environment = getattr(importlib.import_module(module), attribute)(self.config)
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
