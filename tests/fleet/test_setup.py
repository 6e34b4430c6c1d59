"""What engine, environment, carrier and trainer are configured to do with routes agrees before anything loads."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from routeplane import RouteSpec
from routeplane.errors import ErrorKind, SpecError, UsageError
from routeplane.fleet import EngineConfig, Plan, Setup, Task, TaskContext, check_setup, start

SPEC = RouteSpec(num_experts=8, top_k=2, layer_ids=(0, 1, 2, 3))
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def engine(**changes: Any) -> EngineConfig:
    """A shard that captures."""
    return EngineConfig(**{"model": "/models/policy", "spec": SPEC, **changes})


def setup(captures: bool, requires: bool, replays: bool) -> Setup:
    """One cell of the matrix."""
    return Setup(
        engines=(engine(spec=SPEC if captures else None),),
        require_routes=requires,
        replay=SPEC if replays else None,
    )


#: The key that each inconsistent cell's error names: (captures, requires, replays).
KEYS = {
    (True, True, False): "Setup.replay",
    (True, False, True): "captured=spec",
    (True, False, False): "captured=spec",
    (False, True, True): "EngineConfig.spec",
    (False, True, False): "EngineConfig.spec",
    (False, False, True): "EngineConfig.spec",
}


@pytest.mark.parametrize("cell", list(itertools.product([True, False], repeat=3)), ids=str)
def test_each_inconsistent_cell_is_refused_with_the_key_to_change(cell: tuple[bool, bool, bool]) -> None:
    """All on and all off are the two that work."""
    if len(set(cell)) == 1:
        check_setup(setup(*cell))
        return
    with pytest.raises(UsageError) as caught:
        check_setup(setup(*cell))
    assert ErrorKind.PLAN == caught.value.kind
    assert KEYS[cell] in str(caught.value)


GOOD = setup(True, True, True)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (replace(GOOD, engines=(engine(), engine(spec=None))), "every engine"),
        (replace(GOOD, engines=(engine(options={"enable_return_routed_experts": False}),)), "EngineConfig.options"),
        (replace(setup(False, False, False), carried=SPEC), "EngineConfig.spec"),
    ],
    ids=["engines differ", "capture switched off by an option", "a carrier of nothing"],
)
def test_other_contradictions_are_refused(changed: Setup, expected: str) -> None:
    """With the key to change."""
    with pytest.raises(UsageError) as caught:
        check_setup(changed)
    assert ErrorKind.PLAN == caught.value.kind
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "changed",
    [
        replace(GOOD, replay=RouteSpec(num_experts=8, top_k=3, layer_ids=SPEC.layer_ids)),
        replace(GOOD, carried=RouteSpec(num_experts=9, top_k=2, layer_ids=SPEC.layer_ids)),
        replace(GOOD, engines=(engine(), engine(spec=RouteSpec(num_experts=8, top_k=2, layer_ids=(0, 1))))),
        replace(GOOD, models={"trainer": {**CONFIG, "num_experts": 16}}),
        replace(GOOD, models={"engine": {**CONFIG, "num_hidden_layers": 3}}),
    ],
    ids=["trainer", "carrier", "engines", "the trainer's model", "fewer layers in the engine's model"],
)
def test_another_geometry_is_refused(changed: Setup) -> None:
    """By configuration, before any weight is read."""
    if len(changed.engines) == 2:
        # the later part has some of the layers, as a pipeline stage has; the trainer then has more
        with pytest.raises(SpecError):
            check_setup(changed)
        return
    with pytest.raises(SpecError) as caught:
        check_setup(changed)
    assert ErrorKind.SPEC_MISMATCH == caught.value.kind


def test_a_pipeline_stage_replays_some_of_the_layers() -> None:
    """And the models' own geometry is the spec's."""
    stage = SPEC.select((2, 3))
    check_setup(replace(GOOD, carried=SPEC, replay=stage, models={"engine": CONFIG, "trainer": CONFIG}))


def test_a_plan_checks_its_setup_before_any_task_runs() -> None:
    """Nothing starts."""
    ran = []

    async def load(_: TaskContext) -> None:
        ran.append("loaded")

    with pytest.raises(UsageError, match=r"Setup\.replay"):
        start(Plan(tasks=(Task(name="engine", run=load),), setup=setup(True, True, False)))
    assert [] == ran
    with start(Plan(tasks=(Task(name="engine", run=load),), setup=GOOD)):
        assert ["loaded"] == ran
