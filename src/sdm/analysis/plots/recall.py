"""Accuracy of recall: against the number of pairs, and against the size of the state at equal cost."""

from __future__ import annotations

from matplotlib.figure import Figure

from sdm.analysis.plots.curves import Curves, check_curves, draw_curves, has_intervals, places
from sdm.analysis.plots.style import architecture, doubling_axis, new_axes, percent_axis

_ACCURACY = "accuracy of recall"


def recall_figure(curves: Curves, trained_to: int | None = None) -> Figure:
    """Accuracy (a share of one) against the number of pairs K."""
    check_curves(curves)
    figure, axes = new_axes("pairs to keep apart (K)", _label(curves))
    draw_curves(axes, curves, scale=100)
    if trained_to is not None:
        axes.axvline(trained_to, color="black", linewidth=0.8, linestyle=":", label=f"trained to K = {trained_to}")
    doubling_axis(axes, places(curves))
    percent_axis(axes)
    axes.legend()
    return figure


def state_recall_figure(curves: Curves, pairs: int | None = None) -> Figure:
    """Accuracy (a share of one) against the numbers that the state holds. Sizes that several architectures have are
    marked: there they are compared at equal state."""
    check_curves(curves)
    figure, axes = new_axes("state (numbers kept behind the context)", _label(curves))
    draw_curves(axes, curves, scale=100)
    kinds: dict[float, set[str]] = {}
    for name, points in curves.items():
        for point in points:
            kinds.setdefault(point.x, set()).add(architecture(name) or name)
    shared = sorted(x for x, found in kinds.items() if len(found) > 1)
    for place, x in enumerate(shared):
        axes.axvline(x, color="black", linewidth=0.8, linestyle=":", label=None if place else "equal state")
    doubling_axis(axes, places(curves))
    percent_axis(axes)
    axes.tick_params(axis="x", labelrotation=30 if len(places(curves)) > 6 else 0)
    if pairs is not None:
        axes.set_title(f"K = {pairs}")
    axes.legend()
    return figure


def _label(curves: Curves) -> str:
    return f"{_ACCURACY}, with 95% interval" if has_intervals(curves) else _ACCURACY
