"""`sdm reproduce graft`: what memories grafted onto a small pretrained LM gain, against LoRA and fine-tuning.

Two bases are trained first, from random weights on rows of 256 tokens of code: a Mistral whose attention sees 32 tokens
and a Qwen3 with full attention, which a graft limits to a window. Every method then trains on the same rows of 2,048
tokens. Learning rates are chosen on validation documents; test documents are reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sdm.analysis.charts import ZERO
from sdm.data.recall import RecallConfig
from sdm.errors import UserError
from sdm.evaluation.measurement import Measurement
from sdm.evaluation.position import Position, UnitValue, nats, nats_at, stretch
from sdm.evaluation.recall import Recall
from sdm.evaluation.report import AnyChart, Chart, Point, Table
from sdm.evaluation.statistics import Difference
from sdm.models.saved_folder import read_shapes
from sdm.reproduce.exhibits import (
    accuracy_at,
    accuracy_claim,
    difference_curve,
    loss_claim,
    mean_cell,
    seeds_cell,
    table,
)
from sdm.reproduce.recipes.graft import BASES, LENGTH, SHORT, WINDOW, adapt, pretrain
from sdm.reproduce.study import NOT_REPORTED, Exhibit, Section, Study, StudyResults, Variant, every, shown
from sdm.run.config import TrainConfig

DOCUMENTS = 16
LIMIT = 64  # tokens: four blocks of full attention so limited see 256, what the base was trained on
REACH = 128  # tokens of context that the gain leaves: Mistral's four windows of 32 see no further
MEASUREMENTS: dict[str, Measurement] = {
    "position": Position(length=LENGTH, documents=DOCUMENTS, reach=REACH, first_bin=128, split="test"),
    "valid": Position(length=LENGTH, documents=DOCUMENTS, gain=False, first_bin=128, split="valid"),
}
PAIRS = 64
RECALL: dict[str, Measurement] = {"recall": Recall(task="recall", sizes=(PAIRS,), rows=32)}
NEAR, FAR = stretch(0), stretch(-1)
EDGES = (128, 256, 512, 1024, 2048)  # ends of the stretches that loss is shown for


@dataclass(frozen=True)
class Method:
    """A way to train a base."""

    label: str
    fields: Mapping[str, Any]
    """Of `AdaptConfig`."""
    kin: str
    """The method whose learning rate it takes: itself, or the one that it extends."""
    round: int = 5
    """When its runs begin: those that the targets are about come first, so that a study that is stopped has them."""


_NULL, _GDN, _ALL = {"learned_initial_state": False}, {"memory": "gdn"}, {"freeze_base": False}
METHODS = {
    "sdm": Method("SDM graft, base frozen", _NULL, "sdm", 1),
    "gdn": Method("GDN graft, base frozen", _GDN, "gdn", 1),
    "full": Method("full fine-tuning", {"method": "full"}, "full", 1),
    "sdm-m0": Method("SDM graft with M0, base frozen", {}, "sdm", 3),
    "sdm-distill": Method("SDM graft, base frozen, distilled", _NULL | {"distill": 1.0}, "sdm"),
    "lora-4": Method("LoRA, rank 4", {"method": "lora", "lora_rank": 4}, "lora-4", 3),
    "lora-16": Method("LoRA, rank 16", {"method": "lora", "lora_rank": 16}, "lora-4", 3),
    "sdm-all": Method("SDM graft, everything trained", _NULL | _ALL, "sdm", 4),
    "sdm-m0-all": Method("SDM graft with M0, everything trained", _ALL, "sdm"),
    "gdn-all": Method("GDN graft, everything trained", _GDN | _ALL, "gdn", 4),
}
GRIDS: dict[str, Sequence[float]] = {
    "sdm": (2.5e-3, 5e-3, 1e-2, 2e-2),
    "gdn": (1.25e-3, 2.5e-3, 5e-3, 1e-2, 2e-2),
    "full": (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2e-3),
    "lora-4": (2.5e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2),
}
"""Learning rates that are tried, by the method."""
RATES = {
    "mistral": {"sdm": 1e-2, "gdn": 2.5e-3, "full": 1e-4, "lora-4": 1e-3},
    "qwen3": {"sdm": 5e-3, "gdn": 5e-3, "full": 1e-3, "lora-4": 5e-3},
}
"""By base and method: the best rate of the grid on the validation documents."""
PLACES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "block0": ("in block 0", {"layers": (0,)}),
    "block1": ("in block 1", {"layers": (1,)}),
    "block2": ("in block 2, the default", {}),
    "block3": ("in block 3", {"layers": (3,)}),
    "norm": ("in block 2, readings normalised (norm_eps 1e-6)", {"norm_eps": 1e-6}),
}
"""Where the memory of `sdm` is, and what its readings pass; compared on validation documents."""
DRAWN = ("sdm", "sdm-m0", "gdn", "full", "lora-16")
PLACE_RATE = 5e-3
ON_TASK = ("full", "lora-16", "gdn", "sdm", "sdm-all", "gdn-all")


@dataclass(frozen=True)
class BaseRuns:
    """The runs of one base."""

    architecture: str
    base: Variant
    start: Variant
    """The base as the methods start from it: of Qwen3 with limited attention."""
    methods: Mapping[str, Variant]
    rates: Mapping[str, Mapping[float, Variant]]
    places: Mapping[str, Variant]
    task: Mapping[str, Variant]
    """Of recall; empty for all but the first base."""
    rounds: Mapping[str, int]
    """The round of each variant by its name, from 1 on; of the base 0."""
    limit: int
    """Tokens that grafts limit full attention to."""

    def all(self) -> list[Variant]:
        """Every run, each once."""
        return every([self.base, self.start, self.methods, self.rates, self.places, self.task])


def base_runs(
    architecture: str, output: Path, base_steps: int, steps: int, seeds: int, first: bool = True, limit: int = LIMIT
) -> BaseRuns:
    """The runs of a base in the folder of a study; those of the `first` base come first, and have the recall task.

    Grafts limit full attention to `limit` tokens.
    """
    name, chosen = f"{architecture}-{base_steps}", RATES[architecture]
    base = Variant(name, "base", lambda seed: pretrain(architecture, base_steps, seed), MEASUREMENTS)
    window = {"attention_window": limit} if "sliding_window" not in BASES[architecture] else {}
    # Choices are made on validation documents: what is not chosen is not measured on test documents.
    valid = {"valid": MEASUREMENTS["valid"]}
    rounds: dict[str, int] = {}
    later = 0 if first else 3  # the second base comes after the first one's primary methods

    def variant(
        key: str, method: str, lr: float, place: int, task: bool = False, total: int = steps, **fields: Any
    ) -> Variant:
        entry = METHODS[method]
        fields = {**entry.fields, **fields}
        grafted = fields.get("method", "graft") == "graft"
        if not fields.get("freeze_base", True):
            fields["base_lr"] = chosen["full"]

        def recipe(seed: int) -> TrainConfig:
            config = adapt(output / name, total, lr, seed, **fields, **(window if grafted else {}))
            if not task:
                return config
            data = RecallConfig(
                num_pairs=PAIRS, start_pairs=8, num_keys=128, num_values=32, batch_size=8, seed=1000 + seed
            )
            return replace(config, data=data)

        before = f"{'recall-' if task else ''}{f'w{limit}-' if window and grafted else ''}"
        run = f"{name}-{before}{key}-{total}-{lr:g}-s{{seed}}"
        rounds.setdefault(run, place + later)
        return Variant(run, entry.label, recipe, RECALL if task else MEASUREMENTS, seeds)

    methods = {key: variant(key, key, chosen[entry.kin], entry.round) for key, entry in METHODS.items()}
    names = {method.name for method in methods.values()}

    def tried(run: Variant) -> Variant:
        return replace(run, seeds=1, measurements=MEASUREMENTS if run.name in names else valid)

    rates = {method: {lr: tried(variant(method, method, lr, 2)) for lr in grid} for method, grid in GRIDS.items()}
    places = {
        key: replace(tried(variant(key if fields else "sdm", "sdm", PLACE_RATE, 2, **fields)), label=label)
        for key, (label, fields) in PLACES.items()
    }
    on_task = ON_TASK if first else ()
    task = {key: variant(key, key, chosen[METHODS[key].kin], 6, task=True, total=2 * steps) for key in on_task}
    start = base
    if window:  # one step at a rate that changes nothing: the base within its window
        label = f"base, attention limited to {limit} tokens"
        start = replace(variant("sdm", "sdm", 1e-12, 1, total=1), label=label, seeds=1)
    return BaseRuns(architecture, base, start, methods, rates, places, task, rounds, limit)


def graft_study(
    output: Path, base_steps: int, steps: int, seeds: int, architectures: Sequence[str], limit: int = LIMIT
) -> Study:
    """The study of `sdm reproduce graft`.

    Args:
        output: Folder of the study, where the methods find their bases.
        base_steps: Steps of the bases, of 2,048 tokens each.
        steps: Steps of every method, of 2,048 tokens each.
        seeds: Seeds of every method; a base has one.
        architectures: Keys of `BASES`; the recall task is of the first.
        limit: Tokens that grafts limit full attention to.
    """
    for name in architectures:
        if name not in BASES:
            raise UserError(f"--bases must be of {', '.join(BASES)}, got {name!r}")
    bases = [
        base_runs(name, output, base_steps, steps, seeds, place == 0, limit) for place, name in enumerate(architectures)
    ]
    groups = {base.architecture: base.all() for base in bases}
    rounds = {name: place for base in bases for name, place in base.rounds.items()}
    sections = [_methods_section(base, base_steps, steps) for base in bases]
    sections += [_task_section(bases[0]), *(_choices_section(base) for base in bases)]
    lead = (
        "A memory is put in parallel to the attention of a middle block of a pretrained model, with an output of "
        "zero, and trained on longer texts than the base has seen. The paper only hints at this. Compared with it are "
        "LoRA and full fine-tuning on the same rows, and a gated delta net in the place of the sparse memory."
    )
    title = "A memory for a pretrained model"
    return Study("graft", title, lead, groups, tuple(sections), round_of=lambda run, seed: rounds.get(run.name, 0))


def gain(unit: Mapping[str, Any]) -> float:
    """Nats per token that the context beyond `REACH` tokens brings at the last positions."""
    edges = unit["edges"]
    return (unit["withheld"][-1] - unit["nll"][-1]) / (edges[-1] - edges[-2])


def _mean(results: StudyResults, variant: Variant, value: UnitValue) -> Difference | None:
    """The mean over documents of every seed, with an interval over seeds."""
    numbers = results.units(variant, value).values()
    return Difference.over_seeds([math.fsum(by_key.values()) / len(by_key) for by_key in numbers])


def trained_parameters(results: StudyResults, variant: Variant, base: Variant) -> int | None:
    """Parameters that a method trains, M0 included, from the shapes of the saved weights."""
    config, runs = variant.recipe(0).adapt, results.by_seed(variant)
    if config is None or not runs or config.scratch is not None:
        return None
    sizes = read_shapes(next(iter(runs.values())).folder / "export")
    memories = sum(math.prod(shape) for name, shape in sizes.items() if ".memory." in name)
    others = {name: shape for name, shape in sizes.items() if ".memory." not in name}
    if config.method == "lora":
        linear = [shape for name, shape in others.items() if len(shape) == 2 and "embed" not in name]
        return sum(config.lora_rank * sum(shape) for shape in linear)
    if config.method == "full" or not config.freeze_base:
        return memories + sum(math.prod(shape) for shape in others.values())
    return memories


def _methods_section(runs: BaseRuns, base_steps: int, steps: int) -> Section:
    methods, start = runs.methods, runs.start

    far, near = "nats per token at 1,024-2,048", "nats per token at 0-128"
    sdm, gdn, full = (methods[name] for name in ("sdm", "gdn", "full"))
    claims = (
        loss_claim(sdm, gdn, value=FAR, quantity=f"SDM - GDN, both grafted onto the frozen base, {far}"),
        loss_claim(sdm, full, value=FAR, quantity=f"SDM graft on the frozen base - full fine-tuning, {far}"),
        loss_claim(sdm, start, value=FAR, quantity=f"SDM graft on the frozen base - base, {far}"),
        loss_claim(sdm, start, value=NEAR, quantity=f"SDM graft on the frozen base - base, {near}"),
        loss_claim(
            full, start, value=NEAR, quantity=f"full fine-tuning - base, {near} (how well the base was trained)"
        ),
    )

    def exhibit(results: StudyResults) -> Exhibit:
        rows = []
        shown_runs = [runs.base, *([start] if start is not runs.base else []), *methods.values()]
        for variant in shown_runs:
            count = len(results.by_seed(variant, "position"))
            if not count:
                continue
            trained = trained_parameters(results, variant, runs.base)
            untrained = variant in (runs.base, start)
            rows.append(
                (
                    variant.label,
                    "-" if trained is None or untrained else f"{trained:,}",
                    "-" if untrained else f"{variant.recipe(0).optim.lr:g}",
                    str(count),
                    *(shown(_mean(results, variant, stretch(place))) for place in range(5)),
                    "-" if variant is start else shown(results.paired(variant, start, NEAR), sign=True),
                    "-" if variant is start else shown(results.paired(variant, start, FAR), sign=True),
                    shown(_mean(results, variant, gain), sign=True),
                )
            )
        places = ("0-128", *(f"to {edge:,}" for edge in EDGES[1:]))
        differences = ("to base, 0-128", "to base, to 2,048", "gain, to 2,048")
        columns = ("method", "trained", "rate", "seeds", *places, *differences)
        caption = (
            f"Nats per token on {DOCUMENTS} test documents by position; ± is half the 95% interval over seeds. To "
            "base: paired by document, the wider of the intervals over documents and over seeds. Gain: what the "
            f"context beyond {REACH} tokens brings."
        )
        return Exhibit([Table(f"{runs.architecture}: test documents", columns, rows, caption)], _chart(results, runs))

    window = f"attention sees {WINDOW} tokens" if start is runs.base else f"full attention, trained on {SHORT} tokens"
    limited = (
        ""
        if start is runs.base
        else f" Grafts limit its attention to {runs.limit} tokens; LoRA and fine-tuning see all."
    )
    section = Section(
        runs.architecture,
        f"{runs.architecture}: {window}",
        "Augmenting existing architectures with SDM layers is possible." + limited,
        NOT_REPORTED,
        (
            f"bases of four blocks, d = 64, trained on {base_steps * LENGTH / 1e6:.1f}M tokens of code here; every "
            f"method on {steps * LENGTH / 1e6:.2f}M tokens in rows of 2,048",
            "one base per architecture: seeds are those of new weights and of the order of the rows",
            "keys from the token before and W_q = W_k at the start, in SDM and GDN grafts (ours)",
        ),
        "",
    )
    return replace(section, exhibit=exhibit, claims=claims, variants=(runs.base, *methods.values()))


def _chart(results: StudyResults, runs: BaseRuns) -> list[tuple[AnyChart, str]]:
    curves: dict[str, list[Point]] = {}
    for variant in (runs.methods[name] for name in DRAWN):
        places = [(x, variant, runs.start, stretch(place)) for place, x in enumerate(EDGES)]
        if line := difference_curve(results, places):
            curves[variant.label] = line
    title = f"{runs.architecture}: loss above the base's, by position"
    label = "difference to the base (nats per token)"
    name = f"graft-{runs.architecture}"
    chart = Chart(name, title, "up to this position in the document", label, curves, log_x=True, references=(ZERO,))
    return [(chart, f"{title}; 95% intervals.")]


def _task_section(runs: BaseRuns) -> Section:
    value = accuracy_at(PAIRS)

    def exhibit(results: StudyResults) -> Exhibit:
        measured = [variant for variant in runs.task.values() if results.summaries(variant, "recall")]
        columns = {"seeds": seeds_cell("recall"), "accuracy": mean_cell(value, "recall", percent=True)}
        caption = f"{PAIRS} pairs of a key and a value in a row, then every key is asked for; means over seeds."
        return Exhibit([table(results, "Recall after training on it", measured, columns, caption, "method")])

    quantity = "SDM - GDN, both grafted onto the frozen base, accuracy"
    return Section(
        "recall",
        f"{runs.architecture}: recall beyond the window",
        "A memory recalls what attention cannot see.",
        NOT_REPORTED,
        ("the base has never seen the task, and the rates are those that were chosen on code",),
        exhibit=exhibit,
        claims=[accuracy_claim(quantity, NOT_REPORTED, runs.task["sdm"], runs.task["gdn"], value, "recall")],
        variants=every(runs.task),
        measurement="recall",
    )


def _choices_section(runs: BaseRuns) -> Section:
    """Learning rates, and the place of the memory."""

    def exhibit(results: StudyResults) -> Exhibit:
        used = RATES[runs.architecture]
        rows = []
        for method, rates in runs.rates.items():
            losses = {lr: results.mean(variant, nats, "valid") for lr, variant in rates.items()}
            cells = [f"{lr:g}: {mean.value:.3f}" for lr, mean in losses.items() if mean is not None]
            if cells:
                rows.append((METHODS[method].label, "; ".join(cells), f"{used[method]:g}"))
        caption = f"Nats per token on {DOCUMENTS} validation documents, seed 0."
        tried = Table("Learning rates", ("method", "rate: loss on validation documents", "used"), rows, caption)
        columns = {f"to {edge:,}": mean_cell(nats_at(index), "valid") for index, edge in enumerate(EDGES)}
        placed = [runs.start, *runs.places.values()]
        at_rate = f"{caption} All at a rate of {PLACE_RATE:g}."
        where = table(results, "Where the memory is", placed, {"all": mean_cell(nats, "valid"), **columns}, at_rate)
        summary = "; ".join(f"{label}: {rate}" for label, _, rate in rows)
        return Exhibit([tried, where], summary=f"rates in use: {summary}")

    return Section(
        f"choices-{runs.architecture}",
        f"{runs.architecture}: choices on validation documents",
        "Every method has a rate of its own. LoRA of rank 16, M0, distillation and everything trained take those of "
        "their kin.",
        NOT_REPORTED,
        exhibit=exhibit,
        variants=every([runs.rates, runs.places]),
        measurement="valid",
    )
