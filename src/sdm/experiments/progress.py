"""Progress of several runs at once: a bar each on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Newest = dict[str, dict[str, float]]
PLAIN_SECONDS = 15.0


@contextlib.contextmanager
def make_progress(steps: dict[str, int]) -> Iterator[Callable[[Newest], None]]:
    """A function that is told the newest metrics of each run that has begun."""
    if not sys.stdout.isatty():
        yield _plain(steps)
        return
    with Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[summary]}"),
    ) as display:
        tasks = {name: display.add_task(name, total=total, summary="", start=False) for name, total in steps.items()}

        def update(newest: Newest) -> None:
            for name, metrics in newest.items():
                display.start_task(tasks[name])
                display.update(tasks[name], completed=metrics.get("step", 0), summary=_summary(metrics))
                if metrics.get("step") == steps[name]:
                    display.stop_task(tasks[name])

        yield update


def _plain(steps: dict[str, int]) -> Callable[[Newest], None]:
    last = 0.0

    def update(newest: Newest) -> None:
        nonlocal last
        if time.monotonic() - last < PLAIN_SECONDS:
            return
        last = time.monotonic()
        for name, metrics in newest.items():
            if metrics and metrics["step"] < steps[name]:
                print(f"{name}: step {metrics['step']}/{steps[name]}  {_summary(metrics)}", flush=True)

    return update


def _summary(metrics: dict[str, float]) -> str:
    parts = []
    for key, text in (
        ("loss", "loss {:.3f}"),
        ("tokens_per_second", "{:,.0f} tokens/s"),
        ("memory/slots_written", "slots {:.0%}"),
    ):
        if key in metrics:
            parts.append(text.format(metrics[key]))
    return "  ".join(parts)
