"""Small language models of code by the paper's plain recipe: its proportions at a small width, and none of the aids.

As in the paper's ladder, GDN's heads have d_v = head size and d_qk = half of it, and SDM has one head with W = R = d_qk
and N = (d / 4)^2 slots: the same projections and the same FLOPs. The head size is 32 instead of 128. GDN has its short
convolutions and SDM has none; keys come from the token itself, W_q and W_k are drawn apart, M0 is learned.
"""

from __future__ import annotations

from typing import Annotated, Literal

from typing_extensions import Doc

from sdm.data.config import CorpusConfig
from sdm.errors import TrainingError
from sdm.models.model_config import ModelConfig
from sdm.reproduce.recipes.parameters import GlobalLayer
from sdm.run.config import CheckpointConfig, ComputeConfig, MonitorConfig, OptimConfig, ScheduleConfig, TrainConfig

Width = Annotated[int, Doc("Width d of the model, a multiple of 32, the size of a head.")]
Text = Annotated[
    Literal["code", "pypi"], Doc("The standard library, 4M tokens; or packages of the package index, 79M tokens.")
]

HEAD_SIZE = 32
LENGTH = 2048

DEVIATIONS = (
    "four blocks (local, local, global, local) of head size 32, a window of 16 and W = R = 16 instead of the ladder",
    "a step is one row of 2,048 tokens of code, BPE of 1,024, embeddings tied to the output",
    "weights start at a standard deviation of 0.8 / sqrt(d): at 0.02 such narrow models learn late",
)


def plain_code(
    global_layer: GlobalLayer = "sdm",
    width: Width = 64,
    text: Text = "code",
    *,
    lr: float = 5e-3,
    steps: int = 512,
    seed: int = 0,
) -> TrainConfig:
    """A small language model of code by the paper's plain recipe."""
    if width < 1 or width % HEAD_SIZE:
        raise TrainingError(f"width must be a multiple of {HEAD_SIZE}, the size of a head, got {width}")
    return TrainConfig(
        model=ModelConfig(
            hidden_size=width,
            num_hidden_layers=4,
            layer_types=("sliding_attention", "sliding_attention", global_layer, "sliding_attention"),
            num_attention_heads=width // HEAD_SIZE,
            sliding_window=16,
            num_writes=HEAD_SIZE // 2,
            num_reads=HEAD_SIZE // 2,
            initializer_range=round(0.8 * width**-0.5, 4),
            tie_word_embeddings=True,
            loss_chunk_size=2 * LENGTH,  # all at once: nothing is computed again in backward
        ),
        data=CorpusConfig(
            sources=(text,), tokenizer="bpe:1024", layout="rows", sequence_length=LENGTH, batch_size=1, seed=seed
        ),
        optim=OptimConfig(lr=lr),
        schedule=ScheduleConfig(steps=steps, warmup=min(20, steps // 10)),
        compute=ComputeConfig(threads=1),
        checkpoint=CheckpointConfig(every=500, keep=1),
        monitor=MonitorConfig(log_every=50, memory_every=0, validate_every=0, validation_batches=8),
        seed=seed,
    )
