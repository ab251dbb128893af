"""Very small language models of code that differ in their global layer alone.

Their proportions are the paper's: GDN's keys are half as wide as its heads, W = R = d_qk = 16, and SDM and GDN have
equal parameters and FLOPs. With the paper's plain recipe and so few tokens the order of SDM and GDN is not the paper's:
nobody has learned recall yet, and GDN's short convolutions win locally. The aids that change this are given to both
alike; `DEVIATIONS` lists them wherever the numbers are shown.
"""

from __future__ import annotations

from sdm.data.config import CorpusConfig
from sdm.models.model_config import ModelConfig
from sdm.reproduce.recipes.parameters import GlobalLayer
from sdm.run.config import CheckpointConfig, ComputeConfig, MonitorConfig, OptimConfig, ScheduleConfig, TrainConfig

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
        data=CorpusConfig(
            sources=("code",), tokenizer="bpe:1024", layout="rows", sequence_length=2048, batch_size=1, seed=seed
        ),
        optim=OptimConfig(lr=lr),
        schedule=ScheduleConfig(steps=steps, warmup=20),
        compute=ComputeConfig(threads=1),
        checkpoint=CheckpointConfig(every=250),
        monitor=MonitorConfig(log_every=8, memory_every=16, validate_every=0, validation_batches=8),
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
