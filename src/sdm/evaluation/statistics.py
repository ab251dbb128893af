"""Means, proportions and paired differences of two models, with their 95% intervals.

Documents differ far more than models do. `compare` takes the difference of each document, which tells models apart that
error bars side by side cannot.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from sdm.errors import UserError, did_you_mean
from sdm.evaluation.measurement import Measurement
from sdm.evaluation.report import Chart, Table
from sdm.evaluation.results import Results
from sdm.run.config_file import differences

CONFIDENCE = 0.95
NORMAL_QUANTILE = 1.959963984540054


@dataclass(frozen=True)
class Mean:
    """A mean with Student's 95% interval; one value has none."""

    value: float
    low: float | None
    high: float | None
    count: int
    """Values, such as documents."""


def weighted_mean(values: Sequence[float], weights: Sequence[float] | None = None) -> Mean:
    """Compute the mean of values that are drawn independently, such as one per document, by weight.

    With weights w it is the ratio sum(w x) / sum(w) of two sums over documents; its error is that of the deviations
    w (x - mean) (linearised), so that a long document counts as one draw.
    """
    count = len(values)
    weights = [1.0] * count if weights is None else weights
    total = math.fsum(weights)
    if count == 0 or total <= 0:
        raise ValueError("a mean needs at least one value of positive weight")
    mean = math.fsum(w * x for w, x in zip(weights, values, strict=True)) / total
    if count == 1:
        return Mean(mean, None, None, 1)
    squares = math.fsum((w * (x - mean)) ** 2 for w, x in zip(weights, values, strict=True))
    error = math.sqrt(squares * count / (count - 1)) / total
    margin = student_quantile(count - 1) * error
    return Mean(mean, mean - margin, mean + margin, count)


def mean_of_means(groups: Sequence[Sequence[float]]) -> Mean:
    """Compute the mean over groups of independent draws between 0 and 1, each group counting alike.

    Variances are estimated with two zeros and two ones more in each group (Agresti and Coull): equal draws do not pass
    for certainty.
    """
    means = [math.fsum(group) / len(group) for group in groups]
    variance = 0.0
    for group in groups:
        draws = [*group, 0.0, 0.0, 1.0, 1.0]
        middle = math.fsum(draws) / len(draws)
        variance += math.fsum((x - middle) ** 2 for x in draws) / len(draws) ** 2
    mean, margin = math.fsum(means) / len(means), NORMAL_QUANTILE * math.sqrt(variance) / len(means)
    return Mean(mean, max(0.0, mean - margin), min(1.0, mean + margin), sum(map(len, groups)))


@functools.cache
def student_quantile(freedom: int) -> float:
    """Return the t for which a proportion `CONFIDENCE` of Student's distribution lies within -t ... t."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < CONFIDENCE:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < CONFIDENCE else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """The share within -t ... t, by the finite series for whole degrees of freedom."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, sine = math.cos(angle) ** 2, math.sin(angle)
    term = total = 1.0 if freedom % 2 == 0 else math.cos(angle)
    for step in range(2 if freedom % 2 == 0 else 3, freedom, 2):
        term *= cosine * (step - 1) / step
        total += term
    if freedom % 2 == 0:
        return sine * total
    return 2 / math.pi * (angle + (sine * total if freedom > 1 else 0.0))


@dataclass(frozen=True)
class Difference:
    """A difference with the interval that it is known to be in."""

    value: float
    low: float | None
    high: float | None
    interval: str
    """What the interval is, such as "95% interval over 19 documents, 1 seed"; or why there is none."""
    by_seed: tuple[float, ...] = ()

    @classmethod
    def paired(cls, seeds: Sequence[Mapping[str, float]]) -> Difference | None:
        """The mean of differences by seed and document.

        The interval is the wider of two: over documents, each the mean over seeds, which tells how far apart these
        models are; and over seeds, each the mean over documents, which tells what other seeds would give.
        """
        shared = sorted(set.intersection(*(set(values) for values in seeds))) if seeds else []
        if not shared:
            return None
        by_seed = tuple(math.fsum(values[key] for key in shared) / len(shared) for values in seeds)
        by_document = [math.fsum(values[key] for values in seeds) / len(seeds) for key in shared]
        means = {"documents": weighted_mean(by_document), "seeds": weighted_mean(by_seed)}
        over = max(means, key=lambda name: _width(means[name]))
        known = f"95% interval over {over};" if means[over].low is not None else "no interval:"
        interval = f"{known} {len(shared)} documents, {counted_seeds(len(seeds))}"
        return cls(means[over].value, means[over].low, means[over].high, interval, by_seed)

    @classmethod
    def over_seeds(cls, values: Sequence[float]) -> Difference | None:
        """The mean of differences by seed."""
        if not values:
            return None
        mean = weighted_mean(values)
        interval = f"95% interval over {counted_seeds(len(values))}" if len(values) > 1 else "no interval: 1 seed"
        return cls(mean.value, mean.low, mean.high, interval, tuple(values))


def _width(mean: Mean) -> float:
    return -1.0 if mean.low is None or mean.high is None else mean.high - mean.low


def counted_seeds(count: int) -> str:
    """A number of seeds in words."""
    return f"{count} seed{'s' if count != 1 else ''}"


@dataclass(frozen=True)
class Proportion:
    """Proportion of right answers, with Wilson's interval."""

    value: float
    low: float
    high: float
    asked: int


def proportion(right: Sequence[int], asked: Sequence[int]) -> Proportion:
    """Compute the proportion of right answers of rows with `right` right answers of `asked` each.

    The answers of a row are not independent: where rows differ more than chance explains, the interval is that of as
    many fewer answers (the design effect of clusters). At 0% and 100%, where no row differs, it is Wilson's own, which
    does not shrink to a point.
    """
    total, rows = sum(asked), len(asked)
    if total == 0:
        raise ValueError("a proportion needs at least one answer")
    mean = sum(right) / total
    effective = float(total)
    chance = mean * (1 - mean) / total
    if rows > 1 and chance > 0:
        squares = math.fsum((hits - mean * count) ** 2 for hits, count in zip(right, asked, strict=True))
        effective /= max(1.0, squares * rows / (rows - 1) / total**2 / chance)
    low, high = wilson(mean, effective)
    return Proportion(mean, low, high, total)


def wilson(mean: float, count: float) -> tuple[float, float]:
    """Compute Wilson's interval of a proportion that was found in `count` independent trials.

    It holds for draws between 0 and 1 too, which vary less than zeros and ones of the same mean; and it has a width
    where all draws were equal.
    """
    square = NORMAL_QUANTILE**2 / count
    middle = (mean + square / 2) / (1 + square)
    margin = NORMAL_QUANTILE * math.sqrt(mean * (1 - mean) / count + square / (4 * count)) / (1 + square)
    return max(0.0, min(mean, middle - margin)), min(1.0, max(mean, middle + margin))


Named = list[tuple[str, Results]]
ComparedPairs = Literal["baseline", "all"]


@dataclass(frozen=True)
class PairedDifference:
    """Paired difference of two models in one quantity."""

    quantity: str
    first: float
    """Mean of the first model."""
    second: float
    """Mean of the second model."""
    difference: Mean
    """Mean over documents of the second model's value minus the first's."""


def compare(measurement: Measurement, first: Results, second: Results) -> list[PairedDifference]:
    """Compare two models on the documents that both have been measured on.

    Raises:
        UserError: if the results are not of the same measurement with the same settings.
    """
    check_comparable([("the first", first), ("the second", second)])
    both = [key for key in first.units if key in second.units]
    mine, theirs = (measurement.pairs({key: results.units[key] for key in both}) for results in (first, second))
    data, same_tokenizer = (first.data, second.data), _tokenizer(first) == _tokenizer(second)
    compared = []
    for quantity in (name for name in mine if name in theirs and measurement.pairable(name, data, same_tokenizer)):
        ours, others = mine[quantity], theirs[quantity]
        shared = [key for key in ours if key in others and ours[key][1] == others[key][1]]
        if not shared:
            continue
        weights = [ours[key][1] for key in shared]
        first_mean, second_mean = (
            weighted_mean([side[key][0] for key in shared], weights).value for side in (ours, others)
        )
        difference = weighted_mean([others[key][0] - ours[key][0] for key in shared], weights)
        compared.append(PairedDifference(quantity, first_mean, second_mean, difference))
    return compared


def check_comparable(results: Named) -> None:
    """Raise a UserError unless all results are of the same measurement with the same settings."""
    name, first = results[0]
    for other, second in results[1:]:
        for what in ("measurement", "settings"):
            for part, mine, theirs in differences(getattr(first, what), getattr(second, what), what)[:1]:
                raise UserError(
                    f"these results cannot be compared: {part} is {mine!r} for {name} and {theirs!r} for {other}"
                )


def _tokenizer(results: Results) -> str | None:
    return (results.model.get("fingerprint") or {}).get("tokenizer")


def _interval(mean: Mean) -> str:
    if mean.low is None or mean.high is None:
        return "-"
    if mean.low == mean.high:  # such as two models that answer nothing: it says nothing of other documents
        return "all the same"
    return f"{mean.low:+.4f} ... {mean.high:+.4f}"


def comparison_charts(measurement: Measurement, results: Named, baseline: str | None = None) -> list[Chart]:
    """Chart paired differences of models to a baseline, None: the first; empty if the measurement has no such chart."""
    by_name = dict(results)
    baseline = results[0][0] if baseline is None else baseline
    summary = by_name[baseline].summary
    others = {
        name: compare(measurement, by_name[baseline], other) for name, other in by_name.items() if name != baseline
    }
    return [] if summary is None or not others else measurement.difference_charts(summary, baseline, others)


def comparison_table(
    measurement: Measurement, results: Named, baseline: str | None = None, pairs: ComparedPairs = "baseline"
) -> Table | None:
    """Tabulate paired differences of models.

    Args:
        measurement: the measurement that the results are of.
        results: results by the name of the model.
        baseline: the model that the others are compared with; None: the first.
        pairs: "baseline" compares every model with the baseline, "all" every two models.

    Returns:
        The table; None if there is nothing to compare any of them by.
    """
    by_name = dict(results)
    baseline = results[0][0] if baseline is None else baseline
    if baseline not in by_name:
        raise UserError(f"--baseline: there is no model {baseline!r}; {did_you_mean(baseline, by_name)}")
    order = [baseline, *(name for name in by_name if name != baseline)]
    chosen = list(combinations(order, 2)) if pairs == "all" else [(baseline, name) for name in order[1:]]
    rows = []
    for name, other in chosen:
        for entry in compare(measurement, by_name[name], by_name[other]):
            mean = entry.difference
            rows.append((f"{other} - {name}", entry.quantity, f"{mean.value:+.4f}", _interval(mean), f"{mean.count:,}"))
    if not rows:
        return None
    note = "" if pairs == "all" or len(order) < 3 else " --pairs all compares every two models."
    return Table(
        "Paired differences",
        ("models", "quantity", "mean", "95% interval", "n"),
        rows,
        "The same documents (or samples), n of them: the mean of the differences of each, with Student's interval."
        + note,
    )
