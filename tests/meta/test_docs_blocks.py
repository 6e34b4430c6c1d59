"""Every Python block in the README and the docs runs, or says why not, and prints what the page says.

The blocks of a page share one namespace, in order, in an empty folder. A block is left out by a comment on the line
above it: ``<!-- not run: reason -->``, for a reader of the source; the reason may not be empty. A ``text`` block
directly below one is what it prints; figures with a point may differ a little, ``...`` stands for anything. A page with
the comment ``<!-- figures of one machine -->`` shows what a model chose, which other processors may not: there a figure
stands for any figure.
"""

from __future__ import annotations

import io
import math
import re
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted({"README.md"} | {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")})

_FENCE = re.compile(r"^ {0,3}(?P<ticks>`{3,}|~{3,})\s*(?P<label>[^\s`{]*)")
_NOT_RUN = re.compile(r"^<!--\s*not run:(?P<reason>.*)-->$")
#: Pages whose blocks start a cluster: they run, and what they print is not compared.
NOT_COMPARED = {
    "docs/how-to/carry-routes-over-ray.md",
    "docs/how-to/inspect-with-ray-data.md",
    "docs/how-to/start-a-fleet.md",
}
#: Other names for Python; a block that wears one would escape.
_ALIASES = {"py", "py3", "python3", "pycon", "python-console", "ipython", "Python"}


@dataclass(frozen=True, kw_only=True)
class Block:
    """One ``python`` block. ``line``: of its first statement, from 1. ``reason``: why it is not run, or None.

    ``printed``: the ``text`` block below it, or None.
    """

    line: int
    text: str
    reason: str | None
    printed: str | None = None


# ----------------------------------------------------------------------------------------------------------------------
# The reader
# ----------------------------------------------------------------------------------------------------------------------


def read_blocks(page: str) -> list[Block]:
    """The Python blocks of a page. Raises ValueError with the line where a block cannot be told or tells no reason."""
    lines = page.splitlines()
    blocks: list[Block] = []
    at = 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence is None:
            at += 1
            continue
        stop = _closing(lines, at, fence["ticks"])
        if fence["label"] in _ALIASES:
            raise ValueError(f"line {at + 1}: call the block python, not {fence['label']}")
        if fence["label"] == "python":
            text = "\n".join(lines[at + 1 : stop])
            blocks.append(Block(line=at + 2, text=text, reason=_reason(lines, at), printed=_printed(lines, stop + 1)))
        at = stop + 1
    return blocks


def _closing(lines: list[str], at: int, ticks: str) -> int:
    for stop in range(at + 1, len(lines)):
        line = lines[stop].strip()
        if len(line) >= len(ticks) and line == ticks[0] * len(line):
            return stop
    raise ValueError(f"line {at + 1}: the block is never closed")


def _printed(lines: list[str], at: int) -> str | None:
    while at < len(lines) and not lines[at].strip():
        at += 1
    fence = _FENCE.match(lines[at]) if at < len(lines) else None
    if fence is None or fence["label"] != "text":
        return None
    return "\n".join(lines[at + 1 : _closing(lines, at, fence["ticks"])])


def _reason(lines: list[str], at: int) -> str | None:
    comment = _NOT_RUN.match(lines[at - 1].strip()) if at else None
    if comment is None:
        return None
    reason = comment["reason"].strip()
    if not reason:
        raise ValueError(f"line {at}: not run, for which reason?")
    return reason


def run_page(path: str, page: str) -> int:
    """Run the blocks of a page in one namespace; how many ran. What a block raises comes out, with the page's line.

    Raises AssertionError for a block that prints something else than the page says.
    """
    blocks = [block for block in read_blocks(page) if block.reason is None]
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks:
        # blank lines before, so that a traceback names the line of the page; this file's own __future__ stays here
        code = compile("\n" * (block.line - 1) + block.text, path, "exec", dont_inherit=True)
        with redirect_stdout(io.StringIO()) as out:
            exec(code, namespace)
        if block.printed is not None and not path.endswith(tuple(NOT_COMPARED)):
            compare(block.printed, out.getvalue(), where=f"{path}:{block.line}", any_figure=_ONE_MACHINE in page)
    return len(blocks)


_ONE_MACHINE = "<!-- figures of one machine -->"
_FIGURE = re.compile(r"(?<![\w.])-?\d[\d,_]*\.\d+(?:e[+-]?\d+)?(?![\w])")


def compare(expected: str, got: str, *, where: str, any_figure: bool = False) -> None:
    """Raise AssertionError where a page's output is not what was printed.

    Blanks are one blank. A figure with a point may be a quarter off, or 0.02; all else is compared as it stands.
    ``any_figure``: figures are not compared.
    """
    ours, theirs = (" ".join(text.split()) for text in (expected, got))
    if any_figure:
        ours, theirs = (re.sub(r"-?\d[\d,_]*(?:\.\d+)?", "0", text) for text in (ours, theirs))
    pattern = "(?:.*?)".join(
        r"(\S+?)".join(map(re.escape, _FIGURE.split(part))) for part in re.split(r"\.\.\.(?:,| )?", ours)
    )
    found = re.fullmatch(pattern, theirs)
    assert found, f"{where}: the page says\n{expected}\nand the block printed\n{got}"
    for figure, other in zip(_FIGURE.findall(ours), found.groups(), strict=True):
        close = math.isclose(_number(figure), _number(other), rel_tol=0.25, abs_tol=0.02)
        assert close, f"{where}: the page says {figure}, the block printed {other}"


def _number(text: str) -> float:
    return float(text.replace(",", "").replace("_", ""))


# ----------------------------------------------------------------------------------------------------------------------
# The pages
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES)
def test_the_blocks_of_a_page_run(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader who copies the blocks of a page, in order, gets what the page says."""
    page = (ROOT / path).read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    run_page(str(ROOT / path), page)


# ----------------------------------------------------------------------------------------------------------------------
# The reader can fail
# ----------------------------------------------------------------------------------------------------------------------


def test_blocks_share_a_namespace() -> None:
    """A later block sees what an earlier one defined; other languages and blocks with a reason are left alone."""
    page = (
        "# T\n```python\na = 1\n```\n```bash\nexit 1\n```\n"
        "<!-- not run: needs a GPU -->\n```python\nraise OSError\n```\n```python\nassert a == 1\n```\n"
    )

    assert 2 == run_page("page.md", page)
    assert [None, "needs a GPU", None] == [block.reason for block in read_blocks(page)]


def test_a_failing_block_names_its_line() -> None:
    """A block that raises fails its page, at the line where it stands."""
    with pytest.raises(ZeroDivisionError) as caught:
        run_page("page.md", "text\n\n```python\na = 1\na / 0\n```\n")

    last = caught.traceback[-1]
    assert ("page.md", 5) == (str(last.path), last.lineno + 1)


def test_a_comment_further_up_excuses_nothing() -> None:
    """The reason stands directly above its block, so that it cannot be left behind for another."""
    with pytest.raises(ZeroDivisionError):
        run_page("page.md", "<!-- not run: slow -->\n\n```python\n1 / 0\n```\n")


def test_a_longer_fence_holds_a_shorter_one() -> None:
    """A page that shows Markdown does not run what it shows."""
    assert 0 == run_page("page.md", "````markdown\n```python\n1 / 0\n```\n````\n")


OUTPUTS = {
    "the same": ("a 1\nb", "a 1 b\n", True),
    "another word": ("a", "b", False),
    "more": ("a", "a b", False),
    "another count": ("12 rows", "13 rows", False),
    "a figure near": ("mean 0.41, p 1e-3", "mean 0.43, p 1e-3", True),
    "a figure far": ("mean 0.41", "mean 0.61", False),
    "anything": ("sum 3 ...\nend", "sum 3 4 5\nend", True),
    "nothing printed": ("a", "", False),
}


@pytest.mark.parametrize(("expected", "got", "same"), OUTPUTS.values(), ids=OUTPUTS)
def test_what_a_block_prints_is_compared(expected: str, got: str, same: bool) -> None:
    """The text below a block is its output; figures with a point have a tolerance, and nothing else has."""
    page = f"```python\nprint({got!r})\n```\n\n```text\n{expected}\n```\n"
    if same:
        assert 1 == run_page("page.md", page)
    else:
        with pytest.raises(AssertionError, match=r"page.md:2: the (page says|block)"):
            run_page("page.md", page)


def test_figures_of_one_machine_stand_for_any() -> None:
    """Words are compared all the same."""
    page = "<!-- figures of one machine -->\n```python\nprint('12 rows, 0.5%')\n```\n```text\n13 {}, 7.1%\n```\n"
    assert 1 == run_page("page.md", page.format("rows"))
    with pytest.raises(AssertionError, match="the page says"):
        run_page("page.md", page.format("columns"))


BAD = {
    "no_reason": ("<!-- not run: -->\n```python\n```\n", "line 1: not run, for which reason?"),
    "alias": ("\n```py\n```\n", "line 2: call the block python, not py"),
    "open": ("```python\na = 1\n", "line 1: the block is never closed"),
}


@pytest.mark.parametrize(("page", "message"), BAD.values(), ids=BAD)
def test_a_page_that_cannot_be_judged_is_refused(page: str, message: str) -> None:
    """A block that would escape unseen is an error of its page."""
    with pytest.raises(ValueError, match=re.escape(message)):
        read_blocks(page)
