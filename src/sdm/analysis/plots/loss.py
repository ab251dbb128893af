"""The loss of runs while they are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from sdm.analysis.plots.style import new_axes, styles

Series = Mapping[str, Sequence[tuple[float, float]]]
"""By the name of the run: (step, loss)."""


def loss_figure(trained: Series, held_out: Series) -> Figure:
    """Of the batches, a thin line; of held-out ones, a strong line with markers."""
    names = list(dict.fromkeys((*trained, *held_out)))
    figure, axes = new_axes("step", "nats per token")
    for name, look in styles(names).items():
        if trained.get(name):
            axes.plot(*zip(*trained[name], strict=True), color=look.color, linewidth=0.8, alpha=0.6, label=name)
        if held_out.get(name):
            line: dict[str, Any] = {"color": look.color, "linestyle": look.line, "marker": look.marker, "markersize": 4}
            axes.plot(*zip(*held_out[name], strict=True), **line, label=f"{name}, held out")
    axes.legend()
    return figure
