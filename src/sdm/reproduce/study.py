"""A study as data: variants x seeds x measurements, and the claims that are checked with them.

    Variant         a model that is trained with several seeds, each a run
    Claim           a difference that the paper gives a direction for, and the function that computes ours
    Section         claims about one question, with their tables and charts
    Study           everything that `sdm reproduce NAME` runs and shows
    StudyResults    what the runs in a folder have measured so far

`sdm.reproduce.run_study` runs a study and writes its page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sdm.analysis.pages import Verdict
from sdm.errors import UserError
from sdm.evaluation.measurement import Measurement
from sdm.evaluation.position import UnitValue, nats, whole
from sdm.evaluation.report import AnyChart, Point, Table
from sdm.evaluation.speed import Speed
from sdm.evaluation.statistics import Difference, Mean, counted_seeds, weighted_mean
from sdm.models import Cost, cost
from sdm.reproduce.jobs import Job, Outcome, RunFacts, expected_work, read_outcome
from sdm.run.config import TrainConfig

WRITE_RULE = (
    'write rule: this project\'s default (`update="delta"`) is the retrieved-sum rule, '
    "M[i] <- M[i] + β k_i (v - Σ_j k_j M[j]). The paper prints a per-slot equation, v - M[i], and means the retrieved "
    'sum: its figure, its appendix and its equality with GDN need it. The printed form is `update="slot"`'
)
NOT_YET = "not measured yet"
NOT_REPORTED = "not reported"  # by the paper
SPEED_FOLDER = "study-speed"  # in evaluations/ of a run, beside what `sdm eval speed` measures


@dataclass(frozen=True, eq=False)
class Variant:
    """A model, whatever its seed."""

    name: str
    """Name of its runs; `{seed}` stands for the seed."""
    label: str
    """Name in tables and charts."""
    recipe: Callable[[int], TrainConfig]
    """Configuration of the run of a seed."""
    measurements: Mapping[str, Measurement]
    """By name: the results are in evaluations/NAME of each run."""
    seeds: int = 1
    extends: Variant | None = None
    """The same model with fewer steps: runs of this variant branch off its runs before their decay, which gives the
    same numbers as training from the start."""

    def run_name(self, seed: int) -> str:
        """Name of the run of a seed."""
        return self.name.format(seed=seed)

    def job(self, seed: int) -> Job:
        """Training and measurements of a seed."""
        config = self.recipe(seed)
        shorter = self.extends.run_name(seed) if self.extends is not None and seed < self.extends.seeds else None
        return Job(self.run_name(seed), config, self.measurements, expected_work(config), shorter)

    def cost(self) -> tuple[Cost, int]:
        """Parameters, state and FLOPs, known before any run; and the length of a training sequence."""
        config = self.recipe(0)
        length, vocabulary = config.data_sizes()
        return cost(config.model.build(vocabulary)), length


def seeded(recipe: Callable[..., TrainConfig], *arguments: object, **fields: object) -> Callable[[int], TrainConfig]:
    """A recipe with all of its arguments but the seed."""
    return lambda seed: recipe(*arguments, **fields, seed=seed)


def sweep(
    name: str,
    label: str,
    rates: Iterable[float],
    measurements: Mapping[str, Measurement],
    seeds: int,
    recipe: Callable[..., TrainConfig],
    *arguments: object,
    **fields: object,
) -> dict[float, Variant]:
    """A model at several learning rates; `{lr:g}` and `{seed}` in its name stand for the rate and the seed."""
    recipes = {lr: seeded(recipe, *arguments, **fields, lr=lr) for lr in rates}
    names = {lr: name.format(lr=lr, seed="{seed}") for lr in rates}
    return {lr: Variant(names[lr], label, recipes[lr], measurements, seeds) for lr in rates}


Nested = Variant | Sequence["Nested"] | Mapping[Any, "Nested"]
"""Variants by whatever they differ in."""


def every(variants: Nested) -> list[Variant]:
    """All variants of nested mappings and sequences, in their order."""
    if isinstance(variants, Variant):
        return [variants]
    parts = variants.values() if isinstance(variants, Mapping) else variants
    return [variant for part in parts for variant in every(part)]


Expected = Literal["below", "above", "zero"]
RULE = (
    "Rule: a claim agrees if its whole interval is on the paper's side of zero, differs if it is on the other side, "
    "and is unclear if zero is inside or there is no interval. A prediction (side: zero) agrees if zero is inside its "
    "interval, and else differs. Verdicts are about the direction of a difference, not its size; what the paper does "
    "not report has none."
)


@dataclass(frozen=True)
class Claim:
    """A difference that the paper gives a direction for."""

    quantity: str
    """The two things that are compared, and the quantity with its unit: "SDM - GDN, nats per token"."""
    paper: str
    """The paper's number for it, or `NOT_REPORTED`."""
    difference: Callable[[StudyResults], Difference | None]
    """Computes ours; None while there are no runs for it."""
    expected: Expected = "below"
    """Where the paper's difference is."""
    percent: bool = False
    """Whether the difference is a proportion, shown in percent."""

    def verdict(self, difference: Difference | None) -> Verdict:
        """Compare an interval with the paper's direction by `RULE`."""
        if difference is None:
            return "missing"
        if self.paper == NOT_REPORTED:
            return "measured"
        if difference.low is None or difference.high is None:
            return "unclear"
        if self.expected == "zero":
            return "agrees" if difference.low <= 0 <= difference.high else "differs"
        if difference.low <= 0 <= difference.high:
            return "unclear"
        return "agrees" if (difference.value < 0) == (self.expected == "below") else "differs"

    def in_words(self, difference: Difference | None) -> str:
        """The difference with its interval."""
        if difference is None:
            return NOT_YET
        ends = (difference.value, difference.low, difference.high)
        scale, number = (100, "{:+.1f}%") if self.percent else (1, "{:+.3f}")
        value, *interval = (number.format(scale * end) for end in ends if end is not None)
        if not interval:
            return f"{value} ({difference.interval})"
        kind, over, counts = difference.interval.partition(" over ")
        return f"{value} ({kind} {' to '.join(interval)}{over}{counts})"


def combined(verdicts: Sequence[Verdict], missing: Sequence[str] = ()) -> Verdict:
    """The verdict of several claims; runs that are missing leave open what agrees so far."""
    if verdicts and {*verdicts} == {"missing"}:
        return "missing"
    compared = {*verdicts} - {"measured"}
    if compared <= {"missing"}:
        return "measured"
    if "differs" in compared:
        return "differs"
    return "agrees" if compared == {"agrees"} and not missing else "unclear"


@dataclass(frozen=True)
class Exhibit:
    """Tables and charts of a section."""

    tables: Sequence[Table] = ()
    charts: Sequence[tuple[AnyChart, str]] = ()
    """Each with its caption."""
    notes: Sequence[str] = ()
    summary: str = ""
    """What was measured, in one line; the claims are added to it."""


@dataclass(frozen=True)
class Section:
    """Claims about one question."""

    key: str
    """Anchor in the page."""
    title: str
    text: str
    """What the paper says, in its own terms."""
    paper: str
    """The paper's numbers."""
    deviations: tuple[str, ...] = ()
    """How the models and measurements differ from the paper's."""
    why: str = ""
    """Why the numbers differ from the paper's, or cannot be compared with them."""
    exhibit: Callable[[StudyResults], Exhibit] = lambda results: Exhibit()
    """Makes the tables and charts."""
    claims: Sequence[Claim] = ()
    """Empty: nothing of it can be compared with the paper."""
    variants: Sequence[Variant] = ()
    """The models that it rests on."""
    measurement: str = "position"
    """The measurement that it rests on."""

    def show(self, results: StudyResults) -> Exhibit:
        """The tables and charts of what has been measured."""
        return self.exhibit(results)


@dataclass(frozen=True)
class Study:
    """Everything that `sdm reproduce NAME` runs and shows."""

    name: str
    title: str
    lead: str
    """What there is to know in a minute."""
    groups: Mapping[str, Sequence[Variant]]
    """Variants by experiment. Experiments may share variants."""
    sections: Sequence[Section]
    timed: Sequence[Variant] = ()
    """Models whose speed is measured after all training, in turns; the first seed of each."""
    speed: Speed | None = None
    traced: Sequence[Variant] = ()
    """Models whose reads are shown on a page of their own, linked from the report; the first seed of each."""
    round_of: Callable[[Variant, int], int] = lambda variant, seed: 0
    """The round of a run: it begins when the runs of all rounds before have ended. A study that is stopped has the
    first rounds. One round if most runs have one seed: no process waits for the last run of a round."""

    def variants(self) -> list[Variant]:
        """All variants, each once; of variants that share runs the one with most seeds."""
        by_name: dict[str, Variant] = {}
        for variant in (variant for group in self.groups.values() for variant in group):
            if variant.name not in by_name or by_name[variant.name].seeds < variant.seeds:
                by_name[variant.name] = variant
        return list(by_name.values())

    def runs(self, only: Sequence[str] = ()) -> list[tuple[Variant, int]]:
        """The runs of all experiments or of some, seed by seed.

        Raises:
            UserError: If an experiment is not one of the study's groups.
        """
        if unknown := [name for name in only if name not in self.groups]:
            names = ", ".join(map(repr, self.groups))
            raise UserError(f"--only names experiments of this study: {names}; got {', '.join(map(repr, unknown))}")
        wanted = {variant.name for name in only or self.groups for variant in self.groups[name]}
        variants = [variant for variant in self.variants() if variant.name in wanted]
        seeds = range(max((variant.seeds for variant in variants), default=0))
        return [(variant, seed) for seed in seeds for variant in variants if seed < variant.seeds]


def by_seed(variant: Variant, seed: int) -> int:
    """A round for each seed: a study that is stopped has every experiment, with fewer seeds."""
    return seed


SummaryValue = Callable[[Mapping[str, Any]], float | None]
"""A number of a run, from the summary of a measurement."""


@dataclass(frozen=True, eq=False)
class StudyResults:
    """What the runs in the folder of a study have measured so far."""

    folder: Path
    failures: Mapping[str, str] = field(default_factory=dict)
    """The end of the log of each run that failed."""
    _read: dict[str, Outcome] = field(default_factory=dict, compare=False, repr=False)

    def outcome(self, variant: Variant, seed: int) -> Outcome:
        """The outcome of the run of a seed; it is read once."""
        name = variant.run_name(seed)
        if name not in self._read:
            outcome = read_outcome(variant.job(seed), self.folder / name)
            self._read[name] = replace(outcome, failure=self.failures.get(name))
        return self._read[name]

    def by_seed(self, variant: Variant, measurement: str = "") -> dict[int, Outcome]:
        """Outcomes of the seeds that are trained, and measured if a measurement is named."""
        outcomes = {seed: self.outcome(variant, seed) for seed in range(variant.seeds)}
        wanted = [measurement] if measurement else []
        return {seed: outcome for seed, outcome in outcomes.items() if outcome.has(wanted)}

    def summaries(self, variant: Variant, measurement: str = "position") -> list[dict[str, Any]]:
        """The summary of every seed that is measured."""
        return [outcome.measured[measurement] for outcome in self.by_seed(variant, measurement).values()]

    def first(self, variant: Variant, measurement: str = "") -> Outcome | None:
        """The outcome of the first seed that is trained, and measured if a measurement is named."""
        return next(iter(self.by_seed(variant, measurement).values()), None)

    def facts(self, variant: Variant) -> RunFacts | None:
        """Size and course of the first seed that is trained."""
        outcome = self.first(variant)
        return None if outcome is None else outcome.facts

    def values(self, variant: Variant, value: SummaryValue = nats, measurement: str = "position") -> dict[int, float]:
        """A number of every seed that is measured and has it."""
        numbers = {
            seed: value(outcome.measured[measurement]) for seed, outcome in self.by_seed(variant, measurement).items()
        }
        return {seed: number for seed, number in numbers.items() if number is not None}

    def mean(self, variant: Variant, value: SummaryValue = nats, measurement: str = "position") -> Mean | None:
        """The mean over seeds; its interval is None with one seed."""
        values = list(self.values(variant, value, measurement).values())
        return weighted_mean(values) if values else None

    def units(self, variant: Variant, value: UnitValue) -> dict[int, dict[str, float]]:
        """A number of every document, for each seed that is measured."""
        runs = self.by_seed(variant, "position")
        return {
            seed: {key: value(unit) for key, unit in run.results["position"].units.items()}
            for seed, run in runs.items()
        }

    def paired(self, first: Variant, second: Variant, value: UnitValue = whole) -> Difference | None:
        """The first's number minus the second's on the same documents and seeds."""
        return Difference.paired(self.paired_units(first, second, value))

    def paired_units(self, first: Variant, second: Variant, value: UnitValue = whole) -> list[dict[str, float]]:
        """The differences of every document, for each seed that both have. If the second has one seed by design, every
        seed of the first is paired with it."""
        ours, theirs = (self.units(variant, value) for variant in (first, second))
        if second.seeds == 1 and theirs:
            theirs = dict.fromkeys(ours, theirs[0])
        return [
            {key: number - theirs[seed][key] for key, number in mine.items() if key in theirs[seed]}
            for seed, mine in ours.items()
            if seed in theirs
        ]

    def paired_seeds(self, first: Variant, second: Variant, value: SummaryValue, measurement: str) -> Difference | None:
        """The first's number minus the second's, for each seed that both have."""
        ours, theirs = (self.values(variant, value, measurement) for variant in (first, second))
        return Difference.over_seeds([ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())])

    def missing(self, variants: Iterable[Variant], measurement: str) -> list[str]:
        """The variants with fewer measured seeds than planned, in words."""
        words = []
        for variant in variants:
            count = len(self.by_seed(variant, measurement))
            if count < variant.seeds:
                failed = sum(variant.run_name(seed) in self.failures for seed in range(variant.seeds))
                note = f", {failed} failed" if failed else ""
                words.append(f"{variant.run_name(0)}: {count} of {counted_seeds(variant.seeds)}{note}")
        return words


def shown(mean: Mean | Difference | None, digits: int = 3, sign: bool = False, percent: bool = False) -> str:
    """A mean with half the width of its interval, for tables."""
    if mean is None:
        return "missing"
    scale, unit = (100.0, "%") if percent else (1.0, "")
    number = f"{scale * mean.value:{'+' if sign else ''}.{digits}f}"
    if mean.low is None or mean.high is None:
        return f"{number}{unit}"
    return f"{number} ± {scale * (mean.high - mean.low) / 2:.{digits}f}{unit}"


def point(x: float, mean: Mean | Difference) -> Point:
    """A point of a chart with the interval of a mean."""
    return Point(x, mean.value, mean.low, mean.high)
