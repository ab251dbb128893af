"""Tables, figure and numbers of the crossover, from what has been measured so far."""

from __future__ import annotations

import csv
from pathlib import Path

from sdm.analysis.draw import draw, save
from sdm.evaluation.report import Chart, Point, Table
from sdm.files import new_file
from sdm.reproduce.recipes.plain_code import LENGTH
from sdm.reproduce.studies.crossover.cells import BASELINE, RIVAL, SHORT, VARIANTS
from sdm.reproduce.studies.crossover.compare import LATE, WHOLE, Difference, Measured, difference, nats

LATER = f"from {LENGTH // 2:,} on"  # in a document
CAPTION = "Paired on the same documents: mean and 95% interval over documents of the mean over seeds."


def ablation_table(measured: Measured, chosen_on: Measured) -> Table:
    """Every variant at SHORT steps and the smallest width, beside plain SDM and plain GDN; and what it has on the
    documents that choices are made on."""
    width, rows = min(cell.width for cell in measured), []
    for name, variant in VARIANTS.items():
        whole, late = (nats(measured, name, width, SHORT, part) for part in (WHOLE, LATE))
        if whole is None or late is None:
            continue
        seeds = len({cell.seed for cell in measured if (cell.variant, cell.width, cell.steps) == (name, width, SHORT)})
        against = [difference(measured, name, other, width, SHORT, WHOLE) for other in (BASELINE, RIVAL)]
        shown = ["-" if other == name else _shown(one) for other, one in zip((BASELINE, RIVAL), against, strict=True)]
        each = "-" if name == RIVAL else _seeds(against[1])
        valid = nats(chosen_on, name, width, SHORT, WHOLE)
        numbers = ("-" if one is None else f"{one.value:.3f}" for one in (valid, whole, late))
        rows.append((variant.title, str(seeds), *numbers, *shown, each))
    columns = (
        "variant",
        "seeds",
        "valid",
        "nats",
        f"from {LENGTH // 2:,} on",
        "to plain SDM",
        "to plain GDN",
        "each seed",
    )
    return Table(f"d = {width}, {SHORT * LENGTH / 1e6:.2f}M tokens", columns, rows, CAPTION)


def curve_table(measured: Measured) -> Table:
    """Along tokens and width."""
    rows = []
    for width, steps in _places(measured):
        for name in _curves():
            whole = nats(measured, name, width, steps, WHOLE)
            one = difference(measured, name, RIVAL, width, steps, WHOLE)
            late = difference(measured, name, RIVAL, width, steps, LATE)
            if whole is not None:
                model = f"{VARIANTS[name].title}; d = {width}, {steps * LENGTH / 1e6:.2f}M tokens"
                rows.append((model, f"{whole.value:.3f}", _shown(one), _seeds(one), _shown(late)))
    columns = ("variant", "nats", "to plain GDN", "each seed", LATER)
    return Table("Along tokens and width", columns, rows, CAPTION)


def curve_chart(measured: Measured) -> Chart:
    """SDM minus GDN against tokens: where a curve goes below zero, the order turns."""
    curves: dict[str, list[Point]] = {}
    for width, steps in _places(measured):
        for name in _curves():
            one = difference(measured, name, RIVAL, width, steps, WHOLE)
            if one is not None:
                mean = one.documents
                point = Point(steps * LENGTH, mean.value, mean.low, mean.high)
                curves.setdefault(f"{VARIANTS[name].title}, d = {width}", []).append(point)
    title = "Below zero, SDM is ahead of plain GDN"
    return Chart("crossover", title, "training tokens", "difference to plain GDN (nats per token)", curves, log_x=True)


def write(measured: Measured, folder: Path) -> list[Path]:
    """The figure, and every number that it and the tables rest on."""
    numbers = folder / "crossover.csv"
    with new_file(numbers) as temporary, temporary.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("variant", "width", "tokens", "seed", "document", "nats", f"nats_from_{LENGTH // 2}"))
        for cell, documents in sorted(measured.items(), key=lambda one: one[0].name):
            for name, (whole, late) in documents.items():
                table.writerow((cell.variant, cell.width, cell.tokens, cell.seed, name, f"{whole:.5f}", f"{late:.5f}"))
    chart = curve_chart(measured)
    return [save(draw(chart), folder / "figures" / "crossover.png"), numbers] if chart.curves else [numbers]


def _curves() -> list[str]:
    return [name for name, variant in VARIANTS.items() if variant.curve and name != RIVAL]


def _places(measured: Measured) -> list[tuple[int, int]]:
    return sorted({(cell.width, cell.steps) for cell in measured})


def _seeds(one: Difference | None) -> str:
    return "-" if one is None else " ".join(f"{seed:+.3f}" for seed in one.seeds)


def _shown(one: Difference | None) -> str:
    if one is None:
        return "-"
    mean = one.documents
    return f"{mean.value:+.3f}" if mean.low is None else f"{mean.value:+.3f} ± {mean.value - mean.low:.3f}"
