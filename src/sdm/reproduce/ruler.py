"""`sdm reproduce ruler`: RULER's tasks at many times the trained length, by small models trained on tasks of its kind.

The models are those of `recipes.tasks.retrieval`: they learn retrieval from rows of 512 tokens with other keys and
haystacks than RULER's, and are measured on RULER's own tasks from 512 tokens on. GDN's layouts and rates are swept on
held-out rows of the training's generator; RULER's samples decide nothing. A second experiment trains to 2,048 tokens,
with chains of variables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sdm.evaluation.measurement import Measurement
from sdm.evaluation.report import AnyChart, Chart, Grid, Reference, Table
from sdm.evaluation.ruler.measurement import Ruler
from sdm.evaluation.statistics import Mean
from sdm.reproduce.exhibits import accuracy_claim, best_rate, negative_valid_loss
from sdm.reproduce.recipes.tasks import RETRIEVAL_DEVIATIONS, retrieval
from sdm.reproduce.study import (
    WRITE_RULE,
    Claim,
    Exhibit,
    Section,
    Study,
    StudyResults,
    SummaryValue,
    Variant,
    by_seed,
    every,
    point,
    seeded,
    shown,
    sweep,
)

SEEDS = 3
SAMPLE_SEED = 43  # of RULER's samples; those of the default, 42, were looked at while the recipe was made
SINGLE = ("niah_single_1", "niah_single_2")
MULTIKEY = "niah_multikey_1"
DENSE = "niah_multikey_2"
"""Needles are all that the context holds: their number grows with its length, and so does what must be kept."""
TASKS = (*SINGLE, MULTIKEY, "niah_multivalue", "niah_multiquery")


@dataclass(frozen=True)
class Lengths:
    """Lengths of a RULER measurement. Long prompts take most of the time: there are fewer of them."""

    tokens: tuple[int, ...]
    tasks: tuple[str, ...]
    part: int = 1
    """The samples are divided by this."""


@dataclass(frozen=True)
class Experiment:
    """A trained length, and what is measured after it."""

    trained: int
    """Tokens of the longest rows."""
    tasks: tuple[str, ...]
    lengths: Mapping[str, Lengths]
    """By the name of the measurement."""

    @property
    def far(self) -> int:
        """The length at which models are compared far beyond the trained one."""
        return 16 * self.trained

    def all_lengths(self) -> list[int]:
        """Every length that is measured."""
        return sorted({length for part in self.lengths.values() for length in part.tokens})

    def measured_by(self, task: str, length: int) -> str:
        """The measurement that has a task at a length; "" if there is none."""
        parts = self.lengths.items()
        return next((name for name, part in parts if length in part.tokens and task in part.tasks), "")

    def measurements(self, samples: int, longest: int | None = None) -> dict[str, Measurement]:
        """RULER at the lengths, up to the longest that is wanted."""
        return {
            name: Ruler(
                tasks=part.tasks,
                lengths=part.tokens,
                samples=max(1, samples // part.part),
                seed=SAMPLE_SEED,
                batch_size=25,
            )
            for name, part in self.lengths.items()
            if longest is None or max(part.tokens) <= longest
        }


SHORT = Experiment(
    512,
    (*TASKS, DENSE),
    {
        "ruler": Lengths((512, 2048), TASKS),
        "ruler-far": Lengths((8192,), TASKS, 2),
        "ruler-farthest": Lengths((32768,), (*SINGLE, MULTIKEY), 5),
        "ruler-dense": Lengths((512, 2048, 8192), (DENSE,), 2),
    },
)
WIDE = Experiment(
    2048,
    (*TASKS, "vt"),
    {"ruler": Lengths((2048,), (*TASKS, "vt")), "ruler-farthest": Lengths((32768,), (*TASKS, "vt"), 5)},
)
WIDE_ROWS: dict[str, Any] = {"sequence_length": 2048, "tracking": 0.15, "steps": 1500}

GDN_LAYOUTS = ((2, 32), (1, 64), (2, 64), (1, 128))  # heads, key channels of each
GDN_RATES = (1.25e-3, 2.5e-3, 5e-3)
GDN_BEST = ((1, 128), 2.5e-3)
ATTENTION: dict[str, Any] = {"lr": 2e-3, "steps": 900, "start_length": 64}
LONGER = 1200  # twice the steps of the others
TARGETED = ("sdm", "sdm-longer")
"""The models that the targets are compared with."""
MIXED = ("sliding_attention", "sdm", "full_attention", "sliding_attention")

TARGETS = (  # of SDM: tasks, whether far beyond the trained length, accuracy
    ("single needles", SINGLE, False, 0.90),
    ("multikey_1", (MULTIKEY,), False, 0.80),
    ("single needles", SINGLE, True, 0.90),
    ("multikey_1", (MULTIKEY,), True, 0.75),
)
LEAD = (
    "Does a memory of many slots keep what it has read far beyond the length that it was trained on? Models of 0.3M "
    "parameters learn to find numbers in rows of at most 512 tokens, and are asked RULER's own questions in contexts "
    "of 512 to 32,768 tokens."
)
TRAINED_ON = (
    "Trained on: keys of two words (from the end of the built-in text, without any word of RULER's lists, or made up) "
    "with numbers of seven digits, in sentences of that text or in noise; half of the rows are phrased as RULER's. "
    "Measured on: RULER's tasks with its own key words, in the beginning of the built-in text, which no row holds."
)


def models(samples: int = 100) -> dict[str, Variant]:
    """The models that are compared, by architecture."""
    all_lengths = SHORT.measurements(samples)
    near = SHORT.measurements(samples, SHORT.far)  # attention's time grows with the square of the length
    (heads, key_dim), lr = GDN_BEST
    best = gdn_rates(GDN_BEST[0], (lr,))[lr]

    def variant(name: str, label: str, measurements: dict[str, Measurement], **fields: object) -> Variant:
        return Variant(f"{name}-seed{{seed}}", label, seeded(retrieval, **fields), measurements, SEEDS)

    longer = {"global_layer": "gdn", "lr": lr, "heads": heads, "key_dim": key_dim, "steps": LONGER}
    return {
        "sdm": variant("sdm", "SDM", all_lengths),
        "sdm-longer": variant("sdm-longer", "SDM, twice the steps", all_lengths, steps=LONGER),
        "gdn": replace(best, measurements=all_lengths, seeds=SEEDS),
        "gdn-longer": variant(f"gdn-{heads}x{key_dim}-longer", f"{best.label}, twice the steps", all_lengths, **longer),
        "full_attention": variant("attention", "full attention", near, global_layer="full_attention", **ATTENTION),
        "mixed": variant("mixed", "mixed FA/SDM", near, layer_types=MIXED, **ATTENTION),
    }


def gdn_rates(layout: tuple[int, int], rates: Sequence[float] = GDN_RATES, **fields: object) -> dict[float, Variant]:
    """GDN with a layout of its keys, at several learning rates."""
    heads, key_dim = layout
    name, label = f"gdn-{heads}x{key_dim}-lr{{lr:g}}-seed{{seed}}", f"GDN, {heads}x{key_dim}"
    return sweep(name, label, rates, {}, 1, retrieval, "gdn", heads=heads, key_dim=key_dim, **fields)


def wide_models(samples: int = 100) -> dict[str, Variant]:
    """SDM and GDN trained to 2,048 tokens with all tasks; one seed."""
    measurements = WIDE.measurements(samples)
    other = gdn_rates(GDN_BEST[0], GDN_BEST[1:], **WIDE_ROWS)[GDN_BEST[1]]
    return {
        "sdm": Variant("wide-sdm", "SDM", seeded(retrieval, **WIDE_ROWS), measurements),
        "gdn": replace(other, name="wide-gdn", measurements=measurements),
    }


def ruler_study(samples: int = 100) -> Study:
    """The study of `sdm reproduce ruler`.

    Args:
        samples: Samples of each task at lengths near the trained one; longer prompts have fewer.
    """
    compared, wide = models(samples), wide_models(samples)
    swept = {layout: gdn_rates(layout) for layout in GDN_LAYOUTS}
    if GDN_BEST[1] in swept.get(GDN_BEST[0], {}):
        swept[GDN_BEST[0]][GDN_BEST[1]] = compared["gdn"]
    sections = (
        ruler_section("ruler", "RULER beyond the trained length", SHORT, compared),
        _sweep_section(swept),
        ruler_section("ruler-wide", f"Trained to {WIDE.trained:,} tokens", WIDE, wide),
    )
    groups = {
        "compared": every(compared),
        "GDN's layouts and rates": every(swept),
        "trained to 2,048 tokens": every(wide),
    }
    return Study("ruler", "RULER in miniature", LEAD, groups, sections, round_of=by_seed)


def accuracy(tasks: Sequence[str], length: int) -> SummaryValue:
    """The mean accuracy of tasks at a length; None where one of them is not measured."""

    def value(summary: Mapping[str, Any]) -> float | None:
        cells = [summary["tasks"].get(task, {}).get("lengths", {}).get(str(length)) for task in tasks]
        if not all(cells):
            return None
        return sum(cell["accuracy"] for cell in cells) / len(cells)

    return value


def _mean(
    results: StudyResults, experiment: Experiment, variant: Variant, tasks: Sequence[str], length: int
) -> Mean | None:
    name = experiment.measured_by(tasks[0], length)
    return results.mean(variant, accuracy(tasks, length), name) if name in variant.measurements else None


def ruler_section(key: str, title: str, experiment: Experiment, compared: Mapping[str, Variant]) -> Section:
    """Accuracy by task and length for the models of an experiment, and the claims about SDM."""
    pairs = (("sdm", "gdn"), ("sdm-longer", "gdn-longer"), ("sdm", "full_attention"))
    rivals = [(compared[ours], compared[rival]) for ours, rival in pairs if {ours, rival} <= compared.keys()]

    def against(ours: Variant, rival: Variant, tasks: Sequence[str], length: int) -> Claim:
        names = " and ".join(_short(task) for task in tasks)
        quantity = f"{ours.label} - {rival.label}, accuracy on {names} at {length:,} tokens"
        paper = "RULER, 1.4B: SDM 31.2%, GDN 20.0%, attention 32.5%"
        measurement = experiment.measured_by(tasks[0], length)
        return accuracy_claim(quantity, paper, ours, rival, accuracy(tasks, length), measurement)

    def exhibit(results: StudyResults) -> Exhibit:
        tables = [table for variant in compared.values() if (table := _table(results, experiment, variant)) is not None]
        if not tables:
            return Exhibit()
        targets, words = _targets(results, experiment, [compared[name] for name in TARGETED if name in compared])
        notes = (TRAINED_ON, f"Trained lengths end at {experiment.trained:,} tokens: longer ones were never seen.")
        return Exhibit([targets, *tables], [_chart(key, results, experiment, compared)], notes, words)

    near, far = experiment.trained, experiment.far
    places = [
        (tasks, length)
        for tasks, length in (((MULTIKEY,), near), ((MULTIKEY,), far), (SINGLE, far), ((DENSE,), near), ((DENSE,), far))
        if experiment.measured_by(tasks[0], length)
    ]
    return Section(
        key,
        title,
        "SDM keeps recall where GDN's state is too small and attention's positions were never trained.",
        "RULER at level 8, 4k to 131k: SDM 31.2%, GDN 20.0%, attention 32.5%",
        (WRITE_RULE, *RETRIEVAL_DEVIATIONS),
        exhibit=exhibit,
        claims=[against(*pair, *place) for pair in rivals for place in places],
        variants=list(compared.values()),
        measurement="ruler",
    )


def _short(task: str) -> str:
    return task.removeprefix("niah_")


def _targets(results: StudyResults, experiment: Experiment, models: Sequence[Variant]) -> tuple[Table, str]:
    """What was asked of SDM before the runs, and whether it was reached."""
    rows, words = [], []
    for label, tasks, far, target in TARGETS:
        length = experiment.far if far else experiment.trained
        if length not in experiment.all_lengths():
            continue
        means = [_mean(results, experiment, model, tasks, length) for model in models]
        verdicts = ["missing" if mean is None else "reached" if mean.value >= target else "missed" for mean in means]
        cells = (f"{shown(mean, 1, percent=True)}: {verdict}" for mean, verdict in zip(means, verdicts, strict=True))
        rows.append((f"{label}, {length:,} tokens", f"{100 * target:.0f}%", *cells))
        words.append(f"{label} at {length:,} {shown(means[0], 1, percent=True)}")
    seeds = ", ".join(f"{model.label}: {len(results.by_seed(model, 'ruler'))} of {model.seeds}" for model in models)
    caption = f"Means over seeds with 95% intervals ({seeds}). Trained to {experiment.trained:,} tokens."
    columns = ("tasks", "target", *(model.label for model in models))
    return Table("Targets of SDM", columns, rows, caption), f"{models[0].label}: " + ", ".join(words)


def _has(experiment: Experiment, variant: Variant, length: int) -> bool:
    return any(experiment.measured_by(task, length) in variant.measurements for task in experiment.tasks)


def _table(results: StudyResults, experiment: Experiment, variant: Variant) -> Table | None:
    columns = [length for length in experiment.all_lengths() if _has(experiment, variant, length)]
    rows = []
    for task in experiment.tasks:
        means = [_mean(results, experiment, variant, (task,), length) for length in columns]
        rows.append((_short(task), *("-" if mean is None else shown(mean, 1, percent=True) for mean in means)))
    if all(cell == "-" for row in rows for cell in row[1:]):
        return None
    names = [f"{length:,}{' (trained)' if length <= experiment.trained else ''}" for length in columns]
    seeds = len(results.by_seed(variant, "ruler"))
    caption = f"Mean accuracy of {seeds} seed{'s' if seeds != 1 else ''}, with 95% intervals over seeds."
    return Table(f"RULER: {variant.label}", ("task", *names), rows, caption)


def _chart(
    key: str, results: StudyResults, experiment: Experiment, compared: Mapping[str, Variant]
) -> tuple[AnyChart, str]:
    references = (Reference(experiment.trained, f"trained to {experiment.trained:,}", "x"),)
    charts = []
    for task in experiment.tasks:
        curves = {}
        for variant in compared.values():
            means = [
                (length, _mean(results, experiment, variant, (task,), length)) for length in experiment.all_lengths()
            ]
            if points := [point(length, mean) for length, mean in means if mean is not None]:
                curves[variant.label] = points
        name, title = f"{key}-{_short(task)}", _short(task)
        charts.append(Chart(name, title, "tokens", "accuracy", curves, log_x=True, percent=True, references=references))
    caption = "RULER's tasks by the length of the context, means over seeds with 95% intervals."
    return Grid(key, "RULER by the length of the context", charts, width=3), caption


def _sweep_section(layouts: Mapping[tuple[int, int], Mapping[float, Variant]]) -> Section:
    def exhibit(results: StudyResults) -> Exhibit:
        best = {layout: best_rate(results, rates, negative_valid_loss) for layout, rates in layouts.items()}
        known = {layout: chosen for layout, chosen in best.items() if chosen is not None}
        if not known:
            return Exhibit()
        rows, losses = [], 0
        for (heads, key_dim), rates in layouts.items():
            scores = [negative_valid_loss(results, variant) for variant in rates.values()]
            losses += sum(score is not None for score in scores)
            state = next(iter(rates.values())).cost()[0].state_elements
            cells = ("-" if score is None else f"{-score:.3f}" for score in scores)
            rows.append((f"{heads}x{key_dim}", f"{state:,}", *cells))
        heads, key_dim = max(known, key=lambda layout: known[layout].score)
        chosen = known[heads, key_dim].rate("edge of the sweep")
        caption = "Loss of answers on held-out rows of the training's generator, nats per token; seed 0."
        columns = ("heads x key channels", "state", *(f"{rate:g}" for rate in GDN_RATES))
        summary = f"best of {losses} of {len(every(layouts))}: {heads}x{key_dim} at {chosen}"
        return Exhibit([Table("GDN's sweep", columns, rows, caption)], summary=summary)

    return Section(
        "sweep",
        "GDN's layouts and rates",
        "GDN is compared in its best form, chosen by the loss on held-out rows, never by RULER.",
        "one layout and one rate",
        (WRITE_RULE, *RETRIEVAL_DEVIATIONS),
        exhibit=exhibit,
        variants=every(layouts),
        measurement="",
    )
