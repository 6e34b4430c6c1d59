"""Verdicts that ranks share: bad data on one rank is the same answer on all, and no rank waits for one that left."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from routeplane import Capture, ErrorKind, new_stream
from routeplane.batch import admit_step, microbatches
from routeplane.errors import DataError, UsageError
from routeplane.testing.builders import watermarked_record, watermarked_spec

ROOT = Path(__file__).parents[2]
SPEC = watermarked_spec(layers=(1, 2), top_k=2)

#: Each rank reads its own stream, agrees with the other, and enters a collective for each microbatch that is run.
PROGRAM = """
import json, sys
from datetime import timedelta

import torch
import torch.distributed as dist

from routeplane import open_stream
from routeplane.batch import admit_step, microbatches
from routeplane.testing.builders import watermarked_spec

rank, folder = int(sys.argv[1]), sys.argv[2]
# a rank that waits for one that left is an error after five seconds
dist.init_process_group(
    "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=5)
)

def highest(value):
    found = torch.tensor(value)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found)

def read():
    with open_stream(f"{folder}/{rank}.arrows") as reader:
        return list(microbatches(reader, tokens=64))

spec = watermarked_spec(layers=(1, 2), top_k=2)
answers = []
for fallback in ("skip", "live"):
    verdict = admit_step(read, spec, reduce=highest, max_missing=0.05, fallback=fallback)
    for batch in verdict.batches:
        dist.all_reduce(torch.ones(1))
    answers.append([verdict.action, verdict.kind, len(verdict.batches), verdict.error is not None])
print(json.dumps(answers))
dist.barrier()
dist.destroy_process_group()
"""


def write(folder: Path, fault: str) -> None:
    """A stream for each rank; that of rank 1 with the fault."""
    for rank in range(2):
        bad = fault if rank == 1 else ""
        spec = watermarked_spec(layers=(1, 3), top_k=2) if bad == "spec" else SPEC
        with new_stream(str(folder / f"{rank}.arrows"), spec) as sink:
            for sample in range(6 if bad == "short" else 12):
                record = watermarked_record(sample, num_tokens=20, spec=spec)
                if bad == "missing" and sample == 3:
                    routes = record.routes.copy()
                    routes[2:17] = -1
                    kept: dict[str, Any] = {"call": "call-0", "weights_version": None}
                    record = replace(
                        record,
                        routes=routes,
                        captures=(
                            Capture(start=0, stop=2, state="captured", **kept),
                            Capture(start=2, stop=17, state="lost", **kept),
                            Capture(start=17, stop=19, state="captured", **kept),
                            Capture(start=19, stop=20, state="not_fed", **kept),
                        ),
                        checksum=None,
                    )
                sink.write(record)
    if fault == "corrupt":
        path = folder / "1.arrows"
        data = bytearray(path.read_bytes())
        at = data.find(watermarked_record(6, num_tokens=20, spec=SPEC).routes[3:5].tobytes())
        if at < 0:  # narrow
            at = data.find(watermarked_record(6, num_tokens=20, spec=SPEC).routes[3:5].astype("u1").tobytes())
        data[at + 2] ^= 1
        path.write_bytes(bytes(data))


#: What both ranks do without and with a fallback to live routing, and the kind of error that they know of.
VERDICTS = {
    "clean": ("force", "force", None),
    # a stream that cannot be read gives no batches, which no rank could run live
    "corrupt": ("skip", "skip", "any"),
    "missing": ("skip", "live", "routes_missing"),
    "short": ("skip", "skip", None),
    "spec": ("skip", "live", "spec_mismatch"),
}


@pytest.mark.parametrize("fault", VERDICTS)
def test_two_ranks_come_to_one_verdict(fault: str, tmp_path: Path) -> None:
    """Corrupt, missing, short or of another spec on rank 1: both ranks do the same, and both leave every collective.

    A rank that waited for another for more than five seconds would end with an error of its process group.
    """
    write(tmp_path, fault)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    answers = [child.communicate(timeout=120) for child in children]

    assert [0, 0] == [child.returncode for child in children], answers
    *actions, kind = VERDICTS[fault]
    for action, first, second in zip(actions, *(json.loads(out) for out, _ in answers), strict=True):
        assert first[:3] == second[:3]
        assert action == first[0]
        assert (first[1] is not None) if kind == "any" else (kind == first[1])
        assert (action == "skip") == (first[2] == 0)
        # the rank that met the error has it, the other one has the kind alone
        assert [False, fault not in ("clean", "short")] == [first[3], second[3]]


def test_a_trainer_that_can_run_live_does() -> None:
    """Batches that are there, of which too many rows are missing on one rank: live on both."""
    records = [watermarked_record(sample, num_tokens=6, spec=SPEC) for sample in range(4)]
    batches = list(microbatches(records, tokens=12, spec=SPEC))
    other = watermarked_spec(layers=(1, 3), top_k=2)

    for fallback, action in (("live", "live"), ("skip", "skip")):
        verdict = admit_step(batches, other, reduce=int, fallback=fallback)  # type: ignore[arg-type]
        assert (action, ErrorKind.SPEC_MISMATCH) == (verdict.action, verdict.kind)
        assert (len(batches) if action == "live" else 0) == len(verdict.batches)


def test_a_bug_passes_through_after_the_others_were_told() -> None:
    """An error that is not about data is raised, and this rank has reduced as often as the others."""
    told: list[int] = []

    def reduce(value: int) -> int:
        told.append(value)
        return value

    def broken() -> list[Any]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        admit_step(broken, SPEC, reduce=reduce)
    assert 4 == len(told)
    assert 2 == told[0]

    told.clear()
    admit_step([], SPEC, reduce=reduce)
    assert 4 == len(told)
    with pytest.raises(UsageError, match="fallback"):
        admit_step([], SPEC, reduce=reduce, fallback="force")  # type: ignore[arg-type]


def test_an_error_of_this_rank_is_in_the_verdict() -> None:
    """What was met is there to be logged, with its samples."""

    def refuse() -> list[Any]:
        raise DataError("expected legal rows, got others", kind=ErrorKind.DUPLICATE_ID)

    verdict = admit_step(refuse, SPEC, reduce=int)
    assert ("skip", ErrorKind.DUPLICATE_ID) == (verdict.action, verdict.kind)
    assert isinstance(verdict.error, DataError)
