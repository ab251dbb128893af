"""What the cells of `sdm reproduce mini` have measured, and the statistics over seeds and documents that are shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sdm.evaluation.results import Results
from sdm.evaluation.statistics import Mean, weighted_mean
from sdm.reproduce.jobs import Outcome, read_outcome
from sdm.reproduce.studies.mini.cells import Experiment, Variant

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
        """The first's nats per token minus the other's, on the same documents and seeds; with `late`, of the last
        stretch of positions. The interval is the wider of two: over documents, each the mean over seeds, which says how
        far apart these models are; and over seeds, each the mean over documents, which says what others would be."""
        first, second = (self._by_seed(one, late) for one in (variant, other))
        pairs = [_minus(first[seed], second[seed]) for seed in first if seed in second]
        shared = set.intersection(*map(set, pairs)) if pairs else set()
        if not shared:
            return None
        documents = weighted_mean([_mean([pair[key] for pair in pairs]) for key in sorted(shared)])
        seeds = weighted_mean([_mean([pair[key] for key in sorted(shared)]) for pair in pairs])
        return max(documents, seeds, key=_width)

    def _by_seed(self, variant: Variant, late: bool) -> dict[int, dict[str, float]]:
        found = {}
        for seed, job in enumerate(variant.jobs()):
            outcome = read_outcome(job, self.folder / job.name)
            if "position" in outcome.measured:
                found[seed] = _nats(outcome.results("position"), late)
        return found

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


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _minus(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Of the documents that both have."""
    return {key: first[key] - second[key] for key in first if key in second}


def _width(mean: Mean) -> float:
    return -1.0 if mean.low is None or mean.high is None else mean.high - mean.low


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
