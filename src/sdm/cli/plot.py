"""`sdm plot RUN ...`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from sdm.cli.command import Command
from sdm.errors import UserError
from sdm.files import explained


@dataclass(frozen=True)
class Plot(Command):
    """Draw loss, slots in use and gates of training runs in one picture."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs, finished or not, or folders that hold such."""
    output: Path = Path("training.png")
    """File to write; its suffix says the format: .png, .svg or .pdf. An older picture is replaced."""

    def run(self) -> None:
        """Draw the picture and print its path."""
        from sdm.analysis.draw import draw, save
        from sdm.analysis.pages.run_page import expand, run_plot
        from sdm.cli.eval_options import distinct_names

        if not self.runs:
            raise UserError("name a run: sdm plot RUN [RUN ...]")
        paths = expand(self.runs)
        chart = run_plot(list(zip(distinct_names(paths), paths, strict=True)))
        with explained(f"cannot write --output {self.output}"):
            save(draw(chart), self.output)
        print(self.output)
