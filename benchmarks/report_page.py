"""``benchmarks/report.html``: every bar, the cost curves and the steps at scale as pictures, in one file.

Charts are Vega-Lite specifications; script and drawing are those of ``routeplane.inspect.charts``. The file opens
without a network.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from routeplane.inspect.charts import chart_script

__all__ = ["chart_specs", "report_page"]

Row = Mapping[str, Any]
Spec = dict[str, Any]

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
# safe for colour-blind readers (Okabe-Ito)
_HOLDS, _MISSED, _GREY = "#0072B2", "#D55E00", "#8a8f98"
_VERDICTS = {"domain": ["holds", "missed"], "range": [_HOLDS, _MISSED]}
_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Benchmarks of routeplane</title><link rel="icon" href="data:,">
<style>
body { margin: 0 auto; max-width: 68rem; padding: 1rem; font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; }
p { color: #59636e; } .chart { width: 100%; margin: .8rem 0 1.6rem; } .vega-embed { width: 100%; }
.vega-embed summary { display: none; } #vg-tooltip-element { font-size: 12px; }
</style></head><body>
<h1>Benchmarks</h1>
"""


def chart_specs(rows: Sequence[Row], steps: Sequence[Row]) -> dict[str, Spec]:
    """Every chart by name, in reading order; a chart without data is left out."""
    judged = [_judged(row) for row in rows if row["holds"] is not None and row["bar"] and row["value"]]
    curves = [row for row in rows if row["name"].startswith("curves/")]
    found: dict[str, Spec] = {}
    if judged:
        found["bars"] = _bars(judged)
    for row in curves:
        found[row["name"]] = _curve(row)
    if steps:
        found["scale"] = _scale(steps)
    return found


def _judged(row: Row) -> Row:
    """How far a result is from its bar: above 1 holds, whichever direction is better."""
    ratio = row["value"] / row["bar"]
    better = ratio if (ratio >= 1) == row["holds"] or ratio == 1 else 1 / ratio
    return {
        "name": row["name"],
        "ratio": better,
        "verdict": "holds" if row["holds"] else "missed",
        "value": row["value"],
        "bar": row["bar"],
        "unit": row["unit"],
        "why": row.get("explanation", ""),
    }


def _chart(title: str, values: Sequence[Row], **rest: Any) -> Spec:
    return {
        "$schema": _SCHEMA,
        "title": {"text": title, "anchor": "start", "fontSize": 13},
        "width": "container",
        "autosize": {"type": "fit", "contains": "padding"},
        "data": {"values": list(values)},
        **rest,
    }


def _bars(judged: Sequence[Row]) -> Spec:
    axis = {"field": "ratio", "type": "quantitative", "scale": {"type": "log"}, "title": "times as good as the bar"}
    tips = [{"field": name} for name in ("name", "value", "bar", "unit", "why")]
    names = {"field": "name", "type": "nominal", "sort": None, "title": None, "axis": {"labelLimit": 320}}
    colour = {"field": "verdict", "type": "nominal", "scale": _VERDICTS, "title": None}
    return _chart(
        "Every bar: left of the line is missed",
        judged,
        height={"step": 15},
        layer=[
            {"mark": {"type": "rule"}, "encoding": {"x": axis, "x2": {"datum": 1}, "y": names, "color": colour}},
            {
                "mark": {"type": "point", "filled": True, "size": 60},
                "encoding": {"x": axis, "y": names, "color": colour, "tooltip": tips},
            },
            {"mark": {"type": "rule", "color": _GREY}, "encoding": {"x": {"datum": 1}}},
        ],
    )


def _curve(row: Row) -> Spec:
    what = row["name"].partition("/")[2]
    values = [{"x": float(at), "y": share} for at, share in row["peers"].items()]
    x = {"field": "x", "type": "quantitative", "scale": {"type": "log"}, "title": what}
    y = {"field": "y", "type": "quantitative", "title": "share", "scale": {"zero": True}}
    tips = [{"field": "x", "title": what}, {"field": "y", "title": row["unit"]}]
    return _chart(
        f"{what}: {row['unit']}",
        values,
        height=220,
        mark={"type": "line", "point": True, "color": _HOLDS},
        encoding={"x": x, "y": y, "tooltip": tips},
    )


_SCALE = (
    ("store_out_whole_gb", "out of the folder, all nodes read all"),
    ("blocks_gb", "blocks"),
    ("node_in_fetched_gb", "into a node that fetches its part"),
    ("rank_batches_gb", "a rank's batches"),
)


def _scale(steps: Sequence[Row]) -> Spec:
    values = [
        {"model": step["model"], "gpus": step["gpus"], "what": what, "gb": step[name]}
        for step in steps
        for name, what in _SCALE
    ]
    x = {"field": "gpus", "type": "ordinal", "title": "GPUs"}
    y = {"field": "gb", "type": "quantitative", "scale": {"type": "log"}, "title": "GB of one step"}
    colour = {"field": "what", "type": "nominal", "title": None, "sort": [what for _, what in _SCALE]}
    spec = _chart("A step at scale (predicted): GB by link", values, height=200)
    del spec["autosize"]  # none for facets
    spec["width"] = 190
    return {
        **spec,
        "mark": {"type": "line", "point": True},
        "encoding": {
            "column": {"field": "model", "type": "nominal", "title": None, "sort": None},
            "x": x,
            "y": y,
            "color": colour,
            "tooltip": [{"field": name} for name in ("model", "gpus", "what", "gb")],
        },
    }


def report_page(rows: Sequence[Row], steps: Sequence[Row]) -> str:
    """Write the page."""
    return "\n".join(_parts(rows, steps))


def _parts(rows: Sequence[Row], steps: Sequence[Row]) -> Iterator[str]:
    specs = chart_specs(rows, steps)
    judged = [row for row in rows if row["holds"] is not None]
    yield _HEAD
    yield f"<p>{sum(row['holds'] for row in judged)} of {len(judged)} bars hold. "
    yield f"{html.escape('; '.join(dict.fromkeys(row['machine'] for row in rows)))}. Figures: RESULTS.md.</p>"
    for at in range(len(specs)):
        yield f'<div class="chart" id="chart-{at}"></div>'
    yield f"<script>{chart_script()}</script>"
    text = json.dumps(list(specs.values())).replace("</", "<\\/")
    yield "<script>"
    yield f"{text}.forEach((spec, at) => vegaEmbed('#chart-' + at, spec, {{actions: false, renderer: 'svg'}}));"
    yield "</script></body></html>"
