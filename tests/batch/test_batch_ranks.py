"""Two ranks over gloo: each batches its own shard of one stream and feeds it to gates; both together are the batch.

The processes find each other by a file and talk over the loopback interface. The experts of a tiny OLMoE stand for a
context-parallel forward: they are the part of a model that sees each row alone, and they have its gates.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from routeplane import Capture, RouteRecord, RouteSpec, Span, new_stream
from routeplane.batch import BatchOptions, collate

ROOT = Path(__file__).parents[2]
WORLD = 2
SPEC = RouteSpec(num_experts=8, top_k=2, layer_ids=(0, 1))
#: packed to a multiple of 4, three sequences fill a microbatch of 44 rows and two the next
LENGTHS = (7, 11, 15, 19, 23)

#: What each rank runs, and this process alone: ``rows`` of a batch through the experts, forced and live.
EXPERTS = """
import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

from routeplane.replay import transformers as gates

torch.manual_seed(0)
config = OlmoeConfig(
    vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, initializer_range=0.3,
    bos_token_id=None, eos_token_id=None, pad_token_id=0,
)
model = OlmoeForCausalLM(config).eval()

def through_experts(batch):
    with gates.attach(model, batch.spec) as replay, torch.no_grad(), replay.replaying(batch):
        hidden = model.model.embed_tokens(batch.token_ids)[None]
        for layer in model.model.layers:
            hidden = hidden + layer.mlp(hidden)
    return hidden[0], replay.report().scalars()["routeplane/replay_rows_forced"]
"""

PROGRAM = (
    EXPERTS
    + """
import sys
from datetime import timedelta

import torch.distributed as dist

from routeplane import open_stream
from routeplane.batch import microbatches
from routeplane.batch.slots import Shard

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=60)
)

def gather(values):
    parts = [torch.empty_like(values) for _ in range(2)]
    dist.all_gather(parts, values)
    return torch.cat(parts)

answer = []
with open_stream(f"{folder}/routes.arrows") as reader:
    for batch in microbatches(reader, tokens=44, shard=Shard(context_parallel=(rank, 2))):
        hidden, forced = through_experts(batch)
        counts = torch.tensor([batch.unexplained_missing, int(forced)])
        dist.all_reduce(counts)
        answer.append(
            {
                "rows": gather(torch.from_numpy(batch.plan.record_N * 100 + batch.plan.token_N)),
                "routes": gather(batch.routes.int()),  # gloo carries no int16
                "hidden": gather(hidden),
                "counts": counts,
                "own": batch.num_rows,
            }
        )
if rank == 0:
    torch.save(answer, f"{folder}/answer.pt")
dist.barrier()
dist.destroy_process_group()
"""
)


def make(sample: int, num_tokens: int) -> RouteRecord:
    """A record with rows drawn at random, of which token 1 was lost."""
    rng = np.random.default_rng(sample)
    routes_SLK = np.stack([[rng.permutation(8)[:2] for _ in SPEC.layer_ids] for _ in range(num_tokens)])
    routes_SLK[1] = -1
    states = [("captured", 0, 1), ("lost", 1, 2), ("captured", 2, num_tokens)]
    captures: Any = [
        Capture(start=a, stop=b, call="call-0", weights_version=None if state == "lost" else 1, state=state)  # type: ignore[arg-type]
        for state, a, b in states
    ]
    return RouteRecord(
        sample_id=f"sample-{sample}",
        token_ids=rng.integers(1, 64, num_tokens),
        routes=routes_SLK,
        spans=(Span(start=0, stop=num_tokens, kind="prompt", role="user", call="call-0", weights_version=None),),
        captures=captures,
        spec=SPEC,
    )


def run_ranks(folder: Path) -> list[dict[str, Any]]:
    """What both ranks gathered, microbatch after microbatch."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(folder)],
            stderr=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"},
        )
        for rank in range(WORLD)
    ]
    try:
        errors = [child.communicate(timeout=300)[1] for child in children]
    finally:
        for child in children:
            child.kill()  # does nothing to one that has ended
    assert [0] * WORLD == [child.returncode for child in children], errors
    answer: list[dict[str, Any]] = torch.load(folder / "answer.pt")
    return answer


def by_name(names: list[int], values_T: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Rows that are tokens, in the order of their names: a row held twice, or never, shows."""
    order = sorted((name, row) for row, name in enumerate(names) if name >= 0)
    return [name for name, _ in order], values_T[[row for _, row in order]]


def test_two_ranks_hold_the_batch_between_them(tmp_path: Path) -> None:
    """Every token's row arrives once, forces its gates on the rank that has it, and gives what one process computes."""
    records = [make(sample, length) for sample, length in enumerate(LENGTHS)]
    with new_stream(tmp_path / "routes.arrows", SPEC) as sink:
        for record in records:
            sink.write(record)
    alone: dict[str, Any] = {}
    exec(EXPERTS, alone)

    answer = run_ranks(tmp_path)

    assert 2 == len(answer)
    for part, (start, stop) in zip(answer, pairwise((0, 3, 5)), strict=True):
        whole = collate(records[start:stop], SPEC, layout="packed", options=BatchOptions(pad_to_multiple_of=4))
        hidden, forced = alone["through_experts"](whole)
        names = (whole.plan.record_N * 100 + whole.plan.token_N).tolist()
        found = part["rows"].tolist()

        assert by_name(names, whole.routes)[0] == by_name(found, part["routes"])[0]
        assert torch.equal(by_name(names, whole.routes.int())[1], by_name(found, part["routes"])[1])
        torch.testing.assert_close(by_name(found, part["hidden"])[1], by_name(names, hidden)[1], rtol=0, atol=1e-6)
        assert [stop - start, int(forced)] == part["counts"].tolist()
        assert whole.num_rows == WORLD * part["own"] == len(found)


def test_the_comparison_would_see_rows_of_others() -> None:
    """Rows moved by one token change what the experts give, far beyond the tolerance."""
    alone: dict[str, Any] = {}
    exec(EXPERTS, alone)
    batch = collate([make(0, 16)], SPEC, layout="packed")
    right = alone["through_experts"](batch)[0]
    batch.routes.copy_(batch.routes.roll(1, 0))

    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(alone["through_experts"](batch)[0], right, rtol=0, atol=1e-2)
