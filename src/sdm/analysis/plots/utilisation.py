"""What the memory did during training: the paper's appendix, from the lines of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sdm.analysis.plots.style import Style, new_panels, percent_axis, styles

Metrics = Mapping[str, Sequence[Mapping[str, float]]]
"""By the name of the run, its lines (`Run.metrics()`); those without statistics of the memory are passed over."""


def utilisation_figure(metrics: Metrics) -> Figure:
    """Four panels against the step: forget gate and input gate (smallest, mean, largest), entropy of the accesses, and
    share of the slots in use."""
    series = {
        name: [line for line in lines if "memory/slots_written" in line] for name, lines in metrics.items() if lines
    }
    series = {name: lines for name, lines in series.items() if lines}
    if not series:
        raise ValueError("metrics has no line with statistics of a memory: is there an SDM layer in the run?")
    figure, panels = new_panels(2, 2, (8.0, 5.6), sharex=True)
    looks = styles(series)
    for name, lines in series.items():
        look = looks[name]
        _gate(panels[0], lines, "forget_gate", name, look)
        _gate(panels[1], lines, "input_gate", name, look)
        for axes, kind, scale in ((panels[2], "entropy", 1.0), (panels[3], "slots", 100.0)):
            _pair(axes, lines, kind, scale, name, look)
    titles = ("Forget gate exp(g)", "Input gate β", "Entropy of accesses / largest", "Slots in use")
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, fontsize=10)
        axes.legend(fontsize=7)
    for axes in panels[:3]:
        axes.set_ylim(-0.03, 1.03)
    percent_axis(panels[3])
    for axes in panels[2:]:
        axes.set_xlabel("step")
    return figure


def _gate(axes: Axes, lines: Sequence[Mapping[str, float]], gate: str, name: str, look: Style) -> None:
    steps = [line["step"] for line in lines]
    low, mean, high = ([line[f"memory/{gate}_{what}"] for line in lines] for what in ("min", "mean", "max"))
    axes.plot(steps, mean, color=look.color, linestyle=look.line, label=f"{name}, mean")
    axes.fill_between(steps, low, high, color=look.color, alpha=0.15, linewidth=0, label="min to max")


def _pair(axes: Axes, lines: Sequence[Mapping[str, float]], kind: str, scale: float, name: str, look: Style) -> None:
    for use, line in (("written", "-"), ("read", "--")):
        found = [(one["step"], scale * one[f"memory/{kind}_{use}"]) for one in lines if f"memory/{kind}_{use}" in one]
        axes.plot(*zip(*found, strict=True), color=look.color, linestyle=line, label=f"{name}, {use}")
