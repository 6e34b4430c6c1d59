"""Signatures of the names that the writer inside vLLM rests on, read from released wheels without installing them.

``python -m tests.vllm_wheels WHEEL...`` reads wheels that ``pip download --no-deps`` brought and adds what it finds to
``tests/data/vllm-signatures.json``; the test compares that file with ``interface``. Runs no code of a wheel.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from routeplane.capture.vllm.interface import NAMES, find_drift

__all__ = ["SIGNATURES", "drift_of", "read_wheel"]

SIGNATURES = Path(__file__).parent / "data" / "vllm-signatures.json"


def read_wheel(path: Path) -> tuple[str, dict[str, list[str] | None]]:
    """Read a wheel's version, and for every hooked name its parameters or attributes; None where it has none."""
    version = path.name.split("-")[1]
    with zipfile.ZipFile(path) as wheel:
        files = set(wheel.namelist())
        found: dict[str, list[str] | None] = {}
        for name, used in NAMES.items():
            module, _, place = name.partition(":")
            tree = _module(wheel, files, module)
            there = None if tree is None else _lookup(tree, place)
            # of a class only what is used: the file is read by people
            found[name] = there if there is None or "." in place else sorted({*used} & {*there})
    return version, found


def _module(wheel: zipfile.ZipFile, files: set[str], name: str) -> ast.Module | None:
    stem = name.replace(".", "/")
    for candidate in (f"{stem}.py", f"{stem}/__init__.py"):
        if candidate in files:
            return ast.parse(wheel.read(candidate))
    return None


def _lookup(tree: ast.Module, path: str) -> list[str] | None:
    """The parameters of ``Class.method``, or the attributes of ``Class``."""
    owner, _, method = path.partition(".")
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == owner:
            if not method:
                return sorted(set(_attributes(node)))
            for item in node.body:
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name == method:
                    arguments = item.args
                    return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return None


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            yield item.target.id
        elif isinstance(item, ast.Assign):
            yield from (target.id for target in item.targets if isinstance(target, ast.Name))
        elif isinstance(item, ast.FunctionDef):
            yield item.name
            for one in ast.walk(item) if item.name == "__init__" else ():
                if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
                    yield one.attr


def drift_of(found: Mapping[str, list[str] | None]) -> list[str]:
    """What of one version differs from what the writer uses."""
    return find_drift(found.get)


def main(paths: list[str]) -> None:
    """Add what the wheels say to the file."""
    known: dict[str, Any] = json.loads(SIGNATURES.read_text(encoding="utf-8")) if SIGNATURES.exists() else {}
    for path in paths:
        version, found = read_wheel(Path(path))
        known[version] = found
        sys.stdout.write(f"{version}: {drift_of(found) or 'as expected'}\n")
    ordered = dict(sorted(known.items(), key=lambda item: tuple(map(int, item[0].split(".")))))
    SIGNATURES.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
