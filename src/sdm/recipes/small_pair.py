"""A pair of very small language models of code that differ in their global layer alone.

With the paper's plain recipe and so few tokens the order is the other way round: nobody has learned recall yet, and
GDN's short convolutions win locally. The aids that change this are given to every model alike, and `DEVIATIONS` lists
them wherever the numbers are shown.
"""

from __future__ import annotations

from sdm.data.config import CorpusConfig
from sdm.recipes.parameters import GlobalLayer
from sdm.training import (
    CheckpointConfig,
    ComputeConfig,
    ModelConfig,
    MonitorConfig,
    OptimConfig,
    ScheduleConfig,
    TrainConfig,
)

DEVIATIONS = (
    "d = 64, four blocks (local, local, global, local) and a window of 16 instead of the ladder; 1.5M tokens of code",
    "keys of SDM and GDN come from the previous token (a shift), and GDN has no short convolution then",
    "W_q is initialised equal to W_k in SDM and GDN",
    "weights are initialised at a standard deviation of 0.1; M0 starts at 0.002; SDM has N = 256, W = R = 16",
    "one seed, one learning rate for both: at the paper's plain recipe and this few tokens the order reverses",
)


def small_code(global_layer: GlobalLayer = "sdm", *, lr: float = 5e-3, steps: int = 360, seed: int = 0) -> TrainConfig:
    """One of the pair."""
    return TrainConfig(
        model=ModelConfig(
            hidden_size=64,
            num_hidden_layers=4,
            layer_types=("sliding_attention", "sliding_attention", global_layer, "sliding_attention"),
            num_attention_heads=4,
            sliding_window=16,
            num_slots=256,
            num_writes=16,
            num_reads=16,
            short_convolution=0,
            initializer_range=0.1,
            shift_keys=True,
            tie_query_initialization=True,
            tie_word_embeddings=True,
        ),
        data=CorpusConfig(
            sources=("code",), tokenizer="bpe:1024", layout="rows", sequence_length=2048, batch_size=2, seed=seed
        ),
        optim=OptimConfig(lr=lr),
        schedule=ScheduleConfig(steps=steps, warmup=20),
        compute=ComputeConfig(threads=1),
        checkpoint=CheckpointConfig(every=200),
        monitor=MonitorConfig(log_every=10, memory_every=20, validate_every=0, validation_batches=4),
        seed=seed,
    )
