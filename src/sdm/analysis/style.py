"""How curves and axes look: colours, line styles and markers; scales, ticks and limits.

An architecture has one colour everywhere. The colours are Okabe and Ito's, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from sdm.evaluation.report import Chart

COLORS = {
    "SDM": "#0072B2",
    "GDN": "#E69F00",
    "full attention": "#009E73",
    "mixed": "#CC79A7",
    "Mamba2": "#56B4E9",
}
OTHERS = ("#D55E00", "#332288", "#999933", "#882255", "#000000", "#8C8C8C")
UNDECIDED = "#8C8C8C"  # a difference whose interval holds zero
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class Style:
    """Colour, line style and marker of a curve, in matplotlib's notation."""

    color: str
    line: str = "-"
    marker: str = "o"


def architecture(name: str) -> str | None:
    """Return the key of `COLORS` that a model's name contains; None if it contains none."""
    words = name.lower().replace("-", " ").replace("_", " ").replace("fullattn", "attention")
    if "mixed" in words or ("sdm" in words and "attention" in words):
        return "mixed"
    for word, key in (("sdm", "SDM"), ("gdn", "GDN"), ("mamba", "Mamba2"), ("attention", "full attention")):
        if word in words:
            return key
    return None


def styles(names: Iterable[str]) -> dict[str, Style]:
    """Assign a style to each name, no two the same.

    An architecture has its colour; several models of one architecture differ by line style and marker.
    """
    assigned: dict[str, Style] = {}
    counts: dict[str | None, int] = {}
    for name in names:
        if name in assigned:
            continue
        kind = architecture(name)
        place = counts[kind] = counts.get(kind, -1) + 1
        if kind is None:
            turn = place // len(OTHERS)
            assigned[name] = Style(OTHERS[place % len(OTHERS)], LINES[turn % len(LINES)], MARKERS[turn % len(MARKERS)])
        else:
            assigned[name] = Style(COLORS[kind], LINES[place % len(LINES)], MARKERS[place % len(MARKERS)])
    return assigned


DECADE = 10.0  # a ratio below which a logarithmic axis would exaggerate
LARGE = 2**30  # numbers from here on are shown as powers of ten


def scale_axes(axes: Axes, chart: Chart, ticks: int) -> None:
    """Set scales, limits and ticks of a chart whose curves have been drawn.

    Args:
        axes: Axes that hold the curves.
        chart: The chart.
        ticks: Most ticks that the x axis has room for.
    """
    x = sorted({point.x for curve in chart.curves.values() for point in curve})
    y = [point.y for curve in chart.curves.values() for point in curve]
    if chart.log_x:
        _log_x(axes, x, ticks)
    elif _are_whole(x):
        axes.xaxis.set_major_locator(MaxNLocator(min(ticks, 9), integer=True))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(min(ticks, 9)))
    if chart.percent:
        axes.set_ylim(0, 103)
        axes.yaxis.set_major_formatter("{x:.0f}%")
        return
    scale = chart.y_scale
    if scale == "auto":
        scale = "log" if min(y) > 0 and max(y) > DECADE * min(y) else "zero"
    if scale == "log":
        _log_y(axes)
    elif scale == "zero":
        low = [point.low for curve in chart.curves.values() for point in curve if point.low is not None]
        if min((*y, *low)) >= 0:
            axes.set_ylim(bottom=0)
    if scale != "log" and _are_whole(y):
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def doublings(values: Sequence[float], most: int = 8) -> list[float]:
    """Choose ticks for a logarithmic axis.

    Args:
        values: Places on the axis, ascending.
        most: Most ticks to return.

    Returns:
        The values themselves if they are few whole numbers, else powers of two among them.
    """
    if len(values) <= most and _are_whole(values):
        return _apart(values, most)
    low, high = math.ceil(math.log2(values[0])), math.floor(math.log2(values[-1]))
    step = max(1, math.ceil((high - low + 1) / most))
    return [2.0**exponent for exponent in range(low, high + 1, step)] or list(values[:1])


def short(tick: float) -> str:
    """Write a number with a binary prefix: 2048 as 2k, 2097152 as 2M."""
    for size, name in ((2**20, "M"), (2**10, "k")):
        if tick >= size and tick % size == 0:
            return f"{tick / size:.0f}{name}"
    return f"{tick:g}"


def _log_x(axes: Axes, values: Sequence[float], most: int) -> None:
    if values[-1] > LARGE:
        axes.set_xscale("log")
        if values[-1] < 100 * values[0]:  # powers of ten alone would be too few
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        return
    axes.set_xscale("log", base=2)
    ticks = doublings(values, most)
    axes.set_xticks(ticks, [short(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def _log_y(axes: Axes) -> None:
    """Set a logarithmic y axis with as many plain numbers as can be read, for what has been drawn."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_minor_formatter(NullFormatter())
    if high > LARGE:
        return
    if high < DECADE * low:  # equal steps, which a logarithmic locator does not have
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    else:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))


def _apart(values: Sequence[float], most: int) -> list[float]:
    """Leave out values whose labels would touch those of the one before."""
    width = math.log(values[-1] / values[0]) / (1.5 * most) if values[0] > 0 else 0.0
    kept = list(values[:1])
    for value in values[1:]:
        if math.log(value / kept[-1]) >= width:
            kept.append(value)
    return kept


def _are_whole(values: Iterable[float]) -> bool:
    return all(math.isfinite(value) and value == round(value) for value in values)
