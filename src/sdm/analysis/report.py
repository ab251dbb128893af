"""What a measurement shows (`sdm.evaluation.report`), as tables for the terminal and figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.table import Table as RichTable

from sdm.analysis.plots.curves import draw_curves, has_intervals, places
from sdm.analysis.plots.style import (
    doubling_axis,
    new_axes,
    new_panels,
    percent_axis,
    plain_log_axis,
    save,
    short,
)
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
    if len(chart.curves) > 1 or has_intervals(chart.curves):
        axes.legend()
    return figure


def draw_grid(grid: Grid) -> Figure:
    """Small charts with the same axes."""
    columns = min(len(grid.charts), COLUMNS)
    rows = -(-len(grid.charts) // columns)
    size = (2.6 * columns + 0.6, 2.1 * rows + 1.0)
    figure, cells = new_panels(rows, columns, size, sharex=True, sharey=True)
    shown: dict[str, Artist] = {}
    for place, axes in enumerate(cells):
        if place >= len(grid.charts):
            axes.set_axis_off()
            continue
        chart = grid.charts[place]
        _curves(axes, chart)
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
        cells[0].set_xscale("log", base=2)
        for axes in cells:
            axes.set_xticks(ticks, [short(tick) for tick in ticks], rotation=45 if len(ticks) > 5 else 0)
    figure.suptitle(grid.title)
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=len(shown))
    return figure


def _curves(axes: Axes, chart: Chart) -> None:
    draw_curves(axes, chart.curves, 100 if chart.percent else 1)
    if chart.log_x:
        doubling_axis(axes, places(chart.curves))
    if chart.log_y:
        plain_log_axis(axes)
    if chart.percent:
        percent_axis(axes)
    axes.set_title(chart.title)


def draw_all(charts: Sequence[Chart | Grid], folder: Path) -> list[Path]:
    """Files in a folder. A chart without curves is left out."""
    paths = []
    for chart in charts:
        if isinstance(chart, Grid):
            paths.append(save(draw_grid(chart), folder / f"{chart.name}.png"))
        elif any(chart.curves.values()):
            paths.append(save(draw(chart), folder / f"{chart.name}.png"))
    return paths
