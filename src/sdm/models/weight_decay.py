"""Which parameters weight decay would harm, for every optimizer.

Decay pulls towards zero. That is right for matrices, and wrong for what has a meaning at another value: norms (one),
biases, decay rates, Mamba2's skip, the projections of the gates, and the memory's initial state, which holds content
rather than weights.
"""

from __future__ import annotations

import functools

from torch import nn
from transformers import Trainer

_EXEMPT_MATRICES = ("initial_state", "beta_proj.weight", "decay_proj.weight")


def exempt_from_decay(model: nn.Module) -> set[str]:
    """Names of the parameters of `model` that are not to be decayed."""
    return {name for name, x in model.named_parameters() if x.dim() < 2 or name.endswith(_EXEMPT_MATRICES)}


def teach_trainer(kind: type[nn.Module]) -> None:
    """Let `transformers.Trainer` exempt them, in models of this kind and in wrappers of them (peft).

    Its own rule knows norms and biases by name and asks no model.
    """
    rule = Trainer.get_decay_parameter_names

    @functools.wraps(rule)
    def get_decay_parameter_names(self: Trainer, model: nn.Module) -> list[str]:
        ours = [(path, module) for path, module in model.named_modules() if isinstance(module, kind)]
        exempt = {f"{path}.{name}".lstrip(".") for path, module in ours for name in exempt_from_decay(module)}
        return [name for name in rule(self, model) if name not in exempt]

    Trainer.get_decay_parameter_names = get_decay_parameter_names  # type: ignore[method-assign]
