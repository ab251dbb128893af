"""Very small language models of code and text that differ in their global layer alone.

`small_code` has the paper's proportions: GDN's keys are half as wide as its heads, W = R = d_qk = 16, and SDM and GDN
have equal parameters and FLOPs. With the paper's plain recipe and so few tokens the order of SDM and GDN is not the
paper's: nobody has learned recall yet, and GDN's short convolutions win locally. The aids that change this are given to
both alike; `DEVIATIONS` lists them wherever the numbers are shown.

`plain_code` is the paper's plain recipe at a small width, with none of the aids. As in the paper's ladder, GDN's heads
have d_v = head size and d_qk = half of it, and SDM has one head with W = R = d_qk and N = (d / 4)^2 slots: the same
projections and the same FLOPs. The head size is 32 instead of 128. GDN has its short convolutions and SDM has none;
keys come from the token itself, W_q and W_k are drawn apart, M0 is learned.
"""

from __future__ import annotations

from typing import Annotated, Literal

from typing_extensions import Doc

from sdm.data.config import CorpusConfig
from sdm.errors import TrainingError
from sdm.models.model_config import ModelConfig
from sdm.reproduce.recipes import GlobalLayer
from sdm.run.config import CheckpointConfig, ComputeConfig, MonitorConfig, OptimConfig, ScheduleConfig, TrainConfig

LENGTH = 2048
Text = Annotated[
    Literal["code", "pypi"], Doc("The standard library, 4M tokens; or packages of the package index, 79M tokens.")
]


def code_rows(text: Text = "code", *, seed: int, sequence_length: int = LENGTH, batch_size: int = 1) -> CorpusConfig:
    """Rows of code in tokens of a BPE of 1,024."""
    return CorpusConfig(
        sources=(text,),
        tokenizer="bpe:1024",
        layout="rows",
        sequence_length=sequence_length,
        batch_size=batch_size,
        seed=seed,
    )


SHARED_DEVIATIONS = (
    "d = 64, four blocks (local, local, global, local) and a window of 16 instead of the ladder; 1.05M tokens of code "
    "in rows of 2,048",
    "weights are initialised at a standard deviation of 0.1; M0 starts at 0.002; SDM has N = 256, W = R = 16",
    "one seed and one learning rate, 5e-3, for all: none was tuned",
)
AIDS = (
    "keys of SDM and GDN come from the previous token (a shift), and GDN has no short convolution then",
    "W_q is initialised equal to W_k in SDM and GDN",
)
DEVIATIONS = (*AIDS, *SHARED_DEVIATIONS)


def small_code(
    global_layer: GlobalLayer = "sdm",
    *,
    aided: bool = True,
    heads: int = 2,
    lr: float = 5e-3,
    steps: int = 512,
    seed: int = 0,
) -> TrainConfig:
    """One of them; without the aids it is the paper's recipe in miniature. GDN's `heads` share its 32 key channels."""
    return TrainConfig(
        model=ModelConfig(
            hidden_size=64,
            num_hidden_layers=4,
            layer_types=("sliding_attention", "sliding_attention", global_layer, "sliding_attention"),
            num_attention_heads=heads,
            sliding_window=16,
            num_slots=256,
            num_writes=16,
            num_reads=16,
            short_convolution=0 if aided else 4,
            initializer_range=0.1,
            shift_keys=aided,
            tie_query_initialization=aided,
            tie_word_embeddings=True,
        ),
        data=code_rows(seed=seed),
        optim=OptimConfig(lr=lr),
        schedule=ScheduleConfig(steps=steps, warmup=20),
        compute=ComputeConfig(threads=1),
        checkpoint=CheckpointConfig(every=250),
        monitor=MonitorConfig(log_every=8, memory_every=16, validate_every=0, validation_batches=8),
        seed=seed,
    )


Width = Annotated[int, Doc("Width d of the model, a multiple of 32, the size of a head.")]
HEAD_SIZE = 32
PLAIN_DEVIATIONS = (
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
        data=code_rows(text, seed=seed),
        optim=OptimConfig(lr=lr),
        schedule=ScheduleConfig(steps=steps, warmup=min(20, steps // 10)),
        compute=ComputeConfig(threads=1),
        checkpoint=CheckpointConfig(every=500, keep=1),
        monitor=MonitorConfig(log_every=50, memory_every=0, validate_every=0, validation_batches=8),
        seed=seed,
    )


def tiny_code() -> TrainConfig:
    """A language model of the Python standard library: the paper's hybrid at width 128."""
    return _tiny("code")


def tiny_text() -> TrainConfig:
    """A language model of the State of the Union addresses."""
    return _tiny("text")


def _tiny(source: str) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(
            hidden_size=128,
            num_hidden_layers=4,
            sliding_window=64,
            num_slots=1024,
            num_writes=32,
            num_reads=32,
            tie_word_embeddings=True,
        ),
        data=CorpusConfig(sources=(source,), tokenizer="bpe:1024", sequence_length=1024, batch_size=4),
        optim=OptimConfig(lr=3e-3),
        schedule=ScheduleConfig(steps=1000, warmup=50),
        compute=ComputeConfig(),
        checkpoint=CheckpointConfig(every=200),
        monitor=MonitorConfig(log_every=10, memory_every=50, validate_every=200),
    )
