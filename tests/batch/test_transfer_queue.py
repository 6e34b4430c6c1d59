"""The real TransferQueue carries routes of a real engine: every row, whatever order they are asked for in.

It has an environment of its own (``make .venv-transfer-queue/.stamp``), since its storage wants a Ray of its choice.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from routeplane import new_stream
from tests.batch.native import engine_samples, families, record_of

pytestmark = [pytest.mark.slow, pytest.mark.transfer_queue]

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-transfer-queue" / "bin" / "python"


def test_routes_come_out_of_the_queue_as_they_went_in(tmp_path: Path) -> None:
    """Jagged columns put under sample ids and asked for backwards: the same rows, audited clean, replayable."""
    spec, _ = families()["qwen3_dense_first"]
    records = [record_of(each, spec) for each in engine_samples("qwen3_dense_first")[:6]]
    path = tmp_path / "run.arrows"
    with new_stream(str(path), spec) as sink:
        for record in records:
            sink.write(record)
    ran = subprocess.run(
        [str(PYTHON), str(ROOT / "tests" / "batch" / "queue_client.py"), str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )

    assert 0 == ran.returncode, ran.stderr[-3000:]
    tokens, captured = sum(each.num_tokens for each in records), sum(each.num_tokens - 1 for each in records)
    assert {
        "dtype": "torch.int16",
        "order": True,
        "same": True,
        "rows": tokens,
        "replayed": captured,
        "clean": [],
        "swapped": ["s4", "s5"],
    } == json.loads(ran.stdout.splitlines()[-1])
