"""What an import costs: the package, its streams and its command line load no extra.

Each case runs in an interpreter of its own, since this one has long loaded everything.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

#: what `pip install routeplane` brings; the two submodules of pyarrow are loaded by readers and writers of streams
BASE = "import numpy, pyarrow, pyarrow.compute, pyarrow.ipc, xxhash"

LIGHT = ("routeplane", "routeplane.stream", "routeplane.capture", "routeplane.cli.main")

#: The extras, by name, so that a failure says which. That a light module loads nothing unlisted is checked too.
HEAVY = {"torch", "transformers", "vllm", "ray", "zarr", "numba", "hypothesis", "pandas"}

_PROGRAM = """
import sys
before = set(sys.modules)
{statement}
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(*sorted(loaded - set(sys.stdlib_module_names)))
"""


def loaded_by(statement: str) -> set[str]:
    """The top-level packages outside the standard library that a statement loads in a fresh interpreter."""
    command = [sys.executable, "-c", _PROGRAM.format(statement=statement)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (0, "") == (done.returncode, done.stderr)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", LIGHT)
def test_a_light_module_loads_base_dependencies_only(module: str) -> None:
    """What every user imports loads routeplane, the base dependencies with all that these load, and nothing besides."""
    loaded = loaded_by(f"import {module}")

    assert "routeplane" in loaded
    assert set() == loaded & HEAVY
    assert set() == loaded - {"routeplane"} - loaded_by(BASE)


def test_a_heavy_module_would_be_seen() -> None:
    """The probe sees what it looks for, also where a module loads it by a detour."""
    assert "hypothesis" in loaded_by("import hypothesis.strategies")
    assert set() == loaded_by(BASE) & HEAVY
