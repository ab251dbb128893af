"""State against FLOPs: the paper's first figure, from our own formulas."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from sdm.analysis.plots.style import COLORS, new_axes, save
from sdm.models import SDMConfig, cost, ladder
from sdm.models.layer_cost import LayerCost
from sdm.models.layer_types import LAYER_TYPES

CONTEXTS = [2**exponent for exponent in range(10, 21)]


def state_vs_flops(level: int = 8) -> Figure:
    """State size against FLOPs per token of one global layer: the paper's first figure.

    Attention buys state with context, GDN with wider keys, both in FLOPs; SDM with fewer heads, at the same FLOPs.
    """
    config = ladder(level)
    figure, axes = new_axes("FLOPs per token", "state (elements)")

    attention = _global_cost(ladder(level, "full_attention"))
    points = [(attention.flops(context).total, attention.state_elements(context)) for context in CONTEXTS]
    axes.plot(*zip(*points, strict=True), "o-", color=COLORS["full attention"], label="full attention, 1k to 1M tokens")

    widths = [ladder(level, "gdn").recurrent_key_dim * 2**step for step in range(5)]
    wider = [_global_cost(ladder(level, "gdn", recurrent_key_dim=width)) for width in widths]
    points = [(layer.flops(0).total, layer.state) for layer in wider]
    axes.plot(*zip(*points, strict=True), "s-", color=COLORS["GDN"], label=f"GDN, keys of {widths[0]} to {widths[-1]}")

    heads = [count for count in (8, 4, 2, 1) if config.hidden_size % (4 * count) == 0]
    memories = [_global_cost(ladder(level, num_memory_heads=count)) for count in heads]
    points = [(layer.flops(0).total, layer.state) for layer in memories]
    axes.plot(*zip(*points, strict=True), "D-", color=COLORS["SDM"], label=f"SDM, {heads[0]} to {heads[-1]} heads")

    axes.set(xscale="log", yscale="log")
    axes.set_title(f"One global layer, level {level} (d = {config.hidden_size})")
    axes.legend()
    return figure


def _global_cost(config: SDMConfig) -> LayerCost:
    return next(layer for layer in cost(config).layers if LAYER_TYPES[layer.kind].scope == "global")


FIGURES = {"state-vs-flops": state_vs_flops}


def draw(name: str, path: Path) -> None:
    """Draw a figure of `FIGURES` into a file; the suffix of its name says which format."""
    suffixes = [f".{kind}" for kind in sorted(FigureCanvasBase.get_supported_filetypes())]
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"the suffix must be one of {', '.join(suffixes)}, got {path.name!r}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder")
    save(FIGURES[name](), path)
