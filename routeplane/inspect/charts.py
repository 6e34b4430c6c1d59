"""Charts of an overview, as Vega-Lite specifications: data and marks, no code.

Owns what each chart shows, its colours (safe for colour-blind readers: Okabe-Ito, cividis) and its words; the one
importer of vl-convert, which gives the page its script (Vega, Vega-Lite and Vega-Embed in one file) and draws PNG
files without a browser.

Charts react to parameters that the page sets: ``layer`` and ``part`` (null for all). Tables travel as columns and are
unfolded by the chart, so that 94 layers of 512 experts take a few hundred kilobytes.

Axes: L captured layers, E experts, X bins of position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from routeplane.errors import ErrorKind, MissingExtraError
from routeplane.inspect.overview import GAP_EDGES
from routeplane.inspect.statistics import (
    KIND_NAMES,
    POSITION_BIN,
    dead_experts,
    effective_experts,
    imbalance,
    shares,
)

try:
    import vl_convert
except ModuleNotFoundError as error:
    raise MissingExtraError(
        "routeplane.inspect.charts needs vl-convert: install the extra routeplane[report]", kind=ErrorKind.MISSING_EXTRA
    ) from error

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from routeplane.inspect.overview import Overview, PartView
    from routeplane.inspect.statistics import RouteStatistics

__all__ = ["chart_script", "draw_charts", "draw_timeline", "encode"]

_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#8a8f98"
_VERSION = "6.1"
_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
#: Bars of a chart by position, at most.
_MAX_BARS = 64
#: Cells of the load that are given part by part; beyond, parts are added up.
_MAX_CELLS = 60_000
_FILTER = "(layer === null || datum.layer === layer) && (part === null || datum.part === part)"
_FILTER_LOAD = "(layer === null || datum.layer === layer) && (part === null || !datum.part || datum.part === part)"
_FILTER_PART = "part === null || datum.part === part"
_FILTER_SAMPLE = "sample === null || indexof(datum.sample, sample) >= 0"

Spec = dict[str, Any]


def chart_script() -> str:
    """The JavaScript that shows specifications: defines ``vegaEmbed`` on the window."""
    bundle: Any = vl_convert.javascript_bundle  # its stub asks for an argument that is optional
    return str(bundle(vl_version=_VERSION))


def encode(spec: Spec, form: Literal["png", "svg"]) -> bytes:
    """Draw a specification as a PNG or SVG file; the same specification gives the same bytes.

    Args:
        spec: One of ``draw_charts`` or ``draw_timeline``.
        form: ``png`` or ``svg``.

    Returns:
        The file's bytes.
    """
    still = {
        **spec,
        "width": 760 if spec.get("width") == "container" else spec.get("width", 760),
        "background": "white",
    }
    if form == "svg":
        return str(vl_convert.vegalite_to_svg(still, vl_version=_VERSION)).encode()
    return bytes(vl_convert.vegalite_to_png(still, vl_version=_VERSION, scale=2))


def draw_charts(overview: Overview) -> dict[str, Spec]:
    """Every chart that the data has something for, by name, in reading order.

    >>> from routeplane.testing.builders import watermarked_record, watermarked_spec
    >>> spec = watermarked_spec(layers=(1, 2))
    >>> records = [watermarked_record(index, num_tokens=8, spec=spec) for index in range(3)]
    >>> from routeplane.inspect import collect
    >>> from routeplane.inspect.overview import Overview
    >>> list(draw_charts(Overview.of(collect(records, spec))))
    ['load', 'effective', 'overlap', 'coverage']
    """
    several = len(overview.parts) > 1
    diff = overview.diff
    compared = diff is not None and bool(diff.compared_L.any())
    known: list[tuple[str, bool, Any]] = [
        ("trends", several, _trends),
        ("flips", compared, _flips),
        ("flips-map", compared and overview.spec.num_layers > 1, _flips_map),
        ("gap", any(part.gaps_2G.any() for part in overview.parts), _gap),
        ("samples", len(overview.samples) > 1, _samples),
        ("load", bool(overview.statistics.load), _load),
        ("effective", bool(overview.statistics.load), _effective),
        ("overlap", bool(overview.statistics.neighbours_L.any()), _overlap),
        ("coverage", bool(overview.statistics.positions_P2.any()), _coverage),
        ("drift", len(overview.statistics.versions) > 1, _drift),
    ]
    return {name: draw(overview) for name, shown, draw in known if shown}


def _chart(title: str, values: Sequence[Mapping[str, Any]], *, height: int = 220, **rest: Any) -> Spec:
    return {
        "$schema": _SCHEMA,
        "title": {"text": title, "anchor": "start", "fontSize": 13},
        "width": "container",
        "height": height,
        "autosize": {"type": "fit", "contains": "padding"},
        "params": [{"name": "layer", "value": None}, {"name": "part", "value": None}, *rest.pop("params", [])],
        "data": {"values": list(values)},
        "config": {"axis": {"labelFontSize": 11, "titleFontSize": 11}, "legend": {"labelFontSize": 11}},
        **rest,
    }


def _axis(name: str, title: str, **rest: Any) -> dict[str, Any]:
    return {"field": name, "type": "quantitative", "title": title, **rest}


def _percent(name: str, title: str, **rest: Any) -> dict[str, Any]:
    return _axis(name, title, axis={"format": "~%"}, **rest)


def _tips(*fields: str) -> list[dict[str, Any]]:
    """Tooltips; ``name%`` is shown as a percentage, ``name~`` with four digits."""
    formats = {"%": ".2%", "~": ".4~g"}
    return [
        {"field": name.rstrip("%~"), **({"format": formats[name[-1]]} if name[-1] in formats else {})}
        for name in fields
    ]


def _map_height(layers: int) -> int:
    """Of a chart with one line a layer."""
    return min(640, 150 + 12 * layers)


# ---- load -----------------------------------------------------------------------------------------------------------


def _load(overview: Overview) -> Spec:
    """Load over balance, layers by experts: drag and Shift+wheel move and zoom, and experts sort by load."""
    statistics = overview.statistics
    cells = statistics.spec.num_layers * max(statistics.spec.experts_per_layer)
    parts: Sequence[tuple[str | None, RouteStatistics]] = (
        [(part.name, part.statistics) for part in overview.parts]
        if cells * len(overview.parts) <= _MAX_CELLS
        else [(None, statistics)]
    )
    rows = [
        {"part": name, "layer": layer_id, "slot": slot, "load": load_E}
        for name, its in parts
        for slot, (layer_id, load_E) in enumerate(zip(its.spec.layer_ids, _relative(its), strict=True))
    ]
    labels = "{" + ",".join(f"{slot}:'{layer_id}'" for slot, layer_id in enumerate(statistics.spec.layer_ids)) + "}"
    height = _map_height(statistics.spec.num_layers)
    by_rank = "experts === 'by load' ? datum.rank : datum.expert"
    return _chart(
        "Load of every expert over balance (1 is balance; empty: never chosen)",
        rows,
        height=height,
        params=[
            {"name": "experts", "value": "by number"},
            {"name": "window", "select": {"type": "interval", "zoom": "wheel![event.shiftKey]"}, "bind": "scales"},
        ],
        transform=[
            {"filter": _FILTER_LOAD},
            {"calculate": "sequence(0, length(datum.load))", "as": "expert"},
            {"flatten": ["load", "expert"]},
            {"aggregate": [{"op": "mean", "field": "load", "as": "relative"}], "groupby": ["layer", "slot", "expert"]},
            {"filter": "datum.relative > 0"},
            {
                "window": [{"op": "row_number", "as": "place"}],
                "groupby": ["slot"],
                "sort": [{"field": "relative", "order": "descending"}],
            },
            {"calculate": "datum.place - 1", "as": "rank"},
            {"calculate": by_rank, "as": "x"},
            {"calculate": "datum.x + 1", "as": "x2"},
            {"calculate": "datum.slot + 1", "as": "y2"},
        ],
        mark={"type": "rect", "tooltip": True},
        encoding={
            "x": _axis("x", "expert, or place by load", scale={"nice": False, "zero": False}),
            "x2": {"field": "x2"},
            "y": _axis(
                "slot",
                "layer",
                scale={"reverse": True, "nice": False, "zero": False},
                axis={"labelExpr": f"{labels}[datum.value] || ''", "tickMinStep": 1},
            ),
            "y2": {"field": "y2"},
            "color": {
                "field": "relative",
                "type": "quantitative",
                "title": "load",
                "scale": {"type": "log", "domain": [0.125, 8], "clamp": True, "scheme": "cividis"},
                "legend": {"orient": "top", "gradientLength": 160, "values": [0.125, 0.5, 1, 2, 8], "format": "~g"},
            },
            "tooltip": _tips("layer", "expert", "relative~"),
        },
    )


def _relative(statistics: RouteStatistics) -> list[list[float]]:
    """Each layer's load over balance, three digits: one list a layer, as long as it has experts."""
    relative_LE = shares(statistics.load_of()) * statistics.experts_L[:, None]
    return [
        [float(f"{value:.3g}") for value in row_E[:width]]
        for row_E, width in zip(relative_LE, statistics.experts_L, strict=True)
    ]


def _effective(overview: Overview) -> Spec:
    rows = []
    for kind in KIND_NAMES:
        load_LE = overview.statistics.load_of(kind=kind)
        if load_LE.any():
            effective_L, peak_L = effective_experts(load_LE), imbalance(load_LE, overview.statistics.experts_L)
            dead_L = dead_experts(load_LE, overview.statistics.experts_L)
            rows += [
                {
                    "layer": layer_id,
                    "part": None,
                    "kind": kind,
                    "share": round(float(effective_L[slot] / overview.statistics.experts_L[slot]), 4),
                    "effective": round(float(effective_L[slot]), 2),
                    "peak": round(float(peak_L[slot]), 3),
                    "dead": int(dead_L[slot]),
                }
                for slot, layer_id in enumerate(overview.spec.layer_ids)
            ]
    return _by_layer(
        "Effective experts, exp(entropy of the load)",
        rows,
        "share",
        "share of the experts",
        colour="kind",
        tips=("layer", "kind", "effective~", "peak~", "dead"),
    )


def _by_layer(
    title: str, rows: list[dict[str, Any]], name: str, label: str, *, colour: str, tips: tuple[str, ...]
) -> Spec:
    return _chart(
        title,
        rows,
        transform=[{"filter": "layer === null || datum.layer === layer"}],
        mark={"type": "line", "point": True, "tooltip": True},
        encoding={
            "x": _ordinal("layer", "layer", axis={"labelAngle": 0}),
            "y": _axis(name, label, scale={"zero": True}),
            "color": _colour(colour),
            "tooltip": _tips(*tips),
        },
    )


def _ordinal(name: str, title: str | None, *, axis: Mapping[str, Any] = MappingProxyType({}), **rest: Any) -> Spec:
    return {"field": name, "type": "ordinal", "title": title, "axis": {"labelOverlap": True, **axis}, **rest}


def _colour(name: str, **colours: str) -> Spec:
    """Colours by the values of a field, which are named, or not."""
    known = {"domain": list(colours), "range": list(colours.values())}
    scale = known if colours else {"range": [_ORANGE, _BLUE, _GREEN, _RED, _GREY]}
    return {"field": name, "type": "nominal", "title": None, "scale": scale, "legend": {"orient": "top"}}


def _shade(name: str, title: str, **legend: Any) -> Spec:
    scale = {"scheme": "cividis", "domainMin": 0}
    return _axis(name, title, scale=scale, legend={"orient": "top", "gradientLength": 160, **legend})


def _positions(width: int) -> dict[str, Spec]:
    return {"x": _axis("from", f"position (bins of {width} tokens)", bin="binned"), "x2": {"field": "to"}}


def _overlap(overview: Overview) -> Spec:
    statistics = overview.statistics
    rows = [
        {"layer": layer_id, "part": None, "series": series, "share": round(float(value_L[slot]), 4)}
        for series, value_L in (
            ("observed", statistics.overlap_L),
            ("independent and balanced", statistics.spec.top_k / statistics.experts_L),
        )
        for slot, layer_id in enumerate(statistics.spec.layer_ids)
    ]
    return _by_layer(
        "Experts shared with the token before",
        rows,
        "share",
        "share of ids",
        colour="series",
        tips=("layer", "series", "share%"),
    )


# ---- by position ----------------------------------------------------------------------------------------------------


def _bins(counts_X: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
    """Tokens of a bar, and ``[..., X]`` added up to at most ``_MAX_BARS`` bars, without empty ones at the end."""
    filled = np.flatnonzero(counts_X.reshape(-1, counts_X.shape[-1]).any(axis=0))
    used = int(filled[-1]) + 1 if len(filled) else 1
    together = -(-used // _MAX_BARS)
    bars = -(-used // together)
    cut = counts_X[..., : bars * together]
    padded = np.pad(cut, [(0, 0)] * (cut.ndim - 1) + [(0, bars * together - cut.shape[-1])])
    return POSITION_BIN * together, padded.reshape(*cut.shape[:-1], bars, together).sum(axis=-1)


def _coverage(overview: Overview) -> Spec:
    tables = np.stack([part.statistics.positions_P2.T for part in overview.parts])
    width, counts = _bins(tables)
    rows = [
        {
            "part": part.name,
            "from": bar * width,
            "to": (bar + 1) * width,
            "rows": name,
            "tokens": int(counts[place, which, bar]),
        }
        for place, part in enumerate(overview.parts)
        for which, name in enumerate(("all there", "missing"))
        for bar in range(counts.shape[-1])
        if counts[place, which, bar]
    ]
    return _chart(
        "Coverage by position",
        rows,
        transform=[
            {"filter": _FILTER_PART},
            {"aggregate": [{"op": "sum", "field": "tokens", "as": "tokens"}], "groupby": ["from", "to", "rows"]},
        ],
        mark={"type": "bar", "tooltip": True},
        encoding={
            **_positions(width),
            "y": _axis("tokens", "fed tokens", stack=True),
            "color": _colour("rows", **{"all there": _BLUE, "missing": _RED}),
            "tooltip": _tips("from", "to", "rows", "tokens"),
        },
    )


def _flip_rows(overview: Overview) -> tuple[int, list[dict[str, Any]]]:
    """One row for each part and layer: compared and flipped rows by bar."""
    bins = max(part.flips_LX2.shape[1] for part in overview.parts)
    tables = np.stack(
        [
            np.pad(part.flips_LX2, ((0, 0), (0, bins - part.flips_LX2.shape[1]), (0, 0))).transpose(0, 2, 1)
            for part in overview.parts
        ]
    )
    width, counts = _bins(tables)
    layers = overview.diff.layer_ids if overview.diff is not None else ()
    return width, [
        {
            "part": part.name,
            "layer": layer_id,
            "slot": slot,
            "compared": counts[place, slot, 0].tolist(),
            "flipped": counts[place, slot, 1].tolist(),
        }
        for place, part in enumerate(overview.parts)
        for slot, layer_id in enumerate(layers)
    ]


def _unfolded(width: int, groupby: list[str]) -> list[dict[str, Any]]:
    return [
        {"filter": _FILTER},
        {"calculate": "sequence(0, length(datum.compared))", "as": "bar"},
        {"flatten": ["compared", "flipped", "bar"]},
        {
            "aggregate": [
                {"op": "sum", "field": "compared", "as": "rows"},
                {"op": "sum", "field": "flipped", "as": "flips"},
            ],
            "groupby": groupby,
        },
        {"filter": "datum.rows > 0"},
        {"calculate": "datum.flips / datum.rows", "as": "share"},
        {"calculate": f"datum.bar * {width}", "as": "from"},
        {"calculate": f"(datum.bar + 1) * {width}", "as": "to"},
    ]


def _flips(overview: Overview) -> Spec:
    width, rows = _flip_rows(overview)
    return _chart(
        "Flipped rows by position: other experts on the two sides",
        rows,
        transform=_unfolded(width, ["bar"]),
        mark={"type": "bar", "color": _RED, "tooltip": True},
        encoding={
            **_positions(width),
            "y": _percent("share", "share of rows"),
            "tooltip": _tips("from", "to", "share%", "flips", "rows"),
        },
    )


def _flips_map(overview: Overview) -> Spec:
    width, rows = _flip_rows(overview)
    layers = len({row["layer"] for row in rows})
    return _chart(
        "Flipped rows by layer and position",
        rows,
        height=_map_height(layers),
        transform=_unfolded(width, ["bar", "layer"]),
        mark={"type": "rect", "tooltip": True},
        encoding={
            **_positions(width),
            "y": _ordinal("layer", "layer"),
            "color": _shade("share", "share of rows", format="~%"),
            "tooltip": _tips("layer", "from", "to", "share%", "rows"),
        },
    )


# ---- log-probabilities and samples ----------------------------------------------------------------------------------


def _gap(overview: Overview) -> Spec:
    """Share of tokens whose gap is larger: the live line far right of the replay line is what replay is for."""
    rows = []
    for part in overview.parts:
        for which, series in enumerate(("live routes", "replayed routes")):
            total = int(part.gaps_2G[which].sum())
            if total:
                above_G = part.gaps_2G[which][::-1].cumsum()[::-1]
                rows += [
                    {
                        "part": part.name,
                        "routes": series,
                        "gap": float(f"{edge:.4g}"),
                        "above": int(above),
                        "tokens": total,
                    }
                    for edge, above in zip(GAP_EDGES[1:], above_G[1:], strict=True)
                ]
    return _chart(
        "Log-probability gap between engine and trainer",
        rows,
        transform=[
            {"filter": _FILTER_PART},
            {
                "aggregate": [
                    {"op": "sum", "field": "above", "as": "above"},
                    {"op": "sum", "field": "tokens", "as": "tokens"},
                ],
                "groupby": ["routes", "gap"],
            },
            {"calculate": "datum.above / datum.tokens", "as": "share"},
        ],
        mark={"type": "line", "point": True, "tooltip": True},
        encoding={
            "x": _axis(
                "gap", "|gap| in nats (log scale)", scale={"type": "log"}, axis={"format": "~g", "labelOverlap": True}
            ),
            "y": _percent("share", "share of tokens above"),
            "color": _colour("routes", **{"live routes": _RED, "replayed routes": _BLUE}),
            "tooltip": _tips("routes", "gap", "share%"),
        },
    )


def _samples(overview: Overview) -> Spec:
    names = [part.name for part in overview.parts]
    rows = [
        {
            "order": order,
            "part": names[sample.part],
            "sample": "/".join(map(str, sample.key)),
            "tokens": sample.tokens,
            "missing": round(sample.missing / sample.tokens, 5) if sample.tokens else 0.0,
            "flipped": round(sample.flipped / sample.compared, 5) if sample.compared else 0.0,
            "version": "unknown"
            if not sample.versions
            else "-".join(map(str, sorted({sample.versions[0], sample.versions[-1]}))),
        }
        for order, sample in enumerate(overview.samples)
    ]
    measured = "flipped" if overview.diff is not None else "missing"
    cut = f" (the first {len(rows):,} of {overview.num_samples:,})" if overview.num_samples > len(rows) else ""
    return _chart(
        f"Samples in order of arrival, by weights version{cut}",
        rows,
        params=[
            {"name": "sample", "value": None},
            {"name": "window", "select": {"type": "interval", "zoom": "wheel![event.shiftKey]"}, "bind": "scales"},
        ],
        transform=[{"filter": _FILTER_PART}, {"filter": _FILTER_SAMPLE}],
        mark={"type": "circle", "opacity": 0.8, "tooltip": True},
        encoding={
            "x": _axis(
                "order",
                "order of arrival",
                scale={"zero": False, "nice": False, "padding": 12},
                axis={"format": "d", "tickMinStep": 1},
            ),
            "y": _percent(measured, f"share of rows {measured}"),
            "size": {"field": "tokens", "type": "quantitative", "legend": None, "scale": {"range": [20, 160]}},
            "color": {
                "field": "version",
                "type": "nominal",
                "title": "version",
                "legend": {"orient": "top", "symbolLimit": 8, "columns": 8}
                if len({row["version"] for row in rows}) <= 8
                else None,
                "scale": {"scheme": "viridis"},
            },
            "tooltip": _tips("sample", "part", "version", "tokens", "flipped%", "missing%"),
        },
    )


# ---- over versions and parts ----------------------------------------------------------------------------------------


def _drift(overview: Overview) -> Spec:
    rows = [
        {
            "step": f"{drift.before}→{drift.after}",
            "place": place,
            "layer": layer_id,
            "nats": float(f"{drift.divergence_L[slot]:.4g}"),
        }
        for place, drift in enumerate(overview.statistics.drift())
        for slot, layer_id in enumerate(overview.spec.layer_ids)
    ]
    return _chart(
        "Drift of the load between weights versions (Jensen-Shannon, nats)",
        rows,
        height=_map_height(overview.spec.num_layers),
        transform=[{"filter": "layer === null || datum.layer === layer"}],
        mark={"type": "rect", "tooltip": True},
        encoding={
            "x": _ordinal("step", "weights versions", sort={"field": "place"}, axis={"labelAngle": 0}),
            "y": _ordinal("layer", "layer"),
            "color": _shade("nats", "nats"),
            "tooltip": _tips("step", "layer", "nats~"),
        },
    )


def _trends(overview: Overview) -> Spec:
    """Each part a point: coverage, flips, gap, load and drift, one small chart each."""
    rows = []
    for place, part in enumerate(overview.parts):
        rows += [
            {"place": place, "part": part.name, "measure": name, "value": float(f"{value:.5g}")}
            for name, value in _measures(part).items()
        ]
    measures = list(dict.fromkeys(row["measure"] for row in rows))
    return {
        "$schema": _SCHEMA,
        "title": {"text": "Trends over parts", "anchor": "start", "fontSize": 13},
        "data": {"values": rows},
        "params": [{"name": "layer", "value": None}, {"name": "part", "value": None}],
        "config": {"axis": {"labelFontSize": 11, "titleFontSize": 11}},
        "vconcat": [
            {
                "width": 340,
                "height": 70,
                "transform": [{"filter": f"datum.measure === '{measure}'"}],
                "mark": {"type": "line", "point": True, "color": _BLUE, "tooltip": True},
                "encoding": {
                    "x": {
                        "field": "part",
                        "type": "ordinal",
                        "sort": {"field": "place"},
                        "title": None,
                        "axis": {"labelOverlap": True, "labelAngle": 0, "labelLimit": 90}
                        if measure == measures[-1]
                        else {"labels": False, "ticks": False},
                    },
                    "y": _axis("value", None, scale={"zero": False}),  # type: ignore[arg-type]
                    "tooltip": _tips("part", "measure", "value~"),
                },
                "title": {"text": measure, "fontSize": 11, "anchor": "start"},
            }
            for measure in measures
        ],
    }


def _measures(part: PartView) -> dict[str, float]:
    statistics = part.statistics
    load_LE = statistics.load_of()
    compared, flipped = part.flips_LX2.reshape(-1, 2).sum(axis=0).tolist() if part.flips_LX2.size else (0, 0)
    found = {
        "missing share of fed rows": statistics.coverage.missing_share,
        "effective experts, least layer": float(effective_experts(load_LE).min()),
        "peak load over mean, most": float(imbalance(load_LE, statistics.experts_L).max()),
    }
    if compared:
        found["share of rows flipped"] = flipped / compared
    for which, name in enumerate(("mean |gap| live", "mean |gap| replayed")):
        total, tokens = part.gap_sums[which]
        if tokens:
            found[name] = total / tokens
    if len(statistics.versions) > 1:
        found["drift between versions, most"] = max(float(d.divergence_L.max()) for d in statistics.drift())
    return found


# ---- a fleet's start-up ---------------------------------------------------------------------------------------------


def draw_timeline(tasks: Sequence[Mapping[str, Any]]) -> Spec:
    """Draw a start-up as bars over time, one task each: grey while it waited, coloured while it ran.

    Args:
        tasks: As ``Timeline.to_dict()["tasks"]`` of a fleet.

    Returns:
        A specification for ``encode``.

    >>> tasks = [{"name": "engine", "started": 0.0, "ended": 1.5, "outcome": "done", "waited_for": None}]
    >>> encode(draw_timeline(tasks), "png")[1:4]
    b'PNG'
    """
    rows = [
        {
            "task": task["name"],
            "place": place,
            "origin": 0.0,
            "started": task["started"] or 0.0,
            "ended": task["ended"] or task["started"] or 0.0,
            "outcome": task["outcome"],
            "after": f"after {task['waited_for']}" if task["waited_for"] is not None else "",
        }
        for place, task in enumerate(tasks)
    ]
    for row in rows:
        row["said"] = f"{row['ended'] - row['started']:.1f} s {row['after']}".strip()
    y = {
        "field": "task",
        "type": "nominal",
        "sort": [row["task"] for row in rows],
        "title": None,
        "axis": {"labelLimit": 200},
    }
    return {
        "$schema": _SCHEMA,
        "title": {"text": "Start-up: what ran when, and what it waited for", "anchor": "start", "fontSize": 13},
        "width": 620,
        "height": {"step": 30},
        "data": {"values": rows},
        "layer": [
            {
                "mark": {"type": "bar", "color": "#d8dee4", "height": 5},
                "encoding": {"y": y, "x": _axis("origin", "seconds"), "x2": {"field": "started"}},
            },
            {
                "mark": {"type": "bar", "height": 18},
                "encoding": {
                    "y": y,
                    "x": _axis("started", "seconds"),
                    "x2": {"field": "ended"},
                    "color": _colour("outcome", done=_BLUE, failed=_RED, cancelled=_GREY),
                },
            },
            {
                "mark": {"type": "text", "align": "left", "dx": 4},
                "encoding": {"y": y, "x": _axis("ended", "seconds"), "text": {"field": "said"}},
            },
        ],
    }
