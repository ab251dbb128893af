"""`sdm reproduce quick`, `mini`, `crossover` and `paper`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from sdm.cli.command import Command
from sdm.cli.crossover import Crossover
from sdm.errors import UserError
from sdm.signals import CONTINUES


@dataclass(frozen=True)
class Quick:
    """Recall, small language models of code, cost and use of the memory, within ten minutes on two cores."""

    output: Path = Path("runs/quick")
    """The folder for the runs, the figures and report.html."""
    processes: int = 2
    """Runs at a time, one thread each."""

    def run(self) -> None:
        from sdm.cli.display import console
        from sdm.reproduce.studies.quick import reproduce

        _check_processes(self.processes)
        reproduce(self.output, self.processes, console())


@dataclass(frozen=True)
class Mini:
    """Every experiment of the paper at small scale with three seeds, in an hour to an hour and a half on two cores."""

    output: Path = Path("runs/mini")
    """The folder for the runs and report.html."""
    processes: int = 2
    """Runs at a time, one thread each."""
    report_only: bool = False
    """Run nothing, and write the page from what there is."""

    def run(self) -> None:
        from sdm.cli.display import console
        from sdm.reproduce.studies.mini.cells import experiments
        from sdm.reproduce.studies.mini.reproduce import reproduce_mini

        _check_processes(self.processes)
        reproduce_mini(self.output, self.processes, console(), experiments(), self.report_only)


@dataclass(frozen=True)
class Paper:
    """Write the paper's experiments at a level of its ladder, for machines with GPUs: runs and commands."""

    level: int
    """Level of the ladder: 1 to 6, 8 or 13."""
    output: Path = Path("runs/paper")
    """The folder for the runs and the scripts; one that all machines see."""
    gpus: int = 64
    """How many there are. Runs that cannot use all of them get fewer."""
    gpu: Literal["a100", "h100", "h200", "mi300x"] = "h100"
    """Which."""
    sources: tuple[str, ...] = ("data/text",)
    """Text to train on, as in --data.sources of `sdm train`."""
    code: tuple[str, ...] = ("data/code",)
    """Code to measure likelihood by position on."""
    tokenizer: str = "data/tokenizer"
    """The folder of a tokenizer of at most 128,256 tokens."""

    def run(self) -> None:
        from sdm.reproduce.paper.write import describe, write_paper

        made = write_paper(self.level, self.output, self.gpus, self.gpu, self.sources, self.code, self.tokenizer)
        for run in made.runs:
            print(f"{self.output / run.name}: {run.gpus} GPUs, {describe(run.config)}")
        print(f"{made.train} trains them, {made.measure} measures them")


def _check_processes(processes: int) -> None:
    if processes < 1:
        raise UserError(f"--processes must be at least 1, got {processes}")


@dataclass(frozen=True)
class Reproduce(Command):
    """Reproduce the paper: its claims in miniature, or its experiments at their own size."""

    advice = CONTINUES

    what: tyro.conf.OmitArgPrefixes[
        Annotated[Quick, tyro.conf.subcommand("quick")]
        | Annotated[Mini, tyro.conf.subcommand("mini")]
        | Annotated[Crossover, tyro.conf.subcommand("crossover")]
        | Annotated[Paper, tyro.conf.subcommand("paper")]
    ]

    def run(self) -> None:
        self.what.run()
