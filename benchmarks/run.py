"""Run every ``benchmarks/bench_*.py`` and ``scale.py``; write ``results.json``, and ``RESULTS.md`` and a report of it.

A benchmark is a module with ``main(*, full: bool) -> Iterable[Result]``. The file is a list of objects: name, value,
unit, bar, holds (null where there is no bar), peers, machine, explanation. A missed bar is reported and stays in the
file. Results are written as they come. A benchmark that fails keeps what it measured before, and its old results
besides; the others still run; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Result, machine
from benchmarks.results_page import results_page

__all__ = ["Results", "area_of", "main", "modules", "run_all"]

HERE = Path(__file__).parent
_VERDICT = {None: "", True: "holds", False: "MISSED"}
Row = dict[str, Any]


class Results:
    """The rows of ``results.json`` in ``home``, written after each change, with their page.

    Beside it: ``misses.json``, why a bar is missed, by name; ``measured_once.json``, rows whose code is gone.
    """

    def __init__(self, home: Path, *, where: str) -> None:
        self._home, self._where = home, where
        self.rows: list[Row] = _load(home / "results.json")
        self._explained: Mapping[str, str] = dict(_load(home / "misses.json"))
        for row in _load(home / "measured_once.json"):
            self._put(row)

    def add(self, result: Result) -> None:
        """Put a result in the place of the one before, or behind those of its area."""
        self._put(result.as_row(self._where))
        self.write()

    def finish(self, names: Iterable[str]) -> None:
        """Drop what a benchmark that ran through did not measure this time; ``names``: what it did."""
        fresh = {row["name"] for row in _load(self._home / "measured_once.json")} | set(names)
        areas = {area_of(name) for name in names}
        self.rows = [row for row in self.rows if row["name"] in fresh or area_of(row["name"]) not in areas]
        self.write()

    def _put(self, row: Row) -> None:
        names = [each["name"] for each in self.rows]
        if row["name"] in names:
            self.rows[names.index(row["name"])] = row
            return
        own = [at for at, name in enumerate(names) if area_of(name) == area_of(row["name"])]
        self.rows.insert(own[-1] + 1 if own else len(names), row)

    def write(self) -> None:
        """Write the file and its page; a missed bar says what is known about it."""
        for row in self.rows:
            row.pop("explanation", None)
            if row["holds"] is False and row["name"] in self._explained:
                row["explanation"] = self._explained[row["name"]]
        text = json.dumps(self.rows, indent=2, ensure_ascii=False) + "\n"
        (self._home / "results.json").write_text(text, encoding="utf-8")
        (self._home / "RESULTS.md").write_text(results_page(self.rows), encoding="utf-8")


def area_of(name: str) -> str:
    """What a result's name begins with: one benchmark measures all results of its areas."""
    return name.partition("/")[0]


def _load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def modules(only: str | None = None) -> list[str]:
    """Every benchmark by its file's name; or ``bench_ONLY``, or ``scale``."""
    found = [path.stem for path in sorted(HERE.glob("bench_*.py"))] + ["scale"]
    return found if only is None else [name for name in found if name in (only, f"bench_{only}")]


def run_all(names: Sequence[str], results: Results, *, full: bool) -> list[str]:
    """Run benchmarks one after the other; which of them failed."""
    failed = []
    for name in names:
        print(f"{name} ...", flush=True)
        measured: list[str] = []
        try:
            for result in importlib.import_module(f"benchmarks.{name}").main(full=full):
                bar = "" if result.bar is None else f", bar {result.bar:g} {_VERDICT[result.holds]}"
                print(f"  {result.name}: {result.value:g} {result.unit}{bar}", flush=True)
                results.add(result)
                measured.append(result.name)
        except Exception:  # noqa: BLE001 - whatever it was, the others run
            traceback.print_exc()
            print(f"  FAILED after {len(measured)} results", flush=True)
            failed.append(name)
        else:
            results.finish(measured)
    return failed


def _write_report(rows: Sequence[Row]) -> None:
    """``report.html``, where the extra that draws it is installed."""
    try:
        from benchmarks.report_page import report_page
    except ModuleNotFoundError as error:
        print(f"no report.html: {error}")
        return
    scale = _load(HERE / "scale.json")
    (HERE / "report.html").write_text(report_page(rows, scale["steps"] if scale else []), encoding="utf-8")


def main() -> int:
    """Measure and write; 1 where a benchmark failed."""
    parser = argparse.ArgumentParser(prog="benchmarks", description="Measure, and write benchmarks/results.json.")
    parser.add_argument("--full", action="store_true", help="the full payloads instead of small ones")
    parser.add_argument("--only", metavar="NAME", help="run bench_NAME.py, or scale, and replace its results")
    parser.add_argument("--report", action="store_true", help="measure nothing; write the pages of what was measured")
    arguments = parser.parse_args()
    where = machine()
    results = Results(HERE, where=where)
    names = [] if arguments.report else modules(arguments.only)
    if arguments.only and not names:
        parser.error(f"expected one of {', '.join(modules())}, got {arguments.only}")
    failed = run_all(names, results, full=arguments.full)
    results.write()
    _write_report(results.rows)
    print(f"{len(results.rows)} results in {HERE.name}/results.json, measured on {where}")
    for name in failed:
        print(f"FAILED: {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
