"""How far a measurement is: a bar with the remaining time on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from sdm.evaluation.measurement import Advance, Listener

PLAIN_SECONDS = 15.0


@contextlib.contextmanager
def progress(quiet: bool = False) -> Iterator[Listener]:
    """A function that is told how far a session is."""
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
