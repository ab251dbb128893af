"""What the cells of `sdm reproduce mini` have measured, and the statistics over seeds and documents that are shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdm.evaluation.intervals import Mean, weighted_mean
from sdm.evaluation.results import Results
from sdm.experiments.jobs import Outcome, read_outcome
from sdm.experiments.mini.cells import Experiment, Variant

Value = Callable[[dict[str, Any]], float]


def whole(summary: dict[str, Any]) -> float:
    """Nats per token of the documents' first 2,048 tokens."""
    return float(summary["nll"])


def late(summary: dict[str, Any]) -> float:
    """Nats per token in the last stretch of positions, which is the second half."""
    return float(summary["positions"][-1]["nll"])


@dataclass(frozen=True)
class Cells:
    """The folder of a reproduction, in whatever state it is."""

    folder: Path
    failures: Mapping[str, str] = field(default_factory=dict)
    """The end of the log of each cell that failed."""

    def outcomes(self, variant: Variant, measurement: str) -> list[Outcome]:
        """Of the seeds that have been measured."""
        found = [read_outcome(job, self.folder / job.name) for job in variant.jobs()]
        return [one for one in found if measurement in one.measured]

    def summaries(self, variant: Variant, measurement: str = "position") -> list[dict[str, Any]]:
        return [one.measured[measurement] for one in self.outcomes(variant, measurement)]

    def facts(self, variant: Variant) -> list[dict[str, Any]]:
        """What is known of each seed that is trained."""
        found = [read_outcome(job, self.folder / job.name) for job in variant.jobs()]
        return [one.facts for one in found if one.facts is not None]

    def mean(self, variant: Variant, value: Value = whole, measurement: str = "position") -> Mean | None:
        """Over the seeds that there are."""
        values = [value(summary) for summary in self.summaries(variant, measurement)]
        return weighted_mean(values) if values else None

    def difference(self, variant: Variant, other: Variant, late: bool = False) -> Mean | None:
        """The first's nats per token minus the other's, on the same documents: each document's mean over the seeds, and
        the interval over documents. With `late`, of the last stretch of positions."""
        first, second = (self._by_document(one, late) for one in (variant, other))
        shared = [key for key in first if key in second]
        if not shared:
            return None
        return weighted_mean([first[key] - second[key] for key in shared])

    def _by_document(self, variant: Variant, late: bool) -> dict[str, float]:
        runs = [_nats(one.results("position"), late) for one in self.outcomes(variant, "position")]
        keys = set.intersection(*map(set, runs)) if runs else set()
        return {key: math.fsum(run[key] for run in runs) / len(runs) for key in sorted(keys)}

    def missing(self, experiment: Experiment, measurement: str = "position") -> list[str]:
        """Which variants have fewer seeds than they should, in words."""
        words = []
        for variant in experiment.values():
            count = len(self.outcomes(variant, measurement))
            if count < variant.seeds:
                failed = sum(job.name in self.failures for job in variant.jobs())
                note = f", {failed} failed" if failed else ""
                words.append(f"{variant.key}: {count} of {variant.seeds} seeds{note}")
        return words


def _nats(results: Results, late: bool) -> dict[str, float]:
    """Of each document, per token."""
    found = {}
    for key, unit in results.units.items():
        edges = unit["edges"]
        start = edges[-2] if late else 0
        found[key] = (unit["nll"][-1] if late else math.fsum(unit["nll"])) / (edges[-1] - start)
    return found


def shown(mean: Mean | None, digits: int = 3, sign: bool = False) -> str:
    """A mean with its interval, ready to read."""
    return _text(mean, 1.0, f"{'+' if sign else ''}.{digits}f", "")


def percent(mean: Mean | None, digits: int = 1) -> str:
    """Of a share."""
    return _text(mean, 100.0, f".{digits}f", "%")


def _text(mean: Mean | None, scale: float, form: str, unit: str) -> str:
    if mean is None:
        return "missing"
    number = f"{scale * mean.value:{form}}"
    if mean.low is None or mean.high is None:
        return f"{number}{unit} (one seed)"
    return f"{number} ± {scale * (mean.high - mean.low) / 2:{form.removeprefix('+')}}{unit}"


def below_zero(mean: Mean | None) -> bool | None:
    """Whether a difference is known to be negative (True) or positive (False); None if its interval has zero in it."""
    if mean is None or mean.low is None or mean.high is None or mean.low <= 0 <= mean.high:
        return None
    return mean.value < 0


def above_zero(mean: Mean | None) -> bool | None:
    known = below_zero(mean)
    return None if known is None else not known
