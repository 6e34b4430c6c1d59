"""Attaching to Transformers models: which gates are found, what is refused, what detach leaves, what is reported.

Axes: N token rows, L captured layers, K top-k slots.
"""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
import torch
from torch import nn

from routeplane.errors import ErrorKind, ReplayError, RouteplaneError, UsageError
from routeplane.replay import NoReplay, ReplayHandle
from routeplane.replay import transformers as gates
from tests.replay.plain_batch import PlainBatch, random_routes
from tests.replay.tiny_models import (
    BY_NAME,
    FAMILIES,
    MAIN_FAMILIES,
    NUM_ROWS,
    Family,
    checkpoint_layers,
    live_choice,
    logits_of,
    own_routes,
    recorded,
    replayed,
    token_ids,
)

each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
main_families = pytest.mark.parametrize("family", MAIN_FAMILIES, ids=lambda family: family.name)
QWEN3 = MAIN_FAMILIES[0]
GPT_OSS = MAIN_FAMILIES[4]


def test_where_replay_is_off_one_loop_runs_live() -> None:
    """What stands for the handle has its methods, with its parameters; the model answers as if it were alone."""
    names = [name for name in dir(NoReplay) if not name.startswith("_")]
    for name in names:
        assert [*signature(getattr(ReplayHandle, name)).parameters] == [*signature(getattr(NoReplay, name)).parameters]
    assert ["detach", "replaying", "report"] == names
    model = QWEN3.build()
    alone = logits_of(model)
    with NoReplay() as replay, replay.replaying(None):
        assert torch.equal(alone, logits_of(model))
    assert (0, 0.0) == (replay.report().microbatches, replay.report().scalars()["routeplane/replay_rows_forced"])


# ---- what the model is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_ids": (1,)}, "layers [1] with E=8, K=3, got those of the model, layers [1, 2] with E=8, K=3"),
        ({"layer_ids": (0, 1, 2)}, "apart: layers [0] with E=8, K=3"),
        ({"num_experts": 16}, "layers [1, 2] with E=16, K=3, got those of the model, layers [1, 2] with E=8, K=3"),
        ({"num_experts": (8, 16)}, "layers [1] with E=8, K=3 and layers [2] with E=16, K=3"),
        ({"top_k": 2}, "layers [1, 2] with E=8, K=2, got"),
    ],
)
def test_a_spec_of_another_model_is_refused(changes: dict[str, Any], message: str) -> None:
    """Layers, widths and top-k must be the model's, one for one; the message lists both sides."""
    model = QWEN3.build()
    with pytest.raises(ReplayError, match=re.escape(message)) as caught:
        gates.attach(model, replace(QWEN3.spec, **changes))
    assert ErrorKind.SPEC_MISMATCH == caught.value.kind
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_block_whose_selection_is_not_seen_is_refused() -> None:
    """Experts that are chosen by sorting have no selection to answer; the block is named."""
    model = QWEN3.build()

    def fused(hidden: torch.Tensor, *, router: Any = model.model.layers[2].mlp.gate) -> tuple[torch.Tensor, ...]:
        logits_NE = hidden @ router.weight.T
        order_NE = logits_NE.argsort(dim=-1, descending=True)
        return logits_NE, logits_NE.gather(1, order_NE[:, :3]), order_NE[:, :3]

    model.model.layers[2].mlp.gate.forward = fused
    message = r"no selection by topk or max over them @ model\.layers\.2\.mlp \(Qwen3MoeSparseMoeBlock\)"
    with pytest.raises(ReplayError, match=message) as caught:
        gates.attach(model, QWEN3.spec.select([1]))
    assert ErrorKind.NO_SEAM == caught.value.kind
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_that_cannot_be_probed_says_how() -> None:
    """The error of its forward is named, and the option that helps."""
    model = QWEN3.build()
    model.model.layers[2].mlp.gate = nn.Linear(32, 8)
    with pytest.raises(ReplayError, match=r"got ValueError: .* \(pass probe="):
        gates.attach(model, QWEN3.spec)


def test_a_dense_model_is_refused() -> None:
    """There is nothing to attach to."""
    model = QWEN3.build()
    for layer in model.model.layers:
        layer.mlp = nn.Linear(32, 32)
    with pytest.raises(ReplayError, match="Qwen3MoeForCausalLM without a single gate"):
        gates.attach(model, QWEN3.spec)


@pytest.mark.parametrize("name", ["mtp", "mtp_layers", "nextn_predict"])
def test_gates_of_multi_token_prediction_are_left_out(name: str) -> None:
    """A draft head's gate is neither forced nor counted, whatever it is called."""
    model = QWEN3.build()
    model.add_module(name, nn.ModuleDict({"layers": nn.ModuleList([copy.deepcopy(model.model.layers[2])])}))
    assert ["model.layers.1.mlp.gate", "model.layers.2.mlp.gate"] == [gate.name for gate, _ in gates.find_gates(model)]


def test_a_class_made_for_sharding_is_known_by_its_base() -> None:
    """FSDP2 gives each module that it shards a class of its own."""
    model = QWEN3.build()
    gate = model.model.layers[1].mlp.gate
    gate.__class__ = type(f"FSDP{type(gate).__name__}", (type(gate),), {})
    assert [1, 2] == [gate.layer_id for gate, _ in gates.find_gates(model)]


def test_a_router_that_stops_selecting_is_refused_in_its_first_forward() -> None:
    """A selection that was replaced after attach() is named where it is missed, instead of being live in silence."""
    model = QWEN3.build()

    def fused(hidden: torch.Tensor, *, router: Any = model.model.layers[2].mlp.gate) -> tuple[torch.Tensor, ...]:
        logits_NE = hidden @ router.weight.T
        return logits_NE, logits_NE[:, :3], logits_NE.argsort(dim=-1)[:, :3]

    with gates.attach(model, QWEN3.spec) as handle:
        model.model.layers[2].mlp.gate.forward = fused
        with pytest.raises(ReplayError) as caught, handle.replaying(random_routes(QWEN3.spec, NUM_ROWS, seed=5)):
            logits_of(model)
    assert ErrorKind.NO_SEAM == caught.value.kind
    assert "got none" in str(caught.value)
    assert "model.layers.2.mlp.gate" in str(caught.value)


# ---- attach and detach ----------------------------------------------------------------------------------------------


def test_detach_leaves_the_model_as_it_was() -> None:
    """No hook, no instance attribute and no bit of the logits differ; twice is once; the handle refuses use."""
    model = QWEN3.build()
    checkpoint_layers(model, reentrant=False)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    hooks = {name: (*module._forward_pre_hooks, *module._forward_hooks) for name, module in model.named_modules()}
    expected = logits_of(model)
    handle = gates.attach(model, QWEN3.spec)
    with handle.replaying(random_routes(QWEN3.spec, NUM_ROWS, seed=5)):
        logits_of(model)
    functions = [vars(module).get("_gradient_checkpointing_func") for module in model.modules()]
    handle.detach()
    handle.detach()
    assert any(functions)
    for name, module in model.named_modules():
        assert hooks[name] == (*module._forward_pre_hooks, *module._forward_hooks)
        assert not module._forward_hooks_always_called
        assert before[name].keys() == vars(module).keys()
        assert before[name].get("_gradient_checkpointing_func") is vars(module).get("_gradient_checkpointing_func")
    assert torch.equal(expected, logits_of(model))
    with pytest.raises(ReplayError, match="after detach") as caught:
        with handle.replaying(random_routes(QWEN3.spec, NUM_ROWS, seed=5)):
            pytest.fail("the body must not run")
    assert ErrorKind.DETACHED == caught.value.kind
    assert 1 == handle.report().microbatches


def test_detach_inside_replaying_is_refused() -> None:
    """The rows of an open microbatch would go unchecked."""
    model = QWEN3.build()
    handle = gates.attach(model, QWEN3.spec)
    with handle.replaying(random_routes(QWEN3.spec, NUM_ROWS, seed=5)):
        with pytest.raises(ReplayError, match="before detach"):
            handle.detach()
        logits_of(model)
    handle.detach()


def test_what_cannot_be_served_is_refused() -> None:
    """A second handle on the model, a second replaying inside the first, a policy that does not exist."""
    model = QWEN3.build()
    batch = random_routes(QWEN3.spec, NUM_ROWS, seed=5)
    with gates.attach(model, QWEN3.spec) as handle:
        with pytest.raises(UsageError, match="no handle is attached"):
            gates.attach(model, QWEN3.spec)
        with handle.replaying(batch):
            with pytest.raises(UsageError, match="one replaying"), handle.replaying(batch):
                pytest.fail("the body must not run")
            logits_of(model)
    with pytest.raises(UsageError, match="'live' or 'raise', got 'ignore'"):
        gates.attach(model, QWEN3.spec, on_missing="ignore")  # type: ignore[arg-type]
    gates.attach(model, QWEN3.spec).detach()


def test_handles_of_two_models_do_not_meet() -> None:
    """Each follows its own batch in one interleaved step, and a teacher copied from an attached model follows none."""
    spec = QWEN3.spec
    model, other = QWEN3.build(), QWEN3.build(seed=1)
    batch, other_batch = random_routes(spec, NUM_ROWS, seed=5), random_routes(spec, NUM_ROWS, seed=6)
    live = logits_of(model)
    expected, other_expected = replayed(model, spec, batch), replayed(other, spec, other_batch)
    with gates.attach(model, spec) as handle, gates.attach(other, spec) as other_handle:
        teacher = copy.deepcopy(model)
        with handle.replaying(batch), other_handle.replaying(other_batch):
            assert torch.equal(live, logits_of(teacher))
            assert torch.equal(expected, logits_of(model))
            assert torch.equal(other_expected, logits_of(other))
        with gates.attach(teacher, spec) as third, third.replaying(batch):
            assert torch.equal(expected, logits_of(teacher))
    assert [1, 1, 1] == [each.report().microbatches for each in (handle, other_handle, third)]


@pytest.mark.parametrize("family", [MAIN_FAMILIES[1], BY_NAME["minimax_m2"]], ids=["softmax", "biased"])
def test_the_auxiliary_loss_is_followed_in_this_model_alone(family: Family) -> None:
    """A teacher's stays live, training without it is left alone, and detach leaves none of the hooks."""
    model = family.build()
    # the first of these installs hooks of Transformers' own, which stay
    live = model(input_ids=token_ids(1), output_router_logits=True).aux_loss
    before = {name: (*module._forward_pre_hooks, *module._forward_hooks) for name, module in model.named_modules()}
    with gates.attach(model, family.spec, aux="forced") as handle:
        teacher = copy.deepcopy(model)
        with handle.replaying(random_routes(family.spec, NUM_ROWS, seed=5)):
            assert torch.equal(live, teacher(input_ids=token_ids(1), output_router_logits=True).aux_loss)
            plain = logits_of(model)
            forced = model(input_ids=token_ids(1), output_router_logits=True)
        assert torch.equal(plain, forced.logits)
        assert (live - forced.aux_loss).abs() > 1e-3
        assert torch.equal(live, model(input_ids=token_ids(1), output_router_logits=True).aux_loss)
    assert before == {
        name: (*module._forward_pre_hooks, *module._forward_hooks) for name, module in model.named_modules()
    }


# ---- report ---------------------------------------------------------------------------------------------------------


def test_the_report_counts_rows_and_merges() -> None:
    """Forced, live and flipped rows per gate equal a count by sets; scalars and text sum them up."""
    model = QWEN3.build()
    own = own_routes(model, QWEN3.spec)
    routes_NLK = own.routes_NLK.clone()
    routes_NLK[:4, 0] = torch.tensor([[0, 1, 2]], dtype=torch.int16)
    routes_NLK[4:, 0] = routes_NLK[4:, 0].flip(-1)  # another order is the same set
    routes_NLK[9:, :] = -1
    flipped = sum(set(row) != {0, 1, 2} for row in own.layer(1)[:4].tolist())
    assert flipped > 0
    handle = gates.attach(model, QWEN3.spec)
    with handle.replaying(PlainBatch(spec=QWEN3.spec, routes_NLK=routes_NLK)), recorded(model) as seen:
        logits_of(model)
    first, second = handle.report().gates
    live_NK = live_choice(QWEN3, model.model.layers[2].mlp, seen[2][0].logits_NE)[:9]
    later = sum(set(a) != set(b) for a, b in zip(routes_NLK[:9, 1].tolist(), live_NK.tolist(), strict=True))
    assert (9, 3, flipped, 1) == (first.forced_rows, first.live_rows, first.flipped_rows, first.consumed)
    assert (9, 3, later, 1) == (second.forced_rows, second.live_rows, second.flipped_rows, second.consumed)
    with handle.replaying(own):
        logits_of(model)
    twice = handle.report()
    handle.detach()
    assert 2 == twice.microbatches
    assert {
        "x/replay_microbatches": 2.0,
        "x/replay_gate_calls": 4.0,
        "x/replay_not_consumed": 0.0,
        "x/replay_rows_forced": 42.0,
        "x/replay_rows_live": 6.0,
        "x/replay_rows_flipped": float(flipped + later),
        "x/replay_rows_weighted": 0.0,
        "x/replay_flipped_share": (flipped + later) / 42,
        "x/replay_flipped_share_max": max(flipped, later) / 21,
    } == twice.scalars(prefix="x/")
    assert f"replayed 2 microbatches through 2 gates: 42 rows forced, 6 live, {flipped + later} flipped" in str(twice)
    assert "layer 2: 21 rows forced" in str(twice)
    merged = twice.merge(replace(twice, gates=twice.gates[1:], microbatches=1))
    assert (3, [21, 42]) == (merged.microbatches, [gate.forced_rows for gate in merged.gates])


def test_errors_cross_processes() -> None:
    """What a gate raises keeps its kind and problems through pickle, as Ray will do to it."""
    model = QWEN3.build()
    with gates.attach(model, QWEN3.spec) as handle, pytest.raises(RouteplaneError) as caught:
        with handle.replaying(random_routes(QWEN3.spec, NUM_ROWS, seed=5)):
            pass
    again = pickle.loads(pickle.dumps(caught.value))
    assert (caught.value.kind, caught.value.problems, str(caught.value)) == (again.kind, again.problems, str(again))
