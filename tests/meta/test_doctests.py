"""Every example in a docstring of the package runs and prints what it says.

A file is a test of its own. Examples run in an empty folder; ``NORMALIZE_WHITESPACE`` and ``ELLIPSIS`` are on.
"""

from __future__ import annotations

import doctest
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
#: Files that only an environment of its own can import. Examples of the first four run on an engine, in
#: ``tests/capture/test_vllm.py`` and ``test_vllm_async.py``.
_OWN_ENVIRONMENT = (
    *(f"routeplane/capture/vllm/{name}.py" for name in ("async_llm", "engines", "outputs", "probing")),
    "routeplane/cli/demo/automodel_trainer.py",
    "routeplane/cli/demo/megatron_trainer.py",
)

FILES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted((ROOT / "routeplane").rglob("*.py"))
    if re.search(r"^\s+>>> ", path.read_text(encoding="utf-8"), re.MULTILINE)
]


def run_examples(module: object, name: str, given: Mapping[str, object] | None = None) -> tuple[int, list[str]]:
    """How many examples a module's docstrings hold, and what failed. ``given``: names that they use without making."""
    failures: list[str] = []
    runner = doctest.DocTestRunner(optionflags=_FLAGS, verbose=False)
    count = 0
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name, extraglobs=dict(given or {})):
        if test.examples:
            count += 1
            runner.run(test, out=failures.append)
    return count, failures


@pytest.mark.parametrize("path", [path for path in FILES if not path.startswith(_OWN_ENVIRONMENT)])
def test_the_examples_of_a_file_run(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a docstring shows is what happens."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    module = import_module(name)
    monkeypatch.chdir(tmp_path)

    count, failures = run_examples(module, name)
    assert [] == failures
    assert 0 < count


def test_a_wrong_example_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An example that prints something else fails, with both outputs."""
    (tmp_path / "wrong_example.py").write_text('"""A module.\n\n>>> 1 + 1\n3\n"""\n', encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    count, failures = run_examples(import_module("wrong_example"), "wrong_example")
    assert 1 == count
    assert "Expected:\n    3\nGot:\n    2\n" in "".join(failures)
