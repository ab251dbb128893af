"""Curves by the name of the model, each in the band that it is known to be in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from sdm.analysis.plots.style import Style, styles
from sdm.evaluation.report import Point

Curves = Mapping[str, Sequence[Point]]


def draw_curves(axes: Axes, curves: Curves, scale: float = 1.0, looks: Mapping[str, Style] | None = None) -> None:
    """Draw every curve, its y times `scale`. The first is drawn over the others, which may lie where it does."""
    looks = looks or styles(curves)
    for place, (name, points) in enumerate(curves.items()):
        look, order = looks[name], 3 - 0.1 * place
        x, y = [point.x for point in points], [scale * point.y for point in points]
        axes.plot(
            x, y, linestyle=look.line, marker=look.marker, color=look.color, label=name, zorder=order, markersize=4
        )
        band = [(one.x, one.low, one.high) for one in points if one.low is not None and one.high is not None]
        if len(band) == 1:  # a band of one place cannot be seen
            (at, low, high), middle = band[0], y[x.index(band[0][0])]
            ends = [[max(0.0, middle - scale * low)], [max(0.0, scale * high - middle)]]
            axes.errorbar([at], [middle], ends, color=look.color, capsize=3, zorder=order - 1)
        elif band:
            lows, highs = [scale * low for _, low, _ in band], [scale * high for _, _, high in band]
            axes.fill_between(
                [x for x, _, _ in band], lows, highs, color=look.color, alpha=0.2, linewidth=0, zorder=order - 1
            )


def places(curves: Curves) -> list[float]:
    """All x, ascending."""
    return sorted({point.x for points in curves.values() for point in points})


def has_intervals(curves: Curves) -> bool:
    return any(point.low is not None for points in curves.values() for point in points)


def check_curves(curves: Curves) -> None:
    """Raise unless there is something to draw."""
    if not curves or not any(curves.values()):
        raise ValueError("curves must have at least one curve with at least one point")
