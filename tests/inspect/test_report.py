"""The report: what it shows is the data's, nothing is fetched, and a browser shows it without a complaint."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from routeplane.inspect.compare import compare
from routeplane.inspect.diagnose import find_findings
from routeplane.inspect.plots import draw_pictures, encode
from routeplane.inspect.report import MAX_TOKENS, render_report, view_sample, write_pictures, write_report
from routeplane.inspect.statistics import collect
from routeplane.record.record import RouteRecord
from routeplane.record.spec import RouteSpec
from routeplane.testing.builders import watermarked_record, watermarked_spec
from tests.inspect.runs import SPEC, flipped, run

PNG = b"\x89PNG\r\n\x1a\n"


def page_of(records: list[RouteRecord], *, title: str = "a run") -> str:
    """The whole page: statistics, the difference to flipped rows, and two samples."""
    others = [flipped(record) for record in records]
    diff = compare(records, others, specs=(SPEC, SPEC))
    samples = [view_sample(mine, against=theirs) for mine, theirs in zip(records[:2], others[:2], strict=True)]
    return render_report(collect(records, SPEC), title=title, diff=diff, samples=samples, notes=["from somewhere"])


class Tags(HTMLParser):
    """Every start tag with its attributes, and whether tags nest."""

    VOID = ("meta", "link", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note and open."""
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close the innermost."""
        assert tag == self.open.pop()


# ----------------------------------------------------------------------------------------------------------------------
# The page
# ----------------------------------------------------------------------------------------------------------------------


def test_nothing_on_the_page_is_fetched_or_run() -> None:
    """No script, no address but inline data; tags nest."""
    tags = Tags(page_of(run(lost=5)))
    assert [] == tags.open
    assert [] == [tag for tag, _ in tags.seen if tag in ("script", "iframe", "object", "form")]
    addresses = [value for _, attributes in tags.seen for name, value in attributes.items() if name in ("src", "href")]
    assert {"data:"} == {str(address)[:5] for address in addresses}


def test_every_picture_says_in_words_what_it_shows() -> None:
    """Readers without eyes on it get the alternative text."""
    pictures = [attributes for tag, attributes in Tags(page_of(run(lost=5))).seen if tag == "img"]
    names = ["load", "effective", "overlap", "coverage", "drift", "agreement", "flips"]
    assert [f"picture-{name}" for name in names] == [attributes["id"] for attributes in pictures]
    assert all(attributes["alt"] for attributes in pictures)


def test_names_from_the_data_are_text_and_never_markup() -> None:
    """A hostile sample id or title stays what it is."""
    hostile = "<script>alert(1)</script>"
    records = [
        replace(record, sample_id=f"{hostile}{index}", checksum=None) for index, record in enumerate(run(lost=5))
    ]
    page = page_of(records, title=hostile)
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_the_same_data_gives_the_same_bytes() -> None:
    """No date, no random id: reports can be compared."""
    assert page_of(run()) == page_of(run())


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """The old report stays where the new one cannot be written."""
    path = tmp_path / "there" / "report.html"
    write_report(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_report(path, "\ud800")
    assert "old" == path.read_text()
    assert ["report.html"] == [each.name for each in path.parent.iterdir()]


def test_a_page_goes_into_a_pipe_that_stays_one(tmp_path: Path) -> None:
    """As ``/dev/stdout`` is one: a file in its place would take it from everybody."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    end = os.open(path, os.O_RDWR)  # both ends, so that nobody waits; its buffer takes the page
    try:
        write_report(path, "page")
        assert b"page" == os.read(end, 64)
    finally:
        os.close(end)
    assert path.is_fifo()


def test_a_page_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    """The system's error, which the command line tells in one line."""
    with pytest.raises(IsADirectoryError):
        write_report(tmp_path, "page")


def test_pictures_are_written_on_request(tmp_path: Path) -> None:
    """One PNG file each, of the pictures that the data has something for."""
    written = write_pictures(tmp_path / "png", collect(run(), SPEC))
    assert ["load", "effective", "overlap", "coverage", "drift"] == [path.stem for path in written]
    assert {PNG} == {path.read_bytes()[:8] for path in written}


def test_the_load_picture_shows_the_load() -> None:
    """Balance-relative shares stand in the picture's array, never-chosen experts as nothing."""
    found = collect(run(), SPEC)
    [image] = draw_pictures(found)["load"].axes[0].images
    load_LE = found.load_of()
    expected = load_LE / load_LE.sum(axis=1, keepdims=True) * 16
    shown = image.get_array()
    assert shown is not None
    np.testing.assert_allclose(expected[load_LE > 0], shown[load_LE > 0])


def test_a_run_of_nothing_has_a_page_too() -> None:
    """No record: the page says so first."""
    page = render_report(collect([], SPEC), title="empty")
    assert "nothing was recorded" in page


def test_a_wide_model_is_drawn_within_bounds() -> None:
    """160 layers of 512 experts: the figure does not grow with them."""
    spec = RouteSpec(num_experts=512, top_k=2, layer_ids=tuple(range(160)))
    figure = draw_pictures(collect([], spec))["load"]
    assert figure.get_size_inches()[1] <= 9.0
    assert PNG == encode(figure, "png")[:8]


# ----------------------------------------------------------------------------------------------------------------------
# Samples
# ----------------------------------------------------------------------------------------------------------------------


def test_tokens_wear_the_colour_of_what_happened_to_them() -> None:
    """Missing in all layers, in some, not fed, prompt or not: one token each."""
    spec = watermarked_spec()
    record = watermarked_record(0, num_tokens=8, spec=spec, prompt_tokens=2, missing=(3, (4, 5)))
    styles = [token.style for token in view_sample(record).tokens]
    expected = ["prompt", "prompt", "generation", "generation missing", "generation partial", *["generation"] * 2]
    assert [*expected, "generation unfed"] == styles


def test_the_share_of_flipped_layers_is_the_step_of_the_colour() -> None:
    """One of three layers flipped is 2 of 5 steps, all of them 5."""
    record = run(1)[0]
    routes = record.routes.copy()
    for token, slots in ((3, (0,)), (4, (0, 1, 2))):
        for slot in slots:
            row = set(routes[token, slot].tolist())
            routes[token, slot, 0] = next(expert for expert in range(16) if expert not in row)
    shown = view_sample(record, against=replace(record, routes=routes, checksum=None))
    assert {3: "prompt flip2", 4: "prompt flip5"} == {
        token.position: token.style for token in shown.tokens if "flip" in token.style
    }
    assert "2 with flipped rows" in shown.summary


def test_a_long_sample_is_shown_around_its_first_fault() -> None:
    """What is left out before and after is counted; nothing is lost from the sum."""
    record = watermarked_record(0, num_tokens=4_000, spec=watermarked_spec(layers=(1,)), missing=(2_000,))
    shown = view_sample(record)
    assert (4_000, MAX_TOKENS) == (shown.left_out + len(shown.tokens) + shown.cut, len(shown.tokens))
    assert shown.left_out < 2_000 < shown.left_out + len(shown.tokens)


def test_text_of_tokens_comes_from_the_caller() -> None:
    """A tokenizer's words, where one is given."""
    shown = view_sample(run(1)[0], decode=lambda token_id: f"w{token_id}")
    assert all(token.text.startswith("w") for token in shown.tokens)


# ----------------------------------------------------------------------------------------------------------------------
# Findings
# ----------------------------------------------------------------------------------------------------------------------


def test_a_healthy_run_has_no_error_or_warning() -> None:
    """Notes at most."""
    assert {"note"} >= {finding.severity for finding in find_findings(collect(run(30), SPEC))}


def test_missing_rows_come_first_with_the_sample() -> None:
    """An error from one in a hundred on, named with the worst sample."""
    first = find_findings(collect(run(lost=10), SPEC))[0]
    assert "error" == first.severity
    assert "10 rows are missing" in first.title
    assert "step-0/0" in first.where


def test_a_layer_that_always_chooses_the_same_is_an_error() -> None:
    """A kernel that writes one buffer."""
    records = [replace(record, routes=_stuck(record), checksum=None) for record in run(12)]
    found = find_findings(collect(records, SPEC))
    assert ["layers 5"] == [finding.where for finding in found if "always choose" in finding.title]


def _stuck(record: RouteRecord) -> np.ndarray:
    routes_SLK = record.routes.copy()
    routes_SLK[:, 2] = np.where(routes_SLK[:, 2] >= 0, np.arange(4), -1)
    return routes_SLK


def test_equal_runs_are_a_warning_with_their_place() -> None:
    """A stale buffer over 40 tokens."""
    record = run(1)[0]
    routes = record.routes.copy()
    routes[10:50] = routes[10]
    found = find_findings(collect([replace(record, routes=routes, checksum=None)], SPEC))
    assert ["sample step-0/0, from token 10"] == [item.where for item in found if "consecutive" in item.title]


def test_differences_name_their_first_place() -> None:
    """Samples of one side, other tokens, flips."""
    records = run(4)
    tokens = records[1].token_ids.copy()
    tokens[7] += 1
    right = [flipped(records[0]), replace(records[1], token_ids=tokens, checksum=None), records[2]]
    statistics, diff = collect(records, SPEC), compare(records, right, specs=(SPEC, SPEC))
    wheres = [finding.where for finding in find_findings(statistics, diff=diff) if finding.severity != "note"]
    assert ["samples step-0/3", "sample step-1/1, token 7", "sample step-0/0, token 0, layer 1"] == wheres


# ----------------------------------------------------------------------------------------------------------------------
# In a browser
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.browser
def test_a_browser_shows_the_page_without_a_complaint(tmp_path: Path) -> None:
    """Headless Chromium lays it out, logs nothing to the console, and its screenshot has every colour of the states."""
    browser = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    assert browser is not None, "the browser tests need Chromium: make browser"
    path, shot = tmp_path / "report.html", tmp_path / "shot.png"
    write_report(path, page_of(run(lost=12)))
    done = subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1200,4000",
            f"--screenshot={shot}",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert [] == re.findall(r"CONSOLE.*", done.stderr)
    pixels = _pixels(shot)
    for colour in ("#d55e00", "#00517f", "#f6f8fa"):
        rgb = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        assert (np.abs(pixels - rgb).max(axis=2) < 0.02).sum() > 50, colour


def _pixels(path: Path) -> np.ndarray:
    from matplotlib.image import imread

    return np.asarray(imread(path))[:, :, :3]
