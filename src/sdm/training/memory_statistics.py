"""What the memory does during training: the paper's appendix on gates and slots, over the tokens of all ranks.

Nothing costs in steps that are not watched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from sdm.layers import SparseDeltaMemory
from sdm.layers.memory_statistics import LayerStatistics, observed
from sdm.ops.sparse_delta_rule.inputs import Tokens
from sdm.training.parallel import Parallel

STEP_TOKENS = 16_384  # of a single step: enough for stable shares of memories that a small machine holds


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
        self._layers: dict[SparseDeltaMemory, LayerStatistics] = {}

    @contextlib.contextmanager
    def watch(self, model: nn.Module, count: bool = True) -> Iterator[None]:
        """Look at the forward passes in this block. Backward does not belong in it: it may compute them again. Tokens
        that do not `count` are those of a rank without rows, which takes part in adding up all the same."""

        @torch.no_grad()
        def see(layer: SparseDeltaMemory, tokens: Tokens) -> None:
            if layer not in self._layers:
                self._layers[layer] = LayerStatistics.of_layer(layer, tokens.beta.device)
            seen = self._layers[layer]
            left = self._max_tokens - int(seen.tokens)
            if count and left > 0:
                seen.add(Tokens(*(x.flatten(0, 1)[:left] for x in tokens)), self._weighted)

        with observed(model, see):
            yield

    def take(self) -> dict[str, float]:
        """The means over the layers of what was seen since the last call; empty if there is no SDM layer."""
        for layer in self._layers.values():
            _add_up(layer, self._parallel)
        found = [layer.result() for layer in self._layers.values()]
        self._layers.clear()
        if not found:
            return {}
        return {f"memory/{name}": sum(one[name] for one in found) / len(found) for name in found[0]}


def _add_up(seen: LayerStatistics, parallel: Parallel) -> None:
    """Make the sums of a rank those of all ranks."""
    (seen.tokens,) = parallel.sum(seen.tokens)
    for gate in seen.gates.values():
        (gate.count,) = parallel.sum(gate.count)
        gate.total = parallel.add_up_(gate.total)
        gate.low, gate.high = -parallel.largest_(-gate.low), parallel.largest_(gate.high)
    for name, strength in seen.strength_HN.items():
        seen.used_HN[name] = parallel.largest_(seen.used_HN[name].double())
        parallel.add_up_(strength)
