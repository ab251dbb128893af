"""`sdm export RUN`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from sdm.cli.command import Command


@dataclass(frozen=True)
class Export(Command):
    """Write the model of a run's newest checkpoint as a folder that transformers loads."""

    run_dir: Annotated[Path, tyro.conf.Positional]
    """The run's folder."""
    output: Path | None = None
    """The folder to write. By default `export` within the run's."""

    def run(self) -> None:
        """Export the model and print the folder."""
        from sdm.run.model import export_run

        print(export_run(self.run_dir, self.output))
