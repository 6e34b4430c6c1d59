"""Writing routes of a real vLLM engine: CPU time per engine step, against the same step with its routes thrown away.

64 concurrent sequences of the tiny model, so that a step is short and the writer's share is large: real engines' steps
take ten times as long. Ways are interleaved, a ratio is taken within its round, and a bar is judged by the upper end of
the 95% interval of the mean ratio. The rounds run in a process of their own (``vllm_rounds``).
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from statistics import fmean, stdev

from benchmarks.measure import Result

# What the Makefile gives engines: one process, so that its CPU time is all of engine, front end and writer.
_SETTINGS = (
    "VLLM_ENABLE_V1_MULTIPROCESSING=0",
    "VLLM_CPU_KVCACHE_SPACE=1",
    "VLLM_CPU_OMP_THREADS_BIND=auto",
    "VLLM_NO_USAGE_STATS=1",
    "HF_HUB_OFFLINE=1",
    "TORCHDYNAMO_DISABLE=1",
    "OMP_NUM_THREADS=1",
)
UNIT = "x CPU time per step"


def main(*, full: bool) -> list[Result]:
    """Both writers, and what vLLM's own capture costs; nothing, and a line, where there is no engine."""
    if find_spec("vllm") is None:
        print("  left out: vllm is not installed", flush=True)
        return []
    command = ["env", *_SETTINGS, sys.executable, "-m", "benchmarks.vllm_rounds", str(60 if full else 30)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"expected rounds from {command}, got:\n{done.stderr[-2000:]}")
    spent: dict[str, list[float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return [
        _ratio("vllm_writer_inside", spent["written inside"], spent["discarded inside"], bar=1.03),
        _ratio("vllm_writer_beside", spent["written beside"], spent["discarded beside"], bar=1.07),
        _ratio("vllm_capture_itself", spent["discarded inside"], spent["capture off"], bar=None),
    ]


def _ratio(name: str, ours: Sequence[float], theirs: Sequence[float], *, bar: float | None) -> Result:
    ratios = [mine / yours for mine, yours in zip(ours, theirs, strict=True)]
    mean, half = fmean(ratios), 1.96 * stdev(ratios) / math.sqrt(len(ratios))
    return Result(
        name=name,
        value=round(mean + half, 4),
        unit=UNIT,
        bar=bar,
        higher_is_better=False,
        peers={
            "mean": round(mean, 4),
            "lower end": round(mean - half, 4),
            "milliseconds": round(1e3 * fmean(ours), 3),
            "rounds": len(ratios),
        },
    )
