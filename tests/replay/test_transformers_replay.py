"""Replay on tiny Transformers models of every known family: what gates then do, what is refused, what is left behind.

Axes: N token rows, L captured layers, K top-k slots.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from routeplane.errors import DataError, ErrorKind, ReplayError, SpecError
from routeplane.replay import transformers as gates
from tests.replay.plain_batch import PlainBatch, random_routes
from tests.replay.tiny_models import (
    FAMILIES,
    MAIN_FAMILIES,
    NUM_ROWS,
    Family,
    live_choice,
    logits_of,
    own_routes,
    recorded,
    replayed,
)

each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
main_families = pytest.mark.parametrize("family", MAIN_FAMILIES, ids=lambda family: family.name)
QWEN3 = MAIN_FAMILIES[0]
GPT_OSS = MAIN_FAMILIES[4]


# ---- the gates follow -----------------------------------------------------------------------------------------------


@each_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_own_routes_replay_bit_for_bit(family: Family, dtype: torch.dtype) -> None:
    """Forcing what the gates would choose anyway changes not one bit of the logits, and counts no flip."""
    model = family.build(dtype=dtype)
    expected = logits_of(model)
    batch = own_routes(model, family.spec)
    with gates.attach(model, family.spec) as handle:
        with handle.replaying(batch):
            found = logits_of(model)
    assert torch.equal(expected, found)
    assert [(NUM_ROWS, 0, 0, 1)] * len(family.layer_ids) == [
        (gate.forced_rows, gate.live_rows, gate.flipped_rows, gate.consumed) for gate in handle.report().gates
    ]


@each_family
def test_forced_routes_are_used_with_weights_from_live_scores(family: Family) -> None:
    """Each router returns the recorded ids, and weights that the family's rule gives them from its own logits."""
    model = family.build()
    batch = random_routes(family.spec, NUM_ROWS, seed=5)
    with recorded(model) as seen:
        found = replayed(model, family.spec, batch)
    assert list(family.layer_ids) == sorted(seen)
    for layer, (firing,) in seen.items():
        assert batch.layer(layer).tolist() == firing.ids_NK.tolist()
        weights_NK = family.weights(firing.logits_NE, batch.layer(layer).long())
        torch.testing.assert_close(firing.weights_NK, weights_NK, rtol=1e-5, atol=1e-6)
    assert (found - logits_of(model)).abs().max() > 0.05


@each_family
def test_all_missing_is_the_live_model(family: Family) -> None:
    """A batch without a single row leaves the logits bit for bit as they are."""
    model = family.build()
    batch = random_routes(family.spec, NUM_ROWS, seed=5, missing=1.1)
    assert torch.equal(logits_of(model), replayed(model, family.spec, batch))


@main_families
def test_missing_rows_are_live_among_forced_ones(family: Family) -> None:
    """Row by row: recorded ids where there are some, else what the same router chooses from the same logits."""
    model = family.build()
    batch = random_routes(family.spec, NUM_ROWS, seed=5, missing=0.5)
    with recorded(model) as seen:
        replayed(model, family.spec, batch)
    routers = {gate.layer_id: router for gate, router in gates.find_gates(model)}
    for layer, (firing,) in seen.items():
        missing_N = batch.layer(layer)[:, 0] == -1
        assert 0 < missing_N.sum() < NUM_ROWS
        assert torch.equal(batch.layer(layer)[~missing_N].long(), firing.ids_NK[~missing_N])
        live_NK = live_choice(routers[layer], firing.logits_NE)
        assert live_NK[missing_N].sort().values.tolist() == firing.ids_NK[missing_N].sort().values.tolist()


@main_families
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_every_experts_implementation_follows(family: Family, experts: str) -> None:
    """The routes decide the same output whichever kernel runs the experts."""
    batch = random_routes(family.spec, NUM_ROWS, seed=5)
    model = family.build()
    model.set_experts_implementation(experts)
    assert experts == model.config._experts_implementation
    reference = family.build()
    reference.set_experts_implementation("eager")
    with recorded(model) as seen:
        found = replayed(model, family.spec, batch)
    assert all(batch.layer(layer).tolist() == firing.ids_NK.tolist() for layer, (firing,) in seen.items())
    torch.testing.assert_close(found, replayed(reference, family.spec, batch), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_compiled_blocks_follow() -> None:
    """Two batches in turn through compiled MoE blocks: logits and counts equal those of the plain model."""
    model, compiled = QWEN3.build(), QWEN3.build()
    for layer in QWEN3.layer_ids:
        compiled.model.layers[layer].mlp.compile(backend="eager")
    with gates.attach(model, QWEN3.spec) as plain, gates.attach(compiled, QWEN3.spec) as traced:
        for seed in (5, 6):
            batch = random_routes(QWEN3.spec, NUM_ROWS, seed=seed, missing=0.3)
            with plain.replaying(batch), traced.replaying(batch):
                assert torch.equal(logits_of(model), logits_of(compiled))
    assert plain.report() == traced.report()
    assert min(gate.flipped_rows for gate in plain.report().gates) > 0


# ---- gradients ------------------------------------------------------------------------------------------------------


@each_family
def test_gradients_reach_every_router(family: Family) -> None:
    """With all rows forced, each router's weight still gets a gradient through its routing weights."""
    model = family.build()
    with gates.attach(model, family.spec) as handle, handle.replaying(random_routes(family.spec, NUM_ROWS, seed=5)):
        torch.autograd.backward(logits_of(model).square().mean())
    for gate, router in gates.find_gates(model):
        gradient = router.get_parameter("weight").grad
        assert gradient is not None, str(gate)
        assert gradient.abs().max() > 1e-6, str(gate)


def _rms_norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    return nn.functional.rms_norm(hidden, hidden.shape[-1:], module.weight, module.variance_epsilon)


def test_router_gradients_match_finite_differences() -> None:
    """In double precision, along a random direction of each router's weight, with all rows forced."""
    model = GPT_OSS.build(dtype=torch.float64)  # the one family whose router keeps double precision
    model.set_experts_implementation("eager")  # ... as do these experts
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:  # these compute in single precision, whose rounding is a step's size
            module.forward = partial(_rms_norm, module)
    batch = random_routes(GPT_OSS.spec, NUM_ROWS, seed=5)

    def loss() -> torch.Tensor:
        with handle.replaying(batch):
            return logits_of(model).square().mean()

    with gates.attach(model, GPT_OSS.spec) as handle:
        torch.autograd.backward(loss())
        for _, router in gates.find_gates(model):
            weight = router.get_parameter("weight")
            direction = torch.randn(weight.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
            values = []
            with torch.no_grad():
                for step in (1e-5, -2e-5):
                    weight.add_(step * direction)
                    values.append(loss())
                weight.add_(1e-5 * direction)
            expected = (values[0] - values[1]) / 2e-5
            assert weight.grad is not None
            torch.testing.assert_close((weight.grad * direction).sum(), expected, rtol=1e-6, atol=1e-9)
            assert expected.abs() > 1e-4


# ---- what the batch is ----------------------------------------------------------------------------------------------


def test_a_batch_of_another_length_is_refused() -> None:
    """Fewer or more rows than tokens never reach a selection; the gate is named."""
    model = QWEN3.build()
    for count in (NUM_ROWS // 2, NUM_ROWS + 1):
        with pytest.raises(ReplayError, match=rf"expected {count} token rows.*got 12 @ .*layers\.1\.") as caught:
            replayed(model, QWEN3.spec, random_routes(QWEN3.spec, count, seed=5))
        assert ErrorKind.ROW_COUNT == caught.value.kind


def test_a_batch_of_another_geometry_is_refused() -> None:
    """A batch that was collated for another model is refused on entering."""
    model = QWEN3.build()
    other = replace(QWEN3.spec, num_experts=9)
    with pytest.raises(SpecError, match="num_experts: 8 against 9") as caught:
        replayed(model, QWEN3.spec, random_routes(other, NUM_ROWS, seed=5))
    assert ErrorKind.SPEC_MISMATCH == caught.value.kind


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda routes: routes.to(torch.int32), ErrorKind.DTYPE),
        (lambda routes: routes[..., :2], ErrorKind.SHAPE),
    ],
)
def test_rows_of_another_shape_or_type_are_refused(
    change: Callable[[torch.Tensor], torch.Tensor], kind: ErrorKind
) -> None:
    """int16 ``[N, K]`` or nothing."""
    model = QWEN3.build()
    batch = random_routes(QWEN3.spec, NUM_ROWS, seed=5)
    with pytest.raises(ReplayError) as caught:
        replayed(model, QWEN3.spec, PlainBatch(spec=QWEN3.spec, routes_NLK=change(batch.routes_NLK)))
    assert kind == caught.value.kind


def test_unexplained_missing_rows_are_live_or_raise_by_choice() -> None:
    """``on_missing="raise"`` refuses before any forward; the default leaves them to the gate."""
    model = QWEN3.build()
    batch = replace(random_routes(QWEN3.spec, NUM_ROWS, seed=5, missing=0.3), unexplained_missing=3)
    replayed(model, QWEN3.spec, batch)
    with gates.attach(model, QWEN3.spec, on_missing="raise") as handle:
        with pytest.raises(DataError, match="got 3 without one") as caught, handle.replaying(batch):
            pytest.fail("the body must not run")
        with handle.replaying(replace(batch, unexplained_missing=0)):
            logits_of(model)
    assert ErrorKind.ROUTES_MISSING == caught.value.kind
    assert 1 == handle.report().microbatches


# ---- consumption ----------------------------------------------------------------------------------------------------


def test_every_gate_must_consume_its_rows() -> None:
    """A layer that is skipped is named on leaving, and the microbatch is not counted."""
    model = QWEN3.build()
    with gates.attach(model, QWEN3.spec) as handle:
        model.model.layers[2].mlp.forward = lambda hidden: hidden
        message = r"1 of 2 gates.*got 0 of model\.layers\.2\.mlp\.gate"
        with pytest.raises(ReplayError, match=message) as caught:
            with handle.replaying(random_routes(QWEN3.spec, NUM_ROWS, seed=5)):
                logits_of(model)
    assert ErrorKind.GATE_NOT_CONSUMED == caught.value.kind
    assert [2] == [problem.layer for problem in caught.value.problems]
    assert 0 == handle.report().microbatches


def test_replaying_without_a_forward_is_refused() -> None:
    """A forward that ran elsewhere (a compiled or copied model) leaves every gate unconsumed."""
    model = QWEN3.build()
    with gates.attach(model, QWEN3.spec) as handle:
        copied = copy.deepcopy(model)
        with pytest.raises(ReplayError, match="2 of 2 gates") as caught:
            with handle.replaying(random_routes(QWEN3.spec, NUM_ROWS, seed=5)):
                logits_of(copied)
    assert ErrorKind.GATE_NOT_CONSUMED == caught.value.kind


def test_gates_must_fire_equally_often() -> None:
    """One gate called once more than the others is named; a whole second forward is fine."""
    model = QWEN3.build()
    with gates.attach(model, QWEN3.spec) as handle:
        batch = random_routes(QWEN3.spec, NUM_ROWS, seed=5)
        with handle.replaying(batch):
            first, second = logits_of(model), logits_of(model)
        assert torch.equal(first, second)
        replaying = handle.replaying(batch)
        replaying.__enter__()
        logits_of(model)
        model.model.layers[2].mlp.gate(torch.zeros(NUM_ROWS, 32))
        with pytest.raises(ReplayError, match=r"expected 2 forward calls, got 1 of model\.layers\.1") as caught:
            replaying.__exit__(None, None, None)
    assert ErrorKind.GATE_FIRED == caught.value.kind


def test_an_error_in_the_body_is_the_one_that_shows() -> None:
    """Leaving by an exception checks nothing, and the handle serves the next microbatch."""
    model = QWEN3.build()
    batch = random_routes(QWEN3.spec, NUM_ROWS, seed=5)
    with gates.attach(model, QWEN3.spec) as handle:
        with pytest.raises(ZeroDivisionError), handle.replaying(batch):
            raise ZeroDivisionError
        with handle.replaying(batch):
            logits_of(model)
    assert 1 == handle.report().microbatches
