"""What a probe found, as a table, figures and JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table as RichTable

from sdm.analysis.access import AccessProbe, MemoryStats, memory_stats, probe_access
from sdm.analysis.plots import cumulative_mass_figure, effective_keys_figure, save
from sdm.analysis.probe_texts import ProbeTexts
from sdm.analysis.report import rich_table
from sdm.errors import UserError
from sdm.evaluation.eval_model import EvalModel
from sdm.evaluation.report import Table
from sdm.layers.memory_statistics import sdm_layers


@dataclass(frozen=True)
class ProbeResult:
    """Of one model."""

    texts: ProbeTexts
    access: AccessProbe
    memory: MemoryStats

    def describe(self, lm: EvalModel) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "model": lm.describe(),
            "data": self.texts.data,
            "documents": len(self.texts.rows),
            "note": self.texts.note,
            "access": self.access.describe(),
            "memory": {"mean": self.memory.mean, "layers": self.memory.layers},
        }


def check_memory(lm: EvalModel) -> None:
    """Raise unless a model has a memory to look at."""
    if not sdm_layers(lm.model):
        raise UserError(f"{lm.path} has no SDM layer, so there is no memory to probe; name a run that has one")


def probe(lm: EvalModel, texts: ProbeTexts) -> ProbeResult:
    return ProbeResult(texts, probe_access(lm.model, texts.rows), memory_stats(lm.model, texts.rows))


def probe_table(name: str, result: ProbeResult) -> RichTable:
    """A line for each layer, and one for all."""
    access, rows = result.access, []
    for layer in access.layers:
        rows.append(_row(_short(layer.name), layer, result.memory.layers[layer.name]))
    rows.append(_row("all", access, result.memory.mean))
    sides = (f"{what}\n{side}" for what in ("u(p)", "C(k/2)", "slots") for side in ("write", "read"))
    heads = ("layer", *sides, "forget\nmean", "input\nmean")
    caption = (
        f"{access.tokens:,} tokens of {len(result.texts.rows)} documents. u(p): effective keys / k, the mean; C(k/2): "
        f"mass of the heavier half of the keys; slots: share in use; W = {access.write.keys}, R = {access.read.keys}. "
        + result.texts.note
    )
    return rich_table(Table(f"Memory access of {name}", heads, rows, caption.strip()))


def _row(name: str, use: Any, memory: Mapping[str, float]) -> tuple[str, ...]:
    sides = (use.write, use.read)
    return (
        name,
        *(f"{side.effective_mean:.3f}" for side in sides),
        *(f"{side.mass[max(side.keys // 2, 1) - 1]:.1%}" for side in sides),
        *(f"{memory[f'slots_{what}']:.1%}" for what in ("written", "read")),
        *(f"{memory[f'{gate}_mean']:.3f}" for gate in ("forget_gate", "input_gate")),
    )


def _short(name: str) -> str:
    """The number of the layer in the model, which is what tells layers apart."""
    number = re.search(r"layers\.(\d+)", name)
    return number.group(1) if number else name


def probe_figures(probes: Mapping[str, AccessProbe], folder: Path) -> list[Path]:
    """The paper's two figures, as PNG and SVG."""
    uses = {name: one.sides for name, one in probes.items()}
    figures = {"cumulative_mass": cumulative_mass_figure(uses), "effective_keys": effective_keys_figure(uses)}
    return [save(figure, folder / f"{name}.{kind}") for name, figure in figures.items() for kind in ("png", "svg")]
