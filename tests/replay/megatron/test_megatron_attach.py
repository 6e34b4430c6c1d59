"""Attaching to Megatron-Core models: which routers are found, what is refused, what stays as it was.

Axes: B sequences, S positions, N token rows, K top-k slots.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from torch import nn

from routeplane.batch import RouteBatch, collate
from routeplane.errors import ErrorKind, ReplayError, UsageError
from routeplane.replay import megatron as gates
from routeplane.replay.handle import ReplayHandle
from routeplane.testing.builders import watermarked_record, watermarked_spec
from routeplane.testing.contracts.replay_contract import unlike_rows
from tests.replay.megatron.tiny_megatron import (
    EXPERTS,
    FAMILIES,
    HIDDEN,
    Inputs,
    TokenBatch,
    build,
    config_of,
    inputs_of,
    recorded,
)
from tests.replay.reads import reads_of

pytestmark = pytest.mark.megatron

PLAIN = FAMILIES[0]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def batch_of(seed: int, *, missing: float = 0.2) -> TokenBatch:
    """Rows for the tokens of a seed."""
    rows = unlike_rows(PLAIN.spec, 12, seed=100 + seed, missing=missing)
    return TokenBatch(rows=rows, token_ids=inputs_of(seed).tokens)


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    """Of the tokens of a seed."""
    loss: torch.Tensor = model(*inputs_of(seed).arguments()).square().mean()
    return loss


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every gradient."""
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


# ---- which routers --------------------------------------------------------------------------------------------------


def test_routers_of_multi_token_prediction_are_left_out() -> None:
    """Megatron's own list has them, with the number of a layer that does not exist."""
    options = {"mtp_num_layers": 1, "moe_enable_routing_replay": True}
    config = config_of(options)
    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    listed = len(RouterReplay.global_router_replay_instances)
    model = build(options, mtp_block_spec=get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False))
    assert 3 == len(RouterReplay.global_router_replay_instances) - listed
    assert [0, 1] == [gate.layer_id for gate, _ in gates.find_gates(model)]
    gates.attach(model, PLAIN.spec).detach()


def test_wrapped_chunks_are_walked() -> None:
    """DDP and Float16Module put the model one step down; gates are named by where they stand."""
    wrapped = nn.ModuleDict({"module": build(PLAIN.options)})
    assert ["module.decoder.layers.0.mlp.router", "module.decoder.layers.1.mlp.router"] == [
        gate.name for gate, _ in gates.find_gates(wrapped)
    ]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0}, "sinkhorn"),
        ({"moe_router_load_balancing_type": ["sinkhorn"], "moe_aux_loss_coeff": [0.0]}, "sinkhorn"),
        ({"moe_router_fusion": True}, "moe_router_fusion"),
        ({"moe_router_force_load_balancing": True}, "random"),
        ({"moe_expert_capacity_factor": 1.0}, "drops forced experts"),
        ({"overlap_moe_expert_parallel_comm": True}, "two microbatches in one forward"),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": []}, "whole layers"),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn,moe_router"}, "CUDA graphs of moe_router"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_configurations_that_bypass_the_selection_are_refused(options: Mapping[str, Any], what: str) -> None:
    """Before loading by ``check_setup``, and by ``attach``, which names the router."""
    with pytest.raises(UsageError, match=what) as before:
        gates.check_setup({**PLAIN.options, **options})
    assert ErrorKind.ARGUMENT == before.value.kind
    model = build(PLAIN.options)
    for name, value in options.items():
        setattr(model.config, name, value)
    with pytest.raises(ReplayError, match=rf"{what}.*decoder\.layers\.0\.mlp\.router") as caught:
        gates.attach(model, PLAIN.spec)
    assert ErrorKind.NO_SEAM == caught.value.kind


def test_check_setup_lists_every_reason_and_lets_the_rest_pass() -> None:
    """All problems at once; CUDA graphs of attention alone, and recomputation, are fine."""
    gates.check_setup(config_of({**PLAIN.options, **FULL}), engine="sglang")
    gates.check_setup({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"]})
    with pytest.raises(UsageError) as caught:
        gates.check_setup({"moe_router_fusion": True, "moe_router_force_load_balancing": True}, engine="megatron")
    assert 3 == len(caught.value.problems)


def _without_asking(self: Any, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
    """A selection of its own."""
    asked, self.router_replay = self.router_replay, None
    try:
        return TopKRouter.routing(self, logits, padding_mask)
    finally:
        self.router_replay = asked


def _shifted(self: Any, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
    """Asks, and uses the expert beside."""
    weights_NE, map_NE = TopKRouter.routing(self, logits, padding_mask)
    return weights_NE.roll(1, 1), map_NE.roll(1, 1)


def _detached(self: Any, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
    """Cuts the gradient where ids are not the live ones."""
    weights_NE, map_NE = TopKRouter.routing(self, logits, padding_mask)
    rows = logits.reshape(map_NE.shape)
    live_NE = torch.zeros_like(map_NE).scatter(1, rows.topk(self.topk).indices, value=True)
    return (weights_NE if torch.equal(live_NE, map_NE) else weights_NE.detach()), map_NE


@pytest.mark.parametrize(
    ("routing", "observed"),
    [
        (_without_asking, "got none: it selects in another way"),
        (_shifted, "a choice that is not the forced ids"),
        (_detached, "weights of forced ids that no gradient reaches"),
    ],
    ids=["does not ask", "uses others", "cuts the gradient"],
)
def test_a_router_that_disobeys_is_refused(routing: Callable[..., Any], observed: str) -> None:
    """With what a forward of it alone has shown, and nothing is left behind."""
    model = build(PLAIN.options)
    router = model.decoder.layers[1].mlp.router
    router.__class__ = type("LearnedRouter", (type(router),), {"routing": routing})
    before = {name: id(value) for name, value in vars(router).items()}
    with pytest.raises(ReplayError, match=observed) as caught:
        gates.attach(model, PLAIN.spec)
    assert ErrorKind.NO_SEAM == caught.value.kind
    assert "decoder.layers.1.mlp.router" in str(caught.value)
    assert before == {name: id(value) for name, value in vars(router).items()}


def test_a_router_of_any_class_that_obeys_is_attached_to() -> None:
    """A MoE layer without any router that asks is refused, and so is a model without one."""
    model = build(PLAIN.options)
    router = model.decoder.layers[1].mlp.router
    router.__class__ = type("LearnedRouter", (type(router),), {})
    random = torch.get_rng_state()
    gates.attach(model, PLAIN.spec).detach()
    assert torch.equal(random, torch.get_rng_state())
    assert all(weight.grad is None for weight in model.parameters())
    model.decoder.layers[1].mlp.router = nn.Identity()
    with pytest.raises(ReplayError, match=r"got MoELayer @ decoder\.layers\.1\.mlp"):
        gates.attach(model, PLAIN.spec)
    with pytest.raises(ReplayError, match="got Linear without one"):
        gates.attach(nn.Linear(2, 2), PLAIN.spec)


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_packed_rows_are_in_megatrons_order_already() -> None:
    """``[T]`` tokens go in as one row of the model, ``[T, 1, H]`` inside."""
    model = build(PLAIN.options)
    batch = TokenBatch(rows=batch_of(1).rows, token_ids=inputs_of(1).tokens.reshape(-1))
    with gates.attach(model, PLAIN.spec) as handle, recorded(model) as seen, handle.replaying(batch):
        model(*inputs_of(1, count=1, width=12).arguments())
    for layer, (firing,) in seen.items():
        expected = batch.layer(layer).long()
        forced_N = expected[:, 0] >= 0
        assert expected[forced_N].sort().values.tolist() == firing.ids_NK[forced_N].sort().values.tolist()


def test_packed_rows_of_a_padded_forward_are_refused() -> None:
    """``[T]`` rows in the order ``b*S + s`` are not those of hidden states ``[S, B, H]``, though the tokens agree."""
    model = build(PLAIN.options)
    batch = TokenBatch(rows=batch_of(1).rows, token_ids=inputs_of(1).tokens.reshape(-1))
    with gates.attach(model, PLAIN.spec) as handle, pytest.raises(ReplayError, match=r"\[T, 1, H\]") as caught:
        with handle.replaying(batch):
            loss_of(model, 1)
    assert ErrorKind.ROW_COUNT == caught.value.kind


LENGTHS = (9, 12, 8)


def records_batch(layout: Any) -> RouteBatch:
    """Three records; rows are drawn, one for each token but the last."""
    generator = torch.Generator().manual_seed(7)
    records = []
    for sample, length in enumerate(LENGTHS):
        routes = torch.rand(length, 2, EXPERTS, generator=generator).argsort(-1)[..., : PLAIN.spec.top_k]
        routes[-1] = -1
        wide = watermarked_record(sample, num_tokens=length, spec=watermarked_spec(layers=(0, 1), top_k=2))
        tokens = torch.randint(3, 60, (length,), generator=generator).int().numpy()
        rows = routes.short().numpy()
        records.append(replace(wide, routes=rows, spec=PLAIN.spec, token_ids=tokens, checksum=None))
    return collate(records, PLAIN.spec, layout=layout)


def packed_forward(model: Any, *, apart: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Under a causal mask, or one that hides the sequences before; True is hidden."""

    def forward(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        sequence = (positions[0] == 0).cumsum(0)
        hidden = torch.ones(len(sequence), len(sequence), dtype=torch.bool).triu(1)
        if apart:
            hidden |= sequence[:, None] != sequence[None]
        found: torch.Tensor = model(ids, positions, hidden[None, None])
        return found

    return forward


def test_packed_sequences_that_are_kept_apart_equal_padded_ones() -> None:
    """Under a mask of blocks: the logits of each sequence are those of its own row, in single precision."""
    model = build(PLAIN.options)
    packed, padded = records_batch("packed"), records_batch("padded")
    forward = packed_forward(model, apart=True)
    with gates.attach(model, PLAIN.spec, packed=forward) as handle, torch.no_grad():
        with handle.replaying(packed):
            found = forward(packed.token_ids[None], packed.position_ids[None])
        with handle.replaying(padded):
            expected = model(*Inputs(tokens=padded.token_ids).arguments())
    assert [2 * (sum(LENGTHS) - 3)] * 2 == [gate.forced_rows for gate in handle.report().gates]
    for sequence, (logits, length) in enumerate(zip(torch.split(found[0], list(LENGTHS)), LENGTHS, strict=True)):
        torch.testing.assert_close(logits, expected[sequence, :length], rtol=1e-4, atol=1e-4)


def test_packed_sequences_that_are_mixed_are_refused() -> None:
    """Where the loop's forward is given, before any forward of the batch."""
    model = build(PLAIN.options)
    before = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    with gates.attach(model, PLAIN.spec, packed=packed_forward(model, apart=False)) as handle:
        for _ in range(2):
            with pytest.raises(ReplayError, match="with the tokens of the sequence before") as caught:
                with handle.replaying(records_batch("packed")):
                    pytest.fail("the body must not run")
            assert ErrorKind.PACKING == caught.value.kind
        with handle.replaying(records_batch("padded")):
            model(*Inputs(tokens=records_batch("padded").token_ids).arguments())
    after = model.state_dict()
    assert [] == [name for name, value in before.items() if not torch.equal(value, after[name])]
    assert model.training


def test_megatrons_packed_attention_does_not_run_here() -> None:
    """Attention that knows sequences is Transformer Engine's; what a CPU has refuses ``PackedSeqParams`` by itself."""
    model = build(PLAIN.options)

    def forward(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        begins = (positions[0] == 0).nonzero()[:, 0].int()
        edges = torch.cat([begins, torch.tensor([positions.numel()], dtype=torch.int32)])
        longest = int(edges.diff().max())
        sequences = PackedSeqParams(
            qkv_format="thd",
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), edges),
            **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), longest),
        )
        found: torch.Tensor = model(ids, positions, None, packed_seq_params=sequences)
        return found

    with gates.attach(model, PLAIN.spec, packed=forward) as handle:
        with pytest.raises(ReplayError, match="a packed forward that raises AssertionError: Packed sequence"):
            with handle.replaying(records_batch("packed")):
                pytest.fail("the body must not run")


def test_a_padded_batch_is_turned() -> None:
    """Row ``b*S + s`` of a RouteBatch stands at ``s*B + b``; padded or packed, without an option."""
    spec = watermarked_spec(layers=(0, 1), top_k=3)
    records = [watermarked_record(sample, num_tokens=length, spec=spec) for sample, length in enumerate((5, 3, 4))]
    order = gates.row_order(collate(records, spec, layout="padded"))
    assert order is not None
    assert [b * 5 + s for s in range(5) for b in range(3)] == order.tolist()
    assert gates.row_order(collate(records, spec, layout="packed")) is None


def test_rows_that_are_not_those_of_the_tokens_are_refused() -> None:
    """Megatron itself takes eight rows for sixteen tokens, and half of the tokens get no expert."""
    model = build(PLAIN.options)
    batch = TokenBatch(rows=batch_of(1).rows, token_ids=inputs_of(1, width=4).tokens)
    with (
        gates.attach(model, PLAIN.spec) as handle,
        pytest.raises(ReplayError, match=r"each of 8 tokens.*got 12") as caught,
    ):
        with handle.replaying(batch):
            pytest.fail("the body must not run")
    assert ErrorKind.ROW_COUNT == caught.value.kind


# ---- Megatron's own replay ------------------------------------------------------------------------------------------


def test_megatrons_own_replay_works_before_during_and_after() -> None:
    """Its object answers where the handle is not replaying, and comes back; its list is neither read nor grown."""
    listed = list(RouterReplay.global_router_replay_instances)
    model = build({**PLAIN.options, "moe_enable_routing_replay": True})
    own: list[Any] = [router.router_replay for _, router in gates.find_gates(model)]
    assert [*listed, *own] == RouterReplay.global_router_replay_instances
    with gates.attach(model, PLAIN.spec) as handle, torch.no_grad():
        for router in own:
            router.set_router_replay_action(RouterReplayAction.RECORD)
        live = loss_of(model, 1)
        with handle.replaying(batch_of(1, missing=0.0)):
            assert not torch.equal(live, loss_of(model, 1))
        for router in own:
            router.set_target_indices(router.get_recorded_indices())
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        assert torch.equal(live, loss_of(model, 1))
    assert own == [router.router_replay for _, router in gates.find_gates(model)]
    assert [*listed, *own] == RouterReplay.global_router_replay_instances
    assert [1, 1] == [len(router.replay_backward_list) for router in own]


# ---- recomputation --------------------------------------------------------------------------------------------------


def steps(model: nn.Module, handle: ReplayHandle, *, live_first: bool, together: bool) -> dict[str, torch.Tensor]:
    """One live and one replayed microbatch, in either order; backward after each, or of the sum."""
    losses = []
    for seed in (0, 1) if live_first else (1, 0):
        if seed:
            with handle.replaying(batch_of(seed)):
                losses.append(loss_of(model, seed))
        else:
            losses.append(loss_of(model, seed))
        if not together:
            torch.autograd.backward(losses.pop())
    if together:
        torch.autograd.backward(torch.stack(losses).sum())
    return gradients_of(model)


@pytest.mark.parametrize("live_first", [True, False], ids=["live first", "live second"])
@pytest.mark.parametrize(
    "options",
    [FULL, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}],
    ids=["full", "selective"],
)
def test_a_live_microbatch_in_flight_stays_live(options: Mapping[str, Any], live_first: bool) -> None:
    """Its recomputation is live and the other's is replayed, whichever comes first: told by what goes in."""
    model, reference = build({**PLAIN.options, **options}), build(PLAIN.options)
    with gates.attach(reference, PLAIN.spec) as handle:
        expected = steps(reference, handle, live_first=live_first, together=False)
    with gates.attach(model, PLAIN.spec) as handle:
        found = steps(model, handle, live_first=live_first, together=True)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


def test_a_retained_graph_recomputes_twice() -> None:
    """A second backward pass over the same graph repeats the same forward: its gradient is twice the first."""
    model = build({**PLAIN.options, **FULL})
    with gates.attach(model, PLAIN.spec) as handle:
        with handle.replaying(batch_of(1)):
            loss = loss_of(model, 1)
        with handle.replaying(batch_of(2)):
            loss_of(model, 2)
        torch.autograd.backward(loss, retain_graph=True)
        once = gradients_of(model)
        torch.autograd.backward(loss)
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(gradient, 2 * once[name], rtol=1e-5, atol=1e-7)


def test_a_recomputation_after_detach_is_refused() -> None:
    """It would run live in silence; the guards that say so go with the graph."""
    model = build({**PLAIN.options, **FULL})
    with gates.attach(model, PLAIN.spec) as handle, handle.replaying(batch_of(1)):
        loss = loss_of(model, 1)
    with pytest.raises(ReplayError, match="stay attached until backward") as caught:
        torch.autograd.backward(loss)
    assert ErrorKind.DETACHED == caught.value.kind
    del loss, caught
    gc.collect()
    with torch.no_grad():
        # what Megatron's dispatchers keep of a forward goes with the next one
        loss_of(model, 1)
        loss_of(model, 1)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_an_interrupted_recomputation_leaves_nothing_open() -> None:
    """A person stops it inside a layer, where no hook runs: the next microbatch is replayed, the next live one live."""
    model = build({**PLAIN.options, **FULL})
    with torch.no_grad():
        live = loss_of(model, 1)

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    with gates.attach(model, PLAIN.spec) as handle:
        with handle.replaying(batch_of(1)):
            loss = loss_of(model, 1)
        hook = model.decoder.layers[1].mlp.experts.register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            torch.autograd.backward(loss)
        hook.remove()
        with torch.no_grad():
            assert torch.equal(live, loss_of(model, 1))
        with handle.replaying(batch_of(1)):
            again = loss_of(model, 1)
        assert torch.equal(loss, again)
        torch.autograd.backward(again)
    assert [2, 2] == [gate.consumed for gate in handle.report().gates]


def test_a_router_called_by_itself_is_refused_like_any_other() -> None:
    """One call more than the other routers is an error on leaving, and names them."""
    model = build(PLAIN.options)
    with gates.attach(model, PLAIN.spec) as handle:
        replaying = handle.replaying(batch_of(1))
        replaying.__enter__()
        loss_of(model, 1)
        model.decoder.layers[0].mlp.router(torch.zeros(12, 1, HIDDEN))
        with pytest.raises(ReplayError, match=r"layers\.1\.mlp\.router") as caught:
            replaying.__exit__(None, None, None)
    assert ErrorKind.GATE_FIRED == caught.value.kind


# Megatron's own call, under torch 2.13
@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor:FutureWarning")
def test_a_region_whose_input_was_exchanged_is_told_inside_its_replaying_alone() -> None:
    """``distribute_saved_activations`` puts other storage in its place: elsewhere the recomputation is refused."""
    model, reference = build({**PLAIN.options, **FULL}), build(PLAIN.options)
    with gates.attach(reference, PLAIN.spec) as handle, handle.replaying(batch_of(1)):
        torch.autograd.backward(loss_of(reference, 1))
    model.config.distribute_saved_activations = True
    with gates.attach(model, PLAIN.spec) as handle:
        with handle.replaying(batch_of(1)):
            torch.autograd.backward(loss_of(model, 1))
        expected = gradients_of(reference)
        for name, gradient in gradients_of(model).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)
        with handle.replaying(batch_of(1)):
            loss = loss_of(model, 1)
        with pytest.raises(ReplayError, match=r"whose forward is unknown.*mlp\.router") as caught:
            torch.autograd.backward(loss)
    assert ErrorKind.UNBOUND_RECOMPUTE == caught.value.kind


# ---- waiting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aux", ["live", "forced"])
@pytest.mark.parametrize("options", [{}, FULL], ids=["plain", "recomputed"])
def test_a_replayed_step_reads_no_more_than_a_live_one(options: Mapping[str, Any], aux: Any) -> None:
    """Entering, forward, recomputation, backward, leaving: no value is brought to the host that a live step leaves."""
    model = build({**PLAIN.options, **options})
    batch = batch_of(1)

    def step() -> None:
        torch.autograd.backward(loss_of(model, 1))

    live = reads_of(step)
    with gates.attach(model, PLAIN.spec, aux=aux) as handle:

        def replayed() -> None:
            with handle.replaying(batch):
                step()

        found = reads_of(replayed)
    found.pop("aten.equal.default", None)  # the tokens, which lie on the host here
    # the rows of a batch of another class are checked on entering, once a gate
    checked = Counter({"cpu": len(PLAIN.spec.layer_ids), "numpy": len(PLAIN.spec.layer_ids)})
    assert live + checked == found
