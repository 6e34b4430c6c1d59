"""The demo with a real vLLM engine, whose own code captures the routes."""

from __future__ import annotations

from pathlib import Path

import pytest

from routeplane.cli.demo import DemoOptions, run_demo
from tests.cli.demo_findings import severities

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_replay_pays_and_nothing_stands_out(tmp_path: Path, seed: int) -> None:
    """The mean falls to a third or less; a healthy run has notes, and neither errors nor warnings."""
    options = DemoOptions(out=str(tmp_path), engine="vllm", seed=seed, progress=False)
    figures = run_demo(options)
    assert figures["mean_abs_diff_live"] >= 3 * figures["mean_abs_diff_replay"]
    assert {"note"} >= severities(options)
