"""`sdm ladder`."""

from __future__ import annotations

from dataclasses import dataclass

from sdm.cli.command import Command
from sdm.cli.display import show


@dataclass(frozen=True)
class Ladder(Command):
    """Print the paper's scaling ladder beside ours."""

    def run(self) -> None:
        """Print the tables."""
        from sdm.analysis.model_tables import ladder_tables

        show(*ladder_tables())
