"""The configuration of a training run. An invalid value fails at construction and names its field."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from sdm.data.config import CorpusConfig, DataConfig, TextConfig, open_data
from sdm.errors import TrainingError, check_not_negative, check_positive, check_size
from sdm.models.layer_types import LAYER_TYPES
from sdm.models.model_config import ModelConfig
from sdm.run.mesh import MeshConfig

UNKNOWN_VOCABULARY = 1024  # of text that is not tokenised yet
LARGEST_STEPS = 10**9  # at a step a second, thirty years
LARGEST_THREADS = 1024  # far more end the process, without a word, where they cannot be started


@dataclass(frozen=True)
class OptimConfig:
    """AdamW. The betas and the clipping are the paper's; where it is silent, the defaults are this project's."""

    lr: float = 1e-3
    """Learning rate at its highest. The paper's, one a level, are in the recipes of its ladder."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the two moments (the paper's)."""
    eps: float = 1e-8
    """Added to the root of the second moment (ours)."""
    weight_decay: float = 0.1
    """Of the weight matrices; gates, norms, biases and decay rates have none (value and exemptions are ours)."""
    initial_state_lr: float | None = None
    """Learning rate of the learned initial states M0; None: lr."""
    initial_state_decay: float = 0.0
    """Weight decay of the learned initial states (ours)."""
    clip: float = 1.0
    """Largest norm of the gradient; a longer one is shortened to it (the paper's)."""

    def __post_init__(self) -> None:
        check_positive("optim", lr=self.lr, eps=self.eps, clip=self.clip)
        if self.initial_state_lr is not None:
            check_positive("optim", initial_state_lr=self.initial_state_lr)
        check_not_negative("optim", weight_decay=self.weight_decay, initial_state_decay=self.initial_state_decay)
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise TrainingError(f"optim.betas must be at least 0 and below 1, got {self.betas}")


@dataclass(frozen=True)
class ScheduleConfig:
    """Warmup-Stable-Decay: up in a straight line, level, down at the end.

    The paper names the schedule; its lengths and the shape of the decay are this project's choices.
    """

    steps: int = 1000
    """Steps of the whole run."""
    warmup: int | None = None
    """Steps until the learning rate is at its highest; None: a twentieth of the steps."""
    decay: int | None = None
    """Steps of the decay at the end; None: a fifth of the steps."""
    shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """How the learning rate falls: in a line, as half a cosine, or as 1 - sqrt of the way."""
    final: float = 0.0
    """What is left of the learning rate at the end, as a share of the highest."""

    def __post_init__(self) -> None:
        _check_at_most("schedule", LARGEST_STEPS, steps=self.steps)
        check_positive("schedule", steps=self.steps)
        check_not_negative("schedule", warmup=self.warmup_steps, decay=self.decay_steps)
        if self.warmup_steps + self.decay_steps > self.steps:
            raise TrainingError(
                f"schedule.warmup = {self.warmup_steps} and schedule.decay = {self.decay_steps} do not fit into "
                f"schedule.steps = {self.steps}"
            )
        if not 0 <= self.final <= 1:
            raise TrainingError(f"schedule.final must be between 0 and 1, got {self.final}")

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up."""
        return self.steps // 20 if self.warmup is None else self.warmup

    @property
    def decay_steps(self) -> int:
        """Steps of the decay."""
        return self.steps // 5 if self.decay is None else self.decay

    @property
    def decay_start(self) -> int:
        """Steps before the decay. Their learning rates do not depend on the number of steps that follow."""
        return self.steps - self.decay_steps

    def resolved(self) -> ScheduleConfig:
        """Return the same schedule with its defaults written out."""
        return replace(self, warmup=self.warmup_steps, decay=self.decay_steps)

    def scaled(self, steps: int) -> ScheduleConfig:
        """Return a longer or shorter schedule in which warmup and decay keep their shares of the steps."""
        check_positive("schedule", steps=steps)
        lengths = (None if length is None else length * steps // self.steps for length in (self.warmup, self.decay))
        warmup, decay = lengths
        return replace(self, steps=steps, warmup=warmup, decay=decay)

    def extended(self, steps: int) -> ScheduleConfig:
        """Return a longer schedule with the same warmup, in which the decay keeps its share of the steps."""
        if steps < self.steps:
            raise TrainingError(f"extend: the run has {self.steps} steps already, got {steps}; give the new total")
        return replace(self.scaled(steps).resolved(), warmup=self.warmup_steps)


@dataclass(frozen=True)
class ComputeConfig:
    """How a step is computed."""

    device: str = "auto"
    """"cpu", "cuda", ...; "auto" takes a GPU if there is one."""
    threads: int | None = None
    """Threads of the CPU; None: torch's choice. It changes rounding, and with it the exact course of a run."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 multiplies matrices in 16 bits (autocast); weights, gates and states stay in float32."""
    accumulation: int = 1
    """Pieces that the rows of a batch are cut into; their gradients are added up before a step. Ranks share them: each
    computes no more rows at a time than one process would."""
    checkpointing: Literal["none", "block", "segment"] = "none"
    """What is computed again in backward instead of kept: nothing; each block but its input; or stretches of time,
    of which only the states in between are kept (for models without full attention and data that is not packed)."""
    segment_length: int = 8192
    """Tokens of a stretch with checkpointing = "segment"."""
    compile: bool = False
    """Run the blocks through torch.compile, which helps on GPUs."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """How the processes that torchrun started share the work."""

    def __post_init__(self) -> None:
        check_positive("compute", accumulation=self.accumulation, segment_length=self.segment_length)
        if self.threads is not None:
            _check_at_most("compute", LARGEST_THREADS, threads=self.threads)
            check_positive("compute", threads=self.threads)
        if self.compile and self.checkpointing == "segment":
            raise TrainingError('compute.compile cannot be combined with compute.checkpointing = "segment"')


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and how much to keep."""

    every: int = 500
    """Steps between two checkpoints; the last step is always saved."""
    keep: int = 2
    """How many of the newest checkpoints to keep. The one at the start of the decay is kept besides: from it a finished
    run can be extended."""

    def __post_init__(self) -> None:
        check_positive("checkpoint", every=self.every, keep=self.keep)


@dataclass(frozen=True)
class MonitorConfig:
    """What to measure and where to show it. metrics.jsonl is always written."""

    log_every: int = 10
    """Steps between two lines of metrics."""
    memory_every: int = 50
    """Steps between two statistics of gates and slots; 0: at the end only."""
    memory_tokens: int | None = None
    """Tokens that such a statistic rests on, of as many steps as have them; the paper's are 20971520, 10 steps of 2^21.
    None: those of one step, at most 16384."""
    memory_weighted: bool = False
    """Count accesses to slots by their strength in the entropies, instead of as one each."""
    validate_every: int = 250
    """Steps between two measurements on held-out data; 0: at the end only."""
    validation_batches: int = 8
    """Batches of a measurement; 0: never measure."""
    sample_every: int = 0
    """Steps between two samples of what the model writes, printed among the messages; 0: none. Needs text as data and
    a single process."""
    display: Literal["auto", "live", "plain", "none"] = "auto"
    """A live display, plain lines, or nothing; "auto" is live on a terminal and plain elsewhere."""
    tensorboard: bool = False
    """Also write TensorBoard events."""
    wandb: str | None = None
    """Also send the metrics to this Weights & Biases project."""

    def __post_init__(self) -> None:
        check_positive("monitor", log_every=self.log_every)
        if self.memory_tokens is not None:
            check_positive("monitor", memory_tokens=self.memory_tokens)
        check_not_negative(
            "monitor",
            memory_every=self.memory_every,
            validate_every=self.validate_every,
            validation_batches=self.validation_batches,
            sample_every=self.sample_every,
        )


@dataclass(frozen=True)
class GuardConfig:
    """When to stop by itself."""

    spike: float = 3.0
    """A loss is a spike when it exceeds the recent mean by so many times the distance that half of the recent losses
    keep from it, by half, and by half a nat; 0 turns the guard off."""
    patience: int = 20
    """Spikes in a row that stop the run: a single bad batch does not."""
    check_memory: bool = True
    """Refuse to start what will not fit into memory by estimate."""

    def __post_init__(self) -> None:
        check_not_negative("guard", spike=self.spike)
        check_positive("guard", patience=self.patience)


@dataclass(frozen=True)
class AdaptConfig:
    """How a causal LM of transformers is trained, in the place of a model of this library: `sdm.run.adapted_model`."""

    base: Path | None = None
    """Folder of the pretrained model, or of a run that trained it."""
    scratch: dict[str, bool | int | float | str] | None = None
    """Instead of a folder: fields of a transformers configuration, model_type among them; such a model is trained from
    random weights."""
    method: Literal["graft", "lora", "full"] = "graft"
    """graft: memories in parallel to attention (sdm.graft); lora: PEFT's adapters on all linear layers; full: the
    weights of the base."""
    layers: tuple[int, ...] | None = None
    """Blocks that get a memory; None: the one in the middle."""
    memory: Literal["sdm", "gdn"] = "sdm"
    """Kind of the memories; gdn: a gated delta net to compare with."""
    num_heads: int | None = None
    """Heads of a memory; None: one for 256 channels."""
    num_slots: int | None = None
    """Slots per head; None: (channels of a head / 4)^2, at least 1024."""
    num_writes: int | None = None
    """Slots that a token writes; None: half of sqrt(num_slots)."""
    num_reads: int | None = None
    """Slots that a token reads; None: as num_writes."""
    learned_initial_state: bool = True
    """Start the memories from a learned table M0 instead of zeros."""
    key_convolution: int = 4
    """Taps of the convolution that keys come from, which starts as the token before; 0: none (ours)."""
    tie_query_initialization: bool = True
    """Start with W_q equal to W_k (ours)."""
    norm_eps: float = 1.0
    """Added to the mean square of what a head reads before it is normalised; at 1, small readings stay small (ours)."""
    attention_window: int | None = None
    """Limit full attention to so many tokens; None: leave it as it is."""
    attention_sinks: int = 0
    """First tokens of a stream that windowed attention sees too."""
    freeze_base: bool = True
    """Train the memories only."""
    base_lr: float | None = None
    """Learning rate of the base's weights beside memories, if they are not frozen; None: optim.lr."""
    lora_rank: int = 8
    """Rank of LoRA; its alpha is twice the rank."""
    distill: float = 0.0
    """Weight of the divergence (KL) from the base, on the first distill_tokens tokens of a row; 0: none."""
    distill_tokens: int = 256
    """Tokens of a row for which the base has context enough to be a teacher."""

    def __post_init__(self) -> None:
        check_not_negative("adapt", distill=self.distill)
        check_size("adapt", lora_rank=self.lora_rank, distill_tokens=self.distill_tokens)
        if self.base_lr is not None:
            check_positive("adapt", base_lr=self.base_lr)
        if self.base is not None and self.scratch is not None:
            raise TrainingError("adapt.base and adapt.scratch exclude each other: a folder, or a model made anew")
        if self.distill and self.method != "graft":
            raise TrainingError('adapt.distill needs adapt.method = "graft": the teacher is the base without memories')


@dataclass(frozen=True)
class TrainConfig:
    """A run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=CorpusConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    seed: int = 0
    """Of the initialisation."""
    init_from: Path | None = None
    """A run's or a model's folder to take the weights from; the sizes must be those of `model`."""
    adapt: AdaptConfig | None = None
    """Train a causal LM of transformers instead of `model`, which is not used then: see the recipe graft."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64:
            raise TrainingError(f"seed must be at least 0 and below 2^64, got {self.seed}")
        if self.data.batch_size % self.compute.accumulation:
            raise TrainingError(
                f"data.batch_size = {self.data.batch_size} must be divisible by compute.accumulation = "
                f"{self.compute.accumulation}"
            )
        layout = self.data.layout if isinstance(self.data, CorpusConfig) else "rows"
        if self.adapt is not None:
            self._check_adapted(self.adapt, layout)
            return
        segments = self.compute.checkpointing == "segment"
        if segments and layout == "packed":
            raise TrainingError('compute.checkpointing = "segment" needs data.layout "rows" or "stream", got "packed"')
        if segments or layout == "stream":
            what = 'compute.checkpointing = "segment"' if segments else 'data.layout = "stream"'
            for kind in self.unbounded_layers():
                raise TrainingError(f"{what} carries states on, and that of {kind} grows with every token")
        if layout == "stream" and self.compute.checkpointing == "block":
            raise TrainingError('data.layout = "stream" takes compute.checkpointing "none" or "segment", got "block"')

    def _check_adapted(self, adapt: AdaptConfig, layout: str) -> None:
        compute = self.compute
        if compute.checkpointing == "segment" or compute.compile:
            what = "compute.compile" if compute.compile else 'compute.checkpointing = "segment"'
            raise TrainingError(f"{what} is for models of this library; leave it out with adapt")
        if (compute.mesh.data or 1) * compute.mesh.context * compute.mesh.channel > 1:
            raise TrainingError("compute.mesh: a run with adapt is one process; for several, use transformers.Trainer")
        if layout == "stream" and adapt.method != "graft":
            raise TrainingError(
                f'data.layout = "stream" carries the states of memories on, and adapt.method = {adapt.method!r} has '
                'none; take data.layout = "rows"'
            )
        if layout == "stream" and compute.checkpointing == "block":
            raise TrainingError('data.layout = "stream" takes compute.checkpointing "none" with adapt, got "block"')
        if self.init_from is not None:
            raise TrainingError("init_from is for models of this library; with adapt, the weights come from adapt.base")

    def data_sizes(self) -> tuple[int, int]:
        """Return the sequence length and the vocabulary size of the data, without opening text."""
        if isinstance(self.data, TextConfig):
            _, is_trained, size = self.data.tokenizer.partition("bpe:")
            vocabulary = int(size) if is_trained and size.isdecimal() else UNKNOWN_VOCABULARY
            return self.data.sequence_length, self.model.vocab_size or vocabulary
        task = open_data(self.data, "train", self.schedule.steps)
        return task.sequence_length, task.vocab_size

    def unbounded_layers(self) -> list[str]:
        """Return the layer types whose state grows with every token, so that no stream can carry it."""
        kinds = self.model.build(self.model.vocab_size or 256).layer_types or []
        return [kind for kind in kinds if not LAYER_TYPES[kind].bounded_state]


def _check_at_most(section: str, largest: int, **values: int) -> None:
    for name, value in values.items():
        if value > largest:
            raise TrainingError(f"{section}.{name} must be at most {largest}, got {str(value)[:40]}")
