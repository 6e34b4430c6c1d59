"""Mutation testing: is a small change of a rule found by the tests of its module? ``python -m tests.trust.mutants``.

Mutants are drawn by seed from all changes that ``changes_of`` knows, over the modules of ``TESTS``. A change is drawn
by its text and not by its place, so that a sample stays nearly the same when other code changes. Each is tried in a
forked child that imports the library with that one change and runs those tests of the module that reach its
statement, the quickest first, until one fails. A child that outlasts its time counts as found: the change made a loop,
and a run of the tests would end by its timeout. What survives is listed; ``EQUIVALENT`` says of which changes it is
known that no test can tell them, and why.

Arguments: ``--results`` a file that each verdict is added to, from which a run that was stopped goes on; ``--again``
tries only what survived according to that file.
"""

# ruff: noqa: T201  it prints a table

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import hashlib
import importlib.util
import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
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
        "tests/record/test_refusals.py",
        "tests/record/test_assembly.py",
        "tests/record/test_assembly_field.py",
        "tests/capture/test_versions.py",
    ),
    "routeplane/record/calls.py": (
        "tests/record/test_refusals.py",
        "tests/record/test_calls.py",
        "tests/record/test_aligned.py",
    ),
    "routeplane/record/checksum.py": ("tests/record/test_checksum.py",),
    "routeplane/record/interfaces.py": (
        "tests/record/test_refusals.py",
        "tests/record/test_admission.py",
        "tests/record/test_positions.py",
        "tests/record/test_interfaces.py",
    ),
    "routeplane/record/prefixes.py": (
        "tests/record/test_refusals.py",
        "tests/record/test_prefixes.py",
        "tests/record/test_shared_prompts.py",
    ),
    "routeplane/record/record.py": (
        "tests/record/test_refusals.py",
        "tests/record/test_record.py",
        "tests/record/test_record_ownership.py",
        "tests/record/test_checksum.py",
        "tests/record/test_aligned.py",
        "tests/record/test_prefixes.py",
        "tests/record/test_columnar.py",
    ),
    "routeplane/record/rows.py": (
        "tests/record/test_refusals.py",
        "tests/record/test_rows.py",
    ),
    "routeplane/record/spans.py": (
        "tests/record/test_refusals.py",
        "tests/record/test_spans.py",
        "tests/record/test_coverage.py",
    ),
    "routeplane/record/spec.py": (
        "tests/record/test_refusals.py",
        "tests/record/test_spec.py",
    ),
    "routeplane/record/validate.py": (
        "tests/record/test_refusals.py",
        "tests/record/test_validate.py",
        "tests/record/test_aligned.py",
    ),
    "routeplane/batch/plan.py": (
        "tests/batch/test_plan.py",
        "tests/batch/test_budget.py",
        "tests/batch/test_stack_plans.py",
        "tests/batch/test_batch_even.py",
    ),
    "routeplane/batch/slots.py": (
        "tests/batch/test_shard.py",
        "tests/batch/test_plan.py",
        "tests/batch/test_stack_plans.py",
    ),
}

#: Tests of these files whose processes import the library themselves, without the change.
_APART = ("tests/batch/test_batch_even.py::test_two_ranks_take_as_many_steps",)

#: Changes that mean the same: module, then the statement before and behind the change, then why.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "routeplane/batch/plan.py",
        "counts_N = self.gather([np.diff(each) for each in offsets], fill=0).reshape(-1)",
        "counts_N = self.gather([np.diff(each) for each in offsets], fill=0).reshape(-2)",
    ): "numpy takes any negative number for the length that is open",
    (
        "routeplane/batch/plan.py",
        "rows: int = 0",
        "rows: int = 1",
    ): "rows of a rank that has no group yet are not looked at",
    (
        "routeplane/record/spans.py",
        "if type(start) is type(stop) is int and 0 <= start < stop < 2 ** 63 and (type(item.call) is str) and "
        "item.call.isascii() and (version is None or (type(version) is int and -2 ** 63 <= version < 2 ** 63)):",
        "if type(start) is type(stop) is int and 1 <= start < stop < 2 ** 63 and (type(item.call) is str) and "
        "item.call.isascii() and (version is None or (type(version) is int and -2 ** 63 <= version < 2 ** 63)):",
    ): "what is not let through at once is looked at field by field, and is legal there",
    (
        "routeplane/record/validate.py",
        "return np.ascontiguousarray(block_SLK.reshape(-1, block_SLK.shape[2]).T)",
        "return np.ascontiguousarray(block_SLK.reshape(-2, block_SLK.shape[2]).T)",
    ): "numpy takes any negative number for the length that is open",
    (
        "routeplane/record/alarms.py",
        "best, start = (longest_run, -1)",
        "best, start = (longest_run, -2)",
    ): "any number below 0 stands for no run",
    (
        "routeplane/record/alarms.py",
        "if (routes_SLK[kept[spaced]] >= halves_L1).any():",
        "if (routes_SLK[kept[spaced]] > halves_L1).any():",
    ): "the first look only saves the full one, which asks the same of every row",
    (
        "routeplane/record/record.py",
        "if verify and out is not None:",
        "if verify or out is not None:",
    ): "a checksum that was made a moment ago equals itself",
    ("routeplane/record/rows.py", "_FEW_TOKENS = 16", "_FEW_TOKENS = 17"): "how many rows are looked at in one go",
    (
        "routeplane/record/rows.py",
        "for start, stop in _blocks(stored_SLK, spec, nbytes=_WIDE_BYTES if wide else _BLOCK_BYTES):",
        "for start, stop in _blocks(stored_SLK, spec, nbytes=_WIDE_BYTES if not wide else _BLOCK_BYTES):",
    ): "how many rows are looked at in one go",
}

#: How a change can end: a test failed, the tests did not end, no test can tell, no test told.
_KINDS = ("killed", "timeout", "equivalent", "survived")

#: What takes long to import, and is not the library's: the parent imports those that the tests of a module do.
_HEAVY = frozenset(
    {"numba", "torch", "pandas", "polars", "duckdb", "pyarrow.flight", "pyarrow.parquet", "hypothesis.stateful"}
)

#: What a child says whose library was imported without the change.
_UNCHANGED = -1

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
    """One change: the module, the lines, and its innermost statement before and behind it.

    ``lines`` are those of the statement without its body; empty where it is carried out by the import of the module.
    ``nth`` counts changes of one text.
    """

    path: str
    index: int
    line: int
    lines: range
    before: str
    behind: str
    nth: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What names it wherever its statement stands."""
        return self.path, self.before, self.behind, self.nth

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


@dataclass(frozen=True)
class _Site:
    """A node that can be changed: its innermost statement, and whether a function's call carries that out."""

    node: ast.AST
    inside: ast.stmt
    called: bool
    change: Callable[[], None]


def _sites(tree: ast.Module) -> Iterator[_Site]:
    """Each change. Texts, types, decorators and what only type checkers see stay."""

    def walk(node: ast.AST, inside: ast.stmt | None, called: bool) -> Iterator[_Site]:
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            return
        inside = node if isinstance(node, ast.stmt) else inside
        if inside is not None:
            yield from (_Site(node, inside, called, change) for change in changes_of(node))
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                yield _Site(node, inside, called, lambda: _forget_to_raise(node))
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            body = called or (name == "body" and isinstance(node, ast.FunctionDef | ast.Lambda))
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child, inside, body)

    yield from walk(tree, None, False)


@contextlib.contextmanager
def _restored(node: ast.AST) -> Iterator[None]:
    """Undo what is done to a node itself."""
    kind, fields = node.__class__, dict(vars(node))
    held = [(value, list(value)) for value in fields.values() if isinstance(value, list)]
    yield
    node.__class__ = kind
    vars(node).clear()
    vars(node).update(fields)
    for value, before in held:
        value[:] = before


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
    found, known = [], Counter[tuple[str, str]]()
    for index, site in enumerate(_sites(tree)):
        before, lines = _text(site.inside), _lines(site.inside) if site.called else range(0)
        with _restored(site.node):
            site.change()
            behind = _text(site.inside)
        nth = known[before, behind]
        known[before, behind] += 1
        line = site.inside.lineno
        found.append(Mutant(path=path, index=index, line=line, lines=lines, before=before, behind=behind, nth=nth))
    return found


def _lines(node: ast.stmt) -> range:
    """The lines of a statement without its body."""
    body = getattr(node, "body", None)
    last = body[0].lineno - 1 if isinstance(body, list) and body else node.end_lineno or node.lineno
    return range(node.lineno, max(node.lineno, last) + 1)


def sampled(mutants: list[Mutant], count: int, *, seed: int) -> list[Mutant]:
    """``count`` of the mutants: those whose keys have the least digests under the seed."""
    return sorted(mutants, key=lambda each: hashlib.sha256(repr((seed, each.key)).encode()).digest())[:count]


def _changed(mutant: Mutant) -> ast.Module:
    tree = ast.parse((ROOT / mutant.path).read_text(encoding="utf-8"))
    next(site for at, site in enumerate(_sites(tree)) if at == mutant.index).change()
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
    """Runs the wanted tests in their order, notes the first that failed, and has hypothesis try few examples.

    The examples are the same in each child.
    """

    def __init__(self, wanted: Sequence[str] | None) -> None:
        self.failed: str | None = None
        self._order = None if wanted is None else {name: at for at, name in enumerate(wanted)}

    def pytest_configure(self, config: Any) -> None:
        """Behind the project's own profiles."""
        del config
        given = hypothesis.settings.get_profile("ci")
        # whether a test fails is asked, and not for its smallest example
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("mutants", given, max_examples=30, phases=phases)
        hypothesis.settings.load_profile("mutants")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep the wanted tests."""
        order = self._order
        if order is not None:
            items[:] = sorted((each for each in items if each.nodeid in order), key=lambda each: order[each.nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test, or what sets it up, failed."""
        if report.failed and self.failed is None:
            self.failed = report.nodeid


class _Reached:
    """Notes how long each test takes, and which lines of one file it reaches."""

    def __init__(self, path: str) -> None:
        self._file, self._name = str(ROOT / path), ""
        self.lines: dict[str, set[int]] = defaultdict(set)
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        """Watch one test with what sets it up."""
        self._name, begun = item.nodeid, time.monotonic()
        threading.settrace(self._called)
        sys.settrace(self._called)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            self.seconds[item.nodeid] = time.monotonic() - begun

    def _called(self, frame: Any, event: str, given: Any) -> Any:
        del event, given
        if frame.f_code.co_filename != self._file:
            return None
        seen = self.lines[self._name]
        seen.add(frame.f_lineno)

        def line(frame: Any, event: str, given: Any) -> Any:
            del event, given
            seen.add(frame.f_lineno)
            return line

        return line


def _child(mutant: Mutant | None, tests: Sequence[str], say: Path, *, watched: str | None) -> None:
    """Import the library with the change, run the tests, say which failed first, and end."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    name = None
    if mutant is not None:
        name = mutant.path.removesuffix(".py").replace("/", ".")
        sys.meta_path.insert(0, _Finder(name, str(ROOT / mutant.path), _changed(mutant)))
        # before pytest, whose finder of modules whose asserts it rewrites would stand in front: a library with a plugin
        importlib.import_module(name)
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    first = _First(None if files == list(tests) else tests)
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
        *(f"--deselect={test}" for test in _APART),
    ]
    reached = _Reached(watched) if watched else None
    code = pytest.main([*arguments, *files], plugins=[first, *([reached] if reached else [])])
    said: dict[str, Any] = {"code": int(code), "failed": first.failed}
    if reached is not None:
        said["lines"] = {test: sorted(lines) for test, lines in reached.lines.items()}
        said["seconds"] = reached.seconds
        said["modules"] = [each for each in sys.modules if each in _HEAVY]
    if name is not None and not isinstance(getattr(sys.modules[name], "__loader__", None), _Loader):
        said = {"code": _UNCHANGED, "failed": f"{name} was imported without the change"}
    say.write_text(json.dumps(said), encoding="utf-8")


def _said(mutant: Mutant | None, tests: Sequence[str], *, timeout_s: float, watched: str | None = None) -> Any:
    """What a child said; None where it did not end in time, nothing where it ended without a word."""
    with tempfile.TemporaryDirectory(prefix="routeplane-mutants-") as folder:
        say = Path(folder, "said.json")
        read, write = os.pipe()
        gc.freeze()  # a child's collections would copy what it shares
        pid = os.fork()
        if pid == 0:
            os.close(read)
            os.setpgid(0, 0)  # its own children end with it
            os.environ["TMPDIR"] = folder
            tempfile.tempdir = None
            try:
                _child(mutant, tests, say, watched=watched)
            finally:
                os._exit(0)
        os.close(write)
        ready, _, _ = select.select([read], [], [], timeout_s)
        os.close(read)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if not ready:
            return None
        return json.loads(say.read_text(encoding="utf-8")) if say.exists() else {"code": 2, "failed": None}


def tried(mutant: Mutant | None, tests: Sequence[str], *, timeout_s: float) -> str | None:
    """What found the change: a test, ``import`` or ``timeout``; None where it survived. No mutant: no change."""
    said = _said(mutant, tests, timeout_s=timeout_s)
    if said is None:
        return "timeout"
    if said["code"] == _UNCHANGED:
        raise RuntimeError(said["failed"])
    return None if said["code"] == 0 else said["failed"] or "import"


@dataclass(frozen=True, kw_only=True)
class _Watched:
    """The tests of a module without a change: how long each takes, and the lines that it reaches."""

    seconds: dict[str, float]
    lines: dict[str, frozenset[int]]

    @classmethod
    def of(cls, path: str) -> _Watched:
        """Run them, and import here what they imported, so that later children need not."""
        said = _said(None, TESTS[path], timeout_s=900.0, watched=path)
        if said is None or said["code"] != 0:
            sys.exit(f"expected the tests of {path} to pass, got {said and said['failed']}")
        for name in said["modules"]:
            importlib.import_module(name)
        return cls(seconds=said["seconds"], lines={test: frozenset(lines) for test, lines in said["lines"].items()})

    def reaching(self, mutant: Mutant) -> list[str]:
        """The tests that reach a change, the quickest first."""
        wanted = set(mutant.lines)
        chosen = [test for test in self.seconds if not wanted or wanted & self.lines.get(test, frozenset())]
        return sorted(chosen, key=lambda test: (round(self.seconds[test], 1), test))


# ----------------------------------------------------------------------------------------------------------------------
# All of them
# ----------------------------------------------------------------------------------------------------------------------


def _verdict(mutant: Mutant, watched: _Watched) -> dict[str, Any]:
    """One line of a file of results."""
    begun, tests = time.monotonic(), watched.reaching(mutant)
    limit = 15.0 + 4 * sum(watched.seconds[test] for test in tests)
    found = tried(mutant, tests, timeout_s=limit) if tests else None
    return {
        "key": list(mutant.key),
        "line": mutant.line,
        "tests": len(tests),
        "found": found,
        "seconds": round(time.monotonic() - begun, 1),
    }


def _read(path: Path | None) -> dict[tuple[str, str, str, int], dict[str, Any]]:
    """The last verdict on each change of a file of results."""
    lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
    return {tuple(each["key"]): each for each in map(json.loads, lines)}


def main() -> int:
    """Try a sample and print what survived, then a table."""
    parser = argparse.ArgumentParser(prog="tests.trust.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modules", nargs="*", default=list(TESTS), choices=list(TESTS))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--again", action="store_true")
    arguments = parser.parse_args()
    everything = [mutant for path in TESTS for mutant in mutants_of(path)]
    sample = [
        each for each in sampled(everything, arguments.count, seed=arguments.seed) if each.path in arguments.modules
    ]
    print(f"{len(sample)} of {len(everything)} changes, seed {arguments.seed}", flush=True)
    verdicts, watched, begun = _read(arguments.results), dict[str, _Watched](), time.monotonic()
    for mutant in sorted(sample, key=lambda each: (each.path, each.index)):
        known = verdicts.get(mutant.key)
        if known is not None and (known["found"] or mutant.reason or not arguments.again):
            continue
        if mutant.path not in watched:
            watched[mutant.path] = _Watched.of(mutant.path)
        verdict = verdicts[mutant.key] = _verdict(mutant, watched[mutant.path])
        if arguments.results is not None:
            with arguments.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(verdict) + "\n")
        if not verdict["found"] and not mutant.reason:
            print(f"survived: {mutant.path}:{mutant.line}\n    - {mutant.before}\n    + {mutant.behind}", flush=True)
    tally = Counter[tuple[str, str]]()
    for mutant in sample:
        found = verdicts[mutant.key]["found"]
        kind = (
            ("timeout" if found == "timeout" else "killed") if found else "equivalent" if mutant.reason else "survived"
        )
        tally.update([(mutant.path, kind), ("all", kind)])
    print(f"\n{time.monotonic() - begun:.0f} s\n\n| module | {' | '.join(_KINDS)} |\n|---|---|---|---|---|")
    for path in [*sorted({mutant.path for mutant in sample}), "all"]:
        print(f"| `{path}` | " + " | ".join(str(tally[path, kind]) for kind in _KINDS) + " |")
    judged, survived = len(sample) - tally["all", "equivalent"], tally["all", "survived"]
    print(f"\n{judged - survived} of {judged} found: {(judged - survived) / max(1, judged):.1%}")
    return 0 if survived <= judged // 10 else 1


if __name__ == "__main__":
    sys.exit(main())
