"""Run every ``benchmarks/bench_*.py`` and write ``benchmarks/results.json``, and ``RESULTS.md`` of it.

A benchmark is a module with ``main(*, full: bool) -> list[Result]``. The file is a list of objects: name, value, unit,
bar, holds (null where there is no bar), peers, machine. A missed bar is reported and stays in the file; the run fails
only where a benchmark could not measure.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

from benchmarks.measure import Result, machine
from benchmarks.results_page import results_page

HERE = Path(__file__).parent
_VERDICT = {None: "", True: "holds", False: "MISSED"}


def run_all(*, full: bool, only: str | None = None) -> list[Result]:
    """The results of every benchmark, in the order of their file names; or of ``bench_ONLY.py``."""
    results: list[Result] = []
    for path in sorted(HERE.glob(f"bench_{only or '*'}.py")):
        print(f"{path.stem} ...", flush=True)
        for result in importlib.import_module(f"benchmarks.{path.stem}").main(full=full):
            bar = "" if result.bar is None else f", bar {result.bar:g} {_VERDICT[result.holds]}"
            print(f"  {result.name}: {result.value:g} {result.unit}{bar}")
            results.append(result)
    return results


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="benchmarks", description="Measure, and write benchmarks/results.json.")
    parser.add_argument("--full", action="store_true", help="the full payloads instead of small ones")
    parser.add_argument("--only", metavar="NAME", help="run bench_NAME.py and replace its results")
    arguments = parser.parse_args()
    where = machine()
    rows = [result.as_row(where) for result in run_all(full=arguments.full, only=arguments.only)]
    if arguments.only is None:
        # comparisons with code that is gone, kept as they were measured before it went
        rows += json.loads((HERE / "measured_once.json").read_text(encoding="utf-8"))
    else:
        rows = _replaced(rows)
    text = json.dumps(rows, indent=2, ensure_ascii=False) + "\n"
    (HERE / "results.json").write_text(text, encoding="utf-8")
    (HERE / "RESULTS.md").write_text(results_page(rows), encoding="utf-8")
    print(f"{len(rows)} results in {HERE.name}/results.json, measured on {where}")


def _replaced(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The file's rows, with these instead of those of the same areas."""
    areas = {row["name"].partition("/")[0] for row in rows}
    kept = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    first = next((at for at, row in enumerate(kept) if row["name"].partition("/")[0] in areas), len(kept))
    behind = [row for row in kept[first:] if row["name"].partition("/")[0] not in areas]
    return [*kept[:first], *rows, *behind]


if __name__ == "__main__":
    main()
