"""The engine matrix is what the tests left, and names tests that exist."""

from __future__ import annotations

import json

from tests.engine_matrix import FAULTS, FEATURES, OUTCOMES, PAGE, ROOT, cell_of, render
from tests.meta.test_field_rows import functions_of


def test_the_page_is_written_from_the_outcomes() -> None:
    """``python -m tests.engine_matrix`` would change nothing."""
    noted = [json.loads(path.read_text(encoding="utf-8")) for path in (OUTCOMES, FAULTS)]

    assert render(*noted) == PAGE.read_text(encoding="utf-8")


def test_every_feature_names_tests_that_exist() -> None:
    """A renamed test would leave its row empty for ever."""
    named = [test for features in FEATURES.values() for tests in features.values() for test in tests]
    absent = [test for test in named if test.partition("::")[2] not in functions_of(ROOT / test.partition("::")[0])]

    assert [] == absent


def test_a_cell_is_as_bad_as_its_worst_test() -> None:
    """All passed, one failed, one did not run."""
    ran = {"a": "passed", "b": "failed", "c": "passed"}

    assert ["yes", "no", "-"] == [cell_of(tests, ran) for tests in (("a", "c"), ("a", "b"), ("a", "d"))]
