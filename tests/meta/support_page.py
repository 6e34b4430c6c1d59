"""The tables of docs/reference/support.md, made of what ran: ``python -m tests.meta.support_page`` writes them.

Versions come from the files that tests leave or read (``tests/data``), the Makefile's pins, and the layouts that
``routeplane.batch`` names. The policy around them is written by hand.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from routeplane.batch import LAYOUTS

__all__ = ["support_page"]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "support.md"
DATA = ROOT / "tests" / "data"

#: Tables stand between these comments; all else on the page is written by hand.
_MADE = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _versions(pattern: str) -> list[str]:
    return sorted(
        (re.findall(r"-?(\d+\.\d+(?:\.\d+)?)", path.name)[0] for path in DATA.glob(pattern)),
        key=lambda version: [int(part) for part in version.split(".")],
    )


def _pin(name: str) -> str:
    """The version that the Makefile installs."""
    found = re.search(rf"{re.escape(name)}==([\d.]+)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"expected a pin of {name} in the Makefile, got none")
    return found[1]


def _rows() -> list[tuple[str, ...]]:
    outcomes = json.loads((DATA / "engine-outcomes.json").read_text(encoding="utf-8"))
    signatures = json.loads((DATA / "vllm-signatures.json").read_text(encoding="utf-8"))
    rows: list[tuple[str, ...]] = [
        ("vLLM", ", ".join(outcomes), "run"),
        ("vLLM", ", ".join(signatures), "signatures read"),
        ("vLLM server", ", ".join(_versions("vllm-*-http.json")), "recorded"),
        ("SGLang", LAYOUTS["sglang"].read_from.removeprefix("SGLang "), "layout read"),
    ]
    for title, adapter in (
        ("Transformers", "transformers"),
        ("NeMo Automodel", "automodel"),
        ("Megatron-Core", "megatron"),
    ):
        rows.append((title, ", ".join(_versions(f"replay/{adapter}-*.json")), "run"))
    rows += [("NeMo Gym", _pin("nemo-gym"), "run"), ("TransferQueue", _pin("TransferQueue"), "run")]
    rows += [(title, _pin(title.lower()), "its functions that cut routes run") for title in ("verl", "SkyRL")]
    for name, layout in LAYOUTS.items():
        if name not in ("sglang", "vllm"):
            rows.append((f"layout `{name}`", layout.read_from, "layout read"))
    return rows


def _python() -> str:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tried: dict[str, str] = json.loads((DATA / "pythons.json").read_text(encoding="utf-8"))
    named = [line.rpartition(" ")[2] for line in document["project"]["classifiers"] if re.search(r":: 3\.\d+$", line)]
    if named != list(tried):
        raise ValueError(f"expected classifiers for the versions that were tried, {list(tried)}, got {named}")
    return _table(("Python", "what was run"), list(tried.items()))


def support_page() -> str:
    """The page with fresh tables."""
    tables = {"versions": _table(("package", "versions", "what was done"), _rows()), "pythons": _python()}
    page = PAGE.read_text(encoding="utf-8")
    return _MADE.sub(lambda match: match[1] + tables[match[2]] + match[3], page)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    PAGE.write_text(support_page(), encoding="utf-8")
