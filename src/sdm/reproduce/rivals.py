"""`sdm reproduce rivals`: SDM and GDN beside KDA, Raven and FwPKM, in recall and on the tiny ladder.

Recall: accuracy against the size of the state at about equal FLOPs. Code: a level of the tiny ladder of
`recipes.mini`. The aids of small models are given to all: SDM, GDN, KDA and Raven take their keys from the token before
with W_q = W_k at the start; FwPKM stores under each token what follows it by its own rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sdm.reproduce.forms import Form, code_task, form_study, recall_task
from sdm.reproduce.quick import WORDS
from sdm.reproduce.recipes.mini import mini
from sdm.reproduce.recipes.tasks import recall
from sdm.reproduce.study import NOT_REPORTED, Section, Study
from sdm.run.config import TrainConfig

PAIRS = 256
STEPS = 450
LEVEL = 3
# Fields that make the models of recall about equal in FLOPs; GDN and KDA have one head of 64 key channels, and Raven
# one of 32.
RECALL_FORMS = {
    "sdm": Form("SDM, N = 1,024", {"layer_types": ("token_shift", "sdm"), "num_slots": 1024}),
    "sdm-small": Form("SDM, N = 64", {"layer_types": ("token_shift", "sdm"), "num_slots": 64}),
    "gdn": Form("GDN, 1x64", {"layer_types": ("token_shift", "gdn")}),
    "kda": Form("KDA, 1x64", {"layer_types": ("token_shift", "kda"), "kda_decay_rank": 16}),
    "raven": Form("Raven, M = 64", {"layer_types": ("token_shift", "raven"), "raven_slots": 64, "raven_writes": 8}),
    "raven-large": Form(
        "Raven, M = 256", {"layer_types": ("token_shift", "raven"), "raven_slots": 256, "raven_writes": 32}
    ),
    "fwpkm": Form(
        "FwPKM, N = 1,024", {"layer_types": ("token_shift", "fwpkm"), "fwpkm_slots": 1024, "fwpkm_chunk": 16}
    ),
}
CODE_FORMS = {
    "sdm": Form("SDM", {"global_layer": "sdm"}),
    "gdn": Form("GDN", {"global_layer": "gdn"}),
    "kda": Form("KDA", {"global_layer": "kda", "kda_decay_rank": 8}),
    "raven": Form("Raven", {"global_layer": "raven"}),
    "fwpkm": Form("FwPKM", {"global_layer": "fwpkm", "fwpkm_chunk": 64}),
}
COMPARED = [("sdm", rival) for rival in ("gdn", "kda", "raven", "raven-large", "fwpkm")]
UNTUNED = (
    "KDA, Raven and FwPKM are written from their equations at a scale that their authors never published; only the "
    "learning rate is swept, and no other choice of theirs is tuned",
    "sizes follow the width: Raven has one head of 32 key channels (published: 256 slots of 400M parameters), FwPKM 8 "
    "reads and chunks of 16 tokens in recall and 64 in code (published: 512 x 512 slots and chunks of 512), KDA decays "
    "of rank 16 and 8",
    "FwPKM has a table per stream that starts empty; the published code shares one over the batch and never resets it",
)


def _recall(fields: Mapping[str, Any], lr: float, seed: int) -> TrainConfig:
    """A model of recall with one head where its layer has heads."""
    config = recall("gdn", key_dim=64, num_pairs=PAIRS, lr=lr, steps=STEPS, batch_size=2, seed=seed)
    return replace(config, model=replace(config.model, **fields))


def _code(fields: Mapping[str, Any], lr: float, seed: int) -> TrainConfig:
    return mini(LEVEL, "sdm" if fields["global_layer"] == "sdm" else "gdn", lr=lr, seed=seed, model=fields)


RECALL_RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2)
RECALL_BEST = dict.fromkeys(RECALL_FORMS, 3e-3) | {"kda": 1.2e-2, "fwpkm": 6e-3}
CODE_BEST = {"sdm": 5e-3, "gdn": 1e-2, "kda": 1e-2, "raven": 1e-2, "fwpkm": 1e-2}
TASKS = {
    "recall": recall_task("recall", RECALL_FORMS, _recall, (64, 128, PAIRS), RECALL_BEST, RECALL_RATES, by_state=True),
    "code": code_task(
        f"code, level {LEVEL} of the tiny ladder", CODE_FORMS, _code, CODE_BEST, (2.5e-3, 5e-3, 1e-2, 2e-2)
    ),
}


def rivals_study() -> Study:
    """The study of `sdm reproduce rivals`."""
    section = Section(
        "rivals",
        "SDM beside rivals of 2026",
        "The paper compares SDM with GDN and Mamba2, and cites FwPKM.",
        NOT_REPORTED,
        UNTUNED,
    )
    lead = (
        "Kimi Delta Attention (KDA) is GDN with a decay for each key channel. Raven writes tokens into a few slots "
        "that a router chooses and reads all slots by a softmax. FwPKM reads a few rows of a table by product keys and "
        f"corrects them by gradient steps, chunk by chunk.\n\n{WORDS}"
    )
    return form_study(section, lead, TASKS, COMPARED)
