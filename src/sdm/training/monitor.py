"""Where the metrics go: always into metrics.jsonl, and to whoever looks on."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from sdm.files import write_bytes
from sdm.training.config import MonitorConfig
from sdm.training.errors import TrainingError

Metrics = Mapping[str, float | int]


class Display(Protocol):
    """Shows metrics to a person."""

    def update(self, step: int, metrics: Metrics) -> None: ...

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


class Monitor:
    """Writes metrics and passes them on."""

    def __init__(self, folder: Path, config: MonitorConfig, steps: int) -> None:
        self.folder = folder
        self.display = make_display(config.display, folder.name, steps)
        self._path = folder / "metrics.jsonl"
        self._tensorboard = _tensorboard(folder) if config.tensorboard else None
        self._wandb = _wandb(config.wandb, folder) if config.wandb else None

    def rewind(self, step: int) -> None:
        """Forget the metrics of steps after `step`: they will be measured again."""
        if not self._path.is_file():
            return
        lines = self._path.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if _step_of(line) <= step]
        if len(kept) < len(lines):
            write_bytes(self._path, "".join(f"{line}\n" for line in kept).encode())

    def log(self, step: int, metrics: Metrics) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        self.display.update(step, metrics)
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=step)

    def message(self, text: str) -> None:
        self.display.message(text)

    def close(self) -> None:
        self.display.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl; a last line that was cut off is left out."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if _step_of(line) < float("inf")]


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
    """A progress bar with the newest numbers."""

    def __init__(self, name: str, steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[summary]}"),
        )
        self._task = self._progress.add_task(name, total=steps, summary="")
        self._shown: dict[str, float | int] = {}
        self._progress.start()

    def update(self, step: int, metrics: Metrics) -> None:
        self._shown |= metrics
        self._progress.update(self._task, completed=step, summary=_summary(self._shown))

    def message(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()


def _summary(metrics: Metrics) -> str:
    parts = []
    for key, text in (
        ("loss", "loss {:.4f}"),
        ("valid/loss", "held-out {:.4f}"),
        ("lr", "lr {:.2e}"),
        ("tokens_per_second", "{:,.0f} tokens/s"),
        ("memory/slots_written", "slots written {:.0%}"),
        ("memory/slots_read", "read {:.0%}"),
        ("seconds_left", "{:.0f} s left"),
    ):
        if key in metrics:
            parts.append(text.format(metrics[key]))
    return "  ".join(parts)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")


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
