"""The script for machines with a GPU runs here, on the CPU, as far as one can tell there."""

from __future__ import annotations

import pytest
import torch

from benchmarks import gpu_check


def test_what_a_cpu_can_tell_holds() -> None:
    """Own routes are the live forward, all rows are forced; what needs a GPU is not run, and says so."""
    found = {check.name: check.held for check in gpu_check.checks("cpu", gpu_check.SMALL)}
    assert {f"own routes, {experts}": True for experts in gpu_check.EXPERTS} | {"forced rows": True} == {
        name: held for name, held in found.items() if held is not None
    }
    assert {"no wait for the device", "peak memory", "whole graphs", "step"} == {
        name for name, held in found.items() if held is None
    }


def test_without_a_gpu_nothing_is_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit status is that of a command that could not run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert 2 == gpu_check.main([])
    assert "GPU: not run" in capsys.readouterr().err
