"""The charts of measurements as illustrations."""

from __future__ import annotations

from sdm.analysis.pages.page import Illustration
from sdm.analysis.report import draw, draw_grid
from sdm.evaluation.report import Chart, Grid, Point

COLUMNS = ("model", "x", "y", "low", "high")


def illustration(chart: Chart | Grid, name: str = "", caption: str = "") -> Illustration:
    """A chart with its points. `name` is that of its files, by default the chart's own; `caption` its title."""
    charts = chart.charts if isinstance(chart, Grid) else [chart]
    figure = draw_grid(chart) if isinstance(chart, Grid) else draw(chart)
    rows = [
        (*((one.title,) if isinstance(chart, Grid) else ()), model, point.x, point.y, point.low, point.high)
        for one in charts
        for model, points in one.curves.items()
        for point in points
    ]
    columns = ("chart", *COLUMNS) if isinstance(chart, Grid) else COLUMNS
    alt = " ".join(_in_words(one) for one in charts)
    banded = any(point.low is not None for one in charts for points in one.curves.values() for point in points)
    shown = caption or f"{chart.title}{'; bands: 95% intervals' if banded else ''}."
    return Illustration(name or chart.name, shown, figure, columns, rows, alt)


def _in_words(chart: Chart) -> str:
    """Where every curve begins and ends."""
    parts = [
        f"{model} goes from {_value(points[0], chart)} to {_value(points[-1], chart)}"
        for model, points in chart.curves.items()
        if points
    ]
    return f"{chart.title}: {chart.y} against {chart.x}. {'; '.join(parts)}."


def _value(point: Point, chart: Chart) -> str:
    y = f"{100 * point.y:.1f}%" if chart.percent else f"{point.y:.4g}"
    return f"{y} at {point.x:g}"
