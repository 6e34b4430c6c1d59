"""Replay under torch.compile: whole graphs, one for all batches of a size, and the answers of the plain model.

Axes: N token rows, L captured layers, K top-k slots.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from routeplane.errors import ErrorKind, ReplayError, UsageError
from routeplane.replay import transformers as gates
from routeplane.replay.handle import ReplayHandle
from routeplane.testing.contracts.replay_contract import feature
from tests.replay.plain_batch import PlainBatch, random_routes
from tests.replay.tiny_models import BY_NAME, MAIN_FAMILIES, Family, checkpoint_layers, token_ids

QWEN3 = BY_NAME["qwen3_moe"]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Any:
    """Graphs of another test are no graphs of this one."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one training step computed."""

    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]


def step(model: nn.Module, forward: Any, *, inputs: torch.Tensor) -> Step:
    """Forward and backward."""
    logits = forward(input_ids=inputs).logits
    torch.autograd.backward(logits.square().mean())
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return Step(logits=logits.detach(), gradients=gradients)


def assert_equal(expected: Step, found: Step) -> None:
    """Up to the order of sums, which a compiler may choose."""
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
    assert expected.gradients.keys() == found.gradients.keys()
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-4, atol=1e-6)


def batch_of(family: Family, *, seed: int, num_rows: int = 12) -> PlainBatch:
    """Rows far from what gates choose, some of them MISSING."""
    return random_routes(family.spec, num_rows, seed=seed, missing=0.3)


def check_steps(family: Family, *, experts: str, backend: str) -> CompileCounterWithBackend:
    """Three batches through a model and its compiled twin, then a live step of both."""
    model, twin = family.build(), family.build()
    for each in (model, twin):
        each.set_experts_implementation(experts)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(twin, backend=counter, fullgraph=True)
    inputs = token_ids(1)
    with gates.attach(model, family.spec) as plain, gates.attach(twin, family.spec, mode="compiled") as traced:
        for seed in (5, 6, 7):
            batch = batch_of(family, seed=seed)
            with plain.replaying(batch), traced.replaying(batch):
                assert_equal(step(model, model, inputs=inputs), step(twin, compiled, inputs=inputs))
        assert 1 == counter.frame_count
        assert plain.report() == traced.report()
        assert min(gate.flipped_rows for gate in traced.report().gates) > 0
        assert_equal(step(model, model, inputs=inputs), step(twin, compiled, inputs=inputs))
    return counter


def test_one_whole_graph_serves_all_batches() -> None:
    """Three batches are one graph, counts included; the live model is a second one, and no third comes."""
    counter = check_steps(QWEN3, experts="grouped_mm", backend="eager")
    assert 2 == counter.frame_count


@feature("compile")
@pytest.mark.slow
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", MAIN_FAMILIES, ids=lambda family: family.name)
def test_every_family_compiles_whole(family: Family, experts: str) -> None:
    """With a backward graph of its own, for each implementation of experts that has no data-dependent shapes."""
    check_steps(family, experts=experts, backend="aot_eager")


@pytest.mark.slow
def test_batches_of_other_sizes_share_a_graph() -> None:
    """The second size makes a graph with a free number of rows, and every further size uses it."""
    model = QWEN3.build()
    counter = CompileCounterWithBackend("eager")
    compiled: Any = torch.compile(model, backend=counter, fullgraph=True)
    with gates.attach(model, QWEN3.spec, mode="compiled") as handle, torch.no_grad():
        for length in (6, 5, 7, 4):
            with handle.replaying(batch_of(QWEN3, seed=length, num_rows=2 * length)):
                compiled(input_ids=torch.randint(3, 64, (2, length)))
    assert 2 == counter.frame_count
    assert [4, 4] == [gate.consumed for gate in handle.report().gates]
    assert [44, 44] == [gate.forced_rows + gate.live_rows for gate in handle.report().gates]


def in_flight(handle: ReplayHandle, model: nn.Module) -> dict[str, torch.Tensor]:
    """Two microbatches, the later one's backward first, both outside of ``replaying``."""
    losses = []
    for seed in (0, 1):
        with handle.replaying(batch_of(QWEN3, seed=10 + seed)):
            losses.append(model(input_ids=token_ids(seed)).logits.square().mean())
    for loss in reversed(losses):
        torch.autograd.backward(loss)
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


# torch asks a compiled block's input for its .grad
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_compiled_blocks_are_recomputed_under_their_own_rows(reentrant: bool) -> None:
    """Eager checkpoints around compiled blocks, two microbatches in flight: the gradients of the plain model."""
    model, twin = QWEN3.build(), QWEN3.build()
    checkpoint_layers(twin, reentrant=reentrant)
    for each in (model, twin):  # the backward of 5.18's grouped_mm on a CPU does not trace
        each.set_experts_implementation("batched_mm")
    for layer in QWEN3.layer_ids:
        twin.model.layers[layer].mlp.compile(backend="aot_eager", fullgraph=True)
    with gates.attach(model, QWEN3.spec) as plain, gates.attach(twin, QWEN3.spec, mode="compiled") as traced:
        expected, found = in_flight(plain, model), in_flight(traced, twin)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)
    assert plain.report() == traced.report()


def _compiled_parts(model: Any, what: str, *, backend: str) -> Any:
    """What to call, with the whole model, its layers or its MoE blocks compiled."""
    if what == "model":
        return torch.compile(model, backend=backend)
    for layer in QWEN3.layer_ids:
        (model.model.layers[layer] if what == "layers" else model.model.layers[layer].mlp).compile(backend=backend)
    return model


PARTS = [
    pytest.param(
        what, reentrant, marks=() if (what, reentrant) in {("model", None), ("layers", False)} else pytest.mark.slow
    )
    for what in ("model", "layers", "blocks")
    for reentrant in (None, False, True)
]


def check_plain_attach(what: str, reentrant: bool | None, *, backend: str) -> None:
    """Two batches and a live step of a model and its twin with compiled parts, both attached without ``compiled``."""
    model, twin = QWEN3.build(), QWEN3.build()
    for each in (model, twin):
        each.set_experts_implementation("batched_mm")
    if reentrant is not None:
        checkpoint_layers(twin, reentrant=reentrant)
    forward = _compiled_parts(twin, what, backend=backend)
    inputs = token_ids(1)
    with gates.attach(model, QWEN3.spec) as plain, gates.attach(twin, QWEN3.spec) as broken:
        for seed in (5, 6):
            batch = batch_of(QWEN3, seed=seed)
            with plain.replaying(batch), broken.replaying(batch):
                assert_equal(step(model, model, inputs=inputs), step(twin, forward, inputs=inputs))
        assert plain.report() == broken.report()
        assert_equal(step(model, model, inputs=inputs), step(twin, forward, inputs=inputs))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("what", "reentrant"), PARTS)
def test_a_plain_handle_follows_compiled_parts(what: str, reentrant: bool | None) -> None:
    """Graphs break at each gate; forward, backward, recomputation and counts are those of the model that is not."""
    check_plain_attach(what, reentrant, backend="aot_eager")


@pytest.fixture
def _quick_compiler() -> Any:
    """Inductor's C++ without optimisation: the kernels are the same, and each takes seconds less to build."""
    with torch._inductor.config.patch({"aot_inductor.debug_compile": True}):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_quick_compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [None, False], ids=["stored", "recomputed"])
@pytest.mark.parametrize("what", ["model", "layers", "blocks"])
def test_a_plain_handle_follows_inductor(what: str, reentrant: bool | None) -> None:
    """The same under the default backend, with and without gradient checkpointing."""
    check_plain_attach(what, reentrant, backend="inductor")


@pytest.mark.slow
@pytest.mark.usefixtures("_quick_compiler")
def test_whole_graphs_of_inductor_follow() -> None:
    """``compiled=True`` under the default backend: one graph for all batches, within 1e-5 of the plain model."""
    check_steps(QWEN3, experts="batched_mm", backend="inductor")


def test_a_compiled_forward_is_recorded() -> None:
    """What its gates chose, and that replays as it was."""
    model = QWEN3.build()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    with gates.attach(model, QWEN3.spec, mode="compiled") as handle, torch.no_grad():
        with handle.recording(batch_of(QWEN3, seed=5)) as own:
            expected = compiled(input_ids=token_ids(1)).logits
        with handle.replaying(own):
            assert torch.equal(expected, model(input_ids=token_ids(1)).logits)
    assert [0, 0] == [gate.flipped_rows for gate in handle.report().gates]


def test_rows_of_another_count_are_refused() -> None:
    """Neither stretched nor cut: no graph can raise, so leaving does, and names the gate."""
    model = QWEN3.build()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    with gates.attach(model, QWEN3.spec, mode="compiled") as handle:
        for num_rows in (1, 6, 13):
            with pytest.raises(ReplayError, match=r"compiled forward @ gate model\.layers\.1\.mlp\.gate") as caught:
                _run(handle, compiled, batch_of(QWEN3, seed=5, num_rows=num_rows))
            assert ErrorKind.ROW_COUNT == caught.value.kind
        _run(handle, compiled, batch_of(QWEN3, seed=5))
    assert [1, 1] == [gate.consumed for gate in handle.report().gates]


def test_a_refusal_that_another_error_hid_is_not_the_next_batchs() -> None:
    """What left the body by an exception is over; the batch after it has its own rows and its own verdict."""
    model = QWEN3.build()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    with gates.attach(model, QWEN3.spec, mode="compiled") as handle:
        with pytest.raises(ValueError, match="out of data"):
            _run_out(handle, compiled, batch_of(QWEN3, seed=5, num_rows=6))
        _run(handle, compiled, batch_of(QWEN3, seed=5))
    assert [1, 1] == [gate.consumed for gate in handle.report().gates]


def _run_out(handle: ReplayHandle, forward: Any, batch: PlainBatch) -> None:
    with handle.replaying(batch):
        forward(input_ids=token_ids(1))
        raise ValueError("out of data")


def _run(handle: ReplayHandle, forward: Any, batch: PlainBatch) -> None:
    with handle.replaying(batch):
        forward(input_ids=token_ids(1))


def test_an_uncompiled_gate_of_a_compiled_handle_is_the_plain_one() -> None:
    """For a model that is not compiled: the same answers, a copy that stays live, and no trace after detach."""
    model = QWEN3.build()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    live = model(input_ids=token_ids(1)).logits
    with gates.attach(model, QWEN3.spec, mode="compiled") as handle:
        teacher = copy.deepcopy(model)
        with handle.replaying(batch_of(QWEN3, seed=5)):
            assert torch.equal(live, teacher(input_ids=token_ids(1)).logits)
            assert not torch.equal(live, model(input_ids=token_ids(1)).logits)
        with pytest.raises(ReplayError, match="token rows") as caught:
            _run(handle, model, batch_of(QWEN3, seed=5, num_rows=13))
    assert ErrorKind.ROW_COUNT == caught.value.kind
    assert before == {name: set(vars(module)) for name, module in model.named_modules()}
    assert torch.equal(live, model(input_ids=token_ids(1)).logits)


def test_an_auxiliary_loss_of_forced_ids_is_not_compiled() -> None:
    """Said when attaching, not by a graph break."""
    with pytest.raises(UsageError, match="aux='live' for a compiled model"):
        gates.attach(QWEN3.build(), QWEN3.spec, mode="compiled", aux="forced")
