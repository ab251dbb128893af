"""What a memory does: gates, slots in use and how evenly, added up over tokens on their way through a layer.

Every SDM layer shows what it tells its memory about the tokens (`SparseDeltaMemory.observer`): nothing is computed a
second time, and the slots are those that were in fact written and read.

Shapes: B batch, T time, H heads, W writes, R reads, N slots, A accesses.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from sdm.layers.sparse_delta_memory import SparseDeltaMemory
from sdm.ops.sparse_delta_rule.inputs import Tokens


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Look without leaving a trace: in training, batch normalisation learns from whatever passes through it."""
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in training.items():
            part.training = mode


@contextlib.contextmanager
def observed(model: nn.Module, see: Callable[[SparseDeltaMemory, Tokens], None]) -> Iterator[None]:
    """Show the tokens [B,T,H,...] of every SDM layer of a model to `see`, in the forward passes in this block."""
    before = {layer: layer.observer for layer in sdm_layers(model).values()}
    for layer in before:
        layer.observer = partial(see, layer)
    try:
        yield
    finally:
        for layer, observer in before.items():
            layer.observer = observer


def sdm_layers(model: nn.Module) -> dict[str, SparseDeltaMemory]:
    """The SDM layers of a model by their names in it, in its order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseDeltaMemory)}


@dataclass
class Gate:
    """The numbers of a gate, added up: their smallest, sum and largest, and how many."""

    low: Tensor
    total: Tensor
    high: Tensor
    count: float = 0

    @classmethod
    def of_none(cls, device: torch.device) -> Gate:
        """Return the statistics of no values."""
        low, high = (torch.tensor(x, device=device) for x in (math.inf, -math.inf))
        return cls(low, torch.zeros((), dtype=torch.float64, device=device), high)

    def add(self, gate: Tensor) -> None:
        """Add the values of a gate."""
        self.low, self.high = torch.minimum(self.low, gate.min()), torch.maximum(self.high, gate.max())
        self.total = self.total + gate.double().sum()
        self.count += gate.numel()


@dataclass
class LayerStatistics:
    """Sums over the tokens of one layer; they stay on its device until the result is asked for."""

    tokens: float = 0
    gates: dict[str, Gate] = field(default_factory=dict)
    strength_HN: dict[str, Tensor] = field(default_factory=dict)
    """How often, or how strongly, each slot was "written" and "read"."""
    used_HN: dict[str, Tensor] = field(default_factory=dict)
    """Whether it was at all."""

    @classmethod
    def of_layer(cls, layer: SparseDeltaMemory, device: torch.device) -> LayerStatistics:
        """Return the statistics of a layer before its first token."""
        size, names = (layer.num_heads, layer.num_slots), ("written", "read")
        return cls(
            gates={name: Gate.of_none(device) for name in ("forget_gate", "input_gate")},
            strength_HN={name: torch.zeros(size, dtype=torch.float64, device=device) for name in names},
            used_HN={name: torch.zeros(size, dtype=torch.bool, device=device) for name in names},
        )

    def add(self, tokens: Tokens, weighted: bool = False) -> None:
        """Add tokens without a batch dimension, [T,H,...]. With `weighted` an access counts by its strength, the weight
        of a read or the weight of a write times its input gate, instead of as one."""
        if not len(tokens.beta):
            return
        self.tokens += len(tokens.beta)
        self.gates["forget_gate"].add(tokens.log_decay.float().exp())
        self.gates["input_gate"].add(tokens.beta.float())
        written = tokens.write_weight.abs() * tokens.beta.unsqueeze(-1)
        self._access("written", tokens.write_index, written if weighted else None)
        self._access("read", tokens.read_index, tokens.read_weight.abs() if weighted else None)

    def _access(self, name: str, index_THA: Tensor, strength_THA: Tensor | None) -> None:
        heads, slots = self.used_HN[name].shape
        first_H1 = torch.arange(heads, device=index_THA.device).unsqueeze(-1) * slots
        place = (index_THA.long() + first_H1).flatten()
        strength = torch.ones_like(place) if strength_THA is None else strength_THA.flatten()
        self.strength_HN[name].view(-1).index_add_(0, place, strength.double())
        self.used_HN[name].view(-1)[place] = True

    def result(self) -> dict[str, float]:
        """Summarise as numbers: ranges and means of the gates, use and entropy of the slots."""
        result: dict[str, float] = {"tokens": self.tokens}
        for name, gate in self.gates.items():
            mean = float(gate.total) / max(gate.count, 1)
            result |= {f"{name}_min": float(gate.low), f"{name}_mean": mean, f"{name}_max": float(gate.high)}
        for name, strength in self.strength_HN.items():
            result[f"slots_{name}"] = float(self.used_HN[name].double().mean())
            result[f"entropy_{name}"] = normalized_entropy(strength)
        return result


def normalized_entropy(strength_HN: Tensor) -> float:
    """The entropy of the distribution of accesses over the slots of a head, as a share of the largest possible; the
    mean over the heads."""
    slots = strength_HN.shape[-1]
    total_H1 = strength_HN.double().sum(-1, keepdim=True)
    probability = strength_HN / torch.where(total_H1 > 0, total_H1, 1.0)
    entropy = -torch.xlogy(probability, probability).sum(-1).mean()
    return float(entropy) / math.log(slots) if slots > 1 else 0.0
