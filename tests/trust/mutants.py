"""Mutation testing: is a small change of a rule found by the tests of its module? ``python -m tests.trust.mutants``.

Mutants are drawn by seed from all changes that ``changes_of`` knows, over the modules of ``TESTS``. Each is tried in a
forked child that imports the library with that one change and runs only the tests of the module, until one fails. A
child that outlasts its time counts as found: the change made a loop, and a run of the tests would end by its timeout.
What survives is listed; ``EQUIVALENT`` says of which changes it is known that no test can tell them, and why.
"""

# ruff: noqa: T201  it prints a table

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.util
import json
import os
import random
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np  # noqa: F401  what children would import each by itself
import pyarrow as pa  # noqa: F401
import pytest

__all__ = ["EQUIVALENT", "TESTS", "Mutant", "changes_of", "mutants_of", "tried"]

ROOT = Path(__file__).parents[2]

#: Module -> the tests that own its rules.
TESTS: dict[str, tuple[str, ...]] = {
    "routeplane/record/alarms.py": ("tests/record/test_alarms.py",),
    "routeplane/record/assembly.py": (
        "tests/record/test_assembly.py",
        "tests/record/test_assembly_field.py",
        "tests/capture/test_versions.py",
    ),
    "routeplane/record/calls.py": ("tests/record/test_calls.py", "tests/record/test_aligned.py"),
    "routeplane/record/checksum.py": ("tests/record/test_checksum.py",),
    "routeplane/record/interfaces.py": (
        "tests/record/test_admission.py",
        "tests/record/test_positions.py",
        "tests/record/test_interfaces.py",
    ),
    "routeplane/record/prefixes.py": ("tests/record/test_prefixes.py", "tests/record/test_shared_prompts.py"),
    "routeplane/record/record.py": (
        "tests/record/test_record.py",
        "tests/record/test_record_ownership.py",
        "tests/record/test_columnar.py",
    ),
    "routeplane/record/rows.py": ("tests/record/test_rows.py",),
    "routeplane/record/spans.py": (
        "tests/record/test_spans.py",
        "tests/record/test_coverage.py",
        "tests/capture/test_versions.py",
    ),
    "routeplane/record/spec.py": ("tests/record/test_spec.py",),
    "routeplane/record/validate.py": (
        "tests/record/test_validate.py",
        "tests/record/test_aligned.py",
        "tests/record/test_kernels.py",
    ),
    "routeplane/batch/plan.py": (
        "tests/batch/test_plan.py",
        "tests/batch/test_budget.py",
        "tests/batch/test_stack_plans.py",
        "tests/batch/test_batch_even.py",
    ),
    "routeplane/batch/slots.py": ("tests/batch/test_shard.py", "tests/batch/test_plan.py"),
}

#: Changes that mean the same: module, then the statement before and behind the change, then why.
EQUIVALENT: dict[tuple[str, str, str], str] = {}

#: The parent has imported hypothesis, so that its children need not: pytest warns that it will not rewrite it.
_KNOWN = "ignore::pytest.PytestAssertRewriteWarning"

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


# ----------------------------------------------------------------------------------------------------------------------
# Changes
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change: the module, the line, and its innermost statement before and behind it."""

    path: str
    index: int
    line: int
    before: str
    behind: str

    @property
    def reason(self) -> str | None:
        """Why no test can tell it, where that is known."""
        return EQUIVALENT.get((self.path, self.before, self.behind))


def changes_of(node: ast.AST) -> Iterator[Callable[[], None]]:
    """What can be changed in a node itself: comparisons, arithmetic, conditions, numbers, and what is raised."""
    match node:
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                if type(op) in _COMPARED:
                    yield lambda at=at, op=op: ops.__setitem__(at, _COMPARED[type(op)]())  # type: ignore[misc]
        case ast.BinOp(op=operator) | ast.AugAssign(op=operator) if type(operator) in _COMPUTED:
            yield lambda: setattr(node, "op", _COMPUTED[type(operator)]())
        case ast.BoolOp(op=both):
            yield lambda: setattr(node, "op", ast.Or() if isinstance(both, ast.And) else ast.And())
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            if not isinstance(test, ast.Compare | ast.BoolOp):
                yield lambda: setattr(node, "test", ast.UnaryOp(op=ast.Not(), operand=test))
        case ast.Constant(value=bool(value)):
            yield lambda: setattr(node, "value", not value)
        case ast.Constant(value=int(value)):
            yield lambda: setattr(node, "value", value + 1)


def _sites(tree: ast.Module) -> Iterator[tuple[ast.stmt, Callable[[], None]]]:
    """Each change with the statement that it is in. Texts, types, decorators and what only type checkers see stay."""

    def walk(node: ast.AST, inside: ast.stmt | None) -> Iterator[tuple[ast.stmt, Callable[[], None]]]:
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            return
        inside = node if isinstance(node, ast.stmt) else inside
        if inside is not None:
            yield from ((inside, change) for change in changes_of(node))
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                yield inside, lambda: _forget_to_raise(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child, inside)

    yield from walk(tree, None)


def _forget_to_raise(node: ast.Raise) -> None:
    """Make the error, and do not raise it."""
    assert node.exc is not None
    made = node.exc
    node.__class__ = ast.Expr  # type: ignore[assignment]  # in place, whatever list holds it
    node.value = made  # type: ignore[attr-defined]
    setattr(node, "_fields", ("value",))  # noqa: B010  a class variable to type checkers


def _text(node: ast.stmt) -> str:
    """The first line of a statement."""
    return ast.unparse(node).splitlines()[0]


def mutants_of(path: str) -> list[Mutant]:
    """Every change of a module that is not a change of its text alone."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    found = []
    for index, _ in enumerate(_sites(tree)):
        changed = copy.deepcopy(tree)
        inside, change = next(site for at, site in enumerate(_sites(changed)) if at == index)
        before = _text(inside)
        change()
        behind = _text(inside)
        found.append(Mutant(path=path, index=index, line=inside.lineno, before=before, behind=behind))
    return found


def _changed(mutant: Mutant) -> ast.Module:
    tree = ast.parse((ROOT / mutant.path).read_text(encoding="utf-8"))
    _, change = next(site for at, site in enumerate(_sites(tree)) if at == mutant.index)
    change()
    return ast.fix_missing_locations(tree)


# ----------------------------------------------------------------------------------------------------------------------
# Trying one
# ----------------------------------------------------------------------------------------------------------------------


class _Loader(SourceFileLoader):
    """Loads one module from a changed tree."""

    def __init__(self, name: str, path: str, tree: ast.Module) -> None:
        super().__init__(name, path)
        self._tree = tree

    def get_code(self, fullname: str) -> Any:
        return compile(self._tree, self.path, "exec")


class _Finder:
    """Finds the module that was changed."""

    def __init__(self, name: str, path: str, tree: ast.Module) -> None:
        self._name, self._loader = name, _Loader(name, path, tree)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The module's specification; None for every other one."""
        del path, target
        if name != self._name:
            return None
        return importlib.util.spec_from_file_location(name, self._loader.path, loader=self._loader)


class _First:
    """Notes the first test that failed, and has hypothesis try few examples, the same in each child."""

    def __init__(self) -> None:
        self.failed: str | None = None

    def pytest_configure(self, config: Any) -> None:
        """Behind the project's own profiles."""
        del config
        given = hypothesis.settings.get_profile("ci")
        hypothesis.settings.register_profile("mutants", given, max_examples=30)
        hypothesis.settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test, or what sets it up, failed."""
        if report.failed and self.failed is None:
            self.failed = report.nodeid


def _child(mutant: Mutant | None, tests: tuple[str, ...], say: int) -> None:
    """Import the library with the change, run the tests, say which failed first, and end."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    if mutant is not None:
        name = mutant.path.removesuffix(".py").replace("/", ".")
        sys.meta_path.insert(0, _Finder(name, str(ROOT / mutant.path), _changed(mutant)))
    first = _First()
    arguments = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "faulthandler_timeout=0",
        "-W",
        _KNOWN,
        "-m",
        "not slow and not nightly",
    ]
    code = pytest.main([*arguments, *tests], plugins=[first])
    os.write(say, json.dumps([int(code), first.failed]).encode())


def tried(mutant: Mutant | None, tests: tuple[str, ...], *, timeout_s: float) -> str | None:
    """What found the change: a test, ``import`` or ``timeout``; None where it survived. No mutant: no change."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        os.setpgid(0, 0)  # its own children end with it
        try:
            _child(mutant, tests, write)
        finally:
            os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], timeout_s)
    said = os.read(read, 65_536) if ready else b""
    os.close(read)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if not ready:
        return "timeout"
    code, failed = json.loads(said) if said else (2, None)
    return None if code == 0 else failed or "import"


# ----------------------------------------------------------------------------------------------------------------------
# All of them
# ----------------------------------------------------------------------------------------------------------------------


def main() -> int:
    """Try a sample and print what survived, then a table."""
    parser = argparse.ArgumentParser(prog="tests.trust.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modules", nargs="*", default=list(TESTS), choices=list(TESTS))
    arguments = parser.parse_args()
    everything = [mutant for path in arguments.modules for mutant in mutants_of(path)]
    sample = random.Random(arguments.seed).sample(everything, min(arguments.count, len(everything)))
    print(f"{len(sample)} of {len(everything)} changes of {len(arguments.modules)} modules, seed {arguments.seed}")
    tally, limits, begun = Counter[tuple[str, str]](), dict[str, float](), time.monotonic()
    for mutant in sorted(sample, key=lambda each: (each.path, each.line, each.index)):
        tests = TESTS[mutant.path]
        if mutant.path not in limits:
            start = time.monotonic()
            found = tried(None, tests, timeout_s=600.0)
            if found is not None:
                sys.exit(f"expected the tests of {mutant.path} to pass, got {found}")
            limits[mutant.path] = 10.0 + 4 * (time.monotonic() - start)
        found = tried(mutant, tests, timeout_s=limits[mutant.path])
        verdict = "killed" if found else "equivalent" if mutant.reason else "survived"
        tally[mutant.path, verdict] += 1
        if verdict == "survived":
            print(f"survived: {mutant.path}:{mutant.line}\n    - {mutant.before}\n    + {mutant.behind}", flush=True)
    print(f"\n{time.monotonic() - begun:.0f} s\n\n| module | killed | equivalent | survived |\n|---|---|---|---|")
    for path in [*sorted(limits), "all"]:
        counts = [
            sum(n for (each, verdict), n in tally.items() if verdict == wanted and path in (each, "all"))
            for wanted in ("killed", "equivalent", "survived")
        ]
        print(f"| `{path}` | " + " | ".join(map(str, counts)) + " |")
    survived = sum(n for (_, verdict), n in tally.items() if verdict == "survived")
    judged = len(sample) - sum(n for (_, verdict), n in tally.items() if verdict == "equivalent")
    print(f"\n{judged - survived} of {judged} found: {(judged - survived) / max(1, judged):.1%}")
    return 0 if survived <= judged // 10 else 1


if __name__ == "__main__":
    sys.exit(main())
