"""Run a study and show it: its jobs seed by seed, then its findings as a page, as results.json and for the terminal."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sdm.analysis.pages import Finding, Page, illustration, write_page
from sdm.analysis.pages import Section as PageSection
from sdm.analysis.pages.write import environment
from sdm.analysis.trace_page import write_run_trace
from sdm.errors import UserError
from sdm.evaluation.eval_model import open_model
from sdm.evaluation.measurement import evaluate
from sdm.evaluation.report import Table
from sdm.files import DamagedFile, read_json, write_json
from sdm.ranks import usable_cores
from sdm.reproduce.jobs import Job, Outcome, Progress, prepare_corpora, run_jobs, study_lock
from sdm.reproduce.study import (
    NOT_REPORTED,
    NOT_YET,
    RULE,
    SPEED_FOLDER,
    Exhibit,
    Section,
    Study,
    StudyResults,
    Variant,
    combined,
)
from sdm.run import Run

FEW_CLAIMS = 3
FAILURES = "failures.json"  # the ends of logs, for a page that is written later
MakeProgress = Callable[[Sequence[Job]], AbstractContextManager[Progress]]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StudyReport:
    """A page that was written, and what failed."""

    page: Page
    path: Path
    failed: Sequence[str]
    """Names of runs that failed, or of findings if no run did."""
    runs: int

    def check(self) -> None:
        """Raise a UserError if anything failed."""
        if self.failed:
            raise UserError(
                f"{len(self.failed)} of {self.runs} failed: {', '.join(self.failed)}; {self.path} has their logs. The "
                "same command tries them again"
            )


def run_study(
    study: Study,
    output: Path,
    processes: int = 1,
    progress: MakeProgress = lambda jobs: nullcontext(lambda statuses: None),
    report_only: bool = False,
    only: Sequence[str] = (),
) -> StudyReport:
    """Run what is not done and write the page of everything that is there.

    Args:
        study: What to run and show.
        output: Folder of the runs, the page and its figures. One process at a time works in it.
        processes: Runs at a time, one thread each.
        progress: Makes a listener for the jobs of a round.
        report_only: Run nothing.
        only: Experiments to run, of `study.groups`; all if none is named. The page shows what the folder has of others.

    Raises:
        UserError: If an experiment is not known, another process works in the folder, or it cannot be used. Failed
            runs are in the report.
    """
    start, runs = time.perf_counter(), study.runs(only)
    if report_only and not output.is_dir():
        raise UserError(f"--output: {output} is not a folder; without --report-only it is made")
    with study_lock(output):
        failures = _read_failures(output) if report_only else _run(study, runs, output, processes, progress)
        if not report_only:
            _measure_speed(study, StudyResults(output, failures))
            _write_traces(study, StudyResults(output, failures))
        results = StudyResults(output, failures)
        page = study_page(study, results, time.perf_counter() - start, only)
        outcomes = {variant.run_name(seed): results.outcome(variant, seed) for variant, seed in study.runs()}
        write_json(output / "results.json", _as_json(page, outcomes))
        path = write_page(page, output)
    failed = list(failures) or [finding.title for finding in page.findings if finding.verdict == "failed"]
    return StudyReport(page, path, failed, len(outcomes))


def _run(
    study: Study, runs: Sequence[tuple[Variant, int]], output: Path, processes: int, progress: MakeProgress
) -> dict[str, str]:
    """Run the jobs. Returns the end of the log of each that failed."""
    rounds: dict[int, list[Job]] = {}
    for variant, seed in runs:
        rounds.setdefault(study.round_of(variant, seed), []).append(variant.job(seed))
    prepare_corpora([job for jobs in rounds.values() for job in jobs])
    failures: dict[str, str] = {}
    for number, (_, jobs) in enumerate(sorted(rounds.items()), start=1):
        if len(rounds) > 1:
            log.info("round %d of %d: %d runs", number, len(rounds), len(jobs))
        with progress(jobs) as listener:
            outcomes = run_jobs(jobs, output, processes, listener)
        failures |= {name: outcome.failure for name, outcome in outcomes.items() if outcome.failure is not None}
        write_json(output / FAILURES, failures)
    return failures


def _read_failures(output: Path) -> dict[str, str]:
    try:
        return read_json(output / FAILURES)
    except (FileNotFoundError, DamagedFile):
        return {}


def _measure_speed(study: Study, results: StudyResults) -> None:
    """Measure the models in turns on one thread, after all training: timings need an idle machine."""
    if study.speed is None:
        return
    folders = [outcome.folder for variant in study.timed if (outcome := results.first(variant)) is not None]
    if not folders:
        return
    log.info("measuring the speed of %d models", len(folders))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        evaluate(
            "speed", study.speed, [(open_model(folder), Run(folder).evaluations / SPEED_FOLDER) for folder in folders]
        )
    except UserError as error:
        log.warning("speed is not measured: %s", error)
    finally:
        torch.set_num_threads(threads)


def _trace_path(results: StudyResults, variant: Variant) -> Path:
    return results.folder / f"trace-{variant.run_name(0)}.html"


def _write_traces(study: Study, results: StudyResults) -> None:
    """Write the pages of the traced models."""
    for variant in study.traced:
        if (outcome := results.first(variant)) is not None:
            try:
                write_run_trace(outcome.folder, _trace_path(results, variant))
            except (UserError, ValueError, ArithmeticError) as error:
                log.warning("%s is not traced: %s", outcome.folder.name, error)


def study_page(study: Study, results: StudyResults, seconds: float = 0.0, only: Sequence[str] = ()) -> Page:
    """The page of a study from whatever its folder holds. With some experiments only, what is missing was not asked
    for, and is left out."""
    made = (_finding(section, results) for section in study.sections)
    findings = tuple(finding for finding in made if not only or finding.tables or finding.verdict != "missing")
    runs = study.runs()
    trained = sum(results.outcome(*run).facts is not None for run in runs)
    counts = {name: sum(finding.verdict == name for finding in findings) for name in ("agrees", "differs", "unclear")}
    status = (
        f"{trained} of {len(runs)} runs are finished{f', {len(results.failures)} failed' if results.failures else ''}. "
        f"Of {len(findings)} findings {counts['agrees']} agree with the paper's direction, {counts['differs']} differ "
        f"and {counts['unclear']} are unclear. {RULE}"
    )
    command = f"sdm reproduce {study.name} --output {shlex.quote(str(results.folder))}"
    deviations = tuple(dict.fromkeys(line for section in study.sections for line in section.deviations))
    traces = [(variant.label, _trace_path(results, variant)) for variant in study.traced]
    links = tuple((f"{label}: {path.name}", path.name) for label, path in traces if path.is_file())
    text = "Point at a token of a held-out text, and the tokens that it reads light up. The maps are exact."
    sections = (
        *([PageSection("Which tokens are read", (text,), links=links)] if links else []),
        PageSection("Deviations from the paper", deviations),
        PageSection("Runs of each experiment", tables=(_groups_table(study, results),)),
        PageSection(
            "Runs",
            ("Each run is a folder beside this page; its `run.json` is the whole configuration.",),
            (_runs_table(runs, results),),
        ),
        PageSection("Environment", tables=(_environment_table(seconds),)),
        PageSection("Commands", preformatted=_commands(results.folder / runs[-1][0].run_name(runs[-1][1]), command)),
    )
    return Page(study.title, f"{study.lead}\n\n{status}", (*findings, *_failed_runs(results)), sections)


def _finding(section: Section, results: StudyResults) -> Finding:
    """A section as a finding; where it cannot be made it says why, so that the others are shown."""
    about = (section.key, section.title, section.text, "not measured", section.paper)
    finding = Finding(*about, "missing", deviations=section.deviations)
    begun = not section.variants or any(results.by_seed(variant, section.measurement) for variant in section.variants)
    try:
        exhibit = section.show(results) if begun else Exhibit()
        differences = [(claim, claim.difference(results)) for claim in section.claims]
    except ImportError as error:
        return replace(finding, why=f"{error}. Install it, and the same command makes this part.")
    except UserError as error:
        return replace(finding, verdict="failed", why=str(error))
    rows = [
        (
            f"{claim.quantity}: {claim.in_words(difference)}",
            claim.paper,
            "-" if claim.paper == NOT_REPORTED else claim.expected,
            claim.verdict(difference),
        )
        for claim, difference in differences
    ]
    measured = [row[0] for row in rows if row[-1] != "missing"]
    # Many claims are for the table below, where there is a summary.
    claims = measured if len(measured) <= FEW_CLAIMS or not exhibit.summary else []
    compared = Table("Compared with the paper", ("measured", "paper", "paper's side", "verdict"), rows, RULE)
    tables = [table for table in (*([compared] if measured else []), *exhibit.tables) if table.rows]
    charts = [(chart, caption) for chart, caption in exhibit.charts if not chart.is_empty()]
    missing = results.missing(section.variants, section.measurement)
    verdict = combined([row[-1] for row in rows], missing)
    if verdict == "measured" and not (tables or charts or exhibit.summary):
        verdict = "missing"
    unfinished = f"Not finished: {'; '.join(missing)}." if missing and verdict != "missing" else ""
    return replace(
        finding,
        found="; ".join(part for part in (exhibit.summary, *claims) if part) or NOT_YET,
        verdict=verdict,
        why=" ".join(part for part in (unfinished, section.why if verdict != "agrees" else "") if part),
        illustrations=tuple(illustration(chart, caption=caption) for chart, caption in charts),
        tables=tuple(tables),
        notes=tuple(exhibit.notes),
    )


def _failed_runs(results: StudyResults) -> tuple[Finding, ...]:
    """One finding with the logs of all runs that failed; none if no run did."""
    if not results.failures:
        return ()
    logs = "\n\n".join(f"{name}:\n{text}" for name, text in results.failures.items())
    text = "Everything above is made of the other runs; the same command tries these again."
    summary = f"{len(results.failures)} runs failed: {', '.join(results.failures)}"
    return (Finding("failed", "Runs that failed", text, summary, "-", "failed", logs),)


def _groups_table(study: Study, results: StudyResults) -> Table:
    rows = []
    for name, group in study.groups.items():
        runs = {variant.run_name(seed): (variant, seed) for variant in group for seed in range(variant.seeds)}
        facts = [facts for run in runs.values() if (facts := results.outcome(*run).facts) is not None]
        failed = sum(run in results.failures for run in runs)
        minutes = sum(fact.seconds for fact in facts) / 60
        rows.append((name, str(len(runs)), str(len(facts)), str(failed), f"{minutes:.1f}"))
    return Table(
        "",
        ("experiment", "planned", "trained", "failed", "minutes"),
        rows,
        "Experiments share runs, which count in each. Minutes of training, one thread a run.",
    )


def _runs_table(runs: Sequence[tuple[Variant, int]], results: StudyResults) -> Table:
    rows = []
    for variant, seed in runs:
        outcome, config = results.outcome(variant, seed), variant.recipe(seed)
        facts = outcome.facts
        rows.append(
            (
                variant.run_name(seed),
                f"{facts.parameters:,}" if facts else "",
                f"{config.schedule.steps:,}",
                f"{config.optim.lr:g}",
                str(seed),
                f"{facts.seconds:.0f}" if facts else "",
                "failed" if outcome.failure is not None else "done" if facts else "missing",
            )
        )
    columns = ("run", "parameters", "steps", "lr", "seed", "seconds", "status")
    return Table("", columns, rows, "Parameters without M0. Seconds of training, one thread.")


def _environment_table(seconds: float) -> Table:
    rows = [*environment().items(), ("cores to use", str(usable_cores())), ("minutes", f"{seconds / 60:.1f}")]
    return Table("", ("what", "here"), rows, "Minutes: of the last call; it does not repeat what earlier calls did.")


def _commands(folder: Path, command: str) -> str:
    lines = {
        command: "run everything; finished parts are not repeated",
        f"{command} --report-only": "write this page again",
        f"sdm info {folder}": "sizes, layers and costs of a model",
        f"sdm eval speed {folder}": "any measurement of any run",
        f"sdm generate {folder}": "text from a language model",
    }
    width = max(map(len, lines)) + 2
    return "\n".join(f"{line:<{width}}# {what}" for line, what in lines.items())


def _as_json(page: Page, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    fields = ("key", "title", "claim", "found", "paper", "verdict", "why", "notes", "deviations")
    return {
        "findings": [{name: getattr(finding, name) for name in fields} for finding in page.findings],
        "runs": {
            name: {
                "facts": None if outcome.facts is None else asdict(outcome.facts),
                "measured": outcome.measured,
                "failure": outcome.failure,
            }
            for name, outcome in outcomes.items()
        },
    }
