"""What wrong routes do: the stored runs keep their bars, the page shows these runs, and the script makes such runs."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "grpo_replay"
PAGE = ROOT / "docs" / "explanation" / "what-wrong-routes-do.md"


@cache
def stored() -> dict[str, list[dict[str, Any]]]:
    """The runs of results.json by mode, in the order of their seeds."""
    runs = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))["runs"]
    modes = {run["mode"] for run in runs}
    return {mode: sorted((run for run in runs if run["mode"] == mode), key=lambda run: run["seed"]) for mode in modes}


def mean(runs: list[dict[str, Any]], name: str, *, last: int = 0) -> float:
    """A figure over the last steps of runs, or over all."""
    return float(np.mean([step[name] for run in runs for step in run["steps"][-last:]]))


def test_replay_lowers_the_divergence_tenfold_in_every_seed() -> None:
    """Engine and trainer differ by a tenth or less once gates follow the rows."""
    live, replay = stored()["live"], stored()["replay"]
    assert [0, 1, 2, 3, 4] == [run["seed"] for run in live] == [run["seed"] for run in replay]
    assert all(10 * mean([ours], "kl") <= mean([theirs], "kl") for ours, theirs in zip(replay, live, strict=True))


def test_shifted_rows_end_training_and_the_limit_ends_them() -> None:
    """Rewards of shifted rows end below 0.15 in every seed; the limit stops such a run at its first step."""
    shifted, guarded = stored()["shifted"], stored()["guarded"]
    assert 5 == len(shifted) == len(guarded)
    assert max(mean([run], "reward", last=5) for run in shifted) < 0.15
    assert {(1, "flipped_share", 0)} == {
        (run["stopped"]["step"], run["stopped"]["kind"], len(run["steps"])) for run in guarded
    }


def test_the_page_shows_the_stored_runs() -> None:
    """Each line of the table is the mean over seeds and steps of its mode."""
    page = PAGE.read_text(encoding="utf-8")
    assert [row(mode) in page for mode in ("live", "replay", "shifted")] == [True] * 3
    assert "**Reward does not differ between live and replay at this scale.**" in page
    assert stored()["guarded"][0]["stopped"]["message"] in page


def row(mode: str) -> str:
    """A line of the page's table."""
    runs = stored()[mode]
    cells = [f"{mean(runs, 'kl'):.5f}", f"{mean(runs, 'clip_fraction'):.3f}", f"{mean(runs, 'effective_share'):.4f}"]
    cells.append(f"{mean(runs, 'flipped_share'):.3f}" if mode != "live" else "")
    first = float(np.mean([run["steps"][0]["reward"] for run in runs]))
    return f"| {mode} | {' | '.join(cells)} | {first:.2f} | {mean(runs, 'reward', last=5):.2f} |"


def script() -> Any:
    """The module of the script."""
    spec = importlib.util.spec_from_file_location("grpo_replay_run", FOLDER / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_script_makes_such_runs(tmp_path: Path) -> None:
    """Two steps of four runs on a few samples: flips and divergence stand in the same order."""
    run = script()
    settings = run.Settings(steps=2, prompts=6, group=4, supervised_steps=40)
    weights = run.supervise(settings, 0)
    found = {mode: run.run(settings, seed=0, mode=mode, weights=weights) for mode in run.MODES}

    assert ["live", "replay", "shifted", "guarded"] == list(found)
    assert 5 * mean([found["replay"]], "kl") < mean([found["live"]], "kl") < mean([found["shifted"]], "kl")
    assert mean([found["replay"]], "flipped_share") < 0.2 < mean([found["shifted"]], "flipped_share")
    assert (1, "flipped_share") == (found["guarded"]["stopped"]["step"], found["guarded"]["stopped"]["kind"])
    lines = run.summary(list(found.values()))
    assert re.search(r"guarded\s+seed 0 stopped at step 1: flipped_share", lines)
