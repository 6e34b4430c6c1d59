"""What ``benchmarks/scale.py`` predicts: bytes against the real code, costs against known ones, the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import scale
from benchmarks.scale import BYTES_TOLERANCE, MODELS, Costs, Model, Step

HOME = Path(scale.__file__).parent
COSTS = Costs(write=(1, 0, 0), read=(0, 1, 0), cut=(0, 0, 1), record_bytes=680.0, ticket=300.0)


@pytest.mark.parametrize("model", MODELS, ids=[model.name for model in MODELS])
def test_predicted_bytes_are_those_of_the_real_code(model: Model) -> None:
    """Blocks on disk and one rank's batches, for a share of a step; CPU-seconds are looked at by the benchmark."""
    check = scale.check_model(model, COSTS, megabytes=2, rounds=1)
    for ratio in (check.blocks, check.batches):
        assert 1 / BYTES_TOLERANCE <= ratio <= BYTES_TOLERANCE
    # a fault that it finds: ids of two bytes
    wide = scale.predict_bytes(replace(model, layers=2 * model.layers), [check.tokens], record_bytes=680.0)
    right = scale.predict_bytes(model, [check.tokens], record_bytes=680.0)
    assert wide.blocks > BYTES_TOLERANCE * right.blocks


def test_costs_are_found_again() -> None:
    """Seconds made of known costs give these costs; a cost that would be negative is left out."""
    sizes = [(100, 25_600, 10**7), (3, 24_576, 10**7), (9, 73_728, 10**6)]

    def cases(a: float, b: float, c: float) -> list[tuple[SimpleNamespace, int]]:
        return [
            (SimpleNamespace(records=records, s=a * records + b * tokens + c * size, size=size), tokens)
            for records, tokens, size in sizes
        ]

    assert scale.fit(cases(1e-4, 1e-7, 1e-9), "s", "size") == pytest.approx((1e-4, 1e-7, 1e-9))
    assert scale.fit(cases(-1e-6, 1e-7, 1e-9), "s", "size")[0] == 0.0


def test_a_step_adds_up() -> None:
    """What leaves the engines is what the blocks hold; a rank takes as much at every size."""
    for step in scale.steps():
        row = scale.predict(step, COSTS)
        assert row["engine_out_gb"] * step.engines == pytest.approx(row["blocks_gb"])
        assert row["store_out_whole_gb"] == pytest.approx(row["blocks_gb"] * step.nodes)
        assert row["node_in_fetched_gb"] <= row["node_in_whole_gb"]
        assert row["shares"][scale.first_to_break(row)] == max(row["shares"].values())
    few, many = (scale.predict(Step(model=MODELS[0], gpus=gpus), COSTS) for gpus in (64, 1_024))
    assert many["rank_batches_gb"] == pytest.approx(few["rank_batches_gb"], rel=0.1)


def test_the_page_holds_the_tables_of_the_last_run() -> None:
    """``python -m benchmarks.scale`` was run after the last change, and the page was not edited by hand."""
    found = json.loads((HOME / "scale.json").read_text(encoding="utf-8"))
    text = scale.PAGE.read_text(encoding="utf-8")
    assert text == scale.page_with(text, scale.cost_tables(found))
