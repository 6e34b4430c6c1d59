"""The report: what it shows is the data's, nothing is fetched, and a browser shows it without a complaint."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vl_convert

from routeplane.inspect.charts import draw_charts, draw_timeline, encode
from routeplane.inspect.overview import GAP_EDGES, REPLAY_LOGPROBS, Overview, survey
from routeplane.inspect.page import (
    MAX_TOKENS,
    STYLES,
    SampleView,
    render_report,
    view_sample,
    write_charts,
    write_report,
)
from routeplane.inspect.statistics import collect
from routeplane.record.prefixes import as_delta
from routeplane.record.record import RouteRecord
from routeplane.record.spec import RouteSpec
from routeplane.testing.builders import watermarked_record, watermarked_spec
from tests.inspect.runs import SPEC, flipped, run

PNG = b"\x89PNG\r\n\x1a\n"


def overview_of(records: list[RouteRecord], *, parts: int = 1) -> Overview:
    """Statistics, the difference to flipped rows, gaps and samples."""
    size = -(-len(records) // parts)
    named = [(f"part-{part}", records[part * size : (part + 1) * size]) for part in range(parts)]
    return survey(named, SPEC, against=[flipped(record) for record in records])


def page_of(records: list[RouteRecord], *, title: str = "a run", parts: int = 1) -> str:
    """The whole page."""
    return render_report(overview_of(records, parts=parts), title=title, notes=["from somewhere"])


def with_logprobs(records: list[RouteRecord]) -> tuple[list[RouteRecord], list[RouteRecord]]:
    """Both sides with log-probabilities: 0.2 apart live, 0.002 under replay."""
    left, right = [], []
    for record in records:
        values = np.full(record.num_tokens, -1.0, dtype=np.float32)
        left.append(replace(record, logprobs=values, checksum=None))
        replayed = {REPLAY_LOGPROBS: values + np.float32(0.002)}
        right.append(replace(flipped(record), logprobs=values + np.float32(0.2), columns=replayed, checksum=None))
    return left, right


class Tags(HTMLParser):
    """Every start tag with its attributes, and whether tags nest."""

    VOID = ("meta", "link", "img", "br", "input")

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


def test_nothing_on_the_page_is_fetched() -> None:
    """Scripts stand in the page, addresses are inline data; tags nest."""
    tags = Tags(page_of(run(lost=5)))
    assert [] == tags.open
    assert [] == [tag for tag, _ in tags.seen if tag in ("iframe", "object", "form", "img")]
    addresses = [value for _, attributes in tags.seen for name, value in attributes.items() if name in ("src", "href")]
    assert {"data:"} == {str(address)[:5] for address in addresses}


def test_every_chart_says_in_words_what_it_shows() -> None:
    """Readers without eyes on it get a label."""
    charts = [attributes for tag, attributes in Tags(page_of(run(lost=5))).seen if attributes.get("class") == "chart"]
    names = ["flips", "flips-map", "samples", "load", "effective", "overlap", "coverage", "drift"]
    assert [f"chart-{name}" for name in names] == [attributes["id"] for attributes in charts]
    assert all(attributes["aria-label"] for attributes in charts)


@pytest.mark.parametrize("parts", [1, 3])
def test_every_chart_is_a_valid_specification(parts: int) -> None:
    """Vega-Lite compiles each, and draws it."""
    charts = draw_charts(overview_of(run(lost=5), parts=parts))
    assert ("trends" in charts) == (parts > 1)
    for spec in charts.values():
        assert vl_convert.vegalite_to_vega(spec)["marks"]
        assert PNG == encode(spec, "png")[:8]


def test_names_from_the_data_are_text_and_never_markup() -> None:
    """A hostile sample id or title stays what it is, also within the page's script."""
    hostile = "</script><script>alert(1)</script>"
    records = [
        replace(record, sample_id=f"{hostile}{index}", checksum=None) for index, record in enumerate(run(lost=5))
    ]
    page = page_of(records, title=hostile)
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert 3 == page.count("</script>")


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
    end = os.open(path, os.O_RDWR)  # both ends, so that opening does not wait; the pipe's buffer takes the page
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


def test_charts_are_written_on_request(tmp_path: Path) -> None:
    """One PNG file each, of the charts that the data has something for."""
    written = write_charts(tmp_path / "png", collect(run(), SPEC))
    assert ["load", "effective", "overlap", "coverage", "drift"] == [path.stem for path in written]
    assert {PNG} == {path.read_bytes()[:8] for path in written}


def test_the_load_chart_shows_the_load() -> None:
    """Balance-relative shares to three digits."""
    found = collect(run(), SPEC)
    rows = draw_charts(Overview.of(found))["load"]["data"]["values"]
    load_LE = found.load_of()
    np.testing.assert_allclose(
        load_LE / load_LE.sum(axis=1, keepdims=True) * 16, [row["load"] for row in rows], rtol=5e-3
    )


def test_flips_add_up_over_parts_layers_and_bars() -> None:
    """Whatever is filtered, the bars are the counts of the difference."""
    found = overview_of(run(6), parts=2)
    assert found.diff is not None
    rows = draw_charts(found)["flips"]["data"]["values"]
    assert int(found.diff.compared_L.sum()) == sum(sum(row["compared"]) for row in rows)
    flips = int((found.diff.compared_L - found.diff.equal_L).sum())
    assert flips == sum(sum(row["flipped"]) for row in rows)


def test_deltas_count_as_the_rows_that_they_have() -> None:
    """Records whose tokens begin at their own rows, on either side or both: the gaps and rows from there on."""
    start = 20
    left, right = with_logprobs(run(4, seed=3))
    base = [
        replace(record.slice(0, start), sample_id=f"base-{place}", checksum=None) for place, record in enumerate(left)
    ]
    deltas = [as_delta(record, one) for record, one in zip(left, base, strict=True)]
    theirs = [replace(record.slice(0, start), sample_id="b", checksum=None) for record in right]
    others = [as_delta(record, one) for record, one in zip(right, theirs, strict=True)]
    whole = survey([("a", left)], SPEC, against=right)

    assert {start} == {record.tokens_start for record in (*deltas, *others)}
    for mine, against in ((deltas, right), (left, others), (deltas, others)):
        found = survey([("a", mine)], SPEC, against=against)
        live, replayed = found.parts[0].gaps_2G
        tokens = sum(record.num_tokens - start for record in left)
        assert (tokens, tokens) == (live.sum(), replayed.sum())
        assert whole.parts[0].gaps_2G.argmax(axis=1).tolist() == [int(live.argmax()), int(replayed.argmax())]
        assert found.diff is not None
        assert whole.diff is not None
        assert 0 < found.diff.compared_L.sum() < whole.diff.compared_L.sum()


def test_gaps_are_shown_live_against_replayed() -> None:
    """Every token stands in its bin, live and under replay apart."""
    left, right = with_logprobs(run(3))
    found = survey([("a", left)], SPEC, against=right)
    live, replayed = (float(GAP_EDGES[int(counts.argmax())]) for counts in found.parts[0].gaps_2G)
    np.testing.assert_allclose([live, replayed], [0.1, 0.001])
    assert "mean gap, replayed" in render_report(found, title="gaps")
    assert "gap" in draw_charts(found)


def test_a_run_of_nothing_has_a_page_too() -> None:
    """No record: the page says so first, and that there is nothing to draw."""
    page = render_report(collect([], SPEC), title="empty")
    assert "nothing was recorded" in page
    assert 'id="empty"' in page


def test_a_page_of_many_tokens_and_a_wide_model_stays_small() -> None:
    """262,144 tokens of 94 layers of 512 experts in at most 2 MB: only counts are in it."""
    spec = RouteSpec(num_experts=512, top_k=2, layer_ids=tuple(range(94)))
    rng = np.random.default_rng(0)
    routes = np.sort(rng.integers(0, 256, (1024, 94, 2)), axis=2).astype(np.int16)
    routes[:, :, 1] += 256
    routes[-1] = -1
    plain = watermarked_record(0, num_tokens=1024, spec=watermarked_spec(layers=(1,)))
    wide = RouteRecord(
        sample_id="sample",
        token_ids=plain.token_ids,
        routes=routes,
        spec=spec,
        spans=plain.spans,
        captures=plain.captures,
    )
    many = [replace(wide, sample_id=f"sample-{index}", checksum=None) for index in range(256)]
    page = render_report(survey([("all", many)], spec), title="wide")
    assert len(page.encode()) < 2_000_000


def test_a_start_up_is_drawn() -> None:
    """Tasks of a fleet as bars, those that never ended too."""
    tasks = [
        {"name": "plane", "started": 0.0, "ended": 1.5, "outcome": "done", "waited_for": None},
        {"name": "engine", "started": 1.5, "ended": None, "outcome": "failed", "waited_for": "plane"},
    ]
    assert PNG == encode(draw_timeline(tasks), "png")[:8]
    assert b"<svg" == encode(draw_timeline(tasks), "svg")[:4]


# ----------------------------------------------------------------------------------------------------------------------
# Samples
# ----------------------------------------------------------------------------------------------------------------------


def colours(view: SampleView) -> list[str]:
    """The style of each shown token, by name."""
    return [STYLES[style] for style in view.styles]


def test_tokens_wear_the_colour_of_what_happened_to_them() -> None:
    """Missing in all layers, in some, not fed: one token each."""
    spec = watermarked_spec()
    record = watermarked_record(0, num_tokens=8, spec=spec, prompt_tokens=2, missing=(3, (4, 5)))
    assert ["", "", "", "missing", "partial", "", "", "unfed"] == colours(view_sample(record))


def test_the_share_of_flipped_layers_is_the_step_of_the_colour() -> None:
    """One of three layers flipped is 2 of 5 steps, all of them 5."""
    record = run(1)[0]
    routes = record.routes.copy()
    for token, slots in ((3, (0,)), (4, (0, 1, 2))):
        for slot in slots:
            row = set(routes[token, slot].tolist())
            routes[token, slot, 0] = next(expert for expert in range(16) if expert not in row)
    shown = view_sample(record, against=replace(record, routes=routes, checksum=None))
    assert {3: "flip2", 4: "flip5"} == {
        place: name for place, name in enumerate(colours(shown), start=shown.left_out) if "flip" in name
    }
    assert "2 with flipped rows" in shown.summary


def test_a_long_sample_is_shown_around_its_first_fault() -> None:
    """What is left out before and after is counted; nothing is lost from the sum."""
    record = watermarked_record(0, num_tokens=4_000, spec=watermarked_spec(layers=(1,)), missing=(2_000,))
    shown = view_sample(record)
    assert (4_000, MAX_TOKENS) == (shown.left_out + len(shown.texts) + shown.cut, len(shown.texts))
    assert shown.left_out < 2_000 < shown.left_out + len(shown.texts)


def test_text_of_tokens_comes_from_the_caller() -> None:
    """A tokenizer's words, where one is given."""
    shown = view_sample(run(1)[0], decode=lambda token_id: f"w{token_id}")
    assert all(text.startswith("w") for text in shown.texts)


# ----------------------------------------------------------------------------------------------------------------------
# In a browser
# ----------------------------------------------------------------------------------------------------------------------

#: Run at the end of the page, once its charts are drawn: what a person at this width would see, and what keys do.
_PROBE = """
<script>
const probe = setInterval(() => {
  if (Object.keys(page.charts).length && !document.body.dataset.drawn) return;
  clearInterval(probe);
  const said = (place) => [...place.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const texts = [...document.querySelectorAll("body *")].filter(
    (place) => !["SCRIPT", "STYLE"].includes(place.tagName) && said(place));
  const strip = document.querySelector(".tokens");
  if (strip) strip.focus();
  for (const key of strip ? ["Home", "ArrowRight", "n"] : [])
    strip.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const select = document.getElementById("filter-layer");
  if (select) { select.value = select.options[1].value; select.dispatchEvent(new Event("change")); }
  const named = document.getElementById("filter-sample");
  if (named) named.value = document.querySelector("details b").textContent;
  if (named) named.dispatchEvent(new Event("change"));
  const found = {
    shown: [...document.querySelectorAll("details")].filter((place) => !place.hidden).length, sample: state.sample,
    drawn: Number(document.body.dataset.drawn || 0), canvases: document.querySelectorAll("canvas").length,
    smallest: Math.min(...texts.map((place) => parseFloat(getComputedStyle(place).fontSize))),
    wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    narrowest: Math.min(...[...document.querySelectorAll("canvas")].map((c) => c.clientWidth), innerWidth),
    page: getComputedStyle(document.body).backgroundColor, width: innerWidth,
    told: (document.querySelector(".told") || { textContent: "" }).textContent, layer: state.layer,
    focused: document.activeElement === strip,
  };
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
}, 100);
</script>
"""


def probed(folder: Path, page: str, *, width: int, dark: bool) -> dict[str, Any]:
    """Show a page in headless Chromium and say what is seen there; nothing may be logged to the console."""
    browser = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
    assert browser is not None, "the browser tests need Chromium: make browser"
    path = folder / "report.html"
    path.write_text(page + _PROBE, encoding="utf-8")
    done = subprocess.run(
        [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size={width},2000",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            "--virtual-time-budget=20000",
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    assert [] == re.findall(r"CONSOLE.*", done.stderr)
    said = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout)
    assert said is not None
    found: dict[str, Any] = json.loads(said[1])
    return found


@pytest.mark.browser
@pytest.mark.parametrize("width", [400, 800, 1280])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_shows_the_page_at_any_width(tmp_path: Path, width: int, dark: bool) -> None:
    """Every chart is drawn, text has 10 px or more, nothing sticks out, keys walk the tokens, a filter is applied."""
    left, right = with_logprobs(run(9, lost=12))
    overview = survey([("a", left[:4]), ("b", left[4:])], SPEC, against=right)
    found = probed(tmp_path, render_report(overview, title="a run"), width=width, dark=dark)
    charts = len(draw_charts(overview))
    assert (charts, charts, 0) == (found["drawn"], found["canvases"], found["wide"])
    assert found["smallest"] >= 10
    assert found["narrowest"] > 200
    assert ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)") == found["page"]
    assert (SPEC.layer_ids[0], True) == (found["layer"], found["focused"])
    assert re.match(r"token \d+, ", found["told"])
    assert (1, "/".join(map(str, overview.shown[0][0].key))) == (found["shown"], found["sample"])


@pytest.mark.browser
def test_a_browser_shows_an_empty_page(tmp_path: Path) -> None:
    """No chart, no sample, and nothing in the console."""
    found = probed(tmp_path, render_report(collect([], SPEC), title="empty"), width=800, dark=False)
    assert (0, 0) == (found["drawn"], found["canvases"])
