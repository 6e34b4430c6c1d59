"""Two processes over gloo: each batches its own shard of the same records, and what they hold together is the batch.

The processes find each other by a file and talk over the loopback interface.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from routeplane import new_stream
from routeplane.batch import collate
from routeplane.testing.builders import watermarked_record, watermarked_spec

ROOT = Path(__file__).parents[1]
WORLD = 2

#: what each rank runs; its arguments are the rank and the folder of the stream, the meeting point and the answer
PROGRAM = """
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from routeplane import open_stream
from routeplane.batch import microbatches
from routeplane.shards import Shard

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
parts = []
with open_stream(f"{folder}/routes.arrows") as reader:
    for batch in microbatches(reader, tokens=64, shard=Shard(context_parallel=(rank, 2))):
        routes = batch.routes.int()  # gloo carries no int16
        gathered = [torch.empty_like(routes) for _ in range(2)]
        dist.all_gather(gathered, routes)
        rows = torch.from_numpy(batch.plan.record_N * 100 + batch.plan.token_N)
        named = [torch.empty_like(rows) for _ in range(2)]
        dist.all_gather(named, rows)
        missing = torch.tensor(batch.unexplained_missing)
        dist.all_reduce(missing)
        parts.append(
            {"routes": torch.cat(gathered), "rows": torch.cat(named), "missing": missing, "own": batch.num_rows}
        )
if rank == 0:
    torch.save(parts, f"{folder}/answer.pt")
dist.barrier()
dist.destroy_process_group()
"""


def by_name(names: list[int], routes_TLK: torch.Tensor) -> list[tuple[int, list[list[int]]]]:
    """Rows that are tokens, with their names, in the order of the names: a row held twice shows twice."""
    rows = zip(names, routes_TLK.tolist(), strict=True)
    return sorted((name, row) for name, row in rows if name >= 0)


def test_two_ranks_hold_the_batch_between_them(tmp_path: Path) -> None:
    """Every token's row arrives once over both ranks, each of which read the stream and made half of the rows."""
    spec = watermarked_spec(layers=(1, 4), top_k=3)
    records = [watermarked_record(sample, num_tokens=7 + 4 * sample, spec=spec, missing=[1]) for sample in range(5)]
    with new_stream(tmp_path / "routes.arrows", spec) as sink:
        for record in records:
            sink.write(record)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path)],
            stderr=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(WORLD)
    ]
    try:
        errors = [child.communicate(timeout=120)[1] for child in children]
    finally:
        for child in children:
            child.kill()  # does nothing to one that has ended

    assert [0] * WORLD == [child.returncode for child in children], errors
    parts = torch.load(tmp_path / "answer.pt")
    at, missing = 0, 0
    for part in parts:
        count = len({row // 100 for row in part["rows"].tolist() if row >= 0})
        group = records[at : at + count]
        whole = collate(group, spec, layout="packed", pad_to_multiple_of=4)
        names = (whole.plan.record_N * 100 + whole.plan.token_N).tolist()

        assert by_name(names, whole.routes) == by_name(part["rows"].tolist(), part["routes"])
        assert whole.num_rows == WORLD * part["own"] == len(part["rows"])
        missing += int(part["missing"])
        at += count
    assert (len(records), len(records)) == (at, missing)
    assert len(parts) > 1
