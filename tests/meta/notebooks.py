"""The notebooks of ``examples/``, made of pages of the docs: ``python -m tests.meta.notebooks`` writes them.

A page's Python blocks become cells, with the text block below each as its output; everything else is Markdown, its
links turned towards the repository. So a notebook says what its page says, and neither is edited twice.
"""

from __future__ import annotations

import io
import json
import posixpath
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from tests.meta.test_docs_blocks import ROOT

__all__ = ["NOTEBOOKS", "notebook_text", "run_notebook"]

FOLDER = ROOT / "examples"
#: Notebook -> its page.
NOTEBOOKS = {
    "first_replay.ipynb": "docs/tutorial/first-replay.md",
    "inspect_a_run.ipynb": "docs/tutorial/inspect-a-run.md",
    "verl_batch_to_replay.ipynb": "docs/migrate/verl.md",
}

#: A block that runs, with the text block directly below it.
_CODE = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\s*^```text\n(?P<out>.*?)^```\n)?", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:|#)(?P<target>[^)]+)\)")


def notebook_text(page: str) -> str:
    """The notebook of a page, as it stands in ``examples/``."""
    folder = posixpath.dirname(page)
    text = (ROOT / page).read_text(encoding="utf-8")

    def turned(match: re.Match[str]) -> str:
        return f"](../{posixpath.normpath(posixpath.join(folder, match['target']))})"

    cells: list[dict[str, Any]] = []
    done = 0
    for match in _CODE.finditer(text):
        cells += _prose(_LINK.sub(turned, text[done : match.start()]))
        out = match["out"]
        outputs = [] if out is None else [{"name": "stdout", "output_type": "stream", "text": _lines(out)}]
        cells.append({"cell_type": "code", "metadata": {}, "source": _lines(match["code"]), "outputs": outputs})
        done = match.end()
    cells += _prose(_LINK.sub(turned, text[done:]))
    for at, cell in enumerate(cells):
        cell["id"] = f"cell-{at}"
        if cell["cell_type"] == "code":
            cell["execution_count"] = None
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    document = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _prose(text: str) -> list[dict[str, Any]]:
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL).strip("\n")
    return [{"cell_type": "markdown", "metadata": {}, "source": _lines(text)}] if text.strip() else []


def _lines(text: str) -> list[str]:
    return text.rstrip("\n").splitlines(keepends=True)


def run_notebook(path: Path) -> list[tuple[str, str]]:
    """Run the cells of a notebook in one namespace, in the current folder; what each was to print, and printed."""
    document = json.loads(path.read_text(encoding="utf-8"))
    namespace: dict[str, object] = {"__name__": "__main__"}
    found = []
    for cell in document["cells"]:
        if cell["cell_type"] != "code":
            continue
        with redirect_stdout(io.StringIO()) as out:
            exec(compile("".join(cell["source"]), f"{path.name}:{cell['id']}", "exec", dont_inherit=True), namespace)
        found += [("".join(each["text"]), out.getvalue()) for each in cell["outputs"]]
    return found


def main() -> None:
    """Write all notebooks."""
    FOLDER.mkdir(exist_ok=True)
    for name, page in NOTEBOOKS.items():
        (FOLDER / name).write_text(notebook_text(page), encoding="utf-8")


if __name__ == "__main__":
    main()
