"""What the memory does during training: the paper's appendix on gates and slots, from one batch at a time.

The inputs of every SDM layer are caught on their way through the model, and only the gates and addresses of some of
the tokens are computed a second time. Nothing is measured, and nothing costs, in other steps.

Shapes: B batch, T time, H heads, W writes, R reads, N slots.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sdm.layers import SparseDeltaMemory

MAX_TOKENS = 16_384  # of a batch, enough for stable shares at any size of the memory that a test machine holds


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Look without leaving a trace: in training, batch normalisation learns from whatever passes through it."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


class MemoryStatistics:
    """Statistics per SDM layer, and their means over the layers."""

    def __init__(self) -> None:
        self._inputs: dict[SparseDeltaMemory, Tensor] = {}

    @contextlib.contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Catch the inputs of the SDM layers during the forward passes in this block."""
        hooks = [
            module.register_forward_pre_hook(self._catch)
            for module in model.modules()
            if isinstance(module, SparseDeltaMemory)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _catch(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(layer, SparseDeltaMemory)
        self._inputs.setdefault(layer, arguments[0].detach())

    @torch.no_grad()
    def take(self) -> dict[str, float]:
        """The means over the layers of what was caught since the last call; empty if there is no SDM layer."""
        found = [_layer_statistics(layer, x) for layer, x in self._inputs.items()]
        self._inputs.clear()
        if not found:
            return {}
        return {f"memory/{name}": sum(one[name] for one in found) / len(found) for name in found[0]}


def _layer_statistics(layer: SparseDeltaMemory, x_BTC: Tensor) -> dict[str, float]:
    rows = max(1, MAX_TOKENS // x_BTC.shape[1])
    with evaluating(layer):
        tokens = layer.inspect(x_BTC[:rows, :MAX_TOKENS])
    forget, write = tokens.log_decay.float().exp(), tokens.beta.float()
    statistics: dict[str, float] = {}
    for name, gate in (("forget_gate", forget), ("input_gate", write)):
        low, high = gate.aminmax()
        statistics |= {f"{name}_min": float(low), f"{name}_mean": float(gate.mean()), f"{name}_max": float(high)}
    for name, index in (("written", tokens.write_index), ("read", tokens.read_index)):
        entropy, share = slot_use(index, layer.num_slots)
        statistics |= {f"slots_{name}": share, f"entropy_{name}": entropy}
    return statistics


def slot_use(index_BTHW: Tensor, num_slots: int) -> tuple[float, float]:
    """The entropy of the distribution of accesses over the slots of a head, as a share of the largest possible, and the
    share of slots that were accessed at all; means over the heads."""
    entropies, shares = [], []
    for index in index_BTHW.movedim(2, 0).flatten(1).long():
        counts = torch.bincount(index, minlength=num_slots).double()
        probability = counts[counts > 0] / counts.sum()
        entropy = float(-(probability * probability.log()).sum())
        entropies.append(entropy / math.log(num_slots) if num_slots > 1 else 0.0)
        shares.append(len(probability) / num_slots)
    return sum(entropies) / len(entropies), sum(shares) / len(shares)
