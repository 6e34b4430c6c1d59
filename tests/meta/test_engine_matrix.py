"""The engine matrix is what the tests left, and names tests that exist."""

from __future__ import annotations

import json

from routeplane.testing.contracts import EngineContract
from tests.engine_matrix import FAULTS, FEATURES, OUTCOMES, PAGE, ROOT, cell_of, render
from tests.meta.test_field_rows import functions_of


def test_the_page_is_written_from_the_outcomes() -> None:
    """``python -m tests.engine_matrix`` would change nothing."""
    noted = [json.loads(path.read_text(encoding="utf-8")) for path in (OUTCOMES, FAULTS)]

    assert render(*noted) == PAGE.read_text(encoding="utf-8")


def test_every_feature_names_tests_that_exist() -> None:
    """A renamed test would leave its row empty for ever."""
    named = [test for features in FEATURES.values() for tests in features.values() for test in tests]
    absent = [test for test in named if not _exists(*test.split("::", 1))]

    assert [] == absent
    assert not _exists("tests/capture/test_vllm_contract.py", "TestGone::test_a_row_belongs_to_its_token")
    assert not _exists("tests/capture/test_vllm_contract.py", "TestServer::test_gone")


def _exists(path: str, name: str) -> bool:
    """Whether a file has the test, or a class of that name which inherits it from the contract."""
    text = (ROOT / path).read_text(encoding="utf-8")
    suite, _, test = name.partition("::")
    inherited = f"\nclass {suite}(" in text and "EngineContract" in text and hasattr(EngineContract, test or "-")
    return name in functions_of(ROOT / path) or inherited


def test_a_cell_is_as_bad_as_its_worst_test() -> None:
    """All passed, one failed, one did not run."""
    ran = {"a": "passed", "b": "failed", "c": "passed"}

    assert ["yes", "no", "-"] == [cell_of(tests, ran) for tests in (("a", "c"), ("a", "b"), ("a", "d"))]
