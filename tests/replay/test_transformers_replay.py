"""Replay on tiny Transformers models of every known family: what gates then do, what is refused, what is left behind.

Axes: N token rows, L captured layers, K top-k slots.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from routeplane.errors import DataError, ErrorKind, ReplayError, UsageError
from routeplane.replay import transformers as gates
from routeplane.testing.contracts.replay_contract import feature
from tests.replay.plain_batch import random_routes
from tests.replay.tiny_models import (
    FAMILIES,
    MAIN_FAMILIES,
    NUM_ROWS,
    Family,
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


@feature("bfloat16")
@each_family
def test_own_routes_replay_bit_for_bit_in_bfloat16(family: Family) -> None:
    """Forcing what the gates would choose anyway changes not one bit of the logits, and counts no flip."""
    model = family.build(dtype=torch.bfloat16)
    expected = logits_of(model)
    batch = own_routes(model, family.spec)
    with gates.attach(model, family.spec) as handle:
        with handle.replaying(batch):
            found = logits_of(model)
    assert torch.equal(expected, found)
    assert [(NUM_ROWS, 0, 0, 1)] * len(family.layer_ids) == [
        (gate.forced_rows, gate.live_rows, gate.flipped_rows, gate.consumed) for gate in handle.report().gates
    ]


@feature("experts kernels")
@each_family
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
    # the probe of the first attach fires the gates before the replayed forward does
    assert all(batch.layer(layer).tolist() == firings[-1].ids_NK.tolist() for layer, firings in seen.items())
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


@torch.no_grad()
def test_a_report_since_another_counts_one_step() -> None:
    """Reports of steps add up to the whole; a report of other gates, or of a later time, is refused."""
    model = QWEN3.build()
    with gates.attach(model, QWEN3.spec) as handle:
        steps = [handle.report()]
        whole = steps[0]
        for seed in (5, 6):
            before = handle.report()
            with handle.replaying(random_routes(QWEN3.spec, NUM_ROWS, seed=seed, missing=0.3)):
                logits_of(model)
            steps.append(handle.report(since=before))
            whole = whole.merge(steps[-1])
        assert handle.report() == whole
        assert [0, 1, 1] == [step.microbatches for step in steps]
        for wrong in (replace(whole, gates=whole.gates[1:]), whole.merge(whole)):
            with pytest.raises(UsageError, match="expected an earlier report of this handle"):
                handle.report(since=wrong)


# ---- gradients ------------------------------------------------------------------------------------------------------


# ---- what the batch is ----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("ids", [[0, 0], [3, -1], [0, 99]], ids=["zeros", "partial", "foreign"])
def test_illegal_rows_of_a_callers_own_batch_are_refused(ids: list[int]) -> None:
    """Filler of another stack, half a row and a foreign expert are data errors that name row and layer."""
    model, layer = QWEN3.build(), QWEN3.spec.layer_ids[-1]
    batch = random_routes(QWEN3.spec, NUM_ROWS, seed=5)
    batch.layer(layer)[7, :2] = torch.tensor(ids, dtype=torch.int16)
    with gates.attach(model, QWEN3.spec) as handle:
        with pytest.raises(DataError, match=f"token 7, layer {layer}"), handle.replaying(batch):
            raise AssertionError("replayed")
