"""Means, proportions and paired differences of two models, with their 95% intervals.

Documents differ far more than models do. `compare` takes the difference of each document, which tells models apart that
error bars side by side cannot.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from sdm.errors import UserError
from sdm.evaluation.measurement import Measurement
from sdm.evaluation.report import Table
from sdm.evaluation.results import Results
from sdm.run.config_file import differences

CONFIDENCE = 0.95
NORMAL_QUANTILE = 1.959963984540054


@dataclass(frozen=True)
class Mean:
    """A mean with Student's interval; one value has none."""

    value: float
    low: float | None
    high: float | None
    count: int


def weighted_mean(values: Sequence[float], weights: Sequence[float] | None = None) -> Mean:
    """The mean of values that are drawn independently, such as one per document, by weight.

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
    """The mean over groups of independent draws between 0 and 1, each group counting alike. Variances are estimated
    with two zeros and two ones more in each group (Agresti and Coull): equal draws do not pass for certainty."""
    means = [math.fsum(group) / len(group) for group in groups]
    variance = 0.0
    for group in groups:
        draws = [*group, 0.0, 0.0, 1.0, 1.0]
        middle = math.fsum(draws) / len(draws)
        variance += math.fsum((x - middle) ** 2 for x in draws) / len(draws) ** 2
    mean, margin = math.fsum(means) / len(means), NORMAL_QUANTILE * math.sqrt(variance) / len(means)
    return Mean(mean, max(0.0, mean - margin), min(1.0, mean + margin), sum(map(len, groups)))


@functools.cache
def student_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The t for which a share `confidence` of Student's distribution lies within -t ... t."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
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
class Proportion:
    """Right answers of those that were asked for, with Wilson's interval."""

    value: float
    low: float
    high: float
    asked: int


def proportion(right: Sequence[int], asked: Sequence[int]) -> Proportion:
    """Of rows with so many right answers each, of so many.

    The answers of a row are not independent: where rows differ more than chance explains, the interval is that of as
    many fewer answers (the design effect of clusters). At 0% and 100%, where no row differs, it is Wilson's own, which
    does not shrink to a point.
    """
    total, rows = sum(asked), len(asked)
    if total == 0:
        raise ValueError("a share needs at least one answer")
    mean = sum(right) / total
    effective = float(total)
    chance = mean * (1 - mean) / total
    if rows > 1 and chance > 0:
        squares = math.fsum((one - mean * count) ** 2 for one, count in zip(right, asked, strict=True))
        effective /= max(1.0, squares * rows / (rows - 1) / total**2 / chance)
    low, high = wilson(mean, effective)
    return Proportion(mean, low, high, total)


def wilson(mean: float, count: float) -> tuple[float, float]:
    """Wilson's interval of a share that was found in `count` independent trials. It holds for draws between 0 and 1
    too, which vary less than zeros and ones of the same mean; and it has a width where all draws were equal."""
    square = NORMAL_QUANTILE**2 / count
    middle = (mean + square / 2) / (1 + square)
    margin = NORMAL_QUANTILE * math.sqrt(mean * (1 - mean) / count + square / (4 * count)) / (1 + square)
    return max(0.0, min(mean, middle - margin)), min(1.0, max(mean, middle + margin))


Named = list[tuple[str, Results]]


@dataclass(frozen=True)
class Difference:
    """Of one quantity, the second model's minus the first's."""

    quantity: str
    first: float
    second: float
    difference: Mean


def compare(measurement: Measurement, first: Results, second: Results) -> list[Difference]:
    """On the documents that both have been measured on. Raises if the results are not of the same measurement."""
    for what in ("measurement", "settings"):
        for name, one, other in differences(getattr(first, what), getattr(second, what), what)[:1]:
            raise UserError(f"these results cannot be compared: {name} is {one!r} for one and {other!r} for the other")
    both = [key for key in first.units if key in second.units]
    mine, theirs = (measurement.pairs({key: one.units[key] for key in both}) for one in (first, second))
    data, same_tokenizer = (first.data, second.data), _tokenizer(first) == _tokenizer(second)
    found = []
    for quantity in (name for name in mine if name in theirs and measurement.pairable(name, data, same_tokenizer)):
        one, other = mine[quantity], theirs[quantity]
        shared = [key for key in one if key in other and one[key][1] == other[key][1]]
        if not shared:
            continue
        weights = [one[key][1] for key in shared]
        first_mean, second_mean = (
            weighted_mean([side[key][0] for key in shared], weights).value for side in (one, other)
        )
        difference = weighted_mean([other[key][0] - one[key][0] for key in shared], weights)
        found.append(Difference(quantity, first_mean, second_mean, difference))
    return found


def _tokenizer(results: Results) -> str | None:
    return (results.model.get("fingerprint") or {}).get("tokenizer")


def _interval(mean: Mean) -> str:
    if mean.low is None or mean.high is None:
        return "-"
    if mean.low == mean.high:  # such as two models that answer nothing: it says nothing of other documents
        return "all the same"
    return f"{mean.low:+.4f} ... {mean.high:+.4f}"


def comparison_table(measurement: Measurement, results: Named) -> Table | None:
    """Every two models; None if there is nothing to compare any of them by."""
    rows = []
    for (name, first), (other, second) in combinations(results, 2):
        for one in compare(measurement, first, second):
            mean = one.difference
            rows.append((f"{other} - {name}", one.quantity, f"{mean.value:+.4f}", _interval(mean), f"{mean.count:,}"))
    if not rows:
        return None
    return Table(
        "Paired differences",
        ("models", "quantity", "mean", "95% interval", "n"),
        rows,
        "The same documents (or samples), n of them: the mean of the differences of each, with Student's interval.",
    )
