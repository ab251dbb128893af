"""Estimate of a run's memory, before it starts: a run that cannot fit is refused at once."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from sdm.data.batch import BatchSource
from sdm.errors import TrainingError
from sdm.models import SDMConfig, cost
from sdm.ops.checks import available_memory
from sdm.run.config import TrainConfig
from sdm.run.mesh import ONE, Mesh

GIGABYTE = 10**9
INTERPRETER = 0.4 * GIGABYTE  # torch, transformers and the data that is mapped in


@dataclass(frozen=True)
class Estimate:
    """Bytes and FLOPs of a run."""

    weights: float  # weights, gradients and both moments
    activations: float  # of the rows that are computed together
    tokens: int  # of the whole run
    flops: float  # of the whole run
    available: float  # bytes of memory that are free

    @property
    def memory(self) -> float:
        """Bytes of the process."""
        return INTERPRETER + self.weights + self.activations

    def describe(self) -> str:
        """Return the estimate in words."""
        return (
            f"about {self.memory / GIGABYTE:.2f} GB of {self.available / GIGABYTE:.1f} GB of free memory "
            f"({self.weights / GIGABYTE:.2f} GB weights and moments, {self.activations / GIGABYTE:.2f} GB "
            f"activations), {self.tokens:,} tokens, {self.flops:.2e} FLOPs"
        )


def estimate(
    config: TrainConfig, model: SDMConfig, data: BatchSource, device: torch.device, mesh: Mesh = ONE
) -> Estimate:
    """Estimate one process of a mesh. On a CPU the processes of one machine share its memory."""
    costs = cost(model)
    length = data.sequence_length
    rows = min(math.ceil(data.batch_size / config.compute.accumulation), math.ceil(data.batch_size / mesh.data))
    here = 1 if device.type == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    tokens = data.batch_size * length * config.schedule.steps
    split = mesh.context * mesh.channel
    parameters = costs.parameters + costs.initial_state_parameters / mesh.channel
    gathered = 4 * parameters if config.compute.mesh.keep_weights and mesh.shards > 1 else 0
    return Estimate(
        weights=16 * parameters / mesh.shards + gathered,
        activations=_activations(config, model, rows, math.ceil(length / mesh.context), split),
        tokens=tokens,
        flops=float(tokens) * costs.training_flops_per_token(length),
        available=available_memory(device) / here,
    )


def check(config: TrainConfig, model: SDMConfig, data: BatchSource, device: torch.device, mesh: Mesh = ONE) -> str:
    """Return the estimate in words.

    Raises:
        TrainingError: the run needs more memory than is free.
    """
    needs = estimate(config, model, data, device, mesh)
    if config.guard.check_memory and needs.memory > needs.available:
        raise TrainingError(
            f"this run needs {needs.describe()}. Lower data.batch_size or "
            f"data.sequence_length, raise compute.accumulation, or set compute.checkpointing; guard.check_memory = "
            f"False starts it nevertheless"
        )
    return needs.describe()


def _activations(config: TrainConfig, model: SDMConfig, rows: int, length: int, split: int) -> float:
    """Elements that one token leaves behind for backward, times four bytes, times the tokens computed together.

    The factors are those of the layers as they are written, rounded up: what a block's norms, projections, mixing and
    MLP keep. A recurrent table is held a few times per row: the running one, the final one, and both their gradients;
    `split` ranks share it.
    """
    width, inner = model.hidden_size, model.intermediate_size or 0
    blocks = len(model.layer_types or ())
    block = 16 * width + 5 * inner
    tables = 4.0 * rows * cost(model).state_elements * 4 / split
    tokens = float(rows * length)
    logits = 3.0 * (model.loss_chunk_size or tokens) * model.vocab_size
    mode = config.compute.checkpointing
    if mode == "segment":
        segment = float(rows * min(length, config.compute.segment_length))
        borders = -(-length // config.compute.segment_length) * rows
        between = borders * (cost(model).state_elements + cost(model).window_elements)
        return 4 * (segment * (blocks * block + 4 * width) + between + logits) + tables
    kept = blocks * width + block if mode == "block" else blocks * block
    return 4 * (tokens * (kept + 4 * width) + logits) + tables
