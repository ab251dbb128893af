"""What a measurement shows, as plain numbers and words; `sdm.analysis.report` draws it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Table:
    """A table for the terminal."""

    title: str
    columns: tuple[str, ...]
    """The first is left-aligned, the others hold numbers."""
    rows: Sequence[tuple[str, ...]]
    caption: str = ""


@dataclass(frozen=True)
class Point:
    """A point of a curve, with the interval that it is known to be in."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Chart:
    """Curves by the name of the model."""

    name: str
    """Of the file."""
    title: str
    x: str
    """Label of the axis."""
    y: str
    curves: dict[str, list[Point]]
    log_x: bool = False
    """Doubling steps."""
    log_y: bool = False
    percent: bool = False
    """y is a share of one, shown in percent from 0 to 100."""


@dataclass(frozen=True)
class Grid:
    """Charts side by side in one figure, with one legend and the same axes."""

    name: str
    """Of the file."""
    title: str
    charts: list[Chart]


@dataclass(frozen=True)
class Report:
    tables: list[Table] = field(default_factory=list)
    charts: Sequence[Chart | Grid] = field(default_factory=list)
