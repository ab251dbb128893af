"""Two models on the same documents: the difference of each document, and the interval of their mean.

Documents differ far more than models do. The differences, document by document, tell models apart that error bars side
by side cannot.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from sdm.errors import UserError
from sdm.evaluation.intervals import Mean, weighted_mean
from sdm.evaluation.measurement import Measurement
from sdm.evaluation.report import Table
from sdm.evaluation.results import Results
from sdm.run.config_file import differences

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
    mine, theirs = measurement.pairs(first.units), measurement.pairs(second.units)
    found = []
    for quantity in (name for name in mine if name in theirs):
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


def comparison_table(measurement: Measurement, results: Named) -> Table | None:
    """Every two models; None if the measurement has nothing to compare by."""
    rows = []
    for (name, first), (other, second) in combinations(results, 2):
        for one in compare(measurement, first, second):
            mean = one.difference
            interval = "-" if mean.low is None or mean.high is None else f"{mean.low:+.4f} ... {mean.high:+.4f}"
            rows.append(
                (f"{other} - {name}", one.quantity, f"{mean.value:+.4f}", interval, f"{mean.count:,}"),
            )
    if not rows:
        return None
    return Table(
        "Paired differences",
        ("models", "quantity", "mean", "95% interval", "n"),
        rows,
        "The same documents (or samples), n of them: the mean of the differences of each, with Student's interval.",
    )
