"""The pytest plugin, as a user's run has it: entry points read from ``pyproject.toml``, in processes of their own.

The environment of a test need not have the package installed as it stands, so a distribution with its entry points is
written beside the user's tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.meta.test_light_import import loaded_by
from tests.testing.wrong_server import SPEC, WrongServer, serving

ROOT = Path(__file__).parents[2]

SUITE = """
import pytest
from routeplane.testing.contracts import EngineContract
from routeplane.testing.contracts.engine_contract import CheckOptions

class TestOurs(EngineContract):
    options = CheckOptions(vocabulary=500)

    @pytest.fixture(autouse=True)
    def pointed(self, routeplane_engine):
        type(self).engine, type(self).spec = routeplane_engine, routeplane_engine.spec
"""

PROFILE = """
from hypothesis import given, settings, strategies as st

@given(st.integers())
def test_profile(number):
    print("examples", settings().max_examples, settings().derandomize, settings().deadline)
"""


def config() -> str:
    """The ``config.json`` of a model of the wrong server's geometry."""
    return (
        '{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 7, '
        f'"num_experts": {SPEC.num_experts}, "num_experts_per_tok": {SPEC.top_k}, "decoder_sparse_step": 1, '
        '"mlp_only_layers": [0, 1, 3]}'
    )


def run(folder: Path, text: str, *arguments: str, ci: bool = False) -> tuple[int, str]:
    """Pytest over one file, with the entry points of ``pyproject.toml``; ``ci``: with a CI's variable set."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / "site" / "routeplane-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: routeplane\nVersion: 0\n")
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in found.items())
        for group, found in project["entry-points"].items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups))
    (folder / "test_ours.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rs", *arguments, "test_ours.py"]
    # of this run's variables none that says "a CI": hypothesis reads a dozen of them
    environment = {
        name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "OMP_NUM_THREADS") if name in os.environ
    }
    environment |= {"PYTHONPATH": f"{folder / 'site'}{os.pathsep}{ROOT}"} | ({"CI": "true"} if ci else {})
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("fault", [None, "choices share rows"])
def test_the_options_point_the_suite_at_a_server(tmp_path: Path, fault: str | None) -> None:
    """A user's class of five lines asks the server that the options name; a wrong one fails by the check's test."""
    (tmp_path / "config.json").write_text(config())
    with serving(WrongServer(fault)) as url:
        status, out = run(
            tmp_path, SUITE, "--routeplane-engine", url, "--routeplane-model", str(tmp_path / "config.json")
        )

    assert (1 if fault else 0) == status, out
    assert ("1 failed, 9 passed, 1 skipped" if fault else "10 passed, 1 skipped") in out
    assert ("choice_rows: " in out) == bool(fault)


def test_without_a_server_the_suite_is_skipped(tmp_path: Path) -> None:
    """The reason names the options."""
    status, out = run(tmp_path, SUITE)

    assert (0, True) == (status, "11 skipped" in out), out
    assert "--routeplane-engine and --routeplane-model name no server" in out


@pytest.mark.parametrize(
    ("profile", "ci", "said"),
    [
        (None, False, "examples 100 False 0:00:00.200000"),
        ("routeplane-ci", False, "examples 100 True None"),
        ("routeplane-ci", True, "examples 100 True None"),
        ("routeplane-nightly", False, "examples 2000 False None"),
        ("routeplane-nightly", True, "examples 2000 False None"),
    ],
)
def test_profiles_are_there_and_none_is_chosen(tmp_path: Path, profile: str | None, ci: bool, said: str) -> None:
    """Both profiles can be named, and say the same in a CI; without a name hypothesis' own default stands."""
    chosen = [] if profile is None else [f"--hypothesis-profile={profile}"]
    status, out = run(tmp_path, PROFILE, "-s", *chosen, ci=ci)

    assert 0 == status, out
    assert said in out


def test_the_profiles_stand_beside_ours() -> None:
    """The names are not those of this repository's own profiles, which register first and are chosen by name."""
    command = (
        "import tests.conftest; from routeplane.testing.plugin import register_profiles; register_profiles(); "
        "from hypothesis import settings; print([settings.get_profile(name).max_examples for name in "
        "('dev', 'ci', 'trust', 'routeplane-ci', 'routeplane-nightly')], settings.get_current_profile_name())"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HYPOTHESIS_PROFILE": "ci"}
    done = subprocess.run([sys.executable, "-c", command], env=environment, capture_output=True, text=True, check=False)

    assert "[50, 100, 3000, 100, 2000] ci\n" == done.stdout, done.stderr


def test_the_plugin_loads_nothing_else() -> None:
    """A run that uses none of it loads no stage, no array library and not hypothesis."""
    assert {"routeplane"} == loaded_by("import routeplane.testing.plugin") - loaded_by("import pytest")
