"""`sdm reproduce quick` and `crossover`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from sdm.cli.command import Command
from sdm.cli.crossover import Crossover
from sdm.ending import CONTINUES
from sdm.errors import UserError


@dataclass(frozen=True)
class Quick:
    """Recall, small language models of code, cost and use of the memory, within ten minutes on two cores."""

    output: Path = Path("runs/quick")
    """The folder for the runs, the figures and report.html."""
    processes: int = 2
    """Runs at a time, one thread each."""

    def run(self) -> None:
        from sdm.cli.display import console
        from sdm.experiments.quick import reproduce

        if self.processes < 1:
            raise UserError(f"--processes must be at least 1, got {self.processes}")
        reproduce(self.output, self.processes, console())


@dataclass(frozen=True)
class Reproduce(Command):
    """Reproduce the paper's claims in miniature."""

    advice = CONTINUES

    what: tyro.conf.OmitArgPrefixes[
        Annotated[Quick, tyro.conf.subcommand("quick")] | Annotated[Crossover, tyro.conf.subcommand("crossover")]
    ]

    def run(self) -> None:
        self.what.run()
