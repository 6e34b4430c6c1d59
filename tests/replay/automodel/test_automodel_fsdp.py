"""Replay on Automodel models that FSDP2 shards over two gloo ranks, which probe together: the gradients of one process.

Each rank has its own microbatch. FSDP averages gradients over ranks, so they are half of the sum in one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from nemo_automodel.components.moe.parallelizer import apply_ac
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from routeplane.replay import automodel as gates
from routeplane.testing.contracts.replay_contract import RowsBatch, unlike_rows
from tests.replay.automodel.tiny_automodel import FAMILIES, HIDDEN, NUM_ROWS, Family, tokens_of

pytestmark = [pytest.mark.automodel, pytest.mark.slow]

RANKS = 2
BY_NAME = {family.name: family for family in FAMILIES}


def batch_of(family: Family, rank: int) -> RowsBatch:
    """A rank's rows, far from what gates choose."""
    return unlike_rows(family.spec, NUM_ROWS, seed=10 + rank, missing=0.2)


def loss_of(model: Any, rank: int) -> torch.Tensor:
    """One rank's microbatch."""
    output: Any = model(tokens_of(rank))
    found: torch.Tensor = getattr(output, "logits", output)
    return found.square().mean()


def expected_of(family: Family) -> dict[str, torch.Tensor]:
    """The mean of the ranks' gradients, in one process and without checkpoints."""
    model = family.build(aux=0.0)
    with gates.attach(model, family.spec) as handle:
        for rank in range(RANKS):
            with handle.replaying(batch_of(family, rank)):
                torch.autograd.backward(loss_of(model, rank))
    return {name: weight.grad / RANKS for name, weight in model.named_parameters() if weight.grad is not None}


def run_rank(rank: int, name: str, folder: str) -> None:
    """Train one step, backward outside of ``replaying``, and keep gradients and report."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    family = BY_NAME[name]
    model = family.build(aux=0.0)
    apply_ac(model, hidden_size=HIDDEN, num_experts=family.spec.num_experts, ignore_router=False)
    layers: Any = model.model.layers
    for layer in layers.children():
        fully_shard(layer)
    fully_shard(model)
    with gates.attach(model, family.spec) as handle:
        with handle.replaying(batch_of(family, rank)):
            loss = loss_of(model, rank)
        torch.autograd.backward(loss)
    gradients = {}
    for key, weight in model.named_parameters():
        if weight.grad is not None:
            assert isinstance(weight.grad, DTensor)
            gradients[key.replace("_checkpoint_wrapped_module.", "")] = weight.grad.full_tensor()
    torch.save((gradients, str(handle.report())), f"{folder}/rank-{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_gradients_of_two_ranks_are_those_of_one_process(name: str, tmp_path: Path) -> None:
    """Under checkpointing, each rank with rows of its own, backward after ``replaying`` was left."""
    mp.spawn(run_rank, args=(name, str(tmp_path)), nprocs=RANKS)  # type: ignore[attr-defined, no-untyped-call]
    expected = expected_of(BY_NAME[name])
    for rank in range(RANKS):
        gradients, report = torch.load(tmp_path / f"rank-{rank}.pt")
        assert expected.keys() == gradients.keys()
        for key, gradient in expected.items():
            torch.testing.assert_close(gradients[key], gradient, rtol=1e-5, atol=1e-7)
        assert "replayed 1 microbatches through 2 gates" in report
