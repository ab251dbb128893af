"""Progress of measurements and of the jobs of a study: bars and the remaining time; plain lines without a terminal."""

from __future__ import annotations

import contextlib
import heapq
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

if TYPE_CHECKING:
    from sdm.evaluation.measurement import Advance, Listener
    from sdm.reproduce.jobs import Job, JobStatus
    from sdm.reproduce.jobs import Progress as StudyListener


PLAIN_SECONDS = 15.0
TRAINING = 0.9  # of the work of a job; the rest is measuring, whose progress is not known
KNOWN = 0.05  # the proportion of a job after which its own speed is used for the rest of it


@contextlib.contextmanager
def eval_progress(quiet: bool = False) -> Iterator[Listener]:
    """Make a listener that shows how far each model of a measurement is."""
    if quiet:
        yield lambda advance: None
        return
    if not sys.stderr.isatty():
        yield _Plain()
        return
    with Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
        console=Console(stderr=True),
        transient=True,
    ) as display:
        tasks: dict[str, TaskID] = {}

        def update(advance: Advance) -> None:
            if advance.name not in tasks:
                tasks[advance.name] = display.add_task(advance.name, total=advance.total, completed=int(advance.done))
            display.update(tasks[advance.name], completed=advance.done)

        yield update


class _Plain:
    """A line now and then, with the remaining time by what this session has measured."""

    def __init__(self) -> None:
        self._begun: dict[str, tuple[float, float]] = {}
        self._last = time.monotonic()

    def __call__(self, advance: Advance) -> None:
        now = time.monotonic()
        start, before = self._begun.setdefault(advance.name, (now, advance.done))
        if now - self._last < PLAIN_SECONDS:
            return
        self._last = now
        left = ""
        if before < advance.done < advance.total:
            seconds = (now - start) * (advance.total - advance.done) / (advance.done - before)
            left = f", {seconds / 60:.1f} minutes left"
        print(f"{advance.name}: {advance.done / advance.total:.0%}{left}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def study_progress(jobs: Sequence[Job], processes: int, console: Console) -> Iterator[StudyListener]:
    """Make a listener that shows how far each job is."""
    if not console.is_terminal:
        yield _plain(jobs, processes, console)
        return
    bar = Progress(
        TextColumn("[bold]{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), console=console
    )
    overall = bar.add_task("all runs", total=sum(job.work for job in jobs))
    with Live(bar, console=console, auto_refresh=False) as live:  # the listener refreshes often enough

        def update(statuses: Mapping[str, JobStatus]) -> None:
            done = sum(job.work * _proportion(job, statuses[job.name]) for job in jobs)
            bar.update(overall, completed=done)
            running = [_line(job, statuses[job.name]) for job in jobs if statuses[job.name].state == "running"]
            live.update(Group(bar, Text("\n".join([_overall(jobs, statuses, processes), *running]))), refresh=True)

        yield update


def _plain(jobs: Sequence[Job], processes: int, console: Console) -> StudyListener:
    last, told = time.monotonic(), set[str]()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(statuses: Mapping[str, JobStatus]) -> None:
        nonlocal last
        for name, status in statuses.items():
            if status.seconds and status.state in ("done", "failed") and name not in told:
                say(f"{name}: {status.state} after {status.seconds:.0f} s  {_summary(status.metrics)}".rstrip())
                told.add(name)
        if time.monotonic() - last >= PLAIN_SECONDS:
            last = time.monotonic()
            say(_overall(jobs, statuses, processes))

    return update


def _overall(jobs: Sequence[Job], statuses: Mapping[str, JobStatus], processes: int) -> str:
    counts = {state: sum(status.state == state for status in statuses.values()) for state in ("done", "failed")}
    total = sum(job.work for job in jobs)
    share = sum(job.work * _proportion(job, statuses[job.name]) for job in jobs) / total
    text = f"{share:4.0%}: {counts['done']} of {len(jobs)} runs done"
    text += f", {counts['failed']} failed" if counts["failed"] else ""
    left = time_left(jobs, statuses, processes)
    return text if left is None else f"{text}, about {timedelta(seconds=round(left))} left"


def _line(job: Job, status: JobStatus) -> str:
    steps = job.config.schedule.steps
    step = int(status.metrics.get("step", 0))
    doing = "measuring" if step == steps else f"step {step}/{steps}"
    return f"  {job.name}: {doing}  {_summary(status.metrics)}"


def time_left(jobs: Sequence[Job], statuses: Mapping[str, JobStatus], processes: int) -> float | None:
    """Estimate the remaining seconds from the speed of each job, or the mean speed where a job has none yet.

    Returns:
        None if nothing is known yet. Long jobs start first.
    """
    seconds = work = 0.0
    speeds = {}
    for job in jobs:
        status = statuses[job.name]
        done = _proportion(job, status) - _proportion_at(job, status.first_step)
        if status.seconds > 0 and done > 0 and status.state != "failed":
            seconds, work = seconds + status.seconds, work + done * job.work
            if done > KNOWN:
                speeds[job.name] = status.seconds / (done * job.work)
    if work == 0:
        return None
    rest = {
        job.name: (1 - _proportion(job, statuses[job.name])) * job.work * speeds.get(job.name, seconds / work)
        for job in jobs
        if statuses[job.name].state in ("running", "waiting")
    }
    running = [rest.pop(name) for name in list(rest) if statuses[name].state == "running"]
    ends = [*running, *[0.0] * (processes - len(running))]
    heapq.heapify(ends)
    for duration in sorted(rest.values(), reverse=True):
        heapq.heapreplace(ends, ends[0] + duration)
    return max(ends)


def _proportion(job: Job, status: JobStatus) -> float:
    """The finished proportion of a job."""
    if status.state in ("done", "failed"):
        return 1.0
    return _proportion_at(job, status.metrics.get("step", status.first_step))


def _proportion_at(job: Job, step: float) -> float:
    return TRAINING * step / job.config.schedule.steps


def _summary(metrics: Mapping[str, float]) -> str:
    parts = []
    for key, text in (
        ("loss", "loss {:.3f}"),
        ("tokens_per_second", "{:,.0f} tokens/s"),
        ("memory/slots_written", "slots {:.0%}"),
    ):
        if key in metrics:
            parts.append(text.format(metrics[key]))
    return "  ".join(parts)
