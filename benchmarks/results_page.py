"""``benchmarks/RESULTS.md``, made of ``results.json``: ``python -m benchmarks.results_page``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["results_page"]

HERE = Path(__file__).parent
_VERDICT = {None: "", True: "holds", False: "**missed**"}


def results_page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write the page: a table of all results, and the machine that they were measured on."""
    return "\n".join(_lines(rows)) + "\n"


def _lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    judged = [row for row in rows if row["holds"] is not None]
    held = sum(row["holds"] for row in judged)
    yield "# Results"
    yield ""
    yield "Made of `results.json` by `make bench`; the docstrings of `bench_*.py` say what each name measures."
    yield f"{held} of {len(judged)} bars hold. What the missed ones spend their time on stands below the table."
    for machine in dict.fromkeys(row["machine"] for row in rows):
        yield f"Machine: {machine}."
    yield ""
    yield "| name | value | unit | bar | | beside it |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        bar = "" if row["bar"] is None else f"{row['bar']:g}"
        peers = ", ".join(f"{name} {value:g}" for name, value in row["peers"].items())
        yield f"| `{row['name']}` | {row['value']:g} | {row['unit']} | {bar} | {_VERDICT[row['holds']]} | {peers} |"
    missed = [row for row in rows if row["holds"] is False]
    if missed:
        yield ""
        yield "## The missed bars"
        yield ""
    for row in missed:
        yield f"* `{row['name']}`: {row.get('explanation') or 'not profiled yet.'}"


def main() -> None:
    """Write the page."""
    rows = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    (HERE / "RESULTS.md").write_text(results_page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
