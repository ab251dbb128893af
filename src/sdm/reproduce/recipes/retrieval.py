"""Small hybrids trained on retrieval tasks of RULER's kind, so that RULER's own tasks can be measured on them.

SDM and GDN differ in the global layer alone; both take their keys from the token before, start with W_q = W_k and with
slow decay. Full attention gets none of it.
"""

from __future__ import annotations

from sdm.data.config import RetrievalConfig
from sdm.models.model_config import ModelConfig
from sdm.reproduce.recipes.parameters import GlobalLayer
from sdm.run.config import (
    CheckpointConfig,
    ComputeConfig,
    GuardConfig,
    MonitorConfig,
    OptimConfig,
    ScheduleConfig,
    TrainConfig,
)

DEVIATIONS = (
    "d = 64, four blocks (local, local, global, local) and a window of 12 instead of the ladder; 1,152 tokens of "
    "vocabulary with numbers in pairs of digits",
    "trained on retrieval tasks of RULER's kind (other keys and haystacks, RULER's phrasing in half of the rows) "
    "instead of text; the loss is that of answers",
    "keys of SDM and GDN come from the previous token (a shift), and GDN has no short convolution then; W_q starts "
    "equal to W_k",
    "decay rates A of SDM and GDN start below 0.16 instead of 16: slow decay; SDM has N = 1024, W = R = 16",
    "weights are initialised at a standard deviation of 0.1; M0 starts at 0.002",
    "a curriculum: rows grow from 128 to 512 tokens between one and three fifths of the steps, and begin with few "
    "pairs, short keys and short values",
)


def retrieval(
    global_layer: GlobalLayer = "sdm",
    *,
    layer_types: tuple[str, ...] | None = None,
    lr: float = 5e-3,
    steps: int = 600,
    seed: int = 0,
    heads: int = 2,
    key_dim: int = 64,
    num_slots: int = 1024,
    sequence_length: int = 512,
    start_length: int = 128,
    tracking: float = 0.0,
) -> TrainConfig:
    """Retrieval tasks in text, of RULER's kind: numbers hidden in noise and sentences; minutes on a laptop."""
    aided = global_layer != "full_attention"
    return TrainConfig(
        model=ModelConfig(
            hidden_size=64,
            num_hidden_layers=4,
            layer_types=layer_types or ("sliding_attention", "sliding_attention", global_layer, "sliding_attention"),
            num_attention_heads=heads,
            sliding_window=12,
            num_slots=num_slots,
            num_writes=16,
            num_reads=16,
            recurrent_key_dim=key_dim,
            short_convolution=0,
            initializer_range=0.1,
            shift_keys=aided,
            tie_query_initialization=aided,
            largest_decay_rate=0.16,
            tie_word_embeddings=True,
        ),
        data=RetrievalConfig(
            sequence_length=sequence_length,
            start_length=start_length,
            tracking=tracking,
            batch_size=max(1, 4096 // sequence_length),
            seed=seed,
        ),
        optim=OptimConfig(lr=lr),
        schedule=ScheduleConfig(steps=steps, warmup=40, decay=2 * steps // 5, shape="cosine", final=0.02),
        compute=ComputeConfig(threads=1),
        checkpoint=CheckpointConfig(every=200),
        monitor=MonitorConfig(log_every=20, memory_every=100, validate_every=0, validation_batches=8),
        # The curriculum makes the task harder as it goes: a loss that rises is no accident.
        guard=GuardConfig(spike=0),
        seed=seed,
    )
