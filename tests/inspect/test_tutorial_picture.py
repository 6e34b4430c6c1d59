"""The tutorial's picture is what its run draws; ``python -m tests.inspect.test_tutorial_picture`` draws it again."""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from pathlib import Path

from tests.meta.test_docs_blocks import read_blocks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial" / "inspect-a-run.md"


def draw(folder: Path) -> Path:
    """Run the blocks of the page in a folder, and say where its picture is."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        names: dict[str, object] = {}
        for block in read_blocks(PAGE.read_text(encoding="utf-8")):
            exec(compile(block.text, str(PAGE), "exec"), names)
    finally:
        os.chdir(before)
    return folder / "pictures" / "flips.png"


def size(path: Path) -> tuple[int, int]:
    """Width and height of a PNG file; its pixels depend on the machine's fonts."""
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    return width, height


def test_the_picture_is_of_this_run(tmp_path: Path) -> None:
    """Of the same size as what the page's blocks draw, with bars in it."""
    assert size(draw(tmp_path)) == size(PAGE.with_name("flips.png"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        shutil.copy(draw(Path(name)), PAGE.with_name("flips.png"))
