"""`sdm train RECIPE`."""

from __future__ import annotations

from dataclasses import dataclass
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
