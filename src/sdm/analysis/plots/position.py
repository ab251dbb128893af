"""Likelihood by position in the document: the paper's perplexity by token position, and what M0 and context bring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from sdm.analysis.plots.curves import Curves, check_curves, draw_curves, has_intervals, places
from sdm.analysis.plots.style import COLORS, OTHERS, Style, architecture, doubling_axis, new_axes
from sdm.evaluation.report import Point

POSITION = "position in the document (tokens)"


def position_figure(curves: Curves, y: str = "nats per token") -> Figure:
    """Negative log-likelihood, or perplexity, against position."""
    check_curves(curves)
    figure, axes = new_axes(POSITION, f"{y}, with 95% interval" if has_intervals(curves) else y)
    draw_curves(axes, curves)
    doubling_axis(axes, places(curves))
    axes.legend()
    return figure


def gain_figure(curves: Curves) -> Figure:
    """What the context beyond the local layers' reach brings, against position."""
    figure = position_figure(curves, "context gain (nats per token)")
    figure.axes[0].axhline(0, color="black", linewidth=0.8)
    return figure


def initial_state_figure(
    learned: Mapping[str, Sequence[Point]], null: Mapping[str, Sequence[Point]], y: str = "nats per token"
) -> Figure:
    """Learned (solid) against null initial state (dashed) by position, for each architecture."""
    curves, looks = {}, {}
    for place, name in enumerate(dict.fromkeys((*learned, *null))):
        kind = architecture(name)
        color = OTHERS[place % len(OTHERS)] if kind is None else COLORS[kind]
        for what, found, line, marker in (("learned", learned, "-", "o"), ("null", null, "--", "s")):
            if name in found:
                curves[f"{name}, {what} M0"] = found[name]
                looks[f"{name}, {what} M0"] = Style(color, line, marker)
    check_curves(curves)
    figure, axes = new_axes(POSITION, f"{y}, with 95% interval" if has_intervals(curves) else y)
    draw_curves(axes, curves, looks=looks)
    doubling_axis(axes, places(curves))
    axes.legend()
    return figure


def position_points(positions: Sequence[Mapping[str, float]], quantity: str = "nll") -> list[Point]:
    """The points of a summary of `sdm eval position`, at the geometric middle of each stretch; `quantity` is "nll" or
    "gain"."""
    low, high = ("low", "high") if quantity == "nll" else (f"{quantity}_low", f"{quantity}_high")
    return [
        Point((max(one["start"], one["stop"] / 4) * one["stop"]) ** 0.5, one[quantity], one.get(low), one.get(high))
        for one in positions
        if quantity in one
    ]
