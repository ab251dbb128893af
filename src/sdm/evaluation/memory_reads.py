"""What SDM layers read: how far back, how much of their initial state M0, and how long their writes survive.

All from the exact map of each layer (`sdm.layers.reads`), whose parts are checked to add up to the layer's readings.
Distances and positions are counted in powers of two, so that results stay small whatever the length of the texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sdm.evaluation.report import Chart, Grid, Point, Table
from sdm.layers import ShiftedKeys, SparseDeltaMemory
from sdm.layers.memory_statistics import before_share, distances, half_life, write_survival
from sdm.layers.reads import Reads
from sdm.models.fingerprint import base_model
from sdm.models.reads import model_reads

TOLERANCE = 1e-4
"""Largest deviation of the parts of a reading from the reading, relative to the largest; half precision exceeds it."""
FAR = 64

LayerReads = dict[str, Any]
"""The numbers of a layer as JSON."""


@dataclass
class HeadSums:
    """Sums over texts of one head, by powers of two."""

    distance: dict[int, float] = field(default_factory=dict)
    """Share of the contributions that come from [2^(i-1), 2^i) tokens back, by i; 0 is the token itself."""
    initial: dict[int, list[float]] = field(default_factory=dict)
    """Number of tokens at positions [2^i - 1, 2^(i+1) - 1), and the sum of their shares of M0, by i."""
    survival: dict[int, list[float]] = field(default_factory=dict)
    """Number of writes, sum of what decay leaves of them and sum of what is left at all, by the distance."""
    far: float = 0.0
    shares: float = 0.0

    def add(self, reads: Reads, head: int) -> None:
        """Add the distances and the shares of M0 of a text."""
        distance, share = distances(reads, head)
        self.shares += float(share.sum())
        self.far += float(share[distance >= FAR].sum())
        for i, total in _by_power(distance, share).items():
            self.distance[i] = self.distance.get(i, 0.0) + total
        initial = before_share(reads, head)
        place = torch.arange(1, len(initial) + 1)
        for i, total in _by_power(place, initial).items():
            count = int(((place >= 1 << (i - 1)) & (place < 1 << i)).sum())
            sums = self.initial.setdefault(i - 1, [0.0, 0.0])
            sums[0], sums[1] = sums[0] + count, sums[1] + total

    def add_survival(self, survival: Mapping[int, tuple[Tensor, Tensor]], head: int) -> None:
        """Add the survival of the followed writes of a text."""
        for distance, (kept, decayed) in survival.items():
            open_gate = ~kept[:, head].isnan()
            sums = self.survival.setdefault(distance, [0.0, 0.0, 0.0])
            sums[0] += int(open_gate.sum())
            sums[1] += float(decayed[open_gate, head].sum())
            sums[2] += float(kept[open_gate, head].sum())

    def result(self) -> dict[str, Any]:
        """Summarise as JSON."""
        last = max(self.distance, default=0)
        total = max(self.shares, 1e-300)
        cumulative: list[float] = []
        for i in range(last + 1):
            cumulative.append((cumulative[-1] if cumulative else 0.0) + self.distance.get(i, 0.0) / total)
        survival = {d: sums for d, sums in sorted(self.survival.items()) if sums[0]}
        after = list(survival)
        decay = [sums[1] / sums[0] for sums in survival.values()]
        kept = [sums[2] / sums[0] for sums in survival.values()]
        # What overwriting alone leaves: the rest, relative to what decay leaves.
        overwritten = [k / d if d else 0.0 for k, d in zip(kept, decay, strict=True)]
        tokens = sum(count for count, _ in self.initial.values())
        return {
            "distance": cumulative,
            "far": self.far / total,
            "initial": [total / count for _, (count, total) in sorted(self.initial.items())],
            "initial_mean": sum(total for _, total in self.initial.values()) / max(tokens, 1),
            "survival": {"after": after, "decay": decay, "kept": kept},
            "half_life": {"decay": half_life(after, decay), "overwriting": half_life(after, overwritten)},
        }


@torch.no_grad()
def probe_reads(model: nn.Module, texts: Iterable[Tensor]) -> dict[str, LayerReads]:
    """Measure what the SDM layers of a model read on texts, by the number of the block.

    Args:
        model: a model with SDM layers.
        texts: rows of tokens [B,T].

    Raises:
        ArithmeticError: if the parts of a layer's readings do not add up to the readings.
    """
    base = base_model(model)
    blocks = {i: block for i, block in enumerate(base.layers) if _memory(block.mixer) is not None}
    sums: dict[int, list[HeadSums]] = {}
    errors: dict[int, float] = dict.fromkeys(blocks, 0.0)
    for rows in texts:
        for row in rows:
            for index, reads in model_reads(base, row[None].to(base.device), blocks):
                errors[index] = max(errors[index], reads.error())
                if not errors[index] <= TOLERANCE:
                    raise ArithmeticError(
                        f"the parts of the readings of block {index} deviate from the readings by {errors[index]:.2g} "
                        "of the largest one: probe the model in float32"
                    )
                memory = _memory(blocks[index].mixer)
                assert memory is not None
                assert reads.tokens is not None
                survival = write_survival(reads.tokens, memory.num_slots, memory.update)
                heads = sums.setdefault(index, [HeadSums() for _ in range(memory.num_heads)])
                for head, head_sums in enumerate(heads):
                    head_sums.add(reads, head)
                    head_sums.add_survival(survival, head)
    return {
        str(index): {"heads": [head.result() for head in heads], "error": errors[index]}
        for index, heads in sums.items()
    }


def reads_table(name: str, layers: Mapping[str, LayerReads]) -> Table:
    """A row for every layer and head."""
    rows = []
    for index, layer in layers.items():
        for number, head in enumerate(layer["heads"]):
            rows.append(
                (
                    index,
                    str(number),
                    f"{_median(head['distance'])}",
                    f"{head['far']:.1%}",
                    f"{head['initial_mean']:.1%}",
                    *(_tokens(head["half_life"][cause], head) for cause in ("decay", "overwriting")),
                )
            )
    columns = ("layer", "head", "distance\nmedian", f"{FAR}+\nback", "M0", "half-life\ndecay", "half-life\noverwriting")
    caption = (
        "distance: half of what a token reads was written fewer tokens back; M0: share of the initial state in a "
        "reading; half-life: tokens until half of a write is left, by decay and by overwriting alone."
    )
    return Table(f"Reads and writes of {name}", columns, rows, caption)


def reads_chart(models: Mapping[str, Mapping[str, LayerReads]], name: str = "reads") -> Grid:
    """How far back layers read, their share of M0 by position, and what is left of a write; means over heads."""
    back: dict[str, Sequence[Point]] = {}
    initial: dict[str, Sequence[Point]] = {}
    left: dict[str, Sequence[Point]] = {}
    for model, layers in models.items():
        for index, layer in layers.items():
            label, heads = f"{model}, layer {index}", layer["heads"]
            back[label] = _points([head["distance"] for head in heads], lambda i: 1 << i)
            initial[label] = _points([head["initial"] for head in heads], lambda i: 1 << i)
            after = heads[0]["survival"]["after"]
            left[label] = _points([head["survival"]["kept"] for head in heads], after.__getitem__)
    charts = [
        Chart(f"{name}-distance", "How far back", "tokens back, fewer than", "share of what is read", back, True),
        Chart(
            f"{name}-initial",
            "Initial state M0",
            "position of the token, from",
            "share of M0 in a reading",
            initial,
            True,
        ),
        Chart(f"{name}-survival", "Survival of a write", "tokens later", "left of a write", left, True),
    ]
    return Grid(name, "", charts, width=3)


def _points(heads: Sequence[Sequence[float]], x: Any) -> list[Point]:
    """The mean over heads with the range from the lowest to the highest."""
    length = min(map(len, heads))
    columns = [[values[i] for values in heads] for i in range(length)]
    return [Point(x(i), sum(column) / len(column), min(column), max(column)) for i, column in enumerate(columns)]


def _median(cumulative: Sequence[float]) -> int:
    """The smallest power of two such that half of what is read was written fewer tokens back."""
    return next((1 << i for i, share in enumerate(cumulative) if share >= 0.5), 1 << len(cumulative))


def _tokens(half: float | None, head: Mapping[str, Any]) -> str:
    if half is not None:
        return f"{half:.3g}"
    after = head["survival"]["after"]
    return f"> {after[-1]:,}" if after else "unknown"


def _by_power(place: Tensor, amount: Tensor) -> dict[int, float]:
    """Sum amounts by the number of bits of their place: 0, 1, 2 to 3, 4 to 7, ..."""
    bits = torch.where(place > 0, place.double().clamp(min=1).log2().floor() + 1, 0).long()
    sums = torch.zeros(int(bits.max()) + 1 if len(bits) else 0, dtype=torch.float64).index_add_(0, bits, amount)
    return {i: float(total) for i, total in enumerate(sums) if bool((bits == i).any())}


def _memory(mixer: nn.Module) -> SparseDeltaMemory | None:
    inner = mixer.layer if isinstance(mixer, ShiftedKeys) else mixer
    return inner if isinstance(inner, SparseDeltaMemory) else None
