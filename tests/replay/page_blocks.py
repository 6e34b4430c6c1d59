"""Blocks of a how-to page that run in a trainer's own environment, as their comments say."""

from __future__ import annotations

from pathlib import Path

from tests.meta.test_docs_blocks import read_blocks

__all__ = ["run_trainer_page"]

ROOT = Path(__file__).parents[2]


def run_trainer_page(name: str, trainer: str) -> list[tuple[int, str]]:
    """Run them in one namespace, in order: the line of each block that ran, and what the page says it prints."""
    path = ROOT / "docs" / "how-to" / name
    page = path.read_text(encoding="utf-8")
    ran = []
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in read_blocks(page):
        if block.reason is None or not block.reason.startswith(f"in the {trainer} environment"):
            continue
        exec(compile("\n" * (block.line - 1) + block.text, str(path), "exec", dont_inherit=True), namespace)
        ran.append((block.line, _printed(page, block.line)))
    return ran


def _printed(page: str, line: int) -> str:
    """The text block that follows a block directly; empty where none does."""
    rest = "\n".join(page.splitlines()[line - 1 :]).partition("\n```\n")[2].lstrip("\n")
    return rest.removeprefix("```text\n").partition("```")[0] if rest.startswith("```text\n") else ""
