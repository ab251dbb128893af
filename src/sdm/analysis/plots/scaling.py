"""Scaling laws: loss against compute, on logarithmic axes, with the level that was held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from sdm.analysis.plots.style import new_axes, styles
from sdm.analysis.scaling import PowerLaw

Runs = Mapping[str, Sequence[tuple[float, float]]]


def scaling_figure(
    runs: Runs, laws: Mapping[str, PowerLaw], held_out: Runs | None = None, y: str = "loss (nats per token)"
) -> Figure:
    """Runs as (FLOPs, loss), the law of each architecture with the 95% interval of a new level, and as hollow diamonds
    the runs that no law has seen."""
    held_out = held_out or {}
    computes = [x for found in (runs, held_out) for points in found.values() for x, _ in points]
    if not computes:
        raise ValueError("runs must have at least one (FLOPs, loss)")
    figure, axes = new_axes("training compute (FLOPs)", y)
    line = np.geomspace(min(computes) / 1.3, max(computes) * 1.3, 100)
    looks = styles(dict.fromkeys((*runs, *laws, *held_out)))
    for name, look in looks.items():
        if name in laws:
            law, prediction = laws[name], laws[name].predict(line)
            formula = f"{name}: {_formula(law)}, $R^2$ = {_r_squared(law.r_squared)}"
            axes.plot(line, prediction.value, color=look.color, linestyle=look.line, label=formula)
            axes.fill_between(line, prediction.low, prediction.high, color=look.color, alpha=0.13, linewidth=0)
        for points, hollow in ((runs.get(name, ()), False), (held_out.get(name, ()), True)):
            x, losses = [point[0] for point in points], [point[1] for point in points]
            face = "white" if hollow else look.color
            marker, size = ("D", 6) if hollow else (look.marker, 4)
            label = None if hollow or name in laws else name
            axes.plot(x, losses, marker, markersize=size, markerfacecolor=face, color=look.color, zorder=3, label=label)
    losses = [loss for found in (runs, held_out) for points in found.values() for _, loss in points]
    axes.set(xscale="log", yscale="log", ylim=(min(losses) / 1.06, max(losses) * 1.06))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    if max(computes) < 100 * min(computes):  # powers of ten alone would be too few
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    if any(held_out.values()):
        axes.plot([], [], "D", markersize=6, markerfacecolor="white", color="black", label="held out")
    axes.fill_between([], [], [], color="black", alpha=0.13, linewidth=0, label="95% interval of a new level")
    axes.legend(fontsize=8)
    return figure


def _formula(law: PowerLaw) -> str:
    constant = f"{law.e:.2f} + " if law.form == "irreducible" else ""
    return f"{constant}{_number(law.a)} $C^{{{-law.b:.3f}}}$"


def _number(value: float) -> str:
    if 0.01 <= value < 10_000:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa} $\\cdot 10^{{{int(exponent)}}}$"


def _r_squared(value: float) -> str:
    """With digits enough to tell 0.9996 from 1."""
    return f"{value:.3f}" if value < 0.9995 else f"{value:.5f}"
