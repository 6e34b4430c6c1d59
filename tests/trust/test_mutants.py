"""Mutants are real changes, and are found or survive as they should."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.trust.mutants import EQUIVALENT, ROOT, TESTS, _changed, mutants_of, tried

SPEC = "routeplane/record/spec.py"


def test_every_module_has_its_tests() -> None:
    """The files of the table are there."""
    assert [] == [path for path, tests in TESTS.items() for path in (path, *tests) if not (ROOT / path).is_file()]


def test_each_change_is_another_program_that_compiles() -> None:
    """One statement differs, and the module still compiles."""
    found = mutants_of(SPEC)
    assert len(found) > 50
    for mutant in found:
        compile(_changed(mutant), SPEC, "exec")
    assert [] == [mutant for mutant in found if mutant.before == mutant.behind and len(mutant.before) < 40]


def test_the_listed_changes_are_there() -> None:
    """A change that no test can tell stands in the list for as long as its statement does."""
    known = {
        (each.path, each.before, each.behind)
        for path in {path for path, _, _ in EQUIVALENT}
        for each in mutants_of(path)
    }
    assert set() == EQUIVALENT.keys() - known


@pytest.mark.slow
def test_a_change_is_found_and_none_is_not() -> None:
    """The tests of a module pass without a change; a rule turned round fails, by name; a change elsewhere survives."""
    tests = TESTS[SPEC]
    rule = next(each for each in mutants_of(SPEC) if "top_k" in each.before and each.before.startswith("if"))

    assert tried(None, tests, timeout_s=300.0) is None
    assert Path(tests[0]).name in (tried(rule, tests, timeout_s=300.0) or "")
    assert tried(replace(rule, path="routeplane/record/alarms.py", index=0), tests, timeout_s=300.0) is None
