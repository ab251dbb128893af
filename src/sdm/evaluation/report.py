"""Tables and charts as plain data. `sdm.analysis.draw` draws charts, `sdm.analysis.tables` prints tables.

    chart = Chart("recall", "Recall", "pairs", "accuracy", {"SDM": [Point(64, 1.0), Point(256, 0.99, 0.98, 1.0)]})

A chart holds everything that its figure shows, so that page, file and CSV come from one description.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Cell = str | float | None
"""A value in the data of a chart."""


@dataclass(frozen=True)
class Table:
    """A table for the terminal and for pages."""

    title: str
    columns: tuple[str, ...]
    """The first column is left-aligned, the others hold numbers."""
    rows: Sequence[tuple[str, ...]]
    caption: str = ""


@dataclass(frozen=True)
class Point:
    """A point of a curve, with its interval."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


CurveKind = Literal["curve", "line", "thin", "points", "hollow", "reference"]
"""How a curve is drawn: a line with markers, a line alone, a thin line (raw measurements), markers alone, hollow
markers (held-out points), or a dotted black line (what the curves are compared with)."""


@dataclass(frozen=True)
class Look:
    """How a curve is drawn, where the default does not fit.

    A model's architecture selects the colour; models of one architecture differ by line style and marker.
    """

    model: str = ""
    """Model whose colour, line style and marker the curve takes; by default the name of the curve."""
    kind: CurveKind = "curve"
    legend: bool = True
    """Whether the legend lists the curve."""


@dataclass(frozen=True)
class Reference:
    """A straight line across a chart: a level on the y axis or a place on the x axis."""

    at: float
    label: str = ""
    """Entry in the legend; empty: none."""
    axis: Literal["x", "y"] = "y"
    model: str = ""
    """Model whose colour the line takes; empty: black."""
    low: float | None = None
    high: float | None = None
    """Interval of a level, drawn as a band."""


class Figure:
    """What all charts share: their data as rows, for CSV files."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Column names of `rows`."""
        raise NotImplementedError

    def rows(self) -> list[tuple[Cell, ...]]:
        """Every value, for CSV files."""
        raise NotImplementedError

    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not self.rows()

    def has_intervals(self) -> bool:
        """Whether any value has an interval."""
        return "low" in self.columns and any(row[self.columns.index("low")] is not None for row in self.rows())

    def in_words(self) -> str:
        """The main numbers, for readers who cannot see the figure."""
        raise NotImplementedError


@dataclass(frozen=True)
class Chart(Figure):
    """Curves by name, each with its intervals as a band.

    Axes whose values are all whole numbers have whole ticks.
    """

    name: str
    """Name of its files."""
    title: str
    x: str
    """Label of the x axis."""
    y: str
    """Label of the y axis."""
    curves: Mapping[str, Sequence[Point]]
    log_x: bool = False
    """Logarithmic x axis, with powers of two as ticks, or powers of ten for large numbers."""
    y_scale: Literal["linear", "zero", "log", "auto"] = "linear"
    """Linear, linear from zero, logarithmic, or chosen by the values: logarithmic if they span more than a factor of
    ten, else linear from zero, so that small ratios look small."""
    percent: bool = False
    """y is a proportion, shown in percent from 0 to 100."""
    references: Sequence[Reference] = ()
    looks: Mapping[str, Look] = field(default_factory=dict)
    """Exceptions to the default look, by the name of the curve."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Column names of `rows`."""
        return ("model", "x", "y", "low", "high")

    def rows(self) -> list[tuple[Cell, ...]]:
        """Every point, for CSV files."""
        return [
            (name, point.x, point.y, point.low, point.high) for name, curve in self.curves.items() for point in curve
        ]

    def in_words(self) -> str:
        """Where every curve begins and ends, for readers who cannot see the figure."""
        ends = [
            f"{name} goes from {self._value(curve[0])} to {self._value(curve[-1])}"
            for name, curve in self.curves.items()
            if curve and self.looks.get(name, Look()).kind != "reference"
        ]
        return f"{self.title}: {self.y} against {self.x}. {'; '.join(ends)}."

    def _value(self, point: Point) -> str:
        return f"{f'{100 * point.y:.1f}%' if self.percent else f'{point.y:.4g}'} at {point.x:g}"


@dataclass(frozen=True)
class Rows(Figure):
    """Values by name, a dot with its interval on a row each: paired differences, for instance.

    A value whose interval holds zero is grey.
    """

    name: str
    title: str
    x: str
    """Label of the x axis."""
    values: Mapping[str, Point]
    """By the name of the row; x of the points is not used."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Column names of `rows`."""
        return ("row", "value", "low", "high")

    def rows(self) -> list[tuple[Cell, ...]]:
        """Every value, for CSV files."""
        return [(name, point.y, point.low, point.high) for name, point in self.values.items()]

    def in_words(self) -> str:
        """Every value, for readers who cannot see the figure."""
        return f"{self.x}: {'; '.join(f'{name} {point.y:+.4g}' for name, point in self.values.items())}."


@dataclass(frozen=True)
class HeatMap(Figure):
    """Values by two numbers, such as the writes and reads of a token. Pairs that are missing stay empty."""

    name: str
    title: str
    x: str
    y: str
    label: str
    """Of the values."""
    cells: Mapping[tuple[int, int], Point]
    """By (y, x); x of the points is not used. Half the width of an interval is written below the value."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Column names of `rows`."""
        return (self.y, self.x, self.label, "low", "high")

    def rows(self) -> list[tuple[Cell, ...]]:
        """Every cell, for CSV files."""
        return [(*pair, point.y, point.low, point.high) for pair, point in self.cells.items()]

    def in_words(self) -> str:
        """The lowest and the highest cell, for readers who cannot see the figure."""
        low, high = (choose(self.cells, key=lambda pair: self.cells[pair].y) for choose in (min, max))
        ends = (f"{self.cells[pair].y:.4g} at {self.y} {pair[0]}, {self.x} {pair[1]}" for pair in (low, high))
        return f"{self.label}: from {' to '.join(ends)}."


@dataclass(frozen=True)
class Violin:
    """A distribution of numbers between 0 and 1."""

    counts: Sequence[int]
    """Numbers in each of as many equal bins."""
    mean: float
    median: float


@dataclass(frozen=True)
class Violins(Figure):
    """Distributions side by side: a dot is the mean, a bar the median."""

    name: str
    title: str
    y: str
    violins: Mapping[str, Violin]

    @property
    def columns(self) -> tuple[str, ...]:
        """Column names of `rows`."""
        return ("model", "mean", "median")

    def rows(self) -> list[tuple[Cell, ...]]:
        """Mean and median of each distribution, for CSV files."""
        return [(name, violin.mean, violin.median) for name, violin in self.violins.items()]

    def in_words(self) -> str:
        """The means, for readers who cannot see the figure."""
        means = "; ".join(f"{name} {violin.mean:.3g}" for name, violin in self.violins.items())
        return f"{self.title}: mean {self.y}: {means}."


Panel = Chart | Rows | HeatMap | Violins


@dataclass(frozen=True)
class Grid(Figure):
    """Charts side by side in one figure, with one legend."""

    name: str
    """Name of its files."""
    title: str
    charts: Sequence[Panel]
    width: int = 5
    """Most charts in a row."""
    share_x: bool = True
    """Whether the charts have the same x axis."""
    share_y: bool = True
    """Whether the charts have the same y axis."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Column names of `rows`."""
        return ("chart", *self.charts[0].columns)

    def rows(self) -> list[tuple[Cell, ...]]:
        """The data of all charts, for CSV files."""
        return [(chart.title, *row) for chart in self.charts for row in chart.rows()]

    def has_intervals(self) -> bool:
        """Whether any chart has intervals."""
        return any(chart.has_intervals() for chart in self.charts)

    def in_words(self) -> str:
        """The words of all charts, for readers who cannot see the figure."""
        return " ".join(chart.in_words() for chart in self.charts)


AnyChart = Panel | Grid


@dataclass(frozen=True)
class Report:
    """What a measurement shows: tables and charts."""

    tables: list[Table] = field(default_factory=list)
    charts: Sequence[AnyChart] = field(default_factory=list)
