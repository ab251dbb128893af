"""Recipes of synthetic tasks: recall of this project's own, and the published MQAR and MAD, on the same small models.

`recall` compares SDM, GDN and full attention at equal parameters. SDM and GDN cost the same FLOPs per token as well;
full attention costs 24% more at the length of the task. The models are small enough to learn recall in minutes, and
they need help for it that the paper's do not: `DEVIATIONS` lists it. `rebinding` and `needle` are two more tasks.

`mqar` has the data, batches, epochs and the cosine schedule without warm-up of Zoology's comparison, whose learning
rates are 1e-3, 3.2e-3, 1e-2 and 3.2e-2; weight decay and clipping are this project's. 32 epochs are for a GPU:
--schedule.steps and --data.batch-size make it smaller.

`mad` has MAD's data, batches, epochs, moments and cosine schedule, and the middle one of its learning rates (1e-4,
5e-4, 1e-3; it sweeps weight decays of 0 and 0.1 as well); clipping is this project's.

`retrieval` trains small hybrids on tasks of RULER's kind, so that RULER's own tasks can be measured on them. SDM and
GDN differ in the global layer alone; both take their keys from the token before, start with W_q = W_k and with slow
decay. Full attention gets none of it.

`facts` are the same in all of training: a small model has to store what it is told over and over, in its matrices or in
the initial state of its memory. A fact is asked for by three tokens, so two shifts bring them together below the
memory: with one, the memory would have to join them itself, and its initial state could not be asked for a whole fact.
`wider` gives the MLPs as many parameters as SDM's M0 has.
"""

from __future__ import annotations

import math
from dataclasses import replace

from sdm.data.config import DataConfig, FactsConfig, NeedleConfig, RebindingConfig, RecallConfig, RetrievalConfig
from sdm.data.mad import MADTask, MADTaskConfig
from sdm.data.mqar import MQARTaskConfig
from sdm.models.model_config import ModelConfig
from sdm.reproduce.recipes import GlobalLayer
from sdm.run.config import (
    CheckpointConfig,
    ComputeConfig,
    GuardConfig,
    MonitorConfig,
    OptimConfig,
    ScheduleConfig,
    TrainConfig,
)

RATES = {"gdn": 5e-3, "full_attention": 1.5e-3}  # of the others 3e-3

KEY_CHANNELS = 64  # of GDN, over all heads; as many as SDM has scores at N = 1024

DEVIATIONS = (
    "d = 128 and two blocks instead of the paper's ladder; 512 keys and 64 values instead of a text vocabulary",
    "the local layer is a two-token shift (y = W x_t + V x_{t-1}) instead of sliding-window attention",
    "keys of SDM and GDN come from the previous token (a shift), and GDN has no short convolution then",
    "W_q is initialised equal to W_k in SDM and GDN; full attention gets neither aid and does without",
    "weights are initialised at a standard deviation of 0.1; M0 starts at 0.002; SDM has N = 1024, W = R = 16",
    "a curriculum: K grows from 8 to 256 between one and three fifths of the steps; cosine decay over the last two",
)


def _task_run(
    model: ModelConfig,
    data: DataConfig,
    optim: OptimConfig,
    schedule: ScheduleConfig,
    seed: int,
    save_every: int,
    log_every: int,
    memory_every: int,
) -> TrainConfig:
    """A run of one thread that ends with a cosine decay over two fifths of its steps."""
    return TrainConfig(
        model=model,
        data=data,
        optim=optim,
        schedule=replace(schedule, decay=2 * schedule.steps // 5, shape="cosine"),
        compute=ComputeConfig(threads=1),
        checkpoint=CheckpointConfig(every=save_every),
        monitor=MonitorConfig(log_every=log_every, memory_every=memory_every, validate_every=0, validation_batches=8),
        # A curriculum makes the task harder as it goes: a loss that rises is no accident.
        guard=GuardConfig(spike=0),
        seed=seed,
    )


def recall(
    global_layer: GlobalLayer = "sdm",
    *,
    lr: float | None = None,
    steps: int = 600,
    seed: int = 0,
    batch_size: int = 4,
    num_pairs: int = 256,
    num_slots: int = 1024,
    key_dim: int = 16,
) -> TrainConfig:
    """Associative recall, this project's own task, minutes on a laptop."""
    # Of GDN, 64 key channels in heads of `key_dim`: fewer and wider heads have a larger state and equal parameters.
    heads = KEY_CHANNELS // key_dim if global_layer == "gdn" else 4
    model = ModelConfig(
        hidden_size=128,
        num_hidden_layers=2,
        layer_types=("token_shift", global_layer),
        intermediate_size=256,
        num_attention_heads=heads,
        num_slots=num_slots,
        num_writes=16,
        num_reads=16,
        recurrent_key_dim=key_dim,
        short_convolution=0,
        initializer_range=0.1,
        shift_keys=True,
        tie_query_initialization=True,
    )
    data = RecallConfig(num_pairs=num_pairs, start_pairs=8, batch_size=batch_size, seed=seed)
    optim = OptimConfig(lr=RATES.get(global_layer, 3e-3) if lr is None else lr)
    return _task_run(model, data, optim, ScheduleConfig(steps=steps, warmup=50), seed, 300, 25, 50)


def rebinding(
    global_layer: GlobalLayer = "sdm",
    *,
    lr: float | None = None,
    steps: int = 600,
    seed: int = 0,
    batch_size: int = 8,
    num_pairs: int = 64,
    num_bindings: int = 4,
) -> TrainConfig:
    """Recall of keys that are bound several times, the last value counts; minutes on a laptop."""
    data = RebindingConfig(num_pairs=num_pairs, num_bindings=num_bindings, batch_size=batch_size, seed=seed)
    return replace(recall(global_layer, lr=lr, steps=steps, seed=seed), data=data)


def needle(
    global_layer: GlobalLayer = "sdm",
    *,
    lr: float | None = None,
    steps: int = 600,
    seed: int = 0,
    batch_size: int = 4,
    sequence_length: int = 1024,
) -> TrainConfig:
    """A few pairs hidden in a long row of filler, asked for at its end; minutes on a laptop."""
    data = NeedleConfig(sequence_length=sequence_length, batch_size=batch_size, seed=seed)
    return replace(recall(global_layer, lr=lr, steps=steps, seed=seed), data=data)


MQAR_EPOCHS = 32
MAD_EPOCHS = 200
LAST_RATE = 1e-6
HELD_OUT_EXAMPLES = 1280


def mqar(global_layer: GlobalLayer = "sdm", *, lr: float = 10**-2.5, seed: int = 0) -> TrainConfig:
    """Zoology's MQAR, at its published settings, on a small model."""
    data = MQARTaskConfig(seed=seed)
    steps = MQAR_EPOCHS * data.steps_per_epoch
    return replace(
        recall(global_layer, lr=lr, seed=seed),
        data=data,
        schedule=ScheduleConfig(steps=steps, warmup=0, decay=steps, shape="cosine"),
        compute=ComputeConfig(accumulation=4),
        checkpoint=CheckpointConfig(),
        monitor=MonitorConfig(validate_every=data.steps_per_epoch, validation_batches=2 * len(data.test_segments)),
        guard=GuardConfig(),
    )


def mad(task: MADTask = "in-context-recall", *, lr: float = 5e-4, seed: int = 0) -> TrainConfig:
    """A task of MAD at its published settings, on a small model."""
    data = MADTaskConfig(task, seed=seed)
    steps = MAD_EPOCHS * math.ceil(data.examples / data.batch_size)
    return replace(
        recall(seed=seed),
        data=data,
        optim=OptimConfig(lr=lr, betas=(0.9, 0.999), weight_decay=0.0),
        schedule=ScheduleConfig(steps=steps, warmup=0, decay=steps, shape="cosine", final=LAST_RATE / lr),
        compute=ComputeConfig(),
        checkpoint=CheckpointConfig(),
        monitor=MonitorConfig(validation_batches=HELD_OUT_EXAMPLES // data.batch_size),
        guard=GuardConfig(),
    )


VOCABULARY = {2: 1152, 3: 2176}  # by the digits of a token: about as many tokens are left for words
RETRIEVAL_DEVIATIONS = (
    "d = 64, four blocks (local, local, global, local) and a window of 12 instead of the ladder; 2,176 tokens of "
    "vocabulary with numbers in groups of three digits",
    "trained on retrieval tasks of RULER's kind (other keys and haystacks, RULER's phrasing in half of the rows) "
    "instead of text; the loss is that of answers",
    "keys of SDM and GDN come from the previous token (a shift), and GDN has no short convolution then; W_q starts "
    "equal to W_k",
    "decay rates A of SDM and GDN start below 0.016 instead of 16: slow decay; SDM has N = 1024, W = R = 16",
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
    dense: float = 0.3,
    digits: int = 3,
    largest_decay_rate: float = 0.016,
) -> TrainConfig:
    """Retrieval tasks in text, of RULER's kind: numbers hidden in noise and sentences; minutes on a laptop."""
    aided = global_layer != "full_attention"
    model = ModelConfig(
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
        largest_decay_rate=largest_decay_rate,
        tie_word_embeddings=True,
    )
    data = RetrievalConfig(
        sequence_length=sequence_length,
        start_length=start_length,
        tracking=tracking,
        dense=dense,
        tokenizer=f"bpe:{VOCABULARY[digits]}",
        digits=digits,
        batch_size=max(1, 4096 // sequence_length),
        seed=seed,
    )
    schedule = ScheduleConfig(steps=steps, warmup=40, final=0.02)
    return _task_run(model, data, OptimConfig(lr=lr), schedule, seed, 200, 20, 100)


# Of the models of facts.
WIDTH, SLOTS, HIDDEN, BLOCKS = 32, 1024, 32, 3
# A gated MLP has three matrices of WIDTH x its hidden size.
WIDER = SLOTS * WIDTH // (3 * WIDTH * BLOCKS)

FACTS_DEVIATIONS = (
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
    model = ModelConfig(
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
    )
    data = FactsConfig(num_facts=num_facts, seed=seed)
    optim = OptimConfig(lr=lr, initial_state_lr=initial_state_lr, weight_decay=0.0)
    return _task_run(model, data, optim, ScheduleConfig(steps=steps, warmup=40), seed, 600, 50, 200)
