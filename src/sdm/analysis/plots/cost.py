"""What a token costs, in time and in memory, against the length of the context."""

from __future__ import annotations

from matplotlib.figure import Figure

from sdm.analysis.plots.curves import Curves, check_curves, draw_curves, places
from sdm.analysis.plots.style import doubling_axis, new_axes, new_panels, plain_log_axis

_CONTEXT = "context (tokens)"


def cost_figure(curves: Curves, y: str = "time per generated token (ms)") -> Figure:
    """One quantity against the context."""
    check_curves(curves)
    figure, axes = new_axes(_CONTEXT, y)
    draw_curves(axes, curves)
    doubling_axis(axes, places(curves))
    plain_log_axis(axes)
    axes.legend()
    return figure


def costs_figure(
    time: Curves,
    memory: Curves,
    time_label: str = "time per generated token (ms)",
    memory_label: str = "state behind the context (MB)",
) -> Figure:
    """Time and memory side by side."""
    figure, panels = new_panels(1, 2, (8.0, 3.8))
    for axes, curves, label in zip(panels, (time, memory), (time_label, memory_label), strict=True):
        check_curves(curves)
        draw_curves(axes, curves)
        doubling_axis(axes, places(curves))
        plain_log_axis(axes)
        axes.set(xlabel=_CONTEXT, ylabel=label)
        axes.legend(fontsize=8)
    return figure
