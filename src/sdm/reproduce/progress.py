"""Progress of many jobs at once: a bar for all and a line for each that runs, or plain lines where no terminal is."""

from __future__ import annotations

import contextlib
import heapq
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from sdm.reproduce.jobs import Job, Standing
from sdm.reproduce.jobs import Progress as Listener

PLAIN_SECONDS = 15.0
TRAINING = 0.9  # of the work of a job; the rest is measuring, of which no more is known than its end
KNOWN = 0.05  # the share of a job from which on its own speed is taken for the rest of it


@contextlib.contextmanager
def make_progress(jobs: Sequence[Job], processes: int, console: Console) -> Iterator[Listener]:
    """A function that is told how far each job is."""
    if not console.is_terminal:
        yield _plain(jobs, processes, console)
        return
    bar = Progress(
        TextColumn("[bold]{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), console=console
    )
    overall = bar.add_task("all runs", total=sum(job.work for job in jobs))
    with Live(bar, console=console, auto_refresh=False) as live:  # it is told often enough

        def update(standings: Mapping[str, Standing]) -> None:
            done = sum(job.work * _share(job, standings[job.name]) for job in jobs)
            bar.update(overall, completed=done)
            running = [_line(job, standings[job.name]) for job in jobs if standings[job.name].state == "running"]
            live.update(Group(bar, Text("\n".join([_overall(jobs, standings, processes), *running]))), refresh=True)

        yield update


def _plain(jobs: Sequence[Job], processes: int, console: Console) -> Listener:
    last, told = time.monotonic(), set[str]()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(standings: Mapping[str, Standing]) -> None:
        nonlocal last
        for name, one in standings.items():
            if one.seconds and one.state in ("done", "failed") and name not in told:
                say(f"{name}: {one.state} after {one.seconds:.0f} s  {_summary(one.metrics)}".rstrip())
                told.add(name)
        if time.monotonic() - last >= PLAIN_SECONDS:
            last = time.monotonic()
            say(_overall(jobs, standings, processes))

    return update


def _overall(jobs: Sequence[Job], standings: Mapping[str, Standing], processes: int) -> str:
    counts = {state: sum(one.state == state for one in standings.values()) for state in ("done", "failed")}
    total = sum(job.work for job in jobs)
    share = sum(job.work * _share(job, standings[job.name]) for job in jobs) / total
    text = f"{share:4.0%}: {counts['done']} of {len(jobs)} runs done"
    text += f", {counts['failed']} failed" if counts["failed"] else ""
    left = time_left(jobs, standings, processes)
    return text if left is None else f"{text}, about {timedelta(seconds=round(left))} left"


def _line(job: Job, standing: Standing) -> str:
    steps = job.config.schedule.steps
    step = int(standing.metrics.get("step", 0))
    doing = "measuring" if step == steps else f"step {step}/{steps}"
    return f"  {job.name}: {doing}  {_summary(standing.metrics)}"


def time_left(jobs: Sequence[Job], standings: Mapping[str, Standing], processes: int) -> float | None:
    """Seconds, from the speed of each job that has one and the common speed for the others; None if nothing is known
    yet. The longest begin first."""
    seconds = work = 0.0
    speeds = {}
    for job in jobs:
        one = standings[job.name]
        gone = _share(job, one) - _share_at(job, one.first_step)
        if one.seconds > 0 and gone > 0 and one.state != "failed":
            seconds, work = seconds + one.seconds, work + gone * job.work
            if gone > KNOWN:
                speeds[job.name] = one.seconds / (gone * job.work)
    if work == 0:
        return None
    rest = {
        job.name: (1 - _share(job, standings[job.name])) * job.work * speeds.get(job.name, seconds / work)
        for job in jobs
        if standings[job.name].state in ("running", "waiting")
    }
    running = [rest.pop(name) for name in list(rest) if standings[name].state == "running"]
    ends = [*running, *[0.0] * (processes - len(running))]
    heapq.heapify(ends)
    for one_rest in sorted(rest.values(), reverse=True):
        heapq.heapreplace(ends, ends[0] + one_rest)
    return max(ends)


def _share(job: Job, standing: Standing) -> float:
    """How much of a job is done."""
    if standing.state in ("done", "failed"):
        return 1.0
    return _share_at(job, standing.metrics.get("step", standing.first_step))


def _share_at(job: Job, step: float) -> float:
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
