"""`sdm figure NAME`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from sdm.cli.command import Command
from sdm.files import explained


@dataclass(frozen=True)
class Figure(Command):
    """Draw a figure of the paper from our formulas."""

    name: Annotated[Literal["state-vs-flops"], tyro.conf.Positional]
    """Which figure."""
    output: Path | None = None
    """File to write; its suffix says the format. By default the figure's name with .png."""

    def run(self) -> None:
        """Draw the figure and print its path."""
        from sdm.analysis.charts import FIGURES
        from sdm.analysis.draw import draw, save

        path = self.output or Path(f"{self.name}.png")
        with explained(f"cannot write --output {path}"):
            save(draw(FIGURES[self.name]()), path)
        print(path)
