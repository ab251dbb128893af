"""How all figures look: one colour for each architecture, everywhere, that colour-blind readers can tell apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from sdm.files import new_file

SIZE = (6.0, 4.2)  # inches
DPI = 150

# Okabe and Ito's palette.
COLORS = {
    "SDM": "#0072B2",
    "GDN": "#E69F00",
    "full attention": "#009E73",
    "mixed": "#CC79A7",
    "Mamba2": "#56B4E9",
}
OTHERS = ("#D55E00", "#332288", "#999933", "#882255", "#000000", "#8C8C8C")
UNDECIDED = "#8C8C8C"  # of a difference that may as well be none
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class Style:
    """Of one curve."""

    color: str
    line: str = "-"
    marker: str = "o"


def architecture(name: str) -> str | None:
    """The key of `COLORS` that a model's name begins with or holds; None if it is of another kind."""
    words = name.lower().replace("-", " ").replace("_", " ").replace("fullattn", "attention")
    if "mixed" in words or ("sdm" in words and "attention" in words):
        return "mixed"
    for word, found in (("sdm", "SDM"), ("gdn", "GDN"), ("mamba", "Mamba2"), ("attention", "full attention")):
        if word in words:
            return found
    return None


def styles(names: Iterable[str]) -> dict[str, Style]:
    """A style for each name: an architecture has its colour; several models of one differ by line and marker."""
    found: dict[str, Style] = {}
    counts: dict[str | None, int] = {}
    for name in names:
        kind = architecture(name)
        place = counts[kind] = counts.get(kind, -1) + 1
        if kind is None:
            found[name] = Style(OTHERS[place % len(OTHERS)], LINES[place // len(OTHERS) % len(LINES)])
        else:
            found[name] = Style(COLORS[kind], LINES[place % len(LINES)], MARKERS[place % len(MARKERS)])
    return found


def new_axes(x: str, y: str, size: tuple[float, float] = SIZE) -> tuple[Figure, Axes]:
    """A figure that no global list of figures knows: it goes when nobody holds it."""
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def new_panels(
    rows: int, columns: int, size: tuple[float, float], sharex: bool = False, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """Panels of one figure, row by row."""
    figure = Figure(figsize=size, layout="constrained")
    cells = figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey)
    for axes in cells.flat:
        axes.grid(alpha=0.3)
    return figure, list(cells.flat)


def percent_axis(axes: Axes, whole: bool = True) -> None:
    """The y axis is of shares in percent, from 0 to 100 unless not `whole`."""
    if whole:
        axes.set_ylim(0, 103)
    axes.yaxis.set_major_formatter("{x:.0f}%")


def doubling_axis(axes: Axes, values: Iterable[float]) -> None:
    """A logarithmic x axis with the values written out, or powers of two among them if they are many."""
    ticks = doublings(sorted(set(values)))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [short(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def plain_log_axis(axes: Axes) -> None:
    """A logarithmic y axis with plain numbers, as many as can be read, for what has been drawn."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    decades = math.log10(high / low)
    steps = range(1, 10) if decades < 1 else (1, 2, 5) if decades < 3 else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=tuple(map(float, steps))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def doublings(values: Sequence[float]) -> list[float]:
    """The values themselves, if they are few whole ones; else powers of two among them, no more than can be read."""
    if len(values) <= 8 and all(value == round(value) for value in values):
        return list(values)
    low, high = math.ceil(math.log2(values[0])), math.floor(math.log2(values[-1]))
    step = max(1, math.ceil((high - low + 1) / 8))
    return [2.0**exponent for exponent in range(low, high + 1, step)] or list(values)


def short(tick: float) -> str:
    """2048 as 2k, 2097152 as 2M."""
    for size, name in ((2**20, "M"), (2**10, "k")):
        if tick >= size and tick % size == 0:
            return f"{tick / size:.0f}{name}"
    return f"{tick:g}"


def save(figure: Figure, path: Path) -> Path:
    """Into a file whose suffix says the format, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as temporary:
        figure.savefig(temporary, dpi=DPI)
    return path
