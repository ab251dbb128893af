"""AdamW with the parameter groups that this model needs, and its learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

from sdm.models.causal_lm import exempt_from_decay
from sdm.run.config import OptimConfig, ScheduleConfig

INITIAL_STATE = "initial_state"


def make_optimizer(model: nn.Module, config: OptimConfig, adapted_lr: float | None = None) -> torch.optim.AdamW:
    """Return AdamW with three groups: weights with decay, weights without, and learned initial states.

    Each group has `base_lr`, its learning rate at the peak of the schedule.

    Args:
        model: what to train; frozen parameters are left out.
        config: rates and decay.
        adapted_lr: learning rate of what is outside of grafted memories, in two groups of its own; None: config.lr.
    """
    exempt = exempt_from_decay(model)
    names = ("decayed", "exempt", INITIAL_STATE, "base decayed", "base exempt")
    groups: dict[str, list[torch.nn.Parameter]] = {name: [] for name in names}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.endswith(INITIAL_STATE):
            groups[INITIAL_STATE].append(parameter)
        else:
            kind = "exempt" if name in exempt else "decayed"
            outside = adapted_lr is not None and ".memory." not in name
            groups[f"base {kind}" if outside else kind].append(parameter)
    initial_lr = config.lr if config.initial_state_lr is None else config.initial_state_lr
    adapted = config.lr if adapted_lr is None else adapted_lr
    settings = {
        "base decayed": (adapted, config.weight_decay),
        "base exempt": (adapted, 0.0),
        "decayed": (config.lr, config.weight_decay),
        "exempt": (config.lr, 0.0),
        INITIAL_STATE: (initial_lr, config.initial_state_decay),
    }
    return torch.optim.AdamW(
        [
            {
                "name": name,
                "params": members,
                "lr": settings[name][0],
                "base_lr": settings[name][0],
                "weight_decay": settings[name][1],
            }
            for name, members in groups.items()
            if members
        ],
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of every group to a share of its `base_lr`."""
    for group in optimizer.param_groups:
        group["lr"] = factor * group["base_lr"]


def create_moments(optimizer: torch.optim.Optimizer) -> None:
    """Create the moments that AdamW would create at its first step, so that a checkpoint can be loaded into them."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }


def learning_rate_factor(schedule: ScheduleConfig, step: int) -> float:
    """Return the factor of the learning rate at a step, counted from 0, under Warmup-Stable-Decay.

    Neither the first step nor the last is wasted on a rate of zero.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    left = schedule.steps - 1 - step
    if left >= schedule.decay_steps:
        return 1.0
    way = 1 - (max(left, 0) + 1) / schedule.decay_steps
    if schedule.shape == "linear":
        height = 1 - way
    elif schedule.shape == "cosine":
        height = (1 + math.cos(math.pi * way)) / 2
    else:
        height = 1 - math.sqrt(way)
    return schedule.final + (1 - schedule.final) * height
