"""A share of right answers, and the interval that it is known to be in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sdm.evaluation.intervals import NORMAL_QUANTILE


@dataclass(frozen=True)
class Share:
    """Right answers of those that were asked for, with Wilson's interval."""

    value: float
    low: float
    high: float
    asked: int


def share(right: Sequence[int], asked: Sequence[int]) -> Share:
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
    return Share(mean, low, high, total)


def wilson(mean: float, count: float) -> tuple[float, float]:
    """Wilson's interval of a share that was found in `count` independent trials. It holds for draws between 0 and 1
    too, which vary less than zeros and ones of the same mean; and it has a width where all draws were equal."""
    square = NORMAL_QUANTILE**2 / count
    middle = (mean + square / 2) / (1 + square)
    margin = NORMAL_QUANTILE * math.sqrt(mean * (1 - mean) / count + square / (4 * count)) / (1 + square)
    return max(0.0, min(mean, middle - margin)), min(1.0, max(mean, middle + margin))
