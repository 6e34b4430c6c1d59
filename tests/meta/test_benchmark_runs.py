"""How ``benchmarks/run.py`` keeps results: as they come, also where a benchmark fails; and the report made of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.measure import Result
from benchmarks.report_page import chart_specs, report_page
from benchmarks.run import Results, run_all
from routeplane.inspect.charts import encode


def result(name: str, value: float, *, bar: float | None = 1.0) -> Result:
    """One measured number."""
    return Result(name=name, value=value, unit="x", bar=bar)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with old results of two areas, and one measured once."""
    old = [result(name, 1.0).as_row("old") for name in ("a/kept", "a/gone", "b/one")]
    (tmp_path / "results.json").write_text(json.dumps(old), encoding="utf-8")
    (tmp_path / "measured_once.json").write_text(json.dumps([result("a/once", 3.0).as_row("old")]), encoding="utf-8")
    (tmp_path / "misses.json").write_text(json.dumps({"a/new": "half of it is page faults"}), encoding="utf-8")
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, home: Path, *, fails: bool) -> tuple[list[str], dict[str, Any]]:
    """Run one benchmark of area a, which may fail behind its second result, and one of area b."""

    def first(*, full: bool) -> Iterator[Result]:
        yield result("a/kept", 2.0)
        yield result("a/new", 0.5)
        assert len(json.loads((home / "results.json").read_text(encoding="utf-8"))) == 5
        if fails:
            raise OSError("no space left")

    def second(*, full: bool) -> list[Result]:
        return [result("b/one", 2.0)]

    for name, main in (("bench_a", first), ("bench_b", second)):
        module = ModuleType(name)
        module.main = main  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"benchmarks.{name}", module)
    failed = run_all(["bench_a", "bench_b"], Results(home, where="here"), full=False)
    rows = json.loads((home / "results.json").read_text(encoding="utf-8"))
    return failed, {row["name"]: row for row in rows}


def test_results_stand_in_the_place_of_those_before(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """What a benchmark no longer measures goes; what was measured once stays; a miss says why."""
    failed, rows = run(monkeypatch, home, fails=False)
    assert [] == failed
    assert ["a/kept", "a/once", "a/new", "b/one"] == list(rows)
    assert ("here", 2.0) == (rows["a/kept"]["machine"], rows["a/kept"]["value"])
    assert "half of it is page faults" == rows["a/new"]["explanation"]
    assert "`a/new`: half of it is page faults" in (home / "RESULTS.md").read_text(encoding="utf-8")


def test_a_benchmark_that_fails_keeps_what_it_measured(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Its results before the failure, and its old ones; the others still run."""
    failed, rows = run(monkeypatch, home, fails=True)
    assert ["bench_a"] == failed
    assert {"a/kept", "a/gone", "a/once", "a/new", "b/one"} == set(rows)
    assert ["old", "here", "here"] == [rows[name]["machine"] for name in ("a/gone", "a/new", "b/one")]


def test_the_report_shows_every_bar_and_curve() -> None:
    """Each chart can be drawn; a result is right of the line where its bar holds, whichever direction is better."""
    rows = [
        result("a/high", 2.0).as_row("here"),
        result("a/low", 0.5).as_row("here"),
        Result(name="a/time", value=0.5, unit="x", bar=1.0, higher_is_better=False).as_row("here"),
        Result(name="curves/tokens", value=1.0, unit="share", peers={"10": 0.1, "1000": 0.7}).as_row("here"),
    ]
    steps = [
        {"model": "m", "gpus": gpus, "store_out_whole_gb": 4.0, "blocks_gb": 1.0, "node_in_fetched_gb": 0.2,
         "rank_batches_gb": 0.1}
        for gpus in (64, 128)
    ]  # fmt: skip
    specs = chart_specs(rows, steps)
    assert ["bars", "curves/tokens", "scale"] == list(specs)
    assert [2.0, 0.5, 2.0] == [row["ratio"] for row in specs["bars"]["data"]["values"]]
    for spec in specs.values():
        assert encode(spec, "svg").startswith(b"<svg")
    page = report_page(rows, steps)
    assert "2 of 3 bars hold" in page
    assert "</script></body></html>" in page
