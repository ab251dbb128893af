"""What a measurement shows (`sdm.evaluation.report`), as tables for the terminal and figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from rich import box
from rich.table import Table as RichTable

from sdm.analysis.run_figures import COLORS, new_axes, save
from sdm.evaluation.report import Chart, Grid, Table

COLUMNS = 5  # of a grid


def rich_table(table: Table) -> RichTable:
    """A table whose numbers are not broken into lines."""
    made = RichTable(title=table.title, caption=table.caption or None, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for place, name in enumerate(table.columns):
        made.add_column(name, justify="right" if place else "left", no_wrap=place > 0, overflow="fold")
    for row in table.rows:
        made.add_row(*row)
    return made


def draw(chart: Chart) -> Figure:
    """Curves, each in the band that it is known to be in."""
    figure, axes = new_axes(chart.x, chart.y)
    _curves(axes, chart)
    if len(chart.curves) > 1 or any(point.low is not None for points in chart.curves.values() for point in points):
        axes.legend()
    return figure


def draw_grid(grid: Grid) -> Figure:
    """Small charts with the same axes."""
    columns = min(len(grid.charts), COLUMNS)
    rows = -(-len(grid.charts) // columns)
    size = (2.6 * columns + 0.6, 2.1 * rows + 1.0)
    figure, cells = plt.subplots(
        rows, columns, figsize=size, layout="constrained", squeeze=False, sharex=True, sharey=True
    )
    shown: dict[str, Artist] = {}
    for place, axes in enumerate(cells.flat):
        if place >= len(grid.charts):
            axes.set_axis_off()
            continue
        chart = grid.charts[place]
        _curves(axes, chart)
        axes.grid(alpha=0.3)
        axes.set_title(chart.title, fontsize=9)
        axes.tick_params(labelsize=8)
        if place % columns == 0:
            axes.set_ylabel(chart.y)
        if place + columns >= len(grid.charts):  # nothing stands below
            axes.set_xlabel(chart.x)
            axes.tick_params(labelbottom=True)
        shown |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    if any(chart.log_x for chart in grid.charts):
        ticks = sorted({point.x for chart in grid.charts for points in chart.curves.values() for point in points})
        cells.flat[0].set_xscale("log", base=2)
        for axes in cells.flat:
            axes.set_xticks(ticks, [_short(tick) for tick in ticks], rotation=45 if len(ticks) > 5 else 0)
    figure.suptitle(grid.title)
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=len(shown))
    return figure


def _short(tick: float) -> str:
    """2048 as 2k, 2097152 as 2M."""
    for size, name in ((2**20, "M"), (2**10, "k")):
        if tick >= size and tick % size == 0:
            return f"{tick / size:.0f}{name}"
    return f"{tick:g}"


def _curves(axes: Axes, chart: Chart) -> None:
    scale = 100 if chart.percent else 1
    for place, (name, points) in enumerate(chart.curves.items()):
        color, x = COLORS[place % len(COLORS)], [point.x for point in points]
        # The first model is drawn over the others, which may lie where it does.
        order = 3 - 0.1 * place
        axes.plot(x, [scale * point.y for point in points], "o-", color=color, label=name, zorder=order, markersize=4)
        band = [(point.x, point.low, point.high) for point in points if None not in (point.low, point.high)]
        if band:
            ends, low, high = zip(*band, strict=True)
            lows, highs = ([scale * float(value or 0) for value in side] for side in (low, high))
            axes.fill_between(ends, lows, highs, color=color, alpha=0.2, linewidth=0, zorder=order - 1)
    if chart.log_x:
        ticks = _doublings(sorted({point.x for points in chart.curves.values() for point in points}))
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [_short(tick) for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
    if chart.log_y:
        axes.set_yscale("log")
        for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            axis(FuncFormatter(lambda value, place: f"{value:g}"))
    if chart.percent:
        axes.set_ylim(0, 103)
        axes.yaxis.set_major_formatter("{x:.0f}%")
    axes.set_title(chart.title)


def _doublings(values: Sequence[float]) -> list[float]:
    """The values themselves, if they are few whole ones; else powers of two among them, no more than can be read."""
    if len(values) <= 8 and all(value == round(value) for value in values):
        return list(values)
    low, high = math.ceil(math.log2(values[0])), math.floor(math.log2(values[-1]))
    step = max(1, math.ceil((high - low + 1) / 8))
    return [2.0**exponent for exponent in range(low, high + 1, step)] or list(values)


def draw_all(charts: Sequence[Chart | Grid], folder: Path) -> list[Path]:
    """Files in a folder. A chart without curves is left out."""
    paths = []
    for chart in charts:
        if isinstance(chart, Grid):
            paths.append(save(draw_grid(chart), folder / f"{chart.name}.png"))
        elif any(chart.curves.values()):
            paths.append(save(draw(chart), folder / f"{chart.name}.png"))
    return paths
