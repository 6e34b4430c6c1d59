"""The demo with Automodel as the trainer: the engine's weights and routes give the figures that Transformers gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from routeplane.cli.demo import DemoOptions
from routeplane.cli.demo import automodel_trainer as demo_automodel
from routeplane.cli.demo import rollout as demo_engine
from routeplane.cli.demo import transformers_trainer as demo_trainer

pytestmark = pytest.mark.automodel


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What the demo's own processes run with: the order of sums is part of a figure."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_figures_are_those_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two implementations of one model, one stream: live, replayed and wrongly replayed scores agree."""
    options = DemoOptions(
        out=str(tmp_path), trainer="automodel", seed=5, layers=4, sequences=3, max_tokens=24, progress=False
    )
    found: list[dict[str, Any]] = []
    for stage in (demo_engine, demo_trainer, demo_automodel):
        stage.main([json.dumps(asdict(options))])
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    _, expected, figures = found
    assert expected.keys() == figures.keys()
    for name in expected.keys() - {"seconds", "coverage", "ablation"}:
        assert expected[name] == pytest.approx(figures[name], rel=2e-2, abs=1e-6), name
    assert expected["coverage"] == figures["coverage"]
    assert figures["ablation"] is None  # Transformers on both sides have its runs
    assert figures["mean_abs_diff_replay"] < 0.75 * figures["mean_abs_diff_live"]
    assert figures["mean_abs_diff_shift_layer"] > 2 * figures["mean_abs_diff_live"]
