"""Colours, line styles and markers: one colour for each architecture, everywhere.

The colours are Okabe and Ito's, which colour-blind readers can tell apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

COLORS = {
    "SDM": "#0072B2",
    "GDN": "#E69F00",
    "full attention": "#009E73",
    "mixed": "#CC79A7",
    "Mamba2": "#56B4E9",
}
OTHERS = ("#D55E00", "#332288", "#999933", "#882255", "#000000", "#8C8C8C")
UNDECIDED = "#8C8C8C"  # a difference whose interval holds zero
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class Style:
    """Colour, line style and marker of a curve, in matplotlib's notation."""

    color: str
    line: str = "-"
    marker: str = "o"


def architecture(name: str) -> str | None:
    """Return the key of `COLORS` that a model's name contains; None if it contains none."""
    words = name.lower().replace("-", " ").replace("_", " ").replace("fullattn", "attention")
    if "mixed" in words or ("sdm" in words and "attention" in words):
        return "mixed"
    for word, key in (("sdm", "SDM"), ("gdn", "GDN"), ("mamba", "Mamba2"), ("attention", "full attention")):
        if word in words:
            return key
    return None


def styles(names: Iterable[str]) -> dict[str, Style]:
    """Assign a style to each name, no two the same.

    An architecture has its colour; several models of one architecture differ by line style and marker.
    """
    assigned: dict[str, Style] = {}
    counts: dict[str | None, int] = {}
    for name in names:
        if name in assigned:
            continue
        kind = architecture(name)
        place = counts[kind] = counts.get(kind, -1) + 1
        if kind is None:
            turn = place // len(OTHERS)
            assigned[name] = Style(OTHERS[place % len(OTHERS)], LINES[turn % len(LINES)], MARKERS[turn % len(MARKERS)])
        else:
            assigned[name] = Style(COLORS[kind], LINES[place % len(LINES)], MARKERS[place % len(MARKERS)])
    return assigned
