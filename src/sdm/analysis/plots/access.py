"""How the keys of a memory are used: the paper's cumulative mass and effective keys."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sdm.analysis.access import SIDES, KeyUse
from sdm.analysis.plots.style import Style, new_panels, percent_axis, styles

Uses = Mapping[str, Mapping[str, KeyUse]]
"""By the name of the model, its "write" and its "read"."""
_TITLES = {"write": "Write keys", "read": "Read keys"}
_SMOOTH = 0.012  # width of the kernel of a violin, as a share of the scale
_PANELS = (8.0, 3.8)


def cumulative_mass_figure(uses: Uses) -> Figure:
    """C(m), the mass of the m heaviest keys: mean over tokens, and the range from the 10% to the 90% quantile."""
    _check(uses)
    figure, panels = new_panels(1, 2, _PANELS, sharey=True)
    looks = styles(uses)
    for axes, side in zip(panels, SIDES, strict=True):
        for name, use in uses.items():
            one, look = use[side], looks[name]
            m = np.arange(1, one.keys + 1)
            axes.plot(m, 100 * one.mass, color=look.color, linestyle=look.line, label=f"{name}, k = {one.keys}")
            axes.fill_between(m, 100 * one.mass_low, 100 * one.mass_high, color=look.color, alpha=0.2, linewidth=0)
        most = max(use[side].keys for use in uses.values())
        axes.plot([1, most], [100 / most, 100], color="black", linewidth=0.8, linestyle=":", label="all alike")
        axes.set(title=_TITLES[side], xlabel="m heaviest keys of a token")
        axes.legend(loc="lower right", fontsize=8)
    panels[0].set_ylabel("cumulative mass C(m), p10 to p90")
    percent_axis(panels[0])
    return figure


def effective_keys_figure(uses: Uses) -> Figure:
    """u(p), the effective keys of a token as a share of k: a violin of all tokens, heads and layers; a dot is the mean,
    a bar the median."""
    _check(uses)
    figure, panels = new_panels(1, 2, (max(_PANELS[0], 1.1 * len(uses) + 5), _PANELS[1]), sharey=True)
    looks = styles(uses)
    for axes, side in zip(panels, SIDES, strict=True):
        for place, (name, use) in enumerate(uses.items()):
            _violin(axes, place, use[side], looks[name])
        names = [f"{name}\nk = {use[side].keys}" for name, use in uses.items()]
        axes.set_xticks(range(len(uses)), names, fontsize=8, rotation=30 if len(uses) > 4 else 0)
        axes.set(title=_TITLES[side], xlim=(-0.6, len(uses) - 0.4))
    panels[0].set_ylabel("effective keys / k of a token\n(dot: mean, bar: median)")
    panels[0].set_ylim(0, 1.03)
    return figure


def _violin(axes: Axes, place: float, use: KeyUse, look: Style) -> None:
    counts = use.effective_counts.astype(float)
    grid = (np.arange(len(counts)) + 0.5) / len(counts)
    kernel = np.exp(-0.5 * ((grid[:, None] - grid) / _SMOOTH) ** 2)
    density = kernel @ counts
    width = 0.4 * density / density.max()
    seen = width > 0.004
    axes.fill_betweenx(grid[seen], place - width[seen], place + width[seen], color=look.color, alpha=0.45, linewidth=0)
    axes.plot(place, use.effective_mean, "o", color="black", markersize=5, zorder=3)
    axes.plot(place, use.effective_median, "_", color="black", markersize=14, zorder=3)


def _check(uses: Uses) -> None:
    if not uses:
        raise ValueError("uses must have at least one model")
    for name, use in uses.items():
        for side in SIDES:
            if side not in use:
                raise ValueError(f'uses[{name!r}] must have "write" and "read", got {", ".join(use) or "nothing"}')
