"""The blocks of ``docs/how-to/replay-in-automodel.md`` run, in order, and print what the page says."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tests.replay.page_blocks import run_trainer_page

pytestmark = pytest.mark.automodel


def test_the_blocks_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    """They print what the page says."""
    with mock.patch.object(torch.cuda, "current_device", return_value=0):
        ran = run_trainer_page("replay-in-automodel.md", "automodel")
    assert len(ran) >= 5
    assert "".join(printed for _, printed in ran) == capsys.readouterr().out
