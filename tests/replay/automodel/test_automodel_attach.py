"""Attaching to NeMo Automodel models: before they are built, which gates are found, what stays as it was.

Axes: N token rows, E experts, K top-k slots.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from nemo_automodel._transformers.registry import ModelRegistry
from nemo_automodel.components.distributed.context_parallel.sharder import (
    contiguous_local_indices,
    round_robin_local_indices,
)
from nemo_automodel.components.moe.layers import Gate
from nemo_automodel.components.moe.router_replay import RouterReplay
from torch import nn

from routeplane.batch import PlanOptions, collate
from routeplane.batch.plan import TokenPlan
from routeplane.errors import ErrorKind, UsageError
from routeplane.replay import automodel as gates
from routeplane.replay.automodel import ParallelSetup
from routeplane.testing.builders import watermarked_record, watermarked_spec
from routeplane.testing.contracts.replay_contract import feature, unlike_rows
from tests.replay.automodel.tiny_automodel import FAMILIES, NUM_ROWS, Family, gate_modules, recorded, tokens_of
from tests.replay.reads import reads_of

pytestmark = pytest.mark.automodel

QWEN3, GLM4 = FAMILIES[0], FAMILIES[-1]
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def logits_of(model: nn.Module, seed: int = 1) -> torch.Tensor:
    """Of the tokens of a seed."""
    found: torch.Tensor = model(tokens_of(seed)).logits
    return found


# ---- before the model is built ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ({"engine": "trtllm"}, ["engine 'trtllm'"]),
        ({"force_hf": True}, ["force_hf"]),
        ({"architectures": []}, ["without architectures"]),
        ({"architectures": ["Qwen3MoeForCausalLM2"]}, ["does not build itself"]),
        ({"parallel": ParallelSetup(context=2, context_layout="blockdiag")}, ["layout 'blockdiag'"]),
        ({"parallel": ParallelSetup(context=2, packing=True)}, ["'thd' cuts each"]),
        ({"parallel": ParallelSetup(sequence=True)}, ["without tensor parallelism"]),
        ({"graphed_modules": ["moe_router"]}, ["CUDA graph of moe_router"]),
        (
            {"engine": "hf", "force_hf": True, "parallel": ParallelSetup(sequence=True)},
            ["'hf'", "force_hf", "without tensor"],
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_setups_that_cannot_be_replayed_are_refused(options: Mapping[str, Any], reasons: list[str]) -> None:
    """Before anything is loaded, with every reason as a problem."""
    good = {"engine": "vllm", "architectures": ["Qwen3MoeForCausalLM"]}
    with pytest.raises(UsageError) as caught:
        gates.check_setup(**{**good, "registry": ModelRegistry.model_arch_name_to_cls, **options})
    assert ErrorKind.ARGUMENT == caught.value.kind
    assert len(reasons) == len(caught.value.problems)
    for reason, problem in zip(reasons, caught.value.problems, strict=True):
        assert reason in problem.message


@pytest.mark.parametrize(
    "options",
    [
        {"parallel": ParallelSetup()},
        {"parallel": ParallelSetup(packing=True)},
        {"parallel": ParallelSetup(context=4)},
        {"parallel": ParallelSetup(context=4, context_layout="contiguous")},
        {"parallel": ParallelSetup(context=2, context_layout="thd", packing=True)},
        {"parallel": ParallelSetup(tensor=2, sequence=True)},
        {"architectures": ["Glm4MoeForCausalLM"], "graphed_modules": ["attn"]},
    ],
)
def test_parallel_modes_that_align_pass(options: Mapping[str, Any]) -> None:
    """Packing, context and sequence parallelism: NeMo RL's own adapter refuses all three."""
    good = {"engine": "vllm", "architectures": ["Qwen3MoeForCausalLM"]}
    gates.check_setup(**{**good, "registry": ModelRegistry.model_arch_name_to_cls, **options})


# ---- which gates -----------------------------------------------------------------------------------------------------


def test_gates_come_in_layer_order_with_name_layer_and_experts() -> None:
    """A dense first layer is left out, and layers keep their numbers."""
    found = [gate for gate, _ in gates.find_gates(GLM4.build())]
    assert ["model.layers.1.mlp.gate", "model.layers.2.mlp.gate"] == [gate.name for gate in found]
    assert [(1, 8, 3), (2, 8, 3)] == [(gate.layer_id, gate.num_experts, gate.top_k) for gate in found]


def test_gates_of_multi_token_prediction_are_left_out() -> None:
    """Whatever the component is called that begins with mtp."""
    model = QWEN3.build()
    model.mtp_head = nn.ModuleDict({"layers": nn.ModuleList([copy.deepcopy(model.model.layers["1"])])})
    assert [0, 1] == [gate.layer_id for gate, _ in gates.find_gates(model)]


def test_a_model_needs_no_handles() -> None:
    """Built with or without ``enable_routing_replay``, it gives the same answers under the same rows."""
    rows = unlike_rows(QWEN3.spec, NUM_ROWS, seed=5, missing=0.3)
    found = []
    for replay in (True, False):
        model = QWEN3.build(replay=replay)
        with gates.attach(model, QWEN3.spec) as handle, handle.replaying(rows):
            found.append(logits_of(model))
    assert torch.equal(*found)


def test_a_class_made_for_sharding_is_known_by_its_base() -> None:
    """FSDP2 gives each module that it shards a class of its own."""
    model = QWEN3.build()
    gate = model.model.layers["1"].mlp.gate
    gate.__class__ = type("FSDPGate", (type(gate),), {})
    assert isinstance(gate, Gate)
    assert [0, 1] == [found.layer_id for found, _ in gates.find_gates(model)]


# ---- rows ------------------------------------------------------------------------------------------------------------


@each_family
def test_every_way_of_scoring_follows(family: Family) -> None:
    """Ids as recorded, weights by the family's rule from live scores, MISSING rows the live choice."""
    model = family.build()
    rows = unlike_rows(family.spec, NUM_ROWS, seed=5, missing=0.4)
    with gates.attach(model, family.spec) as handle, recorded(model) as seen, handle.replaying(rows):
        logits_of(model)
    assert list(family.layer_ids) == sorted(seen)
    modules = gate_modules(model)
    for layer, (firing,) in seen.items():
        routes_NK = rows.layer(layer).long()
        live_NK = family.choice(firing.logits_NE, modules[layer].e_score_correction_bias)
        expected_NK = torch.where(routes_NK < 0, live_NK, routes_NK)
        assert expected_NK.sort().values.tolist() == firing.ids_NK.sort().values.tolist()
        torch.testing.assert_close(
            firing.weights_NK, family.weights(firing.logits_NE, firing.ids_NK), rtol=1e-4, atol=1e-5
        )


def test_packed_and_padded_batches_follow_alike() -> None:
    """Rows of a RouteBatch stand as the gates see them, ``b*S + s`` or ``t``."""
    spec = watermarked_spec(layers=(0, 1), top_k=3)
    records = [watermarked_record(sample, num_tokens=length, spec=spec) for sample, length in enumerate((6, 6))]
    for layout in ("padded", "packed"):
        batch = collate(records, spec, layout=layout)
        for layer in spec.layer_ids:
            expected = [list(record.routes[token, spec.slot(layer)]) for record in records for token in range(6)]
            assert expected == batch.layer(layer).tolist()


# ---- ranks -----------------------------------------------------------------------------------------------------------


class Mesh:
    """A device mesh of one axis."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._world = rank, world

    def size(self) -> int:
        """How many ranks."""
        return self._world

    def get_local_rank(self) -> int:
        """This one."""
        return self._rank


class TestContextParallel:
    """What a rank takes, against Automodel's own slices."""

    adapter, family = "automodel", QWEN3.name

    @pytest.mark.parametrize("world", [2, 4])
    @pytest.mark.parametrize(
        ("layout", "indices"),
        [("round_robin", round_robin_local_indices), ("contiguous", contiguous_local_indices)],
        ids=["round_robin", "contiguous"],
    )
    @feature("context parallel")
    def test_context_parallel_slices_are_automodels(self, layout: str, indices: Any, world: int) -> None:
        """``rank_shard`` takes of each sequence the positions that Automodel's own function names."""
        plan = TokenPlan.padded([16, 11], options=PlanOptions(seq_len=16))
        for rank in range(world):
            positions = indices(Mesh(rank, world), 16)
            expected = [16 * sequence + int(position) for sequence in range(2) for position in positions]
            shard = gates.rank_shard(context_parallel=(rank, world), context_layout=layout)
            assert expected == plan.shard_rows(shard).tolist()


def test_layouts_that_do_not_align_have_no_shard() -> None:
    """As ``check_setup`` says before."""
    with pytest.raises(UsageError, match="layout 'magi'"):
        gates.rank_shard(context_parallel=(0, 2), context_layout="magi")
    shard = gates.rank_shard(tensor_parallel=(1, 2), sequence_parallel=True, layers=[1])
    assert ((1, 2), (1,)) == (shard.sequence_parallel, shard.layers)


# ---- Automodel's own replay ------------------------------------------------------------------------------------------


def test_the_registry_is_neither_read_nor_written() -> None:
    """With a second model and a copy in the process, where Automodel's own replay counts wrongly or does nothing."""
    model, other = QWEN3.build(), QWEN3.build(seed=1)
    own = [module.router_replay for module in gate_modules(model).values()]
    listed = list(RouterReplay.instances())
    copied = copy.deepcopy(model)
    rows = unlike_rows(QWEN3.spec, NUM_ROWS, seed=5)
    with pytest.raises(ValueError, match="replay tensors but there are"):
        RouterReplay.set_replay_indices([rows.layer(0).long(), rows.layer(1).long()])
    live, other_live = logits_of(copied), logits_of(other)
    with gates.attach(model, QWEN3.spec) as handle, gates.attach(copied, QWEN3.spec) as copied_handle:
        with handle.replaying(rows):
            expected = logits_of(model)
            assert torch.equal(other_live, logits_of(other))
            assert torch.equal(live, logits_of(copied))
        with copied_handle.replaying(rows):
            assert torch.equal(expected, logits_of(copied))
    assert listed == RouterReplay.instances()
    assert own == [module.router_replay for module in gate_modules(model).values()]


def test_automodels_own_recording_works_beside_an_attached_handle() -> None:
    """Outside ``replaying`` the gate's own handle answers, mode and all."""
    model = QWEN3.build()
    own: list[Any] = [module.router_replay for module in gate_modules(model).values()]
    with gates.attach(model, QWEN3.spec) as handle, torch.no_grad():
        with RouterReplay.record(), recorded(model) as seen:
            logits_of(model)
        for layer, replay in enumerate(own):
            assert torch.equal(seen[layer][0].ids_NK, replay.recorded_indices)
        with handle.replaying(unlike_rows(QWEN3.spec, NUM_ROWS, seed=5)):
            logits_of(model)
    assert [1, 1] == [gate.consumed for gate in handle.report().gates]


@pytest.mark.parametrize("experts", ["torch", "torch_mm"])
def test_two_models_in_one_process_train_apart(experts: str) -> None:
    """Each follows its own batch, interleaved, whichever kernel runs the experts."""
    models = [QWEN3.build(seed=seed, experts=experts) for seed in (0, 1)]
    batches = [unlike_rows(QWEN3.spec, NUM_ROWS, seed=seed) for seed in (5, 6)]
    expected = []
    for model, batch in zip(models, batches, strict=True):
        with gates.attach(model, QWEN3.spec) as handle, handle.replaying(batch):
            expected.append(logits_of(model).detach())
    with gates.attach(models[0], QWEN3.spec) as first, gates.attach(models[1], QWEN3.spec) as second:
        with first.replaying(batches[0]), second.replaying(batches[1]):
            found = [logits_of(model).detach() for model in models]
    assert [True, True] == [torch.equal(*pair) for pair in zip(expected, found, strict=True)]


def test_the_loads_that_update_a_bias_are_those_of_the_forced_ids() -> None:
    """What experts really got; only the load-balancing loss has a choice."""
    model = GLM4.build()
    rows = unlike_rows(GLM4.spec, NUM_ROWS, seed=5)
    with gates.attach(model, GLM4.spec) as handle, handle.replaying(rows):
        logits_of(model)
    for layer in GLM4.layer_ids:
        load = model.model.layers[str(layer)].mlp.gate._cumulative_expert_load
        assert torch.bincount(rows.layer(layer).long().reshape(-1), minlength=8).tolist() == load.tolist()


@pytest.mark.parametrize("aux", ["live", "forced"])
def test_a_replayed_step_reads_no_more_than_a_live_one(aux: Any) -> None:
    """Entering, forward, backward, leaving: no value is brought to the host that a live step leaves."""
    model = QWEN3.build(experts="torch_mm")
    rows = unlike_rows(QWEN3.spec, NUM_ROWS, seed=5, missing=0.3)

    def step() -> None:
        torch.autograd.backward(logits_of(model).square().mean())

    live = reads_of(step)
    with gates.attach(model, QWEN3.spec, aux=aux) as handle:

        def replayed() -> None:
            with handle.replaying(rows):
                step()

        found = reads_of(replayed)
    # the rows of a batch of another class are checked on entering, once a gate
    layers = len(QWEN3.spec.layer_ids)
    assert live + Counter({"cpu": layers, "numpy": layers}) == found
