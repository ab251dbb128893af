"""Findings about writes and reads, about the aids that small models get, and the sweep of learning rates."""

from __future__ import annotations

from sdm.analysis.pages import Finding, Illustration
from sdm.analysis.plots import differences_figure, write_read_figure
from sdm.evaluation.report import Table
from sdm.evaluation.statistics import Mean
from sdm.reproduce.recipes.mini import DEVIATIONS, PLAIN, WIDTHS
from sdm.reproduce.studies.mini.cells import LABELS, SMALL, TOP, Experiment, ladder_variant
from sdm.reproduce.studies.mini.results import Cells, above_zero, below_zero, late, shown
from sdm.reproduce.studies.mini.showing import NOT_YET, PAIRED, point, verdict, why


def grid_finding(cells: Cells, grid: Experiment) -> Finding:
    """Loss for several numbers of writes and reads."""
    base = WIDTHS[SMALL] // 4
    missing = cells.missing(grid)
    means = {pair: mean for pair, variant in grid.items() if (mean := cells.mean(variant)) is not None}
    differences = {
        grid[pair].label: change
        for pair in means
        if pair != (base, base) and (change := cells.difference(grid[pair], grid[base, base])) is not None
    }
    figures: list[Illustration] = []
    if means:
        rows = [(*pair, mean.value, mean.low, mean.high) for pair, mean in means.items()]
        best = min(means, key=lambda pair: means[pair].value)
        figures.append(
            Illustration(
                "writes-and-reads",
                "Loss by the number of writes and reads of a token; ±: 95% interval over seeds.",
                write_read_figure({pair: point(0, mean) for pair, mean in means.items()}),
                ("writes", "reads", "nats per token", "low", "high"),
                rows,
                f"A table of losses, lowest at {grid[best].label}.",
            )
        )
    half = grid[base // 2, base // 2].label
    fewer = differences.get(half)
    return Finding(
        "writes-and-reads",
        "Writes and reads",
        "Fewer writes and reads cost little; twice as many reads bring little.",
        f"{half} minus {grid[base, base].label}: {shown(fewer, sign=True)} nats, paired" if fewer else NOT_YET,
        "W = R = 32 instead of 64: +0.0047 nats; R = 128: -0.0016 (level 8)",
        verdict([above_zero(fewer)] if fewer else [], missing),
        why(missing),
        tuple(figures),
        (_difference_table("Against as many writes and reads as the level has", differences),) if differences else (),
        (*DEVIATIONS, f"level {SMALL}, d = {WIDTHS[SMALL]}, where W = R = {base}"),
    )


def aids_finding(cells: Cells, aids: Experiment, plain: Experiment) -> Finding:
    """What the aids do; and the paper's plain recipe, in which they are absent."""
    reference = aids[True, True]
    differences = {
        variant.label: change
        for key, variant in aids.items()
        if key != (True, True) and (change := cells.difference(variant, reference)) is not None
    }
    gap = {
        "aided": cells.difference(ladder_variant("sdm", TOP), ladder_variant("gdn", TOP)),
        "plain": cells.difference(plain["sdm"], plain["gdn"]),
    }
    missing = cells.missing({**aids, **plain})
    figures: tuple[Illustration, ...] = ()
    if differences:
        ends = {name: (mean.value, mean.low, mean.high) for name, mean in differences.items()}
        figures = (
            Illustration(
                "aids",
                f"What leaving out an aid costs. {PAIRED}.",
                differences_figure(ends, "nats per token above both aids"),
                ("aids given", "difference", "low", "high"),
                [(name, *values) for name, values in ends.items()],
                "; ".join(f"{name}: {values[0]:+.3f}" for name, values in ends.items()),
            ),
        )
    rows = [
        (f"SDM, {variant.label}", shown(cells.mean(variant)), shown(cells.mean(variant, late)))
        for variant in aids.values()
    ]
    rows += [
        (f"{variant.label}, plain recipe", shown(cells.mean(variant)), shown(cells.mean(variant, late)))
        for variant in plain.values()
    ]
    return Finding(
        "aids",
        "The aids, and the plain recipe",
        "The paper's models need no aids: neither shifted keys nor a tied initialisation.",
        f"SDM - GDN, paired: {shown(gap['aided'], sign=True)} nats with both aids, "
        f"{shown(gap['plain'], sign=True)} with the plain recipe"
        if any(gap.values())
        else NOT_YET,
        "not reported: the paper's models have neither aid",
        verdict([below_zero(gap["plain"])] if gap["plain"] else [], missing),
        why(missing),
        figures,
        (Table("With and without the aids", ("model", "nats per token", "1k to 2k"), rows),),
        (*DEVIATIONS, PLAIN),
        (
            "Where SDM is not below GDN with the plain recipe, the miniature needs its aids, and what is shown with "
            "them is a claim about models that have learned to recall.",
        ),
    )


def rates_table(cells: Cells, rates: Experiment) -> Table:
    """Validation loss by learning rate, which is all that rates are chosen by."""
    found: dict[str, dict[float, float]] = {}
    for (kind, lr), variant in rates.items():
        for fact in cells.facts(variant)[:1]:
            found.setdefault(kind, {})[lr] = fact["valid_loss"]
    rows = []
    columns = sorted({lr for _, lr in rates})
    for kind in dict.fromkeys(kind for kind, _ in rates):
        losses = found.get(kind, {})
        best = min(losses, key=lambda lr: losses[lr], default=None)
        cells_of_row = (f"{losses[lr]:.3f}" if lr in losses else "missing" for lr in columns)
        edge = "" if best is None else f"{best:g}" + (" (edge)" if best in (columns[0], columns[-1]) else "")
        rows.append((LABELS[kind], *cells_of_row, edge))
    return Table(
        f"Learning rates at level {SMALL}: validation loss, one seed",
        ("global layers", *(f"{lr:g}" for lr in columns), "best"),
        rows,
        "Rates are chosen on validation documents; everything else on this page is measured on test documents.",
    )


def _difference_table(title: str, differences: dict[str, Mean]) -> Table:
    rows = [(name, shown(mean, 4, sign=True)) for name, mean in differences.items()]
    return Table(title, ("model", "difference (nats)"), rows, f"{PAIRED}.")
