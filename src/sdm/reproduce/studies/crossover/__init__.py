"""`sdm reproduce crossover`: where the paper's plain recipe turns the order of SDM and GDN, along tokens and width.

At the smallest scale GDN is ahead. The runs are those of `recipes.plain_code`, longer and wider, and beside them
variants of SDM and GDN at equal FLOPs that say what the order depends on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from sdm.analysis.tables import print_fitting, rich_table
from sdm.errors import UserError
from sdm.reproduce.jobs import Outcome, read_outcome, run_jobs
from sdm.reproduce.prepare import prepare_corpora
from sdm.reproduce.progress import make_progress
from sdm.reproduce.studies.crossover.cells import Cell, cells
from sdm.reproduce.studies.crossover.compare import Documents
from sdm.reproduce.studies.crossover.report import ablation_table, curve_table, write


def reproduce_crossover(
    output: Path,
    processes: int,
    console: Console,
    widths: Sequence[int],
    steps: Sequence[int],
    seeds: int,
    ablations: bool = True,
    report_only: bool = False,
) -> None:
    """Run what is not done yet, and report on all of it. Raises, after that, if a run has failed."""
    wanted = cells(widths, steps, seeds, ablations)
    jobs = [cell.job() for cell in wanted]
    if report_only:
        outcomes = {job.name: read_outcome(job, output / job.name) for job in jobs}
    else:
        prepare_corpora(jobs)
        with make_progress(jobs, processes, console) as progress:
            outcomes = run_jobs(jobs, output, processes, progress)
    measured = read(wanted, outcomes)
    if measured:
        variants = ablation_table(measured, read(wanted, outcomes, "valid"))
        print_fitting(console, rich_table(variants), rich_table(curve_table(measured)))
        for path in write(measured, output):
            console.print(str(path), markup=False, highlight=False, soft_wrap=True)
    console.print(f"{len(measured)} of {len(wanted)} runs are measured", highlight=False)
    failed = [f"{name} failed:\n{one.failure}" for name, one in outcomes.items() if one.failure is not None]
    if failed:
        raise UserError("\n".join([*failed, "The same command tries them again"]))


def read(wanted: Sequence[Cell], outcomes: Mapping[str, Outcome], split: str = "test") -> dict[Cell, Documents]:
    """The likelihoods of the runs that are measured."""
    found: dict[Cell, Documents] = {}
    for cell in wanted:
        outcome = outcomes[cell.name]
        if split in outcome.measured:
            units = outcome.results(split).units
            found[cell] = {name: _halves(one["edges"], one["nll"]) for name, one in units.items()}
    return found


def _halves(edges: Sequence[int], nll: Sequence[float]) -> tuple[float, float]:
    """Nats per token of a document, and from the last edge on, which is its middle."""
    return sum(nll) / edges[-1], nll[-1] / (edges[-1] - edges[-2])
