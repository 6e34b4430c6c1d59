"""Pictures of statistics and differences, as matplotlib figures.

Owns axes, colours and words of the pictures; the one importer of matplotlib. Figures are made without pyplot, so there
is no global state, no window and no backend to choose. Colours are safe for colour-blind readers (Okabe-Ito, cividis).

Axes: L captured layers, E experts, P bins of absolute position, V steps between weights versions.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from routeplane.inspect.statistics import KIND_NAMES, POSITION_BIN, RouteStatistics, effective_experts, shares

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from routeplane.inspect.compare import RouteDiff

__all__ = ["draw_pictures", "draw_timeline", "encode"]

_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#777777"
_WIDTH = 9.0


def draw_pictures(statistics: RouteStatistics, *, diff: RouteDiff | None = None) -> dict[str, Figure]:
    """Every picture that the data has something for, by name, in reading order."""
    pictures: Mapping[str, Callable[[], Figure]] = {
        "load": lambda: _load(statistics),
        **({"effective": lambda: _effective(statistics)} if statistics.load else {}),
        "overlap": lambda: _overlap(statistics),
        **({"coverage": lambda: _coverage(statistics)} if statistics.positions_P2.any() else {}),
        **({"drift": lambda: _drift(statistics)} if len(statistics.versions) > 1 else {}),
        **(
            {"agreement": lambda: _agreement(diff), "flips": lambda: _flips(diff)}
            if diff is not None and diff.compared_L.any()
            else {}
        ),
    }
    return {name: draw() for name, draw in pictures.items()}


def encode(figure: Figure, form: Literal["png", "svg"]) -> bytes:
    """The figure as a file's bytes; the same data gives the same bytes (no date, no random ids)."""
    out = io.BytesIO()
    # None leaves a field out
    metadata: dict[str, Any] = {"Date": None} if form == "svg" else {"Software": None}
    figure.savefig(out, format=form, dpi=144, metadata=metadata)
    return out.getvalue()


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _load(statistics: RouteStatistics) -> Figure:
    """Load over balance, layers by experts; white where an expert does not exist or was never chosen."""
    load_LE = statistics.load_of()
    relative_LE = shares(load_LE) * statistics.experts_L[:, None]
    # NaN is drawn as nothing
    shown = np.where(relative_LE > 0.0, relative_LE, np.nan)
    figure, axes = _figure(min(1.5 + 0.16 * len(load_LE), 9.0))
    image = axes.imshow(
        shown, aspect="auto", interpolation="nearest", cmap="cividis", norm=LogNorm(vmin=1 / 8, vmax=8, clip=True)
    )
    bar = figure.colorbar(image, ax=axes, ticks=[1 / 8, 1 / 2, 1, 2, 8])
    bar.ax.minorticks_off()
    bar.ax.set_yticklabels(["1/8", "1/2", "1", "2", "8"])
    bar.set_label("load relative to balance")
    _layers(axes.yaxis, statistics.spec.layer_ids)
    axes.set(xlabel="expert", ylabel="layer", title="Load of every expert (white: never chosen)")
    return figure


def _effective(statistics: RouteStatistics) -> Figure:
    """Effective experts over E, by layer, prompt and generation apart."""
    figure, axes = _figure(3.2)
    for kind, colour, marker in zip(KIND_NAMES, (_ORANGE, _BLUE), "so", strict=True):
        load_LE = statistics.load_of(kind=kind)
        if load_LE.any():
            share_L = effective_experts(load_LE) / statistics.experts_L
            axes.plot(share_L, color=colour, marker=marker, markersize=3.5, linewidth=1.2, label=kind)
    _layers(axes.xaxis, statistics.spec.layer_ids)
    axes.set(ylim=(0, 1.02), xlabel="layer", ylabel="share of the experts")
    axes.set_title("Effective experts, exp(entropy of the load), by layer")
    axes.legend(frameon=False)
    return figure


def _overlap(statistics: RouteStatistics) -> Figure:
    """Share of a row's experts that the row before holds too; dashed: what independent balanced rows would share."""
    figure, axes = _figure(2.8)
    axes.plot(statistics.overlap_L, color=_GREEN, marker="o", markersize=3.5, linewidth=1.2, label="observed")
    chance_L = statistics.spec.top_k / statistics.experts_L
    axes.plot(chance_L, color=_GREY, linestyle="--", linewidth=1.2, label="independent and balanced")
    _layers(axes.xaxis, statistics.spec.layer_ids)
    axes.set(ylim=(0, None), xlabel="layer", ylabel="shared share", title="Experts shared with the token before")
    axes.legend(frameon=False)
    return figure


def _coverage(statistics: RouteStatistics) -> Figure:
    """Fed tokens by position, those with all rows and those without."""
    width, (present_P, missing_P) = _bars(statistics.positions_P2)
    left_P = np.arange(len(present_P)) * width
    figure, axes = _figure(2.8)
    axes.bar(left_P, present_P, width=width * 0.92, align="edge", color=_BLUE, label="all rows there")
    axes.bar(left_P, missing_P, width=width * 0.92, align="edge", bottom=present_P, color=_RED, label="rows missing")
    axes.set(xlabel=f"position (bins of {width} tokens)", ylabel="fed tokens", title="Coverage by position")
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def _drift(statistics: RouteStatistics) -> Figure:
    """Divergence of each layer's load from one weights version to the next."""
    drifts = statistics.drift()
    divergence_LV = np.stack([drift.divergence_L for drift in drifts], axis=1)
    figure, axes = _figure(min(1.8 + 0.12 * len(divergence_LV), 7.0))
    image = axes.imshow(
        divergence_LV, aspect="auto", interpolation="nearest", cmap="cividis", vmin=0.0, vmax=_top(divergence_LV)
    )
    figure.colorbar(image, ax=axes).set_label("divergence (nats)")
    _layers(axes.yaxis, statistics.spec.layer_ids)
    _ticks(axes.xaxis, [f"{drift.before}→{drift.after}" for drift in drifts])
    axes.set(xlabel="weights versions", ylabel="layer", title="Drift of the load between weights versions")
    return figure


def _agreement(diff: RouteDiff) -> Figure:
    """Share of equal rows, and the Jaccard index, by layer."""
    figure, axes = _figure(2.8)
    rows = diff.layers()
    axes.plot([row["equal_share"] for row in rows], color=_BLUE, marker="o", markersize=3.5, label="equal sets")
    axes.plot([row["jaccard"] for row in rows], color=_ORANGE, marker="s", markersize=3.5, label="Jaccard index")
    _layers(axes.xaxis, diff.layer_ids)
    axes.set(xlabel="layer", ylabel="share", title="Agreement of the two sides, by layer")
    axes.legend(frameon=False)
    return figure


def _flips(diff: RouteDiff) -> Figure:
    """Share of flipped rows by position."""
    width, (compared_P, flipped_P) = _bars(diff.positions_P2)
    figure, axes = _figure(2.8)
    share_P = np.where(compared_P > 0, flipped_P / np.where(compared_P > 0, compared_P, 1), 0.0)
    axes.bar(np.arange(len(share_P)) * width, share_P, width=width * 0.92, align="edge", color=_RED)
    axes.set(xlabel=f"position (bins of {width} tokens)", ylabel="share of rows", title="Flips by position")
    return figure


def _bars(positions_P2: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
    """Tokens of a bar and the two counts ``[2, bars]``, up to the last position that has any, in at most 64 bars."""
    filled = int(np.flatnonzero(positions_P2.any(axis=1))[-1]) + 1
    together = -(-filled // 64)
    bars = -(-filled // together)
    counts_P2 = positions_P2[: bars * together]
    padded_P2 = np.pad(counts_P2, ((0, bars * together - len(counts_P2)), (0, 0)))
    return POSITION_BIN * together, padded_P2.reshape(bars, together, 2).sum(axis=1).T


def _top(values: NDArray[np.float64]) -> float:
    return max(float(values.max()), 0.01)  # so that noise of nothing does not fill the scale


def _layers(axis: Any, layer_ids: tuple[int, ...]) -> None:
    _ticks(axis, [str(layer_id) for layer_id in layer_ids])


def _ticks(axis: Any, labels: list[str]) -> None:
    """At most some 24 labels, whatever the number of places."""
    step = -(-len(labels) // 24)
    axis.set_ticks(range(0, len(labels), step), labels[::step])


def draw_timeline(tasks: Sequence[Mapping[str, Any]]) -> Figure:
    """A start-up as bars over time, one task each: hatched while it waited, filled while it ran; arrows to what it
    waited for. ``tasks``: as ``fleet``'s ``Timeline.to_dict()["tasks"]``.
    """
    colours = {"done": _BLUE, "failed": _RED, "cancelled": _GREY}
    figure, axes = _figure(1.2 + 0.4 * len(tasks))
    places = {task["name"]: place for place, task in enumerate(tasks)}
    ends = {task["name"]: task["ended"] for task in tasks}
    for place, task in enumerate(tasks):
        started, ended = task["started"] or 0.0, task["ended"] or task["started"] or 0.0
        axes.barh(place, started, height=0.12, color="#d8dee4")
        axes.barh(place, max(ended - started, 0.0), left=started, height=0.6, color=colours.get(task["outcome"], _GREY))
        axes.text(ended, place, f" {ended - started:.1f} s", va="center", fontsize=8)
        if task["waited_for"] is not None and ends[task["waited_for"]] is not None:
            axes.annotate(
                "",
                xy=(started, place),
                xytext=(ends[task["waited_for"]], places[task["waited_for"]]),
                arrowprops={"arrowstyle": "->", "color": _ORANGE},
            )
    axes.set_yticks(range(len(tasks)), [task["name"] for task in tasks])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set(xlabel="seconds", title="Start-up: what ran when, and what it waited for")
    return figure
