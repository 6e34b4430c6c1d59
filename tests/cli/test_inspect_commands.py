"""The commands that look at routes: exit status, stdout, and that what they print is what the library counts."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import services

from routeplane.inspect.compare import compare
from routeplane.inspect.look import explain
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


def counted(document: dict[str, Any]) -> dict[str, Any]:
    """The document without what is said beside the counts."""
    return {name: value for name, value in document.items() if name not in ("findings", "damage")}


def test_stats_prints_what_is_counted(routeplane: Program, places: list[str]) -> None:
    """All of it, and of some layers and samples alone."""
    found = routeplane("stats", *places, "--json").document
    assert (jsonable(collect(RECORDS, SPEC).to_dict()), []) == (counted(found), found["damage"])
    assert "missing_rows" == found["findings"][0]["kind"]
    chosen = [record.select([5]) for record in RECORDS[1:3]]
    options = ["--layer", 5, "--samples", "step-1/1", "--samples", "step-2/2/0/0"]
    expected = jsonable(collect(chosen, SPEC.select([5])).to_dict())
    assert expected == counted(routeplane("stats", *places, "--json", *options).document)


def test_stats_fit_sixty_columns_without_escape_sequences(routeplane: Program, left: Path) -> None:
    """One row for each layer."""
    shown = routeplane("stats", left)
    assert (0, "") == (shown.status, shown.err)
    assert "\x1b" not in shown.out
    table = shown.out.splitlines()[-4:]
    assert ["layer", *map(str, SPEC.layer_ids)] == [line.split()[0] for line in table]
    assert max(map(len, table)) <= 60
    assert "10 of" in shown.out


# ---- diff -----------------------------------------------------------------------------------------------------------


def test_diff_prints_what_differs_and_says_so_by_its_status(routeplane: Program, left: Path, right: Path) -> None:
    """1 where anything differs, 0 for the same."""
    shown = routeplane("diff", left, right, "--json")
    expected = jsonable(compare(RECORDS, OTHERS, specs=(SPEC, SPEC)).to_dict())
    assert (1, expected) == (shown.status, counted(shown.document))
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
    [["unknown", 0], ["step-0/0", 10_000], ["step-0/0", -1], ["step-0/0", 0, "--layer", 3]],
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
    shown = routeplane(command, left, *more, "--samples", "unknown", "--samples", "no")
    assert (2, "") == (shown.status, shown.out)
    assert "'unknown' or 'no', got none" in shown.err
    assert 2 != routeplane(command, left, *more, "--samples", "unknown", "--samples", "step-0/0").status


# ---- report ---------------------------------------------------------------------------------------------------------


def test_report_writes_one_page_with_the_worst_samples(routeplane: Program, left: Path, right: Path) -> None:
    """Those with missing rows and those that flip most; PNG files on request."""
    out, png = left.with_name("report.html"), left.with_name("png")
    shown = routeplane("report", left, "--against", right, "--out", out, "--png", png, "--json")
    assert (0, str(out)) == (shown.status, shown.document["report"])
    assert {path.stem for path in png.iterdir()} >= {"load", "flips", "coverage", "drift", "samples"}
    assert len(shown.document["pictures"]) == len(list(png.iterdir()))
    page = out.read_text(encoding="utf-8")
    assert "<b>step-0/0/0/0</b>" in page
    assert 4 == page.count("<details")
    assert f"against {right}" in page


def test_a_report_of_archives_shows_what_one_of_streams_does(
    routeplane: Program, left: Path, right: Path, tmp_path: Path
) -> None:
    """Byte for byte, but for the names of the sources."""
    pages = []
    pairs: list[tuple[Path | str, Path | str]] = [
        (left, right),
        (archived(tmp_path / "l.zarr", RECORDS), archived(tmp_path / "r.zarr", OTHERS)),
    ]
    for places in pairs:
        out = tmp_path / "report.html"
        assert 0 == routeplane("report", places[0], "--against", places[1], "--out", out).status
        page = out.read_text(encoding="utf-8")
        for place, name in zip(places, ("ours", "theirs"), strict=True):
            page = page.replace(str(place), name).replace(Path(place).name, name)
        pages.append(page)
    assert pages[0] == pages[1]


def test_several_sources_are_parts_of_one_report(routeplane: Program, tmp_path: Path) -> None:
    """Trends over them, in the order given; a part can be chosen."""
    steps = [streamed(tmp_path / f"step-{step}.arrows", RECORDS[2 * step : 2 * step + 2]) for step in range(3)]
    assert 0 == routeplane("report", *steps, "--out", tmp_path / "page.html").status
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert 'id="chart-trends"' in page
    assert all(f"<option>step-{step}.arrows</option>" in page for step in range(3))


def test_a_report_of_a_cut_stream_says_so_first(routeplane: Program, left: Path) -> None:
    """Status 1, and the damage at the top of the page; refused by choice."""
    cut, page = left.with_name("cut.arrows"), left.with_name("page.html")
    cut.write_bytes(left.read_bytes()[:-64])
    shown = routeplane("report", cut, "--out", page, "--json")
    assert (1, ["truncated"]) == (shown.status, [item["kind"] for item in shown.document["damage"]])
    assert page.read_text(encoding="utf-8").index("truncated") < page.read_text(encoding="utf-8").index(
        '<h2 id="charts'
    )
    never = left.with_name("never.html")
    refused = routeplane("report", cut, "--out", never, "--on-truncated", "raise", "--json")
    assert (1, "truncated", False) == (refused.status, refused.document["error"]["kind"], never.exists())


def test_an_archive_that_lost_a_shard_is_counted_without_it(routeplane: Program, tmp_path: Path) -> None:
    """Status 1, the damage listed, what is lost counted as missing; refused by choice."""
    archive = Path(archived(tmp_path / "run.zarr", RECORDS))
    next(path for path in sorted(archive.glob("runs/*/routes/c/**/*")) if path.is_file()).unlink()
    shown = routeplane("stats", archive, "--json")
    assert (1, {"lost_file"}) == (shown.status, {item["kind"] for item in shown.document["damage"]})
    assert shown.document["coverage"]["lost"] > 200
    refused = routeplane("stats", archive, "--on-corrupt", "raise", "--json")
    assert (1, "lost_file") == (refused.status, refused.document["error"]["kind"])


def test_a_stream_without_rows_uses_no_expert(routeplane: Program, left: Path) -> None:
    """Cut before its first batch; it would read as if each layer had used all of its experts."""
    cut = left.with_name("cut.arrows")
    cut.write_bytes(left.read_bytes()[: left.stat().st_size // 3])
    shown = routeplane("stats", cut)
    assert 1 == shown.status
    assert " 0/" in shown.out


# ---- on a cluster ---------------------------------------------------------------------------------------------------


@pytest.mark.xdist_group("ray")
def test_without_a_cluster_ray_says_how_to_get_one(
    routeplane: Program, left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 2: none is running, or RAY_ADDRESS is not an address. No cluster is started."""
    # other clusters of this machine are none of the test's business
    monkeypatch.setattr(services, "find_gcs_addresses", cache(set))
    monkeypatch.setattr(services, "find_bootstrap_address", lambda folder: None)
    for address in ("", "nowhere"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        shown = routeplane("stats", left, "--ray", "--json")
        assert (2, "") == (shown.status, shown.out)
        error = json.loads(shown.err)["error"]
        assert ("connection", True) == (error["kind"], "`ray start --head` starts" in error["message"])
        assert not ray.is_initialized()
