"""Replay on a model that FSDP2 shards over two gloo ranks: the gradients of one process.

Each rank has its own microbatch. FSDP averages gradients over ranks, so they are half of the sum in one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from routeplane.replay import transformers as gates
from routeplane.testing.contracts.replay_contract import feature
from tests.replay.plain_batch import PlainBatch, random_routes
from tests.replay.tiny_models import BY_NAME, MAIN_FAMILIES, NUM_ROWS, Family, checkpoint_layers, token_ids

pytestmark = pytest.mark.slow

RANKS = 2


def batch_of(family: Family, rank: int) -> PlainBatch:
    """A rank's rows, far from what gates choose."""
    return random_routes(family.spec, NUM_ROWS, seed=10 + rank, missing=0.2)


def backward(model: Any, rank: int) -> None:
    """One rank's microbatch."""
    torch.autograd.backward(model(input_ids=token_ids(rank)).logits.square().mean())


def expected_of(family: Family) -> dict[str, torch.Tensor]:
    """The mean of the ranks' gradients, in one process and without checkpoints."""
    model = family.build()
    with gates.attach(model, family.spec) as handle:
        for rank in range(RANKS):
            with handle.replaying(batch_of(family, rank)):
                backward(model, rank)
    return {name: weight.grad / RANKS for name, weight in model.named_parameters() if weight.grad is not None}


def run_rank(rank: int, name: str, folder: str) -> None:
    """Train one step, backward outside of ``replaying``, and keep gradients and report."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    family = BY_NAME[name]
    model = family.build()
    checkpoint_layers(model, reentrant=False)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with gates.attach(model, family.spec) as handle:
        with handle.replaying(batch_of(family, rank)):
            loss = model(input_ids=token_ids(rank)).logits.square().mean()
        torch.autograd.backward(loss)
    gradients = {}
    for key, weight in model.named_parameters():
        if weight.grad is not None:
            assert isinstance(weight.grad, DTensor)
            gradients[key] = weight.grad.full_tensor()
    torch.save((gradients, str(handle.report())), f"{folder}/rank-{rank}.pt")
    dist.destroy_process_group()


@feature("FSDP2")
@pytest.mark.parametrize("family", MAIN_FAMILIES, ids=lambda family: family.name)
def test_gradients_of_two_ranks_are_those_of_one_process(family: Family, tmp_path: Path) -> None:
    """Under checkpointing, each rank with rows of its own, backward after ``replaying`` was left."""
    mp.spawn(run_rank, args=(family.name, str(tmp_path)), nprocs=RANKS)  # type: ignore[attr-defined, no-untyped-call]
    expected = expected_of(family)
    for rank in range(RANKS):
        gradients, report = torch.load(tmp_path / f"rank-{rank}.pt")
        assert expected.keys() == gradients.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-7)
        assert f"replayed 1 microbatches through {len(family.layer_ids)} gates" in report
