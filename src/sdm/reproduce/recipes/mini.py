"""The paper's ladder in miniature: five levels that a core trains in seconds to minutes, for every architecture.

As in the paper, the architectures of a level share everything but their global layers, every level has the same number
of tokens per parameter, the slots are N = (d/4)^2, and W = R = d_qk, so that SDM and GDN have the same parameters and
FLOPs. With so few tokens the paper's plain recipe shows nothing of what it shows at its scale: nobody learns to
recall. `DEVIATIONS` lists the aids that change this, and `plain=True` goes without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from typing_extensions import Doc

from sdm.errors import TrainingError
from sdm.models import cost
from sdm.models.model_config import ModelConfig
from sdm.reproduce.recipes.code import LENGTH as SEQUENCE_LENGTH
from sdm.reproduce.recipes.code import code_rows
from sdm.run.config import CheckpointConfig, ComputeConfig, MonitorConfig, OptimConfig, ScheduleConfig, TrainConfig

Architecture = Literal["sdm", "gdn", "full_attention", "mixed"]

WIDTHS = {1: 32, 2: 40, 3: 48, 4: 56, 5: 64}
TOKENS_PER_PARAMETER = 6
VOCABULARY = 1024
# By the sweep at level 3, on validation data; `sdm reproduce mini` shows it.
RATES = {"sdm": 5e-3, "gdn": 1e-2, "full_attention": 1e-2, "mixed": 5e-3}

DEVIATIONS = (
    "widths of 32 to 64, four blocks (local, global, local, global) and a window of 16 instead of the paper's ladder, "
    "three local layers to a global one and a window of 128; two attention heads",
    "6 tokens per parameter instead of 160; code of the standard library, a vocabulary of 1,024, rows of 2,048 tokens",
    "W = R = d_qk = d/4, which is 8 to 16, instead of 64",
    "aids for SDM and GDN: keys come from the token before, W_q is initialised equal to W_k, and GDN has no short "
    "convolution then; full attention gets none",
    "weights are initialised at a standard deviation of 0.1 and M0 at 0.002; embeddings are tied",
)
PLAIN = (
    "plain: no shifted keys, no tied initialisation, weights at 0.02, GDN with its short convolutions; sizes, tokens "
    "and data are those of the aided models"
)


def mini(
    level: Annotated[int, Doc(f"Level of the tiny ladder: {', '.join(map(str, WIDTHS))}.")] = 5,
    architecture: Architecture = "sdm",
    plain: Annotated[bool, Doc("Go without the aids for very small models.")] = False,
    *,
    lr: float | None = None,
    seed: int = 0,
    model: Mapping[str, Any] | None = None,
) -> TrainConfig:
    """A language model of code at a level of a tiny ladder, seconds to minutes on a core."""
    if level not in WIDTHS:
        raise TrainingError(f"level must be one of {', '.join(map(str, WIDTHS))}, got {level!r}")
    steps = tokens(level) // SEQUENCE_LENGTH
    return TrainConfig(
        model=ModelConfig(**_fields(level, architecture, plain) | dict(model or {})),
        data=code_rows(seed=seed),
        optim=OptimConfig(lr=RATES[architecture] if lr is None else lr),
        schedule=ScheduleConfig(steps=steps, warmup=20, decay=steps // 4),
        compute=ComputeConfig(threads=1),
        checkpoint=CheckpointConfig(every=200, keep=1),
        monitor=MonitorConfig(log_every=10, memory_every=20, validate_every=0, validation_batches=32, display="none"),
        seed=seed,
    )


def tokens(level: int) -> int:
    """Of training, the same for every architecture: so many per parameter of SDM, embeddings and M0 aside."""
    sizes = ModelConfig(**_fields(level, "sdm", plain=False)).build(VOCABULARY)
    return TOKENS_PER_PARAMETER * cost(sizes).non_embedding_parameters


def _fields(level: int, architecture: Architecture, plain: bool) -> dict[str, Any]:
    width = WIDTHS[level]
    aids = {"shift_keys": True, "tie_query_initialization": True, "short_convolution": 0, "initializer_range": 0.1}
    return {
        "hidden_size": width,
        "num_hidden_layers": 4,
        "global_layer": ("full_attention", "sdm") if architecture == "mixed" else architecture,
        "global_layer_interval": 2,
        "num_attention_heads": 2,
        "intermediate_multiple": 16,
        "sliding_window": 16,
        "recurrent_key_dim": width // 4,
        "num_writes": width // 4,
        "num_reads": width // 4,
        "tie_word_embeddings": True,
        **({} if plain else aids),
    }
