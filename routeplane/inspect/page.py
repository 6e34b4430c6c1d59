"""The report: one HTML file that opens anywhere, without a network; its charts react, its tokens are walked by keys.

Owns the page: what stands on it, in which order, and how tokens are coloured. The one importer of jinja2, with every
value escaped. Findings come from ``diagnose``, numbers from ``overview``, charts and their script from ``charts``.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routeplane.errors import ErrorKind, MissingExtraError, check_type
from routeplane.inspect.charts import chart_script, draw_charts, encode
from routeplane.inspect.compare import RouteDiff, align
from routeplane.inspect.diagnose import LEAST_TOKENS, Finding
from routeplane.inspect.overview import Overview
from routeplane.inspect.statistics import RouteStatistics
from routeplane.record.record import RouteRecord
from routeplane.record.spec import MISSING
from routeplane.stream.files import PublishedPath

try:
    import jinja2
except ModuleNotFoundError as error:
    raise MissingExtraError(
        "routeplane.inspect.page needs jinja2: install the extra routeplane[report]", kind=ErrorKind.MISSING_EXTRA
    ) from error

__all__ = ["SampleView", "render_report", "view_sample", "write_charts", "write_report"]

#: Tokens of a sample that are shown, from a little before the first one that is coloured.
MAX_TOKENS = 1_500
_LEAD = 40
#: Steps of colour for the share of a token's rows that are flipped.
_STEPS = 5
#: Colour of a token: how the page's script and style sheet call it, in this order.
STYLES = ("", *(f"flip{step}" for step in range(1, _STEPS + 1)), "partial", "missing", "unfed")


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleView:
    """A sample as it is shown: ``left_out`` tokens before the first shown one, ``cut`` after the last.

    ``texts``, ``styles`` (places in STYLES), ``missing`` and ``flipped`` (rows) have one entry a shown token; ``spans``
    are ``(start, stop, words)``.
    """

    name: str
    summary: str
    left_out: int
    cut: int
    texts: tuple[str, ...]
    styles: tuple[int, ...]
    missing: tuple[int, ...]
    flipped: tuple[int, ...]
    spans: tuple[tuple[int, int, str], ...]


def view_sample(
    record: RouteRecord, *, against: RouteRecord | None = None, decode: Callable[[int], str] | None = None
) -> SampleView:
    """Colour a record's tokens by missing rows and by rows that differ.

    Args:
        record: The sample.
        against: The same sample of another side.
        decode: Token id to text, such as a tokenizer's; ids are shown where there is none.

    Returns:
        At most MAX_TOKENS tokens, from a little before the first coloured one.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec(layers=(1, 2))
    >>> records = [watermarked_record(index, num_tokens=8, spec=spec) for index in range(3)]
    >>> view = view_sample(records[0])
    >>> view.name, len(view.texts)
    ('sample-0/0/0', 8)
    """
    check_type(record, RouteRecord, expected="a RouteRecord")
    missing_S = np.zeros(record.num_tokens, dtype=np.int64)
    missing_S[record.routes_start :] = (record.routes[:, :, 0] == MISSING).sum(axis=1)
    flipped_S = np.zeros(record.num_tokens, dtype=np.int64) if against is None else _flips(record, against)
    not_fed_S = np.zeros(record.num_tokens, dtype=np.bool_)
    for capture in record.captures:
        not_fed_S[capture.start : capture.stop] = capture.state == "not_fed"
    missing_S[not_fed_S] = 0
    layers = record.spec.num_layers
    styles_S = np.minimum(_STEPS, -(-flipped_S * _STEPS // layers))
    styles_S[missing_S > 0] = STYLES.index("partial")
    styles_S[missing_S == layers] = STYLES.index("missing")
    styles_S[not_fed_S] = STYLES.index("unfed")
    coloured = np.flatnonzero((missing_S > 0) | (flipped_S > 0))
    lead = int(coloured[0]) - _LEAD if len(coloured) else 0
    first = max(record.tokens_start, lead)  # those before stand in the prefix's record
    stop = min(record.num_tokens, first + MAX_TOKENS)
    said = str if decode is None else decode
    shown = slice(first, stop)
    return SampleView(
        name="/".join(str(part) for part in record.key),
        summary=f"{record.num_tokens:,} tokens, {int((missing_S > 0).sum()):,} with missing rows"
        + ("" if against is None else f", {int((flipped_S > 0).sum()):,} with flipped rows"),
        left_out=first,
        cut=record.num_tokens - stop,
        texts=tuple(
            said(int(token_id))
            for token_id in record.token_ids[first - record.tokens_start : stop - record.tokens_start]
        ),
        styles=tuple(styles_S[shown].tolist()),
        missing=tuple(missing_S[shown].tolist()),
        flipped=tuple(flipped_S[shown].tolist()),
        spans=tuple((span.start, span.stop, f"{span.kind}, call {span.call}") for span in record.spans),
    )


def _flips(record: RouteRecord, against: RouteRecord) -> NDArray[np.int64]:
    """For each token of ``record`` the rows that differ; 0 from the first other token on, as in ``compare``."""
    common = [layer_id for layer_id in record.spec.layer_ids if layer_id in against.spec.layer_ids]
    pair = align(record, against, layer_ids=common)
    flipped_S = np.zeros(record.num_tokens, dtype=np.int64)
    flipped_S[pair.start : pair.start + len(pair.left_SLK)] = pair.flipped_SL.sum(axis=1)
    return flipped_S


def render_report(
    overview: Overview | RouteStatistics,
    *,
    title: str,
    notes: Sequence[str] = (),
    damage: Sequence[str] = (),
    decode: Callable[[int], str] | None = None,
) -> str:
    """Lay out the page.

    Args:
        overview: From ``survey``; or statistics alone.
        title: Its heading.
        notes: Lines under the title, such as where the data came from.
        damage: What could not be read, one line each; shown before everything else.
        decode: Token id to text.

    Returns:
        HTML. The same data gives the same text.

    >>> from routeplane.inspect import collect
    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec(layers=(1, 2))
    >>> page = render_report(collect([watermarked_record(0, num_tokens=8, spec=spec)], spec), title="one sample")
    >>> "<h1>one sample</h1>" in page
    True
    """
    check_type(overview, (Overview, RouteStatistics), expected="an Overview or RouteStatistics")
    shown = Overview.of(overview) if isinstance(overview, RouteStatistics) else overview
    samples = [view_sample(record, against=other, decode=decode) for record, other in shown.shown]
    charts = draw_charts(shown)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("routeplane.inspect", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    statistics = shown.statistics.to_dict()
    return environment.get_template("report.html").render(
        title=title,
        notes=list(notes),
        damage=list(damage),
        verdict=_verdict(shown.findings, len(damage)),
        findings=shown.findings,
        power=f"Shifts, stale, repeated and swapped rows are named from {LEAST_TOKENS} tokens on, in all layers or in "
        "one; another router's rows from a fifth fewer shared ids on. Fewer tokens are within what near-ties do.",
        tiles=_tiles(shown),
        charts=[(name, spec["title"]["text"]) for name, spec in charts.items()],
        layer_ids=list(shown.spec.layer_ids),
        parts=[part.name for part in shown.parts] if len(shown.parts) > 1 else [],
        layers=statistics["layers"],
        by_kind=statistics["by_kind"],
        diff=None if shown.diff is None else shown.diff.to_dict(),
        samples=samples,
        steps=range(1, _STEPS + 1),
        script=_safe_script(chart_script()),
        data=_safe_json({"charts": charts, "samples": [_sample_document(view) for view in samples], "styles": STYLES}),
    )


def _sample_document(view: SampleView) -> dict[str, Any]:
    return {
        "first": view.left_out,
        "texts": view.texts,
        "styles": "".join(map(str, view.styles)),
        "missing": _sparse(view.missing),
        "flipped": _sparse(view.flipped),
        "spans": view.spans,
    }


def _sparse(counts: Sequence[int]) -> dict[str, int]:
    return {str(place): count for place, count in enumerate(counts) if count}


def _safe_json(document: Any) -> str:
    """JSON for a script element: no character of it can end the element."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _safe_script(text: str) -> str:
    """The library's script, without what would end its element early."""
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def write_report(path: str | os.PathLike[str], text: str) -> None:
    """Write the page, all of it or nothing; into a pipe or a device as it is. Raises OSError.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "report.html")
    >>> write_report(path, "<h1>a run</h1>")
    >>> path.read_text()
    '<h1>a run</h1>'
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    target = PublishedPath(path)
    with contextlib.ExitStack() as undo:
        undo.callback(target.discard)
        target.write(text.encode())
        target.publish()
        undo.pop_all()


def write_charts(folder: Path, overview: Overview | RouteStatistics) -> list[Path]:
    """Draw each chart as a PNG file in ``folder``; their paths. Raises OSError."""
    shown = Overview.of(overview) if isinstance(overview, RouteStatistics) else overview
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, spec in draw_charts(shown).items():
        path = folder / f"{name}.png"
        path.write_bytes(encode(spec, "png"))
        written.append(path)
    return written


def _verdict(findings: Sequence[Finding], damage: int) -> str:
    errors = damage + sum(finding.severity == "error" for finding in findings)
    warnings = sum(finding.severity == "warning" for finding in findings)
    if errors or warnings:
        return f"{_number(errors, 'error')}, {_number(warnings, 'warning')}"
    return "nothing stands out" if not findings else _number(len(findings), "note")


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _tiles(overview: Overview) -> list[tuple[str, str]]:
    spec, coverage = overview.spec, overview.statistics.coverage
    widths = sorted(set(spec.experts_per_layer))
    tiles: list[tuple[str, Any]] = [
        ("samples", f"{coverage.records:,}"),
        ("tokens", f"{coverage.total:,}"),
        ("layers", spec.num_layers),
        ("experts", widths[0] if len(widths) == 1 else f"{widths[0]}-{widths[-1]}"),
        ("top-k", spec.top_k),
        ("missing", f"{coverage.missing_share:.2%}"),
        ("weights versions", len(overview.statistics.versions)),
    ]
    if overview.diff is not None:
        tiles.append(("flipped rows", _flipped(overview.diff)))
    for which, name in enumerate(("mean gap, live", "mean gap, replayed")):
        total = sum(part.gap_sums[which][0] for part in overview.parts)
        tokens = sum(part.gap_sums[which][1] for part in overview.parts)
        if tokens:
            tiles.append((name, f"{total / tokens:.3g} nats"))
    return [(name, str(value)) for name, value in tiles]


def _flipped(diff: RouteDiff) -> str:
    return f"{diff.flipped_share:.2%}"
