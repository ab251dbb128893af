"""What a measurement shows (`sdm.evaluation.report`), as tables for the terminal and figures."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from rich import box
from rich.table import Table as RichTable

from sdm.analysis.run_figures import COLORS, doubling, new_axes, save
from sdm.evaluation.report import Chart, Table


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
        doubling(axes, sorted({point.x for points in chart.curves.values() for point in points}))
    if chart.log_y:
        axes.set_yscale("log")
    if chart.percent:
        axes.set_ylim(0, 103)
        axes.yaxis.set_major_formatter("{x:.0f}%")
    axes.set_title(chart.title)
    if len(chart.curves) > 1 or any(point.low is not None for points in chart.curves.values() for point in points):
        axes.legend()
    return figure


def draw_all(charts: list[Chart], folder: Path) -> list[Path]:
    """Files in a folder. A chart without curves is left out."""
    return [save(draw(chart), folder / f"{chart.name}.png") for chart in charts if any(chart.curves.values())]
