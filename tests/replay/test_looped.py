"""Gates that fire several times for a token: each firing has rows of its own, numbered as layers of the unrolled model.

The reference is forced by hand, in the routers of the test's own models: nothing of routeplane takes part in it.

Axes: N token rows, E experts, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from routeplane.batch import collate
from routeplane.capture import transformers as capture
from routeplane.capture.transformers import taping
from routeplane.errors import CaptureError, ErrorKind, ReplayError, SpecError
from routeplane.record.spec import RouteSpec
from routeplane.replay import transformers as gates
from routeplane.testing.contracts.replay_contract import RowsBatch, unlike_rows
from tests.replay.families import FAMILIES, build
from tests.replay.test_probe import EXPERTS, TOKENS, TOP_K, Experts, Mixture, Selector, Tiny, softmax_of_chosen

NUM_ROWS = TOKENS.numel()


def chosen(self: Selector, logits_NE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A softmax over the K; ``self.pending`` holds the ids of the firings that are forced by hand."""
    pending: list[torch.Tensor] = vars(self).get("pending", [])
    if not pending:
        return softmax_of_chosen(self, logits_NE)
    wanted_NK = pending.pop(0)
    ids_NK = torch.where(wanted_NK < 0, logits_NE.topk(self.top_k).indices, wanted_NK)
    return ids_NK, logits_NE.gather(1, ids_NK).softmax(-1)


class Looped(Tiny):
    """Runs its second block three times for each token, and then a third block."""

    def __init__(self) -> None:
        super().__init__(chosen)
        self.layers.append(Mixture(chosen, Experts()))
        self.order = [0, 1, 1, 1, 2]

    def forward(self, input_ids: torch.Tensor, **_: object) -> torch.Tensor:
        """Hidden states."""
        hidden: torch.Tensor = self.embedding(input_ids)
        for at in self.order:
            hidden = self.layers[at](hidden)
        return hidden


class Body(nn.Module):
    """Two blocks that run twice, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mixture(chosen, Experts()) for _ in range(2)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states."""
        for layer in (*self.layers, *self.layers):
            hidden = layer(hidden)
        return hidden


class AllLooped(nn.Module):
    """Has no gate that fires once."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.body: nn.Module = Body()

    def forward(self, input_ids: torch.Tensor, **_: object) -> torch.Tensor:
        """Hidden states."""
        found: torch.Tensor = self.body(self.embedding(input_ids))
        return found


class Twice(Mixture):
    """Chooses and computes twice in one call."""

    def forward(self, hidden_BSH: torch.Tensor) -> torch.Tensor:
        """The second pass sees what the first has made."""
        return super().forward(super().forward(hidden_BSH))


def shared_layer() -> nn.Module:
    """One layer at two places."""
    model = Tiny(chosen)
    model.layers.append(model.layers[1])
    return model


def shared_gate() -> nn.Module:
    """Two layers with one router and experts of their own."""
    model = Tiny(chosen)
    model.layers[1].selector = model.layers[0].selector
    return model


def twice_in_a_block() -> nn.Module:
    """A layer whose one call fires its gate twice, and a plain one."""
    model = Tiny(chosen)
    model.layers[0] = Twice(chosen, Experts())
    return model


#: and the layers of their unrolled models, by path of the gate
MODELS: dict[Callable[[], nn.Module], dict[str, tuple[int, ...]]] = {
    Looped: {"layers.0.selector": (0,), "layers.1.selector": (1, 2, 3), "layers.2.selector": (4,)},
    AllLooped: {"body.layers.0.selector": (0, 2), "body.layers.1.selector": (1, 3)},
    shared_layer: {"layers.0.selector": (0,), "layers.1.selector": (1, 2)},
    shared_gate: {"layers.0.selector": (0, 1)},
    twice_in_a_block: {"layers.0.selector": (0, 1), "layers.1.selector": (2,)},
}
each_model = pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)


def made(make: Callable[[], nn.Module]) -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    return make()


def spec_of(make: Callable[[], nn.Module]) -> RouteSpec:
    """Written down by hand."""
    layer_ids = tuple(sorted(layer for layers in MODELS[make].values() for layer in layers))
    return RouteSpec(num_experts=EXPERTS, top_k=TOP_K, layer_ids=layer_ids, model="looped")


@contextmanager
def forced_by_hand(make: Callable[[], nn.Module], model: nn.Module, batch: RowsBatch) -> Iterator[None]:
    """Give each router the rows of its firings."""
    for path, layers in MODELS[make].items():
        vars(model.get_submodule(path))["pending"] = [batch.layer(layer).long() for layer in layers]
    yield
    assert not any(vars(model.get_submodule(path))["pending"] for path in MODELS[make])


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy, under names without the checkpoint wrapper's; the model's are cleared."""
    found = {
        name.replace("_checkpoint_wrapped_module.", ""): value.grad.clone()
        for name, value in model.named_parameters()
        if value.grad is not None
    }
    model.zero_grad()
    return found


@each_model
def test_every_firing_follows_its_own_rows(make: Callable[[], nn.Module]) -> None:
    """As the hand-forced reference, to the last bit, and so are the gradients; MISSING rows are live."""
    model, spec = made(make), spec_of(make)
    for missing in (0.0, 0.4, 1.1):
        batch = unlike_rows(spec, NUM_ROWS, seed=5, missing=missing)
        with forced_by_hand(make, model, batch):
            expected = model(TOKENS)
        torch.autograd.backward(expected.square().sum())
        expected_gradients = gradients_of(model)
        with gates.attach(model, spec) as handle, handle.replaying(batch):
            got = model(TOKENS)
            torch.autograd.backward(got.square().sum())
        found = gradients_of(model)
        assert torch.equal(expected, got)
        assert all(torch.equal(found[name], value) for name, value in expected_gradients.items())
        for path in MODELS[make]:
            assert bool(found[f"{path}.projection.weight"].any())
        for gate in handle.report().gates:
            assert int((batch.layer(gate.layer_id)[:, 0] >= 0).sum()) == gate.forced_rows


@each_model
def test_all_sides_number_layers_alike(make: Callable[[], nn.Module]) -> None:
    """Attaching, recording and capturing; what they record replays to the last bit, and observing changes nothing."""
    model, spec = made(make), spec_of(make)
    live = model(TOKENS)
    with gates.record(model) as handle, handle.recording(None) as recorded:
        assert torch.equal(live, model(TOKENS))
    assert spec.layer_ids == handle.spec.layer_ids
    with taping(model, spec) as tape:
        for _ in range(2):
            model(TOKENS)
    for rows_NLK in tape.forwards():
        assert torch.equal(torch.from_numpy(rows_NLK).to(torch.int16), recorded.routes_NLK())
    batch = RowsBatch(spec=spec, routes_NLK=recorded.routes_NLK())
    with gates.attach(model, spec) as handle, handle.replaying(batch):
        assert torch.equal(live, model(TOKENS))
    with gates.attach(model, spec, mode="observe") as handle:
        with handle.replaying(unlike_rows(spec, NUM_ROWS, seed=5)):
            assert torch.equal(live, model(TOKENS))
    assert all(gate.forced_rows == NUM_ROWS and gate.flipped_rows for gate in handle.report().gates)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first in first out", "last in first out"])
@pytest.mark.parametrize("kind", list(CheckpointImpl), ids=lambda kind: kind.name)
@each_model
def test_recomputation_repeats_each_firing(
    make: Callable[[], nn.Module], kind: CheckpointImpl, order: tuple[int, int]
) -> None:
    """Two microbatches in flight; their gradients add up to those of the reference without a checkpoint."""
    model, spec = made(make), spec_of(make)
    batches = [unlike_rows(spec, NUM_ROWS, seed=seed, missing=0.2) for seed in (5, 6)]
    for seed, batch in enumerate(batches):
        with forced_by_hand(make, model, batch):
            torch.autograd.backward(model(TOKENS + seed).square().sum())
    expected = gradients_of(model)
    if isinstance(model, AllLooped):  # one region with all firings of its gates
        model.body = checkpoint_wrapper(model.body, checkpoint_impl=kind)
    else:
        layers: Any = model.layers
        wrapped = {id(layer): checkpoint_wrapper(layer, checkpoint_impl=kind) for layer in layers}
        model.layers = nn.ModuleList([wrapped[id(layer)] for layer in layers])
    losses = []
    with gates.attach(model, spec) as handle:
        for seed, batch in enumerate(batches):
            with handle.replaying(batch):
                losses.append(model(TOKENS + seed).square().sum())
        for seed in order:
            torch.autograd.backward(losses[seed])
    found = gradients_of(model)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_a_recomputation_that_was_not_captured_is_refused() -> None:
    """A checkpoint written by hand: which firing it repeats cannot be told."""

    class ByHand(Looped):
        def forward(self, input_ids: torch.Tensor, **_: object) -> torch.Tensor:
            hidden: torch.Tensor = self.embedding(input_ids)
            for at in self.order:
                hidden = checkpoint(self.layers[at], hidden, use_reentrant=False)
            return hidden

    model, spec = made(ByHand), spec_of(Looped)
    with gates.attach(model, spec) as handle, handle.replaying(unlike_rows(spec, NUM_ROWS, seed=5)):
        loss = model(TOKENS).square().sum()
        with pytest.raises(ReplayError) as caught:
            torch.autograd.backward(loss)
    assert ErrorKind.UNBOUND_RECOMPUTE == caught.value.kind


@pytest.mark.parametrize(
    "order", [[0, 1, 1, 2], [0, 1, 1, 1, 1, 2], [0, 1, 1, 2, 1], [0, 1, 1, 1, 2] * 2, [0, 1, 1, 1]]
)
def test_a_forward_that_loops_otherwise_is_refused(order: list[int]) -> None:
    """Fewer passes than in the probing forward, more, or in another order; forcing and capturing."""
    model, spec = made(Looped), spec_of(Looped)
    with gates.attach(model, spec) as handle:
        vars(model)["order"] = order
        with pytest.raises(ReplayError) as caught, handle.replaying(unlike_rows(spec, NUM_ROWS, seed=5)):
            model(TOKENS)
    assert caught.value.kind in (ErrorKind.GATE_FIRED, ErrorKind.GATE_NOT_CONSUMED)
    vars(model)["order"] = [0, 1, 1, 1, 2]
    with taping(model, spec) as tape:
        vars(model)["order"] = order
        with pytest.raises(CaptureError) as refused:
            assert [model(TOKENS), tape.forwards()]
    assert refused.value.kind in (ErrorKind.GATE_FIRED, ErrorKind.UNCAPTURED_SLOT)


def test_a_forward_after_one_that_raised_starts_with_the_first_firing() -> None:
    """Its first firing is the first again, also where no gate fires once."""
    model, spec = made(AllLooped), spec_of(AllLooped)
    batch = unlike_rows(spec, NUM_ROWS, seed=5)
    with forced_by_hand(AllLooped, model, batch):
        expected = model(TOKENS)
    body = model.get_submodule("body")

    def fail(*_: object) -> None:
        if len(handle.report().gates) and not failed:
            failed.append(True)
            raise FloatingPointError

    failed: list[bool] = []
    with gates.attach(model, spec) as handle:
        hook = body.get_submodule("layers.1").register_forward_hook(fail)
        with suppress(ReplayError), handle.replaying(batch):
            with pytest.raises(FloatingPointError):
                model(TOKENS)
            assert torch.equal(expected, model(TOKENS))
        hook.remove()
        with handle.replaying(batch):
            assert torch.equal(expected, model(TOKENS))


def test_what_cannot_be_followed_is_said() -> None:
    """Compiled graphs; and what counting modules or reading a configuration cannot know."""
    with pytest.raises(ReplayError, match="firing 1 of 3"):
        gates.attach(made(Looped), spec_of(Looped), mode="compiled")
    with pytest.raises(SpecError, match=r"layers.1.selector at layers.2.selector too; the forward numbers such layers"):
        RouteSpec.from_model(made(shared_layer))
    # the modules of a loop in code alone are counted once: attaching shows the difference
    with pytest.raises(ReplayError, match=r"apart: layers \[3, 4\]"):
        gates.attach(made(Looped), RouteSpec.from_model(made(Looped)))


def test_a_looped_layer_can_be_left_live() -> None:
    """By name, with all its firings; other layers keep their numbers in the unrolled model."""
    spec = spec_of(Looped).select([0, 4])
    with gates.attach(made(Looped), spec, probe=gates.Probe(leave_live=("layers.1.*",))) as handle:
        assert [0, 4] == [gate.layer_id for gate in handle.report().gates]
    assert "left live: layers.1.*" in str(handle.report())


def test_transformers_own_looped_family_from_generation_to_replay() -> None:
    """Its configuration gives the numbers of the probing forward; what is generated replays to the last bit."""
    [family] = [case for case in FAMILIES if case.name == "inkling2_loop_text"]
    model: Any = build(family)
    spec = RouteSpec.from_model(model)
    assert (0, 1, 2, 3) == spec.layer_ids
    assert spec.layer_ids == RouteSpec.from_hf_config(model.config).layer_ids
    [record] = capture.records(model, [[5, 9, 3, 17]], spec=spec, max_tokens=4)
    batch = collate([record], spec, layout="padded")
    with torch.no_grad():
        live = model(**batch.model_inputs()).logits
        with gates.attach(model, spec) as handle, handle.replaying(batch):
            torch.testing.assert_close(live, model(**batch.model_inputs()).logits, rtol=1e-4, atol=1e-4)
    assert [7] * 4 == [gate.forced_rows for gate in handle.report().gates]
