"""`sdm reproduce mini`: every experiment of the paper at small scale, with seeds and intervals.

Experiments share variants: the SDM of the ladder's last level is also the one with 256 slots, the one with a learned M0
and the one with both aids.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

from sdm.analysis.charts import initial_state_chart, slots_chart, write_read_chart
from sdm.evaluation.harness.measurement import Harness
from sdm.evaluation.measurement import Measurement
from sdm.evaluation.position import Position
from sdm.evaluation.recall import Recall
from sdm.evaluation.report import AnyChart, Rows
from sdm.evaluation.ruler.measurement import Ruler
from sdm.evaluation.ruler.tasks import SIX
from sdm.evaluation.speed import Speed
from sdm.evaluation.statistics import Difference
from sdm.reproduce.exhibits import (
    MEANS,
    NATS,
    PAIRED,
    best_rate,
    choice_accuracy,
    curve,
    loss_claim,
    negative_valid_loss,
)
from sdm.reproduce.quick import GDN_RATES, KEY_DIMS, RECALL_TASK, TRAINED_PAIRS, WORDS, layout, recall_config
from sdm.reproduce.quick import SLOTS as RECALL_SLOTS
from sdm.reproduce.recipes import tasks as recall_recipe
from sdm.reproduce.recipes.mini import DEVIATIONS, PLAIN, RATES, WIDTHS, Architecture, mini
from sdm.reproduce.sections.loss import Comparison, position_curve, position_section, scaling_section
from sdm.reproduce.sections.memory import access_section, cost_section, utilisation_section
from sdm.reproduce.sections.recall import Forms, accuracy_section, recall_section
from sdm.reproduce.study import (
    NOT_REPORTED,
    WRITE_RULE,
    Claim,
    Section,
    Study,
    StudyResults,
    Variant,
    by_seed,
    every,
    point,
    seeded,
    sweep,
)

SEEDS = 3
ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)
LABELS = {"sdm": "SDM", "gdn": "GDN", "full_attention": "full attention", "mixed": "mixed FA/SDM"}
TOP = max(WIDTHS)  # the level of most experiments
SMALL = 3  # the level of those with many runs
SLOTS = (64, 256, 1024, 4096)
SWEPT = (2.5e-3, 5e-3, 1e-2, 2e-2)
SPEED = Speed(lengths=(512, 2048, 8192, 32768), repeats=3, new_tokens=32)
RECALL_RATES = (*GDN_RATES, 1.2e-2)
ATTENTION_RATES = (7.5e-4, 1.5e-3, 3e-3)
Measurements = Mapping[str, Measurement]
POSITION: Measurements = {"position": Position(gain=False)}
# Also the gain from context, and tasks for models of text.
THOROUGH: Measurements = {
    "position": Position(),
    "ruler": Ruler(tasks=SIX, lengths=(1024, 2048), samples=8, skip_short=True),
}
# Learning rates are chosen on other rows than those of the accuracy that is shown.
RECALL: Measurements = {"recall": Recall(), "choice": Recall(sizes=(TRAINED_PAIRS,), rows=32, seed=2)}

LEAD = (
    "Every experiment of the paper with models of 55,000 to 210,000 parameters, trained on the code of Python's "
    f"standard library in seconds to minutes each, with {SEEDS} seeds. Models this small and this short of tokens do "
    "not learn to recall by the paper's recipe; most get aids, and the plain recipe is shown as well. Learning rates "
    f"were chosen on validation documents; all numbers are of test documents.\n\n{WORDS}"
)
DEVIATED = (WRITE_RULE, *DEVIATIONS)


def _variant(
    name: str,
    label: str,
    measurements: Measurements = POSITION,
    level: int = TOP,
    architecture: Architecture = "sdm",
    plain: bool = False,
    lr: float | None = None,
    **model: bool | int,
) -> Variant:
    """A model of code; `model` are fields in which it differs from the ladder's."""
    recipe = seeded(mini, level, architecture, plain, lr=lr, model=model)
    return Variant(f"{name}-seed{{seed}}", label, recipe, measurements, SEEDS)


def ladder() -> dict[str, dict[int, Variant]]:
    """Every architecture at every level; the last level is measured thoroughly."""
    # The tasks that need no download, where the package that asks them is installed.
    harness: Measurements = {"harness": Harness(tasks=("small",))} if importlib.util.find_spec("lm_eval") else {}
    return {
        kind: {
            level: _variant(
                f"{kind}-{level}", LABELS[kind], {**THOROUGH, **harness} if level == TOP else POSITION, level, kind
            )
            for level in WIDTHS
        }
        for kind in ARCHITECTURES
    }


def recall_forms() -> Forms:
    """The models of recall: every form at every learning rate. Attention has twice the steps of `quick`, with which
    some seeds stay at chance."""
    forms: dict[str, dict[str, dict[str, int]]] = {
        "sdm": {f"SDM, N = {slots:,}": {"num_slots": slots} for slots in RECALL_SLOTS},
        "gdn": {f"GDN, {layout(key_dim)}": {"key_dim": key_dim} for key_dim in KEY_DIMS},
        "full_attention": {LABELS["full_attention"]: {"steps": 1000}},
    }

    def form(kind: str, label: str, fields: dict[str, int]) -> dict[float, Variant]:
        name = "-".join(("recall", kind, *map(str, fields.values()), "lr{lr:g}-seed{seed}"))
        rates = ATTENTION_RATES if kind == "full_attention" else RECALL_RATES
        return sweep(name, label, rates, RECALL, SEEDS, recall_config, kind, **fields)

    return {
        kind: {label: form(kind, label, fields) for label, fields in group.items()} for kind, group in forms.items()
    }


def _initial_state_section(sdm: Variant, null: Variant, learned: Variant, gdn: Variant) -> Section:
    def interaction(results: StudyResults) -> Difference | None:
        pairs = zip(results.paired_units(sdm, null), results.paired_units(learned, gdn), strict=False)
        return Difference.paired(
            [{key: ours[key] - other[key] for key in ours if key in other} for ours, other in pairs]
        )

    def chart(results: StudyResults) -> tuple[AnyChart, str]:
        with_state, without = (
            {name: points for name, variant in side.items() if (points := position_curve(results, variant))}
            for side in ({"SDM": sdm, "GDN": learned}, {"SDM": null, "GDN": gdn})
        )
        return initial_state_chart(with_state, without), "Loss by position with learned and null initial states."

    return Comparison(
        "initial-state",
        "A learned initial state",
        "Learning the initial state M0 improves SDM's loss on code, and not GDN's.",
        "code NLL at level 8, null to learned: SDM 0.845 to 0.822, GDN 0.849 to 0.850",
        DEVIATED,
        claims=[
            loss_claim(replace(sdm, label="SDM, learned M0"), null, "-0.023 (0.845 to 0.822) at 1.4B"),
            Claim(
                f"learned - null initial state, SDM's difference minus GDN's, {NATS}",
                "-0.024 (SDM -0.023, GDN +0.001) at 1.4B",
                interaction,
            ),
        ],
        variants=(sdm, null, learned, gdn),
        chart=chart,
    )


def mini_study() -> Study:
    """The study of `sdm reproduce mini`."""
    levels, forms = ladder(), recall_forms()
    top = {kind: group[TOP] for kind, group in levels.items()}
    sdm, gdn = top["sdm"], top["gdn"]
    sizes = {slots: _variant(f"slots-{slots}", f"N = {slots}", num_slots=slots) for slots in SLOTS}
    own = (WIDTHS[TOP] // 4) ** 2
    sizes[own] = replace(sdm, label=sizes[own].label)
    null = _variant("sdm-null", "SDM, null M0", THOROUGH, learned_initial_state=False)
    learned = _variant(
        "gdn-learned", "GDN, learned state", THOROUGH, architecture="gdn", gdn_learned_initial_state=True
    )
    both = replace(sdm, label="SDM, both aids")
    aids = [
        both,
        _variant("aids-shift", "SDM, shifted keys", shift_keys=True, tie_query_initialization=False),
        _variant("aids-tie", "SDM, tied W_q", shift_keys=False, tie_query_initialization=True),
        _variant("aids-neither", "SDM, neither aid", shift_keys=False, tie_query_initialization=False),
    ]
    plain = {
        kind: _variant(f"plain-{kind}", f"{LABELS[kind]}, plain", architecture=kind, plain=True)
        for kind in ARCHITECTURES[:3]
    }
    base = WIDTHS[SMALL] // 4
    grid = {
        (writes, reads): _variant(
            f"grid-w{writes}-r{reads}", f"W = {writes}, R = {reads}", level=SMALL, num_writes=writes, num_reads=reads
        )
        for writes, reads in itertools.product((base // 2, base), (base // 2, base, 2 * base))
    }
    grid[base, base] = replace(levels["sdm"][SMALL], label=grid[base, base].label)
    rates: dict[str, dict[float, Variant]] = {}
    for kind in ARCHITECTURES:
        swept = {lr: _variant(f"rate-{kind}-{lr:g}", "", level=SMALL, architecture=kind, lr=lr) for lr in SWEPT}
        swept[RATES[kind]] = levels[kind][SMALL]
        rates[kind] = {lr: replace(model, label=f"{LABELS[kind]}, {lr:g}", seeds=1) for lr, model in swept.items()}
    small = (*DEVIATED, f"level {SMALL}, d = {WIDTHS[SMALL]}, where W = R = {base}")

    def rates_summary(results: StudyResults) -> str:
        """The best rate of each architecture by validation loss, which is all that rates are chosen by."""
        words = [
            f"{LABELS[kind]} {chosen.rate('edge of the sweep')}, {-chosen.score:.3f}"
            for kind, group in rates.items()
            if (chosen := best_rate(results, group, negative_valid_loss)) is not None
        ]
        return f"best rate and its validation loss: {'; '.join(words)}" if words else ""

    def slots_figure(results: StudyResults) -> tuple[AnyChart, str]:
        levels = dict(zip([gdn.label], curve(results, {0: gdn}), strict=False))
        return slots_chart({"SDM": curve(results, sizes)}, levels), f"Loss by the number of slots. {MEANS}"

    def grid_figure(results: StudyResults) -> tuple[AnyChart, str]:
        cells = {pair: cell for pair, variant in grid.items() for cell in curve(results, {0: variant})}
        return write_read_chart(cells), f"Loss by the writes and reads of a token. {MEANS}"

    def aids_figure(results: StudyResults) -> tuple[AnyChart, str]:
        differences = {variant.label: results.paired(variant, both) for variant in aids if variant is not both}
        points = {label: point(0.0, difference) for label, difference in differences.items() if difference is not None}
        title = f"Loss above {both.label}"
        return Rows("aids", title, f"{NATS} above {both.label}", points), f"{title}. {PAIRED}"

    sections = (
        scaling_section(DEVIATED, levels),
        position_section(
            Section(
                "position",
                "Loss by position in the document",
                "SDM has a consistently lower perplexity on code than GDN, and the advantage grows at long contexts "
                "(in the paper, 32k to 512k tokens).",
                "code, 1.4B: SDM 0.821 nats, GDN 0.849",
                DEVIATED,
            ),
            sdm,
            (gdn,),
            (top["full_attention"], top["mixed"]),
        ),
        Comparison(
            "memory-size",
            "Memory size",
            "The loss rises monotonically as the memory shrinks from 432 MB to 27 MB a layer.",
            "code NLL 0.947, 0.937 and 0.914 with 27, 108 and 432 MB a layer; GDN 0.963 (level 6)",
            DEVIATED,
            claims=[
                loss_claim(larger, smaller, paper)
                for (smaller, larger), paper in zip(
                    itertools.pairwise(sizes.values()),
                    ("-0.010, 27 to 108 MB", "-0.023, 108 to 432 MB", NOT_REPORTED),
                    strict=True,
                )
            ],
            variants=(*sizes.values(), gdn),
            chart=slots_figure,
            notes=("More slots also widen W_q and W_k: parameters and FLOPs rise as the table shows.",),
        ),
        recall_section(
            (WRITE_RULE, RECALL_TASK, *recall_recipe.DEVIATIONS),
            forms,
            TRAINED_PAIRS,
            choice_accuracy(TRAINED_PAIRS),
            "the accuracy on rows that no other number rests on, the mean over seeds",
        ),
        accuracy_section(
            Section(
                "retrieval",
                "RULER in short contexts",
                "SDM's larger state significantly improves long-context recall on RULER.",
                "RULER at level 8, 4k to 131k: SDM 31.2%, GDN 20.0%, attention 32.5%",
                DEVIATED,
                "RULER's prompts are English. The models have seen a million tokens of code and a vocabulary of 1,024: "
                "that they answer next to nothing says nothing about their memories.",
            ),
            top,
            "ruler",
            "+11.2 points at 1.4B",
            "Six tasks at 1,024 and 2,048 tokens, eight samples each, hidden in the built-in text: not comparable with "
            "published numbers.",
        ),
        _initial_state_section(sdm, null, learned, gdn),
        Comparison(
            "mixed",
            "Mixed hybrid",
            "Global layers that alternate between full attention and SDM have a lower loss than either alone.",
            "text NLL at level 8: 2.645, with attention alone 2.658, with SDM alone 2.654",
            DEVIATED,
            claims=[
                loss_claim(top["mixed"], top["full_attention"], "-0.013 (text) at 1.4B"),
                loss_claim(top["mixed"], sdm, "-0.009 (text) at 1.4B"),
            ],
            variants=every(top),
        ),
        Comparison(
            "plain",
            "The plain recipe and the aids",
            "The paper's models have neither aid, and SDM's loss is below GDN's.",
            "code, 1.4B: SDM 0.821 nats, GDN 0.849",
            (*DEVIATED, PLAIN),
            "Where SDM is not below GDN by the plain recipe, what is shown with the aids is about models that have "
            "learned to recall.",
            claims=[loss_claim(plain["sdm"], plain["gdn"], "-0.028 at 1.4B")],
            variants=[*aids, *plain.values()],
            base=both,
            chart=aids_figure,
        ),
        Comparison(
            "writes-and-reads",
            "Writes and reads",
            "With half as many writes and reads the loss is 0.0047 nats higher; with twice the reads 0.0016 lower.",
            "text NLL at level 8 against W = R = 64: W = R = 32 +0.0047, R = 128 -0.0016",
            small,
            claims=[
                loss_claim(grid[base // 2, base // 2], grid[base, base], "+0.0047 (text) at 1.4B", expected="above"),
                loss_claim(grid[base, 2 * base], grid[base, base], "-0.0016 (text) at 1.4B"),
            ],
            variants=every(grid),
            base=grid[base, base],
            chart=grid_figure,
        ),
        access_section(
            (*DEVIATED, f"charts: level {SMALL}, d = {WIDTHS[SMALL]}, one seed"),
            (sdm, plain["sdm"]),
            every(grid),
        ),
        utilisation_section(DEVIATED, (sdm,)),
        cost_section((*DEVIATED, "on this machine, which may be busy; one seed, one thread"), top, SPEED),
        accuracy_section(
            Section(
                "short-context",
                "Short-context tasks",
                "SDM's average accuracy over 15 tasks of reasoning and knowledge is above GDN's.",
                "level 8: SDM 38.5%, GDN 37.9%, attention 38.0%; level 13: 56.8%, 55.7%, 56.7%",
                DEVIATED,
                "The paper's 15 datasets cannot be shipped; these few questions only show that the path works.",
            ),
            top,
            "harness",
            "+0.6 points at 1.4B, +1.1 at 8B",
            "A few questions that come with this package.",
        ),
        Comparison(
            "learning-rates",
            "Learning rates",
            "The paper takes one learning rate for all architectures of a level.",
            "not swept by architecture",
            small,
            "Rates are chosen by validation loss, one seed; every other number of this page is of test documents.",
            variants=every(rates),
            summary=rates_summary,
        ),
    )
    groups = {
        "ladder": every(levels),
        "memory size": every(sizes),
        "initial state": [sdm, null, learned, gdn],
        "aids": aids,
        "plain": every(plain),
        "writes and reads": every(grid),
        "recall": every(forms),
        "learning rates": every(rates),
    }
    title = "The paper in miniature"
    return Study("mini", title, LEAD, groups, sections, every(top), SPEED, round_of=by_seed)
