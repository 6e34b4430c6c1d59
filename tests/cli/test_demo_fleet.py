"""The demo as a fleet, as a user runs it: engine, plane, environment and trainer on Ray, rollouts over HTTP, an end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from routeplane.fleet.teardown import Process, process_of
from tests.fleet.workers import has_ended

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

ROOT = Path(__file__).parents[2]
PROGRAM = "from routeplane.cli.main import main; raise SystemExit(main())"


def processes_with(variable: str) -> list[Process]:
    """Those that inherited a variable: the actors' own marks would hide them from one another."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            bears = variable.encode() in (path / "environ").read_bytes().split(b"\0")
        except OSError:  # another user's, or it ended meanwhile
            continue
        process = process_of(int(path.name)) if bears else None
        if process is not None:
            found.append(process)
    return found


def test_the_fleet_rolls_out_replays_and_leaves_no_process(tmp_path: Path) -> None:
    """Three turns of each rollout make one record; replay pays; parts came up side by side; every process is gone."""
    run = f"demo-{os.getpid()}"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "demo", "--fleet", "--compare", "--json", "--out", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ROUTEPLANE_TESTS_RUN": run},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr[-4000:]
    left = processes_with(f"ROUTEPLANE_TESTS_RUN={run}")
    figures = json.loads(done.stdout)
    # 32 of the prompt, three turns of 24, and a tool's 8 between them
    assert (8, 8 * (32 + 3 * 24 + 2 * 8)) == (figures["records"], figures["tokens"])
    assert {"captured": figures["tokens"] - 8, "not_fed": 8} == {
        state: count for state, count in figures["coverage"].items() if count
    }
    assert figures["mean_abs_diff_live"] >= 3 * figures["mean_abs_diff_replay"]
    for control in ("shift_token", "shift_layer"):
        assert figures[f"mean_abs_diff_{control}"] >= 3 * figures["mean_abs_diff_live"]
    tasks = {task["name"]: task for task in figures["timeline"]["tasks"]}
    assert {"done"} == {task["outcome"] for task in tasks.values()}
    # the environment starts on a URL that no server listens on yet
    assert tasks["reserved"]["ended"] <= tasks["environment"]["started"] < tasks["engine"]["ended"]
    compared = figures["compare"]
    assert compared["ratio"] == compared["one_after_another"] / compared["overlapped"] > 0
    assert b"\x89PNG" == (tmp_path / "timeline.png").read_bytes()[:4]
    assert all(has_ended(process) for process in left)
