"""The options of `sdm eval NAME`: models, where results go, and the settings of the measurement."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from sdm.analysis.report import draw_all, rich_table
from sdm.cli.command import Command
from sdm.cli.display import show
from sdm.cli.eval_progress import progress
from sdm.errors import UserError
from sdm.evaluation.eval_model import EvalModel, Precision, default_device, open_model
from sdm.evaluation.measurement import Measurement
from sdm.evaluation.registry import find, listing
from sdm.evaluation.results import FILE, Results, check_same, read_results
from sdm.evaluation.runner import evaluate, settings_of
from sdm.evaluation.statistics import comparison_table
from sdm.models.fields import documented_fields
from sdm.ranks import join
from sdm.run import Run
from sdm.run.config_file import from_json

USAGE = """usage: sdm eval NAME MODEL [MODEL ...] [--OPTION VALUE ...]
       sdm eval compare RESULT RESULT [RESULT ...]

NAME is one of these; `sdm eval NAME --help` lists its options.
MODEL is a run's folder, or that of any causal language model that transformers loads.
Results go into the run's folder, evaluations/NAME, or where --output says."""

COMPARE = "compare"


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

    def run(self) -> None:
        places = self.places()
        device = default_device() if self.device == "auto" else self.device
        ranks = join(torch.device(device))
        with progress(quiet=not ranks.first) as listener:
            models = self._models(places, device)
            results = evaluate(self.name, self.settings, models, self.limit, listener, ranks)
        if ranks.first:
            self._report([(name, one) for (name, _, _), one in zip(places, results, strict=True)], places)

    def places(self) -> list[tuple[str, Path, Path]]:
        """For each model what it is called, where it is and where its results go. Whether other results stand there is
        found out before anything is loaded."""
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
            if (folder / FILE).exists():
                before = read_results(folder).identity()
                check_same(folder, before, before | {"measurement": self.name, "settings": settings_of(self.settings)})
            places.append((name, path, folder))
        return places

    def _models(self, places: list[tuple[str, Path, Path]], device: str) -> Iterator[tuple[EvalModel, Path]]:
        for name, path, folder in places:
            yield open_model(path, device, self.precision, name), folder

    def _report(self, results: list[tuple[str, Results]], places: list[tuple[str, Path, Path]]) -> None:
        report_results(self.settings, results, places[0][2] if len(places) == 1 else self.output)
        if not all(one.complete for _, one in results):
            print(f"As --limit {self.limit} asks; without it the rest is measured.")
        for _, _, folder in places:
            print(folder / FILE)


@dataclass(frozen=True)
class CompareOptions(Command):
    """Compare results of the same measurement, document by document."""

    results: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders with a results.json, or such files."""
    output: Path | None = None
    """A folder for figures."""

    def run(self) -> None:
        if len(self.results) < 2:
            raise UserError("compare takes two results or more")
        found = [read_results(path) for path in self.results]
        models = [Path(one.model["path"]) for one in found]
        # One model may have been measured twice, as a run that was trained on.
        names = distinct_names(models if len(set(models)) == len(models) else list(self.results))
        measurement = from_json(find(found[0].measurement), found[0].settings, "settings")
        report_results(measurement, list(zip(names, found, strict=True)), self.output)


def report_results(measurement: Measurement, results: list[tuple[str, Results]], figures: Path | None) -> None:
    """Tables in the terminal, figures beside the results."""
    summaries = {name: one.summary for name, one in results if one.summary is not None}
    for name, one in results:
        if one.summary is None:
            raise UserError(f"{name}: nothing has been measured yet")
    report = measurement.report(summaries)
    tables = [*report.tables]
    comparison = comparison_table(measurement, results) if len(results) > 1 else None
    if comparison is not None:
        tables.append(comparison)
    show(*(rich_table(table) for table in tables))
    if comparison is None and len(results) > 1 and measurement.pairs(results[0][1].units):
        print("Not compared by document: documents, or the tokens they are read as, differ.")
    for name, one in results:
        if not one.complete:
            print(f"{name}: {len(one.units):,} of {one.planned:,} documents or samples")
    if figures is not None:
        for path in draw_all(report.charts, figures / "figures"):
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
    options: Any = dataclasses.make_dataclass(
        "EvalOptions",
        [("name", tyro.conf.Suppress[str], dataclasses.field(default=name)), settings],
        bases=(EvalOptions,),
        frozen=True,
        kw_only=True,
    )
    options.__doc__ = "\n\n".join(" ".join((one.__doc__ or "").split()) for one in (kind, EvalOptions))
    parsed: EvalOptions = tyro.cli(options, prog=f"sdm eval {name}", args=rest)
    if not parsed.models:
        raise UserError(f"name a model: sdm eval {name} MODEL")
    return parsed


def _with_help(kind: type[Measurement]) -> Any:
    """The class with the texts of its fields in one line each: tyro breaks them where the source does."""
    members = [
        (one.name, Annotated[one.type, tyro.conf.arg(help=one.doc)], dataclasses.field(default=one.default))
        for one in documented_fields(kind)
    ]
    return dataclasses.make_dataclass(kind.__name__, members, bases=(kind,), frozen=True)
