"""`sdm reproduce crossover`: when SDM overtakes GDN by the paper's plain recipe, along tokens and width.

At the smallest scale GDN is ahead. The runs are those of `recipes.code.plain_code`, longer and wider, and beside them
variants of SDM and GDN at equal FLOPs that show what the order depends on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sdm.analysis.charts import ZERO
from sdm.evaluation.induction import Induction, previous_share, successor_lift
from sdm.evaluation.measurement import Measurement
from sdm.evaluation.position import Position, stretch, whole
from sdm.evaluation.report import Chart, Grid, Reference, Table
from sdm.reproduce.exhibits import PAIRED, curves, difference_curve, loss_claim, validation_summary
from sdm.reproduce.quick import WORDS
from sdm.reproduce.recipes.code import LENGTH, PLAIN_DEVIATIONS, Text, plain_code
from sdm.reproduce.sections.loss import Comparison, position_section
from sdm.reproduce.study import NOT_REPORTED, WRITE_RULE, Exhibit, Section, Study, StudyResults, Variant, every, shown
from sdm.run.config import TrainConfig

# Choices are made on one set of documents and reported on the other.
MEASUREMENTS: dict[Text, dict[str, Measurement]] = {
    "code": {
        "position": Position(gain=False, split="test"),
        "valid": Position(gain=False, split="valid"),
        "induction": Induction(split="test"),
    },
    "pypi": {"position": Position(gain=False, split="test", documents=512), "induction": Induction(split="test")},
}
SHORT = 512  # steps to which every change is trained
SHORTEST_BRANCH = 200  # steps: all longer runs have the same warmup
BASELINE, RIVAL, NULL = "sdm", "gdn", "sdm-null"
DEVIATIONS = (WRITE_RULE, *PLAIN_DEVIATIONS)
Curve = dict[tuple[int, int], Variant]
"""Models by width and number of steps."""


@dataclass(frozen=True)
class Change:
    """A change of the plain recipe that costs no FLOPs worth counting."""

    label: str
    model: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the model."""
    optim: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the optimizer."""


_PREVIOUS_TOKEN = {"key_convolution": 4, "tie_query_initialization": True}
CHANGES = {  # by the layer, and a name of the change
    "sdm": Change("SDM, plain"),
    "gdn": Change("GDN, plain"),
    "sdm-keys": Change("SDM, keys start at the token before, W_q = W_k", _PREVIOUS_TOKEN),
    "gdn-shift": Change(
        "GDN, its convolutions start as a shift, W_q = W_k",
        {"shift_convolution": True, "tie_query_initialization": True},
    ),
    "gdn-keys": Change("GDN, keys start at the token before, W_q = W_k", _PREVIOUS_TOKEN),
    "gdn-keys-alone": Change(
        "GDN, the same keys instead of its convolutions", {**_PREVIOUS_TOKEN, "short_convolution": 0}
    ),
    "gdn-no-convolution": Change("GDN without its convolutions", {"short_convolution": 0}),
    "sdm-tied": Change("SDM, W_q = W_k", {"tie_query_initialization": True}),
    "sdm-null": Change("SDM, M0 null", {"learned_initial_state": False}),
    "sdm-large": Change("SDM, M0 at 0.125", {"initial_state_std": 0.125}),
    "sdm-sharp": Change("SDM, temperature 0.3", {"memory_temperature": 0.3}),
    "sdm-normalised": Change("SDM, scores RMS-normalised", {"normalize_scores": True}),
    "sdm-batch-norm": Change("SDM, read scores batch-normalised", {"query_batch_norm": True}),
    "sdm-l2": Change("SDM, weights of norm 1 instead of softmax", {"memory_weighting": "l2"}),
    "sdm-silu": Change("SDM, SiLU as output gate", {"memory_output_gate": "silu"}),
    "sdm-slow": Change("SDM, learning rate 2.5e-3", optim={"lr": 2.5e-3}),
    "sdm-fast": Change("SDM, learning rate 1e-2", optim={"lr": 1e-2}),
    "gdn-slow": Change("GDN, learning rate 2.5e-3", optim={"lr": 2.5e-3}),
    "gdn-fast": Change("GDN, learning rate 1e-2", optim={"lr": 1e-2}),
    "gdn-faster": Change("GDN, learning rate 2e-2", optim={"lr": 2e-2}),
    "sdm-fast-state": Change("SDM, M0 at a learning rate of 5e-2", optim={"initial_state_lr": 5e-2}),
}


def variant(
    change: str, width: int, steps: int, seeds: int, text: Text = "code", extends: Variant | None = None
) -> Variant:
    """A change of the plain recipe at a width and a number of steps; `extends` is the same with fewer steps."""

    def recipe(seed: int) -> TrainConfig:
        config = plain_code(change.split("-")[0], width, text, steps=steps, seed=seed)
        model, optim = CHANGES[change].model, CHANGES[change].optim
        return replace(config, model=replace(config.model, **model), optim=replace(config.optim, **optim))

    name = f"{'' if text == 'code' else f'{text}-'}d{width}-{steps}-{change}-s{{seed}}"
    return Variant(name, CHANGES[change].label, recipe, MEASUREMENTS[text], seeds, extends)


def _curve(change: str, places: Sequence[tuple[int, int]], seeds: Mapping[int, int], text: Text) -> Curve:
    """A change at several widths and numbers of steps; longer runs branch off shorter ones before their decay."""
    curve: Curve = {}
    for width, steps in places:
        shorter = [model for (d, count), model in curve.items() if d == width and count >= SHORTEST_BRANCH]
        curve[width, steps] = variant(change, width, steps, seeds[width], text, shorter[-1] if shorter else None)
    return curve


def crossover_study(
    widths: Sequence[int],
    steps: Sequence[int],
    seeds: int,
    text: Text = "code",
    changes: Sequence[str] = ("sdm-keys", "gdn-shift"),
) -> Study:
    """The study of `sdm reproduce crossover`.

    Args:
        widths: Widths d of the models; the smallest has all seeds, the others one.
        steps: Numbers of steps, of 2,048 tokens each.
        seeds: Seeds at the smallest width.
        text: What the models are trained on.
        changes: Names of `CHANGES` that are trained to all steps and widths, besides the two plain models.
    """
    smallest = min(widths)
    places = [(width, count) for width in widths for count in sorted(steps)]
    seeds_of = {width: seeds if width == smallest else 1 for width in widths}
    models = {name: _curve(name, places, seeds_of, text) for name in dict.fromkeys((BASELINE, RIVAL, *changes))}
    short = {name: variant(name, smallest, SHORT, seeds, text) for name in CHANGES}
    groups = {"curve": every(models), "changes": every(short)}
    sections = [_curve_section(models), _shift_section(models)]
    if NULL in models:
        sections.append(_initial_state_section(models[BASELINE][places[-1]], models[NULL][places[-1]]))
    sections.append(
        Comparison(
            "changes",
            f"Changes of the recipe at equal FLOPs, {_place(smallest, SHORT)}",
            "The paper trains none of these.",
            NOT_REPORTED,
            DEVIATIONS,
            "Choices are made on other documents (`valid`) than those of the table.",
            variants=every(short),
            base=short[RIVAL],
            summary=lambda results: validation_summary(results, every(short), "choices are made"),
        )
    )
    lead = (
        "By the paper's plain recipe and with very few tokens GDN predicts code better than SDM; the paper's models "
        "are larger, see more, and SDM is ahead. This study shows when SDM overtakes GDN at a laptop's scale, and what "
        f"the order depends on at equal FLOPs.\n\n{WORDS}"
    )
    return Study("crossover", "When SDM overtakes GDN", lead, groups, tuple(sections))


def _place(width: int, steps: int) -> str:
    return f"d = {width}, {steps * LENGTH / 1e6:.2f}M tokens"


def _lines(models: Mapping[str, Curve]) -> dict[str, dict[int, Variant]]:
    """Models by their training tokens, for every change and width."""
    lines: dict[str, dict[int, Variant]] = {}
    for (width, steps), model in (entry for group in models.values() for entry in group.items()):
        lines.setdefault(f"{model.label}, d = {width}", {})[steps * LENGTH] = model
    return lines


def _curve_section(models: Mapping[str, Curve]) -> Section:
    ours = {name: group for name, group in models.items() if name != RIVAL}
    rivals = {model: models[RIVAL][place] for group in ours.values() for place, model in group.items()}
    claims = [
        loss_claim(model, rivals[model], "-0.028 at 1.4B and 168B tokens", where=_place(*place))
        for place, model in models[BASELINE].items()
    ]

    def exhibit(results: StudyResults) -> Exhibit:
        rows = []
        for place, model in (entry for group in ours.values() for entry in group.items()):
            if (mean := results.mean(model)) is not None:
                all_positions, late = (results.paired(model, rivals[model], value) for value in (whole, stretch(-1)))
                seeds = " ".join(f"{value:+.3f}" for value in all_positions.by_seed) if all_positions else "-"
                cells = (shown(all_positions, sign=True), seeds, shown(late, sign=True))
                rows.append((f"{model.label}; {_place(*place)}", f"{mean.value:.3f}", *cells))
        columns = ("variant", "nats per token", "to plain GDN", "each seed", "second half")
        title, y = "Below zero, SDM is ahead of plain GDN", "difference to plain GDN (nats per token)"
        differences = {
            name: difference_curve(results, [(tokens, model, rivals[model], whole) for tokens, model in line.items()])
            for name, line in _lines(ours).items()
        }
        lines = {name: points for name, points in differences.items() if points}
        chart = Chart("crossover", title, "training tokens", y, lines, log_x=True, references=(ZERO,))
        return Exhibit([Table("Along tokens and width", columns, rows, PAIRED)], [(chart, f"{title}. {PAIRED}")])

    return Section(
        "crossover",
        "SDM - GDN along tokens and width",
        "SDM's loss on code is below GDN's.",
        "code, 1.4B: SDM 0.821 nats, GDN 0.849",
        DEVIATIONS,
        "GDN's short convolutions gain at once from the tokens nearby; SDM's memory pays off later in training.",
        exhibit,
        claims,
        every(models),
    )


def _initial_state_section(learned: Variant, null: Variant) -> Section:
    """A learned M0 against none, by position: what it stores should show before there is context."""
    section = Section(
        "initial-state",
        "A learned initial state by position",
        "Learning the initial state M0 improves SDM's loss on code.",
        "code NLL at level 8, null to learned: 0.845 to 0.822",
        DEVIATIONS,
    )
    learned = replace(learned, label="SDM, learned M0")
    claims = [
        loss_claim(learned, null, "-0.023 at 1.4B"),
        loss_claim(learned, null, "not reported by position", stretch(0), where="positions 0 to 64"),
    ]
    return replace(position_section(section, learned, (null,), grows=False), claims=claims)


def _shift_section(models: Mapping[str, Curve]) -> Section:
    """Whether models learn by themselves what the keys' start gives."""
    lines, values = _lines(models), (previous_share, successor_lift)
    title, x = "Whether plain models learn the shift by themselves", "training tokens"

    def exhibit(results: StudyResults) -> Exhibit:
        rows = []
        for place, model in (entry for group in models.values() for entry in group.items()):
            previous, successor = (results.mean(model, value, "induction") for value in values)
            if previous is not None and successor is not None:
                cells = (str(successor.count), f"{previous.value:.1%}", f"{successor.value:.2f}")
                rows.append((f"{model.label}; {_place(*place)}", *cells))
        shares, lifts = (curves(results, lines, value, "induction") for value in values)
        chance, y = (Reference(1.0, "distance alone"),), "share of the token before"
        charts = [
            Chart("shift-previous", "Attention below", x, y, shares, log_x=True, percent=True),
            Chart("shift-successor", "Long-range layer", x, "lift of successors", lifts, log_x=True, references=chance),
        ]
        columns = ("variant", "seeds", "previous token, below", "lift of successors")
        caption = (
            "Shares of the exact maps of the mixers. Below: the strongest head of the two attention blocks before the "
            "long-range one. Lift: what the long-range block reads of the tokens that followed earlier occurrences of "
            "the same token, over what it reads two and three tokens behind them; 1 is what distance alone would give."
        )
        grid = Grid("shift", title, charts, width=2, share_y=False)
        table = Table("Learning the shift", columns, rows, caption)
        return Exhibit([table], [(grid, f"{title}: strongest heads; bands over seeds.")])

    return Section(
        "shift",
        title,
        "The paper's keys come from the token itself; its models may learn to join a token to the one before.",
        NOT_REPORTED,
        DEVIATIONS,
        exhibit=exhibit,
        variants=every(models),
        measurement="induction",
    )
