"""`sdm reproduce rivals`: SDM and GDN beside KDA, Raven and FwPKM, in recall and on the tiny ladder.

Recall: accuracy against the size of the state at about equal FLOPs, with a sweep of every model's learning rate. Code:
a level of the tiny ladder of `recipes.mini` at two learning rates. The aids of small models are given to all: SDM, GDN,
KDA and Raven take their keys from the token before with W_q = W_k at the start; FwPKM stores under each token what
follows it by its own rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sdm.evaluation.measurement import Measurement
from sdm.evaluation.position import Position
from sdm.evaluation.recall import Recall
from sdm.reproduce.exhibits import choice_accuracy, validation_summary
from sdm.reproduce.quick import WORDS
from sdm.reproduce.recipes import mini as mini_recipe
from sdm.reproduce.recipes import tasks as recall_recipe
from sdm.reproduce.recipes.mini import mini
from sdm.reproduce.recipes.tasks import recall
from sdm.reproduce.sections.loss import Comparison
from sdm.reproduce.sections.recall import Forms, recall_section
from sdm.reproduce.study import WRITE_RULE, Study, Variant, every, sweep
from sdm.run.config import TrainConfig

PAIRS = 256
RATES = (1.5e-3, 3e-3, 6e-3)
CODE_RATES = (5e-3, 1e-2)
LEVEL = 3
LABELS = {"sdm": "SDM", "gdn": "GDN", "kda": "KDA", "raven": "Raven", "fwpkm": "FwPKM"}
# Fields that make the models of recall about equal in FLOPs; GDN and KDA have one head of 64 key channels, and Raven
# one of 32.
RECALL: dict[str, dict[str, dict[str, Any]]] = {
    "sdm": {"N = 1,024": {"num_slots": 1024}, "N = 64": {"num_slots": 64}},
    "gdn": {"1x64": {}},
    "kda": {"1x64": {"kda_decay_rank": 16}},
    "raven": {
        "M = 64": {"raven_slots": 64, "raven_writes": 8},
        "M = 256": {"raven_slots": 256, "raven_writes": 32},
    },
    "fwpkm": {"N = 1,024": {"fwpkm_slots": 1024, "fwpkm_chunk": 16}},
}
CODE: dict[str, dict[str, Any]] = {"kda": {"kda_decay_rank": 8}, "fwpkm": {"fwpkm_chunk": 64}}
MEASURED: dict[str, Measurement] = {
    "recall": Recall(sizes=(64, 128, 256), rows=16),
    "choice": Recall(sizes=(PAIRS,), rows=32, seed=2),
}
POSITION: dict[str, Measurement] = {
    "position": Position(gain=False, split="test"),
    "valid": Position(gain=False, split="valid"),
}
UNTUNED = (
    "KDA, Raven and FwPKM are written from their equations at a scale that their authors never published; only the "
    "learning rate is swept, and no other choice of theirs is tuned",
    "sizes follow the width: Raven has one head of 32 key channels (published: 256 slots of 400M parameters), FwPKM 8 "
    "reads and chunks of 16 tokens in recall and 64 in code (published: 512 x 512 slots and chunks of 512), KDA decays "
    "of rank 16 and 8",
    "FwPKM has a table per stream that starts empty; the published code shares one over the batch and never resets it",
)


def recall_config(kind: str, fields: Mapping[str, Any], *, lr: float, steps: int, seed: int) -> TrainConfig:
    """A model of recall with one head where its layer has heads."""
    config = recall("gdn", key_dim=64, num_pairs=PAIRS, lr=lr, steps=steps, batch_size=2, seed=seed)
    return replace(config, model=replace(config.model, layer_types=("token_shift", kind), **fields))


def recall_forms(rates: Sequence[float], steps: int, seeds: int, every_form: bool = True) -> Forms:
    """The models of recall: every form at every learning rate, or the first form of each."""

    def at_rates(kind: str, form: str) -> dict[float, Variant]:
        name = f"recall-{kind}-{form.replace(' ', '').replace(',', '')}-lr{{lr:g}}-seed{{seed}}"
        label, fields = f"{LABELS[kind]}, {form}", RECALL[kind][form]
        return sweep(name, label, rates, MEASURED, seeds, recall_config, kind, fields, steps=steps)

    return {
        kind: {f"{LABELS[kind]}, {form}": at_rates(kind, form) for form in (forms if every_form else list(forms)[:1])}
        for kind, forms in RECALL.items()
    }


def code_variants(rates: Sequence[float], seeds: int) -> list[Variant]:
    """The models of code."""

    def at_rates(kind: str) -> list[Variant]:
        name, known = f"code-{kind}-lr{{lr:g}}-seed{{seed}}", "sdm" if kind == "sdm" else "gdn"
        fields = {"global_layer": kind, **CODE.get(kind, {})}
        models = sweep(name, LABELS[kind], rates, POSITION, seeds, mini, LEVEL, known, model=fields)
        return [replace(variant, label=f"{variant.label}, lr {lr:g}") for lr, variant in models.items()]

    return [variant for kind in LABELS for variant in at_rates(kind)]


def rivals_study(
    steps: int = 450,
    seeds: int = 3,
    rates: Sequence[float] = RATES,
    code_rates: Sequence[float] = CODE_RATES,
    every_form: bool = True,
) -> Study:
    """The study of `sdm reproduce rivals`.

    Args:
        steps: Steps of the models of recall.
        seeds: Seeds of every model.
        rates: Learning rates of recall.
        code_rates: Learning rates of the models of code; none leaves them out.
        every_form: Train all forms of SDM and Raven in recall; else the first one of each model.
    """
    forms, code = recall_forms(rates, steps, seeds, every_form), code_variants(code_rates, seeds)
    groups = {"recall": every(forms)}
    text, paper = "The paper compares SDM with GDN and Mamba2, and cites FwPKM.", "not reported"
    recalled = recall_section(
        (WRITE_RULE, *recall_recipe.DEVIATIONS, *UNTUNED),
        forms,
        PAIRS,
        choice_accuracy(PAIRS),
        "the mean accuracy over seeds on other rows of the task",
    )
    sections = [replace(recalled, title="Recall beside rivals of 2026", text=text, paper=paper, claims=())]
    if code:
        groups["code"] = code
        sections.append(
            Comparison(
                "code",
                f"Code: level {LEVEL} of the tiny ladder",
                text,
                paper,
                (WRITE_RULE, *mini_recipe.DEVIATIONS, *UNTUNED),
                "Choose a rate by the line below, whose documents are others than those of the table.",
                variants=code,
                base=code[len(code_rates)],
                summary=lambda results: validation_summary(results, code, "rates are chosen"),
            )
        )
    lead = (
        "Kimi Delta Attention (KDA) is GDN with a decay for each key channel. Raven writes tokens into a few slots "
        "that a router chooses and reads all slots by a softmax. FwPKM reads a few rows of a table by product keys and "
        f"corrects them by gradient steps, chunk by chunk.\n\n{WORDS}"
    )
    return Study("rivals", "SDM beside rivals of 2026", lead, groups, tuple(sections))
