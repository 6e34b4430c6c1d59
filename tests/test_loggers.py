"""Reports in metrics loggers: two lines each, with the loggers' own readers on the other side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from routeplane import AssemblyReport, metrics_text
from routeplane.capture.vllm.engine_writer import EngineReport

REPORT = AssemblyReport(calls=3, overlap_rows=8, drift_rows=2)


def test_tensorboard_shows_every_name(tmp_path: Path) -> None:
    """Each name of a report is a curve, which TensorBoard's reader finds."""
    with SummaryWriter(str(tmp_path)) as writer:
        for name, value in REPORT.scalars().items():
            writer.add_scalar(name, value, 7)

    found = EventAccumulator(str(tmp_path))
    found.Reload()
    shown = {name: found.Scalars(name)[0] for name in found.Tags()["scalars"]}
    assert {name: (7, value) for name, value in REPORT.scalars().items()} == {
        name: (event.step, event.value) for name, event in shown.items()
    }


@pytest.mark.slow
def test_weights_and_biases_takes_a_report_offline(tmp_path: Path) -> None:
    """An offline run keeps each name in its file."""
    import wandb

    run = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(console="off", silent=True))
    run.log(REPORT.scalars(), step=7)
    run.finish()

    [path] = tmp_path.rglob("*.wandb")
    content = path.read_bytes()
    assert [] == [name for name in REPORT.scalars() if name.encode() not in content]


@pytest.mark.parametrize("report", [REPORT, EngineReport(lost=2)], ids=["assembly", "engine writer"])
def test_prometheus_reads_every_name(report: Any) -> None:
    """Its own parser reads the text: a gauge for each scalar, with its value."""
    families = list(text_string_to_metric_families(metrics_text(report.scalars())))

    assert {"gauge"} == {family.type for family in families}
    assert {name.replace("/", "_"): value for name, value in report.scalars().items()} == {
        sample.name: sample.value for family in families for sample in family.samples
    }
