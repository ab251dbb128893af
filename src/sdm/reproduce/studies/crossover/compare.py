"""What is read off the runs: likelihoods of held-out documents, and paired differences of two variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sdm.evaluation.statistics import Mean, weighted_mean
from sdm.reproduce.studies.crossover.cells import Cell

Documents = Mapping[str, tuple[float, float]]
"""By document: nats per token of all of it, and of its second half."""
Measured = Mapping[Cell, Documents]
WHOLE, LATE = 0, 1


@dataclass(frozen=True)
class Difference:
    """Of two variants at one width and length, the first minus the second, on the same documents and seeds."""

    documents: Mean
    """Over documents, of the mean over seeds: how far these models are apart."""
    seeds: tuple[float, ...]
    """Over documents, of each seed: how far another seed may take them."""


def nats(measured: Measured, variant: str, width: int, steps: int, part: int) -> Mean | None:
    """The mean over seeds and documents, with the interval of the documents."""
    runs = _runs(measured, variant, width, steps)
    return _over_documents([{name: one[part] for name, one in run.items()} for run in runs.values()]) if runs else None


def difference(measured: Measured, first: str, second: str, width: int, steps: int, part: int) -> Difference | None:
    """Of the seeds that both have; None if there are none."""
    ours, theirs = (_runs(measured, variant, width, steps) for variant in (first, second))
    found = [
        {name: one[part] - theirs[seed][name][part] for name, one in run.items()}
        for seed, run in sorted(ours.items())
        if seed in theirs
    ]
    if not found:
        return None
    return Difference(_over_documents(found), tuple(sum(one.values()) / len(one) for one in found))


def _runs(measured: Measured, variant: str, width: int, steps: int) -> dict[int, Documents]:
    place = (variant, width, steps)
    return {cell.seed: run for cell, run in measured.items() if (cell.variant, cell.width, cell.steps) == place}


def _over_documents(seeds: Sequence[Mapping[str, float]]) -> Mean:
    return weighted_mean([sum(run[name] for run in seeds) / len(seeds) for name in seeds[0]])
