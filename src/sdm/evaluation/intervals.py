"""A mean over documents and the interval that it is known to be in."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

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
