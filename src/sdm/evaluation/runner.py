"""Run measurements: measure the units of a plan that are not done yet, for one model or several in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdm.errors import UserError
from sdm.evaluation.eval_model import EvalModel
from sdm.evaluation.measurement import Measurement, Plan, Unit
from sdm.evaluation.results import Results, ResultsFolder, versions
from sdm.ranks import ALONE, Ranks
from sdm.run.config_file import KIND, to_json


@dataclass(frozen=True)
class Advance:
    """How far a session is, in the cost of units."""

    name: str
    done: float
    total: float
    units: int
    """That this session has measured."""


Listener = Callable[[Advance], None]


def evaluate(
    name: str,
    measurement: Measurement,
    models: Iterable[tuple[EvalModel, Path]],
    limit: int | None = None,
    listener: Listener = lambda advance: None,
    ranks: Ranks = ALONE,
) -> list[Results]:
    """The results of each lm, in its folder. Units that are done there already are not measured again.

    What is done is kept whatever happens: an error or a signal leaves results.json with `complete` false.
    """
    if limit is not None and limit < 1:
        raise UserError(f"--limit must be at least 1, got {limit}")
    if not measurement.interleaved:
        return [_together(name, measurement, [(lm, folder)], limit, listener, ranks)[0] for lm, folder in models]
    return _together(name, measurement, list(models), limit, listener, ranks)


def _together(
    name: str,
    measurement: Measurement,
    models: list[tuple[EvalModel, Path]],
    limit: int | None,
    listener: Listener,
    ranks: Ranks,
) -> list[Results]:
    sessions = [_Session(name, measurement, lm, folder, limit, ranks) for lm, folder in models]
    ranks.gather_call(lambda: None)  # until everybody has read what is done
    with ExitStack() as stack:
        for session in sessions:
            stack.enter_context(session.folder.open())
        together = False
        try:
            ranks.gather_call(lambda: _take_turns([session.run(listener) for session in sessions]))
            together = True
        finally:
            for session in sessions:
                session.close(measurement, together or ranks.size == 1)
    return [session.folder.results for session in sessions]


_END = object()


def _take_turns(turns: list[Iterator[None]]) -> None:
    while turns:
        turns = [turn for turn in turns if next(turn, _END) is not _END]


class _Session:
    """One measurement of one model."""

    def __init__(
        self, name: str, measurement: Measurement, lm: EvalModel, folder: Path, limit: int | None, ranks: Ranks
    ) -> None:
        self.lm, self._ranks, self.plan = lm, ranks, measurement.plan(lm)
        check_plan(self.plan)
        settings, planned = settings_of(measurement), len(self.plan.units)
        wanted = Results(name, settings, lm.describe(), self.plan.data, planned, limit, versions=versions())
        self.folder = ResultsFolder(folder, wanted, ranks.rank)
        self.asked = limited(self.plan.units, limit)
        self._start = time.perf_counter()

    def run(self, listener: Listener) -> Iterator[None]:
        """Measure what this rank has to, a batch at a time: every so-manieth unit."""
        ranks, done = self._ranks, self.folder.results.units
        total = sum(unit.cost for unit in self.asked)
        reached, units = sum(unit.cost for unit in self.asked if unit.key in done), 0

        def tell(partial: float = 0.0) -> None:
            """Of other ranks it is only known that they are about as far."""
            listener(Advance(self.lm.name, min(reached + partial * ranks.size, total), total, units))

        tell()
        self.plan.partial.listener = tell
        mine = [unit for place, unit in enumerate(self.asked) if place % ranks.size == ranks.rank]
        for batch in batches([unit for unit in mine if unit.key not in done], self.plan.batch):
            for unit, result in zip(batch, self.plan.measure(batch), strict=True):
                self.folder.add(unit.key, result)
                reached, units = reached + unit.cost * ranks.size, units + 1
            tell()  # of a batch at once: computed side by side, its first unit took as long as all of them
            yield

    def close(self, measurement: Measurement, together: bool) -> None:
        """Put together what there is. Unless all ranks are done, others may still be writing: then only the first's."""
        if not self._ranks.first:
            return
        results = self.folder.results
        results.seconds += time.perf_counter() - self._start
        if together:
            self.folder.gather()
        known = {unit.key: results.units[unit.key] for unit in self.plan.units if unit.key in results.units}
        results.units = known  # in the order of the plan
        results.complete = len(known) == len(self.plan.units)
        self.folder.write()  # before anything is made of them
        results.summary = measurement.summary(known) if known else None
        self.folder.write(settled=together)


def settings_of(measurement: Measurement) -> dict[str, Any]:
    return {key: value for key, value in to_json(measurement).items() if key not in (KIND, *measurement.free)}


def limited(units: Iterable[Unit], limit: int | None) -> list[Unit]:
    """The first so many units of every group."""
    counts: dict[str, int] = {}
    chosen = []
    for unit in units:
        counts[unit.group] = counts.get(unit.group, 0) + 1
        if limit is None or counts[unit.group] <= limit:
            chosen.append(unit)
    return chosen


def batches(units: list[Unit], size: int) -> Iterator[list[Unit]]:
    """Consecutive units of one group, at most `size` at a time."""
    batch: list[Unit] = []
    for unit in units:
        if batch and (len(batch) == size or unit.group != batch[0].group):
            yield batch
            batch = []
        batch.append(unit)
    if batch:
        yield batch


def check_plan(plan: Plan) -> None:
    if not plan.units:
        raise UserError("there is nothing to measure with these settings")
    keys = [unit.key for unit in plan.units]
    if len(set(keys)) < len(keys):
        twice = next(key for place, key in enumerate(keys) if key in keys[:place])
        raise ValueError(f"two units of the plan have the key {twice!r}")
