"""The finding about scaling: loss against compute, laws of it, and a level that they predict."""

from __future__ import annotations

from sdm.analysis.pages import Finding, Illustration
from sdm.analysis.plots import scaling_figure
from sdm.analysis.scaling import PowerLaw, fit_power_law
from sdm.evaluation.report import Table
from sdm.evaluation.statistics import Mean
from sdm.models import cost
from sdm.reproduce.recipes.mini import DEVIATIONS, SEQUENCE_LENGTH, VOCABULARY, WIDTHS, Architecture
from sdm.reproduce.studies.mini.cells import ARCHITECTURES, LABELS, TOP, Experiment, Variant, ladder_variant
from sdm.reproduce.studies.mini.results import Cells, below_zero, shown
from sdm.reproduce.studies.mini.showing import PAIRED, verdict, why

FITTED = tuple(level for level in WIDTHS if level != TOP)  # the last is predicted
R_SQUARED = 0.98  # what a ladder that has a law reaches
Runs = dict[str, list[tuple[float, float]]]


def training_flops(variant: Variant) -> float:
    """Of the whole training."""
    config = variant.recipe(0)
    flops = cost(config.model.build(VOCABULARY)).training_flops_per_token(SEQUENCE_LENGTH)
    return float(config.schedule.steps * SEQUENCE_LENGTH * flops)


def ladder_finding(cells: Cells, ladder: Experiment) -> Finding:
    fitted, held_out = _runs(cells, FITTED), _runs(cells, (TOP,))
    # Three levels leave one number to say how well the law fits.
    laws = {
        name: fit_power_law(*zip(*points, strict=True))
        for name, points in fitted.items()
        if len({flops for flops, _ in points}) >= 3
    }
    rows = [_row(cells, kind, laws.get(LABELS[kind])) for kind in ARCHITECTURES]
    inside = {"yes": True, "no": False}
    directions = [below_zero(difference(cells, level)) for level in WIDTHS]
    agreements = [
        *directions,
        *(law.r_squared >= R_SQUARED for law in laws.values()),
        *(inside.get(row[-1]) for row in rows),
    ]
    missing = cells.missing(ladder)
    return Finding(
        "ladder",
        "Scaling",
        "SDM is below GDN at every level of the ladder; its loss is a power law of compute, which predicts a level "
        "that was held out.",
        _found(directions, laws, [row[-1] for row in rows]),
        "SDM below GDN at all levels; R² = 0.999; level 13 below attention, as predicted",
        verdict(agreements, missing) if laws else "missing",
        why(missing),
        _figures(fitted, laws, held_out),
        (_laws_table(rows), _levels_table(cells)),
        DEVIATIONS,
        ("The models of a level see the same tokens. Attention spends more FLOPs on them, which is in its compute.",),
    )


def difference(cells: Cells, level: int) -> Mean | None:
    """SDM minus GDN."""
    return cells.difference(ladder_variant("sdm", level), ladder_variant("gdn", level))


def _runs(cells: Cells, levels: tuple[int, ...]) -> Runs:
    """Compute and test loss of every run, by architecture."""
    found: Runs = {}
    for kind in ARCHITECTURES:
        for variant in (ladder_variant(kind, level) for level in levels):
            flops = training_flops(variant)
            points = [(flops, float(summary["nll"])) for summary in cells.summaries(variant)]
            if points:
                found.setdefault(LABELS[kind], []).extend(points)
    return found


def _row(cells: Cells, kind: Architecture, law: PowerLaw | None) -> tuple[str, ...]:
    top = ladder_variant(kind, TOP)
    measured = cells.mean(top)
    if law is None:
        return (LABELS[kind], "", "", "", "", shown(measured), "")
    prediction = law.predict(training_flops(top), runs=measured.count if measured else None)
    low, high = law.intervals["b"]
    return (
        LABELS[kind],
        f"{sum(law.runs)} of {len(law.levels)} levels",
        f"{law.b:.3f} ({low:.3f} ... {high:.3f})",
        f"{law.r_squared:.3f}",
        f"{prediction.value:.3f} ({prediction.low:.3f} ... {prediction.high:.3f})",
        shown(measured),
        "" if measured is None else "yes" if prediction.contains(measured.value) else "no",
    )


def _laws_table(rows: list[tuple[str, ...]]) -> Table:
    return Table(
        "Power laws L = a C^-b",
        (
            "global layers",
            "runs",
            "b (95% interval)",
            "R²",
            f"level {TOP}, predicted",
            f"level {TOP}, measured",
            "inside",
        ),
        rows,
        f"Fitted to levels {FITTED[0]} to {FITTED[-1]}; no fit has seen level {TOP}. Intervals by the bootstrap.",
    )


def _levels_table(cells: Cells) -> Table:
    rows = []
    for level, width in WIDTHS.items():
        sizes = cost(ladder_variant("sdm", level).recipe(0).model.build(VOCABULARY))
        means = (shown(cells.mean(ladder_variant(kind, level))) for kind in ARCHITECTURES)
        paired = shown(difference(cells, level), sign=True)
        rows.append((str(level), str(width), f"{sizes.non_embedding_parameters:,}", *means, paired))
    return Table(
        "Nats per token of test documents at every level",
        ("level", "d", "parameters", *(LABELS[kind] for kind in ARCHITECTURES), "SDM - GDN, paired"),
        rows,
        f"Means over seeds, ±: 95% interval. {PAIRED}. Parameters without embeddings and M0.",
    )


def _found(directions: list[bool | None], laws: dict[str, PowerLaw], inside: list[str]) -> str:
    known = [one for one in directions if one is not None]
    order = f"SDM below GDN at {known.count(True)} of {len(known)} levels where the difference is known"
    if not laws:
        return f"{order}; too few levels are finished for a law"
    worst = min(law.r_squared for law in laws.values())
    measured = [one for one in inside if one]
    return (
        f"{order}; R² ≥ {worst:.3f} ({len(laws)} laws); held-out level inside "
        f"{measured.count('yes')} of {len(measured)} intervals"
    )


def _figures(fitted: Runs, laws: dict[str, PowerLaw], held_out: Runs) -> tuple[Illustration, ...]:
    if not fitted:
        return ()
    rows = [
        (name, *point, split)
        for split, runs in (("fitted", fitted), ("held out", held_out))
        for name, points in runs.items()
        for point in points
    ]
    slopes = ", ".join(f"{name} with exponent {law.b:.3f}" for name, law in laws.items())
    return (
        Illustration(
            "scaling",
            "Test loss against training compute: every run, the laws, and what they predict.",
            scaling_figure(fitted, laws, held_out),
            ("global layers", "training FLOPs", "nats per token", "use"),
            rows,
            f"Loss falls with compute: {slopes or 'no laws yet'}.",
        ),
    )
