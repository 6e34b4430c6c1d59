"""Every MoE family of Transformers 5.24 that can be built: what attaches, and that it follows.

The reference is forced by hand: ``torch.topk`` and ``torch.max`` themselves are replaced for the reference's forward,
and answer selections over ``[N, E]`` in the order of layers. Nothing of routeplane takes part in it.

Axes: N token rows, L gates, E experts, K top-k slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from routeplane.batch import collate
from routeplane.capture.selection import Gate
from routeplane.capture.transformers import taping
from routeplane.errors import ErrorKind, ReplayError
from routeplane.record.record import RouteRecord
from routeplane.record.spans import Capture, Span
from routeplane.record.spec import RouteSpec
from routeplane.replay import transformers as gates
from routeplane.testing.contracts.replay_contract import RowsBatch, feature, unlike_rows
from tests.replay.families import FAMILIES, FamilyCase, build

#: B=2 sequences of S=6 tokens
TOKENS = torch.tensor([[5, 9, 3, 17, 33, 21], [40, 8, 12, 31, 7, 50]])
NUM_ROWS = TOKENS.numel()
#: What is observed. Doge combines two selections over halves of a key: what it selects last is a place in that table.
REFUSED = {"doge": r"experts \[.*\] at work where \[.*\] are forced"}
#: what runs on every change; the others with `make test-all` and `make replay-table`
FAST = {"qwen3_moe", "llama4_text", "phimoe", "dbrx", "zaya", "gemma4_text", "nemotron_h", "deepseek_v4", "jetmoe"}


def _parameters() -> list[Any]:
    followed = [case for case in FAMILIES if case.name not in REFUSED]
    return [pytest.param(case, id=case.name, marks=() if case.name in FAST else pytest.mark.slow) for case in followed]


each_family = pytest.mark.parametrize("family", _parameters())


@lru_cache(maxsize=70)
def tiny(family: FamilyCase) -> tuple[Any, list[Gate], RouteSpec]:
    """A model with routers that decide clearly, its gates, and their geometry."""
    model = build(family)
    for implement in ("set_experts_implementation", "set_attn_implementation"):
        if hasattr(model, implement) and implement == "set_experts_implementation":
            getattr(model, implement)("eager")
    found = gates.find_gates(model, probe=probe_of(family))
    with torch.no_grad():
        for _, module in found:
            for parameter in module.parameters():
                if module_is_router(parameter, found):
                    parameter.normal_(std=0.3)
    named = [gate for gate, _ in found]
    ordered = sorted(named, key=lambda gate: gate.layer_id)
    spec = RouteSpec(
        num_experts=tuple(gate.num_experts for gate in ordered),
        top_k=ordered[0].top_k,
        layer_ids=tuple(gate.layer_id for gate in ordered),
        model=family.name,
    )
    return model, named, spec


def module_is_router(parameter: torch.Tensor, found: list[tuple[Gate, Any]]) -> bool:
    """Matrices of routers, and not those of a whole block that selects."""
    return parameter.dim() == 2 and parameter.shape[0] == found[0][0].num_experts


def probe_of(family: FamilyCase) -> gates.Probe:
    """Routers that stay live by name."""
    return gates.Probe(leave_live=family.leave_live)


def logits_of(model: Any) -> torch.Tensor:
    """One forward."""
    found: torch.Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return found


@contextmanager
def forced_by_hand(
    found: list[Gate], rows: Mapping[int, torch.Tensor], *, before: int = 0
) -> Iterator[dict[int, torch.Tensor]]:
    """Replace torch's selections; yields the ids that each layer used, ``[N, K]``."""
    used: dict[int, torch.Tensor] = {}
    topk, largest = torch.topk, torch.max
    ordered = sorted(found, key=lambda gate: gate.layer_id)
    pending = [each for gate in ordered for each in (*[None] * before, gate)]
    mixed: list[torch.Tensor] = []

    def ids_for(gate: Gate, live: torch.Tensor) -> torch.Tensor:
        wanted = rows[gate.layer_id].long()
        used[gate.layer_id] = chosen = torch.where(wanted < 0, live.reshape(wanted.shape), wanted)
        return chosen.reshape(live.shape)

    def hand_topk(scores: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = topk(scores, *args, **kwargs)
        k = args[0] if args else kwargs["k"]
        gate = next((each for each in pending if each is not None), None)
        if gate is None or gate.rounds or k != gate.top_k or scores.dim() != gate.axes:
            return result
        if scores.shape[-1] != gate.num_experts or scores.numel() != NUM_ROWS * gate.num_experts:
            return result
        if pending.pop(0) is None:
            return result
        chosen = ids_for(gate, result.indices)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))

    def hand_max(scores: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = largest(scores, *args, **kwargs)
        gate = pending[0] if pending else None
        if gate is None or not gate.rounds or scores.shape != (NUM_ROWS, gate.num_experts) or not (args or kwargs):
            return result
        if not mixed:
            mixed.extend(torch.chunk(ids_for(gate, topk(scores, gate.top_k).indices), gate.top_k, dim=1))
        chosen = mixed.pop(0)
        if not mixed:
            pending.pop(0)
        return torch.return_types.max((scores.gather(-1, chosen), chosen))

    with (
        mock.patch.object(torch, "topk", hand_topk),
        mock.patch.object(torch.Tensor, "topk", hand_topk),
        mock.patch.object(torch.Tensor, "max", hand_max),
    ):
        yield used
    assert not pending


def by_layer(batch: RowsBatch) -> dict[int, torch.Tensor]:
    """The rows of each layer."""
    return {layer: batch.layer(layer) for layer in batch.spec.layer_ids}


def replayed(family: FamilyCase, batch: RowsBatch, run: Callable[[Any], torch.Tensor] = logits_of) -> torch.Tensor:
    """A forward under the batch's rows."""
    model, _, spec = tiny(family)
    with gates.attach(model, spec, probe=probe_of(family)) as handle, handle.replaying(batch):
        return run(model)


def test_the_list_is_whole() -> None:
    """68 families, of which at least 60 follow."""
    assert 68 == len(FAMILIES) == len({case.name for case in FAMILIES})
    assert len(_parameters()) >= 60


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_family_that_does_not_obey_is_refused(name: str) -> None:
    """With what was observed."""
    [case] = [case for case in FAMILIES if case.name == name]
    with pytest.raises(ReplayError, match=REFUSED[name]) as caught:
        gates.find_gates(build(case))
    assert ErrorKind.NO_SEAM == caught.value.kind


@feature("attach")
@each_family
def test_probing_leaves_no_trace(family: FamilyCase) -> None:
    """State, gradients, flags, hooks and random state are what they were, to the byte."""
    model, _, spec = tiny(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    flags = [module.training for module in model.modules()]
    learns = [parameter.requires_grad for parameter in model.parameters()]
    hooks = [(len(module._forward_pre_hooks), len(module._forward_hooks)) for module in model.modules()]
    attributes = [set(vars(module)) for module in model.modules()]
    random = torch.get_rng_state()
    gates.attach(model, spec, probe=probe_of(family)).detach()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())
    assert flags == [module.training for module in model.modules()]
    assert hooks == [(len(module._forward_pre_hooks), len(module._forward_hooks)) for module in model.modules()]
    assert attributes == [set(vars(module)) for module in model.modules()]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert learns == [parameter.requires_grad for parameter in model.parameters()]
    assert torch.equal(random, torch.get_rng_state())


@feature("forced rows")
@each_family
@torch.no_grad()
def test_forced_rows_are_the_hand_forced_reference(family: FamilyCase) -> None:
    """To the last bit; and another output than the live one."""
    model, found, spec = tiny(family)
    batch = unlike_rows(spec, NUM_ROWS, seed=5)
    with forced_by_hand(found, by_layer(batch), before=family.before) as used:
        expected = logits_of(model)
    assert all(torch.equal(used[layer], batch.layer(layer).long()) for layer in spec.layer_ids)
    got = replayed(family, batch)
    assert torch.equal(expected, got)
    assert not torch.equal(got, logits_of(model))


@feature("missing rows")
@each_family
@torch.no_grad()
def test_missing_rows_are_live(family: FamilyCase) -> None:
    """Row by row as in the reference; a batch of them alone is the live model."""
    model, found, spec = tiny(family)
    batch = unlike_rows(spec, NUM_ROWS, seed=6, missing=0.5)
    with forced_by_hand(found, by_layer(batch), before=family.before):
        expected = logits_of(model)
    assert torch.equal(expected, replayed(family, batch))
    assert torch.equal(logits_of(model), replayed(family, unlike_rows(spec, NUM_ROWS, seed=6, missing=1.1)))


@feature("gradients")
@each_family
def test_gradients_are_those_of_the_reference(family: FamilyCase) -> None:
    """Of every parameter; each gate's own are there unless its family's rule has constant weights."""
    model, found, spec = tiny(family)
    batch = unlike_rows(spec, NUM_ROWS, seed=5)

    def gradients(run: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
        torch.autograd.backward(run().float().square().mean())
        got = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        for value in model.parameters():
            value.grad = None
        return got

    def by_hand() -> torch.Tensor:
        with forced_by_hand(found, by_layer(batch), before=family.before):
            return logits_of(model)

    expected = gradients(by_hand)
    got = gradients(lambda: replayed(family, batch))
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-7)
    for gate in found:
        own = [value for name, value in got.items() if name.startswith(gate.name)]
        assert any(bool(value.any()) for value in own), str(gate)


@feature("self-replay")
@each_family
@torch.no_grad()
def test_what_is_recorded_replays_bit_for_bit(family: FamilyCase) -> None:
    """The rows that ``taping`` reads are those that the reference used, and forcing them changes nothing."""
    model, found, spec = tiny(family)
    nothing = {layer: torch.full((NUM_ROWS, spec.top_k), -1) for layer in spec.layer_ids}
    with forced_by_hand(found, nothing, before=family.before) as used:
        live = logits_of(model)
    with taping(model, spec, leave_live=family.leave_live) as tape:
        assert torch.equal(live, logits_of(model))
    [rows_NLK] = tape.forwards()
    for slot, layer in enumerate(spec.layer_ids):
        assert torch.equal(used[layer], torch.from_numpy(rows_NLK[:, slot]).long())
    batch = RowsBatch(spec=spec, routes_NLK=torch.from_numpy(rows_NLK).to(torch.int16))
    assert torch.equal(live, replayed(family, batch))


def records_of(spec: RouteSpec, lengths: tuple[int, ...]) -> list[RouteRecord]:
    """Records of random tokens with a legal row each, far from what gates choose."""
    found = []
    for index, length in enumerate(lengths):
        batch = unlike_rows(spec, length, seed=40 + index)
        found.append(
            RouteRecord(
                sample_id=f"sample-{index}",
                token_ids=np.random.default_rng(index).integers(3, 60, length).astype(np.int32),
                routes=batch.routes_NLK.numpy(),
                spans=(Span(start=0, stop=length, kind="prompt", call="call", weights_version=None),),
                captures=(Capture(start=0, stop=length, call="call", weights_version=None, state="captured"),),
                spec=spec,
            )
        )
    return found


@feature("packing")
@each_family
@torch.no_grad()
def test_packed_is_padded_or_refused(family: FamilyCase, record_property: Callable[[str, object], None]) -> None:
    """Token by token the same output under the same rows; a model that mixes is refused, and does mix."""
    model, _, spec = tiny(family)
    records = records_of(spec, (9, 5, 13))
    padded, packed = (collate(records, spec, layout=layout) for layout in ("padded", "packed"))
    outputs = {}
    with gates.attach(model, spec, probe=probe_of(family)) as handle:
        with handle.replaying(padded):
            outputs["padded"] = model(**padded.model_inputs()).logits[~padded.pad_mask]
        for batch in (collate([record], spec, layout="padded") for record in records):
            with handle.replaying(batch):
                outputs["alone"] = model(**batch.model_inputs()).logits[0]
        torch.testing.assert_close(outputs["padded"][-13:], outputs["alone"], rtol=1e-4, atol=1e-4)
        with suppress(ReplayError), handle.replaying(packed):
            outputs["packed"] = model(**packed.model_inputs()).logits[0]
        if "packed" in outputs:
            torch.testing.assert_close(outputs["packed"], outputs["padded"], rtol=1e-4, atol=1e-4)
            return
        record_property("replay_outcome", "refused")
        with pytest.raises(ReplayError) as caught, handle.replaying(packed):
            pytest.fail("the body must not run")
    assert ErrorKind.PACKING == caught.value.kind
    live = model(**padded.model_inputs()).logits[~padded.pad_mask]
    mixed = model(**packed.model_inputs()).logits[0]
    assert (live - mixed).abs().max() > 1e-2 * live.abs().max()


@feature("observe")
@each_family
@torch.no_grad()
def test_observing_changes_nothing_and_counts(family: FamilyCase) -> None:
    """The output is the live one, and the flips are those that forcing would take out."""
    model, _, spec = tiny(family)
    batch = unlike_rows(spec, NUM_ROWS, seed=5, missing=0.2)
    live = logits_of(model)
    with gates.attach(model, spec, mode="observe", probe=probe_of(family)) as handle, handle.replaying(batch):
        assert torch.equal(live, logits_of(model))
    first = handle.report().gates[0]
    missing = int((batch.layer(first.layer_id)[:, 0] < 0).sum())
    assert (NUM_ROWS - missing, missing, 1) == (first.forced_rows, first.live_rows, first.consumed)
    assert first.flipped_rows > 0


@feature("consumption")
@each_family
def test_no_operation_is_impossible(family: FamilyCase) -> None:
    """A forward that did not come by a gate is an error on leaving, and names it."""
    model, found, spec = tiny(family)
    with gates.attach(model, spec, probe=probe_of(family)) as handle, pytest.raises(ReplayError) as caught:
        with handle.replaying(unlike_rows(spec, NUM_ROWS, seed=5)):
            pass
    assert ErrorKind.GATE_NOT_CONSUMED == caught.value.kind
    assert len(found) == len(caught.value.problems)


#: A change of ``model_inputs()`` of several packed sequences -> what ``replaying`` says; empty where it says nothing.
CALLS: dict[str, tuple[dict[str, object], str]] = {
    "as proven": ({}, ""),
    "no positions": ({"position_ids": None}, "got no position_ids"),
    "positions that run on": ({"position_ids": torch.arange(27)[None]}, "position_ids that run on"),
    "a mask of ones": ({"attention_mask": torch.ones(1, 27, dtype=torch.long)}, r"attention_mask of shape \[1, 27\]"),
    "a cache": ({"use_cache": True}, "got a cache"),
    "a cache by default": ({"use_cache": None}, "got a cache"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("training", [True, False])
@torch.no_grad()
def test_a_packed_forward_that_mixes_by_its_call_is_refused(call: str, training: bool) -> None:
    """What keeps sequences apart is the call: without the refusal each of these gives other outputs, silently."""
    family = next(each for each in FAMILIES if each.name == "qwen3_moe")
    model, _, spec = tiny(family)
    batch = collate(records_of(spec, (9, 5, 13)), spec, layout="packed")
    change, said = CALLS[call]
    inputs = {name: value for name, value in {**batch.model_inputs(), **change}.items() if value is not None}
    model.train(training)
    with gates.attach(model, spec, probe=probe_of(family)) as handle:
        if said:
            with pytest.raises(ReplayError, match=said) as caught, handle.replaying(batch):
                model(**inputs)
            assert ErrorKind.PACKING == caught.value.kind
        else:
            with handle.replaying(batch):
                model(**inputs)
    mixed = (model(**batch.model_inputs()).logits - model(**inputs).logits).abs().max() > 1e-3
    assert bool(said) == bool(mixed)


def test_a_cache_that_checkpointing_switches_off_is_none() -> None:
    """Transformers does so in training; a loop that leaves ``use_cache`` out is right there."""
    family = next(each for each in FAMILIES if each.name == "qwen3_moe")
    model, _, spec = tiny(family)
    batch = collate(records_of(spec, (9, 5)), spec, layout="packed")
    inputs = {name: value for name, value in batch.model_inputs().items() if name != "use_cache"}
    model.train()
    model.activation_checkpointing_enable()
    with gates.attach(model, spec, probe=probe_of(family)) as handle, handle.replaying(batch):
        output = model(**inputs).logits
        assert torch.equal(output, model(**batch.model_inputs()).logits)
