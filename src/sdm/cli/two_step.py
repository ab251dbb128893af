"""Commands whose options depend on their first argument: `sdm train RECIPE`, `sdm eval NAME` and `sdm probe`.

The options are those of the recipe or the measurement: `train_options` and `eval_options` parse them,
which imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from sdm.cli.command import Command
from sdm.signals import CONTINUES


@dataclass(frozen=True)
class Train(Command):
    """Train a model by a recipe; `sdm train` lists them."""

    advice = CONTINUES

    recipe: Annotated[str, tyro.conf.Positional]
    """A recipe's name, or the folder of a run to continue. Its fields follow: `sdm train RECIPE --help`."""

    @staticmethod
    def parse(arguments: list[str]) -> Command:
        """Which options there are depends on the recipe."""
        from sdm.cli.train_options import parse

        return parse(arguments)


@dataclass(frozen=True)
class Eval(Command):
    """Measure models; `sdm eval` lists the measurements."""

    advice = CONTINUES

    measurement: Annotated[str, tyro.conf.Positional]
    """A measurement's name, or "compare". Models and settings follow: `sdm eval NAME --help`."""

    @staticmethod
    def parse(arguments: list[str]) -> Command:
        """Which options there are depends on the measurement."""
        from sdm.cli.eval_options import parse

        return parse(arguments)


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
