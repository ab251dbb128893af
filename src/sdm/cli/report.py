"""Pages and figures: `sdm report`, `sdm scaling`, `sdm figure` and `sdm plot`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

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


@dataclass(frozen=True)
class Figure(Command):
    """Draw a figure of the paper from our formulas."""

    name: Annotated[Literal["state-vs-flops"], tyro.conf.Positional]
    """Which figure."""
    output: Path | None = None
    """File to write; its suffix says the format. By default the figure's name with .png."""

    def run(self) -> None:
        """Draw the figure and print its path."""
        from sdm.analysis.charts import FIGURES
        from sdm.analysis.draw import draw, save

        path = self.output or Path(f"{self.name}.png")
        with explained(f"cannot write --output {path}"):
            save(draw(FIGURES[self.name]()), path)
        print(path)


_LABELS = {
    "valid": "held-out loss (nats per token)",
    "train": "training loss, last 10 lines (nats per token)",
    "test": "test loss (nats per token)",
}


@dataclass(frozen=True)
class Scaling(Command):
    """Fit power laws, loss against compute, to finished runs, one for each architecture."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs: several sizes, three or more, and as many seeds of each as there are."""
    loss: Literal["valid", "train", "test"] = "valid"
    """valid: the last held-out loss of a run; train: the mean of its last ten lines, as the paper has it; test: what
    `sdm eval nll` measured."""
    form: Literal["power", "irreducible"] = "power"
    """power: L = a C^-b; irreducible: L = e + a C^-b, which takes four sizes."""
    hold_out: str | None = None
    """A level that is predicted instead of fitted: its number from 1 on, "last", or one of its runs."""
    bootstrap: int | None = None
    """Samples that the intervals rest on. None: 200,000, or 20,000 with an irreducible loss."""
    output: Path = Path("scaling")
    """The folder for scaling.json and the figure."""
    json: bool = False
    """Print what scaling.json holds instead of tables."""

    def run(self) -> None:
        """Fit the laws, print tables and write scaling.json and the figure."""
        from sdm.analysis.draw import draw, save
        from sdm.analysis.ladder_laws import fit_ladders, ladders, law_chart, law_tables, trained_run
        from sdm.cli.display import show, show_json
        from sdm.cli.eval_options import distinct_names
        from sdm.files import write_json

        if not self.runs:
            raise UserError("name the folders of runs: sdm scaling RUN RUN RUN ...")
        if self.bootstrap is not None and self.bootstrap < 100:
            raise UserError(f"--bootstrap must be at least 100, got {self.bootstrap}")
        names = distinct_names(self.runs)
        runs = [trained_run(path, self.loss, name) for name, path in zip(names, self.runs, strict=True)]
        hold_out = self.hold_out
        for name, path in zip(names, self.runs, strict=True):  # a run may be named by its folder
            if hold_out is not None and Path(hold_out).resolve() == path.resolve():
                hold_out = name
        laws = fit_ladders(ladders(runs), hold_out, self.form, self.bootstrap)
        content = {"loss": self.loss, "form": self.form, "models": {law.name: law.describe() for law in laws}}
        with explained(f"cannot write --output {self.output}"):
            self.output.mkdir(parents=True, exist_ok=True)
            write_json(self.output / "scaling.json", content)
            figure = draw(law_chart(laws, _LABELS[self.loss]))
            paths = [save(figure, self.output / f"scaling.{suffix}") for suffix in ("png", "svg")]
        if self.json:
            return show_json(content)
        show(*law_tables(laws))
        for path in (self.output / "scaling.json", *paths):
            print(path)
        return None


@dataclass(frozen=True)
class Plot(Command):
    """Draw loss, slots in use and gates of training runs in one picture."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs, finished or not, or folders that hold such."""
    output: Path = Path("training.png")
    """File to write; its suffix says the format: .png, .svg or .pdf. An older picture is replaced."""

    def run(self) -> None:
        """Draw the picture and print its path."""
        from sdm.analysis.draw import draw, save
        from sdm.analysis.pages.run_page import expand, run_plot
        from sdm.cli.eval_options import distinct_names

        if not self.runs:
            raise UserError("name a run: sdm plot RUN [RUN ...]")
        paths = expand(self.runs)
        chart = run_plot(list(zip(distinct_names(paths), paths, strict=True)))
        with explained(f"cannot write --output {self.output}"):
            save(draw(chart), self.output)
        print(self.output)
