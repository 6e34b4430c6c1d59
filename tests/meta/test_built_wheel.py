"""What is built and shipped: the files inside, the extras that pages name, and pages that run on the wheel alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.meta.built_wheel import besides_of, build, content_of, extras_of, fresh, page_groups, run_page_in
from tests.meta.support_page import support_page
from tests.meta.test_docs_blocks import PAGES, ROOT, read_blocks

#: What a block imports -> the extras any of which brings it.
BRINGS = {
    "torch": {"torch", "transformers"},
    "transformers": {"transformers"},
    "routeplane.batch": {"torch", "transformers"},
    "routeplane.replay": {"torch", "transformers"},
    "routeplane.archive": {"zarr"},
    "ray": {"ray", "fleet"},
    "routeplane.fleet": {"fleet"},
}
BESIDES = {"duckdb", "fakeredis", "fastapi", "httpx", "polars", "xarray"}


@pytest.mark.parametrize("path", PAGES)
def test_a_page_names_what_its_blocks_import(path: str) -> None:
    """A reader who installs the extras at the top of a page, and the packages that it names, can run all of it."""
    page = (ROOT / path).read_text(encoding="utf-8")
    found = set()
    for block in read_blocks(page):
        for node in ast.walk(ast.parse(block.text)) if block.reason is None else ():
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(str(node.module))
    modules = {".".join(name.split(".")[: 2 if name.startswith("routeplane") else 1]) for name in found}

    extras = extras_of(page)
    assert [] == [name for name in sorted(modules & BRINGS.keys()) if not BRINGS[name] & extras]
    assert modules & BESIDES <= besides_of(page)


def test_the_support_page_says_what_ran() -> None:
    """``python -m tests.meta.support_page`` was run after its sources changed; classifiers name what was tried."""
    assert support_page() == (ROOT / "docs" / "reference" / "support.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_wheel_alone_runs_its_pages(tmp_path: Path) -> None:
    """Wheel and sdist hold what they should; pages of the base dependencies run in an environment without the checkout.

    ``python -m tests.meta.built_wheel`` goes through the pages of every extra.
    """
    sdist, wheel = build(tmp_path)
    shipped = content_of(wheel)
    assert {"routeplane/py.typed", "routeplane/schemas/v1/routeplane-v1.schema.json"} <= shipped
    assert {"README.md", "LICENSE", "tests/meta/house.py", "examples/first_replay.ipynb"} <= content_of(sdist)
    assert [] == [name for name in shipped if not name.startswith(("routeplane/", "routeplane-"))]

    python = fresh(tmp_path / "env", str(wheel))
    pages = [f"docs/how-to/{name}.md" for name in ("check-a-stream", "carry-routes-through-a-folder")]
    assert set(pages) <= set(page_groups()[frozenset()])
    assert {} == {path: problem for path in pages if (problem := run_page_in(python, path, tmp_path))}
