"""Migration pages: a diff makes the loop that runs, in at most ten lines, over batches as the stack's code builds them.

The pages' blocks run in ``test_docs_blocks.py``. Here the loop of each page runs on batches of
``tests/batch/native.py``, which knows no layout of ours.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import torch

from routeplane.batch import LAYOUTS
from tests.batch.native import BUILDERS, engine_samples, families
from tests.meta.test_docs_blocks import ROOT, read_blocks

FOLDER = ROOT / "docs" / "migrate"
PAGES = {path.stem: path for path in sorted(FOLDER.glob("*.md")) if path.name != "README.md"}
STACKS = {
    "miles": "miles",
    "nemo-rl": "nemo_rl",
    "prime-rl": "prime_rl",
    "skyrl": "skyrl",
    "slime": "slime",
    "verl": "verl",
}
STEPS = ["1. Observe", "2. Audit", "3. Carry", "4. Replay"]
MOST_LINES = 10
NUMBERS = {9: "nine", 10: "ten"}


def text_of(name: str) -> str:
    """A page."""
    return PAGES[name].read_text(encoding="utf-8")


def diff_of(page: str) -> list[str]:
    """The lines of the page's one diff."""
    [diff] = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    return str(diff).splitlines()


def loop_of(page: str) -> str:
    """The block that attaches: the loop after the diff."""
    [loop] = [block.text for block in read_blocks(page) if "replay = gates.attach(" in block.text]
    return loop


def test_every_stack_has_its_page() -> None:
    """Each page belongs to a layout, says which version that was read from, and goes through all steps, as the one
    that they share does, which names them all."""
    shared = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert [*STEPS, "Go back"] == re.findall(r"^## (.+)$", shared, re.MULTILINE)
    assert {f"{name}.md" for name in STACKS} == set(re.findall(r"\]\(([a-z-]+\.md)\)", shared))
    assert set(STACKS) == set(PAGES)
    for name, layout in STACKS.items():
        page = text_of(name)
        version = re.split(r"[,:(]", LAYOUTS[layout].read_from)[0].strip()
        headings = [*STEPS, "Flags"]
        assert headings == re.findall(r"^## (.+)$", page, re.MULTILINE)[: len(headings)], name
        assert version in page, (name, version)
        assert f'layout="{layout}"' in page, name


def test_what_pages_share_stands_once() -> None:
    """No paragraph of two lines is on three pages (miles is a fork of slime): what is common is on ``README.md``."""
    places: dict[str, list[str]] = {}
    for path in sorted(FOLDER.glob("*.md")):
        prose = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for paragraph in filter(lambda text: "\n" in text.strip(), prose.split("\n\n")):
            places.setdefault(paragraph.strip(), []).append(path.name)

    assert {} == {paragraph: names for paragraph, names in places.items() if len(names) > 2}
    assert any("README.md" in names for names in places.values())


@pytest.mark.parametrize("name", STACKS)
def test_at_most_ten_lines_make_the_loop_that_runs(name: str) -> None:
    """Lines that the diff adds and keeps are the block below it; what it adds is counted, and the page says so."""
    page = text_of(name)
    diff = diff_of(page)
    after = [line[1:] for line in diff if line[:1] in ("+", " ")]
    added = [line for line in diff if line.startswith("+") and line[1:].strip()]

    assert ast.dump(ast.parse(loop_of(page))) == ast.dump(ast.parse("\n".join(after)))  # whatever the lines' lengths
    assert len(added) <= MOST_LINES
    assert f"in {NUMBERS[len(added)]} lines:" in page


def definitions(page: str) -> dict[str, Any]:
    """The functions and classes of the page's first block, which stand for the stack's own."""
    tree = ast.parse(read_blocks(page)[0].text)
    kept: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    namespace: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(body=kept, type_ignores=[]), "page", "exec"), namespace)
    return namespace


class Scalars(list[dict[str, float]]):
    """A logger that keeps what it is given."""

    log = list.append


@pytest.mark.parametrize("mode", ["observe", "force"])
@pytest.mark.parametrize("name", STACKS)
def test_the_loop_runs_on_the_stacks_own_batch(name: str, mode: str) -> None:
    """Every fed row is forced, or counted, in every routed layer; engine and trainer are one model: none flips."""
    page = text_of(name)
    spec, model = families()["qwen3_dense_first"]
    samples = list(engine_samples("qwen3_dense_first")[:6])
    batch = BUILDERS[STACKS[name]](samples, spec)
    if isinstance(batch, dict):  # on a trainer, columns are tensors
        batch = {key: torch.as_tensor(value) if hasattr(value, "dtype") else value for key, value in batch.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    logger = Scalars()
    namespace = definitions(page) | {"model": model, "optimizer": optimizer, "batches": [batch], "logger": logger}
    code = loop_of(page)
    assert 1 == code.count(', mode="observe"')

    exec(code.replace(', mode="observe"', "" if mode == "force" else ', mode="observe"'), namespace)
    namespace["replay"].detach()

    [scalars] = logger
    assert sum(each.fed for each in samples) * spec.num_layers == scalars["routeplane/replay_rows_forced"]
    assert (0, 0, 1) == tuple(
        scalars[f"routeplane/replay_{what}"] for what in ("rows_flipped", "not_consumed", "microbatches")
    )
    assert namespace["replay"].policy.mode == mode
