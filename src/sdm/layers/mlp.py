"""The gated feed-forward layer between the sequence layers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from sdm.errors import check_size


def mlp_size(hidden_size: int, multiple_of: int) -> int:
    """8/3 of the width, rounded up: a gated layer of this size costs as much as a plain one of 4 times the width."""
    check_size(hidden_size=hidden_size, multiple_of=multiple_of)
    return -(-8 * hidden_size // (3 * multiple_of)) * multiple_of


class GatedMLP(nn.Module):
    """Two projections up, one through SiLU, multiplied, and one down. Each token by itself: there is no state."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        check_size(hidden_size=hidden_size, intermediate_size=intermediate_size)
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
