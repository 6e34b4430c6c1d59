"""The notebooks are what their pages make, run from the first cell to the last, and hold nothing of a machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.meta.notebooks import FOLDER, NOTEBOOKS, notebook_text, run_notebook
from tests.meta.test_docs_blocks import compare


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_what_its_page_makes(name: str) -> None:
    """The page and its notebook were changed together; links lead to files, and no path is a machine's."""
    text = (FOLDER / name).read_text(encoding="utf-8")

    # a verdict alone: the two texts side by side are longer than a log
    same = notebook_text(NOTEBOOKS[name]) == text
    assert same, f"expected {name} as its page makes it (python -m tests.meta.notebooks), got another text"
    links = [
        link.partition("#")[0]
        for cell in json.loads(text)["cells"]
        if cell["cell_type"] == "markdown"
        for link in re.findall(r"\]\((?!https?:|#)([^)]+)\)", "".join(cell["source"]))
    ]
    assert [] == [link for link in links if not (FOLDER / link).exists()]
    assert [] == re.findall(r"(?<![\w.])/(?:home|root|tmp|work|Users)/", text)


def test_every_notebook_is_made_of_a_page() -> None:
    """None is written by hand."""
    assert set(NOTEBOOKS) == {path.name for path in FOLDER.glob("*.ipynb")}


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cells run in order, in an empty folder, and print what the notebook shows."""
    monkeypatch.chdir(tmp_path)

    outputs = run_notebook(FOLDER / name)

    for expected, got in outputs:
        compare(expected, got, where=name)
