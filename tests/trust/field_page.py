"""docs/reference/field-faults.md, made from tests/field_rows.json: ``python -m tests.trust.field_page`` writes it.

The column of errors is read from the source of the tests that a row names: each ``ErrorKind`` in it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from routeplane.errors import ErrorKind

__all__ = ["PAGE", "page_of"]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "field-faults.md"

PARTS = {
    "A": "Missing rows, off by one, alignment with tokens",
    "B": "Boundaries between turns",
    "C": "Padding and sentinels",
    "D": "Types and narrowing",
    "E": "The axis of layers",
    "F": "Illegal ids and captures of zeros",
    "G": "Preemption, prefix caches, chunked prefill",
    "H": "Several samples of one prompt",
    "I": "Speculative decoding",
    "J": "Physical and logical experts",
    "K": "Packing, context and sequence parallelism",
    "L": "Recomputation",
    "M": "Memory and performance",
    "N": "Transport: corruption and truncation",
    "O": "Versions and schemas",
    "P": "Aborts, partial rollouts, updates of the weights",
    "Q": "Resume and checkpoints",
    "R": "Media",
    "2": "Second round: answers, versions, geometry",
}

_HEAD = """# Faults of the field

Every kind of fault that public reports of this field describe, and what catches it here: the errors and alarms that its
tests name, and the tests. Where nothing here can catch a kind, the reason stands instead.
The data is [`tests/field_rows.json`](../../tests/field_rows.json); a test compares this page with it, and a run of
`make test` fails unless each named test ran and passed. [Errors](errors.md) says what each kind means.
"""

_TABLE = ("| # | report | kind | errors | caught by |", "|---|---|---|---|---|")


@cache
def _tree(path: str) -> Mapping[str, str]:
    """Name of each test function of a file -> its source."""
    text = (ROOT / path).read_text(encoding="utf-8")
    found = {}
    for node in ast.parse(text).body:
        for item in (node, *getattr(node, "body", ())):
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                owner = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
                lines = text.splitlines()
                first = min([item.lineno, *(one.lineno for one in item.decorator_list)])
                found[owner + item.name] = "\n".join(lines[first - 1 : item.end_lineno])
    return found


def _kinds(tests: Sequence[str]) -> list[str]:
    """Values of the error kinds that the tests' source names, in the order of ErrorKind."""
    source = "\n".join(_tree(path)[name] for path, _, name in (test.partition("::") for test in tests))
    named = set(re.findall(r"ErrorKind\.(\w+)", source)) | {word.upper() for word in re.findall(r'"([a-z_]+)"', source)}
    return [f"`{kind.value}`" for kind in ErrorKind if kind.name in named]


def _row(row: Mapping[str, Any]) -> str:
    tests = row.get("tests", ())
    caught = "<br>".join(f"`{test.removeprefix('tests/')}`" for test in tests) or f"not here: {row['reason']}"
    cells = (str(row["row"]), row["report"], row["kind"], ", ".join(_kinds(tests)), caught)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """The text of the page."""
    parts = []
    for part, title in PARTS.items():
        lines = [_row(row) for row in rows if row["part"] == part]
        parts.append("\n".join([f"## {title}", "", *_TABLE, *lines]))
    return "\n\n".join([_HEAD.strip(), *parts]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page_of(json.loads((ROOT / "tests" / "field_rows.json").read_text())["rows"]), encoding="utf-8")
