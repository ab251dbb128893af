"""Findings about what the memories did: how writes and reads are spread, and the course of training."""

from __future__ import annotations

from collections.abc import Mapping

from sdm.analysis.pages import Finding, Illustration
from sdm.analysis.plots import cumulative_mass_figure, effective_keys_figure, utilisation_figure
from sdm.data.config import CorpusConfig
from sdm.evaluation.eval_model import open_model
from sdm.evaluation.memory_access import AccessProbe, KeyUse, probe_access
from sdm.evaluation.position import Position
from sdm.evaluation.report import Table
from sdm.evaluation.statistics import Mean, weighted_mean
from sdm.reproduce.jobs import Outcome
from sdm.reproduce.recipes.mini import DEVIATIONS, WIDTHS
from sdm.reproduce.studies.mini.cells import SMALL, TOP, Experiment, Variant, ladder_variant, plain_variant
from sdm.reproduce.studies.mini.results import Cells, above_zero, percent, shown
from sdm.reproduce.studies.mini.showing import NOT_YET, verdict, why
from sdm.run import Run

DOCUMENTS = 8  # the paper's number
Uses = dict[str, Mapping[str, KeyUse]]


def access_finding(cells: Cells, grid: Experiment) -> Finding:
    """How the weights of a token's writes and reads are spread over its keys."""
    variants = {variant.label: variant for variant in grid.values() if cells.outcomes(variant, "position")}
    probes = {label: probe(cells.outcomes(variant, "position")[0]) for label, variant in variants.items()}
    uses: Uses = {label: {"write": one.write, "read": one.read} for label, one in probes.items()}
    top = ladder_variant("sdm", TOP)
    seeds = [probe(one) for one in cells.outcomes(top, "position")]
    untied = [probe(one) for one in cells.outcomes(plain_variant("sdm"), "position")]
    gap = _gap(seeds)
    missing = [*cells.missing(grid), *cells.missing({TOP: top})]
    return Finding(
        "access",
        "How keys are used",
        "Reads are spread more evenly over their keys than writes.",
        f"effective keys, reads minus writes, as a share of k: {shown(gap, sign=True)} with tied initialisation, "
        f"{shown(_gap(untied), sign=True)} with the plain recipe",
        "reads are consistently more uniform than writes; the top 32 of 64 writes have about 85% of the mass",
        verdict([above_zero(gap)] if gap else [], missing),
        why(missing),
        _figures(uses),
        (_table(probes),) if probes else (),
        (*DEVIATIONS, f"figures: level {SMALL}, d = {WIDTHS[SMALL]}, one seed; {DOCUMENTS} test documents"),
        ("W_q begins equal to W_k here, so that reads and writes begin alike; the plain recipe has no such tie.",),
    )


def _gap(probes: list[AccessProbe]) -> Mean | None:
    """Reads minus writes, over seeds."""
    if not probes:
        return None
    return weighted_mean([one.read.effective_mean - one.write.effective_mean for one in probes])


def probe(outcome: Outcome) -> AccessProbe:
    """Of a run, on the beginnings of the first test documents that are long enough."""
    subject = open_model(outcome.folder)
    assert subject.run is not None
    (held_out,) = Position().held_out(subject)
    store = held_out.tokens(subject.tokenizer)
    data = subject.run.config().data
    assert isinstance(data, CorpusConfig)
    length = data.sequence_length
    long = (store.lengths >= length).nonzero().squeeze(1).tolist()[:DOCUMENTS]
    return probe_access(subject.model, [store.document(number, 0, length).long().unsqueeze(0) for number in long])


def _figures(uses: Uses) -> tuple[Illustration, ...]:
    if not uses:
        return ()
    mass = [
        (label, side, m + 1, float(one.mass[m]), float(one.mass_low[m]), float(one.mass_high[m]))
        for label, sides in uses.items()
        for side, one in sides.items()
        for m in range(one.keys)
    ]
    effective = [
        (label, side, one.keys, one.effective_mean, one.effective_median)
        for label, sides in uses.items()
        for side, one in sides.items()
    ]
    words = "; ".join(f"{label} {side} {mean:.2f}" for label, side, _, mean, _ in effective)
    return (
        Illustration(
            "cumulative-mass",
            "Mass of the m heaviest keys of a token: mean, and 10% to 90% of the tokens.",
            cumulative_mass_figure(uses),
            ("model", "side", "m", "mass", "10%", "90%"),
            mass,
            "Curves that rise from the heaviest key to all of them.",
        ),
        Illustration(
            "effective-keys",
            "Effective keys of a token as a share of k.",
            effective_keys_figure(uses),
            ("model", "side", "k", "mean", "median"),
            effective,
            f"Mean effective keys: {words}.",
        ),
    )


def _table(probes: dict[str, AccessProbe]) -> Table:
    rows = [
        (
            label,
            f"{one.write.effective_mean:.3f}",
            f"{one.read.effective_mean:.3f}",
            f"{100 * one.write.mass[one.write.keys // 2 - 1]:.0f}%",
            f"{100 * one.read.mass[one.read.keys // 2 - 1]:.0f}%",
        )
        for label, one in probes.items()
    ]
    return Table(
        "Keys in use",
        ("model", "writes: u", "reads: u", "writes: top half", "reads: top half"),
        rows,
        "u: effective keys as a share of k, mean over tokens. Top half: mass of the heavier half of k. One seed.",
    )


def utilisation_finding(cells: Cells) -> Finding:
    """Gates and slots in the course of training."""
    variants: dict[str, Variant] = {"SDM": ladder_variant("sdm", TOP)}
    missing = cells.missing(variants)
    runs = [Run(one.folder).metrics() for one in cells.outcomes(variants["SDM"], "position")]
    courses = [[line for line in lines if "memory/slots_written" in line] for lines in runs]
    courses = [lines for lines in courses if lines]
    means = {
        name: weighted_mean([lines[-1][f"memory/{name}"] for lines in courses])
        for name in ("forget_gate_mean", "input_gate_mean", "slots_written", "slots_read")
        if courses
    }
    figures: tuple[Illustration, ...] = ()
    if courses:
        names = ("step", *(f"memory/{name}" for name in means))
        figures = (
            Illustration(
                "utilisation",
                "Gates, entropies and slots in use while SDM trains, of each seed.",
                utilisation_figure({f"SDM, seed {seed}": lines for seed, lines in enumerate(courses)}),
                ("seed", *names),
                [(seed, *(line[name] for name in names)) for seed, lines in enumerate(courses) for line in lines],
                "; ".join(f"{name.replace('_', ' ')} ends at {mean.value:.2f}" for name, mean in means.items()),
            ),
        )
    return Finding(
        "utilisation",
        "Memory in use during training",
        "Forgetting settles at exp(g) ≈ 0.95 and writing at β ≈ 0.50; all slots are read, and ever more are written.",
        f"at the end: exp(g) {shown(means['forget_gate_mean'])}, β {shown(means['input_gate_mean'])}; of the slots "
        f"{percent(means['slots_written'], 0)} written, {percent(means['slots_read'], 0)} read"
        if means
        else NOT_YET,
        "exp(g) ≈ 0.95, β ≈ 0.50; written 28% to 42%, read 100% of the slots in 21M tokens",
        "unclear" if means else "missing",
        why(missing)
        or "Shares of slots grow with the tokens that are counted: one step of 2,048 here, 21M in the paper.",
        figures,
        (),
        DEVIATIONS,
    )
