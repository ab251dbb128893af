"""What one sequence layer costs.

A multiply-add is two FLOPs. Norms, activations, rotary embeddings and short convolutions are left out: they are below
one percent.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class Flops:
    """FLOPs of one token."""

    projections: int  # products with weight matrices, MLP and output projection included
    memory: int = 0  # writing and reading a recurrent state
    addressing: int = 0  # choosing the slots to write and read
    attention: int = 0  # scores and weighted sums over cached keys and values

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.projections + self.memory + self.addressing + self.attention

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.projections + other.projections,
            self.memory + other.memory,
            self.addressing + other.addressing,
            self.attention + other.attention,
        )


@dataclass(frozen=True)
class LayerCost:
    """One sequence layer, its MLP not included."""

    kind: str
    weights: int  # elements of the matrices that every token is multiplied with
    vectors: int  # other parameters: norms, decay rates, convolutions, biases
    table: int = 0  # elements of a learned table of which a token reads a few rows
    initial_state: int = 0  # elements of a learned initial state
    state: int = 0  # elements of the recurrent state
    convolution_state: int = 0  # elements that short convolutions and shifts keep
    cached_per_token: int = 0  # key and value elements that a token adds
    window: int | None = None  # how many tokens' keys and values are kept; None: all
    state_moved: int = 0  # elements of the recurrent state read and written per token
    memory_flops: int = 0
    addressing_flops: int = 0
    attention_flops_per_token: int = 0  # per token looked at

    @property
    def parameters(self) -> int:
        """Parameters of the layer, without a learned initial state."""
        return self.weights + self.vectors + self.table

    def cached_tokens(self, context: int) -> int:
        """Tokens whose keys and values are kept behind `context` tokens."""
        return context if self.window is None else min(context, self.window)

    def state_elements(self, context: int) -> int:
        """Everything that the layer keeps behind `context` tokens."""
        return self.state + self.convolution_state + self.cached_per_token * self.cached_tokens(context)

    def flops(self, context: int) -> Flops:
        """FLOPs of one token behind `context` tokens."""
        attention = self.attention_flops_per_token * self.cached_tokens(context + 1)
        return Flops(2 * self.weights, self.memory_flops, self.addressing_flops, attention)

    def state_elements_moved(self, context: int) -> int:
        """State elements read or written for one token: old keys and values are read, the new ones written."""
        kept = self.cached_tokens(context) + 1 if self.cached_per_token else 0
        return self.state_moved + 2 * self.convolution_state + self.cached_per_token * kept


@functools.cache
def selection_flops(side: int, count: int) -> int:
    """Comparisons and additions of a product-key selection, and the softmax over what it selects.

    Each half is looked at once; of its best, only the pairs (a, b) with (a + 1)(b + 1) <= count can be chosen.
    """
    best = min(count, side)
    pairs = sum(min(best, count // (a + 1)) for a in range(best))
    return 2 * side + 2 * pairs + 3 * count
