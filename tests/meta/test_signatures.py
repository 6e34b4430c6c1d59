"""Two positional arguments, the rest by keyword: every public signature of the package.

Reads source text, so that files whose third party is not installed are held to it too. Public is what ``__all__``
names: functions, and the constructors and methods of classes. Methods that Python itself calls (``__exit__``) keep
Python's signature.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
MAX_POSITIONAL = 2
#: special methods that a user calls
CALLED_BY_USERS = {"__init__", "__new__", "__call__"}
#: what servers call, by a signature that is a standard of its own: ASGI's, Arrow Flight's
STANDARDS = (["scope", "receive", "send"], ["context", "descriptor", "reader", "writer"])

Function = ast.FunctionDef | ast.AsyncFunctionDef

# ----------------------------------------------------------------------------------------------------------------------
# The checker
# ----------------------------------------------------------------------------------------------------------------------


def find_signature_problems(path: str, text: str) -> list[str]:
    """Every public signature of one file that breaks the rule, as ``file:line: what``."""
    tree = ast.parse(text, path)
    public = _public_names(tree)
    defined = [node for node in tree.body if isinstance(node, Function | ast.ClassDef)]
    if public is None:
        open_names = [node.name for node in defined if not node.name.startswith("_")]
        return [f"{path}:1: no __all__, though it defines {', '.join(open_names)}"] if open_names else []
    found: list[tuple[int, str]] = []
    for node in defined:
        if node.name in public:
            found += _class_problems(node) if isinstance(node, ast.ClassDef) else _function_problems(node, node.name)
    return [f"{path}:{line}: {problem}" for line, problem in sorted(found)]


def _public_names(tree: ast.Module) -> set[str] | None:
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        target = node.target if isinstance(node, ast.AnnAssign) else target
        if isinstance(target, ast.Name) and target.id == "__all__":
            value = getattr(node, "value", None)
            return set(ast.literal_eval(value)) if value is not None else None
    return None


def _class_problems(node: ast.ClassDef) -> Iterator[tuple[int, str]]:
    for decorator in node.decorator_list:
        called = ast.unparse(decorator)
        fields = any(isinstance(statement, ast.AnnAssign) for statement in node.body)
        if called.split("(")[0] in ("dataclass", "dataclasses.dataclass") and "kw_only=True" not in called and fields:
            yield node.lineno, f"{node.name} is a dataclass without kw_only=True"
    for method in node.body:
        if isinstance(method, Function) and (not method.name.startswith("_") or method.name in CALLED_BY_USERS):
            yield from _function_problems(method, f"{node.name}.{method.name}", method=True)


def _function_problems(node: Function, name: str, *, method: bool = False) -> Iterator[tuple[int, str]]:
    decorators = {ast.unparse(decorator).split("(")[0].split(".")[-1] for decorator in node.decorator_list}
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    # self, cls, and the `draw` that hypothesis passes to a composite strategy are no argument of the caller's
    given = 1 if (method and "staticmethod" not in decorators) or "composite" in decorators else 0
    names = [argument.arg for argument in positional[given:]]
    if len(names) > MAX_POSITIONAL and names not in STANDARDS:
        yield (
            node.lineno,
            f"{name} takes {len(names)} positional arguments, at most {MAX_POSITIONAL}: {', '.join(names)}",
        )
    # a wrapper that takes *args and **kwargs passes them on: its signature is its target's
    if arguments.vararg is not None and arguments.kwarg is None:
        yield node.lineno, f"{name} takes *{arguments.vararg.arg}, any number of positional arguments"
    if arguments.defaults:
        defaulted = ", ".join(argument.arg for argument in positional[-len(arguments.defaults) :])
        yield node.lineno, f"{name} has a default for an argument that is not keyword-only: {defaulted}"


# ----------------------------------------------------------------------------------------------------------------------
# The package
# ----------------------------------------------------------------------------------------------------------------------


def test_the_package_keeps_the_signature_rule() -> None:
    """No public signature takes more than two positional arguments, or has a default for one of them."""
    files = sorted((ROOT / "routeplane").rglob("*.py"))
    found = [
        problem
        for path in files
        for problem in find_signature_problems(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    ]

    assert ROOT / "routeplane" / "record" / "spec.py" in files
    assert [] == found


# ----------------------------------------------------------------------------------------------------------------------
# The checker can fail
# ----------------------------------------------------------------------------------------------------------------------

_ALL = "__all__ = ['A', 'f']\n"

ILLEGAL = {
    "three": ("def f(a, b, c): ...\n", "2: f takes 3 positional arguments, at most 2: a, b, c"),
    "positional_only_counts": ("def f(a, b, /, c): ...\n", "2: f takes 3 positional arguments, at most 2: a, b, c"),
    "star": ("async def f(*a): ...\n", "2: f takes *a, any number of positional arguments"),
    "default": ("def f(a, b=1): ...\n", "2: f has a default for an argument that is not keyword-only: b"),
    "method": (
        "class A:\n    def g(self, a, b, c): ...\n",
        "3: A.g takes 3 positional arguments, at most 2: a, b, c",
    ),
    "class_method": (
        "class A:\n    @classmethod\n    def g(cls, a=1): ...\n",
        "4: A.g has a default for an argument that is not keyword-only: a",
    ),
    "static_method": (
        "class A:\n    @staticmethod\n    def g(a, b, c): ...\n",
        "4: A.g takes 3 positional arguments, at most 2: a, b, c",
    ),
    "constructor": (
        "class A:\n    def __init__(self, a, b, c): ...\n",
        "3: A.__init__ takes 3 positional arguments, at most 2: a, b, c",
    ),
    "dataclass": ("@dataclass(frozen=True)\nclass A:\n    a: int\n", "3: A is a dataclass without kw_only=True"),
    "composite": (
        "@st.composite\ndef f(draw, a, b, c): ...\n",
        "3: f takes 3 positional arguments, at most 2: a, b, c",
    ),
}


@pytest.mark.parametrize(("text", "problem"), ILLEGAL.values(), ids=ILLEGAL)
def test_a_breach_is_named(text: str, problem: str) -> None:
    """Each breach is reported once, with its line."""
    assert [f"routeplane/a.py:{problem}"] == find_signature_problems("routeplane/a.py", _ALL + text)


def test_an_open_module_is_named() -> None:
    """A module that defines public names says which of them it means."""
    expected = ["routeplane/a.py:1: no __all__, though it defines f"]

    assert expected == find_signature_problems("routeplane/a.py", "def f(): ...\ndef _g(): ...\n")


LEGAL = {
    "asgi": "class A:\n    async def __call__(self, scope, receive, send): ...\n",
    "two": "def f(a, b, *, c, d=1, **e): ...\n",
    "method": "class A:\n    def g(self, a, b, *, c=1): ...\n",
    "wrapper": "def f(*args, **kwargs): ...\n",
    "exit": "class A:\n    def __exit__(self, kind, error, traceback): ...\n",
    "private_method": "class A:\n    def _g(self, a, b, c): ...\n",
    "private_function": "def _f(a, b, c): ...\n",
    "not_in_all": "def g(a, b, c): ...\n",
    "composite": "@composite\ndef f(draw, a, b, *, c=1): ...\n",
    "dataclass": "@dataclass(frozen=True, kw_only=True)\nclass A:\n    a: int\n",
}


@pytest.mark.parametrize("text", LEGAL.values(), ids=LEGAL)
def test_what_is_allowed_is_not_reported(text: str) -> None:
    """Keywords, Python's own signatures and what is not public are free."""
    assert [] == find_signature_problems("routeplane/a.py", _ALL + text)
