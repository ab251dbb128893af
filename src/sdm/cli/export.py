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

    chat_template: bool = False
    """Add a simple chat template ("role: content" lines) if the tokenizer has none, for `transformers serve`."""

    def run(self) -> None:
        """Export the model and print the folder."""
        from sdm.run.model import export_run

        print(export_run(self.run_dir, self.output, self.chat_template))
