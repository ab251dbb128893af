"""Measurements: settings, a plan of units for a model, what is made of their results, and how they are run.

`evaluate` measures the units of a plan that are not done yet, for one model or several in turns.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from sdm.evaluation.eval_model import EvalModel
from sdm.evaluation.report import Chart, Report

if TYPE_CHECKING:
    from sdm.evaluation.statistics import PairedDifference
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from sdm.errors import UserError
from sdm.evaluation.results import Results, ResultsFolder, versions
from sdm.ranks import ALONE, Ranks
from sdm.run.config_file import KIND, to_json

Result = dict[str, Any]
"""What is kept of a unit: plain JSON."""
Data = dict[str, Any]
"""What was measured on: plain JSON with fingerprints."""
Pairs = dict[str, dict[str, tuple[float, float]]]
"""By the name of a quantity: what every document (or sample) has of it, and how much it weighs in the mean."""


@dataclass(frozen=True)
class Unit:
    """The smallest part of a measurement that is done at once and never repeated: a document, a sample."""

    key: str
    """Its name, the same in every run of the measurement, and for every model that it may be compared with."""
    group: str = ""
    """What `--limit` counts by: a source, a task at a length."""
    payload: Any = None
    """Whatever `Plan.measure` needs to find it."""
    cost: float = 1.0
    """How long it takes, in any unit: the time that is left is estimated by it."""


class Partial:
    """Tells how much of the cost of the units at hand is done, where a unit takes long."""

    listener: Callable[[float], None] | None = None

    def __call__(self, cost: float) -> None:
        if self.listener is not None:
            self.listener(cost)


@dataclass(frozen=True)
class Plan:
    """A measurement of one model, made ready: data opened, nothing computed."""

    units: Sequence[Unit]
    """In the order in which they are measured. Keys are distinct."""
    measure: Callable[[Sequence[Unit]], Iterable[Result]]
    """The results of a few units, in their order. A unit's result depends neither on its neighbours nor on which
    process measures it; each is kept as soon as it is given."""
    data: Data = field(default_factory=dict)
    """Results on other data are never mixed with these."""
    batch: int = 1
    """Units that `measure` gets at a time, at most. They are consecutive and of one group."""
    partial: Partial = field(default_factory=Partial)
    """`measure` may call it, where units take long."""


@dataclass(frozen=True)
class Measurement(abc.ABC):
    """Base of all measurements: frozen dataclasses whose fields, each with a line of its own, are the settings."""

    interleaved: ClassVar[bool] = False
    """Whether several models take turns, unit by unit, as timings must."""

    free: ClassVar[tuple[str, ...]] = ()
    """Fields that change no result, such as how much is computed at a time: they may differ when it is resumed."""

    @abc.abstractmethod
    def plan(self, lm: EvalModel) -> Plan:
        """Open the data for a model, and say what the units are. What cannot work is a UserError here."""

    @abc.abstractmethod
    def summary(self, results: Mapping[str, Result]) -> dict[str, Any]:
        """Plain JSON from the results of units by their keys: all of them, or at least one."""

    @abc.abstractmethod
    def report(self, summaries: Mapping[str, dict[str, Any]]) -> Report:
        """Tables and charts of one or more models, from their summaries by name."""

    def pairs(self, results: Mapping[str, Result]) -> Pairs:
        """What two models are compared by, document by document. By default, nothing."""
        return {}

    def difference_charts(
        self, summary: Mapping[str, Any], baseline: str, differences: Mapping[str, Sequence[PairedDifference]]
    ) -> list[Chart]:
        """Charts of paired differences to a baseline. By default, none.

        Args:
            summary: the summary of the baseline.
            baseline: the name of the baseline.
            differences: by the name of each other model, its values minus the baseline's.
        """
        return []

    def pairable(self, quantity: str, data: tuple[Data, Data], same_tokenizer: bool) -> bool:
        """Whether a quantity of two models, measured on such data, may be compared by the keys of units: whether what
        has the same key is the same. By default, if all data are."""
        return data[0] == data[1]


@dataclass(frozen=True)
class Advance:
    """Progress of a measurement of one model, in the cost of units."""

    name: str
    """The model's."""
    done: float
    total: float
    units: int
    """Units that this session has measured."""


Listener = Callable[[Advance], None]


def evaluate(
    name: str,
    measurement: Measurement,
    models: Iterable[tuple[EvalModel, Path]],
    limit: int | None = None,
    listener: Listener = lambda advance: None,
    ranks: Ranks = ALONE,
) -> list[Results]:
    """Measure models, each into its folder, and return their results.

    Units that are done are not measured again. A folder that holds another result, of other settings for instance, is
    left alone, and the new one goes beside it: `sdm.evaluation.results.results_folder`. An error or a signal loses
    nothing: it leaves results.json with `complete` false.

    Args:
        name: the measurement's name in `sdm.evaluation.registry`.
        measurement: the measurement with its settings.
        models: models with the folders of their results; opened one after the other if this is an iterator.
        limit: units of each group to measure at most; None: all.
        listener: is called with the progress.
        ranks: processes that share the work.
    """
    if limit is not None and limit < 1:
        raise UserError(f"--limit must be at least 1, got {limit}")
    if not measurement.interleaved:
        return [_evaluate(name, measurement, [(lm, folder)], limit, listener, ranks)[0] for lm, folder in models]
    return _evaluate(name, measurement, list(models), limit, listener, ranks)


def _evaluate(
    name: str,
    measurement: Measurement,
    models: list[tuple[EvalModel, Path]],
    limit: int | None,
    listener: Listener,
    ranks: Ranks,
) -> list[Results]:
    """Measure models in turns, unit by unit."""
    sessions = [_Session(name, measurement, lm, folder, limit, ranks) for lm, folder in models]
    ranks.gather_call(lambda: None)  # until every rank has read what is done
    with ExitStack() as stack:
        for session in sessions:
            stack.enter_context(session.folder.open())
        all_done = False
        try:
            ranks.gather_call(lambda: _take_turns([session.run(listener) for session in sessions]))
            all_done = True
        finally:
            for session in sessions:
                session.close(measurement, all_done or ranks.size == 1)
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
        """Measure the units of this rank, every `ranks.size`-th, a batch at a time."""
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

    def close(self, measurement: Measurement, all_done: bool) -> None:
        """Write results.json; with the first rank's units only unless all ranks are done: others may still write."""
        if not self._ranks.first:
            return
        results = self.folder.results
        results.seconds += time.perf_counter() - self._start
        if all_done:
            self.folder.gather()
        known = {unit.key: results.units[unit.key] for unit in self.plan.units if unit.key in results.units}
        results.units = known  # in the order of the plan
        results.complete = len(known) == len(self.plan.units)
        self.folder.write()  # before anything is made of them
        results.summary = measurement.summary(known) if known else None
        self.folder.write(settled=all_done)


def settings_of(measurement: Measurement) -> dict[str, Any]:
    """Settings of a measurement as JSON, without those that change no result."""
    return {key: value for key, value in to_json(measurement).items() if key not in (KIND, *measurement.free)}


def limited(units: Iterable[Unit], limit: int | None) -> list[Unit]:
    """Return the first `limit` units of every group."""
    counts: dict[str, int] = {}
    chosen = []
    for unit in units:
        counts[unit.group] = counts.get(unit.group, 0) + 1
        if limit is None or counts[unit.group] <= limit:
            chosen.append(unit)
    return chosen


def batches(units: list[Unit], size: int) -> Iterator[list[Unit]]:
    """Yield consecutive units of one group, at most `size` at a time."""
    batch: list[Unit] = []
    for unit in units:
        if batch and (len(batch) == size or unit.group != batch[0].group):
            yield batch
            batch = []
        batch.append(unit)
    if batch:
        yield batch


def check_plan(plan: Plan) -> None:
    """Raise unless a plan has units, with distinct keys."""
    if not plan.units:
        raise UserError("there is nothing to measure with these settings")
    keys = [unit.key for unit in plan.units]
    if len(set(keys)) < len(keys):
        twice = next(key for place, key in enumerate(keys) if key in keys[:place])
        raise ValueError(f"two units of the plan have the key {twice!r}")
