"""Draw a chart (`sdm.evaluation.report`): one function for pages, files and every kind of chart.

    figure = draw(Chart("loss", "Loss", "step", "nats per token", {"SDM": [Point(10, 3.2), Point(20, 2.9)]}))
    save(figure, Path("loss.svg"))

An architecture has one colour everywhere; the colours are Okabe and Ito's, which colour-blind readers can tell apart.
The legend stands below the axes, where it covers nothing; titles, labels and names that are too long are wrapped.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from sdm.evaluation.report import (
    AnyChart,
    Chart,
    Grid,
    HeatMap,
    Look,
    Panel,
    Point,
    Rows,
    Violin,
    Violins,
)
from sdm.files import new_file

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


DPI = 160
WIDTH, HEIGHT = 6.0, 4.2  # inches of a single chart
LINE = 0.18  # inches of a line of text
MARKS = 12  # most markers on a curve
SMOOTH = 0.012  # width of the kernel of a violin, as a proportion of the scale
FORMATS = ("svg", "png", "pdf")
Styles = Mapping[str, Style]
Entries = dict[str, Artist]


def draw(chart: AnyChart) -> Figure:
    """Draw a chart, or a grid of charts with one legend.

    Returns:
        A figure that pyplot does not know: nobody has to close it.

    Raises:
        ValueError: If the chart has nothing to draw.
    """
    if chart.is_empty():
        raise ValueError(f"chart {chart.name!r} must have at least one point to draw")
    panels = list(chart.charts) if isinstance(chart, Grid) else [chart]
    columns = min(len(panels), chart.width) if isinstance(chart, Grid) else 1
    rows = -(-len(panels) // columns)
    width, height = _size(panels, columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)  # measures text
    share_x, share_y = (chart.share_x, chart.share_y) if isinstance(chart, Grid) else (False, False)
    cells = list(figure.subplots(rows, columns, squeeze=False, sharex=share_x, sharey=share_y).flat)
    looks = styles(name for panel in panels for name in _models(panel))
    entries: Entries = {}
    for place, axes in enumerate(cells):
        if place >= len(panels):
            axes.set_axis_off()
            continue
        panel = panels[place]
        if not panel.is_empty():
            _panel(axes, panel, looks, entries, most_ticks=round(1.3 * width))
        _label(axes, panel, width, height)
        if columns > 1:
            axes.tick_params(labelsize=8)
        if isinstance(chart, Grid):
            if chart.share_y and place % columns:
                axes.set_ylabel("")
            if chart.share_x and place + columns < len(panels):  # another chart stands below
                axes.set_xlabel("")
            else:
                axes.tick_params(labelbottom=True)
    if isinstance(chart, Grid) and chart.title:
        figure.suptitle(wrap(chart.title, width * columns - 0.3, 11), fontsize=11)
    legend = _legend(figure, entries) if len(entries) > 1 else 0
    lines = [max(text.count("\n") for text in texts) for texts in zip(*map(_texts, cells), strict=True)]
    extra = rows * sum(lines) + figure.get_suptitle().count("\n") + bool(figure.get_suptitle()) + legend
    figure.set_figheight(height * rows + LINE * extra)  # what stands around the axes does not make them smaller
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Write a figure into a file whose suffix names the format. The file is complete or absent.

    Raises:
        ValueError: If the suffix names no format.
    """
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise ValueError(
            f"the suffix must be one of {', '.join(f'.{suffix}' for suffix in FORMATS)}, got {path.name!r}"
        )
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as temporary:
        temporary.write_bytes(render(figure, kind))
    return path


def render(figure: Figure, kind: str = "png", dpi: int = DPI) -> bytes:
    """Return the file of a figure as bytes: the same bytes for the same figure.

    In SVG files text is drawn as paths, so that it looks the same whatever fonts there are.
    """
    file = io.BytesIO()
    metadata: dict[str, Any] = {
        "svg": {"Date": None, "Creator": None},
        "png": {"Software": None},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    }
    with matplotlib.rc_context({"svg.hashsalt": "sdm", "svg.fonttype": "path"}):
        figure.savefig(file, format=kind, metadata=metadata[kind], dpi=dpi, facecolor="white")
    return file.getvalue()


def wrap(text: str, inches: float, size: float = 10) -> str:
    """Break a text into lines of at most some inches at a font size. Formulas stay whole."""
    if "$" in text:
        return text
    renderer = FigureCanvasAgg(Figure(dpi=100)).get_renderer()
    font = FontProperties(size=size)
    lines: list[str] = []
    for paragraph in text.split("\n"):
        line = ""
        for word in paragraph.split(" "):
            longer = f"{line} {word}" if line else word
            if line and renderer.get_text_width_height_descent(longer, font, False)[0] > 100 * inches:
                lines.append(line)
                longer = word
            line = longer
        lines.append(line)
    return "\n".join(lines)


def _size(panels: Sequence[Panel], columns: int) -> tuple[float, float]:
    """Return the inches of a panel."""
    first = panels[0]
    if isinstance(first, Rows):
        most = max(len(panel.values) for panel in panels if isinstance(panel, Rows))
        return WIDTH, max(1.8, 0.42 * most + 1.2)
    if isinstance(first, Violins):
        most = max(len(panel.violins) for panel in panels if isinstance(panel, Violins))
        return max(4.0, 1.0 * most + 1.0), 3.8
    return {1: (WIDTH, HEIGHT), 2: (4.2, 3.6)}.get(columns, (2.8, 2.5))


def _models(panel: Panel) -> list[str]:
    """Return the names that a panel takes styles for."""
    if isinstance(panel, Violins):
        return list(panel.violins)
    if not isinstance(panel, Chart):
        return []
    names = [panel.looks.get(name, Look()).model or name for name in panel.curves if _kind(panel, name) != "reference"]
    return [*names, *(reference.model for reference in panel.references if reference.model)]


def _kind(chart: Chart, name: str) -> str:
    return chart.looks.get(name, Look()).kind


def _panel(axes: Axes, panel: Panel, looks: Styles, entries: Entries, most_ticks: int) -> None:
    """Draw what a panel shows, and add its legend entries."""
    axes.grid(alpha=0.3)
    if isinstance(panel, Chart):
        _curves(axes, panel, looks, entries)
        scale_axes(axes, panel, most_ticks)
    elif isinstance(panel, Rows):
        _rows(axes, panel)
    elif isinstance(panel, HeatMap):
        _heat_map(axes, panel)
    else:
        for place, (name, violin) in enumerate(panel.violins.items()):
            _violin(axes, place, violin, looks[name])
        axes.set_xticks(range(len(panel.violins)), [wrap(name, 0.95, 8) for name in panel.violins], fontsize=8)
        axes.set(xlim=(-0.6, len(panel.violins) - 0.4), ylim=(0, 1.03))


def _label(axes: Axes, panel: Panel, width: float, height: float) -> None:
    """Write title and labels, in as many lines as they take."""
    small = width < WIDTH
    size = 9 if small else 12
    axes.set_title(wrap(panel.title, width - 1.0, size), fontsize=size)
    if isinstance(panel, Violins):
        axes.set_ylabel(wrap(panel.y, height - 1.0))
        return
    axes.set_xlabel(wrap(panel.x, width - 1.2, 9 if small else 10), fontsize=9 if small else 10)
    if not isinstance(panel, Rows):
        axes.set_ylabel(wrap(panel.y, height - 1.2, 9 if small else 10), fontsize=9 if small else 10)


def _texts(axes: Axes) -> tuple[str, str]:
    return axes.get_title(), axes.get_xlabel()


def _legend(figure: Figure, entries: Entries) -> int:
    """Put the legend below the axes, in as many columns as fit. Returns its lines."""
    width = figure.get_figwidth()
    labels = [wrap(label, width - 0.9, 9) for label in entries]
    for rows in range(1, len(labels) + 1):
        columns = -(-len(labels) // rows)
        legend = figure.legend(entries.values(), labels, loc="outside lower center", ncols=columns, fontsize=9)
        if columns == 1 or legend.get_window_extent().width <= (width - 0.1) * figure.dpi:
            break
        legend.remove()
    return sum(max(label.count("\n") + 1 for label in labels[row::rows]) for row in range(rows))


def _curves(axes: Axes, chart: Chart, looks: Styles, entries: Entries) -> None:
    """Draw curves with their bands, the first over the others, and reference lines below all."""
    scale = 100 if chart.percent else 1
    for place, (name, curve) in enumerate(chart.curves.items()):
        if not curve:
            continue
        look = chart.looks.get(name, Look())
        style = looks.get(look.model or name, Style("black", ":", "None"))
        x, y = [point.x for point in curve], [scale * point.y for point in curve]
        order = 3 - 0.5 * place / len(chart.curves)
        (line,) = axes.plot(x, y, zorder=order, **_line(look, style, len(curve)))
        _band(axes, curve, scale, look, style, order - 1)
        if look.legend:
            entries.setdefault(name, line)
    for reference in chart.references:
        style = looks[reference.model] if reference.model else Style("black", ":" if reference.label else "-")
        across: Callable[..., Line2D] = axes.axhline if reference.axis == "y" else axes.axvline
        width = 1.5 if reference.model else 0.8
        at = scale * reference.at if reference.axis == "y" else reference.at
        line = across(at, color=style.color, linestyle="--" if reference.model else style.line, linewidth=width)
        line.set_zorder(1.5)
        if reference.axis == "y" and reference.low is not None and reference.high is not None:
            axes.axhspan(scale * reference.low, scale * reference.high, color=style.color, alpha=0.15, linewidth=0)
        if reference.label:
            entries.setdefault(reference.label, line)


def _line(look: Look, style: Style, points: int) -> dict[str, Any]:
    """Return how matplotlib is to plot a curve."""
    every = max(1, points // MARKS)
    whole: dict[str, Any] = {"color": style.color, "linestyle": style.line, "marker": style.marker, "markersize": 4}
    return {
        "curve": whole | {"markevery": every},
        "line": whole | {"marker": "None"},
        "thin": whole | {"marker": "None", "linewidth": 0.8, "alpha": 0.6},
        "points": whole | {"linestyle": "None"},
        "hollow": whole | {"linestyle": "None", "marker": "D", "markersize": 6, "markerfacecolor": "white"},
        "reference": {"color": "black", "linestyle": ":", "linewidth": 0.8},
    }[look.kind]


def _band(axes: Axes, curve: Sequence[Point], scale: float, look: Look, style: Style, order: float) -> None:
    """Draw intervals: a band, or bars where there is no line between the points."""
    known = [point for point in curve if point.low is not None and point.high is not None]
    if not known:
        return
    x, y = [point.x for point in known], np.array([scale * point.y for point in known])
    low, high = (np.array([scale * end for end in ends]) for ends in zip(*map(_ends, known), strict=True))
    if len(known) == 1 or look.kind in ("points", "hollow"):
        ends = np.maximum(0, [y - low, high - y])
        axes.errorbar(x, y, ends, color=style.color, linestyle="None", capsize=3, zorder=order)
    else:
        edge: dict[str, Any] = {"edgecolor": (style.color, 0.5), "linewidth": 0.5, "linestyle": style.line}
        axes.fill_between(x, low, high, facecolor=(style.color, 0.18), zorder=order, **edge)


def _ends(point: Point) -> tuple[float, float]:
    assert point.low is not None
    assert point.high is not None
    return point.low, point.high


def _rows(axes: Axes, chart: Rows) -> None:
    """Draw a dot with its interval on each row, the first above; grey if the interval holds zero."""
    names = list(chart.values)[::-1]
    axes.axvline(0, color="black", linewidth=0.8)
    for place, name in enumerate(names):
        point = chart.values[name]
        known = point.low is not None and point.high is not None
        low, high = _ends(point) if known else (point.y, point.y)
        color = UNDECIDED if known and low <= 0 <= high else COLORS["SDM"]
        ends = [[max(0.0, point.y - low)], [max(0.0, high - point.y)]] if known else None
        axes.errorbar([point.y], [place], xerr=ends, fmt="o", color=color, capsize=4)
    axes.set_yticks(range(len(names)), [wrap(name, 2.4) for name in names])
    axes.set_ylim(-0.6, len(names) - 0.4)


def _heat_map(axes: Axes, chart: HeatMap) -> None:
    """Draw a cell for each pair, with its value and half the width of its interval."""
    down, along = (sorted({pair[side] for pair in chart.cells}) for side in (0, 1))
    values = np.full((len(down), len(along)), np.nan)
    for (row, column), point in chart.cells.items():
        values[down.index(row), along.index(column)] = point.y
    axes.grid(visible=False)
    image = axes.imshow(values, cmap="cividis", origin="lower", aspect="auto")
    middle = (np.nanmin(values) + np.nanmax(values)) / 2
    for (row, column), point in chart.cells.items():
        known = point.low is not None and point.high is not None
        margin = f"\n± {(point.high - point.low) / 2:.4f}" if known else ""  # type: ignore[operator]
        color = "white" if point.y < middle else "black"
        place = along.index(column), down.index(row)
        axes.text(*place, f"{point.y:.4f}{margin}", ha="center", va="center", color=color, fontsize=9)
    axes.set_xticks(range(len(along)), map(str, along))
    axes.set_yticks(range(len(down)), map(str, down))
    axes.figure.colorbar(image, ax=axes, label=chart.label)


def _violin(axes: Axes, place: float, violin: Violin, style: Style) -> None:
    """Draw a distribution, its mean as a dot and its median as a bar."""
    counts = np.asarray(violin.counts, dtype=float)
    grid = (np.arange(len(counts)) + 0.5) / len(counts)
    density = np.exp(-0.5 * ((grid[:, None] - grid) / SMOOTH) ** 2) @ counts
    width = 0.4 * density / density.max()
    seen = width > 0.004
    axes.fill_betweenx(grid[seen], place - width[seen], place + width[seen], color=style.color, alpha=0.45, linewidth=0)
    axes.plot(place, violin.mean, "o", color="black", markersize=5, zorder=3)
    axes.plot(place, violin.median, "_", color="black", markersize=14, zorder=3)
