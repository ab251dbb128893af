"""`sdm ladder`."""

from __future__ import annotations

from dataclasses import dataclass

from sdm.cli.command import Command
from sdm.cli.display import show, show_json


@dataclass(frozen=True)
class Ladder(Command):
    """Print the paper's scaling ladder beside ours."""

    json: bool = False
    """Print JSON instead of tables."""

    def run(self) -> None:
        """Print the tables."""
        from sdm.analysis.model_tables import ladder_rows, ladder_tables

        if self.json:
            return show_json(ladder_rows())
        show(*ladder_tables())
        return None
