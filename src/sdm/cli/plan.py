"""`sdm plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sdm.cli.command import Command
from sdm.cli.display import show, show_json
from sdm.errors import UserError

# Beyond these a plan means nothing: no machine is as large, and sizes no longer fit into 64 bits.
LARGEST = {
    "gpus": 10**6,
    "sequence_length": 2**27,
    "batch_tokens": 2**36,
    "rows": 2**20,
    "shown": 10**6,
}


@dataclass(frozen=True)
class Plan(Command):
    """Estimate memory, traffic and time of training a level of the ladder on GPUs, for every mesh that works."""

    level: int = 13
    """Level of the ladder."""
    global_layer: str = "sdm"
    """Layer type of the global layers, as in the model's configuration."""
    gpus: int = 256
    """Number of GPUs."""
    gpu: Literal["a100", "h100", "h200", "mi300x"] = "h100"
    """Kind of GPU."""
    sequence_length: int = 8192
    """Tokens of a row."""
    batch_tokens: int = 2**21
    """Tokens of a step."""
    rows: int = 1
    """Rows that a rank computes at a time."""
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of matrix products and activations."""
    checkpointing: Literal["block", "none"] = "block"
    """What backward recomputes."""
    keep_weights: bool = False
    """Keep the weights of a block from forward to backward, as `compute.mesh.keep_weights` does."""
    shown: int = 8
    """Meshes to show of those that fit, fastest first, and as many of those that do not."""
    json: bool = False
    """Print all meshes as JSON instead of tables."""

    def run(self) -> None:
        """Print the tables."""
        for name, largest in LARGEST.items():
            if not 1 <= getattr(self, name) <= largest:
                raise UserError(
                    f"--{name.replace('_', '-')} must be between 1 and {largest:,}, got {getattr(self, name)}"
                )
        if self.batch_tokens < self.sequence_length:
            raise UserError(
                f"--batch-tokens = {self.batch_tokens} is less than one row of --sequence-length = "
                f"{self.sequence_length}; raise it"
            )
        if self.rows > self.batch_tokens // self.sequence_length:
            raise UserError(
                f"--rows = {self.rows} is more than the {self.batch_tokens // self.sequence_length} rows of a step of "
                f"--batch-tokens = {self.batch_tokens}; lower it"
            )
        from sdm.analysis.plan_table import plan_rows, plan_tables
        from sdm.reproduce.plan import plans

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
        if self.json:
            show_json(plan_rows(made))
        else:
            show(*plan_tables(made, self.shown))
