"""`sdm eval NAME MODEL ...`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from sdm.cli.command import Command
from sdm.signals import CONTINUES


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
