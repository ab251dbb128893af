"""The runs of `sdm reproduce quick`, each a minute or less on one core.

Recall: SDM with three sizes of its memory, GDN with its key channels in fewer and wider heads (a larger state at equal
parameters), and full attention. The largest SDM and the best GDN have three seeds, and GDN a sweep of its learning
rate; SDM's is not tuned. Code: SDM, GDN and full attention with the aids of `recipes.small_code`, and SDM and GDN
without them.
"""

from __future__ import annotations

from typing import Any

from sdm.evaluation.position import Position
from sdm.evaluation.recall import Recall
from sdm.reproduce.jobs import Job
from sdm.reproduce.recipes.parameters import GlobalLayer
from sdm.reproduce.recipes.recall import KEY_CHANNELS, recall
from sdm.reproduce.recipes.small_code import small_code
from sdm.reproduce.work import work_of
from sdm.run.config import TrainConfig

TRAINED_PAIRS = 256
SEEDS = (0, 1, 2)
SLOTS = (64, 256, 1024)
KEY_DIMS = (16, 32, 64)
GDN_RATES = (1.5e-3, 3e-3, 6e-3)  # swept for the best layout; the others and the other seeds take the middle one
GDN_RATE = GDN_RATES[1]
# Of recall, each architecture in its best form. SDM is done after 300 steps; GDN still improves, and gets half as much
# again. Attention has no aid: it alone has to find out that a query looks for the token before the answer. This seed
# does so in 500 steps, for which there is time; two others need more, and `mini` gives all of them 1,000.
RECALL: dict[str, dict[str, Any]] = {
    "sdm": {"lr": 3e-3, "steps": 300, "batch_size": 2, "num_slots": SLOTS[-1]},
    "gdn": {"lr": GDN_RATE, "steps": 450, "batch_size": 2, "key_dim": KEY_DIMS[-1]},
    "full_attention": {"lr": 1.5e-3, "steps": 500, "batch_size": 4},
}

ACCURACY = {"recall": Recall(sizes=(16, 32, 64, 128, 256, 512), rows=16)}
LIKELIHOOD = {"position": Position(gain=False)}


def recall_config(kind: GlobalLayer, **changes: Any) -> TrainConfig:
    return recall(kind, num_pairs=TRAINED_PAIRS, **RECALL[kind] | changes)


def layout(key_dim: int) -> str:
    """How GDN's key channels are cut into heads."""
    return f"{KEY_CHANNELS // key_dim}x{key_dim}"


def recall_sdm(slots: int, seed: int) -> str:
    return f"recall-sdm-{slots}-seed{seed}"


def recall_gdn(key_dim: int, lr: float, seed: int) -> str:
    return f"recall-gdn-{layout(key_dim)}-lr{lr:g}-seed{seed}"


RECALL_ATTENTION = "recall-attention"
CODE = ("code-sdm", "code-gdn", "code-gdn-1x32", "code-attention")
PLAIN = ("code-sdm-plain", "code-gdn-plain")


def quick_jobs() -> list[Job]:
    """Those of recall and those of code."""
    configs = {RECALL_ATTENTION: recall_config("full_attention")}
    for slots in SLOTS:
        for seed in SEEDS if slots == SLOTS[-1] else SEEDS[:1]:
            configs[recall_sdm(slots, seed)] = recall_config("sdm", num_slots=slots, seed=seed)
    for key_dim in KEY_DIMS:
        for lr in GDN_RATES if key_dim == KEY_DIMS[-1] else (GDN_RATE,):
            for seed in SEEDS if (key_dim, lr) == (KEY_DIMS[-1], GDN_RATE) else SEEDS[:1]:
                configs[recall_gdn(key_dim, lr, seed)] = recall_config("gdn", lr=lr, key_dim=key_dim, seed=seed)
    jobs = [Job(name, config, ACCURACY, work_of(config)) for name, config in configs.items()]

    texts = {
        "code-sdm": small_code("sdm"),
        "code-gdn": small_code("gdn"),
        "code-gdn-1x32": small_code("gdn", heads=1),
        "code-attention": small_code("full_attention"),
        "code-sdm-plain": small_code("sdm", aided=False),
        "code-gdn-plain": small_code("gdn", aided=False),
    }
    return [*jobs, *(Job(name, config, LIKELIHOOD, work_of(config)) for name, config in texts.items())]
