"""Estimate of a run's duration, before it starts, by timing pieces of its own steps."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from sdm.data.batch import Batch, BatchSource
from sdm.models import SDMForCausalLM, cost
from sdm.ranks import ALONE, Ranks
from sdm.run.config import TrainConfig
from sdm.training.parallel import local

# Where the run is sampled, as shares of its steps: curricula make later steps longer.
PLACES = (0.1, 0.3, 0.5, 0.7, 0.9)
FLOPS = 1e11  # of one piece, seconds on a laptop: a longer piece is shortened
PATIENCE = 3.0  # seconds: a longer piece is not timed again
# The cores are taken by others where more processes than cores want to run, and this one waits for a good part of the
# time. Each alone says little: a load average is a minute old, and a thread also waits for others of its own process.
BUSY_LOAD, BUSY_SHARE = 1.25, 0.75

logger = logging.getLogger(__name__)


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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
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
