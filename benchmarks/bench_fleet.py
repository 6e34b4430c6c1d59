"""The demo's fleet, from nothing to the first rollout over HTTP: overlapped, against what cannot be overlapped.

That is the task that takes longest when it runs alone, plus what must run before it (its URL) and after it (the
rollout), all three as measured in the serial start of the same run, which is the peer. Importing an engine keeps a core
busy: on two cores a start that overlaps three such imports is slowed by them, and not by waiting. Timelines are drawn
into ``build/``. The starts run in a process of their own (``fleet_rounds``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import Result

# Ray's own: no report over the network, and no warning about accelerators that are not here.
_SETTINGS = (
    "RAY_USAGE_STATS_ENABLED=0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0",
    "OMP_NUM_THREADS=1",
    "HF_HUB_OFFLINE=1",
)
_PICTURES = Path(__file__).parents[1] / "build"


def main(*, full: bool) -> list[Result]:
    """Wall time over what cannot be overlapped; nothing, and a line, where there is no engine or no Ray."""
    for name in ("vllm", "ray"):
        if find_spec(name) is None:
            print(f"  left out: {name} is not installed", flush=True)
            return []
    command = ["env", *_SETTINGS, sys.executable, "-m", "benchmarks.fleet_rounds", str(3 if full else 1)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"expected starts from {command}, got:\n{done.stderr[-2000:]}")
    found: dict[str, list[dict[str, Any]]] = json.loads(done.stdout.strip().splitlines()[-1])
    _draw(found)
    wall = median(each["seconds"] for each in found["overlapped"])
    after = median(each["seconds"] for each in found["serial"])
    floor = median(_floor(each) for each in found["serial"])
    return [
        Result(
            name="fleet/first_rollout",
            value=round(wall / floor, 3),
            unit="x longest task + serial remainder",
            bar=1.1,
            higher_is_better=False,
            peers={"one after another": round(after / floor, 3)},
        )
    ]


def _floor(serial: dict[str, Any]) -> float:
    """Of a serial start: the longest task, those that it needs, and the rollout; in seconds."""
    seconds = {task["name"]: task["ended"] - task["started"] for task in serial["timeline"]["tasks"]}
    longest = max(seconds, key=lambda name: seconds[name])
    before = seconds["reserved"] if longest in ("engine", "environment") else 0.0
    return float(before + seconds[longest] + serial["rollout"])


def _draw(found: dict[str, list[dict[str, Any]]]) -> None:
    if find_spec("vl_convert") is None:
        return
    from routeplane.inspect.charts import draw_timeline, encode

    _PICTURES.mkdir(exist_ok=True)
    for name, rounds in found.items():
        picture = encode(draw_timeline(rounds[-1]["timeline"]["tasks"]), "png")
        (_PICTURES / f"fleet-{name}.png").write_bytes(picture)
