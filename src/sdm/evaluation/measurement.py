"""What a measurement is: settings, a plan of units for a model, and what is made of their results."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from sdm.evaluation.eval_model import EvalModel
from sdm.evaluation.report import Chart, Report

if TYPE_CHECKING:
    from sdm.evaluation.statistics import Difference

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
        self, summary: Mapping[str, Any], baseline: str, differences: Mapping[str, Sequence[Difference]]
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
