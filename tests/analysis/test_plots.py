"""Figures show what they are given; an architecture has one colour everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

import sdm
from sdm.analysis import plots
from sdm.analysis.access import KeyUse, probe_access
from sdm.analysis.plots import Point
from sdm.analysis.plots.style import architecture
from sdm.analysis.scaling import fit_power_law

CURVES = {
    "SDM": [Point(64, 3.0, 2.9, 3.1), Point(128, 2.5, 2.4, 2.6), Point(2048, 2.0, 1.9, 2.1)],
    "GDN": [Point(64, 3.2), Point(128, 3.0), Point(2048, 2.9)],
}
SHARES = {name: [Point(one.x, one.y / 4, 0.4, 0.9) for one in points] for name, points in CURVES.items()}
STEPS = [
    {
        "step": step,
        **{f"memory/{name}_{use}": 0.5 for name in ("slots", "entropy") for use in ("written", "read")},
        **{f"memory/{gate}_{what}": 0.5 for gate in ("forget_gate", "input_gate") for what in ("min", "mean", "max")},
    }
    for step in (10, 20)
]


def uses() -> dict[str, dict[str, KeyUse]]:
    layer = sdm.SparseDeltaMemory(16, num_slots=16, num_writes=4, num_reads=6)
    probe = probe_access(layer, torch.randn(1, 60, 16))
    again = {side: KeyUse.from_description(use.describe()) for side, use in probe.sides.items()}
    return {"SDM": probe.sides, "SDM, read again": again}


def scaling() -> Figure:
    x = np.geomspace(1e15, 1e18, 5)
    y = 60 * x**-0.08 * [1, 1.01, 0.99, 1, 1.01]
    law = fit_power_law(x[:-1], y[:-1])
    runs, held_out = list(zip(x[:-1], y[:-1], strict=True)), [(x[-1], y[-1])]
    return plots.scaling_figure({"SDM": runs}, {"SDM": law}, {"SDM": held_out})


FIGURES: dict[str, Any] = {
    "scaling": scaling,
    "position": lambda: plots.position_figure(CURVES),
    "gain": lambda: plots.gain_figure(CURVES),
    "initial_state": lambda: plots.initial_state_figure(CURVES, CURVES),
    "recall": lambda: plots.recall_figure(SHARES, 128),
    "state_recall": lambda: plots.state_recall_figure(SHARES, 256),
    "cost": lambda: plots.cost_figure(CURVES),
    "costs": lambda: plots.costs_figure(CURVES, CURVES),
    "slots": lambda: plots.slots_figure({"SDM": CURVES["SDM"]}, {"GDN": Point(0, 2.9, 2.8, 3.0)}),
    "write_read": lambda: plots.write_read_figure({(32, 32): 2.5, (64, 128): Point(0, 2.4, 2.3, 2.5)}),
    "differences": lambda: plots.differences_figure(
        {"SDM - GDN": (-0.1, -0.2, -0.05), "one document": (0.1, None, None)}
    ),
    "cumulative_mass": lambda: plots.cumulative_mass_figure(uses()),
    "effective_keys": lambda: plots.effective_keys_figure(uses()),
    "utilisation": lambda: plots.utilisation_figure({"SDM": [{"step": 5, "loss": 1.0}, *STEPS]}),
    "state": lambda: plots.state_vs_flops(1),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_can_be_saved_and_says_what_is_on_its_axes(name: str, tmp_path: Path) -> None:
    figure = FIGURES[name]()
    assert isinstance(figure, Figure)
    for suffix in ("png", "svg"):
        path = plots.save(figure, tmp_path / "new" / f"{name}.{suffix}")
        assert path.stat().st_size > 3000
    shown = [axes for axes in figure.axes if axes.get_label() != "<colorbar>"]
    assert all(axes.get_xlabel() or axes.get_title() or len(axes.get_xticklabels()) for axes in shown)
    assert any(axes.get_ylabel() or axes.get_title() for axes in shown) or name == "differences"
    assert plt.get_fignums() == [], "nobody has to close it"


def test_curves_show_the_numbers() -> None:
    (axes,) = plots.position_figure(CURVES).axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    for name, points in CURVES.items():
        assert list(lines[name].get_xdata()) == [point.x for point in points]
        assert list(lines[name].get_ydata()) == [point.y for point in points]
    (band,) = axes.collections  # GDN has no intervals
    assert band.get_datalim(axes.transData).extents == pytest.approx([64, 1.9, 2048, 3.1])
    assert "95% interval" in axes.get_ylabel()


def test_shares_are_shown_in_percent() -> None:
    (axes,) = plots.recall_figure(SHARES, 128).axes
    line = next(line for line in axes.get_lines() if line.get_label() == "SDM")
    assert list(line.get_ydata()) == pytest.approx([75, 62.5, 50])
    assert "trained to K = 128" in [line.get_label() for line in axes.get_lines()]


def test_equal_states_are_marked() -> None:
    """Where two architectures have the same state, and only there."""
    curves = {"SDM": [Point(64, 0.5), Point(256, 1.0)], "SDM, null M0": [Point(256, 0.9)], "GDN": [Point(64, 0.6)]}
    (axes,) = plots.state_recall_figure(curves).axes
    marked = [
        line.get_xdata()[0]
        for line in axes.get_lines()
        if line.get_linestyle() == ":" and len(set(line.get_xdata())) == 1
    ]
    assert 64 in marked
    assert 256 not in [x for x in marked if x != 64]


def test_the_heat_map_has_its_numbers_in_place() -> None:
    axes = plots.write_read_figure({(32, 64): 2.5, (64, 128): Point(0, 2.4, 2.3, 2.5)}).axes[0]
    found = {text.get_position(): text.get_text() for text in axes.texts}
    assert found == {(0, 0): "2.5000", (1, 1): "2.4000\n± 0.1000"}
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["64", "128"]


def test_differences_that_may_be_none_are_grey() -> None:
    rows = {"a": (-0.1, -0.2, -0.05), "b": (0.1, -0.1, 0.3)}
    (axes,) = plots.differences_figure(rows).axes
    colors = [container.lines[0].get_color() for container in axes.containers]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["b", "a"], "the first stands above"
    assert colors[1] != colors[0] == plots.style.UNDECIDED


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
    looks = plots.styles(["GDN", "SDM", "SDM, null M0", "something", "else"])
    assert looks["SDM"].color == looks["SDM, null M0"].color == plots.COLORS["SDM"]
    assert looks["SDM"].line != looks["SDM, null M0"].line
    assert len({look.color for look in looks.values()}) == 4


def test_colours_differ_in_brightness_or_hue() -> None:
    """No two are alike to readers that see no difference of red and green: by what is left of blue and brightness."""
    left = [(0.5 * r + 0.5 * g, b) for r, g, b in map(to_rgb, plots.COLORS.values())]
    distances = [np.hypot(a[0] - b[0], a[1] - b[1]) for i, a in enumerate(left) for b in left[:i]]
    assert min(distances) > 0.15


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plots.position_figure({}),
        lambda: plots.recall_figure({"SDM": []}),
        lambda: plots.scaling_figure({}, {}),
        lambda: plots.write_read_figure({}),
        lambda: plots.differences_figure({}),
        lambda: plots.utilisation_figure({"GDN": [{"step": 1, "loss": 3.0}]}),
        lambda: plots.cumulative_mass_figure({"SDM": {}}),
    ],
)
def test_nothing_to_draw_is_an_error(draw: Any) -> None:
    with pytest.raises(ValueError, match=r"must have|has no"):
        draw()


def test_points_of_a_measurement() -> None:
    bins = [
        {"start": 0, "stop": 64, "nll": 3.0, "low": 2.9, "high": 3.1, "gain": 0.0, "gain_low": -0.1, "gain_high": 0.1},
        {"start": 64, "stop": 256, "nll": 2.0, "low": None, "high": None},
    ]
    assert plots.position_points(bins) == [Point(32, 3.0, 2.9, 3.1), Point(128, 2.0, None, None)]
    assert plots.position_points(bins, "gain") == [Point(32, 0.0, -0.1, 0.1)]
