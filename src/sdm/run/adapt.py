"""How a run trains a causal LM of transformers, as typed settings. `sdm.run.adapted_model` builds the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sdm.errors import TrainingError, check_not_negative, check_positive, check_size


@dataclass(frozen=True)
class AdaptConfig:
    """How a causal LM of transformers is trained, in the place of a model of this library."""

    base: Path | None = None
    """Folder of the pretrained model, or of a run that trained it."""
    scratch: dict[str, bool | int | float | str] | None = None
    """Instead of a folder: fields of a transformers configuration, model_type among them; such a model is trained from
    random weights."""
    method: Literal["graft", "lora", "full"] = "graft"
    """graft: memories in parallel to attention (sdm.graft); lora: PEFT's adapters on all linear layers; full: the
    weights of the base."""
    layers: tuple[int, ...] = (0,)
    """Blocks that get a memory."""
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
