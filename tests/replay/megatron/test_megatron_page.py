"""The blocks of ``docs/how-to/replay-in-megatron.md`` run, in order, and print what the page says."""

from __future__ import annotations

import pytest

from tests.replay.page_blocks import run_trainer_page

pytestmark = pytest.mark.megatron


def test_the_blocks_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    """They print what the page says."""
    ran = run_trainer_page("replay-in-megatron.md", "megatron")
    assert len(ran) >= 5
    assert "".join(printed for _, printed in ran) == capsys.readouterr().out
