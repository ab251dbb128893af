"""Metrics and samples of a run: the statistics of memories, metrics.jsonl, displays, and text that the model writes."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from sdm.data.tokenization import Tokenizer
from sdm.errors import TrainingError
from sdm.files import write_bytes
from sdm.layers import SparseDeltaMemory
from sdm.layers.memory_statistics import LayerStatistics, evaluating, observed
from sdm.models import SDMForCausalLM
from sdm.ops.sparse_delta_rule.inputs import Tokens
from sdm.run import Run
from sdm.run.config import MonitorConfig
from sdm.run.folder import step_of
from sdm.signals import silence
from sdm.training.parallel import Parallel

if TYPE_CHECKING:
    from rich.console import Console
    from torch.utils.tensorboard import SummaryWriter

Metrics = Mapping[str, float | int]
SAMPLE_TOKENS, SAMPLE_TEMPERATURE = 64, 0.8
STEP_TOKENS = 16_384  # of a single step: enough for stable shares of memories that a small machine holds


class Display(Protocol):
    """Shows metrics to a person."""

    def update(self, step: int, metrics: Metrics) -> None:
        """Show the metrics of a step."""

    def close(self) -> None:
        """End the display."""


class Monitor:
    """Writes metrics.jsonl, and TensorBoard, Weights & Biases and a display if the configuration asks for them."""

    def __init__(self, run: Run, config: MonitorConfig, steps: int) -> None:
        folder, self._path = run.folder, run.metrics_file
        self._tensorboard = _tensorboard(folder) if config.tensorboard else None
        self._wandb = _wandb(config.wandb, folder) if config.wandb else None
        # Last: a display that has begun hides the cursor, and what fails before it would leave it hidden.
        self.display = make_display(config.display, folder.name, steps)

    def rewind(self, step: int) -> None:
        """Drop the metrics of steps after `step`, which will be measured again, and complete a last line."""
        if not self._path.is_file():
            return
        data = self._path.read_bytes()
        kept = b"".join(line + b"\n" for line in data.splitlines() if step_of(line) <= step)
        if kept != data:
            write_bytes(self._path, kept)

    def log(self, step: int, metrics: Metrics) -> None:
        """Record the metrics of a step."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=step)
        # Last: the terminal may be gone.
        self.display.update(step, metrics)

    def close(self) -> None:
        """End the display and flush what is open."""
        try:
            self.display.close()
        except (OSError, SystemExit):  # rich makes a SystemExit of a broken pipe
            silence(sys.stdout)
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


class NoMonitor(Monitor):
    """Records nothing, on the ranks other than the first."""

    def __init__(self) -> None: ...

    def rewind(self, step: int) -> None:
        """Do nothing."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def make_display(kind: str, name: str, steps: int) -> Display:
    """Return the display of a kind, as in `monitor.display`, for a run of this name and length."""
    if kind == "none":
        return NoDisplay()
    if kind == "live" or (kind == "auto" and sys.stdout.isatty()):
        return LiveDisplay(name, steps)
    return PlainDisplay(name, steps)


class NoDisplay:
    """Shows nothing."""

    def update(self, step: int, metrics: Metrics) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class PlainDisplay:
    """A line per measurement, for logs and pipes."""

    def __init__(self, name: str, steps: int) -> None:
        self.name, self.steps = name, steps

    def update(self, step: int, metrics: Metrics) -> None:
        """Print a line."""
        print(f"{self.name}: step {step}/{self.steps}  {_summary(metrics)}", flush=True)

    def close(self) -> None:
        """Do nothing."""


class LiveDisplay:
    """A progress bar, and below it the newest metrics: beside it they would not fit into 80 columns."""

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
        """Move the bar and replace the metrics."""
        from rich.console import Group
        from rich.text import Text

        self._shown |= metrics
        self._progress.update(self._task, completed=step)
        self._live.update(Group(self._progress, Text(_summary(self._shown))))

    def close(self) -> None:
        """Leave the bar as it is and give the cursor back."""
        self._live.stop()


class MemoryMonitor:
    """Statistics of gates and slots per SDM layer (the paper's appendix), over the tokens of all ranks.

    Steps that are not watched cost nothing.

    Args:
        max_tokens: how many tokens are counted until the statistics are taken; later ones are not.
        weighted: count an access by its strength, the weight of a read or the weight of a write times its input gate,
            instead of as one. It changes the entropies; a slot is in use however weakly.
        parallel: the ranks over whose tokens the statistics are reduced.
    """

    def __init__(self, max_tokens: int = STEP_TOKENS, weighted: bool = False, parallel: Parallel | None = None) -> None:
        self._max_tokens, self._weighted, self._parallel = max_tokens, weighted, parallel or Parallel()
        self._layers: dict[SparseDeltaMemory, LayerStatistics] = {}

    @contextlib.contextmanager
    def watch(self, model: nn.Module, count: bool = True) -> Iterator[None]:
        """Observe the forward passes in this block. Backward does not belong in it: it may recompute them.

        Args:
            model: whose SDM layers are observed.
            count: False for a rank without rows, which takes part in the reduction all the same.
        """

        @torch.no_grad()
        def see(layer: SparseDeltaMemory, tokens: Tokens) -> None:
            if layer not in self._layers:
                self._layers[layer] = LayerStatistics.of_layer(layer, tokens.beta.device)
            seen = self._layers[layer]
            left = self._max_tokens - int(seen.tokens)
            if count and left > 0:
                seen.add(Tokens(*(x.flatten(0, 1)[:left] for x in tokens)), self._weighted)

        with observed(model, see):
            yield

    def take(self) -> dict[str, float]:
        """Return the means over the layers since the last call; empty if there is no SDM layer."""
        for layer in self._layers.values():
            _reduce(layer, self._parallel)
        results = [layer.result() for layer in self._layers.values()]
        self._layers.clear()
        if not results:
            return {}
        return {f"memory/{name}": sum(result[name] for result in results) / len(results) for name in results[0]}


def _reduce(seen: LayerStatistics, parallel: Parallel) -> None:
    """Reduce the sums of a rank over all ranks."""
    (seen.tokens,) = parallel.sum(seen.tokens)
    for gate in seen.gates.values():
        (gate.count,) = parallel.sum(gate.count)
        gate.total = parallel.sum_(gate.total)
        gate.low, gate.high = -parallel.max_(-gate.low), parallel.max_(gate.high)
    for name, strength in seen.strength_HN.items():
        seen.used_HN[name] = parallel.max_(seen.used_HN[name].double())
        parallel.sum_(strength)


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


def _tensorboard(folder: Path) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise TrainingError("monitor.tensorboard needs it: pip install 'sparse-delta-memory[tensorboard]'") from error
    return SummaryWriter(str(folder / "tensorboard"))


def _wandb(project: str, folder: Path) -> Any:
    try:
        import wandb  # type: ignore[import-not-found]
    except ImportError as error:
        raise TrainingError("monitor.wandb needs wandb: pip install 'sparse-delta-memory[wandb]'") from error
    return wandb.init(project=project, name=folder.name, dir=str(folder), resume="allow", id=folder.name)


def sample_text(model: SDMForCausalLM, tokenizer: Tokenizer, seed: int) -> str:
    """Let a model write the beginning of a document. The weights, buffers and random numbers of the run stay.

    Args:
        model: the model, on any device, in training mode or not.
        tokenizer: of the model's data.
        seed: decides the sample.
    """
    generating: Any = model  # transformers types the method for its own classes alone
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    with evaluating(model), torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(seed)
        written = generating.generate(
            torch.tensor([[tokenizer.eos_id]], device=device),
            attention_mask=torch.ones(1, 1, dtype=torch.int64, device=device),
            max_new_tokens=SAMPLE_TOKENS,
            do_sample=True,
            temperature=SAMPLE_TEMPERATURE,
            top_k=0,
            use_cache=True,
            pad_token_id=tokenizer.eos_id,
        )
    return tokenizer.decode(written[0, 1:].tolist())
