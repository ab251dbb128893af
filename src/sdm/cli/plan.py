"""`sdm plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sdm.cli.command import Command
from sdm.cli.display import show
from sdm.errors import UserError


@dataclass(frozen=True)
class Plan(Command):
    """Say which meshes of GPUs a level of the ladder can be trained on: memory, traffic and time, by estimate."""

    level: int = 13
    """Level of the ladder."""
    global_layer: str = "sdm"
    """As in the model's configuration."""
    gpus: int = 256
    """How many there are."""
    gpu: Literal["a100", "h100", "h200", "mi300x"] = "h100"
    """Which."""
    sequence_length: int = 8192
    """Tokens of a row."""
    batch_tokens: int = 2**21
    """Tokens of a step."""
    rows: int = 1
    """Rows that a rank computes at a time."""
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    """Of matrix products and activations."""
    checkpointing: Literal["block", "none"] = "block"
    """What backward computes again."""
    keep_weights: bool = False
    """Keep the weights of a block from forward to backward, as `compute.mesh.keep_weights` does."""
    shown: int = 8
    """Meshes to show of those that fit, fastest first, and as many of those that do not."""

    def run(self) -> None:
        from sdm.analysis.plan_table import plan_tables
        from sdm.reproduce.plan import plans

        for name in ("gpus", "sequence_length", "batch_tokens", "rows", "shown"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.batch_tokens < self.sequence_length:
            raise UserError(
                f"--batch-tokens = {self.batch_tokens} is less than one row of --sequence-length = "
                f"{self.sequence_length}; raise it"
            )
        made = plans(
            self.level,
            self.global_layer,
            self.gpus,
            self.gpu,
            self.sequence_length,
            self.batch_tokens,
            self.rows,
            self.precision,
            self.checkpointing,
            self.keep_weights,
        )
        show(*plan_tables(made, self.shown))
