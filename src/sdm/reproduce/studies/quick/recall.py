"""What is said about recall: accuracy against the number of pairs, and against the size of the state at equal cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sdm.analysis.pages import Finding, Illustration, Verdict
from sdm.analysis.plots import recall_figure, state_recall_figure
from sdm.evaluation.report import Point, Table
from sdm.evaluation.statistics import weighted_mean
from sdm.reproduce.jobs import Outcome
from sdm.reproduce.recipes.recall import DEVIATIONS
from sdm.reproduce.studies.quick.jobs import (
    GDN_RATE,
    GDN_RATES,
    KEY_DIMS,
    RECALL,
    RECALL_ATTENTION,
    SEEDS,
    SLOTS,
    TRAINED_PAIRS,
    layout,
    recall_gdn,
    recall_sdm,
)

KEY, TITLE = "recall", "A larger state at equal cost recalls more"
CLAIM = "A state that is thousands of times larger, at the same parameters and FLOPs per token, recalls more."
PAPER = "RULER, 1.4B: SDM 31.2, GDN 20.0, full attention 32.5; 8B: 50.2, 34.2, 61.2"

SDM_NAME = "SDM, N = {:,}"


@dataclass(frozen=True)
class Model:
    """One model over its seeds."""

    name: str
    runs: Sequence[Outcome]

    @property
    def facts(self) -> Mapping[str, Any]:
        return self.runs[0].facts or {}

    @property
    def seeds(self) -> str:
        return f"{len(self.runs)} seed{'s' if len(self.runs) > 1 else ''}"

    def accuracy(self, pairs: int) -> list[float]:
        return [run.measured["recall"]["accuracy"][str(pairs)] for run in self.runs]

    def mean(self, pairs: int) -> float:
        values = self.accuracy(pairs)
        return sum(values) / len(values)

    def point(self, x: float, pairs: int) -> Point:
        """With the 95% interval of the mean over seeds, if there are several."""
        mean = weighted_mean(self.accuracy(pairs))
        if mean.low is None or mean.high is None:
            return Point(x, mean.value)
        return Point(x, mean.value, max(0.0, mean.low), min(1.0, mean.high))

    def in_words(self, pairs: int) -> str:
        values = self.accuracy(pairs)
        spread = f" ({100 * min(values):.1f} to {100 * max(values):.1f})" if len(values) > 1 else ""
        return f"{100 * self.mean(pairs):.1f}%{spread}"


def finding(outcomes: Mapping[str, Outcome]) -> Finding:
    """From the runs that there are; without the largest SDM or the widest GDN there is nothing to say."""

    def model(name: str, *jobs: str) -> Model | None:
        runs = [outcomes[job] for job in jobs if "recall" in outcomes[job].measured]
        return Model(name, runs) if runs else None

    sdm = {slots: model(SDM_NAME.format(slots), *_sdm_jobs(slots)) for slots in SLOTS}
    gdn = {key_dim: model(f"GDN, {layout(key_dim)}", *_gdn_jobs(key_dim)) for key_dim in KEY_DIMS}
    attention = model("full attention", RECALL_ATTENTION)
    best, rival = sdm[SLOTS[-1]], gdn[KEY_DIMS[-1]]
    if best is None or rival is None:
        return Finding(KEY, TITLE, CLAIM, "no result", PAPER, "failed", "The runs that it rests on have failed.")
    swept = {lr: model(f"lr {lr:g}", recall_gdn(KEY_DIMS[-1], lr, SEEDS[0])) for lr in GDN_RATES}
    rates = {lr: found for lr, found in swept.items() if found is not None}
    shown = [one for one in (best, rival, attention) if one is not None]
    memories = [one for one in (*sdm.values(), *gdn.values()) if one is not None]
    at = TRAINED_PAIRS
    found = f"at {at} pairs: SDM {best.in_words(at)}, {best.seeds}; GDN's best {rival.in_words(at)}, {rival.seeds}"
    if attention is not None:
        found += f"; full attention {attention.in_words(at)}, {attention.seeds}"
    return Finding(
        KEY,
        TITLE,
        CLAIM,
        found,
        PAPER,
        _verdict(best, rival),
        illustrations=(_by_pairs(shown), _by_state(sdm, gdn)),
        tables=(_accuracy_table([*memories, *([attention] if attention else [])]), _size_table(memories, attention)),
        deviations=DEVIATIONS,
        notes=(*_notes(rates, best, rival, attention), *_equal_state(sdm, gdn)),
    )


def _sdm_jobs(slots: int) -> list[str]:
    return [recall_sdm(slots, seed) for seed in (SEEDS if slots == SLOTS[-1] else SEEDS[:1])]


def _gdn_jobs(key_dim: int) -> list[str]:
    return [recall_gdn(key_dim, GDN_RATE, seed) for seed in (SEEDS if key_dim == KEY_DIMS[-1] else SEEDS[:1])]


def _verdict(best: Model, rival: Model) -> Verdict:
    """The paper's direction, if the worst seed of one is above the best of the other."""
    if min(best.accuracy(TRAINED_PAIRS)) > max(rival.accuracy(TRAINED_PAIRS)):
        return "agrees"
    return "unclear" if best.mean(TRAINED_PAIRS) > rival.mean(TRAINED_PAIRS) else "differs"


def _pairs(models: Sequence[Model]) -> list[int]:
    return sorted({int(pairs) for one in models for pairs in one.runs[0].measured["recall"]["accuracy"]})


def _by_pairs(models: Sequence[Model]) -> Illustration:
    pairs = _pairs(models)
    curves = {f"{one.name} ({one.seeds})": [one.point(k, k) for k in pairs] for one in models}
    rows = [
        (one.name, k, run, accuracy) for one in models for k in pairs for run, accuracy in enumerate(one.accuracy(k))
    ]
    last = ", ".join(f"{one.name} {100 * one.mean(TRAINED_PAIRS):.0f}%" for one in models)
    return Illustration(
        "recall",
        f"Accuracy against the number of pairs. All are trained to K = {TRAINED_PAIRS}; more is beyond training. "
        "Bands: 95% intervals over seeds.",
        recall_figure(curves, TRAINED_PAIRS),
        ("model", "pairs", "run", "accuracy"),
        rows,
        f"Accuracy of recall against pairs; at {TRAINED_PAIRS} pairs: {last}.",
    )


def _by_state(sdm: Mapping[int, Model | None], gdn: Mapping[int, Model | None]) -> Illustration:
    groups = {"SDM, more slots": sdm, "GDN, fewer and wider heads": gdn}
    curves = {
        name: [one.point(one.facts["state_elements"], TRAINED_PAIRS) for one in models.values() if one is not None]
        for name, models in groups.items()
    }
    rows = [
        (one.name, one.facts["state_elements"], one.facts["flops_per_token"], run, accuracy)
        for models in groups.values()
        for one in models.values()
        if one is not None
        for run, accuracy in enumerate(one.accuracy(TRAINED_PAIRS))
    ]
    return Illustration(
        "state",
        f"Accuracy at {TRAINED_PAIRS} pairs against the size of the state, at about equal FLOPs. GDN cannot have more "
        "numbers at this cost, SDM can. The claim is not that it recalls more per number: see where states are equal. "
        f"Largest SDM and widest GDN: {len(SEEDS)} seeds, the others 1.",
        state_recall_figure(curves, TRAINED_PAIRS),
        ("model", "state", "flops_per_token", "run", "accuracy"),
        rows,
        "Accuracy rises with the size of the state for SDM and for GDN; SDM's states reach further.",
    )


def _accuracy_table(models: Sequence[Model]) -> Table:
    pairs = _pairs(models)
    rows = [
        (
            one.name,
            *(f"{100 * one.mean(k):.1f}" for k in pairs),
            f"{one.facts['lr']:g}",
            str(len(one.runs)),
        )
        for one in models
    ]
    names = {"sdm": "SDM", "gdn": "GDN", "full_attention": "attention"}
    trained = ", ".join(
        f"{names[kind]} {one['steps']} steps of {one['batch_size']} rows" for kind, one in RECALL.items()
    )
    caption = f"Means over the seeds. Trained to K = {TRAINED_PAIRS}: {trained}. GDN, HxK: H heads of key width K."
    return Table(
        "Recall: accuracy (%) by the number of pairs K",
        ("model", *(f"K={k}" for k in pairs), "lr", "seeds"),
        rows,
        caption,
    )


def _size_table(models: Sequence[Model], attention: Model | None) -> Table:
    base = next(one for one in models if one.name == SDM_NAME.format(SLOTS[-1]))
    flops = base.facts["flops_per_token"]
    rows = [
        (
            one.name,
            f"{one.facts['parameters']:,}",
            f"{one.facts.get('initial_state_parameters', 0):,}",
            f"{one.facts['flops_per_token'] / flops - 1:+.1%}",
            f"{one.facts['state_elements']:,}" + ("" if one is not attention else " (grows)"),
            f"{100 * one.mean(TRAINED_PAIRS):.1f}",
        )
        for one in sorted((*models, *([attention] if attention else [])), key=lambda one: one.facts["state_elements"])
    ]
    return Table(
        "Equal cost: by the size of the state",
        ("model", "parameters", "M0", "FLOPs", "state", f"K={TRAINED_PAIRS}"),
        rows,
        f"M0: the numbers of the learned initial memory, beside the parameters. FLOPs per token, against {base.name}.",
    )


def _notes(rates: Mapping[float, Model], best: Model, rival: Model, attention: Model | None) -> list[str]:
    notes = []
    if len(rates) > 1:
        losses = {lr: one.facts["valid_loss"] for lr, one in rates.items()}
        chosen = min(losses, key=losses.__getitem__)
        swept = ", ".join(f"{lr:g}: {100 * one.mean(TRAINED_PAIRS):.1f}%" for lr, one in rates.items())
        note = f"GDN's learning rate, swept with {layout(KEY_DIMS[-1])} and seed 0, at {TRAINED_PAIRS} pairs: {swept}."
        if chosen == GDN_RATE:
            note += f" {chosen:g} has the lowest loss on other rows than these, and is not at the edge of the sweep."
        else:
            note += f" {chosen:g} has the lowest loss on other rows than these: the sweep should go on from there."
        notes.append(note)
    extra, own = best.facts["initial_state_parameters"], best.facts["parameters"]
    notes.append(
        f"Equal parameters: {own:,} of SDM and {rival.facts['parameters']:,} of GDN, and M0's {extra:,} "
        f"(+{extra / own:.0%}) beside SDM's."
    )
    flops = best.facts["flops_per_token"]
    costs = [f"{rival.name} spends {rival.facts['flops_per_token'] / flops - 1:+.1%}"]
    if attention is not None:
        costs.append(f"full attention {attention.facts['flops_per_token'] / flops - 1:+.0%}")
    notes.append(f"FLOPs per token, against {best.name}: {', '.join(costs)}.")
    if attention is not None:
        notes.append(
            f"Full attention has one seed, which learns the task in {RECALL['full_attention']['steps']} steps. Two "
            "others are at chance by then; with twice the steps all three reach 100% (sdm reproduce mini)."
        )
    return notes


def _equal_state(sdm: Mapping[int, Model | None], gdn: Mapping[int, Model | None]) -> list[str]:
    """Where a memory of each kind has the same size."""
    notes = []
    for one in sdm.values():
        for other in gdn.values():
            if one is None or other is None or one.facts["state_elements"] != other.facts["state_elements"]:
                continue
            notes.append(
                f"Equal state, {one.facts['state_elements']:,} numbers: {one.name} {one.in_words(TRAINED_PAIRS)}, "
                f"{other.name} {other.in_words(TRAINED_PAIRS)}. The claim is not that SDM recalls more per number."
            )
    return notes
