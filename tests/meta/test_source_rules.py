"""Rules that ruff has no word for, over the source text of the package.

No environment reads, no ``global``, no broad ``except``, no ``assert`` for data, no drawer modules, nothing too long
to read. ``routeplane/testing`` may assert: its suites are tests that others run.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 70
DRAWERS = {"util", "utils", "common", "helper", "helpers", "misc"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
BROAD = {"Exception", "BaseException"}


# ----------------------------------------------------------------------------------------------------------------------
# The checker
# ----------------------------------------------------------------------------------------------------------------------


def find_source_problems(path: str, text: str) -> list[str]:
    """Every breach in one file, as ``file:line: what``; ``path`` is relative to the repository."""
    found = [(1, problem) for problem in _file_problems(path, text)]
    tree = ast.parse(text, path)
    found += [
        (node.lineno, "an entry point before the end: what is defined below it does not exist yet when it runs")
        for node in tree.body[:-1]
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
    ]
    for node in ast.walk(tree):
        found += [(getattr(node, "lineno", 1), problem) for problem in _node_problems(node)]
        if isinstance(node, ast.Assert) and not path.startswith("routeplane/testing"):
            found.append((node.lineno, "assert: raise an error from routeplane.errors, -O would drop this"))
    return [f"{path}:{line}: {problem}" for line, problem in sorted(found)]


def _file_problems(path: str, text: str) -> Iterator[str]:
    for part in Path(path).with_suffix("").parts:
        if part.strip("_") in DRAWERS:
            yield f"a module called {part} says nothing of what it owns"
    lines = len(text.splitlines())
    if lines > MAX_FILE_LINES:
        yield f"{lines} lines, at most {MAX_FILE_LINES}"


def _node_problems(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in ENVIRONMENT:
            yield f"os.{name}: the library reads no environment"
        case ast.ImportFrom(module="os", names=names):
            for alias in names:
                if alias.name in ENVIRONMENT:
                    yield f"os.{alias.name}: the library reads no environment"
        case ast.Global():
            yield f"global {', '.join(node.names)}: no process-global state"
        case ast.ExceptHandler(type=None):
            yield "bare except"
        case ast.ExceptHandler(type=caught) if caught is not None:
            # `except BaseException: undo(); raise` swallows nothing, and undoes on Ctrl-C too
            undoes = ast.unparse(caught) == "BaseException" and ast.unparse(node.body[-1]) == "raise"
            for each in caught.elts if isinstance(caught, ast.Tuple) else [caught]:
                if ast.unparse(each) in BROAD and not undoes:
                    yield f"except {ast.unparse(each)}: name what can be handled"
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{node.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"


# ----------------------------------------------------------------------------------------------------------------------
# The package
# ----------------------------------------------------------------------------------------------------------------------


def test_the_package_keeps_the_source_rules() -> None:
    """No file of the package breaks a rule."""
    files = sorted((ROOT / "routeplane").rglob("*.py"))
    found = [
        problem
        for path in files
        for problem in find_source_problems(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    ]

    assert ROOT / "routeplane" / "errors.py" in files
    assert [] == found


def test_the_package_ships_its_types() -> None:
    """Type checkers read the package's annotations only where the marker file lies."""
    assert (ROOT / "routeplane" / "py.typed").is_file()


# ----------------------------------------------------------------------------------------------------------------------
# The checker can fail
# ----------------------------------------------------------------------------------------------------------------------

CASES = {
    "environ": ("import os\nos.environ['A']\n", "2: os.environ: the library reads no environment"),
    "getenv": ("import os\nx = os.getenv('A')\n", "2: os.getenv: the library reads no environment"),
    "imported_environ": ("from os import environ as e\n", "1: os.environ: the library reads no environment"),
    "global": ("def f():\n    global a, b\n", "2: global a, b: no process-global state"),
    "bare_except": ("try:\n    f()\nexcept:\n    pass\n", "3: bare except"),
    "broad_except": ("try:\n    f()\nexcept Exception:\n    pass\n", "3: except Exception: name what can be handled"),
    "broad_in_a_tuple": (
        "try:\n    f()\nexcept (OSError, BaseException) as e:\n    pass\n",
        "3: except BaseException: name what can be handled",
    ),
    "broad_and_swallowed": (
        "try:\n    f()\nexcept BaseException:\n    undo()\n    if x:\n        raise\n",
        "3: except BaseException: name what can be handled",
    ),
    "entry_point_in_the_middle": (
        "if __name__ == '__main__':\n    main()\nX = 1\n",
        "1: an entry point before the end: what is defined below it does not exist yet when it runs",
    ),
    "assert": ("assert x\n", "1: assert: raise an error from routeplane.errors, -O would drop this"),
    "long_function": ("def f():\n" + "    x\n" * MAX_FUNCTION_LINES, "1: f has 71 lines, at most 70"),
    "long_method": (
        "class A:\n    async def f(self):\n" + "        x\n" * MAX_FUNCTION_LINES,
        "2: f has 71 lines, at most 70",
    ),
    "long_file": ("x = 1\n" * (MAX_FILE_LINES + 1), "1: 801 lines, at most 800"),
}


@pytest.mark.parametrize(("text", "problem"), CASES.values(), ids=CASES)
def test_a_breach_is_named(text: str, problem: str) -> None:
    """Each breach is reported once, with its line."""
    assert [f"routeplane/a.py:{problem}"] == find_source_problems("routeplane/a.py", text)


@pytest.mark.parametrize("path", ["routeplane/utils.py", "routeplane/replay/_helpers.py", "routeplane/common/gate.py"])
def test_a_drawer_is_named(path: str) -> None:
    """A module or folder whose name says nothing is reported."""
    assert 1 == len(find_source_problems(path, ""))


def test_what_is_allowed_is_not_reported() -> None:
    """Named exceptions, undoing and re-raising, os.path, code at the limits, and asserts of public suites are fine."""
    text = "import os\nos.path\ntry:\n    f()\nexcept (OSError, ValueError):\n    pass\n"
    undo = "try:\n    f()\nexcept BaseException:\n    undo()\n    raise\n"
    at_limit = "def f():\n" + "    x\n" * (MAX_FUNCTION_LINES - 1)

    assert [] == find_source_problems("routeplane/a.py", text + undo)
    assert [] == find_source_problems("routeplane/a.py", at_limit + "x = 1\n" * (MAX_FILE_LINES - MAX_FUNCTION_LINES))
    assert [] == find_source_problems("routeplane/testing/suite.py", "assert x\n")
