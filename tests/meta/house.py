"""The house rules as figures: how large the tree is, how it is named, how it reads.

``measure`` returns one figure a rule, ``BARS`` the largest (for doctests: the smallest) figure that is allowed. A bar
starts where the code stands and is lowered as the code improves; ``GOALS`` holds the figures of the design where they
differ. ``python -m tests.meta.house`` prints the table and exits with 1 where a bar does not hold.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING

from tests.meta.import_graph import find_graph_problems

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["BARS", "EXPLAINED_DUPLICATES", "PlainWords", "find_words", "measure"]

ROOT = Path(__file__).parents[2]

#: Rule -> the largest figure allowed (``doctests``: the smallest).
BARS: dict[str, float] = {
    # the design's 13 and `__main__.py`, which is where `python -m routeplane` looks
    "root entries": 14,
    "root python files": 3,
    # one of them is `__main__.py`, two lines that `python -m routeplane` needs
    "modules": 140,
    "lines": 53_000,
    "lines of stream/": 4_040,
    "files under 60 lines": 8,
    "import problems, cycles included": 0,
    "duplicate basenames": 0,
    "public names": 200,
    "import paths in docs": 15,
    "public functions with more than 8 parameters": 0,
    "function lines, median": 8,
    "function lines, p90": 25,
    "words of design section 8": 0,
    "public classes and functions without example": 0,
    "doctests": 250,
}
#: What the design asks for, where a bar still stands elsewhere.
GOALS: dict[str, float] = {"lines": 32_000, "lines of stream/": 3_600}

#: Basenames that two modules share, and why both keep the name.
EXPLAINED_DUPLICATES: dict[str, str] = {
    "transformers": "capture and replay name an adapter after the library that it adapts to",
}

#: Packages behind a face: the compiled loops, and the demo that the command runs.
PRIVATE_PACKAGES = {"kernels", "demo"}

#: Files that name the expressions to say that they are ruled out.
NAMES_WORDS = {"tests/meta/house.py", "tests/meta/test_house.py"}

#: Constructors of values have as many parameters as the value has fields.
VALUE_CONSTRUCTORS = {"RouteRecord", "ModelCall"}


@dataclass(frozen=True, kw_only=True)
class PlainWords:
    """One expression that prose and names must not use, and what to write."""

    pattern: str
    instead: str


#: Design section 8. Searched without regard to case, in code, docs, errors and test names.
WORDS = (
    PlainWords(pattern=r"(?<![a-z])whoever(?![a-z])", instead="name the person or the part"),
    PlainWords(pattern=r"(?<![a-z])nobody(?![a-z])", instead="no reader, no module, no user"),
    PlainWords(pattern=r"(?<![a-z])anew(?![a-z])", instead="again, from the start"),
    PlainWords(pattern=r"\blets?\s+go\s+of\b", instead="closed, freed, released"),
    PlainWords(pattern=r"\bthat\s+which\b", instead="what"),
    PlainWords(pattern=r"(?<!there )\bis no (?!longer)", instead="is not a"),
    PlainWords(pattern=r"(?<!there)_is_no_(?!longer)", instead="is_not"),
    PlainWords(pattern=r"\broom\b", instead="space, capacity"),
    PlainWords(pattern=r"\bby participles\b", instead="a noun"),
    PlainWords(pattern=r"arrives?[ _]as[ _]nothing", instead="an empty result"),
)
#: Class names that are participles or furniture.
CLASS_WORDS = re.compile(
    r"^_?(Taken|Wanted|Shelf|Desk|Line|Back|Asked|Given|Opened|Joined|Received|Recovered|Quarantined|Held|Kept|Dealt|"
    r"Checked|Parsing|Answering|Reading|Read|Open|NotYet|Unnoticed|Loaded\w*|\w*Desk|\w*Shelf|\w*Back|\w*Line)$"
)


def _python(folder: str) -> dict[str, str]:
    files = sorted((ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}


def _pages() -> dict[str, str]:
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}


def find_words(texts: Mapping[str, str]) -> list[str]:
    """Every use of an expression that design section 8 rules out, as ``file:line: expression (write: ...)``."""
    found = []
    for path, text in texts.items():
        for rule in WORDS:
            found += [
                f"{path}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r} (write: {rule.instead})"
                for match in re.finditer(rule.pattern, text, re.IGNORECASE)
            ]
        if path.endswith(".py"):
            found += [
                f"{path}:{text.count(chr(10), 0, match.start(1)) + 1}: class {match[1]} (write: what it holds)"
                for match in re.finditer(r"^\s*class (\w+)", text, re.MULTILINE)
                if CLASS_WORDS.match(match[1])
            ]
    return found


def duplicate_basenames(paths: list[str]) -> list[str]:
    """Names that several modules or packages have in different folders, without those in EXPLAINED_DUPLICATES."""
    names = Counter(
        Path(path).parent.name if path.endswith("__init__.py") else Path(path).stem
        for path in paths
        if path != "routeplane/__init__.py"
    )
    # `batch/batch.py` is the idea that its folder is named after
    own = {Path(path).stem for path in paths if Path(path).stem == Path(path).parent.name}
    return sorted(name for name, count in names.items() if count - (name in own) > 1)


def public_names(sources: Mapping[str, str]) -> set[str]:
    """What the package faces export: ``__all__`` of every ``__init__.py``, but of those that no user imports."""
    return {
        name
        for path, text in sources.items()
        if path.endswith("__init__.py") and Path(path).parent.name not in PRIVATE_PACKAGES
        for name in _exported(ast.parse(text))
    }


def _exported(tree: ast.Module) -> list[str]:
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            value = getattr(node, "value", None)
            return [str(name) for name in ast.literal_eval(value)] if value is not None else []
    return []


def import_paths(pages: Mapping[str, str]) -> set[str]:
    """The modules that Python blocks of the docs import from routeplane."""
    return {
        match[1] or match[2]
        for text in pages.values()
        for match in re.finditer(r"(?m)^\s*(?:from (routeplane[\w.]*) import|import (routeplane[\w.]*))", text)
    }


def wide_functions(sources: Mapping[str, str]) -> list[str]:
    """Public functions and methods with more than 8 parameters, as ``file:line: name (count)``."""
    found = []
    for path, text in sources.items():
        for owner, node in _functions(ast.parse(text)):
            if owner in VALUE_CONSTRUCTORS or (node.name.startswith("_") and node.name != "__init__"):
                continue
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len([item for item in arguments if item.arg not in ("self", "cls")])
            if count > 8 and not owner.startswith("_"):
                found.append(f"{path}:{node.lineno}: {owner + '.' if owner else ''}{node.name} ({count})")
    return found


def _functions(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield owner, node
            # what a function defines inside is not public
            yield from (("_", inner) for _, inner in _functions(node, owner))
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, node.name)
        else:
            yield from _functions(node, owner)


def _examples(tree: ast.Module) -> int:
    """How many docstrings of a file show an example."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return sum(">>> " in (ast.get_docstring(node) or "") for node in ast.walk(tree) if isinstance(node, kinds))


def names_without_example(sources: Mapping[str, str]) -> set[str]:
    """Classes and functions of the faces that show no example: ``>>>`` (run), or ``Example`` where it needs an engine,
    a cluster or a model.
    """
    public, shown, found = public_names(sources), set(), set()
    for text in sources.values():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name in public:
                found.add(node.name)
                inner = [one for one in ast.walk(node) if isinstance(one, ast.ClassDef | ast.FunctionDef)]
                docs = [ast.get_docstring(one) or "" for one in (node, *inner)]
                if any(">>> " in one or "Example" in one for one in docs):
                    shown.add(node.name)
    return found - shown


def measure() -> dict[str, float]:
    """Every figure of BARS, from the tree as it is now."""
    sources, pages = _python("routeplane"), _pages()
    tests = {**_python("tests"), **_python("benchmarks")}
    # these two name the expressions
    tests = {
        path: text for path, text in tests.items() if path not in ("tests/meta/house.py", "tests/meta/test_house.py")
    }
    lines = sorted(
        (node.end_lineno or 0) - node.lineno + 1 for text in sources.values() for _, node in _functions(ast.parse(text))
    )
    small = [path for path, text in sources.items() if not path.endswith("__init__.py") and text.count("\n") < 60]
    root = [entry.name for entry in (ROOT / "routeplane").iterdir() if entry.name != "__pycache__"]
    unexplained = [name for name in duplicate_basenames(list(sources)) if name not in EXPLAINED_DUPLICATES]
    return {
        "root entries": len(root),
        "root python files": len([name for name in root if name.endswith(".py")]),
        "modules": len(sources),
        "lines": sum(text.count("\n") for text in sources.values()),
        "lines of stream/": sum(text.count("\n") for path, text in sources.items() if "/stream/" in path),
        "files under 60 lines": len(small),
        "import problems, cycles included": len(find_graph_problems(sources)),
        "duplicate basenames": len(unexplained),
        "public names": len(public_names(sources)),
        "import paths in docs": len(import_paths(pages)),
        "public functions with more than 8 parameters": len(wide_functions(sources)),
        "function lines, median": lines[len(lines) // 2],
        "function lines, p90": quantiles(lines, n=10)[-1],
        "words of design section 8": len(find_words({**sources, **tests, **pages})),
        "public classes and functions without example": len(names_without_example(sources)),
        "doctests": sum(_examples(ast.parse(text)) for text in sources.values()),
    }


def holds(rule: str, value: float) -> bool:
    """Whether a figure keeps its bar."""
    return value >= BARS[rule] if rule == "doctests" else value <= BARS[rule]


def main() -> int:
    """Print the table; 1 where a bar does not hold."""
    figures = measure()
    for rule, value in figures.items():
        goal = f" (goal {GOALS[rule]:g})" if rule in GOALS else ""
        print(f"{rule:48} {value:6g}  bar {BARS[rule]:g}{goal}{'' if holds(rule, value) else '  MISSED'}")
    return 0 if all(holds(rule, value) for rule, value in figures.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
