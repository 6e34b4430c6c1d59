"""Every public bug report that is mapped here is caught by a named test, or says why nothing here can catch it.

``tests/field_rows.json`` is the map. That the named tests also ran and passed is checked at the end of the run that
``make test`` starts (``--field-rows``, see ``tests/conftest.py``).
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.trust.field_page import PAGE, page_of

ROOT = Path(__file__).parents[2]
ROWS: list[dict[str, Any]] = json.loads((ROOT / "tests" / "field_rows.json").read_text())["rows"]

#: The reports, by part and number (which have gaps).
REPORTS = {
    "A": (1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14),
    "B": (15, 17, 18, 20, 21, 22, 23),
    "C": (24, 25, 26, 27, 28, 30, 31, 32, 33),
    "D": (35, 36, 37, 38, 39, 40, 41, 42),
    "E": (43, 44, 45, 47, 48, 49, 50, 51, 52, 54, 56, 57, 58),
    "F": (59, 60, 61, 62, 63, 64),
    "G": (66, 67, 68, 69, 70, 71, 72, 73, 74),
    "H": (75, 76, 77, 78),
    "I": (80, 81),
    "J": (82, 83, 84, 85),
    "K": (86, 87, 88, 89),
    "L": (90, 91, 92, 93, 94),
    "M": (95, 96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 107),
    "N": (108, 109, 110, 111, 112, 113, 114, 115, 116, 117, 118, 119, 120, 121, 122),
    "O": (124, 125, 126, 127),
    "P": (128, 129, 131, 133, 134),
    "Q": (135, 136, 137, 138),
    "R": (139,),
    # the second round: reports of answers, versions and geometry
    "2": tuple(range(1, 51)),
}


def functions_of(path: Path) -> set[str]:
    """Names of the test functions of a file, ``Class::name`` inside a class."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return found


def test_every_report_is_mapped_once() -> None:
    """The map has exactly these reports."""
    expected = [(part, number) for part, numbers in REPORTS.items() for number in numbers]
    assert expected == [(row["part"], row["row"]) for row in ROWS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['part']}{row['row']}")
def test_each_row_names_tests_that_exist_or_a_reason(row: dict[str, Any]) -> None:
    """A row has a kind, and either existing tests or the reason why a later stage, or no library, can catch it."""
    assert row["kind"]
    assert ("tests" in row) != ("reason" in row)
    assert row.get("reason", "-").strip()
    for test in row.get("tests", ()):
        path, _, name = test.partition("::")
        assert name in functions_of(ROOT / path), test


def test_the_page_is_that_of_the_map() -> None:
    """docs/reference/field-faults.md is what ``python -m tests.trust.field_page`` makes of the rows."""
    assert page_of(ROWS) == PAGE.read_text(encoding="utf-8")


def test_every_report_of_the_page_has_a_heading() -> None:
    """A row whose part has no heading would be left out in silence."""
    written = PAGE.read_text(encoding="utf-8")
    assert len(ROWS) == sum(line.startswith("| ") and line[2].isdigit() for line in written.splitlines())
