"""Facts fixed for all of training: SDM and GDN with learned and null initial states.

A small model has to store what it is told over and over: in its matrices, or in the initial state of its memory. A fact
is asked for by three tokens, so two shifts bring them together below the memory: with one, the memory would have to
join them itself, and its initial state could not be asked for a whole fact. `wider` gives the MLPs as many parameters
as SDM's M0 has.
"""

from __future__ import annotations

from sdm.data.config import FactsConfig
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

WIDTH, SLOTS, HIDDEN = 32, 1024, 32
BLOCKS = 3
# A gated MLP has three matrices of WIDTH x its hidden size.
WIDER = SLOTS * WIDTH // (3 * WIDTH * BLOCKS)

DEVIATIONS = (
    "d = 32 and three blocks (two token shifts, then the memory) with MLPs of 32 hidden channels instead of the ladder",
    "random facts over 168 tokens instead of text; a row of 96 tokens tells 16 of them",
    "weights are initialised at a standard deviation of 0.1; SDM has N = 1024, W = R = 16; W_q is independent of W_k",
)


def facts(
    global_layer: GlobalLayer = "sdm",
    *,
    num_facts: int = 8192,
    learned: bool = True,
    wider: bool = False,
    lr: float = 5e-3,
    initial_state_lr: float | None = None,
    steps: int = 1200,
    seed: int = 0,
) -> TrainConfig:
    """Random facts, the same in all of training, told among filler; a minute on a laptop."""
    return TrainConfig(
        model=ModelConfig(
            hidden_size=WIDTH,
            num_hidden_layers=BLOCKS,
            layer_types=("token_shift", "token_shift", global_layer),
            intermediate_size=HIDDEN + (WIDER if wider else 0),
            num_attention_heads=1,
            num_slots=SLOTS,
            num_writes=16,
            num_reads=16,
            recurrent_key_dim=64,
            initializer_range=0.1,
            learned_initial_state=learned,
            gdn_learned_initial_state=learned,
            largest_decay_rate=0.16,
        ),
        data=FactsConfig(num_facts=num_facts, seed=seed),
        optim=OptimConfig(lr=lr, initial_state_lr=initial_state_lr, weight_decay=0.0),
        schedule=ScheduleConfig(steps=steps, warmup=40, decay=2 * steps // 5, shape="cosine"),
        compute=ComputeConfig(threads=1),
        checkpoint=CheckpointConfig(every=600),
        monitor=MonitorConfig(log_every=50, memory_every=200, validate_every=0, validation_batches=8),
        guard=GuardConfig(spike=0),
        seed=seed,
    )
