"""Recomputation reads the rows of the forward it repeats: gradients under checkpointing equal those without.

The model is trained on two microbatches with random routes, so that a recomputation that is live, or that follows the
other microbatch, is wrong by far more than rounding.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from routeplane.errors import ErrorKind, ReplayError
from routeplane.replay import transformers as gates
from routeplane.replay.handle import ReplayHandle
from tests.replay.plain_batch import PlainBatch, random_routes
from tests.replay.tiny_models import (
    MAIN_FAMILIES,
    NUM_ROWS,
    Family,
    checkpoint_layers,
    listed_gates,
    recorded,
    token_ids,
)

QWEN3 = MAIN_FAMILIES[0]
kinds = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
Gradients = dict[str, torch.Tensor]


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    """The loss of one microbatch."""
    loss: torch.Tensor = model(input_ids=token_ids(seed)).logits.square().mean()
    return loss


def backward(loss: torch.Tensor) -> None:
    """The typed spelling of ``loss.backward()``."""
    torch.autograd.backward(loss)


def batches_of(family: Family) -> list[PlainBatch]:
    """Routes for the microbatches with seeds 0 and 1; some rows are left to the gates."""
    return [random_routes(family.spec, NUM_ROWS, seed=seed, missing=0.2) for seed in (10, 11)]


def gradients_of(model: nn.Module) -> Gradients:
    """A copy of every gradient; the model's are cleared."""
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def expected_of(family: Family, *, live: Sequence[int] = ()) -> Gradients:
    """The sum of both microbatches' gradients without any checkpoint; those named in ``live`` are not replayed."""
    model = family.build()
    with gates.attach(model, family.spec) as handle:
        for seed, batch in enumerate(batches_of(family)):
            if seed in live:
                backward(loss_of(model, seed))
                continue
            with handle.replaying(batch):
                backward(loss_of(model, seed))
    return gradients_of(model)


def assert_equal(expected: Gradients, found: Gradients) -> None:
    """Equal up to the order in which two gradients are added."""
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


def checkpointed(family: Family, *, reentrant: bool) -> Any:
    """The family's model with every layer checkpointed."""
    model = family.build()
    checkpoint_layers(model, reentrant=reentrant)
    return model


# ---- where and in which order backward runs -------------------------------------------------------------------------


@kinds
def test_two_microbatches_in_one_backward(reentrant: bool) -> None:
    """Both forwards first, then one backward pass over the sum of their losses."""
    model = checkpointed(QWEN3, reentrant=reentrant)
    losses = []
    with gates.attach(model, QWEN3.spec) as handle:
        for seed, batch in enumerate(batches_of(QWEN3)):
            with handle.replaying(batch):
                losses.append(loss_of(model, seed))
        backward(torch.stack(losses).sum())
    assert_equal(expected_of(QWEN3), gradients_of(model))


@kinds
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first in first out", "last in first out"])
def test_backward_inside_the_next_replaying(reentrant: bool, order: tuple[int, int]) -> None:
    """A pipeline's steady state: the first microbatch's backward while the second's routes are current."""
    model = checkpointed(QWEN3, reentrant=reentrant)
    first, second = batches_of(QWEN3)
    with gates.attach(model, QWEN3.spec) as handle:
        with handle.replaying(first):
            losses = [loss_of(model, 0)]
        with handle.replaying(second):
            losses.append(loss_of(model, 1))
            for seed in order:
                backward(losses[seed])
    assert_equal(expected_of(QWEN3), gradients_of(model))


@kinds
def test_backward_on_another_thread(reentrant: bool) -> None:
    """Recomputation is bound to its forward, not to the thread: autograd has one thread per accelerator."""
    model = checkpointed(QWEN3, reentrant=reentrant)
    with gates.attach(model, QWEN3.spec) as handle:
        for seed, batch in enumerate(batches_of(QWEN3)):
            with handle.replaying(batch):
                loss = loss_of(model, seed)
            thread = threading.Thread(target=backward, args=(loss,))
            thread.start()
            thread.join()
    assert_equal(expected_of(QWEN3), gradients_of(model))


@kinds
def test_two_recomputations_at_once(reentrant: bool) -> None:
    """Two devices' threads inside the same gate's recomputation each follow their own microbatch."""
    model = checkpointed(QWEN3, reentrant=reentrant)
    meeting = threading.Barrier(2, timeout=60)
    losses = []

    def meet(module: nn.Module, args: Any) -> None:
        meeting.wait()

    with gates.attach(model, QWEN3.spec) as handle:
        for seed, batch in enumerate(batches_of(QWEN3)):
            with handle.replaying(batch):
                losses.append(loss_of(model, seed))
        for _, router in listed_gates(model):
            # before replay's own hook: both frames are open when either gate asks for its rows
            router.register_forward_pre_hook(meet, prepend=True)
        threads = [threading.Thread(target=backward, args=(loss,)) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not meeting.broken
    assert_equal(expected_of(QWEN3), gradients_of(model))


@kinds
@pytest.mark.parametrize("live", [0, 1])
def test_a_live_microbatch_stays_live_in_recomputation(reentrant: bool, live: int) -> None:
    """A forward outside every replaying is recomputed live, though its backward runs inside another's."""
    model = checkpointed(QWEN3, reentrant=reentrant)
    batches = batches_of(QWEN3)
    with gates.attach(model, QWEN3.spec) as handle:
        live_loss = loss_of(model, live)
        with handle.replaying(batches[1 - live]):
            loss = loss_of(model, 1 - live)
            backward(live_loss)
        backward(loss)
    assert_equal(expected_of(QWEN3, live=[live]), gradients_of(model))


# ---- how checkpointing is enabled -----------------------------------------------------------------------------------


@kinds
def test_checkpointing_enabled_after_attach(reentrant: bool) -> None:
    """Enabling, and enabling again, puts plain functions back; the next replaying captures them."""
    model = QWEN3.build()
    losses = []
    handle = gates.attach(model, QWEN3.spec)
    for seed, batch in enumerate(batches_of(QWEN3)):
        checkpoint_layers(model, reentrant=reentrant)
        with handle.replaying(batch):
            losses.append(loss_of(model, seed))
    for loss in losses:
        backward(loss)
    handle.detach()
    assert_equal(expected_of(QWEN3), gradients_of(model))
    functions = {vars(module).get("_gradient_checkpointing_func") for module in model.modules()} - {None}
    assert ["checkpoint"] == [getattr(function, "func", function).__name__ for function in functions]


@kinds
def test_torch_checkpoint_wrapper_is_captured(reentrant: bool) -> None:
    """What FSDP recipes wrap layers in keeps its function in an instance attribute too."""
    model = QWEN3.build()
    impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    model.enable_input_require_grads()
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer, checkpoint_impl=impl)
    losses = []
    with gates.attach(model, QWEN3.spec) as handle:
        for seed, batch in enumerate(batches_of(QWEN3)):
            with handle.replaying(batch):
                losses.append(loss_of(model, seed))
        backward(losses[0])
        backward(losses[1])
    found = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in gradients_of(model).items()}
    assert_equal(expected_of(QWEN3), found)


def test_missing_rows_keep_their_first_decision() -> None:
    """Weights that moved between forward and backward flip live choices; the recomputation repeats the forward's."""
    model = checkpointed(QWEN3, reentrant=False)
    batch = random_routes(QWEN3.spec, NUM_ROWS, seed=5, missing=1.1)
    routers = [router for _, router in listed_gates(model)]
    with gates.attach(model, QWEN3.spec) as handle, recorded(model) as seen:
        with handle.replaying(batch):
            loss = loss_of(model, 0)
        for router in routers:
            router.get_parameter("weight").data.neg_()
        backward(loss)
    for firings in seen.values():
        forward, again = firings
        assert torch.equal(forward.ids_NK, again.ids_NK)
        assert not torch.equal(forward.logits_NE, again.logits_NE)
    assert [1, 1] == [gate.consumed for gate in handle.report().gates]


# ---- checkpoints that are not captured ------------------------------------------------------------------------------


def own_checkpoints(model: Any, *, reentrant: bool) -> None:
    """Checkpoint each layer by hand, with torch's function and nothing that replay could find."""
    model.enable_input_require_grads()
    for layer in model.model.layers:
        layer.forward = by_hand(layer.forward, reentrant=reentrant)


def by_hand(forward: Callable[..., Any], *, reentrant: bool) -> Callable[..., Any]:
    """A forward that is recomputed by a checkpoint of its own."""

    def run(hidden: torch.Tensor, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(hidden, **kwargs)
        return checkpoint(lambda hidden: forward(hidden, **kwargs), hidden, use_reentrant=reentrant)

    return run


def refused(loss: torch.Tensor) -> None:
    """The backward pass meets a recomputation whose forward is unknown."""
    with pytest.raises(ReplayError, match=r"activation_checkpointing_enable.*model\.layers\.2") as caught:
        backward(loss)
    assert ErrorKind.UNBOUND_RECOMPUTE == caught.value.kind


@kinds
def test_own_checkpoints_inside(reentrant: bool) -> None:
    """Backward inside the replaying of its forward needs no capture; log-probabilities may be computed before."""
    model = QWEN3.build()
    own_checkpoints(model, reentrant=reentrant)
    with gates.attach(model, QWEN3.spec) as handle:
        for seed, batch in enumerate(batches_of(QWEN3)):
            with handle.replaying(batch), torch.no_grad():
                loss_of(model, seed)
            with handle.replaying(batch):
                backward(loss_of(model, seed))
    assert_equal(expected_of(QWEN3), gradients_of(model))


@kinds
def test_own_checkpoints_outside_are_refused(reentrant: bool) -> None:
    """A recomputation whose forward is unknown is an error that says what to do, not a live gradient."""
    model = QWEN3.build()
    own_checkpoints(model, reentrant=reentrant)
    with gates.attach(model, QWEN3.spec) as handle:
        with handle.replaying(batches_of(QWEN3)[0]):
            loss = loss_of(model, 0)
        refused(loss)


@kinds
@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_own_checkpoints_inside_the_wrong_replaying_are_refused(reentrant: bool, when: str) -> None:
    """One recomputation too many for the current binding: some forward's backward ran under another's routes."""
    model = QWEN3.build()
    own_checkpoints(model, reentrant=reentrant)
    first, second = batches_of(QWEN3)
    with gates.attach(model, QWEN3.spec) as handle:
        with handle.replaying(first):
            stale = loss_of(model, 0)
        with handle.replaying(second):
            if when == "before":
                refused(stale)
            loss = loss_of(model, 1)
            if when == "between":
                backward(stale)
                refused(loss)
            if when == "after":
                backward(loss)
                refused(stale)


@kinds
def test_own_checkpoints_of_live_forwards_are_left_alone(reentrant: bool) -> None:
    """Live steps before and between replayed ones recompute live, as without routeplane."""
    model = QWEN3.build()
    own_checkpoints(model, reentrant=reentrant)
    first, _ = batches_of(QWEN3)
    with gates.attach(model, QWEN3.spec) as handle:
        backward(loss_of(model, 1))
        gradients_of(model)
        with handle.replaying(first):
            backward(loss_of(model, 0))
        with handle.replaying(first), torch.no_grad():
            loss_of(model, 0)
        backward(loss_of(model, 1))
    assert_equal(expected_of(QWEN3, live=[1]), gradients_of(model))


def test_a_live_and_a_replayed_forward_in_flight_are_refused() -> None:
    """With own checkpoints, which of the two recomputes cannot be told."""
    model = QWEN3.build()
    own_checkpoints(model, reentrant=False)
    with gates.attach(model, QWEN3.spec) as handle:
        with handle.replaying(batches_of(QWEN3)[0]):
            loss = loss_of(model, 0)
        refused(loss + loss_of(model, 1))


# ---- after the handle, and after an interruption --------------------------------------------------------------------


@kinds
def test_backward_after_detach_is_refused(reentrant: bool) -> None:
    """Its recomputation would run live, and the gradient would be that of another forward."""
    model = checkpointed(QWEN3, reentrant=reentrant)
    with gates.attach(model, QWEN3.spec) as handle, handle.replaying(batches_of(QWEN3)[0]):
        loss = loss_of(model, 0)
    with pytest.raises(ReplayError, match="until backward") as caught:
        backward(loss)
    assert ErrorKind.DETACHED == caught.value.kind


def modes_left() -> list[object]:
    """Torch's stack of function modes."""
    return list(torch.overrides._get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def interrupted(handle: ReplayHandle, model: Any) -> None:
    """A forward that a person stops inside a gate."""

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[1].mlp.gate.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt), handle.replaying(batches_of(QWEN3)[0]):
        loss_of(model, 0)
    hook.remove()


def test_no_mode_outlives_a_gate_that_raised() -> None:
    """A caller that catches the error and goes on inside the ``with`` gets live selections again."""
    model = QWEN3.build()
    with gates.attach(model, QWEN3.spec) as handle, handle.replaying(batches_of(QWEN3)[0]):
        with pytest.raises(ReplayError, match="token rows"):
            model.model.layers[1].mlp.gate(torch.zeros(5, 32))
        assert [] == modes_left()
        loss_of(model, 0)


@pytest.mark.parametrize("enable", [True, False], ids=["checkpointed", "plain"])
def test_no_mode_outlives_an_interrupted_gate(enable: bool) -> None:
    """Hooks do not run for KeyboardInterrupt, and still nothing stays on torch's stack, nor after early stops."""
    model = checkpointed(QWEN3, reentrant=False) if enable else QWEN3.build()
    with gates.attach(model, QWEN3.spec) as handle:
        interrupted(handle, model)
        assert [] == modes_left()
        for seed, batch in enumerate(batches_of(QWEN3)):
            with handle.replaying(batch):
                loss = loss_of(model, seed)
            backward(loss)
            assert [] == modes_left()
    assert_equal(expected_of(QWEN3), gradients_of(model))


def test_no_mode_outlives_an_interrupted_auxiliary_loss() -> None:
    """The loss of a live forward after an interrupted one counts its own choices, not those of the batch before."""
    model = QWEN3.build()
    live = model(input_ids=token_ids(1), output_router_logits=True).aux_loss
    with gates.attach(model, QWEN3.spec, aux="forced") as handle:
        interrupted(handle, model)
        assert [] == modes_left()
        assert torch.equal(live, model(input_ids=token_ids(1), output_router_logits=True).aux_loss)
        with handle.replaying(batches_of(QWEN3)[0]):
            loss_of(model, 0)
        assert [] == modes_left()
