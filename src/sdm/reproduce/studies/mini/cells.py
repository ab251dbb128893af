"""The runs of `sdm reproduce mini`: which models each experiment compares, and by what they are measured.

A variant is a model that is trained with several seeds, each a run (a cell). Experiments share variants: the SDM of the
ladder's last level is also the one with 256 slots, the one with a learned M0 and the one with both aids.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from sdm.evaluation.harness.measurement import Harness
from sdm.evaluation.measurement import Measurement
from sdm.evaluation.position import Position
from sdm.evaluation.recall import Recall
from sdm.evaluation.ruler.measurement import Ruler
from sdm.evaluation.ruler.tasks import SIX
from sdm.reproduce.jobs import Job
from sdm.reproduce.recipes.mini import RATES, WIDTHS, Architecture, mini
from sdm.reproduce.studies.quick.jobs import GDN_RATES, KEY_DIMS, TRAINED_PAIRS, layout, recall_config
from sdm.reproduce.studies.quick.jobs import SLOTS as RECALL_SLOTS
from sdm.reproduce.work import work_of
from sdm.run.config import TrainConfig

SEEDS = 3
ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)
LABELS = {"sdm": "SDM", "gdn": "GDN", "full_attention": "full attention", "mixed": "mixed FA/SDM"}
TOP = max(WIDTHS)  # the level of most experiments
SMALL = 3  # the level of those with many cells
SLOTS = (64, 256, 1024, 4096)
SWEPT = (2.5e-3, 5e-3, 1e-2, 2e-2)
# Of recall: the forms of each architecture at equal parameters, and the learning rates of every form. Attention has
# twice the steps of `quick`, with which some seeds stay at chance.
RECALL_FORMS: Mapping[str, Mapping[str, dict[str, int]]] = {
    "sdm": {f"SDM, N = {slots:,}": {"num_slots": slots} for slots in RECALL_SLOTS},
    "gdn": {f"GDN, {layout(key_dim)}": {"key_dim": key_dim} for key_dim in KEY_DIMS},
    "full_attention": {LABELS["full_attention"]: {"steps": 1000}},
}
RECALL_RATES = {
    "sdm": (*GDN_RATES, 1.2e-2),
    "gdn": (*GDN_RATES, 1.2e-2),
    "full_attention": (7.5e-4, 1.5e-3, 3e-3),
}

Measurements = Mapping[str, Measurement]
POSITION: Measurements = {"position": Position(gain=False)}
# Also what the context brings, and the tasks that a model of text can be asked.
THOROUGH: Measurements = {
    "position": Position(),
    "ruler": Ruler(tasks=SIX, lengths=(1024, 2048), samples=8, skip_short=True),
}

# Learning rates are chosen on other rows than those of the accuracy that is shown.
RECALL: Measurements = {"recall": Recall(), "choice": Recall(sizes=(TRAINED_PAIRS,), rows=32, seed=2)}


@dataclass(frozen=True)
class Variant:
    """A model, whatever its seed."""

    key: str
    """The name of its runs, before the seed."""
    label: str
    """What it is called in tables."""
    recipe: Callable[[int], TrainConfig]
    """The run of a seed."""
    measurements: Measurements = field(default_factory=lambda: POSITION)
    seeds: int = SEEDS

    def name(self, seed: int) -> str:
        return f"{self.key}-seed{seed}"

    def jobs(self) -> list[Job]:
        return self._jobs

    @functools.cached_property
    def _jobs(self) -> list[Job]:
        return [self.job(seed) for seed in range(self.seeds)]

    def job(self, seed: int) -> Job:
        config = self.recipe(seed)
        return Job(self.name(seed), config, self.measurements, work_of(config))


Experiment = Mapping[Any, Variant]
"""By what its variants differ in."""


def experiments() -> dict[str, Experiment]:
    """All of them by name."""
    return {
        "ladder": {(kind, level): ladder_variant(kind, level) for kind in ARCHITECTURES for level in WIDTHS},
        "memory size": {slots: slots_variant(slots) for slots in SLOTS},
        "initial state": {
            ("sdm", True): ladder_variant("sdm", TOP),
            ("sdm", False): _variant("sdm-null", "SDM, null M0", THOROUGH, learned_initial_state=False),
            ("gdn", True): _variant(
                "gdn-learned", "GDN, learned state", THOROUGH, architecture="gdn", gdn_learned_initial_state=True
            ),
            ("gdn", False): ladder_variant("gdn", TOP),
        },
        "aids": {
            (shift, tie): aids_variant(shift, tie) for shift, tie in itertools.product((False, True), (False, True))
        },
        "plain": {kind: plain_variant(kind) for kind in ("sdm", "gdn", "full_attention")},
        "writes and reads": {
            (writes, reads): grid_variant(writes, reads)
            for writes, reads in itertools.product(_shares(1, 2), _shares(1, 2, 4))
        },
        "recall": {
            (kind, form, lr): recall_variant(kind, form, lr)
            for kind, forms in RECALL_FORMS.items()
            for form in forms
            for lr in RECALL_RATES[kind]
        },
        "learning rates": {(kind, lr): rate_variant(kind, lr) for kind in ARCHITECTURES for lr in SWEPT},
    }


def jobs_of(experiment: Experiment) -> list[Job]:
    """Of all its variants and seeds, each once."""
    return list({job.name: job for variant in experiment.values() for job in variant.jobs()}.values())


def rounds(experiments: Mapping[str, Experiment]) -> list[list[Job]]:
    """All jobs, each once, seed by seed: who stops early has every experiment, with fewer seeds."""
    variants = [variant for experiment in experiments.values() for variant in experiment.values()]
    found = []
    for seed in range(max(variant.seeds for variant in variants)):
        jobs = {variant.name(seed): variant.job(seed) for variant in variants if seed < variant.seeds}
        found.append(list(jobs.values()))
    return found


@functools.cache
def ladder_variant(architecture: Architecture, level: int) -> Variant:
    measurements = {**THOROUGH, **_harness()} if level == TOP else POSITION
    return Variant(
        f"{architecture}-{level}", LABELS[architecture], lambda seed: mini(level, architecture, seed=seed), measurements
    )


def slots_variant(slots: int) -> Variant:
    if slots == (WIDTHS[TOP] // 4) ** 2:
        return replace(ladder_variant("sdm", TOP), label=f"N = {slots}")
    return _variant(f"slots-{slots}", f"N = {slots}", POSITION, num_slots=slots)


def aids_variant(shift: bool, tie: bool) -> Variant:
    label = " and ".join(name for name, given in (("shifted keys", shift), ("tied W_q", tie)) if given) or "neither aid"
    if shift and tie:
        return replace(ladder_variant("sdm", TOP), label=label)
    key = {(False, False): "neither", (True, False): "shift", (False, True): "tie"}[shift, tie]
    return _variant(f"aids-{key}", label, POSITION, shift_keys=shift, tie_query_initialization=tie)


def plain_variant(architecture: Architecture) -> Variant:
    return _variant(f"plain-{architecture}", LABELS[architecture], POSITION, architecture=architecture, plain=True)


def grid_variant(writes: int, reads: int) -> Variant:
    label, width = f"W = {writes}, R = {reads}", WIDTHS[SMALL] // 4
    if writes == reads == width:
        return replace(ladder_variant("sdm", SMALL), label=label)
    return _variant(f"grid-w{writes}-r{reads}", label, POSITION, level=SMALL, num_writes=writes, num_reads=reads)


def rate_variant(architecture: Architecture, lr: float) -> Variant:
    """One seed: a choice is made by validation loss, and the models of the ladder then have theirs."""
    if lr == RATES[architecture]:
        return replace(ladder_variant(architecture, SMALL), seeds=1)
    variant = _variant(
        f"rate-{architecture}-{lr:g}", LABELS[architecture], POSITION, level=SMALL, architecture=architecture, lr=lr
    )
    return replace(variant, seeds=1)


def recall_variant(kind: str, form: str, lr: float) -> Variant:
    """Of associative recall, which models of text this small cannot be asked for; steps and rows are `quick`'s."""
    fields = RECALL_FORMS[kind][form]
    key = "-".join(("recall", kind, *map(str, fields.values()), f"lr{lr:g}"))
    return Variant(key, form, lambda seed: recall_config(kind, lr=lr, seed=seed, **fields), RECALL)


def _variant(
    key: str,
    label: str,
    measurements: Measurements,
    level: int = TOP,
    architecture: Architecture = "sdm",
    plain: bool = False,
    lr: float | None = None,
    **model: Any,
) -> Variant:
    """`model` are fields in which it differs from the ladder's."""
    return Variant(
        key, label, lambda seed: mini(level, architecture, plain, lr=lr, seed=seed, model=model), measurements
    )


def _shares(*halves: int) -> tuple[int, ...]:
    """Half, once and twice as many keys as the level has."""
    return tuple(WIDTHS[SMALL] // 8 * count for count in halves)


def _harness() -> Measurements:
    """The short-context tasks that need no download, where the package that asks them is installed."""
    return {"harness": Harness(tasks=("small",))} if importlib.util.find_spec("lm_eval") else {}
