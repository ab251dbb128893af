"""Figures of charts, for callers that are not on `sdm.analysis.charts` yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from sdm.analysis import charts
from sdm.analysis.charts import position_points
from sdm.analysis.draw import draw, save
from sdm.evaluation import probe
from sdm.evaluation.report import Point

__all__ = ["Point", "position_points", "save"]


def position_figure(curves: charts.Curves, y: str = charts.NATS) -> Figure:
    return draw(charts.position_chart(curves, y, title=""))


def gain_figure(curves: charts.Curves) -> Figure:
    return draw(charts.gain_chart(curves))


def initial_state_figure(learned: charts.Curves, null: charts.Curves) -> Figure:
    return draw(charts.initial_state_chart(learned, null))


def recall_figure(curves: charts.Curves, trained_to: int | None = None) -> Figure:
    return draw(charts.recall_chart(curves, trained_to))


def state_recall_figure(curves: charts.Curves, pairs: int | None = None) -> Figure:
    return draw(charts.state_recall_chart(curves, pairs))


def costs_figure(time: charts.Curves, memory: charts.Curves) -> Figure:
    return draw(charts.cost_chart(time, memory))


def slots_figure(curves: charts.Curves, baselines: Mapping[str, Point] | None = None) -> Figure:
    return draw(charts.slots_chart(curves, baselines))


def write_read_figure(cells: Mapping[tuple[int, int], Point]) -> Figure:
    return draw(charts.write_read_chart(cells))


def differences_figure(differences: Mapping[str, tuple[float, float | None, float | None]], label: str) -> Figure:
    return draw(charts.differences_chart({name: Point(0, *values) for name, values in differences.items()}, label))


def cumulative_mass_figure(uses: probe.Uses) -> Figure:
    return draw(probe.cumulative_mass_chart(uses))


def effective_keys_figure(uses: probe.Uses) -> Figure:
    return draw(probe.effective_keys_chart(uses))


def utilisation_figure(metrics: charts.Metrics) -> Figure:
    return draw(charts.utilisation_chart(metrics))


def scaling_figure(runs: charts.Series, laws: Mapping[str, Any], held_out: charts.Series | None = None) -> Figure:
    return draw(charts.scaling_chart(runs, laws, held_out))
