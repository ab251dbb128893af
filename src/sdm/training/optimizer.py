"""AdamW with the groups that this model needs: what is decayed, what is not, and the memory's initial state."""

from __future__ import annotations

import torch

from sdm.models import SDMForCausalLM
from sdm.run.config import OptimConfig

INITIAL_STATE = "initial_state"


def make_optimizer(model: SDMForCausalLM, config: OptimConfig) -> torch.optim.AdamW:
    """Each group carries `base_lr`, its learning rate at the top of the schedule."""
    exempt = model.no_weight_decay()
    groups: dict[str, list[torch.nn.Parameter]] = {"decayed": [], "exempt": [], INITIAL_STATE: []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.endswith(INITIAL_STATE):
            groups[INITIAL_STATE].append(parameter)
        else:
            groups["exempt" if name in exempt else "decayed"].append(parameter)
    initial_lr = config.lr if config.initial_state_lr is None else config.initial_state_lr
    settings = {
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
    for group in optimizer.param_groups:
        group["lr"] = factor * group["base_lr"]


def start_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the moments that AdamW gives it at its first step, for a checkpoint to fill."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
