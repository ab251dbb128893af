"""A figure as the bytes of a file: the same figure always gives the same ones."""

from __future__ import annotations

import io
from dataclasses import dataclass

import matplotlib
from matplotlib.figure import Figure

DPI = 160


@dataclass
class Drawn:
    """An illustration made ready: its files, and which of them the page shows."""

    stem: str
    files: dict[str, bytes]
    """By their path beside the page; without pictures if it could not be drawn."""
    fault: str = ""
    """Why it could not be drawn."""
    kind: str = "svg"
    """Which of its pictures is in the page."""

    @property
    def shown(self) -> bytes:
        return self.files[f"figures/{self.stem}.{self.kind}"]


def svg(figure: Figure) -> bytes:
    """Text is drawn as paths: it looks the same wherever it is opened, whatever fonts there are."""
    with matplotlib.rc_context({"svg.hashsalt": "sdm", "svg.fonttype": "path"}):
        return _saved(figure, "svg", {"Date": None, "Creator": None})


def png(figure: Figure, dpi: int = DPI) -> bytes:
    return _saved(figure, "png", {"Software": None}, dpi)


def _saved(figure: Figure, kind: str, metadata: dict[str, None], dpi: int = DPI) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format=kind, metadata=metadata, dpi=dpi, facecolor="white")
    return file.getvalue()
