"""What stands at the end of a page: the runs, what failed, where and with what everything was made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sdm.analysis.pages import Finding, Section
from sdm.analysis.pages.environment import environment
from sdm.evaluation.report import Table
from sdm.reproduce.jobs import Job, Outcome
from sdm.reproduce.pool import processors


def details(jobs: Sequence[Job], outcomes: Mapping[str, Outcome], command: str, seconds: float) -> tuple[Section, ...]:
    """The runs, the environment and the commands."""
    return (
        Section(
            "Runs",
            ("Each is a folder beside this page; its `run.json` is the whole configuration.",),
            (_runs(jobs, outcomes),),
        ),
        Section("Environment", tables=(_environment(seconds),)),
        Section("Commands", preformatted=_commands(outcomes[jobs[-1].name].folder, command)),
    )


def failures(outcomes: Mapping[str, Outcome]) -> tuple[Finding, ...]:
    """One finding with the logs of all runs that failed; none if none has."""
    failed = {name: one.failure for name, one in outcomes.items() if one.failure is not None}
    if not failed:
        return ()
    logs = "\n\n".join(f"{name}:\n{log}" for name, log in failed.items())
    claim = "Everything above is made of the other runs; the same command tries these again."
    found = f"{len(failed)} of {len(outcomes)} runs failed: {', '.join(failed)}"
    return (Finding("failed", "Runs that failed", claim, found, "-", "failed", logs),)


def _runs(jobs: Sequence[Job], outcomes: Mapping[str, Outcome]) -> Table:
    rows = []
    for job in jobs:
        facts = outcomes[job.name].facts or {}
        rows.append(
            (
                job.name,
                f"{facts['parameters']:,}" if "parameters" in facts else "",
                f"{job.config.schedule.steps:,}",
                f"{job.config.optim.lr:g}",
                str(job.config.seed),
                f"{facts['seconds']:.0f}" if "seconds" in facts else "",
                "failed" if outcomes[job.name].failure is not None else "done" if facts else "missing",
            )
        )
    return Table(
        "", ("run", "parameters", "steps", "lr", "seed", "seconds", ""), rows, "Seconds of training, one thread."
    )


def _environment(seconds: float) -> Table:
    rows = [*environment().items(), ("cores to use", str(processors())), ("minutes", f"{seconds / 60:.1f}")]
    return Table("", ("what", "here"), rows, "Minutes: of the last call, which does not repeat what earlier ones did.")


def _commands(folder: Path, command: str) -> str:
    lines = {
        command: "all of this; what is done is not repeated",
        f"sdm info {folder}": "a model of it: sizes, layers, costs",
        f"sdm eval speed {folder}": "any measurement of any run",
        f"sdm generate {folder}": "text from a model of text",
    }
    width = max(map(len, lines)) + 2
    return "\n".join(f"{line:<{width}}# {what}" for line, what in lines.items())
