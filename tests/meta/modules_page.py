"""docs/reference/modules.md, made from the tree: one line a module, in data order.

Folders come in the order of ``import_graph.STAGES``. Inside a folder a module stands below what it imports, and above
everything else by name. The line is the first sentence of the module's docstring. ``python -m tests.meta.modules_page``
writes the page.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

from tests.meta.import_graph import STAGES, Edge, module_name, read_edges

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["modules_page", "summary_of"]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "modules.md"

HEADINGS = {
    "record": "what a route means",
    "capture": "rows leave an engine",
    "stream": "records move",
    "archive": "records rest",
    "batch": "tensors of one training step",
    "replay": "gates follow recorded routes",
    "inspect": "look, compare, explain",
    "fleet": "start-up",
    "testing": "what a user's own tests stand on",
    "cli": "the command line",
}

_HEAD = """# Modules

`make docs-reference` writes this page from the module docstrings. Folders are the stages of the data path, in order. A
module stands below the modules of its folder that it imports. A stage imports `errors`, `record` and, where
[the rule](../../tests/meta/import_graph.py) says so, earlier stages; no stage imports a later one.

| module | content |
|---|---|
"""


def package_sources() -> dict[str, str]:
    """Path relative to the repository -> text, of every file of the package."""
    files = sorted((ROOT / "routeplane").rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}


def summary_of(text: str) -> str:
    """The first sentence of a module's docstring, on one line; double backticks become single ones."""
    paragraph = " ".join((ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z`])", paragraph)[0]
    return sentence.rstrip(".").replace("``", "`").replace("|", "\\|")


def in_data_order(modules: list[str], edges: list[Edge]) -> list[str]:
    """Modules of one folder: each behind those that it imports when it is loaded, else by name."""
    needs: dict[str, set[str]] = {module: set() for module in modules}
    for edge in edges:
        if edge.at_load and {edge.importer, edge.target} <= needs.keys():
            needs[edge.importer].add(edge.target)
    # a package's own file comes first: it says what the folder is
    ordered = [module for module in modules if any(other.startswith(f"{module}.") for other in modules)]
    left = [module for module in modules if module not in ordered]
    while left:
        ready = [module for module in left if not (needs[module] - set(ordered)) & set(left)]
        ordered.append((ready or left)[0])
        left.remove(ordered[-1])
    return ordered


def modules_page(sources: Mapping[str, str]) -> str:
    """The whole page."""
    summaries = {module_name(path): summary_of(text) for path, text in sources.items()}

    def rows(modules: list[str]) -> str:
        return "".join(f"| `{module}` | {summaries[module]} |\n" for module in modules)

    edges = list(read_edges(sources))
    page = _HEAD + rows(["routeplane", "routeplane.errors"])
    for stage in STAGES:
        prefix = f"routeplane.{stage}"
        own = sorted(module for module in summaries if module == prefix or module.startswith(f"{prefix}."))
        page += f"\n## `{stage}/`: {HEADINGS[stage]}\n\n| module | content |\n|---|---|\n"
        page += rows(in_data_order(own, edges))
    return page


if __name__ == "__main__":
    PAGE.write_text(modules_page(package_sources()), encoding="utf-8")
