"""The gated feed-forward layer between the sequence layers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from sdm.errors import check_size


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
        """Apply the layer to every token of x [..., hidden_size]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
