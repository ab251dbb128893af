"""`sdm reproduce quick`: the paper's claims in miniature, on two cores in minutes, as tables and as a page."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from sdm.analysis.pages import Finding, Page
from sdm.reproduce.conclude import attempt, conclude
from sdm.reproduce.details import details, failures
from sdm.reproduce.jobs import Job, Outcome, run_jobs
from sdm.reproduce.prepare import prepare_corpora
from sdm.reproduce.progress import make_progress
from sdm.reproduce.studies.quick import cost, language, memory, recall
from sdm.reproduce.studies.quick.jobs import quick_jobs

TITLE = "Sparse Delta Memory in miniature"
LEAD = (
    "Small models, trained in minutes on a processor: does a memory of many slots, written and read in a few places "
    "per token, do what the paper says?"
    "\n\n"
    "The models are tiny, and are given help that the paper's do not need. What differs from the paper stands beside "
    "every figure, and the plain recipe, which does not favour SDM at this size, is shown too."
)


def reproduce(output: Path, processes: int, console: Console, jobs: Sequence[Job] | None = None) -> None:
    """Run everything into a folder, and show what came of it. `jobs`, of the same names, may be smaller ones."""
    start = time.perf_counter()
    jobs = quick_jobs() if jobs is None else jobs
    output.mkdir(parents=True, exist_ok=True)
    prepare_corpora(jobs)
    with make_progress(jobs, processes, console) as progress:
        outcomes = run_jobs(jobs, output, processes, progress)
    console.print("All runs have ended. Measuring what a token costs, and what the memory did.")
    found = findings(outcomes)
    sections = details(jobs, outcomes, f"sdm reproduce quick --output {output}", time.perf_counter() - start)
    try:
        conclude(Page(TITLE, LEAD, found, sections), outcomes, output, console)
    finally:
        minutes = (time.perf_counter() - start) / 60
        console.print(f"{minutes:.1f} minutes. Try:  sdm generate {output / 'code-sdm'} --prompt 'def '")


def findings(outcomes: Mapping[str, Outcome]) -> tuple[Finding, ...]:
    """What is said about the runs; costs and the use of the memory are measured for it."""
    return (
        attempt(lambda: recall.finding(outcomes), recall.KEY, recall.TITLE, recall.CLAIM, recall.PAPER),
        *language.findings(outcomes),
        attempt(lambda: cost.finding(cost.measure(outcomes)), cost.KEY, cost.TITLE, cost.CLAIM, cost.PAPER),
        attempt(
            lambda: memory.finding(memory.measure(outcomes)),
            memory.KEY,
            memory.TITLE,
            memory.CLAIM,
            memory.PAPER,
        ),
        *failures(outcomes),
    )
