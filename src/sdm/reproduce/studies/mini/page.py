"""The page of `sdm reproduce mini`, from whatever its folder holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import get_args

from sdm.analysis.pages import Finding, Page, Section, Verdict
from sdm.evaluation.report import Table
from sdm.reproduce.conclude import attempt
from sdm.reproduce.jobs import read_outcome
from sdm.reproduce.recipes.mini import DEVIATIONS, PLAIN
from sdm.reproduce.studies.mini.ablations import aids_finding, grid_finding, rates_table
from sdm.reproduce.studies.mini.access import access_finding, utilisation_finding
from sdm.reproduce.studies.mini.cells import SEEDS, Experiment, jobs_of
from sdm.reproduce.studies.mini.costs import snapshot_finding, speed_finding
from sdm.reproduce.studies.mini.ladder import ladder_finding
from sdm.reproduce.studies.mini.language import initial_finding, mixed_finding, position_finding, size_finding
from sdm.reproduce.studies.mini.recall import recall_finding
from sdm.reproduce.studies.mini.results import Cells
from sdm.reproduce.studies.mini.tasks import retrieval_finding, short_finding


def mini_page(cells: Cells, experiments: Mapping[str, Experiment]) -> Page:
    """A finding for every experiment of the paper. One that cannot be made says why, and the rest is made."""
    makers: dict[str, Callable[[], Finding]] = {
        "Scaling": lambda: ladder_finding(cells, experiments["ladder"]),
        "More context, lower loss": lambda: position_finding(cells),
        "Memory size": lambda: size_finding(cells, experiments["memory size"]),
        "Recall and the size of the state": lambda: recall_finding(cells, experiments["recall"]),
        "Retrieval in text": lambda: retrieval_finding(cells),
        "A learned initial state": lambda: initial_finding(cells, experiments["initial state"]),
        "A mixed hybrid": lambda: mixed_finding(cells),
        "The aids, and the plain recipe": lambda: aids_finding(cells, experiments["aids"], experiments["plain"]),
        "Writes and reads": lambda: grid_finding(cells, experiments["writes and reads"]),
        "How keys are used": lambda: access_finding(cells, experiments["writes and reads"]),
        "Memory in use during training": lambda: utilisation_finding(cells),
        "Cost of a token": lambda: speed_finding(cells),
        "What backward keeps": lambda: snapshot_finding(cells),
        "Short-context tasks": lambda: short_finding(cells),
    }
    findings = tuple(
        attempt(make, f"finding-{number}", title, "", "") for number, (title, make) in enumerate(makers.items(), 1)
    )
    return Page(
        "The paper in miniature",
        _lead(cells, experiments, findings),
        findings,
        (
            Section("Learning rates", tables=(rates_table(cells, experiments["learning rates"]),)),
            Section("Runs of each experiment", tables=(_runs_table(cells, experiments),)),
            Section("Deviations from the paper", (*DEVIATIONS, PLAIN)),
        ),
    )


def _lead(cells: Cells, experiments: Mapping[str, Experiment], findings: tuple[Finding, ...]) -> str:
    verdicts = [finding.verdict for finding in findings]
    counts = {name: verdicts.count(name) for name in get_args(Verdict)}
    jobs = {job.name: job for experiment in experiments.values() for job in jobs_of(experiment)}
    trained = sum(read_outcome(job, cells.folder / name).facts is not None for name, job in jobs.items())
    state = f"{trained} of {len(jobs)} runs are finished" + (
        f", {len(cells.failures)} failed" if cells.failures else ""
    )
    return (
        "Every experiment of the paper with models of 55,000 to 210,000 parameters, trained on the code of Python's "
        f"standard library in seconds to minutes each, with {SEEDS} seeds. Of {len(findings)} findings the direction "
        f"agrees with the paper's in {counts['agrees']}, differs in {counts['differs']}, and is unclear in "
        f"{counts['unclear']}; {counts['missing']} are missing. {state}.\n\n"
        "Models this small and this short of tokens do not learn to recall with the paper's recipe. They are given two "
        "aids that the paper's models do not have, and what happens without them is shown as well. Learning rates were "
        "chosen on validation documents; all numbers are of test documents."
    )


def _runs_table(cells: Cells, experiments: Mapping[str, Experiment]) -> Table:
    rows = []
    for name, experiment in experiments.items():
        jobs = jobs_of(experiment)
        facts = [fact for variant in experiment.values() for fact in cells.facts(variant)]
        failed = sum(job.name in cells.failures for job in jobs)
        minutes = sum(fact["seconds"] for fact in facts) / 60
        rows.append((name, str(len(jobs)), str(len(facts)), str(failed), f"{minutes:.1f}"))
    return Table(
        "",
        ("experiment", "planned", "trained", "failed", "minutes"),
        rows,
        "Experiments share runs, which count in each. Minutes of training by the clock, one thread a run.",
    )
