"""Figures of trained runs, from plain numbers by the name of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sdm.analysis.plots.style import COLORS as ARCHITECTURES
from sdm.analysis.plots.style import OTHERS, new_axes, save

__all__ = ["position_figure", "recall_figure", "save", "slot_use_figure"]

COLORS = (*ARCHITECTURES.values(), *OTHERS)


def recall_figure(accuracy: Mapping[str, Mapping[int, float]], trained_to: int) -> Figure:
    """Accuracy of recall against the number of pairs."""
    figure, axes = new_axes("pairs to keep apart (K)", "accuracy of recall")
    for place, (color, (name, points)) in enumerate(zip(COLORS, accuracy.items(), strict=False)):
        # The first model is drawn over the others, which may lie where it does.
        values = [100 * value for value in points.values()]
        axes.plot(list(points), values, "o-", color=color, label=name, zorder=3 - 0.1 * place)
    axes.axvline(trained_to, color="black", linewidth=0.8, linestyle=":", label=f"trained to K = {trained_to}")
    _doubling(axes, sorted({pairs for points in accuracy.values() for pairs in points}))
    axes.set_ylim(0, 103)
    axes.yaxis.set_major_formatter("{x:.0f}%")
    axes.legend()
    return figure


def position_figure(bins: Mapping[str, Sequence[tuple[int, int, float, float]]]) -> Figure:
    """Negative log-likelihood against position; each bin is (start, stop, mean, standard error)."""
    figure, axes = new_axes("position in the document (tokens)", "nats per token, held-out code (± standard error)")
    for color, (name, rows) in zip(COLORS, bins.items(), strict=False):
        middle = [(start + stop) / 2 for start, stop, _, _ in rows]
        means, errors = [row[2] for row in rows], [row[3] for row in rows]
        axes.errorbar(middle, means, errors, fmt="o-", color=color, capsize=3, label=name)
    _doubling(axes, sorted({stop for rows in bins.values() for _, stop, _, _ in rows}))
    axes.legend()
    return figure


def slot_use_figure(series: Mapping[str, Sequence[tuple[int, float, float]]]) -> Figure:
    """Share of slots written and read in a batch during training; each point is (step, written, read)."""
    figure, axes = new_axes("step", "slots used in a batch")
    for color, (name, points) in zip((COLORS[0], *COLORS[3:]), series.items(), strict=False):
        steps = [point[0] for point in points]
        axes.plot(steps, [100 * point[1] for point in points], "-", color=color, label=f"{name}, written")
        axes.plot(steps, [100 * point[2] for point in points], "--", color=color, label=f"{name}, read")
    axes.set_ylim(0, 103)
    axes.yaxis.set_major_formatter("{x:.0f}%")
    axes.legend()
    return figure


def _doubling(axes: Axes, ticks: Sequence[int]) -> None:
    """A logarithmic x axis with these numbers written out."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
