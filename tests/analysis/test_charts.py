"""Charts of the paper's figures: what they are built from is what they show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

import sdm
from sdm.analysis import charts
from sdm.analysis.draw import COLORS, architecture, draw, styles
from sdm.analysis.scaling import fit_power_law
from sdm.evaluation.memory_access import KeyUse, probe_access
from sdm.evaluation.position import position_points
from sdm.evaluation.probe import cumulative_mass_chart, effective_keys_chart
from sdm.evaluation.report import Chart, Grid, Point, Violins

CURVES = {
    "SDM": [Point(64, 3.0, 2.9, 3.1), Point(128, 2.5, 2.4, 2.6), Point(2048, 2.0, 1.9, 2.1)],
    "GDN": [Point(64, 3.2), Point(128, 3.0), Point(2048, 2.9)],
}


def line(step: int, share: float = 0.5) -> dict[str, float]:
    """A line of metrics with statistics of a memory."""
    return {
        "step": step,
        **{f"memory/{kind}_{side}": share for kind in ("slots", "entropy") for side in ("written", "read")},
        **{
            f"memory/{gate}_{end}": value
            for gate in ("forget_gate", "input_gate")
            for end, value in (("min", 0.1), ("mean", share), ("max", 0.9))
        },
    }


@pytest.fixture(scope="module")
def uses() -> dict[str, dict[str, KeyUse]]:
    layer = sdm.SparseDeltaMemory(16, num_slots=16, num_writes=4, num_reads=6)
    return {"SDM": probe_access(layer, torch.randn(1, 60, 16)).sides}


def test_positions_are_at_the_geometric_middle_of_their_ranges() -> None:
    bins = [
        {"start": 0, "stop": 64, "nll": 3.0, "low": 2.9, "high": 3.1, "gain": 0.0, "gain_low": -0.1, "gain_high": 0.1},
        {"start": 64, "stop": 256, "nll": 2.0, "low": None, "high": None},
    ]
    assert position_points(bins) == [Point(32, 3.0, 2.9, 3.1), Point(128, 2.0, None, None)]
    assert position_points(bins, "gain") == [Point(32, 0.0, -0.1, 0.1)]


def test_labels_say_where_bands_are_intervals() -> None:
    assert charts.position_chart(CURVES).y == "nats per token, with 95% interval"
    assert charts.position_chart({"GDN": CURVES["GDN"]}).y == "nats per token"
    assert [reference.at for reference in charts.gain_chart(CURVES).references] == [0]


def test_learned_and_null_states_of_one_architecture_share_its_colour() -> None:
    chart = charts.initial_state_chart(CURVES, {"SDM": CURVES["GDN"]})
    assert list(chart.curves) == ["SDM, learned M0", "SDM, null M0", "GDN, learned M0"]
    looks = styles(chart.curves)
    assert looks["SDM, learned M0"].color == looks["SDM, null M0"].color != looks["GDN, learned M0"].color


def test_equal_states_are_marked() -> None:
    """Where two architectures have the same state, and only there."""
    curves = {"SDM": [Point(64, 0.5), Point(256, 1.0)], "SDM, null M0": [Point(256, 0.9)], "GDN": [Point(64, 0.6)]}
    chart = charts.state_recall_chart(curves, 128)
    assert [(one.at, one.axis, one.label) for one in chart.references] == [(64, "x", "equal state")]
    assert chart.title.endswith("K = 128")
    assert [one.label for one in charts.recall_chart(curves, 128).references] == ["trained to K = 128"]


def test_times_start_at_zero() -> None:
    time, memory = charts.cost_chart(CURVES, CURVES).charts
    assert isinstance(time, Chart)
    assert isinstance(memory, Chart)
    assert time.y_scale == "zero"
    figure = draw(charts.cost_chart(CURVES, {"SDM": [Point(64, 1.0), Point(2048, 500.0)]}))
    assert figure.axes[0].get_ylim()[0] == 0
    assert figure.axes[1].get_yscale() == "log"


def test_models_without_slots_are_level_lines() -> None:
    chart = charts.slots_chart({"SDM": CURVES["SDM"]}, {"GDN": Point(0, 2.9, 2.8, 3.0)})
    (level,) = chart.references
    assert (level.at, level.low, level.high, level.model) == (2.9, 2.8, 3.0, "GDN")


def test_mass_and_effective_keys_of_both_sides(uses: dict[str, dict[str, KeyUse]]) -> None:
    write, read = cumulative_mass_chart(uses).charts
    assert isinstance(write, Chart)
    assert isinstance(read, Chart)
    assert list(read.curves) == ["SDM, k = 6", "all keys alike"]
    points = write.curves["SDM, k = 4"]
    assert [point.x for point in points] == [1, 2, 3, 4]
    assert [point.y for point in points] == pytest.approx(uses["SDM"]["write"].mass.tolist())
    assert points[-1].y == pytest.approx(1)
    assert read.curves["all keys alike"] == [Point(1, 1 / 6), Point(6, 1)]
    violins = effective_keys_chart(uses).charts[1]
    assert isinstance(violins, Violins)
    (violin,) = violins.violins.values()
    assert (violin.mean, violin.median) == (uses["SDM"]["read"].effective_mean, uses["SDM"]["read"].effective_median)
    assert sum(violin.counts) == 60
    assert len(draw(effective_keys_chart(uses)).axes) == 2


def test_utilisation_has_a_curve_for_each_run_in_each_panel() -> None:
    grid = charts.utilisation_chart(
        {"SDM": [{"step": 5, "loss": 1.0}, line(10), line(20)], "SDM, plain": [line(10, 0.4)]}
    )
    assert len(grid.charts) == 6
    for panel in grid.charts:
        assert isinstance(panel, Chart)
        assert [point.x for point in panel.curves["SDM"]] == [10, 20]
        assert [point.y for point in panel.curves["SDM, plain"]] == [0.4]
    gate = grid.charts[0]
    assert isinstance(gate, Chart)
    assert gate.curves["SDM"][0] == Point(10, 0.5, 0.1, 0.9)
    figure = draw(grid)
    looks = {(one.get_linestyle(), one.get_marker()) for one in figure.axes[1].get_lines()}
    assert len(looks) == 2, "every run has a style of its own"
    assert len(figure.legends[0].get_texts()) == 2


def test_loss_of_batches_and_of_held_out_ones_share_a_colour() -> None:
    chart = charts.loss_chart({"a": [(1, 3.0), (2, 2.0)]}, {"a": [(2, 2.5)]})
    assert {name: [point.y for point in points] for name, points in chart.curves.items()} == {
        "a": [3.0, 2.0],
        "a, held out": [2.5],
    }
    assert (chart.looks["a"].kind, chart.looks["a, held out"].model) == ("thin", "a")


def test_a_law_is_a_line_through_its_runs() -> None:
    x = np.geomspace(1e15, 1e18, 5)
    y = 60 * x**-0.08 * [1, 1.01, 0.99, 1, 1.01]
    law = fit_power_law(x[:-1], y[:-1])
    runs, held_out = list(zip(x[:-1], y[:-1], strict=True)), [(x[-1], y[-1])]
    chart = charts.scaling_chart({"SDM": runs}, {"SDM": law}, {"SDM": held_out})
    label, fitted, left_out = chart.curves
    assert (fitted, left_out) == ("SDM", "SDM, held out")
    assert label.startswith("SDM: ")
    assert "$C^{-0.0" in label
    assert [(point.x, point.y) for point in chart.curves["SDM"]] == runs
    first, last = chart.curves[label][0], chart.curves[label][-1]
    assert (first.x, last.x) == pytest.approx((x[0] / 1.3, x[-1] * 1.3))
    assert first.y == pytest.approx(law(first.x))
    assert last.low is not None
    assert last.high is not None
    assert last.low < last.y < last.high
    axes = draw(chart).axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


def test_attention_buys_state_with_flops_and_sdm_without() -> None:
    attention, gdn, memory = charts.state_vs_flops(1).curves.values()
    assert attention[-1].x > 10 * attention[0].x
    assert gdn[-1].x > gdn[0].x
    assert memory[-1].y > 8 * memory[0].y
    assert memory[-1].x < 1.2 * memory[0].x


def test_an_architecture_has_one_colour() -> None:
    for name, kind in (
        ("SDM", "SDM"),
        ("sdm, N = 64", "SDM"),
        ("GDN, best of 5", "GDN"),
        ("full_attention", "full attention"),
        ("FullAttn", "full attention"),
        ("mixed FA/SDM", "mixed"),
        ("full_attention+sdm", "mixed"),
        ("Mamba2", "Mamba2"),
        ("W64_R32", None),
    ):
        assert architecture(name) == kind
    looks = styles(["GDN", "SDM", "SDM, null M0", "something", "else"])
    assert looks["SDM"].color == looks["SDM, null M0"].color == COLORS["SDM"]
    assert looks["SDM"].line != looks["SDM, null M0"].line
    assert len({look.color for look in looks.values()}) == 4
    many = styles([f"model {number}" for number in range(20)])
    assert len(set(many.values())) == 20


def test_colours_differ_in_brightness_or_hue() -> None:
    """No two are alike to readers that see no difference of red and green: by what is left of blue and brightness."""
    left = [(0.5 * r + 0.5 * g, b) for r, g, b in map(to_rgb, COLORS.values())]
    distances = [np.hypot(a[0] - b[0], a[1] - b[1]) for i, a in enumerate(left) for b in left[:i]]
    assert min(distances) > 0.15


@pytest.mark.parametrize(
    "build",
    [
        lambda: charts.scaling_chart({}, {}),
        lambda: charts.utilisation_chart({"GDN": [{"step": 1, "loss": 3.0}]}),
        lambda: cumulative_mass_chart({}),
        lambda: draw(charts.recall_chart({"SDM": []})),
    ],
)
def test_nothing_to_show_is_an_error(build: Any) -> None:
    with pytest.raises(ValueError, match=r"must have|has no"):
        build()


def test_grids_have_the_data_of_all_their_charts() -> None:
    grid: Grid = charts.cost_chart(CURVES, CURVES)
    assert grid.columns == ("chart", "model", "x", "y", "low", "high")
    assert len(grid.rows()) == 12
    assert grid.rows()[0] == ("Time", "SDM", 64, 3.0, 2.9, 3.1)
