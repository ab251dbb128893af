"""What is left in a state of each write of the text that it has read: a table, a figure and CSV files.

    writes = stream_writes(model, input_ids)          # sdm.models.state_summary
    save_writes(Path("state"), writes, input_ids.tolist())

Shapes: T time, H heads, N slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sdm.analysis.draw import draw, save
from sdm.analysis.pages.write import csv_text
from sdm.evaluation.report import Cell, Chart, Grid, Look, Point, Table
from sdm.files import new_folder, write_bytes
from sdm.layers.memory_statistics import half_life
from sdm.models.state_summary import LayerWrites

AGO = "tokens ago (0: the last one)"


def writes_table(writes: Mapping[int, LayerWrites]) -> Table:
    """Summarise what is left of the writes, a row for each SDM layer and head."""
    rows = []
    for index, head, layer in _heads(writes):
        kept, decayed = layer.left.kept[:, head], layer.left.decayed[:, head]
        points = _by_age(kept)
        half = half_life([round(point.x) for point in points], [point.y for point in points])
        rows.append(
            (
                f"{index}.{head}",
                f"{float(kept.nanmean()):.1%}",
                f"{float(decayed.nanmean()):.1%}",
                f"{half:.0f}" if half is not None else "never",
                f"{float((kept < 0.1).double().mean()):.1%}",
                f"{float(layer.left.slots[:, head].double().mean()):.1f}",
            )
        )
    columns = (
        "layer.head",
        "left of\na write",
        "by decay\nalone",
        "half left\n(tokens ago)",
        "writes with less\nthan 10% left",
        "slots not\nrewritten",
    )
    caption = (
        "left of a write: length of what the state still holds of it, relative to what was written, mean over the "
        "text; by decay alone: had no later token overwritten it. half left: the age at which half is left. slots not "
        "rewritten: of a write, mean."
    )
    return Table("What is left of each token's write", columns, rows, caption)


def writes_chart(writes: Mapping[int, LayerWrites]) -> Grid:
    """Draw what is left of a write by its age, and which part of the slots was last written when."""
    left: dict[str, Sequence[Point]] = {}
    written: dict[str, Sequence[Point]] = {}
    looks = {}
    for index, layer in writes.items():
        name, alone = f"SDM, layer {index}", f"layer {index}, decay alone"
        left[name], left[alone] = _by_age(layer.left.kept), _by_age(layer.left.decayed)
        looks[alone] = Look(model=name, kind="thin")
        written[name] = _written_since(layer)
    return Grid(
        "survival",
        "",
        [
            Chart("survival", "Left of a write", AGO, "left of a write", left, percent=True, looks=looks),
            Chart("last-written", "Slots written since then", AGO, "of all slots", written, percent=True),
        ],
        width=2,
        share_x=False,
        share_y=False,
    )


def save_writes(
    folder: Path, writes: Mapping[int, LayerWrites], tokens: Sequence[int], texts: Sequence[str] | None = None
) -> None:
    """Write `writes.csv` (every write), `slots.csv` (every slot) and `survival.png` into a new folder.

    Args:
        folder: must not exist, or be empty.
        writes: what `stream_writes` returned.
        tokens: [T] of the text.
        texts: [T] the tokens as text, if there is a tokenizer.
    """
    columns: tuple[str, ...] = ("token", "id", "text", "layer", "head", "left", "decay_alone", "slots_not_rewritten")
    with new_folder(folder) as path:
        write_bytes(path / "writes.csv", csv_text(columns, _write_rows(writes, tokens, texts)).encode())
        slots = csv_text(("layer", "head", "slot", "last_written"), _slot_rows(writes))
        write_bytes(path / "slots.csv", slots.encode())
        save(draw(writes_chart(writes)), path / "survival.png")


def _heads(writes: Mapping[int, LayerWrites]) -> Iterator[tuple[int, int, LayerWrites]]:
    for index, layer in writes.items():
        for head in range(len(layer.last)):
            yield index, head, layer


def _by_age(share: Tensor) -> list[Point]:
    """Means over ages between powers of two, [T] or [T,H] by token, at the mean age of each."""
    by_age = share.flip(0).reshape(len(share), -1).nanmean(dim=1)
    points, start = [], 0
    while start < len(by_age):
        stop = min(2 * start, len(by_age)) if start else 1
        mean = float(by_age[start:stop].nanmean())
        if not math.isnan(mean):
            points.append(Point((start + stop - 1) / 2, mean))
        start = stop
    return points


def _written_since(layer: LayerWrites) -> list[Point]:
    time = len(layer.left.kept)
    ages = torch.bincount(time - 1 - layer.last[layer.last >= 0], minlength=time).cumsum(0) / layer.last.numel()
    places = sorted({*range(0, time, max(time // 64, 1)), time - 1})
    return [Point(age, float(ages[age])) for age in places]


def _write_rows(
    writes: Mapping[int, LayerWrites], tokens: Sequence[int], texts: Sequence[str] | None
) -> Iterator[tuple[Cell, ...]]:
    for token, number in enumerate(tokens):
        for index, head, layer in _heads(writes):
            left = layer.left
            shares = (float(left.kept[token, head]), float(left.decayed[token, head]))
            known = (None if math.isnan(share) else round(share, 6) for share in shares)
            text = "" if texts is None else texts[token]
            yield token, number, text, index, head, *known, int(left.slots[token, head])


def _slot_rows(writes: Mapping[int, LayerWrites]) -> Iterator[tuple[Cell, ...]]:
    for index, head, layer in _heads(writes):
        for slot in (layer.last[head] >= 0).nonzero().flatten().tolist():
            yield index, head, slot, int(layer.last[head, slot])
