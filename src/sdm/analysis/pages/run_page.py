"""A page about any runs and results: training, costs, memories, measurements, and what is missing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sdm.analysis.charts import loss_chart, utilisation_chart
from sdm.analysis.pages.page import Finding, Illustration, Page, Section, illustration
from sdm.analysis.pages.write import environment_section
from sdm.errors import UserError
from sdm.evaluation.measurement import Measurement
from sdm.evaluation.registry import find
from sdm.evaluation.report import Chart, Grid, Table
from sdm.evaluation.results import FILE, Results, read_results
from sdm.evaluation.statistics import comparison_charts, comparison_table, weighted_mean
from sdm.models import cost
from sdm.run import Run
from sdm.run.config import TrainConfig
from sdm.run.config_file import from_json, to_json
from sdm.run.model import SavedModel

POINTS = 300  # most points of a curve
CONTEXT = 2048  # tokens at which FLOPs are given where the data does not say
LARGEST = 1e30  # numbers of metrics beyond it cannot be drawn


@dataclass(frozen=True)
class Source:
    """A folder that the page is about: a run, or results alone."""

    name: str
    run: Run | None = None
    config: TrainConfig | None = None
    metrics: list[dict[str, float]] = field(default_factory=list)
    results: list[Named] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Why parts of it cannot be read."""

    @property
    def reached(self) -> int:
        """The step of the newest metrics."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    def is_finished(self) -> bool:
        """Whether the run has made all its steps."""
        return self.config is not None and self.reached >= self.config.schedule.steps

    def last(self, key: str) -> float | None:
        """Return the newest value of a metric."""
        return next((line[key] for line in reversed(self.metrics) if key in line), None)

    def series(self, key: str) -> list[tuple[float, float]]:
        """Return a metric by the step: means of neighbouring lines, at most `POINTS`."""
        pairs = [(line["step"], line[key]) for line in self.metrics if key in line]
        width = -(-len(pairs) // POINTS) or 1
        groups = [pairs[start : start + width] for start in range(0, len(pairs), width)]
        return [(group[-1][0], math.fsum(value for _, value in group) / len(group)) for group in groups]


def expand(paths: Sequence[Path]) -> list[Path]:
    """Return the folders of runs and results among paths and, for other folders, in them.

    Raises:
        UserError: If a path is neither a run nor results, and holds none.
    """
    sources: list[Path] = []
    for path in paths:
        if _is_source(path):
            sources.append(path)
            continue
        inside = sorted(folder for folder in path.iterdir() if _is_source(folder)) if path.is_dir() else []
        if not inside:
            raise UserError(
                f"{str(path)!r} is neither a run's folder nor one of results, nor holds any; `sdm train` makes runs, "
                f"`sdm eval NAME MODEL --output FOLDER` makes results"
            )
        sources += inside
    return sources


def runs_page(named: Sequence[tuple[str, Path]], command: str) -> Page:
    """Make a page about folders.

    Args:
        named: Names and folders of runs and results.
        command: The command that makes the page, to be shown on it.
    """
    sources = [read_source(name, path) for name, path in named]
    runs = [source for source in sources if source.run is not None]
    findings: list[Finding] = []
    if runs:
        findings += [_training(runs), *_memory(runs)]
    findings += measured_findings([result for source in sources for result in source.results])
    findings += _missing(runs)
    findings += [failed(source.name, fault) for source in sources for fault in source.faults]
    names = ", ".join(source.name for source in sources)
    title = f"Report: {names}" if len(names) <= 60 else f"Report of {len(sources)} runs and results"
    sections = [Section("Command", preformatted=command)]
    sections += [
        Section(f"Configuration: {run.name}", preformatted=json.dumps(to_json(run.config), indent=2))
        for run in runs
        if run.config is not None
    ]
    return Page(title, _lead(sources), (*findings,), (*sections, environment_section()))


def _is_source(path: Path) -> bool:
    """Return whether a path is a run or results. Damaged results count; a results.json of another program does not."""
    if Run(path).exists():
        return True
    file = path / FILE if path.is_dir() else path
    try:
        return file.is_file() and b'"measurement"' in file.read_bytes()
    except OSError:
        return False


def read_source(name: str, path: Path) -> Source:
    """Read everything that can be read of a folder. Faults are noted, and do not hide the rest."""
    if not Run(path).exists():
        source = Source(name)
        _read_results(source, path)
        return source
    run = Run(path)
    config: TrainConfig | None = None
    metrics: list[dict[str, float]] = []
    faults: list[str] = []
    try:
        config = run.config()
        metrics = _plain(run.metrics(), faults, run.metrics_file)
    except (OSError, UserError) as error:
        faults.append(str(error))
    source = Source(name, run, config, metrics, faults=faults)
    for folder in sorted(run.evaluations.glob("*")) if run.evaluations.is_dir() else ():
        if (folder / FILE).is_file():
            _read_results(source, folder)
    return source


def _plain(lines: Sequence[dict[str, float]], faults: list[str], file: Path) -> list[dict[str, float]]:
    """Drop numbers that no chart can show, and note how many. NaN and infinite losses are left out without a note."""
    kept, dropped = [], 0
    for line in lines:
        numbers = {key: value for key, value in line.items() if isinstance(value, (int, float))}
        values = {key: value for key, value in numbers.items() if abs(value) <= LARGEST}
        dropped += sum(LARGEST < abs(value) < math.inf for value in numbers.values())
        if values.get("step", -1) >= 0:
            kept.append(values)
    if dropped:
        faults.append(f"{file} has {dropped} numbers beyond {LARGEST:g}, which are not shown")
    return kept


def _read_results(source: Source, path: Path) -> None:
    try:
        results = read_results(path)
        # The same settings on another model, of a run that was trained on, or on other data have a folder of their own.
        known = [(other.measurement, other.settings) for _, other in source.results]
        twin = (results.measurement, results.settings) in known
        source.results.append((f"{source.name}, {path.name}" if twin else source.name, results))
    except (OSError, UserError) as error:
        source.faults.append(str(error))


def _lead(sources: Sequence[Source]) -> str:
    runs = [source for source in sources if source.run is not None]
    names = sorted({result.measurement for source in sources for _, result in source.results})
    count = f"{len(runs)} run{'s' if len(runs) != 1 else ''}" if runs else "Results"
    done = sum(run.is_finished() for run in runs)
    state = f", {done} of them finished" if runs and done < len(runs) else ""
    measured = f"measured: {', '.join(names)}" if names else "nothing has been measured yet"
    return f"{count}{state}; {measured}. Numbers in brackets are 95% intervals over documents."


def _missing(runs: Sequence[Source]) -> list[Finding]:
    """Name measurements that some runs have and others lack, or `nll` if no run has any."""
    known = sorted({result.measurement for run in runs for _, result in run.results}) or ["nll"]
    findings = []
    for measurement in known:
        lacking = [run for run in runs if measurement not in {result.measurement for _, result in run.results}]
        if not lacking:
            continue
        folders = " ".join(str(run.run.folder) for run in lacking if run.run is not None)
        findings.append(
            Finding(
                f"missing-{measurement}",
                f"Not measured yet: {measurement}",
                f"{', '.join(run.name for run in lacking)}: no results of `sdm eval {measurement}`.",
                "no result",
                "",
                "missing",
                f"`sdm eval {measurement} {folders}` measures it.",
            )
        )
    return findings


def _training(runs: Sequence[Source]) -> Finding:
    """Loss and cost of training."""
    what = "The loss while the model was trained, and what the run has cost."
    notes = tuple(
        f"{run.name}: {run.reached:,} of {run.config.schedule.steps:,} steps; `sdm train {run.run.folder}` trains the "
        "rest"
        for run in runs
        if run.run is not None and run.config is not None and not run.is_finished()
    )
    trained, held_out = ({run.name: run.series(key) for run in runs} for key in ("loss", "valid/loss"))
    if not any(trained.values()):
        why = "There are no metrics yet."
        return Finding("training", "Training", what, "no result", "", "missing", why, notes=notes)
    rows = [
        (name, kind, step, value)
        for kind, series in (("batches", trained), ("held out", held_out))
        for name, points in series.items()
        for step, value in points
    ]
    last = {name: points[-1][1] for name, points in (held_out if any(held_out.values()) else trained).items() if points}
    values = ", ".join(f"{name} {value:.4g}" for name, value in last.items())
    picture = Illustration(
        "training",
        "The loss of the batches, and of held-out ones.",
        loss_chart(trained, held_out),
        ("run", "of", "step", "nats per token"),
        rows,
        f"Loss against the step. At the end: {values}.",
    )
    words = f"{values} nats per token{', held out,' if any(held_out.values()) else ''} at the end"
    return Finding("training", "Training", what, words, "", "measured", "", (picture,), (_costs(runs),), notes=notes)


def _costs(runs: Sequence[Source]) -> Table:
    rows = []
    for run in runs:
        speed = [run.last(key) for key in ("tokens_per_second", "seconds")]
        shown = ["-" if value is None else f"{value:,.0f}" for value in speed]
        rows.append((run.name, *_sizes(run), f"{run.reached:,}", *shown))
    columns = ("run", "parameters", "of them M0", "state", "FLOPs/token", "steps", "tokens/s", "seconds")
    caption = (
        "M0: the learned initial memory. State: numbers that a sequence keeps, whatever its length, or for each token."
    )
    return Table("Cost", columns, rows, caption)


def _sizes(source: Source) -> list[str]:
    assert source.run is not None
    try:
        sizes = cost(SavedModel(source.run.folder).config())
    except (OSError, ValueError):  # no model yet, or one that cannot be read
        return ["-"] * 4
    context = getattr(source.config.data, "sequence_length", CONTEXT) if source.config is not None else CONTEXT
    state = f"{sizes.state_elements:,}" if sizes.state_elements else f"{sizes.kv_elements_per_token:,} a token"
    flops = sizes.flops_per_token(context).total
    return [f"{sizes.parameters:,}", f"{sizes.initial_state_parameters:,}", state, f"{flops:,}"]


def _memory(runs: Sequence[Source]) -> list[Finding]:
    """Gates and slots during training; empty for runs without a sparse delta memory."""
    metrics = {run.name: [line for line in run.metrics if "memory/slots_written" in line] for run in runs}
    metrics = {name: lines for name, lines in metrics.items() if lines}
    if not metrics:
        return []
    watched = {name: lines[:: -(-len(lines) // POINTS)] for name, lines in metrics.items()}
    keys = sorted({key for lines in watched.values() for line in lines for key in line if key.startswith("memory/")})
    rows = [(name, line["step"], *(line.get(key) for key in keys)) for name, lines in watched.items() for line in lines]
    words = "; ".join(
        f"{name} {lines[-1]['memory/slots_written']:.0%} written, {lines[-1]['memory/slots_read']:.0%} read"
        for name, lines in metrics.items()
    )
    picture = Illustration(
        "memory",
        "Gates, how evenly slots are used, and how many of them a batch uses: means over the layers.",
        utilisation_chart(watched),
        ("run", "step", *(key.removeprefix("memory/") for key in keys)),
        rows,
        f"Six panels against the step. Slots that a batch uses at the end: {words}.",
    )
    what = "How many slots a batch uses, how evenly, and how open the gates are."
    shown = f"slots of a batch, at the end: {words}"
    return [Finding("memory", "The memory during training", what, shown, "", "measured", "", (picture,))]


Named = tuple[str, Results]


def measured_findings(results: Sequence[Named]) -> list[Finding]:
    """Make a finding of the results of each measurement and settings. Results that cannot be shown say why."""
    groups: dict[str, list[Named]] = {}
    for name, result in results:
        groups.setdefault(json.dumps([result.measurement, result.settings], sort_keys=True), []).append((name, result))
    findings = []
    for group in groups.values():
        try:
            findings.append(_finding(group))
        except Exception as error:  # of whatever kind: results may be of another version, or have been written by hand
            what = group[0][1].measurement
            findings.append(failed(what, f"{', '.join(name for name, _ in group)}: {error}"))
    return findings


def failed(what: str, why: str) -> Finding:
    """Make the finding of something that cannot be shown, with the reason."""
    return Finding(what, what, "Its results could not be shown.", "no result", "", "failed", why)


def _finding(group: list[Named]) -> Finding:
    first = group[0][1]
    kind = find(first.measurement)
    measurement = from_json(kind, first.settings, "settings")
    done = [(name, result) for name, result in group if result.summary is not None]
    description = (kind.__doc__ or "").strip().splitlines()[0]
    notes = [
        f"{name}: {len(result.units):,} of {result.planned:,} documents or samples; `sdm eval {result.measurement} "
        f"{result.model.get('path', 'MODEL')}` measures the rest"
        for name, result in group
        if not result.complete
    ]
    if not done:
        why = "Nothing has been measured yet."
        return Finding(
            first.measurement, first.measurement, description, "no result", "", "missing", why, notes=(*notes,)
        )
    report = measurement.report({name: result.summary for name, result in done if result.summary is not None})
    tables, charts = [*report.tables], [*report.charts]
    if len(done) > 1:
        try:
            comparison = comparison_table(measurement, done)
            tables += [comparison] if comparison is not None else []
            charts += comparison_charts(measurement, done)
        except UserError as error:
            notes.append(f"no paired differences: {error}")
    pictures = [
        illustration(chart, name=_prefixed(first.measurement, chart.name)) for chart in charts if not chart.is_empty()
    ]
    return Finding(
        first.measurement,
        f"{first.measurement}: {', '.join(name for name, _ in done)}",
        description,
        _headline(measurement, done),
        "",
        "measured",
        illustrations=(*pictures,),
        tables=(*tables,),
        notes=(*notes, *_settings(measurement, first)),
    )


def _prefixed(measurement: str, name: str) -> str:
    return name if name.startswith(measurement) else f"{measurement}-{name}"


def _headline(measurement: Measurement, done: list[Named]) -> str:
    """Write the mean of the first quantity that all models have, with its interval over documents."""
    pairs = {name: measurement.pairs(result.units) for name, result in done}
    shared = [quantity for quantity in next(iter(pairs.values())) if all(quantity in pair for pair in pairs.values())]
    if not shared:
        return "see the table"
    parts = []
    for name, quantities in pairs.items():
        values, weights = zip(*quantities[shared[0]].values(), strict=True)
        mean = weighted_mean(values, weights)
        interval = "" if mean.low is None or mean.high is None else f" [{mean.low:.4g}, {mean.high:.4g}]"
        parts.append(f"{name} {mean.value:.4g}{interval}")
    return f"{', '.join(parts)} {shared[0]}"


def _settings(measurement: Measurement, results: Results) -> list[str]:
    """Write the settings that are not the default."""
    plain = to_json(type(measurement)())
    chosen = {key: value for key, value in results.settings.items() if value != plain.get(key)}
    shown = ", ".join(f"{key} = {json.dumps(value)}" for key, value in chosen.items())
    return [f"Settings: {shown}."] if shown else []


# Of the charts of a memory those that tell a healthy run from a collapsed one; entropies are in `sdm report`.
SHOWN = ("slots-written", "slots-read", "forget_gate", "input_gate")


def run_plot(named: Sequence[tuple[str, Path]]) -> Grid:
    """Chart the metrics of runs, finished or not.

    Args:
        named: Names and folders of runs.

    Returns:
        The loss and, if any of the runs has an SDM layer, slots and gates.

    Raises:
        UserError: If a folder holds no run, or a run has no metrics yet.
    """
    sources = [read_source(label, path) for label, path in named]
    for source, (_, path) in zip(sources, named, strict=True):
        if source.run is None:
            raise UserError(f"{str(path)!r} is not a run's folder; `sdm train` makes runs")
        if source.faults:
            raise UserError(source.faults[0])
        if not source.metrics:
            raise UserError(f"{str(path)!r} has no metrics yet; wait for its first steps")
    trained, held_out = ({source.name: source.series(key) for source in sources} for key in ("loss", "valid/loss"))
    charts: list[Chart] = [loss_chart(trained, held_out)]
    metrics = {source.name: source.metrics for source in sources}
    if any("memory/slots_written" in line for lines in metrics.values() for line in lines):
        memory = {chart.name: chart for chart in utilisation_chart(metrics).charts if isinstance(chart, Chart)}
        charts += [memory[f"memory-{kind}"] for kind in SHOWN]
    return Grid("training", "", charts, width=3 if len(charts) > 1 else 1, share_y=False)
