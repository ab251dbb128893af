"""Estimates of a run before it starts: its memory, so that a run that cannot fit is refused at once, and its duration,
by timing pieces of its own steps.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sdm.data.batch import Batch, BatchSource
from sdm.errors import TrainingError
from sdm.models import SDMConfig, SDMForCausalLM, cost
from sdm.ops.checks import available_memory
from sdm.ranks import ALONE, Ranks, usable_cores
from sdm.run.config import TrainConfig
from sdm.run.mesh import ONE, Mesh
from sdm.training.parallel import local

GIGABYTE = 10**9
INTERPRETER = 0.4 * GIGABYTE  # torch, transformers and the data that is mapped in
# Where the run is sampled, as shares of its steps: curricula make later steps longer.
PLACES = (0.1, 0.3, 0.5, 0.7, 0.9)
FLOPS = 1e11  # of one piece, seconds on a laptop: a longer piece is shortened
PATIENCE = 3.0  # seconds: a longer piece is not timed again
# The cores are taken by others where more processes than cores want to run, and this one waits for a good part of the
# time. Each alone says little: a load average is a minute old, and a thread also waits for others of its own process.
BUSY_LOAD, BUSY_SHARE = 1.25, 0.75

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryEstimate:
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


def estimate_memory(
    config: TrainConfig, model: SDMConfig, data: BatchSource, device: torch.device, mesh: Mesh = ONE
) -> MemoryEstimate:
    """MemoryEstimate one process of a mesh. On a CPU the processes of one machine share its memory."""
    costs = cost(model)
    length = data.sequence_length
    rows = min(math.ceil(data.batch_size / config.compute.accumulation), math.ceil(data.batch_size / mesh.data))
    here = 1 if device.type == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    tokens = data.batch_size * length * config.schedule.steps
    split = mesh.context * mesh.channel
    parameters = costs.parameters + costs.initial_state_parameters / mesh.channel
    gathered = 4 * parameters if config.compute.mesh.keep_weights and mesh.shards > 1 else 0
    return MemoryEstimate(
        weights=16 * parameters / mesh.shards + gathered,
        activations=_activations(config, model, rows, math.ceil(length / mesh.context), split),
        tokens=tokens,
        flops=float(tokens) * costs.training_flops_per_token(length),
        available=available_memory(device) / here,
    )


def check_memory(
    config: TrainConfig, model: SDMConfig, data: BatchSource, device: torch.device, mesh: Mesh = ONE
) -> str:
    """Return the estimate in words.

    Raises:
        TrainingError: the run needs more memory than is free.
    """
    needs = estimate_memory(config, model, data, device, mesh)
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


def seconds_of_run(
    config: TrainConfig,
    model: nn.Module,
    data: BatchSource,
    loss: Callable[[Batch], Tensor],
    rows: int,
    pieces: int,
    ranks: Ranks = ALONE,
) -> float:
    """Return the seconds of all steps and measurements of a run. Gradients, buffers and random states are restored.

    A warning is logged if other processes take the cores that the run would compute on.

    Args:
        config: of the run.
        model: as it will be trained.
        data: the run's batches.
        loss: computes the loss of one piece of a batch.
        rows: the rows of a piece.
        pieces: pieces of a step on this rank.
        ranks: the processes of the run, which all call this.
    """
    steps = config.schedule.steps
    parameters = next(model.parameters())
    buffers = [x.clone() for x in model.buffers()]
    seconds: dict[torch.Size, float] = {}
    total = 0.0
    wall, computing = time.perf_counter(), time.thread_time()
    with torch.random.fork_rng([parameters.device] if parameters.is_cuda else []):
        for place in PLACES:
            whole = data.batch(int(place * (steps - 1)), range(rows))
            if whole.input_ids.shape not in seconds:
                piece = _cut(whole, model).to(parameters.device)
                share = _flops(model, piece) / _flops(model, whole)
                seconds[whole.input_ids.shape] = _time(lambda piece=piece: loss(piece).backward(), ranks) / share  # type: ignore[misc]
            total += seconds[whole.input_ids.shape] * pieces / len(PLACES)
    if not parameters.is_cuda:
        share = (time.thread_time() - computing) / max(time.perf_counter() - wall, 1e-9)
        if (text := oversubscription(share)) is not None:
            logger.warning(text)
    model.zero_grad(set_to_none=True)
    for x, before in zip(model.buffers(), buffers, strict=True):
        x.copy_(before)
    measured = config.monitor.validation_batches
    if config.monitor.validate_every:
        measured *= steps // config.monitor.validate_every + 1
    # A forward pass is a third of a step.
    return steps * (total + _optimizer_seconds(model)) + measured * total / 3


def about(seconds: float) -> str:
    """Return a duration in words, in the unit that a person would choose."""
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 1.5 * size:
            count = f"{seconds / size:.2g}" if seconds < 10 * size else f"{seconds / size:,.0f}"
            return f"about {count} {unit}"
    return f"about {max(seconds, 1):.0f} seconds"


def oversubscription(share: float) -> str | None:
    """Return a warning if other processes take the cores, and what helps; None if they do not, or if it is unknown.

    Args:
        share: of the wall-clock time, that in which the thread which calls the steps was computing.
    """
    try:
        load = os.getloadavg()[0]
    except (OSError, AttributeError):  # not every system has one
        return None
    cores = usable_cores()
    if load <= BUSY_LOAD * cores or share >= BUSY_SHARE:
        return None
    return (
        f"the machine is oversubscribed: load average {load:.1f} on {cores} cores, and steps compute for {share:.0%} "
        "of the time only. The estimate holds while that lasts; --compute.threads 1 may be faster until the cores are "
        "free"
    )


def _cut(batch: Batch, model: nn.Module) -> Batch:
    """As many rows, then as many tokens of one, as take about `FLOPS`."""
    tokens = max(64, int(FLOPS * batch.num_tokens / _flops(model, batch)))
    if tokens >= batch.num_tokens:
        return batch
    rows, length = max(1, tokens // batch.input_ids.shape[1]), min(tokens, batch.input_ids.shape[1])
    bounds = batch.cu_seqlens
    if bounds is not None:
        bounds = torch.cat([bounds[bounds < length], bounds.new_tensor([length])])
    reset = None if batch.reset is None else batch.reset[:rows]
    return Batch(batch.input_ids[:rows, :length], batch.targets[:rows, :length], bounds, reset)


def _flops(model: nn.Module, batch: Batch) -> float:
    """Of packed documents, as if each had the mean length."""
    length = batch.input_ids.shape[1]
    if batch.cu_seqlens is not None:
        length = max(1, length // (len(batch.cu_seqlens) - 1))
    if not isinstance(model, SDMForCausalLM):
        return 6.0 * batch.num_tokens * sum(x.numel() for x in model.parameters())
    return float(batch.num_tokens) * cost(model.config).training_flops_per_token(length)


def _time(run: Callable[[], None], ranks: Ranks) -> float:
    """Seconds of the second and third call: the first one also sets up what the others use."""
    first = ranks.sum(_elapsed(run))[0] / ranks.size  # ranks must agree on what follows
    return first if first > PATIENCE else (_elapsed(run) + _elapsed(run)) / 2


def _elapsed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _optimizer_seconds(model: nn.Module) -> float:
    """Seconds of AdamW and of clipping, by a sample of the parameters."""
    total, taken, sample = sum(x.numel() for x in model.parameters()), 0, []
    for x in model.parameters():
        if taken < 2**22:
            part = local(x).detach().flatten()[: 2**22]
            sample.append(nn.Parameter(torch.zeros_like(part)))
            taken += part.numel()
    optimizer = torch.optim.AdamW(sample)

    def step() -> None:
        for x in sample:
            x.grad = torch.zeros_like(x)
        nn.utils.clip_grad_norm_(sample, 1.0)
        optimizer.step()

    return _time(step, ALONE) * total / taken
