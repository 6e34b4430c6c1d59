"""The names of vLLM that the writer inside the engine uses, in each release that pyproject.toml allows; none runs."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from routeplane.capture.vllm.interface import FOLLOWING_NAMES, NAMES, find_drift
from tests.vllm_wheels import SIGNATURES, drift_of

FOUND: dict[str, dict[str, list[str] | None]] = json.loads(SIGNATURES.read_text(encoding="utf-8"))


def minor(version: str) -> int:
    """The middle number, which is vLLM's release."""
    return int(version.split(".")[1])


def bounds() -> tuple[int, int]:
    """The releases that pyproject.toml allows: from, and before."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    [requirement] = project["project"]["optional-dependencies"]["vllm"]
    found = re.fullmatch(r"vllm>=0\.(\d+),<0\.(\d+)", requirement)
    assert found is not None
    return int(found[1]), int(found[2])


def test_every_release_that_is_allowed_was_read() -> None:
    """No gap, and nothing beyond the newest that was read."""
    low, high = bounds()

    assert set(range(low, high)) == {minor(version) for version in FOUND if minor(version) >= low}


@pytest.mark.parametrize("version", [version for version in FOUND if minor(version) >= bounds()[0]])
def test_a_release_that_is_allowed_has_every_name(version: str) -> None:
    """Functions with the parameters that are used, classes with the attributes."""
    assert [] == drift_of(FOUND[version])


def test_a_release_before_is_found_out() -> None:
    """0.22 lacks one of them, and the running vLLM would be refused by the same table."""
    assert ["vllm.v1.core.sched.scheduler:Scheduler.has_requests is gone"] == drift_of(FOUND["0.22.0"])


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_changes_is_named(name: str) -> None:
    """Each entry of the table can fail: gone, or without what is used."""
    newest = FOUND[max(FOUND, key=minor)]
    expected = NAMES[name]

    assert [f"{name} is gone"] == drift_of({**newest, name: None})
    if expected:
        assert [f"{name} has no {', '.join(expected)}"] == drift_of({**newest, name: []})


@pytest.mark.parametrize("name", FOLLOWING_NAMES)
def test_a_name_that_following_rests_on_is_named_too(name: str) -> None:
    """The worker compares this table with the vLLM that runs, when following is turned on."""
    gone, less = {**FOLLOWING_NAMES, name: None}, {**FOLLOWING_NAMES, name: ()}

    assert [] == find_drift(FOLLOWING_NAMES.get, table=FOLLOWING_NAMES)
    assert [f"{name} is gone"] == find_drift(gone.get, table=FOLLOWING_NAMES)
    assert [f"{name} has no {', '.join(FOLLOWING_NAMES[name])}"] == find_drift(less.get, table=FOLLOWING_NAMES)
