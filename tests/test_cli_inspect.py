"""The commands that look at routes: exit status, stdout, and that what they print is what the library counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from routeplane.inspect import tables
from routeplane.inspect.collect import collect
from routeplane.inspect.diff import compare
from routeplane.inspect.explain import explain
from routeplane.record import RouteRecord
from routeplane.stream import new_stream
from tests.inspect.runs import SPEC, flipped, run
from tests.test_cli import Program

RECORDS = run(lost=10)
OTHERS = [flipped(record) for record in RECORDS]


def written(path: Path, records: list[RouteRecord]) -> Path:
    """A stream of these."""
    with new_stream(path, SPEC) as sink:
        for record in records:
            sink.write(record)
    return path


@pytest.fixture
def routeplane(capsys: pytest.CaptureFixture[str]) -> Program:
    """The program."""
    return Program(capsys)


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A run."""
    return written(tmp_path / "left.arrows", RECORDS)


@pytest.fixture
def right(tmp_path: Path) -> Path:
    """The same with flipped rows."""
    return written(tmp_path / "right.arrows", OTHERS)


def jsonable(document: Any) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(document))


# ---- stats ----------------------------------------------------------------------------------------------------------


def test_stats_prints_what_is_counted(routeplane: Program, left: Path) -> None:
    """All of it, and of some layers and samples alone."""
    assert jsonable(collect(RECORDS, SPEC).to_dict()) == routeplane("stats", left, "--json").document
    chosen = [record.select([5]) for record in RECORDS[1:3]]
    options = ["--layer", 5, "--samples", "step-1/1", "--samples", "step-2/2/0/0"]
    assert (
        jsonable(collect(chosen, SPEC.select([5])).to_dict()) == routeplane("stats", left, "--json", *options).document
    )


def test_stats_are_plain_text_in_a_pipe(routeplane: Program, left: Path) -> None:
    """One row for each layer, no escape sequences, no line wrapped."""
    shown = routeplane("stats", left)
    assert (0, "") == (shown.status, shown.err)
    assert "\x1b" not in shown.out
    assert [str(layer) for layer in SPEC.layer_ids] == [line.split()[0] for line in shown.out.splitlines()[-3:]]
    assert "10 of" in shown.out


def test_a_terminal_gets_style_and_the_same_numbers() -> None:
    """Bold heads; every word of the plain form is there."""
    document = collect(RECORDS, SPEC).to_dict()
    plain, styled = tables.format_statistics(document), tables.format_statistics(document, terminal_width=160)
    assert "\x1b[1m" in styled
    assert set(plain.splitlines()[-1].split()) <= set(styled.splitlines()[-1].split())


# ---- diff -----------------------------------------------------------------------------------------------------------


def test_diff_prints_what_differs_and_says_so_by_its_status(routeplane: Program, left: Path, right: Path) -> None:
    """1 where anything differs, 0 for the same."""
    shown = routeplane("diff", left, right, "--json")
    assert (1, jsonable(compare(RECORDS, OTHERS, specs=(SPEC, SPEC)).to_dict())) == (shown.status, shown.document)
    assert 0 == routeplane("diff", left, left).status
    text = routeplane("diff", left, right)
    assert 1 == text.status
    assert "rows flipped, the first at token 0, layer 1" in text.out


# ---- explain --------------------------------------------------------------------------------------------------------


def test_explain_prints_the_hops_of_one_token(routeplane: Program, left: Path) -> None:
    """As JSON and as text, in one layer."""
    found = explain(RECORDS[0], 25, layer_ids=(2,))
    shown = routeplane("explain", left, "step-0/0", 25, "--layer", 2, "--json")
    assert (0, jsonable(found.to_dict())) == (shown.status, shown.document)
    text = routeplane("explain", left, "step-0/0", 25, "--layer", 2).out
    assert "captured: lost" in text
    assert "MISSING" in text.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments",
    [["nobody", 0], ["step-0/0", 10_000], ["step-0/0", -1], ["step-0/0", 0, "--layer", 3]],
    ids=["unknown-sample", "beyond", "negative", "dense-layer"],
)
def test_a_place_that_is_not_there_could_not_run(routeplane: Program, left: Path, arguments: list[Any]) -> None:
    """Status 2, and the reason on stderr."""
    shown = routeplane("explain", left, *arguments)
    assert (2, "") == (shown.status, shown.out)
    assert "expected" in shown.err


# ---- report ---------------------------------------------------------------------------------------------------------


def test_report_writes_one_page_with_the_worst_samples(routeplane: Program, left: Path, right: Path) -> None:
    """Those with missing rows and those that flip most, in turn; PNG files on request."""
    out, png = left.with_name("report.html"), left.with_name("png")
    shown = routeplane("report", left, "--against", right, "--out", out, "--png", png, "--json")
    assert (0, str(out), 7) == (shown.status, shown.document["report"], len(shown.document["pictures"]))
    page = out.read_text(encoding="utf-8")
    assert "<b>step-0/0/0/0</b>" in page
    assert 4 == page.count("<details")
    assert f"against {right}" in page
    assert 7 == len(list(png.iterdir()))


def test_a_report_of_a_cut_stream_is_refused(routeplane: Program, left: Path) -> None:
    """Status 1: a picture of half a run would look like one of a whole."""
    cut = left.with_name("cut.arrows")
    cut.write_bytes(left.read_bytes()[:-64])
    shown = routeplane("report", cut, "--out", left.with_name("never.html"))
    assert (1, "") == (shown.status, shown.out)
    assert not left.with_name("never.html").exists()
