"""The options of `sdm eval NAME`: models, where results go, and the settings of the measurement."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from sdm.analysis.tables import rich_table
from sdm.cli.command import Command
from sdm.cli.display import show, show_json, tables_json
from sdm.cli.progress import eval_progress
from sdm.errors import UserError
from sdm.evaluation.eval_model import EvalModel, Precision, default_device, open_model
from sdm.evaluation.measurement import Measurement, evaluate
from sdm.evaluation.registry import find, listing
from sdm.evaluation.results import FILE, Results, read_results, results_folder
from sdm.evaluation.statistics import ComparedPairs, check_comparable, comparison_charts, comparison_table
from sdm.models.fields import documented_fields
from sdm.ranks import join
from sdm.run import Run
from sdm.run.config_file import from_json

USAGE = """usage: sdm eval NAME MODEL [MODEL ...] [--OPTION VALUE ...]
       sdm eval compare RESULT RESULT [RESULT ...]

NAME is one of these; `sdm eval NAME --help` lists its options.
MODEL is a run's folder, or that of any causal language model that transformers
loads. Results go into the run's folder, evaluations/NAME, or where --output
says; results of other settings stay, and the new ones go beside them."""

COMPARE = "compare"
FigureFormat = Literal["png", "svg", "pdf"]


@dataclass(frozen=True, kw_only=True)
class EvalOptions(Command):
    """Several models are measured on the same documents and compared document by document. The same command continues
    what was stopped."""

    name: tyro.conf.Suppress[str]
    models: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs, of exports, or of any causal language models."""
    settings: Annotated[Measurement, tyro.conf.arg(name="")]
    output: Path | None = None
    """The folder for results, by default evaluations/NAME in the run's; several models get a folder each in it."""
    limit: int | None = None
    """At most so many documents or samples of each source or task."""
    device: str = "auto"
    """"cpu", "cuda", ...; "auto" takes a GPU if there is one."""
    precision: Precision = "auto"
    """Of the weights; "auto": as they were saved."""
    baseline: str | None = None
    """The model that the others are compared with, by its name in the tables; none: the first."""
    pairs: ComparedPairs = "baseline"
    """Compare every model with the baseline, or every two models (all)."""
    formats: tuple[FigureFormat, ...] = ("png",)
    """File formats of figures: png, svg, pdf."""
    json: bool = False
    """Print the results as JSON instead of tables."""

    def run(self) -> None:
        """Measure the models, print tables and write figures."""
        places = self.places()
        device = default_device() if self.device == "auto" else self.device
        ranks = join(torch.device(device))
        with eval_progress(quiet=not ranks.first) as listener:
            models = self._models(places, device)
            results = evaluate(self.name, self.settings, models, self.limit, listener, ranks)
        if ranks.first:
            self._report(places, results)

    def places(self) -> list[tuple[str, Path, Path]]:
        """For each model its name in tables, its folder, and the wanted folder of its results."""
        names = distinct_names(self.models)
        places = []
        for name, path in zip(names, self.models, strict=True):
            run = Run.around(path)
            if self.output is not None:
                folder = self.output if len(self.models) == 1 else self.output / name
            elif run is not None:
                folder = run.evaluations / self.name
            else:
                raise UserError(f"--output: {str(path)!r} is no run's folder; say where the results are to go")
            places.append((name, path, folder))
        return places

    def _models(self, places: list[tuple[str, Path, Path]], device: str) -> Iterator[tuple[EvalModel, Path]]:
        for name, path, folder in places:
            yield open_model(path, device, self.precision, name), folder

    def _report(self, places: list[tuple[str, Path, Path]], results: list[Results]) -> None:
        folders = [
            results_folder(folder, result.identity()) for (_, _, folder), result in zip(places, results, strict=True)
        ]
        named = [(name, result) for (name, _, _), result in zip(places, results, strict=True)]
        figures = folders[0] if len(folders) == 1 else self.output
        report_results(self.settings, named, figures, self.baseline, self.pairs, self.formats, self.json)
        if self.json:
            return
        if not all(result.complete for result in results):
            print(f"As --limit {self.limit} asks; without it the rest is measured.")
        for folder in folders:
            print(folder / FILE)


@dataclass(frozen=True)
class CompareOptions(Command):
    """Compare results of the same measurement, document by document."""

    results: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders with a results.json, or such files."""
    output: Path | None = None
    """A folder for figures."""
    baseline: str | None = None
    """The model that the others are compared with, by its name in the tables; none: the first."""
    pairs: ComparedPairs = "baseline"
    """Compare every model with the baseline, or every two models (all)."""
    formats: tuple[FigureFormat, ...] = ("png",)
    """File formats of figures: png, svg, pdf."""
    json: bool = False
    """Print the results as JSON instead of tables."""

    def run(self) -> None:
        """Print tables of the results and write figures."""
        if len(self.results) < 2:
            raise UserError("compare takes two results or more")
        results = [read_results(path) for path in self.results]
        check_comparable([(str(path), result) for path, result in zip(self.results, results, strict=True)])
        models = [Path(str(result.model.get("path", path))) for path, result in zip(self.results, results, strict=True)]
        # One model may have been measured twice, as a run that was trained on.
        names = distinct_names(models if len(set(models)) == len(models) else list(self.results))
        measurement = from_json(find(results[0].measurement), results[0].settings, "settings")
        named = list(zip(names, results, strict=True))
        # The files have their checksums, but another program may have written them.
        with _explained_content(results[0].measurement):
            report_results(measurement, named, self.output, self.baseline, self.pairs, self.formats, self.json)


@contextlib.contextmanager
def _explained_content(measurement: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"the content of these results is not that of sdm eval {measurement}: {type(error).__name__}: {error}; "
            "measure them again"
        ) from error


def report_results(
    measurement: Measurement,
    results: list[tuple[str, Results]],
    figures: Path | None,
    baseline: str | None = None,
    pairs: ComparedPairs = "baseline",
    formats: tuple[FigureFormat, ...] = ("png",),
    as_json: bool = False,
) -> None:
    """Print tables of results and their paired differences, and draw figures.

    Args:
        measurement: the measurement that the results are of.
        results: results by the name of the model.
        figures: the folder in which a folder for figures is made; None: no figures.
        baseline: the model that the others are compared with; None: the first.
        pairs: "baseline" or "all", as `comparison_table` takes it.
        formats: file formats of the figures.
        as_json: print the summaries as JSON, and the comparison as a table of texts, instead of tables.
    """
    summaries = {name: result.summary for name, result in results if result.summary is not None}
    for name, result in results:
        if result.summary is None:
            raise UserError(f"{name}: nothing has been measured yet")
    report = measurement.report(summaries)
    tables = [*report.tables]
    comparison = comparison_table(measurement, results, baseline, pairs) if len(results) > 1 else None
    if comparison is not None:
        tables.append(comparison)
    drawn: list[Path] = []
    if figures is not None:
        from sdm.analysis.draw import draw, save  # matplotlib; not for --help

        compared = comparison_charts(measurement, results, baseline) if comparison is not None else []
        for chart in (*report.charts, *compared):
            for kind in formats if not chart.is_empty() else ():
                drawn.append(save(draw(chart), figures / "figures" / f"{chart.name}.{kind}"))
    if as_json:
        measured = {
            name: {"complete": result.complete, "planned": result.planned, "summary": result.summary}
            for name, result in results
        }
        compared_json = [] if comparison is None else tables_json([comparison])
        show_json({"models": measured, "comparison": compared_json, "figures": drawn})
        return
    show(*(rich_table(table) for table in tables))
    if comparison is None and len(results) > 1 and measurement.pairs(results[0][1].units):
        print("Not compared by document: documents, or the tokens they are read as, differ.")
    for name, result in results:
        if not result.complete:
            print(f"{name}: {len(result.units):,} of {result.planned:,} documents or samples")
    for path in drawn:
        print(path)


def distinct_names(paths: tuple[Path, ...] | list[Path]) -> list[str]:
    """The last parts of paths, as many as tell them apart."""
    whole = [path.resolve().parts for path in paths]
    if len(set(whole)) < len(whole):
        twice = next(path for place, path in enumerate(paths) if whole[place] in whole[:place])
        raise UserError(f"{twice} is given twice")
    for count in range(1, max(map(len, whole)) + 1):
        names = ["-".join(parts[-count:]).replace("/", "") for parts in whole]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("paths that differ have different parts")


def parse(arguments: list[str]) -> Command:
    """Parse the arguments of `sdm eval`: which options there are depends on the measurement."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{USAGE}\n\n{listing()}")
        raise SystemExit(0)
    name, rest = arguments[0], arguments[1:]
    if name.startswith("-"):
        raise UserError(f"the measurement comes first, got {name}; `sdm eval` lists them")
    if name == COMPARE:
        return tyro.cli(CompareOptions, prog=f"sdm eval {name}", args=rest)
    kind = find(name)
    shown = _with_help(kind)
    settings = ("settings", Annotated[shown, tyro.conf.arg(name="")], dataclasses.field(default_factory=shown))
    options: type[EvalOptions] = dataclasses.make_dataclass(
        "EvalOptions",
        [("name", tyro.conf.Suppress[str], dataclasses.field(default=name)), settings],
        bases=(EvalOptions,),
        frozen=True,
        kw_only=True,
    )
    options.__doc__ = "\n\n".join(" ".join((described.__doc__ or "").split()) for described in (kind, EvalOptions))
    parsed: EvalOptions = tyro.cli(options, prog=f"sdm eval {name}", args=rest)
    if not parsed.models:
        raise UserError(f"name a model: sdm eval {name} MODEL")
    return parsed


def _with_help(kind: type[Measurement]) -> Any:
    """The class with the texts of its fields in one line each: tyro breaks them where the source does."""
    members = [
        (field.name, Annotated[field.type, tyro.conf.arg(help=field.doc)], dataclasses.field(default=field.default))
        for field in documented_fields(kind)
    ]
    return dataclasses.make_dataclass(kind.__name__, members, bases=(kind,), frozen=True)
