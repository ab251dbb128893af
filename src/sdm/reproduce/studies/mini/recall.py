"""The finding about recall: accuracy against the size of the state at equal cost, every model at its own best rate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sdm.analysis.pages import Finding, Illustration
from sdm.analysis.plots import recall_figure, state_recall_figure
from sdm.evaluation.report import Table
from sdm.evaluation.statistics import Mean, weighted_mean
from sdm.reproduce.recipes.recall import DEVIATIONS
from sdm.reproduce.studies.mini.cells import RECALL_FORMS, RECALL_RATES, SEEDS, Experiment, Variant
from sdm.reproduce.studies.mini.results import Cells, above_zero, percent
from sdm.reproduce.studies.mini.showing import BANDS, NOT_YET, illustration, point, verdict, why
from sdm.reproduce.studies.quick.jobs import TRAINED_PAIRS
from sdm.reproduce.studies.quick.recall import CLAIM, PAPER


@dataclass(frozen=True)
class Tuned:
    """A model at the learning rate that recalls most on rows of its own, the mean over seeds."""

    cells: Cells
    kind: str
    variant: Variant
    lr: float
    choice: float
    """Its accuracy on those rows."""

    @property
    def facts(self) -> dict[str, Any]:
        return self.cells.facts(self.variant)[0]

    @property
    def rate(self) -> str:
        return f"{self.lr:g}" + (" (edge)" if _is_edge(self.kind, self.lr) else "")

    def accuracies(self, pairs: int = TRAINED_PAIRS) -> list[float]:
        """Of each seed."""
        return [summary["accuracy"][str(pairs)] for summary in self.cells.summaries(self.variant, "recall")]

    def accuracy(self, pairs: int = TRAINED_PAIRS) -> Mean:
        return weighted_mean(self.accuracies(pairs))


def recall_finding(cells: Cells, recalls: Experiment) -> Finding:
    models = _tuned(cells, recalls)
    best = {kind: _best(one for one in models if one.kind == kind) for kind in RECALL_FORMS}
    sdm, gdn = best["sdm"], best["gdn"]
    missing = cells.missing(recalls, "choice")
    return Finding(
        "recall",
        "Recall and the size of the state",
        CLAIM,
        f"at {TRAINED_PAIRS} pairs: "
        + "; ".join(f"{one.variant.label} {percent(one.accuracy())}" for one in best.values() if one is not None)
        + _equal_state(models)
        if models
        else NOT_YET,
        PAPER,
        verdict([_is_above(sdm, gdn)] if sdm and gdn else [], missing),
        why(missing),
        (_by_state(models), _by_pairs([one for one in best.values() if one is not None])) if models else (),
        (_table(models), _rates_table(cells, recalls)) if models else (),
        DEVIATIONS,
        (
            "The claim is that a larger state at equal cost recalls more, not that SDM recalls more per number of it.",
            f"Every model was trained at three or four learning rates, {SEEDS} seeds each. Shown is the rate that "
            "recalls most on other rows than those of the numbers. GDN has half as many steps again as SDM; attention "
            "has three times as many, of twice the rows.",
        ),
    )


def _tuned(cells: Cells, recalls: Experiment) -> list[Tuned]:
    found = []
    for kind, forms in RECALL_FORMS.items():
        for form in forms:
            rates = _rates(cells, recalls, kind, form)
            if rates:
                lr = max(rates, key=lambda lr: (rates[lr], not _is_edge(kind, lr)))
                found.append(Tuned(cells, kind, recalls[kind, form, lr], lr, rates[lr]))
    return found


def _rates(cells: Cells, recalls: Experiment, kind: str, form: str) -> dict[float, float]:
    """The accuracy on the rows of the choice at every rate that is measured, the mean over seeds."""
    return {
        lr: mean.value
        for lr in RECALL_RATES[kind]
        if cells.summaries(recalls[kind, form, lr], "recall")
        and (mean := cells.mean(recalls[kind, form, lr], _at_trained, "choice")) is not None
    }


def _is_edge(kind: str, lr: float) -> bool:
    return lr in (RECALL_RATES[kind][0], RECALL_RATES[kind][-1])


def _at_trained(summary: dict[str, Any]) -> float:
    return float(summary["accuracy"][str(TRAINED_PAIRS)])


def _best(models: Iterable[Tuned]) -> Tuned | None:
    """The form of an architecture, chosen as its rate is."""
    return max(models, key=lambda one: one.choice, default=None)


def _is_above(one: Tuned, other: Tuned) -> bool | None:
    pairs = zip(one.accuracies(), other.accuracies(), strict=False)
    return above_zero(weighted_mean([mine - theirs for mine, theirs in pairs]))


def _equal_state(models: Sequence[Tuned]) -> str:
    """Where a memory of each kind has the same size."""
    words = [
        f"; with an equal state of {one.facts['state_elements']:,} numbers: {one.variant.label} "
        f"{percent(one.accuracy())}, {other.variant.label} {percent(other.accuracy())}"
        for one in models
        for other in models
        if (one.kind, other.kind) == ("sdm", "gdn") and one.facts["state_elements"] == other.facts["state_elements"]
    ]
    return "".join(words)


def _by_state(models: Sequence[Tuned]) -> Illustration:
    names = {"sdm": "SDM, more slots", "gdn": "GDN, fewer and wider heads"}
    curves = {
        name: [point(one.facts["state_elements"], one.accuracy()) for one in models if one.kind == kind]
        for kind, name in names.items()
    }
    caption = (
        f"Accuracy at {TRAINED_PAIRS} pairs against the size of the state, at about equal FLOPs, each model at its own "
        f"best rate. GDN cannot have more numbers at this cost, SDM can. {BANDS}"
    )
    figure = state_recall_figure(curves, TRAINED_PAIRS)
    return illustration("recall-state", caption, figure, curves, "state", "accuracy")


def _by_pairs(models: Sequence[Tuned]) -> Illustration:
    sizes = [int(pairs) for pairs in models[0].cells.summaries(models[0].variant, "recall")[0]["accuracy"]]
    curves = {one.variant.label: [point(pairs, one.accuracy(pairs)) for pairs in sizes] for one in models}
    caption = f"The best form of each: accuracy against the number of pairs. {BANDS}"
    return illustration("recall-pairs", caption, recall_figure(curves, TRAINED_PAIRS), curves, "pairs K", "accuracy")


def _table(models: Sequence[Tuned]) -> Table:
    largest = max(
        (one for one in models if one.kind == "sdm"), key=lambda one: one.facts["state_elements"], default=None
    )
    base = (largest or models[0]).facts["flops_per_token"]
    rows = [
        (
            one.variant.label,
            f"{one.facts['state_elements']:,}" + (" (grows)" if one.kind == "full_attention" else ""),
            f"{one.facts.get('initial_state_parameters', 0):,}",
            f"{one.facts['flops_per_token'] / base - 1:+.1%}",
            one.rate,
            percent(one.accuracy()),
            percent(one.accuracy(2 * TRAINED_PAIRS)),
        )
        for one in sorted(models, key=lambda one: one.facts["state_elements"])
    ]
    return Table(
        "Recall by the size of the state",
        ("model", "state", "M0", "FLOPs", "rate", f"K={TRAINED_PAIRS}", f"K={2 * TRAINED_PAIRS}"),
        rows,
        "State: numbers kept behind the context. M0: those of the learned initial memory, beside the parameters, which "
        "are equal. FLOPs per token, against the largest SDM. Means over seeds, ±: 95% interval. GDN, HxK: H heads of "
        "key width K.",
    )


def _rates_table(cells: Cells, recalls: Experiment) -> Table:
    columns = sorted({lr for rates in RECALL_RATES.values() for lr in rates})
    rows = []
    for kind, forms in RECALL_FORMS.items():
        for form in forms:
            rates = _rates(cells, recalls, kind, form)
            rows.append((form, *(f"{100 * rates[lr]:.1f}" if lr in rates else "-" for lr in columns)))
    return Table(
        f"The sweep: accuracy (%) at K={TRAINED_PAIRS} by learning rate",
        ("model", *(f"{lr:g}" for lr in columns)),
        rows,
        "On rows that no other number rests on; means over seeds.",
    )
