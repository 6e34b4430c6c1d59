"""Planes with a spool, on a disk that is full: a mount of its own, with the real error of the real file system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stream.full_disk import OPENED

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "transport",
    [pytest.param(name, marks=pytest.mark.xdist_group("ray") if name == "ray" else ()) for name in OPENED],
)
def test_a_full_disk(transport: str, tmp_path: Path) -> None:
    """Writing stops with an error that says so; what was acknowledged is served, and room that is made is used."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f'mount -t tmpfs -o size=600k tmpfs "{disk}" && exec "{sys.executable}" -m tests.stream.full_disk "$@"'
    # a mount of its own, as root or as a user who may make namespaces
    own = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    done = subprocess.run(
        [*own, "sh", "-c", script, "sh", transport, str(disk)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (0, "served again\n") == (done.returncode, done.stdout), done.stderr
