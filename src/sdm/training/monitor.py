"""Where the metrics go: always into metrics.jsonl, and to whoever looks on."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sdm.files import write_bytes
from sdm.run import Run
from sdm.run.config import MonitorConfig
from sdm.run.errors import TrainingError
from sdm.run.folder import step_of
from sdm.signals import silence

if TYPE_CHECKING:
    from rich.console import Console

Metrics = Mapping[str, float | int]


class Display(Protocol):
    """Shows metrics to a person."""

    def update(self, step: int, metrics: Metrics) -> None: ...

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


class Monitor:
    """Writes metrics and passes them on."""

    def __init__(self, run: Run, config: MonitorConfig, steps: int) -> None:
        folder, self._path = run.folder, run.metrics_file
        self._tensorboard = _tensorboard(folder) if config.tensorboard else None
        self._wandb = _wandb(config.wandb, folder) if config.wandb else None
        # Last: a display that has begun hides the cursor, and what fails before it would leave it hidden.
        self.display = make_display(config.display, folder.name, steps)

    def rewind(self, step: int) -> None:
        """Forget the metrics of steps after `step`: they will be measured again. A last line gets its end."""
        if not self._path.is_file():
            return
        data = self._path.read_bytes()
        kept = b"".join(line + b"\n" for line in data.splitlines() if step_of(line) <= step)
        if kept != data:
            write_bytes(self._path, kept)

    def log(self, step: int, metrics: Metrics) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=step)
        # Last: whoever looks on may have gone.
        self.display.update(step, metrics)

    def message(self, text: str) -> None:
        self.display.message(text)

    def close(self) -> None:
        try:
            self.display.close()
        except (OSError, SystemExit):  # rich makes a SystemExit of a broken pipe
            silence(sys.stdout)
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


class NoMonitor(Monitor):
    """That of a rank which is not the first."""

    def __init__(self) -> None: ...

    def rewind(self, step: int) -> None: ...

    def log(self, step: int, metrics: Metrics) -> None: ...

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


def make_display(kind: str, name: str, steps: int) -> Display:
    if kind == "none":
        return NoDisplay()
    if kind == "live" or (kind == "auto" and sys.stdout.isatty()):
        return LiveDisplay(name, steps)
    return PlainDisplay(name, steps)


class NoDisplay:
    """Shows nothing."""

    def update(self, step: int, metrics: Metrics) -> None: ...

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


class PlainDisplay:
    """A line per measurement, for logs and pipes."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps = name, steps

    def update(self, step: int, metrics: Metrics) -> None:
        print(f"{self.name}: step {step}/{self.steps}  {_summary(metrics)}", flush=True)

    def message(self, text: str) -> None:
        print(f"{self.name}: {text}", flush=True)

    def close(self) -> None: ...


class LiveDisplay:
    """A progress bar, and below it the newest numbers: beside it they would not fit into 80 columns."""

    def __init__(self, name: str, steps: int, console: Console | None = None) -> None:
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.table import Column

        self._progress = Progress(
            TextColumn("{task.description}", "bold", markup=False, table_column=Column(max_width=32, no_wrap=True)),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
        )
        self._task = self._progress.add_task(name, total=steps)
        self._shown: dict[str, float | int] = {}
        self._live = Live(self._progress, console=console, refresh_per_second=2)
        self._live.start()

    def update(self, step: int, metrics: Metrics) -> None:
        from rich.console import Group
        from rich.text import Text

        self._shown |= metrics
        self._progress.update(self._task, completed=step)
        self._live.update(Group(self._progress, Text(_summary(self._shown))))

    def message(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()


def _summary(metrics: Metrics) -> str:
    parts = []
    for key, text in (
        ("loss", "loss {:.4f}"),
        ("valid/loss", "held-out {:.4f}"),
        ("lr", "lr {:.2e}"),
        ("tokens_per_second", "{:,.0f} tokens/s"),
        ("memory/slots_written", "slots written {:.0%}"),
        ("memory/slots_read", "read {:.0%}"),
    ):
        if key in metrics:
            parts.append(text.format(metrics[key]))
    if "seconds_left" in metrics:
        parts.append(f"{timedelta(seconds=round(metrics['seconds_left']))} left")
    return "  ".join(parts)


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise TrainingError("monitor.tensorboard needs tensorboard: pip install tensorboard") from error
    return SummaryWriter(str(folder / "tensorboard"))


def _wandb(project: str, folder: Path) -> Any:
    try:
        import wandb  # type: ignore[import-not-found]
    except ImportError as error:
        raise TrainingError("monitor.wandb needs wandb: pip install wandb") from error
    return wandb.init(project=project, name=folder.name, dir=str(folder), resume="allow", id=folder.name)
