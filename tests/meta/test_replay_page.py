"""``docs/reference/replay.md`` says what the kept test runs came to, and these ran what the tests hold today.

Tests of trainers with environments of their own are read as source text, since they cannot be imported here.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from routeplane.testing.contracts.replay_contract import ReplayContract
from tests.replay import test_families
from tests.replay.families import FAMILIES
from tests.replay.feature_table import FEATURES, PAGE, TITLES, Run, load, render

TESTS = Path(__file__).parents[1] / "replay"

CONTRACTS = {
    "transformers": TESTS / "test_transformers_contract.py",
    "automodel": TESTS / "automodel" / "test_automodel_contract.py",
    "megatron": TESTS / "megatron" / "test_megatron_contract.py",
}


def families_of(adapter: str) -> set[str]:
    """The families whose contract an adapter's tests inherit; or all that a model can be built of."""
    if adapter == "families":
        return {case.name for case in FAMILIES} - {*test_families.REFUSED}
    tree = ast.parse(CONTRACTS[adapter].read_text(encoding="utf-8"))
    return {
        ast.literal_eval(statement.value)
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "family"
    }


def contract_features() -> set[str]:
    """What the contract's tests show."""
    methods = [item for name, item in inspect.getmembers(ReplayContract) if name.startswith("test_")]
    return {method.replay_feature for method in methods}


def family_features() -> set[str]:
    """What the tests of every family show."""
    tests = [item for _, item in inspect.getmembers(test_families) if hasattr(item, "replay_feature")]
    return {item.replay_feature for item in tests}


def find_run_problems(run: Run) -> Iterator[str]:
    """Where a kept run is not what the tests hold, or did not pass."""
    if set(run.families) != families_of(run.adapter):
        yield f"{run.path}: families {sorted(set(run.families) ^ families_of(run.adapter))}"
    expected = family_features() if run.adapter == "families" else contract_features()
    for family, features in run.families.items():
        if absent := expected - set(features):
            yield f"{run.path}: {family} lacks {sorted(absent)}"
        if unknown := set(features) - set(FEATURES):
            yield f"{run.path}: {family} has {sorted(unknown)}, which no row of the page explains"
        yield from (
            f"{run.path}: {family}, {name}: {outcome}"
            for name, outcome in features.items()
            if outcome not in ("passed", "refused")
        )


def test_the_page_is_made_of_the_kept_runs() -> None:
    """Not a byte differs; `make replay-table` writes it again."""
    assert render(load()) == PAGE.read_text(encoding="utf-8")


def test_every_adapter_has_a_run() -> None:
    """Transformers in two versions, the others in one."""
    assert {"transformers": 2, "families": 1, "automodel": 1, "megatron": 1} == {
        adapter: sum(run.adapter == adapter for run in load()) for adapter in TITLES
    }


def test_the_kept_runs_are_of_these_tests() -> None:
    """Every family and feature that the tests have today, and nothing else; all of it passed."""
    assert [] == [problem for run in load() for problem in find_run_problems(run)]


# ---- the checks can fail --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "feature", "outcome", "said"),
    [
        ("mixtral", "gradients", "failed", "mixtral, gradients: failed"),
        ("mixtral", "speed", "passed", "has ['speed']"),
        ("another", "gradients", "passed", "families ['another']"),
    ],
)
def test_a_run_of_other_tests_is_named(family: str, feature: str, outcome: str, said: str) -> None:
    """A failure, a feature that is not explained, a family that is gone."""
    run = load()[0]
    families = {name: dict(features) for name, features in run.families.items()}
    families.setdefault(family, {})[feature] = outcome
    assert any(said in problem for problem in find_run_problems(replace(run, families=families)))


def test_a_feature_that_did_not_run_is_named() -> None:
    """As is a page that says so."""
    run = load()[0]
    families = {name: dict(features) for name, features in run.families.items()}
    for features in families.values():
        del features["detach"]
    found = replace(run, families=families)
    assert f"{run.path}: mixtral lacks ['detach']" in list(find_run_problems(found))
    assert render([run]) != render([found])


def test_versions_that_differ_are_told_apart() -> None:
    """A cell names the version where they do not agree."""
    old, new = (
        Run(adapter="transformers", version=version, families={"a": {"detach": outcome, "recompute": "passed"}})
        for version, outcome in (("5.9.0", "refused"), ("5.10.0", "passed"))
    )
    assert "| `a` | yes | refused (5.9.0), yes (5.10.0) |" in render([old, new])
