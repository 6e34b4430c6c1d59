"""The commands that look at routes: exit status, stdout, and that what they print is what the library counts."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import services

from routeplane.inspect import tables
from routeplane.inspect.compare import compare
from routeplane.inspect.explain import explain
from routeplane.inspect.statistics import collect
from tests.cli.test_main import Program
from tests.inspect.containers import PLACINGS, archived, streamed
from tests.inspect.runs import SPEC, flipped, run

RECORDS = run(lost=10)
OTHERS = [flipped(record) for record in RECORDS]


@pytest.fixture
def routeplane(capsys: pytest.CaptureFixture[str]) -> Program:
    """The program."""
    return Program(capsys)


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A run."""
    return Path(streamed(tmp_path / "left.arrows", RECORDS))


@pytest.fixture
def right(tmp_path: Path) -> Path:
    """The same with flipped rows."""
    return Path(streamed(tmp_path / "right.arrows", OTHERS))


def jsonable(document: Any) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(document))


# ---- stats ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=PLACINGS)
def places(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The run in a stream, in an archive, and split over one of each."""
    return PLACINGS[request.param](tmp_path, RECORDS)


def test_stats_prints_what_is_counted(routeplane: Program, places: list[str]) -> None:
    """All of it, and of some layers and samples alone."""
    assert jsonable(collect(RECORDS, SPEC).to_dict()) == routeplane("stats", *places, "--json").document
    chosen = [record.select([5]) for record in RECORDS[1:3]]
    options = ["--layer", 5, "--samples", "step-1/1", "--samples", "step-2/2/0/0"]
    expected = jsonable(collect(chosen, SPEC.select([5])).to_dict())
    assert expected == routeplane("stats", *places, "--json", *options).document


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


@pytest.mark.parametrize("options", [[], ["--layer", 5, "--samples", "step-1/1"]], ids=["all", "some"])
def test_diff_reads_archives_on_either_side(
    routeplane: Program, left: Path, right: Path, tmp_path: Path, options: list[Any]
) -> None:
    """A stream and an archive of the same records say the same, whichever stands where."""
    expected = routeplane("diff", left, right, "--json", *options).document
    ours, theirs = archived(tmp_path / "left.zarr", RECORDS), archived(tmp_path / "right.zarr", OTHERS)
    for pair in ((left, theirs), (ours, right), (ours, theirs)):
        shown = routeplane("diff", *pair, "--json", *options)
        assert (1, expected) == (shown.status, shown.document)
    assert 0 == routeplane("diff", left, ours).status


# ---- explain --------------------------------------------------------------------------------------------------------


def test_explain_prints_the_hops_of_one_token(routeplane: Program, left: Path) -> None:
    """As JSON and as text, in one layer."""
    found = explain(RECORDS[0], 25, layer_ids=(2,))
    shown = routeplane("explain", left, "step-0/0", 25, "--layer", 2, "--json")
    assert (0, jsonable(found.to_dict())) == (shown.status, shown.document)
    text = routeplane("explain", left, "step-0/0", 25, "--layer", 2).out
    assert "captured: lost" in text
    assert "MISSING" in text.splitlines()[-1]


def test_explain_finds_a_sample_in_an_archive(routeplane: Program, left: Path, tmp_path: Path) -> None:
    """In its second run too, with the same hops."""
    archive = archived(tmp_path / "left.zarr", RECORDS)
    for sample in ("step-0/0", "step-2/5"):
        expected = routeplane("explain", left, sample, 25, "--json").document
        assert expected == routeplane("explain", archive, sample, 25, "--json").document


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


@pytest.mark.parametrize("command", ["stats", "diff", "report"])
def test_samples_that_are_nowhere_could_not_run(
    routeplane: Program, left: Path, right: Path, command: str, tmp_path: Path
) -> None:
    """Status 2: of a mistyped name nothing differs, which would read as the same. One that is there is enough."""
    options: dict[str, list[object]] = {"stats": [], "diff": [right], "report": ["--out", tmp_path / "page.html"]}
    more = options[command]
    shown = routeplane(command, left, *more, "--samples", "nobody", "--samples", "no")
    assert (2, "") == (shown.status, shown.out)
    assert "'nobody' or 'no', got none" in shown.err
    assert 2 != routeplane(command, left, *more, "--samples", "nobody", "--samples", "step-0/0").status


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


def test_a_report_of_archives_shows_what_one_of_streams_does(
    routeplane: Program, left: Path, right: Path, tmp_path: Path
) -> None:
    """Byte for byte, but for the line that says where the routes came from."""
    pages = []
    for places in ((left, right), (archived(tmp_path / "l.zarr", RECORDS), archived(tmp_path / "r.zarr", OTHERS))):
        out = tmp_path / "report.html"
        assert 0 == routeplane("report", places[0], "--against", places[1], "--out", out).status
        page = out.read_text(encoding="utf-8")
        pages.append(page.replace(str(places[0]), "ours").replace(str(places[1]), "theirs"))
    assert pages[0] == pages[1]


def test_a_report_of_a_cut_stream_is_refused(routeplane: Program, left: Path) -> None:
    """Status 1: a picture of half a run would look like one of a whole."""
    cut = left.with_name("cut.arrows")
    cut.write_bytes(left.read_bytes()[:-64])
    shown = routeplane("report", cut, "--out", left.with_name("never.html"))
    assert (1, "") == (shown.status, shown.out)
    assert not left.with_name("never.html").exists()


def test_an_archive_that_lost_a_shard_is_refused(routeplane: Program, tmp_path: Path) -> None:
    """Status 1 and no numbers: what is lost would count as MISSING."""
    archive = Path(archived(tmp_path / "run.zarr", RECORDS))
    next(path for path in sorted(archive.glob("runs/*/routes/c/**/*")) if path.is_file()).unlink()
    shown = routeplane("stats", archive, "--json")
    assert (1, "") == (shown.status, shown.out)
    assert shown.err.startswith("routeplane: lost_file: expected ")


# ---- on a cluster ---------------------------------------------------------------------------------------------------


@pytest.mark.xdist_group("ray")
def test_without_a_cluster_ray_says_how_to_get_one(
    routeplane: Program, left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 2: none is running, or RAY_ADDRESS names what is no address. Nothing is started behind one's back."""
    # other clusters of this machine are none of the test's business
    monkeypatch.setattr(services, "find_gcs_addresses", cache(set))
    monkeypatch.setattr(services, "find_bootstrap_address", lambda folder: None)
    for address in ("", "nowhere"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        shown = routeplane("stats", left, "--ray", "--json")
        assert (2, "") == (shown.status, shown.out)
        assert shown.err.startswith("routeplane: connection: expected a running Ray cluster (`ray start --head` starts")
        assert not ray.is_initialized()
