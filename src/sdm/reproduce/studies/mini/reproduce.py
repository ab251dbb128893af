"""`sdm reproduce mini`: runs the cells that are not done, seed by seed, and writes the page."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from sdm.analysis.pages import Page
from sdm.errors import UserError
from sdm.files import DamagedFile, read_json, write_json
from sdm.reproduce.conclude import conclude
from sdm.reproduce.details import details
from sdm.reproduce.details import failures as failed_runs
from sdm.reproduce.jobs import Job, Outcome, read_outcome, run_jobs
from sdm.reproduce.prepare import prepare_corpora
from sdm.reproduce.progress import make_progress
from sdm.reproduce.studies.mini.cells import Experiment, rounds
from sdm.reproduce.studies.mini.costs import measure_snapshots, measure_speed
from sdm.reproduce.studies.mini.page import mini_page
from sdm.reproduce.studies.mini.results import Cells

FAILURES = "failures.json"  # the ends of logs, for a page that is written later


def reproduce_mini(
    output: Path, processes: int, console: Console, experiments: Mapping[str, Experiment], report_only: bool = False
) -> Page:
    """Everything into a folder. The page is written whatever failed; what failed is raised after it."""
    start = time.perf_counter()
    jobs = [job for one_round in rounds(experiments) for job in one_round]
    if report_only:
        if not output.is_dir():
            raise UserError(f"--output: {output} is not a folder; without --report-only it is made")
        failures = _read(output / FAILURES)
    else:
        output.mkdir(parents=True, exist_ok=True)
        prepare_corpora(jobs)
        failures = {}
        for seed, some in enumerate(rounds(experiments)):
            console.print(f"seed {seed}: {len(some)} runs")
            failures |= _run(some, output, processes, console)
            write_json(output / FAILURES, failures)
        cells = Cells(output, failures)
        measure_speed(cells)
        measure_snapshots(output)
    outcomes = _outcomes(jobs, output, failures)
    page = mini_page(Cells(output, failures), experiments)
    command = f"sdm reproduce mini --output {shlex.quote(str(output))}"
    sections = (*page.sections, *details(jobs, outcomes, command, time.perf_counter() - start))
    page = replace(page, findings=(*page.findings, *failed_runs(outcomes)), sections=sections)
    conclude(page, outcomes, output, console)
    return page


def _run(jobs: list[Job], output: Path, processes: int, console: Console) -> dict[str, str]:
    """What failed, with the end of its log."""
    with make_progress(jobs, processes, console) as progress:
        outcomes = run_jobs(jobs, output, processes, progress)
    return {name: outcome.failure for name, outcome in outcomes.items() if outcome.failure is not None}


def _outcomes(jobs: list[Job], output: Path, failures: Mapping[str, str]) -> dict[str, Outcome]:
    return {job.name: replace(read_outcome(job, output / job.name), failure=failures.get(job.name)) for job in jobs}


def _read(path: Path) -> dict[str, str]:
    try:
        return read_json(path)
    except (FileNotFoundError, DamagedFile):
        return {}
