"""Automodel's own compiled functions beside replay: the suite passes with Dynamo on, as in a training job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.automodel, pytest.mark.slow]

ROOT = Path(__file__).parents[3]


def test_the_suite_passes_with_the_compiler_on() -> None:
    """Everything is traced as for Inductor, and run without its C++ compiler, which takes minutes for each shape."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-m", "automodel and not slow and not nightly"),
            *("--hypothesis-profile=ci", "-p", "no:cacheprovider", "tests/replay/automodel"),
        ],
        cwd=ROOT,
        env={**environment, "TORCH_COMPILE_OVERRIDE_BACKENDS": ">=0:aot_eager"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stdout[-4000:]
