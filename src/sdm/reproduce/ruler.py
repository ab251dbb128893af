"""`sdm reproduce ruler`: RULER's tasks at many times the trained length, by small models trained on tasks of its kind.

The models are those of `recipes.tasks.retrieval`: they learn retrieval from rows of 512 tokens with other keys and
haystacks than RULER's, and are measured on RULER's own tasks from 512 tokens on. GDN's layouts and rates are swept on
held-out rows of the training's generator, and so are SDM's rate and the decay that both start with; RULER's samples
decide nothing. Two more experiments cut numbers into pairs of digits, and train to 2,048 tokens with chains of
variables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sdm.evaluation.measurement import Measurement
from sdm.evaluation.recall import Recall
from sdm.evaluation.report import AnyChart, Chart, Grid, Point, Reference, Table
from sdm.evaluation.ruler.measurement import Ruler
from sdm.evaluation.statistics import Mean, weighted_mean
from sdm.reproduce.exhibits import (
    FLOPS,
    FORWARD,
    INITIAL_STATE,
    PARAMETERS,
    STATE,
    accuracy_at,
    accuracy_claim,
    best_rate,
    mean_cell,
    negative_valid_loss,
    seeds_cell,
    table,
)
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
SAMPLES = 45
"""Seed of RULER's samples. Nobody looked at these before the models were decided on: those of 42 to 44 had shown what
limited earlier models."""
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
    places: tuple[tuple[tuple[str, ...], int], ...]
    """Tasks and lengths at which models are compared."""
    targets: tuple[tuple[str, tuple[str, ...], int, float], ...] = ()
    """What is asked of SDM: a label, tasks, a length and the accuracy."""

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
                seed=SAMPLES,
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
        "ruler-dense": Lengths((512, 1024, 2048, 4096), (DENSE,)),
        "ruler-dense-far": Lengths((8192,), (DENSE,), 2),
    },
    (((MULTIKEY,), 512), ((MULTIKEY,), 8192), (SINGLE, 8192), *(((DENSE,), length) for length in (512, 2048, 8192))),
    (
        ("single needles", SINGLE, 512, 0.90),
        ("multikey_1", (MULTIKEY,), 512, 0.80),
        ("single needles", SINGLE, 8192, 0.90),
        ("multikey_1", (MULTIKEY,), 8192, 0.75),
    ),
)
WIDE = Experiment(
    2048,
    (*TASKS, "vt"),
    {"ruler": Lengths((2048,), (*TASKS, "vt")), "ruler-farthest": Lengths((32768,), (*TASKS, "vt"), 5)},
    (((MULTIKEY,), 2048), ((MULTIKEY,), 32768), (SINGLE, 32768)),
)
PAIRS = Experiment(
    512, (DENSE,), {"ruler": Lengths((512, 1024, 2048, 4096), (DENSE,))}, (((DENSE,), 512), ((DENSE,), 2048))
)
WIDE_ROWS: dict[str, Any] = {"sequence_length": 2048, "tracking": 0.15, "dense": 0.15, "steps": 1500}
FASTER_DECAY = 0.16  # ten times the recipe's
WIDEST_BAND = 0.5  # of accuracy, in figures
OTHER_SLOTS = {64: 1, 4096: SEEDS}  # instead of 1,024, with so many seeds: does the size of the state count?

Layout = tuple[int, int]
"""Heads of GDN, and key channels of each."""
LAYOUTS: tuple[Layout | None, ...] = (None, (2, 32), (1, 64), (2, 64), (1, 128))
"""None: SDM."""
RATES = (1.25e-3, 2.5e-3, 5e-3, 1e-2)
BEST: dict[str, tuple[Layout | None, float]] = {"sdm": (None, 2.5e-3), "gdn": ((1, 128), 5e-3)}
LONGER = 1200  # steps of the models that are compared: twice those of the sweeps
ATTENTION: dict[str, Any] = {"lr": 2e-3, "start_length": 64}
CHOICE = {"choice": Recall(task="retrieval", sizes=(512, 8192), rows=100, seed=2)}
"""Held-out rows of the training's generator, at the trained length and at 16 times of it."""
MIXED = ("sliding_attention", "sdm", "full_attention", "sliding_attention")

LEAD = (
    "Does a memory of many slots keep what it has read far beyond the length that it was trained on? Models of 0.4M "
    "parameters learn to find numbers in rows of at most 512 tokens, and are asked RULER's own questions in contexts "
    "of 512 to 32,768 tokens."
)
TRAINED_ON = (
    "Trained on: keys of two words (from the end of the built-in text, without any word of RULER's lists, or made up) "
    "with numbers of seven digits, in sentences of that text, in noise, or (three of ten rows) among other needles "
    "alone; half of the rows are phrased as RULER's. Measured on: RULER's tasks with its own key words, in the "
    "beginning of the built-in text, which no row holds."
)


def swept(layout: Layout | None, rates: Sequence[float], prefix: str = "", **fields: object) -> dict[float, Variant]:
    """GDN with a layout, or SDM if it is None, at several learning rates; the first seed, not measured on RULER."""
    if layout is None:
        name, label, model = "sdm", "SDM", fields
    else:
        heads, key_dim = layout
        name, label = f"gdn-{heads}x{key_dim}", f"GDN, {heads}x{key_dim}"
        model = {"global_layer": "gdn", "heads": heads, "key_dim": key_dim, **fields}
    return sweep(f"{prefix}{name}-lr{{lr:g}}-seed{{seed}}", label, rates, {}, 1, retrieval, **model)


def _compared(
    name: str, measurements: Mapping[str, Measurement], prefix: str = "", seeds: int = SEEDS, **fields: object
) -> Variant:
    """SDM or GDN in its best form, measured on RULER."""
    layout, lr = BEST[name]
    return replace(swept(layout, (lr,), prefix, **fields)[lr], measurements=measurements, seeds=seeds)


def _attention(name: str, label: str, measurements: Mapping[str, Measurement], **fields: object) -> Variant:
    return Variant(f"{name}-seed{{seed}}", label, seeded(retrieval, **ATTENTION, **fields), measurements, SEEDS)


def models(samples: int = 100) -> dict[str, Variant]:
    """The models that are compared, by architecture."""
    near = SHORT.measurements(samples, 8192)  # attention's time grows with the square of the length
    measurements = {**SHORT.measurements(samples), **CHOICE}
    sized = {
        slots: _compared("sdm", near, f"n{slots}-", seeds, steps=LONGER, num_slots=slots)
        for slots, seeds in OTHER_SLOTS.items()
    }
    return {
        **{name: _compared(name, measurements, "longer-", steps=LONGER) for name in BEST},
        **{f"sdm-{slots}": replace(variant, label=f"SDM, {slots:,} slots") for slots, variant in sized.items()},
        "full_attention": _attention("attention", "full attention", near, steps=1800, global_layer="full_attention"),
        "mixed": _attention("mixed", "mixed FA/SDM", near, steps=900, layer_types=MIXED),
    }


def pairs_models(samples: int = 100) -> dict[str, Variant]:
    """SDM and GDN as they are compared, with numbers in pairs of digits; one seed."""
    measurements = PAIRS.measurements(samples)
    return {name: _compared(name, measurements, "pairs-", 1, steps=LONGER, digits=2) for name in BEST}


def wide_models(samples: int = 100) -> dict[str, Variant]:
    """SDM and GDN trained to 2,048 tokens with all tasks; one seed."""
    return {name: _compared(name, WIDE.measurements(samples), "wide-", 1, **WIDE_ROWS) for name in BEST}


def decay_models(compared: Mapping[str, Variant]) -> dict[str, Variant]:
    """SDM and GDN as they are compared, and with a faster decay: SDM with all seeds, GDN with one."""
    made = {}
    for name, seeds in (("sdm", SEEDS), ("gdn", 1)):
        fast = _compared(name, CHOICE, "decay-longer-", seeds, steps=LONGER, largest_decay_rate=FASTER_DECAY)
        made[f"{name}-fast"] = replace(fast, label=f"{fast.label}, faster decay")
        made[name] = compared[name]
    return made


Sweeps = Mapping[str, Mapping[float, Variant]]
"""By the label of a form: its variants by learning rate."""


def _sweeps() -> Sweeps:
    """Every form at its rates."""
    forms = [swept(layout, RATES) for layout in LAYOUTS]
    return {next(iter(by_rate.values())).label: by_rate for by_rate in forms}


def ruler_study(samples: int = 100) -> Study:
    """The study of `sdm reproduce ruler`.

    Args:
        samples: Samples of each task at lengths near the trained one; longer prompts have fewer.
    """
    compared, wide, sweeps = models(samples), wide_models(samples), _sweeps()
    decays, pairs = decay_models(compared), pairs_models(samples)
    sections = (
        ruler_section("ruler", "RULER beyond the trained length", SHORT, compared),
        _sweep_section(sweeps),
        _decay_section(decays),
        ruler_section("ruler-pairs", "Numbers in pairs of digits", PAIRS, pairs),
        ruler_section("ruler-wide", f"Trained to {WIDE.trained:,} tokens", WIDE, wide),
    )
    groups = {
        "compared": every(compared),
        "rates": every(sweeps),
        "decay": every(decays),
        "pairs": every(pairs),
        "wide": every(wide),
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
    # Attention degrades beyond its trained length, says the paper; to that length it is ahead there too.
    pairs = (("sdm", "gdn", 0), ("sdm-4096", "gdn", 0), ("sdm", "full_attention", experiment.trained))
    compared_at = [
        (compared[ours], compared[rival], tasks, length)
        for ours, rival, longer_than in pairs
        if {ours, rival} <= compared.keys()
        for tasks, length in experiment.places
        if length > longer_than
    ]

    def against(ours: Variant, rival: Variant, tasks: Sequence[str], length: int) -> Claim:
        quantity = f"{ours.label} - {rival.label}, accuracy on {_names(tasks)} at {length:,} tokens"
        paper = "RULER, 1.4B: SDM 31.2%, GDN 20.0%, attention 32.5%"
        measurement = experiment.measured_by(tasks[0], length)
        return accuracy_claim(quantity, paper, ours, rival, accuracy(tasks, length), measurement)

    def exhibit(results: StudyResults) -> Exhibit:
        if (accuracies := _table(results, experiment, compared.values())) is None:
            return Exhibit()
        sdm, words = compared["sdm"], []
        for tasks, length in experiment.places:
            mean = _mean(results, experiment, sdm, tasks, length)
            words.append(f"{_names(tasks)} at {length:,} {shown(mean, 1, percent=True)}")
        tables = [
            *([_targets(results, experiment, sdm)] if experiment.targets else []),
            accuracies,
            _costs(results, compared.values()),
        ]
        ends = f"Trained lengths end at {experiment.trained:,} tokens: longer ones were never seen."
        words_of_sdm = f"{sdm.label}: {', '.join(words)}"
        return Exhibit(tables, [_chart(key, results, experiment, compared)], [TRAINED_ON, ends], words_of_sdm)

    return Section(
        key,
        title,
        "SDM keeps recall at all lengths; attention degrades beyond its trained length, GDN where more is to be kept.",
        "RULER at level 8, 4k to 131k: SDM 31.2%, GDN 20.0%, attention 32.5%",
        (WRITE_RULE, *RETRIEVAL_DEVIATIONS),
        exhibit=exhibit,
        claims=[against(*place) for place in compared_at],
        variants=list(compared.values()),
        measurement="ruler",
    )


def _short(task: str) -> str:
    return task.removeprefix("niah_")


def _names(tasks: Sequence[str]) -> str:
    return " and ".join(map(_short, tasks))


def _targets(results: StudyResults, experiment: Experiment, sdm: Variant) -> Table:
    """What was asked of SDM before the runs, and whether it was reached."""
    rows = []
    for label, tasks, length, target in experiment.targets:
        mean = _mean(results, experiment, sdm, tasks, length)
        verdict = "missing" if mean is None else "reached" if mean.value >= target else "missed"
        rows.append((f"{label}, {length:,} tokens", f"{100 * target:.0f}%", shown(mean, 1, percent=True), verdict))
    caption = f"Means over seeds with 95% intervals. Trained to {experiment.trained:,} tokens."
    return Table("Targets of SDM", ("tasks", "target", "measured", "verdict"), rows, caption)


def _table(results: StudyResults, experiment: Experiment, models: Iterable[Variant]) -> Table | None:
    """Accuracy of every model that is measured, by task and length; None if there is none."""
    measured = {variant: seeds for variant in models if (seeds := len(results.by_seed(variant, "ruler")))}
    if not measured:
        return None
    rows = []
    for task in experiment.tasks:
        for length in experiment.all_lengths():
            means = [_mean(results, experiment, variant, (task,), length) for variant in measured]
            if any(means):
                place = f"{_short(task)}, {length:,}{' (trained)' if length <= experiment.trained else ''}"
                rows.append((place, *("-" if mean is None else shown(mean, 1, percent=True) for mean in means)))
    columns = (f"{variant.label} ({seeds} seed{'s' if seeds != 1 else ''})" for variant, seeds in measured.items())
    caption = "Mean accuracy over seeds with its 95% interval."
    return Table("RULER by task and length", ("task, tokens", *columns), rows, caption)


def _costs(results: StudyResults, models: Iterable[Variant]) -> Table:
    def loss(results: StudyResults, variant: Variant) -> str:
        losses = [run.facts.valid_loss for run in results.by_seed(variant).values() if run.facts is not None]
        return shown(weighted_mean(known)) if (known := [loss for loss in losses if loss is not None]) else "missing"

    columns = {"loss": loss, "parameters": PARAMETERS, "M0": INITIAL_STATE, "state": STATE, "FLOPs": FLOPS}
    caption = f"Loss of answers on held-out rows of the training's generator, nats per token. {FORWARD}"
    return table(results, "Loss, size and cost", models, columns, caption)


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
            if points := [_band(length, mean) for length, mean in means if mean is not None]:
                curves[variant.label] = points
        name, title = f"{key}-{_short(task)}", _short(task)
        charts.append(Chart(name, title, "tokens", "accuracy", curves, log_x=True, percent=True, references=references))
    caption = (
        "RULER's tasks by the length of the context, means over seeds with 95% intervals. Intervals of more than "
        f"{WIDEST_BAND:.0%} are not drawn."
    )
    return Grid(key, "RULER by the length of the context", charts, width=3), caption


def _band(length: int, mean: Mean) -> Point:
    """A point with its interval; wide ones, of models some of whose seeds did not learn the task, hide all others."""
    narrow = mean.low is not None and mean.high is not None and mean.high - mean.low <= WIDEST_BAND
    return point(length, mean) if narrow else Point(length, mean.value)


def _decay_section(models: Mapping[str, Variant]) -> Section:
    """Whether slower decay carries recall beyond the trained length."""
    near, far = (mean_cell(accuracy_at(length), "choice", percent=True) for length in (512, 8192))

    def exhibit(results: StudyResults) -> Exhibit:
        columns = {
            "largest rate": lambda results, variant: f"{variant.recipe(0).model.largest_decay_rate:g}",
            "seeds": seeds_cell("choice"),
            "512 tokens": near,
            "8,192 tokens": far,
            "each seed, 8,192 tokens": each_seed,
        }
        caption = (
            "Whole answers on held-out rows of the training's generator. The rate of a head's decay is drawn between 0 "
            "and the largest one, and learned."
        )
        words = [f"{variant.label} {far(results, variant)}" for variant in models.values()]
        summary = f"whole answers at 8,192 tokens: {', '.join(words)}"
        return Exhibit([table(results, "Decay at the start", models.values(), columns, caption)], summary=summary)

    def each_seed(results: StudyResults, variant: Variant) -> str:
        return " ".join(f"{100 * x:.0f}%" for x in results.values(variant, accuracy_at(8192), "choice").values())

    return Section(
        "decay",
        "Decay at the start",
        "A row that many tokens write is decayed by each of them.",
        "one rate, drawn up to 16",
        (WRITE_RULE, *RETRIEVAL_DEVIATIONS),
        exhibit=exhibit,
        variants=list(models.values()),
        measurement="choice",
    )


def _sweep_section(sweeps: Sweeps) -> Section:
    title = "Layouts and rates"

    def cell(results: StudyResults, variant: Variant) -> str:
        score = negative_valid_loss(results, variant)
        return "-" if score is None else f"{-score:.3f}"

    def exhibit(results: StudyResults) -> Exhibit:
        best = {label: best_rate(results, rates, negative_valid_loss) for label, rates in sweeps.items()}
        if not any(best.values()):
            return Exhibit()
        rows = [
            (label, STATE(results, by_rate[RATES[0]]), *(cell(results, variant) for variant in by_rate.values()))
            for label, by_rate in sweeps.items()
        ]
        words = (
            f"{label} {-chosen.score:.3f} at {chosen.rate('edge of the sweep')}"
            for label, chosen in best.items()
            if chosen
        )
        caption = "Loss of answers on held-out rows of the training's generator, nats per token; seed 0."
        names = ("model, heads x key channels", "state", *(f"{rate:g}" for rate in RATES))
        return Exhibit([Table(title, names, rows, caption)], summary="best rates: " + ", ".join(words))

    return Section(
        "sweep",
        title,
        "SDM and GDN are compared in their best forms, chosen by the loss on held-out rows, never by RULER.",
        "one layout and one rate",
        (WRITE_RULE, *RETRIEVAL_DEVIATIONS),
        exhibit=exhibit,
        variants=every(sweeps),
        measurement="",
    )
