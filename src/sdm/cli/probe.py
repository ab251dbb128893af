"""`sdm probe RUN ...`, short for `sdm eval probe RUN ...`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from sdm.cli.command import Command


@dataclass(frozen=True)
class Probe(Command):
    """Measure how a model uses the keys and slots of its memories; short for `sdm eval probe`."""

    models: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs, finished or not, or of models with SDM layers. Settings follow: `sdm probe --help`."""

    @staticmethod
    def parse(arguments: list[str]) -> Command:
        """Parse the arguments as `sdm eval probe` does."""
        from sdm.cli.eval_options import parse

        return parse(["probe", *arguments])
