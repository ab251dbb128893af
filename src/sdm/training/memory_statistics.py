"""What the memory does during training: the paper's appendix on gates and slots.

Every SDM layer shows what it tells its memory about the tokens on their way through the model: nothing is computed a
second time, and the slots are those that were in fact written and read. Nothing costs in steps that are not watched.

Shapes: B batch, T time, H heads, W writes, R reads, N slots, A accesses.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from sdm.layers import SparseDeltaMemory
from sdm.ops.sparse_delta_rule.inputs import Tokens
from sdm.training.parallel import Parallel

STEP_TOKENS = 16_384  # of a single step: enough for stable shares of memories that a small machine holds


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
    """Statistics per SDM layer, added up over the passes that are watched, and their means over the layers.

    Args:
        max_tokens: how many tokens are looked at until the statistics are taken; later ones are not.
        weighted: count an access by its strength, the weight of a read or the weight of a write times its input gate,
            instead of as one. It changes the entropies; a slot is in use however weakly.
        parallel: the ranks whose tokens count together.
    """

    def __init__(self, max_tokens: int = STEP_TOKENS, weighted: bool = False, parallel: Parallel | None = None) -> None:
        self._max_tokens, self._weighted, self._parallel = max_tokens, weighted, parallel or Parallel()
        self._layers: dict[SparseDeltaMemory, _LayerStatistics] = {}

    @contextlib.contextmanager
    def watch(self, model: nn.Module, count: bool = True) -> Iterator[None]:
        """Look at the forward passes in this block. Backward does not belong in it: it may compute them again. Tokens
        that do not `count` are those of a rank without rows, which takes part in adding up all the same."""
        layers = [module for module in model.modules() if isinstance(module, SparseDeltaMemory)]
        for layer in layers:
            layer.observer = partial(self._see, layer, count)
        try:
            yield
        finally:
            for layer in layers:
                layer.observer = None

    @torch.no_grad()
    def _see(self, layer: SparseDeltaMemory, count: bool, tokens: Tokens) -> None:
        if layer not in self._layers:
            self._layers[layer] = _LayerStatistics(layer, tokens.beta.device)
        seen = self._layers[layer]
        if count and seen.tokens < self._max_tokens:
            left = self._max_tokens - seen.tokens
            seen.add(Tokens(*(x.flatten(0, 1)[:left] for x in tokens)), self._weighted)

    def take(self) -> dict[str, float]:
        """The means over the layers of what was seen since the last call; empty if there is no SDM layer."""
        found = [layer.result(self._parallel) for layer in self._layers.values()]
        self._layers.clear()
        if not found:
            return {}
        return {f"memory/{name}": sum(one[name] for one in found) / len(found) for name in found[0]}


class _LayerStatistics:
    """Sums over the tokens of one layer; they stay on its device until the result is asked for."""

    def __init__(self, layer: SparseDeltaMemory, device: torch.device) -> None:
        size = (layer.num_heads, layer.num_slots)
        self.tokens = 0
        # Smallest, sum, largest.
        self._gates = {name: _extremes_and_sum(device) for name in ("forget_gate", "input_gate")}
        self._num_gates = dict.fromkeys(self._gates, 0)
        self._strength = {name: torch.zeros(size, dtype=torch.float64, device=device) for name in ("written", "read")}
        self._used = {name: torch.zeros(size, dtype=torch.bool, device=device) for name in self._strength}

    def add(self, tokens: Tokens, weighted: bool) -> None:
        """Tokens without a batch dimension, [T,H,...]."""
        self.tokens += len(tokens.beta)
        for name, gate in (("forget_gate", tokens.log_decay.float().exp()), ("input_gate", tokens.beta.float())):
            new = [gate.min(), gate.double().sum(), gate.max()]
            low, total, high = self._gates[name]
            self._gates[name] = [torch.minimum(low, new[0]), total + new[1], torch.maximum(high, new[2])]
            self._num_gates[name] += gate.numel()
        written = tokens.write_weight.abs() * tokens.beta.unsqueeze(-1)
        self._access("written", tokens.write_index, written if weighted else None)
        self._access("read", tokens.read_index, tokens.read_weight.abs() if weighted else None)

    def _access(self, name: str, index_THA: Tensor, strength_THA: Tensor | None) -> None:
        heads, slots = self._used[name].shape
        first_H1 = torch.arange(heads, device=index_THA.device).unsqueeze(-1) * slots
        place = (index_THA.long() + first_H1).flatten()
        strength = torch.ones_like(place) if strength_THA is None else strength_THA.flatten()
        self._strength[name].view(-1).index_add_(0, place, strength.double())
        self._used[name].view(-1)[place] = True

    def result(self, parallel: Parallel) -> dict[str, float]:
        result: dict[str, float] = {"tokens": parallel.sum(self.tokens)[0]}
        for name, (low, total, high) in self._gates.items():
            count = parallel.sum(self._num_gates[name])[0]
            mean = float(parallel.add_up_(total)) / max(count, 1)
            lowest, highest = (-parallel.largest_(-low)), parallel.largest_(high)
            result |= {f"{name}_min": float(lowest), f"{name}_mean": mean, f"{name}_max": float(highest)}
        for name, strength in self._strength.items():
            result[f"slots_{name}"] = float(parallel.largest_(self._used[name].double()).mean())
            result[f"entropy_{name}"] = normalized_entropy(parallel.add_up_(strength))
        return result


def _extremes_and_sum(device: torch.device) -> list[Tensor]:
    """Those of no numbers at all."""
    low, high = (torch.tensor(x, device=device) for x in (math.inf, -math.inf))
    return [low, torch.zeros((), dtype=torch.float64, device=device), high]


def normalized_entropy(strength_HN: Tensor) -> float:
    """The entropy of the distribution of accesses over the slots of a head, as a share of the largest possible; the
    mean over the heads."""
    slots = strength_HN.shape[-1]
    total_H1 = strength_HN.double().sum(-1, keepdim=True)
    probability = strength_HN / torch.where(total_H1 > 0, total_H1, 1.0)
    entropy = -torch.xlogy(probability, probability).sum(-1).mean()
    return float(entropy) / math.log(slots) if slots > 1 else 0.0
