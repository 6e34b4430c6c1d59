"""The report: one HTML file that opens anywhere, without a network and without a script.

Owns the page: what stands on it, in which order, and how tokens are coloured. The one importer of jinja2, with every
value escaped. Pictures come from ``plots``, findings from ``findings``, numbers from the statistics.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray

from routeplane.inspect.compare import RouteDiff, align
from routeplane.inspect.diagnose import Finding, find_findings
from routeplane.inspect.plots import draw_pictures, encode
from routeplane.inspect.statistics import RouteStatistics
from routeplane.inspect.tally import shared_ids
from routeplane.record.record import RouteRecord
from routeplane.record.spec import MISSING
from routeplane.stream.files import PublishedPath

__all__ = ["SampleView", "TokenView", "render_report", "view_sample", "write_pictures", "write_report"]

#: Tokens of a sample that are shown, from a little before the first one that is coloured.
MAX_TOKENS = 1_500
_LEAD = 40
#: Steps of colour for the share of a token's rows that are flipped.
_STEPS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenView:
    """One token: its position, its text (or id), its CSS class, and what hovering says."""

    position: int
    text: str
    style: str
    tip: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleView:
    """A sample as it is shown: ``left_out`` tokens before the first shown one, ``cut`` after the last."""

    name: str
    summary: str
    left_out: int
    cut: int
    tokens: tuple[TokenView, ...]


def view_sample(
    record: RouteRecord, *, against: RouteRecord | None = None, decode: Callable[[int], str] | None = None
) -> SampleView:
    """A record with its tokens coloured: by missing rows, and by rows that differ from ``against``.

    ``decode``: token id to text, such as a tokenizer's; ids are shown where there is none.
    """
    missing_S = np.zeros(record.num_tokens, dtype=np.int64)
    missing_S[record.routes_start :] = (record.routes[:, :, 0] == MISSING).sum(axis=1)
    flipped_S = np.zeros(record.num_tokens, dtype=np.int64) if against is None else _flips(record, against)
    not_fed_S = np.zeros(record.num_tokens, dtype=np.bool_)
    for capture in record.captures:
        not_fed_S[capture.start : capture.stop] = capture.state == "not_fed"
    coloured = np.flatnonzero(((missing_S > 0) & ~not_fed_S) | (flipped_S > 0))
    first = max(0, int(coloured[0]) - _LEAD) if len(coloured) else 0
    stop = min(record.num_tokens, first + MAX_TOKENS)
    layers = record.spec.num_layers
    tokens = []
    for span in record.spans:
        for position in range(max(first, span.start), min(stop, span.stop)):
            missing = 0 if not_fed_S[position] else int(missing_S[position])
            flipped = int(flipped_S[position])
            token_id = int(record.token_ids[position])
            tokens.append(
                TokenView(
                    position=position,
                    text=str(token_id) if decode is None else decode(token_id),
                    style=_style(span.kind, missing, flipped, layers=layers, fed=not not_fed_S[position]),
                    tip=f"token {position}, id {token_id}, {span.kind}: {missing} rows missing, {flipped} flipped",
                )
            )
    return SampleView(
        name="/".join(str(part) for part in record.key),
        summary=f"{record.num_tokens} tokens, {int((missing_S * ~not_fed_S > 0).sum())} with missing rows"
        + ("" if against is None else f", {int((flipped_S > 0).sum())} with flipped rows"),
        left_out=first,
        cut=record.num_tokens - stop,
        tokens=tuple(tokens),
    )


def _style(kind: str, missing: int, flipped: int, *, layers: int, fed: bool) -> str:
    """CSS classes: the kind, and at most one of missing, not fed, or a step of flips."""
    if missing:
        return f"{kind} missing" if missing == layers else f"{kind} partial"
    if not fed:
        return f"{kind} unfed"
    return f"{kind} flip{min(_STEPS, -(-flipped * _STEPS // layers))}" if flipped else kind


def _flips(record: RouteRecord, against: RouteRecord) -> NDArray[np.int64]:
    """For each token of ``record`` the rows that differ; 0 from the first other token on, as in ``diff``."""
    common = [layer_id for layer_id in record.spec.layer_ids if layer_id in against.spec.layer_ids]
    pair = align(record, against, layer_ids=common)
    mine, theirs = pair.left_SLK, pair.right_SLK
    both_SL = (mine[:, :, 0] != MISSING) & (theirs[:, :, 0] != MISSING)
    flipped_S = np.zeros(record.num_tokens, dtype=np.int64)
    flips_SL = both_SL & (shared_ids(mine, theirs) < record.spec.top_k)
    flipped_S[pair.start : pair.start + len(mine)] = flips_SL.sum(axis=1)
    return flipped_S


def render_report(
    statistics: RouteStatistics,
    *,
    title: str,
    diff: RouteDiff | None = None,
    samples: Iterable[SampleView] = (),
    notes: Sequence[str] = (),
) -> str:
    """The page as text. ``notes``: lines under the title, such as where the data came from."""
    findings = find_findings(statistics, diff=diff)
    document = statistics.to_dict()
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("routeplane.inspect", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        title=title,
        notes=list(notes),
        verdict=_verdict(findings),
        findings=findings,
        tiles=_tiles(statistics, diff),
        pictures=[
            (name, base64.b64encode(encode(figure, "png")).decode(), _ALTERNATIVES[name])
            for name, figure in draw_pictures(statistics, diff=diff).items()
        ],
        layers=document["layers"],
        by_kind=document["by_kind"],
        diff=None if diff is None else diff.to_dict(),
        samples=list(samples),
        steps=range(1, _STEPS + 1),
    )


def write_report(path: Path, text: str) -> None:
    """Write the page, all of it or nothing; into a pipe or a device as it is. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    target = PublishedPath(path)
    with contextlib.ExitStack() as undo:
        undo.callback(target.discard)
        target.file.write(text.encode())
        target.publish()
        undo.pop_all()


def write_pictures(folder: Path, statistics: RouteStatistics, *, diff: RouteDiff | None = None) -> list[Path]:
    """Each picture as a PNG file in ``folder``; their paths. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in draw_pictures(statistics, diff=diff).items():
        path = folder / f"{name}.png"
        path.write_bytes(encode(figure, "png"))
        written.append(path)
    return written


_ALTERNATIVES = {
    "load": "Heat map: load of every expert by layer, relative to balance",
    "effective": "Lines: effective share of the experts by layer, prompt and generation",
    "overlap": "Line: share of experts that a token's row shares with the row before, by layer",
    "coverage": "Bars: fed tokens by position, with and without all their rows",
    "drift": "Heat map: divergence of each layer's load between weights versions",
    "agreement": "Lines: share of equal rows and Jaccard index by layer",
    "flips": "Bars: share of flipped rows by position",
}


def _verdict(findings: list[Finding]) -> str:
    errors = sum(finding.severity == "error" for finding in findings)
    warnings = sum(finding.severity == "warning" for finding in findings)
    if errors or warnings:
        return f"{_number(errors, 'error')}, {_number(warnings, 'warning')}"
    return "nothing stands out" if not findings else _number(len(findings), "note")


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _tiles(statistics: RouteStatistics, diff: RouteDiff | None) -> list[tuple[str, str]]:
    spec, coverage = statistics.spec, statistics.coverage
    widths = sorted(set(spec.experts_per_layer))
    tiles: list[tuple[str, Any]] = [
        ("samples", f"{coverage.records:,}"),
        ("tokens", f"{coverage.total:,}"),
        ("layers", spec.num_layers),
        ("experts", widths[0] if len(widths) == 1 else f"{widths[0]}-{widths[-1]}"),
        ("top-k", spec.top_k),
        ("missing", f"{coverage.missing_share:.2%}"),
        ("weights versions", len(statistics.versions)),
    ]
    if diff is not None:
        tiles.append(("flipped rows", f"{diff.flipped_share:.2%}"))
    return [(name, str(value)) for name, value in tiles]
