"""The runs of the crossover: variants of the plain recipe, at several lengths, widths and seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sdm.evaluation.position import Position
from sdm.reproduce.jobs import Job
from sdm.reproduce.recipes.plain_code import LENGTH, plain_code
from sdm.reproduce.work import work_of
from sdm.run.config import TrainConfig

# Choices are made on one set of documents and reported on the other.
MEASUREMENTS = {split: Position(gain=False, split=split) for split in ("valid", "test")}
SHORT = 512  # steps to which every variant is trained


@dataclass(frozen=True)
class Variant:
    """A change of the plain recipe that costs no FLOPs worth counting."""

    title: str
    layer: str
    fields: dict[str, Any] = field(default_factory=dict)
    """Of the model."""
    optim: dict[str, Any] = field(default_factory=dict)
    """Of the optimizer."""
    curve: bool = False
    """Whether it is also trained longer and wider."""


_AT_THE_TOKEN_BEFORE = {"key_convolution": 4, "tie_query_initialization": True}

VARIANTS = {
    "sdm": Variant("SDM, plain", "sdm", curve=True),
    "gdn": Variant("GDN, plain", "gdn", curve=True),
    "sdm-keys": Variant("SDM, keys start at the token before, W_q = W_k", "sdm", _AT_THE_TOKEN_BEFORE, curve=True),
    "gdn-keys": Variant("GDN, keys start at the token before, W_q = W_k", "gdn", _AT_THE_TOKEN_BEFORE),
    "gdn-keys-alone": Variant(
        "GDN, the same keys instead of its convolutions", "gdn", {**_AT_THE_TOKEN_BEFORE, "short_convolution": 0}
    ),
    "gdn-no-convolution": Variant("GDN without its convolutions", "gdn", {"short_convolution": 0}),
    "sdm-tied": Variant("SDM, W_q = W_k", "sdm", {"tie_query_initialization": True}),
    "sdm-null": Variant("SDM, M0 null", "sdm", {"learned_initial_state": False}),
    "sdm-large": Variant("SDM, M0 at 0.125", "sdm", {"initial_state_std": 0.125}),
    "sdm-sharp": Variant("SDM, temperature 0.3", "sdm", {"memory_temperature": 0.3}),
    "sdm-normalised": Variant("SDM, scores RMS-normalised", "sdm", {"normalize_scores": True}),
    "sdm-batch-norm": Variant("SDM, read scores batch-normalised", "sdm", {"query_batch_norm": True}),
    "sdm-l2": Variant("SDM, weights of norm 1 instead of softmax", "sdm", {"memory_weighting": "l2"}),
    "sdm-silu": Variant("SDM, SiLU as output gate", "sdm", {"memory_output_gate": "silu"}),
    "sdm-slow": Variant("SDM, learning rate 2.5e-3", "sdm", optim={"lr": 2.5e-3}),
    "sdm-fast": Variant("SDM, learning rate 1e-2", "sdm", optim={"lr": 1e-2}),
    "gdn-slow": Variant("GDN, learning rate 2.5e-3", "gdn", optim={"lr": 2.5e-3}),
    "gdn-fast": Variant("GDN, learning rate 1e-2", "gdn", optim={"lr": 1e-2}),
    "gdn-faster": Variant("GDN, learning rate 2e-2", "gdn", optim={"lr": 2e-2}),
    "sdm-fast-state": Variant("SDM, M0 at a learning rate of 5e-2", "sdm", optim={"initial_state_lr": 5e-2}),
}
BASELINE, RIVAL = "sdm", "gdn"


@dataclass(frozen=True)
class Cell:
    """One run."""

    variant: str
    width: int
    steps: int
    seed: int

    @property
    def name(self) -> str:
        return f"d{self.width}-{self.steps}-{self.variant}-s{self.seed}"

    @property
    def tokens(self) -> int:
        return self.steps * LENGTH

    def config(self) -> TrainConfig:
        variant = VARIANTS[self.variant]
        plain = plain_code(variant.layer, self.width, steps=self.steps, seed=self.seed)
        return replace(plain, model=replace(plain.model, **variant.fields), optim=replace(plain.optim, **variant.optim))

    def job(self) -> Job:
        config = self.config()
        return Job(self.name, config, MEASUREMENTS, work_of(config))


def cells(widths: Sequence[int], steps: Sequence[int], seeds: int, ablations: bool) -> list[Cell]:
    """The curves: all seeds at the smallest width, and one at the others. The ablations: every variant at SHORT steps
    and the smallest width, all seeds."""
    smallest = min(widths)
    found = [
        Cell(name, width, count, seed)
        for name, variant in VARIANTS.items()
        for width in widths
        for count in steps
        for seed in range(seeds if width == smallest else 1)
        if variant.curve
    ]
    if ablations:
        found += [Cell(name, smallest, SHORT, seed) for name in VARIANTS for seed in range(seeds)]
    return list(dict.fromkeys(found))
