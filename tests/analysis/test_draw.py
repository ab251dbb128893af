"""Charts are drawn as their data says: curves, bands, axes, ticks, legends and titles, on the artists themselves."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from sdm.analysis.draw import COLORS, UNDECIDED, draw, render, save, wrap
from sdm.evaluation.report import AnyChart, Chart, Grid, HeatMap, Look, Point, Reference, Rows, Violin, Violins

CURVES = {
    "SDM": [Point(64, 3.0, 2.9, 3.1), Point(128, 2.5, 2.4, 2.6), Point(2048, 2.0, 1.9, 2.1)],
    "GDN": [Point(64, 3.2), Point(128, 3.0), Point(2048, 2.9)],
}
LONG = "Growth of memory while reading and generating, of every model: median, and range of the repeats"


def chart(curves: Any = CURVES, **fields: Any) -> Chart:
    return Chart(**({"name": "one", "title": "Title", "x": "tokens", "y": "nats per token", "curves": curves} | fields))


def only_axes(figure: Figure) -> Axes:
    (axes,) = figure.axes
    return axes


def drawn(figure: Figure) -> Figure:
    """Lay a figure out, so that its artists have their places."""
    figure.canvas.draw()
    return figure


def lines(axes: Axes) -> list[Line2D]:
    return [line for line in axes.get_lines() if len(line.get_xdata()) > 2]


def inside(figure: Figure, artist: Any) -> bool:
    box, page = artist.get_window_extent(), figure.bbox
    return bool(box.x0 >= page.x0 and box.x1 <= page.x1 and box.y0 >= page.y0 and box.y1 <= page.y1)


def test_curves_show_the_numbers() -> None:
    axes = only_axes(draw(chart()))
    for line, points in zip(lines(axes), CURVES.values(), strict=True):
        assert list(line.get_xdata()) == [point.x for point in points]
        assert list(line.get_ydata()) == [point.y for point in points]
    (band,) = axes.collections  # GDN has no intervals
    assert band.get_datalim(axes.transData).extents == pytest.approx([64, 1.9, 2048, 3.1])
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("tokens", "nats per token", "Title")


def test_models_differ_by_colour_line_or_marker() -> None:
    names = ["SDM", "SDM, plain", "SDM, null M0", "SDM, written", "GDN", "GDN, plain", "other"]
    axes = only_axes(draw(chart(dict.fromkeys(names, CURVES["GDN"]))))
    looks = {(to_hex(line.get_color()), line.get_linestyle(), line.get_marker()) for line in lines(axes)}
    assert len(looks) == len(names)
    assert {to_hex(line.get_color()) for line in lines(axes)[:4]} == {COLORS["SDM"].lower()}


@pytest.mark.parametrize("count", [2, 5, 9])
def test_the_legend_covers_no_data_and_lists_every_curve(count: int) -> None:
    curves = {f"SDM, a variant with a long name, number {n}": CURVES["GDN"] for n in range(count)}
    figure = drawn(draw(chart(curves)))
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(curves)
    assert inside(figure, legend)
    box = legend.get_window_extent()
    assert not box.overlaps(only_axes(figure).get_tightbbox()), "below the axis and its labels"
    marks = [(handle.get_linestyle(), handle.get_marker()) for handle in legend.get_lines()]
    assert marks == [(line.get_linestyle(), line.get_marker()) for line in lines(only_axes(figure))]


def test_a_single_curve_needs_no_legend() -> None:
    assert not draw(chart({"SDM": CURVES["SDM"]})).legends


@pytest.mark.parametrize("grid", [False, True])
def test_long_titles_and_labels_are_wrapped(grid: bool) -> None:
    one = chart(title=LONG, x=LONG, y="accuracy of recall, with 95% interval" if grid else LONG)
    figure = drawn(draw(Grid("grid", LONG + LONG, [one] * 4, width=4) if grid else one))
    for axes in figure.axes:
        assert axes.title.get_text().count("\n") >= 1
        assert axes.title.get_text().replace("\n", " ") == LONG
        assert inside(figure, axes.title)
        for label in (axes.xaxis.label, axes.yaxis.label):
            assert not label.get_text() or inside(figure, label)
    if grid:
        assert all(axes.get_window_extent().height > 100 for axes in figure.axes), "room for the curves is left"
        boxes = [axes.title.get_window_extent() for axes in figure.axes]
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
        assert figure.get_suptitle().count("\n") >= 1


def test_words_longer_than_a_line_stay_whole_and_formulas_too() -> None:
    assert wrap("a " + "b" * 90, 1.0) == "a\n" + "b" * 90
    assert wrap("x $C^{-0.08}$ and many more words that follow it here", 1.0).count("\n") == 0
    assert wrap("kept\nlines", 5.0) == "kept\nlines"


def test_small_ratios_look_small_on_time_axes() -> None:
    """1.5 to 2.2 ms from zero, not as a cliff on a logarithmic axis."""
    times = {"SDM": [Point(1024, 1.5), Point(8192, 1.6)], "full attention": [Point(1024, 1.5), Point(8192, 2.2)]}
    for scale in ("zero", "auto"):
        axes = only_axes(draw(chart(times, y_scale=scale, log_x=True)))
        assert axes.get_yscale() == "linear"
        assert axes.get_ylim()[0] == 0
    wide = {"SDM": [Point(1024, 1.5), Point(8192, 150.0)]}
    assert only_axes(draw(chart(wide, y_scale="auto"))).get_yscale() == "log"
    axes = only_axes(draw(chart(wide, y_scale="zero")))
    assert (axes.get_yscale(), axes.get_ylim()[0]) == ("linear", 0)
    falling = {"SDM": [Point(1, -1.0, -2.0, 0.5), Point(2, 3.0)]}
    assert only_axes(draw(chart(falling, y_scale="zero"))).get_ylim()[0] < -1.9, "nothing is cut off"


@pytest.mark.parametrize("x", [range(1, 5), range(0, 512, 16)])
def test_whole_numbers_have_whole_ticks(x: range) -> None:
    figure = drawn(draw(chart({"SDM": [Point(place, place % 3) for place in x]})))
    axes = only_axes(figure)
    for ticks in (axes.get_xticks(), axes.get_yticks()):
        assert np.array_equal(ticks, np.round(ticks))
        assert len(ticks) >= 3
    between = only_axes(drawn(draw(chart({"SDM": [Point(1, 0.5), Point(2, 1.5)]}))))
    assert not np.array_equal(between.get_yticks(), np.round(between.get_yticks()))


def test_logarithmic_axes_show_the_places_that_were_measured() -> None:
    axes = only_axes(draw(chart(log_x=True)))
    assert axes.get_xscale() == "log"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["64", "128", "2k"]
    near = {"SDM": [Point(x, 1.0) for x in (1000, 1001, 1024, 4096)]}
    figure = drawn(draw(chart(near, log_x=True)))
    boxes = [tick.get_window_extent() for tick in only_axes(figure).get_xticklabels()]
    assert len(boxes) == 2
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    large = only_axes(draw(chart({"SDM": [Point(1e15, 3.0), Point(1e18, 2.0)]}, log_x=True, y_scale="log")))
    assert set(large.get_xticks()) >= {1e15, 1e16, 1e17, 1e18}


def test_proportions_are_shown_in_percent() -> None:
    shares = {"SDM": [Point(64, 0.75, 0.5, 1.0), Point(128, 0.5, 0.25, 0.75)]}
    axes = only_axes(draw(chart(shares, percent=True)))
    assert list(axes.get_lines()[0].get_ydata()) == [75, 50]
    assert axes.collections[0].get_datalim(axes.transData).extents == pytest.approx([64, 25, 128, 100])
    assert axes.get_ylim() == (0, 103)
    assert axes.yaxis.get_major_formatter()(50) == "50%"


def test_kinds_of_curves() -> None:
    looks = {
        "raw": Look("SDM", "thin"),
        "law": Look("SDM", "line"),
        "runs": Look("SDM", "points", legend=False),
        "held out": Look("SDM", "hollow"),
        "level": Look(kind="reference"),
    }
    figure = draw(chart(dict.fromkeys(("SDM", *looks), CURVES["GDN"]), looks=looks))
    whole, raw, law, runs, hollow, reference = lines(only_axes(figure))
    assert {to_hex(line.get_color()) for line in (whole, raw, law, runs, hollow)} == {COLORS["SDM"].lower()}
    assert raw.get_linewidth() < whole.get_linewidth()
    assert (law.get_marker(), runs.get_linestyle(), hollow.get_linestyle()) == ("None", "None", "None")
    assert hollow.get_markerfacecolor() == "white"
    assert to_hex(reference.get_color()) == "#000000"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["SDM", "raw", "law", "held out", "level"]


def test_reference_lines() -> None:
    level = Reference(2.9, "GDN", "y", "GDN", 2.8, 3.0)
    references = (Reference(0.0), Reference(128, "trained to 128", "x"), level)
    figure = draw(chart({"SDM": CURVES["SDM"]}, references=references))
    axes = only_axes(figure)
    zero, trained, baseline = [line for line in axes.get_lines() if len(line.get_xdata()) == 2]
    assert (list(zero.get_ydata()), list(trained.get_xdata())) == ([0, 0], [128, 128])
    assert to_hex(baseline.get_color()) == COLORS["GDN"].lower()
    (span,) = axes.patches
    assert (span.get_y(), span.get_height()) == pytest.approx((2.8, 0.2))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["SDM", "trained to 128", "GDN"]


def test_a_lone_interval_is_a_bar_and_long_curves_have_few_markers() -> None:
    axes = only_axes(draw(chart({"SDM": [Point(64, 3.0, 2.9, 3.1)]})))
    (container,) = axes.containers
    assert container.lines[2][0].get_segments()[0][:, 1] == pytest.approx([2.9, 3.1])
    (line,) = lines(only_axes(draw(chart({"SDM": [Point(step, 1.0) for step in range(600)]}))))
    assert line.get_markevery() == 50


def test_a_grid_has_one_legend_and_the_same_style_everywhere() -> None:
    one = chart({"SDM, plain": CURVES["SDM"]}, title="one")
    both = chart(title="both")
    figure = drawn(draw(Grid("grid", "Grid", [both, one, both], width=2)))
    shown = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title() for axes in shown] == ["both", "one", "both"]
    assert len(figure.axes) == 4, "a place is left empty"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["SDM", "GDN", "SDM, plain"]
    first, last = (lines(axes)[0] for axes in (shown[0], shown[2]))
    (plain,) = lines(shown[1])
    assert first.get_linestyle() == last.get_linestyle() != plain.get_linestyle()
    assert [bool(axes.get_ylabel()) for axes in shown] == [True, False, True]
    assert [bool(axes.get_xlabel()) for axes in shown] == [False, True, True], "below is nothing, or an empty place"
    assert shown[0].get_ylim() == shown[1].get_ylim()
    apart = draw(
        Grid("grid", "", [both, chart({"GDN": [Point(1, 99.0), Point(2, 98.0)]})], share_x=False, share_y=False)
    )
    assert apart.axes[0].get_ylim()[1] < 4
    assert all(axes.get_ylabel() for axes in apart.axes)


def test_rows_that_may_be_zero_are_grey() -> None:
    values = {"first": Point(0, -0.1, -0.2, -0.05), "second": Point(0, 0.1, -0.1, 0.3), "one document": Point(0, 0.1)}
    axes = only_axes(draw(Rows("differences", "", "difference", values)))
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["one document", "second", "first"], "top down"
    colors = [container.lines[0].get_color() for container in axes.containers]
    assert colors == [COLORS["SDM"], UNDECIDED, COLORS["SDM"]]
    assert axes.containers[2].lines[2][0].get_segments()[0][:, 0] == pytest.approx([-0.2, -0.05])


def test_a_heat_map_has_its_numbers_in_place() -> None:
    cells = {(32, 64): Point(0, 2.5), (64, 128): Point(0, 2.4, 2.3, 2.5)}
    written = {(0, 0): "2.5000", (1, 1): "2.4000\n± 0.1000"}
    axes = draw(HeatMap("grid", "", "reads", "writes", "nats", cells)).axes[0]
    assert {text.get_position(): text.get_text() for text in axes.texts} == written
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["64", "128"]
    image = axes.get_images()[0].get_array()
    assert image[0, 0] == 2.5
    assert np.isnan(np.ma.filled(image, np.nan)[0, 1]), "not measured"


def test_violins_are_widest_where_most_are() -> None:
    counts = [0] * 100
    counts[80], counts[20] = 90, 10
    axes = only_axes(draw(Violins("keys", "Keys", "u", {"SDM": Violin(counts, 0.75, 0.805)})))
    (body,) = axes.collections
    outline = body.get_paths()[0].vertices
    assert outline[outline[:, 0].argmax(), 1] == pytest.approx(0.805, abs=0.01)
    mean, median = axes.get_lines()
    assert (mean.get_ydata()[0], median.get_ydata()[0]) == (0.75, 0.805)


CHARTS: dict[str, AnyChart] = {
    "chart": chart(),
    "grid": Grid("grid", "Grid", [chart(), chart()]),
    "rows": Rows("rows", "", "difference", {"a": Point(0, 1.0, 0.5, 1.5)}),
    "heat": HeatMap("heat", "", "reads", "writes", "nats", {(1, 2): Point(0, 1.0)}),
    "violins": Violins("violins", "", "u", {"SDM": Violin([1, 2, 3], 0.6, 0.7)}),
}


@pytest.mark.parametrize("name", CHARTS)
def test_files_are_the_same_every_time_and_no_figure_stays_open(name: str, tmp_path: Path) -> None:
    path = save(draw(CHARTS[name]), tmp_path / "new" / "one.png")
    with Image.open(path) as image:
        assert image.format == "PNG"
        dark = (np.asarray(image.convert("L")) < 128).mean()
    assert 0.001 < dark < 0.9, "ink on paper"
    assert path.read_bytes() == render(draw(CHARTS[name]), "png")
    assert render(draw(CHARTS[name]), "svg") == render(draw(CHARTS[name]), "svg")
    assert b"<svg" in render(draw(CHARTS[name]), "svg")
    assert plt.get_fignums() == []
    columns, rows = CHARTS[name].columns, CHARTS[name].rows()
    assert rows
    assert all(len(row) == len(columns) for row in rows)
    assert CHARTS[name].in_words().endswith(".")


def test_pixels_of_a_file_are_those_of_its_figure() -> None:
    figure = draw(chart())
    with Image.open(io.BytesIO(render(figure, "png", dpi=50))) as image:
        assert image.size == tuple((figure.get_size_inches() * 50).round().astype(int))


def test_nothing_to_draw_is_an_error() -> None:
    for empty in (chart({}), chart({"SDM": []}), Rows("r", "", "x", {}), Grid("g", "", [chart({})])):
        with pytest.raises(ValueError, match="must have at least one point to draw"):
            draw(empty)


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(IsADirectoryError, match="is a folder"):
        save(draw(chart()), tmp_path / "folder.png")
    with pytest.raises(ValueError, match=r"the suffix must be one of \.svg, \.png, \.pdf, got 'one\.txt'"):
        save(draw(chart()), tmp_path / "one.txt")
