"""NeMo Gym itself between a real vLLM server and an agent: what it validates and passes on becomes the engine's record.

Gym 0.4 needs Python 3.12, so its model server runs in an environment of its own (``make .venv-gym/.stamp``).

Axes: S tokens, L captured layers, K top-k slots.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routeplane.record.record import RouteRecord
from tests.capture.reading import gym_rollout
from tests.capture.tiny_server import ROOT, running_server, write_model
from tests.capture.vllm_engine import SPEC, reference_rows

pytestmark = [pytest.mark.slow, pytest.mark.gym, pytest.mark.vllm]

PYTHON = ROOT / ".venv-gym" / "bin" / "python"


@pytest.fixture(scope="module")
def rollout(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    """The model in Transformers, and Gym's responses of three turns."""
    folder: Path = tmp_path_factory.mktemp("gym")
    (folder / "model").mkdir()
    model = write_model(folder / "model")
    with running_server(folder / "model", fifo=folder / "fifo", log=folder / "log") as server:
        ran = subprocess.run(
            [str(PYTHON), str(ROOT / "tests" / "capture" / "gym_client.py"), f"{server.url}/v1"],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
    assert 0 == ran.returncode, ran.stderr[-4000:]
    responses: list[Any] = json.loads(ran.stdout)
    return model, responses


def record_of(responses: list[Any]) -> RouteRecord:
    """The record of a rollout, whose output items are those of all turns."""
    items = [item for response in responses for item in response["output"]]
    [record] = gym_rollout(items, SPEC, sample_id="s", weights_version=1, axis="captured", cached=0).records
    return record


def test_what_gym_passes_on_is_the_engines_record(rollout: tuple[Any, list[Any]]) -> None:
    """Three turns of tool calls through Gym: one record, and each row that of an independent forward of the weights."""
    model, responses = rollout
    record = record_of(responses)

    assert 3 == len([span for span in record.spans if span.kind == "generation"])
    assert reference_rows(model, record.token_ids)[:-1] == np.sort(record.routes[:-1], axis=2).tolist()
    assert (record.num_tokens - 1, 1) == (record.coverage().count("captured"), record.coverage().count("not_fed"))
    assert record.logprobs is not None
    assert 3 * 7 == int(np.isfinite(record.logprobs).sum())


def test_gym_keeps_ids_and_routes_on_the_last_item(rollout: tuple[Any, list[Any]]) -> None:
    """Where Gym 0.4 puts what training needs: nested lists, one row per token, on the tool call that was generated."""
    for response in rollout[1]:
        *_, last = response["output"]
        tokens = len(last["prompt_token_ids"]) + len(last["generation_token_ids"])
        assert (tokens, *SPEC.row_shape) == np.asarray(last["routed_experts"]).shape
        assert "function_call" == last["type"]
