"""`sdm eval speed`: what a token costs, in time and memory, against the length of the context.

Models take turns, and every length is measured several times: medians of what was measured side by side can be
compared, also on a machine that does other things. Tokens are random.

Shapes: B rows, T time.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from sdm.errors import DataError, check_not_negative, check_size
from sdm.evaluation.eval_model import EvalModel
from sdm.evaluation.measurement import Measurement, Plan, Result, Unit
from sdm.evaluation.report import Chart, Point, Report, Table

COLUMNS = {
    "prefill": ("prefill", "time per token of a prompt (µs)", 1e6),
    "decode": ("decode", "time per generated token (ms)", 1e3),
    "state": ("state", "state after the context (MB)", 1e-6),
    "peak": ("peak", "growth of memory while reading and generating (MB)", 1e-6),
}


@dataclass(frozen=True)
class Speed(Measurement):
    """Time per token of reading and of generating, and memory, against the length of the context."""

    interleaved: ClassVar[bool] = True

    lengths: tuple[int, ...] = (512, 2048, 8192)
    """Tokens of context."""
    repeats: int = 3
    """How often each length is measured; the median counts."""
    new_tokens: int = 32
    """Tokens that are generated after the context, one at a time."""
    batch_size: int = 1
    """Rows side by side; times are per token of all of them."""
    seed: int = 0
    """Of the tokens."""

    def __post_init__(self) -> None:
        if not self.lengths:
            raise DataError("lengths must name at least one length")
        if len(set(self.lengths)) < len(self.lengths):
            raise DataError(f"lengths must differ, got {', '.join(map(str, self.lengths))}")
        for length in self.lengths:
            check_size(lengths=length)
        check_size(repeats=self.repeats, new_tokens=self.new_tokens, batch_size=self.batch_size)
        check_not_negative(seed=self.seed)

    def plan(self, lm: EvalModel) -> Plan:
        """A unit is a repeat of a length."""
        lm.check_length(max(self.lengths) + self.new_tokens, "lower --lengths or --new-tokens")
        units = [
            Unit(f"{length} tokens, {number}", f"{length} tokens", (length, number), cost=length + 8 * self.new_tokens)
            for number in range(self.repeats)
            for length in self.lengths
        ]
        warm = False

        def measure(batch: Sequence[Unit]) -> Iterator[Result]:
            nonlocal warm
            if not warm:  # the first call pays for what is set up once
                self._measure(lm, min(128, min(self.lengths)), 0, 2)
                warm = True
            for unit in batch:
                length, number = unit.payload
                yield self._measure(lm, length, number, self.new_tokens)

        return Plan(units, measure, {"device": str(lm.device), "threads": torch.get_num_threads()})

    @torch.inference_mode()
    def _measure(self, lm: EvalModel, length: int, number: int, new_tokens: int) -> Result:
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + number)
        shape = (self.batch_size, length + new_tokens)
        ids = torch.randint(lm.vocab_size, shape, generator=generator).to(lm.device)
        memory = _Memory(lm.device)
        stream = lm.stream()
        start = _now(lm.device)
        stream.read(ids[:, :length])
        middle = _now(lm.device)
        for token in ids[:, length:].split(1, 1):
            stream.read(token)
        end = _now(lm.device)
        return {
            "length": length,
            "prefill": (middle - start) / (length * self.batch_size),
            "decode": (end - middle) / (new_tokens * self.batch_size),
            "state": stream.nbytes(),
            "peak": memory.growth(),
        }

    def summary(self, results: Mapping[str, Result]) -> dict[str, Any]:
        """Medians and ranges of each length."""
        lengths = sorted({result["length"] for result in results.values()})
        return {"lengths": [_medians(length, results) for length in lengths]}

    def report(self, summaries: Mapping[str, dict[str, Any]]) -> Report:
        """A table with a row per model and length, and a chart per quantity."""
        rows = []
        for name, summary in summaries.items():
            for row in summary["lengths"]:
                cells = (
                    "" if row[key] is None else f"{scale * row[key]:,.3f}" for key, (_, _, scale) in COLUMNS.items()
                )
                rows.append((name, f"{row['length']:,}", *cells))
        heads = ("model", "context", "prefill\nµs/token", "decode\nms/token", "state\nMB", "peak\nMB")
        caption = "Medians. peak: growth of the memory in use from before the context to its largest."
        charts = [_chart(key, summaries) for key in COLUMNS]
        return Report([Table("Time and memory per token", heads, rows, caption)], charts)


def _medians(length: int, results: Mapping[str, Result]) -> dict[str, Any]:
    repeats = [result for result in results.values() if result["length"] == length]
    row: dict[str, Any] = {"length": length, "repeats": len(repeats)}
    for key in COLUMNS:
        values = [result[key] for result in repeats]
        row[key] = None if None in values else statistics.median(values)
        row |= {f"{key}_low": None if None in values else min(values)}
        row |= {f"{key}_high": None if None in values else max(values)}
    return row


def speed_curves(key: str, lengths: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[Point]]:
    """A column of `COLUMNS` against the length of the context, by model: medians with the range of the repeats."""
    scale = COLUMNS[key][-1]
    return {
        model: [
            Point(row["length"], *(scale * row[part] for part in (key, f"{key}_low", f"{key}_high")))
            for row in rows
            if row[key] is not None
        ]
        for model, rows in lengths.items()
    }


def _chart(key: str, summaries: Mapping[str, dict[str, Any]]) -> Chart:
    name, label, _ = COLUMNS[key]
    curves = speed_curves(key, {model: summary["lengths"] for model, summary in summaries.items()})
    title = f"{label.split(' (')[0].capitalize()}: median, and range of the repeats"
    scale_y: Literal["zero", "auto"] = "zero" if key in ("prefill", "decode") else "auto"
    return Chart(f"speed-{name}", title, "context (tokens)", label, curves, log_x=True, y_scale=scale_y)


class _Memory:
    """How much more memory is in use at most than at the beginning: of the GPU, or of the process (on Linux)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before: int | None = torch.cuda.memory_allocated(device)
        else:
            self._before = _start_peak()

    def growth(self) -> int | None:
        if self._before is None:
            return None
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        peak = _status("VmHWM")
        return None if peak is None else max(0, peak - self._before)


def _start_peak() -> int | None:
    """Forget the largest memory so far, and say what is in use. None where a process cannot know."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed would hide what is allocated next
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return None
    return _status("VmRSS")


def _status(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
    except (OSError, StopIteration, ValueError):
        return None


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
