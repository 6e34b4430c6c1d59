"""The sdist and the wheel, built and tried: each page of the docs in a fresh environment with the extras that it names.

``python -m tests.meta.built_wheel`` builds both, makes one environment for each set of extras that pages name at their
top, installs the wheel there, and runs the blocks of these pages. ``--extras report zarr`` tries these sets alone.
Installs, so it needs a package index; minutes, and gigabytes where torch is among the extras.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from tests.meta.test_docs_blocks import PAGES, ROOT, read_blocks

__all__ = ["besides_of", "build", "content_of", "extras_of", "fresh", "page_groups", "run_page_in"]

#: A page says so above its first Python block.
_NEEDS = re.compile(r"\bextras? ((?:`[a-z-]+`(?:, | and )?)+)")
#: ... and which packages its examples use, that no part of ours does.
_BESIDES = re.compile(r"\bexamples need ((?:`[a-z-]+`(?:, | and )?)+) besides")
#: Extras whose pages need an engine, a cluster of processes or a trainer that is installed in another way.
ELSEWHERE = {"vllm", "vllm-cpu", "automodel", "megatron"}
_RUNNER = """
import json, sys
namespace = {"__name__": "__main__"}
for block in json.load(open(sys.argv[1])):
    exec(compile(block, sys.argv[2], "exec", dont_inherit=True), namespace)
"""


def build(folder: Path) -> tuple[Path, Path]:
    """Build the sdist and, from it, the wheel; their paths below ``folder``."""
    python = fresh(folder / "build-env", "hatchling>=1.27")
    subprocess.run([python, "-m", "hatchling", "build", "-t", "sdist", "-d", folder], cwd=ROOT, check=True)
    [sdist] = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "source", filter="data")
    [source] = (folder / "source").iterdir()
    subprocess.run([python, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=source, check=True)
    [wheel] = folder.glob("*.whl")
    return sdist, wheel


def content_of(archive: Path) -> set[str]:
    """The files of a wheel or an sdist; those of an sdist without its top folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return set(wheel.namelist())
    with tarfile.open(archive) as sdist:
        return {name.partition("/")[2] for name in sdist.getnames()}


def fresh(folder: Path, *packages: str, python: str = sys.executable) -> Path:
    """Make an environment that has these packages, and nothing of ours; its Python."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    own = folder / "bin" / "python"
    pip: list[str | Path] = [own, "-m", "pip", "--disable-pip-version-check", "install", "-qq", *packages]
    subprocess.run(pip, check=True)
    return own


def extras_of(page: str) -> frozenset[str]:
    """The extras that a page names above its first Python block; none: the base dependencies do."""
    return _named(_NEEDS, page)


def besides_of(page: str) -> frozenset[str]:
    """The packages that a page's examples need besides."""
    return _named(_BESIDES, page)


def _named(pattern: re.Pattern[str], page: str) -> frozenset[str]:
    top = page.partition("```python")[0]
    return frozenset(name for found in pattern.findall(top) for name in re.findall(r"`([a-z-]+)`", found))


def page_groups() -> dict[frozenset[str], list[str]]:
    """Pages with blocks that run, by the extras that they name."""
    found: dict[frozenset[str], list[str]] = {}
    for path in PAGES:
        text = (ROOT / path).read_text(encoding="utf-8")
        if any(block.reason is None for block in read_blocks(text)):
            found.setdefault(extras_of(text), []).append(path)
    return found


def run_page_in(python: Path, path: str, folder: Path) -> str | None:
    """Run a page's blocks with another Python, in an empty folder; the last line of what went wrong, or None."""
    blocks = [block.text for block in read_blocks((ROOT / path).read_text(encoding="utf-8")) if block.reason is None]
    own = Path(tempfile.mkdtemp(dir=folder))
    (own / "blocks.json").write_text(json.dumps(blocks))
    done = subprocess.run(
        [python, "-c", _RUNNER, "blocks.json", path],
        cwd=own,
        env={"PATH": f"{python.parent}:/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HOME": str(own)},
        capture_output=True,
        text=True,
        check=False,
    )
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]


def main() -> int:
    """Build, install, run; a line a page, and 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras", nargs="*", help="sets to try, such as base, report or ray,zarr; default: all")
    asked = parser.parse_args().extras
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sdist, wheel = build(folder)
        sys.stdout.write(f"{sdist.name}, {wheel.name}\n")
        for extras, pages in sorted(page_groups().items(), key=lambda item: sorted(item[0])):
            title = ",".join(sorted(extras)) or "base"
            if extras & ELSEWHERE or (asked is not None and title not in asked):
                continue
            python = fresh(folder / title, f"{wheel}[{','.join(sorted(extras))}]" if extras else str(wheel))
            besides = set[str]().union(*(besides_of((ROOT / path).read_text(encoding="utf-8")) for path in pages))
            if besides:
                subprocess.run([python, "-m", "pip", "install", "-qq", *sorted(besides)], check=True)
            for path in pages:
                problem = run_page_in(python, path, folder)
                failed += problem is not None
                sys.stdout.write(f"{title:24} {path:56} {problem or 'runs'}\n")
                sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
