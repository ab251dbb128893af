"""`sdm report RUN ...`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from sdm.cli.command import Command
from sdm.errors import UserError
from sdm.files import explained


@dataclass(frozen=True)
class Report(Command):
    """Make a page about runs and results: report.html, figures and their data."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs, of results of `sdm eval`, or folders that hold such."""
    output: Path | None = None
    """The folder to write into, by default report in the run's, or in the current one for several."""

    def run(self) -> None:
        """Write the page and print its path."""
        from sdm.analysis.pages import write_page
        from sdm.analysis.pages.run_page import expand, runs_page
        from sdm.cli.eval_options import distinct_names

        if not self.runs:
            raise UserError("name a run: sdm report RUN [RUN ...]")
        paths = expand(self.runs)
        alone = self.runs[0] if len(self.runs) == 1 and self.runs[0].is_dir() else Path()
        output = self.output or alone / "report"
        words = ["sdm", "report", *map(str, self.runs), *(("--output", str(self.output)) if self.output else ())]
        page = runs_page(list(zip(distinct_names(paths), paths, strict=True)), shlex.join(words))
        with explained(f"cannot write the report into {output}"):
            path = write_page(page, output)
        print(path)
