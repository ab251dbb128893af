"""Ablations: the number of slots, the numbers of writes and reads, and differences of models on the same documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from sdm.analysis.plots.curves import Curves, check_curves, draw_curves, has_intervals, places
from sdm.analysis.plots.style import COLORS, SIZE, UNDECIDED, doubling_axis, new_axes, styles
from sdm.evaluation.report import Point


def slots_figure(
    curves: Curves, baselines: Mapping[str, Point] | None = None, y: str = "nats per token, held out"
) -> Figure:
    """Likelihood against the number of slots N; models that have none are level lines (the x of their points is
    ignored)."""
    check_curves(curves)
    figure, axes = new_axes("slots per head (N)", f"{y}, with 95% interval" if has_intervals(curves) else y)
    baselines = baselines or {}
    looks = styles((*curves, *baselines))
    draw_curves(axes, curves, looks=looks)
    for name, point in baselines.items():
        axes.axhline(point.y, color=looks[name].color, linestyle="--", label=name)
        if point.low is not None and point.high is not None:
            axes.axhspan(point.low, point.high, color=looks[name].color, alpha=0.15, linewidth=0)
    doubling_axis(axes, places(curves))
    axes.legend()
    return figure


def write_read_figure(cells: Mapping[tuple[int, int], float | Point], y: str = "nats per token, held out") -> Figure:
    """The (W, R) grid as a heat map, with the number in each cell, and half the width of its interval if it has one.
    Pairs that were not measured stay empty."""
    if not cells:
        raise ValueError("cells must have at least one (W, R)")
    points = {pair: one if isinstance(one, Point) else Point(0, one) for pair, one in cells.items()}
    writes, reads = (sorted({pair[side] for pair in points}) for side in (0, 1))
    values = np.full((len(writes), len(reads)), np.nan)
    for (w, r), point in points.items():
        values[writes.index(w), reads.index(r)] = point.y
    figure, axes = new_axes("reads per token (R)", "writes per token (W)")
    axes.grid(visible=False)
    image = axes.imshow(values, cmap="cividis", origin="lower", aspect="auto")
    low, high = np.nanmin(values), np.nanmax(values)
    for (w, r), point in points.items():
        text = f"{point.y:.4f}"
        if point.low is not None and point.high is not None:
            text += f"\n± {(point.high - point.low) / 2:.4f}"
        dark = point.y < (low + high) / 2
        place = reads.index(r), writes.index(w)
        axes.text(*place, text, ha="center", va="center", color="white" if dark else "black", fontsize=9)
    axes.set_xticks(range(len(reads)), map(str, reads))
    axes.set_yticks(range(len(writes)), map(str, writes))
    figure.colorbar(image, label=y)
    return figure


def differences_figure(
    differences: Mapping[str, tuple[float, float | None, float | None]], label: str = "difference (nats per token)"
) -> Figure:
    """Paired differences, (mean, low, high) of each: a dot and its interval, grey if it holds zero."""
    if not differences:
        raise ValueError("differences must have at least one (mean, low, high)")
    rows: Sequence[str] = list(differences)[::-1]
    figure, axes = new_axes(label, "", (SIZE[0], max(1.6, 0.42 * len(rows) + 1.0)))
    axes.axvline(0, color="black", linewidth=0.8)
    for place, name in enumerate(rows):
        mean, low, high = differences[name]
        ends = None if low is None or high is None else [[max(0.0, mean - low)], [max(0.0, high - mean)]]
        decided = low is None or high is None or low > 0 or high < 0
        color = COLORS["SDM"] if decided else UNDECIDED
        axes.errorbar([mean], [place], xerr=ends, fmt="o", color=color, capsize=4)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    return figure
