"""Findings about likelihood at one level: positions and context, memory size, the initial state, the mixed hybrid."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from sdm.analysis.pages import Finding, Illustration
from sdm.analysis.plots import gain_figure, initial_state_figure, position_figure, slots_figure
from sdm.evaluation.report import Table
from sdm.models import cost
from sdm.reproduce.recipes.mini import DEVIATIONS, SEQUENCE_LENGTH, VOCABULARY
from sdm.reproduce.studies.mini.cells import ARCHITECTURES, LABELS, SLOTS, TOP, Experiment, Variant, ladder_variant
from sdm.reproduce.studies.mini.results import Cells, below_zero, late, shown
from sdm.reproduce.studies.mini.showing import BANDS, NOT_YET, PAIRED, illustration, point, position_curve, verdict, why

POSITION, NATS = "position in the document (tokens)", "nats per token"


def models() -> Experiment:
    """The four architectures at the last level."""
    return {kind: ladder_variant(kind, TOP) for kind in ARCHITECTURES}


def position_finding(cells: Cells) -> Finding:
    """Loss by position, and what the context beyond the local layers brings."""
    variants, missing = models(), cells.missing(models())
    gap = cells.difference(variants["sdm"], variants["gdn"], late=True)
    all_positions = cells.difference(variants["sdm"], variants["gdn"])
    curves, gains = (
        {one.label: curve for one in variants.values() if (curve := position_curve(cells, one, quantity))}
        for quantity in ("nll", "gain")
    )
    figures = []
    if curves:
        caption = f"Loss by position in test documents. {BANDS}"
        figures.append(illustration("positions", caption, position_figure(curves), curves, POSITION, NATS))
    if gains:
        caption = f"What the context beyond the local layers' reach brings. {BANDS}"
        figures.append(
            illustration("context-gain", caption, gain_figure(gains), gains, POSITION, "context gain (nats)")
        )
    return Finding(
        "position",
        "More context, lower loss",
        "SDM has a lower loss on code than GDN, more so far into a document.",
        f"SDM - GDN at positions 1k to 2k: {shown(gap, sign=True)} nats; over all positions "
        f"{shown(all_positions, sign=True)}"
        if gap
        else NOT_YET,
        "SDM below GDN and Mamba2 on code, up to a million tokens",
        verdict([below_zero(gap)] if gap else [], missing),
        why(missing),
        tuple(figures),
        (_position_table(cells, variants),) if curves else (),
        DEVIATIONS,
        (f"{PAIRED}.",),
    )


def _position_table(cells: Cells, variants: Experiment) -> Table:
    present = [one for one in variants.values() if cells.summaries(one)]
    rows = []
    for number, stretch in enumerate(cells.summaries(present[0])[0]["positions"]):
        means = (
            cells.mean(one, lambda summary, number=number: summary["positions"][number]["nll"])  # type: ignore[misc]
            for one in present
        )
        rows.append((f"{stretch['start']:,} to {stretch['stop']:,}", *map(shown, means)))
    rows.append(("all", *(shown(cells.mean(one)) for one in present)))
    columns = ("positions", *(one.label for one in present))
    return Table("Nats per token by position", columns, rows, "Means over seeds, ±: 95% interval.")


def size_finding(cells: Cells, sizes: Experiment) -> Finding:
    """Loss against the number of slots."""
    means = {slots: mean for slots in SLOTS if (mean := cells.mean(sizes[slots])) is not None}
    falls = [means[b].value < means[a].value for a, b in itertools.pairwise(means)]
    known, missing, gdn = list(means), cells.missing(sizes), ladder_variant("gdn", TOP)
    found = NOT_YET
    if falls:
        change = cells.difference(sizes[known[-1]], sizes[known[0]])
        shape = "falls monotonically" if all(falls) else "does not fall monotonically"
        found = f"{shape}; N = {known[-1]} minus N = {known[0]}: {shown(change, sign=True)} nats, paired"
    curves = {"SDM": [point(slots, mean) for slots, mean in means.items()]}
    base = cells.mean(gdn)
    figures: tuple[Illustration, ...] = ()
    if means:
        figure = slots_figure(curves, {"GDN": point(0, base)} if base else None)
        figures = (illustration("memory-size", f"Loss against the slots. {BANDS}", figure, curves, "slots N", NATS),)
    rows = [
        (variant.label, shown(cells.mean(variant)), shown(cells.mean(variant, late)), *_costs(variant))
        for variant in (*sizes.values(), gdn)
    ]
    return Finding(
        "memory-size",
        "Memory size",
        "A larger memory lowers the loss at the same compute.",
        found,
        "code NLL 0.947, 0.937 and 0.914 with 27, 108 and 432 MB a layer; GDN 0.963 (level 6)",
        verdict(falls, missing),
        why(missing),
        figures,
        (_costs_table("Loss by the number of slots", "memory", rows),),
        DEVIATIONS,
        ("More slots also widen W_q and W_k, which costs parameters and FLOPs as the table shows.",),
    )


def initial_finding(cells: Cells, initial: Experiment) -> Finding:
    """Learned against null initial states."""
    gains = {kind: cells.difference(initial[kind, True], initial[kind, False]) for kind in ("sdm", "gdn")}
    missing = cells.missing(initial)
    rows = []
    for variant in initial.values():
        first = cells.mean(variant, lambda summary: summary["positions"][0]["nll"])
        rows.append((variant.label, shown(cells.mean(variant)), shown(first), shown(cells.mean(variant, late))))
    curves = {key: curve for key, variant in initial.items() if (curve := position_curve(cells, variant))}
    figures: tuple[Illustration, ...] = ()
    if curves:
        learned, null = (
            {LABELS[kind]: curves[kind, want] for kind, is_ in curves if is_ is want} for want in (True, False)
        )
        named = {initial[key].label: curve for key, curve in curves.items()}
        figure = initial_state_figure(learned, null)
        caption = f"Learned and null initial states by position. {BANDS}"
        figures = (illustration("initial-state", caption, figure, named, POSITION, NATS),)
    sdm, gdn = gains.values()
    return Finding(
        "initial-state",
        "A learned initial state",
        "Learning M0 helps SDM, and does not help GDN.",
        f"learned - null, paired: SDM {shown(sdm, sign=True)} nats, GDN {shown(gdn, sign=True)}"
        if sdm or gdn
        else NOT_YET,
        "code NLL at level 8, null to learned: SDM 0.845 to 0.822, GDN 0.849 to 0.850",
        verdict([below_zero(sdm), below_zero(gdn) is not True] if sdm and gdn else [], missing),
        why(missing),
        figures,
        (Table("Initial states", ("model", NATS, "positions 0 to 64", "1k to 2k"), rows),),
        DEVIATIONS,
    )


def mixed_finding(cells: Cells) -> Finding:
    """Global layers that are full attention and SDM in turn."""
    variants, missing = models(), cells.missing(models())
    against = [cells.difference(variants["mixed"], variants[kind]) for kind in ("full_attention", "sdm")]
    rows = [
        (one.label, shown(cells.mean(one)), shown(cells.mean(one, late)), *_costs(one)) for one in variants.values()
    ]
    return Finding(
        "mixed",
        "A mixed hybrid",
        "Global layers that alternate between full attention and SDM are better than either alone.",
        f"paired: mixed - attention {shown(against[0], sign=True)} nats, mixed - SDM {shown(against[1], sign=True)}"
        if any(against)
        else NOT_YET,
        "text NLL 2.645, with attention alone 2.658, with SDM alone 2.654 (level 8)",
        verdict([below_zero(one) for one in against] if all(against) else [], missing),
        why(missing),
        (),
        (_costs_table("Four kinds of global layers", "global layers", rows),),
        DEVIATIONS,
    )


def _costs(variant: Variant) -> tuple[str, str, str]:
    sizes = cost(variant.recipe(0).model.build(VOCABULARY))
    state = sizes.state_elements + sizes.kv_elements_per_token * SEQUENCE_LENGTH
    return f"{sizes.parameters:,}", f"{state:,}", f"{sizes.training_flops_per_token(SEQUENCE_LENGTH) // 3:,}"


def _costs_table(title: str, first: str, rows: Sequence[tuple[str, ...]]) -> Table:
    return Table(
        title,
        (first, NATS, "1k to 2k", "parameters", "state", "FLOPs/token"),
        rows,
        "Means over seeds, ±: 95% interval. State: the numbers that global layers keep behind "
        f"{SEQUENCE_LENGTH:,} tokens. Parameters are without M0, which has as many as SDM's state.",
    )
