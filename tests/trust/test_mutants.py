"""Mutants are real changes, and are found or survive as they should."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.trust.mutants import EQUIVALENT, ROOT, TESTS, _changed, mutants_of

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


_ASKED = """
import json
from dataclasses import replace
from tests.trust.mutants import TESTS, mutants_of, tried

tests = TESTS[{path!r}]
rule = next(each for each in mutants_of({path!r}) if each.before.startswith("raise _invalid(f'num_experts in ["))
elsewhere = replace(rule, path="routeplane/record/alarms.py", index=0)
print(json.dumps([tried(each, tests, timeout_s=300.0) for each in (None, rule, elsewhere)]))
"""


@pytest.mark.slow
def test_a_change_is_found_and_none_is_not() -> None:
    """The tests of a module pass without a change; a refusal left out fails one, by name; a change elsewhere survives.

    In a process of its own: this one has imported the library.
    """
    done = subprocess.run(
        [sys.executable, "-c", _ASKED.format(path=SPEC)], capture_output=True, text=True, cwd=ROOT, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    unchanged, rule, elsewhere = json.loads(done.stdout)

    assert (None, None) == (unchanged, elsewhere)
    assert str(rule).partition("::")[0] in TESTS[SPEC]
