"""One check of a whole set-up before anything loads: what engine, environment, carrier and trainer do with routes.

Pure: it reads values and starts nothing. Each part alone would find its own mistake after minutes of loading, or never:
an engine that captures for a trainer that does not replay is slow and right.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from routeplane.errors import ErrorKind, SpecError, UsageError
from routeplane.record.spec import RouteSpec

if TYPE_CHECKING:
    from routeplane.fleet.engine import EngineConfig

__all__ = ["Setup", "check_setup"]

#: vLLM's own switch, which the engine's side sets from the spec.
_CAPTURE_OPTION = "enable_return_routed_experts"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the parts of a plan are configured to do with routes; a part that the plan does not have is left out.

    ``engines``: the shards. ``require_routes``: whether the environment demands routes (``EnvironmentConfig``); None
    without one. ``carried``: the geometry of the carrier between rollout and trainer. ``replay``: the geometry that the
    trainer attaches, None where it does not replay; ``trains``: False for a plan without a trainer. ``models``: the
    model's configuration (the mapping of ``config.json``) as each part has it, by the part's name.
    """

    engines: tuple[EngineConfig, ...]
    require_routes: bool | None = None
    carried: RouteSpec | None = None
    replay: RouteSpec | None = None
    trains: bool = True
    models: Mapping[str, Mapping[str, Any]] | None = None


def check_setup(setup: Setup) -> None:
    """Raise where the parts of a set-up contradict each other, with the key to change.

    Raises UsageError (PLAN) for capture that no part uses, or that a part needs and no engine does; SpecError for parts
    of another geometry, one that the model's configuration does not have included.

    >>> from routeplane import RouteSpec
    >>> from routeplane.fleet import EngineConfig
    >>> spec = RouteSpec(num_experts=8, top_k=2, layer_ids=(0, 1))
    >>> engine = EngineConfig(model="/models/policy", spec=spec)
    >>> check_setup(Setup(engines=(engine,), require_routes=True, replay=spec))
    >>> check_setup(Setup(engines=(engine,), require_routes=True))
    Traceback (most recent call last):
    routeplane.errors.UsageError: expected a trainer that replays what is captured (Setup.replay), ...
    """
    captured = {engine.spec is not None for engine in setup.engines}
    if captured == {True, False}:
        raise _inconsistent("a spec in every engine's EngineConfig, or in none", "some")
    captures = captured == {True}
    for engine in setup.engines:
        switch = engine.options.get(_CAPTURE_OPTION)
        if switch is not None and bool(switch) != captures:
            raise _inconsistent(
                f"EngineConfig.options without {_CAPTURE_OPTION}, which follows from EngineConfig.spec", f"{switch!r}"
            )
    _check_uses(setup, captures)
    _check_geometry(setup)


def _inconsistent(expected: str, got: str) -> UsageError:
    return UsageError(f"expected {expected}, got {got}", kind=ErrorKind.PLAN)


def _check_uses(setup: Setup, captures: bool) -> None:
    if setup.require_routes is not None and setup.require_routes != captures:
        if captures:
            raise _inconsistent(
                "an environment that requires what the engine captures (build_environment_actor(captured=spec))",
                "captured=None",
            )
        raise _inconsistent("engines that capture what the environment requires (EngineConfig.spec)", "spec=None")
    if setup.trains and (setup.replay is not None) != captures:
        if captures:
            raise _inconsistent(
                "a trainer that replays what is captured (Setup.replay), or EngineConfig.spec=None", "no replay"
            )
        raise _inconsistent("engines that capture what the trainer replays (EngineConfig.spec)", "spec=None")
    if setup.carried is not None and not captures:
        raise _inconsistent("engines that capture what is carried (EngineConfig.spec)", "spec=None")


def _check_geometry(setup: Setup) -> None:
    specs = {f"engine {shard}": engine.spec for shard, engine in enumerate(setup.engines)}
    specs |= {"carrier": setup.carried, "trainer": setup.replay}
    there = [(part, spec) for part, spec in specs.items() if spec is not None]
    for (first, left), (second, right) in itertools.pairwise(there):
        # a pipeline stage replays some of the layers
        own = left.select(right.layer_ids) if set(right.layer_ids) < set(left.layer_ids) else left
        own.require_same_geometry(right, where=f"{first} and {second}")
    for part, config in (setup.models or {}).items():
        model = RouteSpec.from_hf_config(config)
        for name, spec in there:
            lacking = sorted(set(spec.layer_ids) - set(model.layer_ids))
            if lacking:
                raise SpecError(
                    f"expected layers that the model of {part} routes in, got {lacking} @ {name}",
                    kind=ErrorKind.SPEC_MISMATCH,
                )
            model.select(spec.layer_ids).require_same_geometry(spec, where=f"model of {part} and {name}")
