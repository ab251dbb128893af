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
    return (results.subject.get("fingerprint") or {}).get("tokenizer")


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
