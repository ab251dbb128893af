"""What sections are made of: columns of tables, curves of means, sweeps of a learning rate, and paired claims."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sdm.evaluation.position import UnitValue, nats, nats_at, whole
from sdm.evaluation.report import Point, Table
from sdm.evaluation.statistics import Difference
from sdm.models import Cost
from sdm.reproduce.jobs import RunFacts
from sdm.reproduce.study import (
    NOT_REPORTED,
    Claim,
    Expected,
    StudyResults,
    SummaryValue,
    Variant,
    point,
    shown,
)

NATS = "nats per token"
PAIRED = (
    "Differences are paired by document and seed; ±: 95% interval over documents or over seeds, the wider one. One "
    "seed's interval is over documents and says nothing about other seeds."
)
MEANS = "Means over seeds; ±: 95% interval over seeds, absent with one seed."
MEAN_95 = "Mean over seeds with its 95% interval."
FORWARD = "FLOPs of a token, forward."

Cell = Callable[[StudyResults, Variant], str]
"""Writes what a column of a table says of a variant."""
Key = TypeVar("Key")


def table(
    results: StudyResults,
    title: str,
    variants: Iterable[Variant],
    columns: Mapping[str, Cell],
    caption: str,
    first: str = "model",
) -> Table:
    """A row for each variant, a column for each cell."""
    rows = [(variant.label, *(cell(results, variant) for cell in columns.values())) for variant in variants]
    return Table(title, (first, *columns), rows, caption)


def grid_table(
    title: str,
    rows: Mapping[str, Mapping[Key, Variant]],
    columns: Mapping[Key, str],
    cell: Callable[[Variant], str],
    caption: str,
) -> Table:
    """A row for each label, a column for each key; "-" where a row has no variant of a key."""
    cells = [(label, *(cell(group[key]) if key in group else "-" for key in columns)) for label, group in rows.items()]
    return Table(title, ("model", *columns.values()), cells, caption)


def mean_cell(
    value: SummaryValue = nats, measurement: str = "position", percent: bool = False, missing: str = "missing"
) -> Cell:
    """The mean over seeds with its interval; a proportion in percent has one digit."""

    def cell(results: StudyResults, variant: Variant) -> str:
        mean = results.mean(variant, value, measurement) if measurement in variant.measurements else None
        return missing if mean is None else shown(mean, 1 if percent else 3, percent=percent)

    return cell


def seeds_cell(measurement: str) -> Cell:
    """The number of seeds that are measured."""
    return lambda results, variant: str(len(results.by_seed(variant, measurement)))


def difference_cell(base: Variant, value: UnitValue = whole) -> Cell:
    """The paired difference to a variant; "-" for itself and where there is none."""

    def cell(results: StudyResults, variant: Variant) -> str:
        difference = None if variant is base else results.paired(variant, base, value)
        return "-" if difference is None else shown(difference, sign=True)

    return cell


def fact_cell(fact: Callable[[RunFacts], str]) -> Cell:
    """A fact of the first seed that is trained."""
    return lambda results, variant: "" if (facts := results.facts(variant)) is None else fact(facts)


def cost_cell(number: Callable[[Cost, int], int]) -> Cell:
    """A number that is known before any run, from the cost of a model and the length of a training sequence."""
    return lambda results, variant: f"{number(*variant.cost()):,}"


PARAMETERS = cost_cell(lambda sizes, length: sizes.parameters)
"""Parameters, M0 aside."""
INITIAL_STATE = cost_cell(lambda sizes, length: sizes.initial_state_parameters)
"""Numbers of the learned initial state M0."""
STATE = cost_cell(lambda sizes, length: sizes.state_elements + sizes.kv_elements_per_token * length)
"""Numbers that global layers keep behind a training sequence."""
FLOPS = cost_cell(lambda sizes, length: sizes.training_flops_per_token(length) // 3)
"""FLOPs of a token in a forward pass at the training length."""


def loss_table(results: StudyResults, variants: Sequence[Variant], title: str, base: Variant | None = None) -> Table:
    """Loss, size and cost of variants, and with a base the paired difference to it."""
    columns: dict[str, Cell] = {
        "seeds": seeds_cell("position"),
        NATS: mean_cell(),
        "second half": mean_cell(nats_at(-1)),
        **({} if base is None else {f"to {base.label}": difference_cell(base)}),
        "parameters": PARAMETERS,
        "state": STATE,
        "FLOPs/token": FLOPS,
    }
    caption = (
        f"{MEANS} State: numbers that global layers keep behind a training sequence. Parameters are without M0, the "
        f"learned initial state of SDM.{'' if base is None else f' {PAIRED}'}"
    )
    return table(results, title, variants, columns, caption)


def validation_summary(results: StudyResults, variants: Iterable[Variant], used: str) -> str:
    """Loss of variants on the documents that something is chosen on, in one line."""
    means = {variant.label: results.mean(variant, measurement="valid") for variant in variants}
    words = "; ".join(f"{label} {mean.value:.3f}" for label, mean in means.items() if mean)
    return f"nats per token on the documents that {used} on: {words}" if words else ""


ByNumber = Mapping[int, Variant] | Mapping[float, Variant]
"""Variants by the number that they differ in."""


def curve(
    results: StudyResults, variants: ByNumber, value: SummaryValue = nats, measurement: str = "position"
) -> list[Point]:
    """Points at the keys of variants: means over seeds with their intervals, of those that are measured."""
    means = {x: results.mean(variant, value, measurement) for x, variant in variants.items()}
    return [point(x, mean) for x, mean in means.items() if mean is not None]


def curves(
    results: StudyResults, lines: Mapping[str, ByNumber], value: SummaryValue, measurement: str
) -> dict[str, list[Point]]:
    """The curves that have points."""
    made = {name: curve(results, variants, value, measurement) for name, variants in lines.items()}
    return {name: points for name, points in made.items() if points}


def difference_curve(results: StudyResults, places: Iterable[tuple[float, Variant, Variant, UnitValue]]) -> list[Point]:
    """Paired differences of two variants each, at their places."""
    differences = [(x, results.paired(first, second, value)) for x, first, second, value in places]
    return [point(x, difference) for x, difference in differences if difference is not None]


def accuracy_at(count: int) -> SummaryValue:
    """Accuracy of recall with a number of pairs or facts."""
    return lambda summary: summary["accuracy"].get(str(count))


Score = Callable[[StudyResults, Variant], float | None]
"""What a learning rate is chosen by; the largest is taken."""


def negative_valid_loss(results: StudyResults, variant: Variant) -> float | None:
    """Score of a learning rate: the validation loss of the first seed, negated."""
    facts = results.facts(variant)
    return None if facts is None or facts.valid_loss is None else -facts.valid_loss


def choice_accuracy(count: int) -> Score:
    """Score of a learning rate: accuracy on rows that no other number rests on, the mean over seeds."""

    def score(results: StudyResults, variant: Variant) -> float | None:
        mean = results.mean(variant, accuracy_at(count), "choice")
        return None if mean is None else mean.value

    return score


@dataclass(frozen=True)
class Chosen:
    """A model at the best of its learning rates."""

    variant: Variant
    lr: float
    score: float
    at_edge: bool
    """Whether the rate is the lowest or the highest of several."""

    def rate(self, edge: str = "edge") -> str:
        """The rate, marked if it is at the edge of the sweep."""
        return f"{self.lr:g}{f' ({edge})' if self.at_edge else ''}"


def best_rate(results: StudyResults, rates: Mapping[float, Variant], score: Score) -> Chosen | None:
    """The best of the rates that have a score; a rate in the middle of the sweep wins a tie."""
    edges = (min(rates), max(rates)) if len(rates) > 1 else ()
    scores = {lr: value for lr, variant in rates.items() if (value := score(results, variant)) is not None}
    if not scores:
        return None
    lr = max(scores, key=lambda lr: (scores[lr], lr not in edges))
    return Chosen(rates[lr], lr, scores[lr], lr in edges)


Model = Variant | Callable[[StudyResults], Variant | None]
"""A variant, or what selects one by what has been measured; None while it cannot."""


def loss_claim(
    first: Model,
    second: Model,
    paper: str = NOT_REPORTED,
    value: UnitValue = whole,
    expected: Expected = "below",
    quantity: str = "",
    where: str = "",
) -> Claim:
    """A paired difference of loss. The quantity is by default that of two variants, over all positions, with what
    they have in common before it (`where`)."""
    if isinstance(first, Variant) and isinstance(second, Variant):
        quantity = quantity or f"{f'{where}: ' if where else ''}{first.label} - {second.label}, {NATS}"
    return Claim(
        quantity, paper, _between(first, second, lambda results, *pair: results.paired(*pair, value)), expected
    )


def accuracy_claim(
    quantity: str, paper: str, first: Model, second: Model, value: SummaryValue, measurement: str
) -> Claim:
    """A difference of accuracy in points, paired by seed: above zero in the paper."""
    difference = _between(first, second, lambda results, *pair: results.paired_seeds(*pair, value, measurement))
    return Claim(f"{quantity} (points)", paper, difference, "above", percent=True)


def _between(
    first: Model, second: Model, difference: Callable[[StudyResults, Variant, Variant], Difference | None]
) -> Callable[[StudyResults], Difference | None]:
    """The difference of two models once both are selected."""

    def selected(results: StudyResults) -> Difference | None:
        ours, theirs = (model if isinstance(model, Variant) else model(results) for model in (first, second))
        return None if ours is None or theirs is None else difference(results, ours, theirs)

    return selected
