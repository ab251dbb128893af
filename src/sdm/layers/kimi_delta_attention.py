"""Kimi Delta Attention (KDA): Gated DeltaNet with a decay of its own for each key channel.

Shapes: B batch, T time, H heads, K key channels, D value channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sdm.errors import check_size
from sdm.layers.gated_delta_net import GatedDeltaNet
from sdm.layers.modules import Float32Linear, decay_gate
from sdm.layers.recurrent_layer import Gates


class KimiDeltaAttention(GatedDeltaNet):
    """The delta rule on a matrix per head whose rows, the key channels, decay each by themselves.

    It is `GatedDeltaNet` but for the decay gate, g = -A softplus(W_up W_down x + b) with A for each head and b for each
    key channel, and for the sigmoid of the output gate. The output gate has full rank, so that the layer has the
    weights of `GatedDeltaNet` and about `decay_rank * 1.5 hidden_size` more; the published model factors it as well.

    Args:
        hidden_size: width of the input and output.
        num_heads: None takes heads of `default_head_dim` value channels: 128 from a hidden size of 512 on.
        key_dim: key channels per head; None takes half of the value channels.
        learned_initial_state: start from a learned state shared by the batch instead of zeros.
        decay_rank: rank of the projection of the decays; None takes the value channels of a head.
        conv_size: taps of the short convolution; 0 leaves it out and keeps its SiLU.
        shift_convolution: start the convolution as a shift, as in `GatedDeltaNet`.
        initial_state_std: scale of the learned state at initialisation.
        norm_eps: of the RMS norm and of the unit lengths.
        backend: passed to `sdm.ops.gated_delta_rule`.
    """

    lowest_decay_rate = 1.0

    def __init__(
        self,
        hidden_size: int,
        num_heads: int | None = None,
        key_dim: int | None = None,
        learned_initial_state: bool = False,
        *,
        decay_rank: int | None = None,
        conv_size: int = 4,
        shift_convolution: bool = False,
        initial_state_std: float = 0.002,
        norm_eps: float = 1e-6,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            hidden_size,
            num_heads,
            key_dim,
            learned_initial_state,
            conv_size=conv_size,
            shift_convolution=shift_convolution,
            output_gate="sigmoid",
            initial_state_std=initial_state_std,
            norm_eps=norm_eps,
            decay=False,
            backend=backend,
        )
        rank = self.head_dim if decay_rank is None else decay_rank
        check_size(decay_rank=rank)
        self.decay_down_proj = Float32Linear(hidden_size, rank, bias=False)
        self.decay_proj = Float32Linear(rank, self.num_heads * self.key_dim, bias=False)
        self.decay_log_rate = nn.Parameter(torch.empty(self.num_heads))  # log A
        self.decay_bias = nn.Parameter(torch.empty(self.num_heads, self.key_dim))  # b_dt
        self.reset_own_parameters()

    def _gates(self, x: Tensor, valid: Tensor | None) -> Gates:
        """beta [...,H] and log_decay [...,H,K]."""
        assert self.decay_proj is not None
        beta = torch.sigmoid(self.beta_proj(x))
        projected = self.decay_proj(self.decay_down_proj(x)).unflatten(-1, (self.num_heads, self.key_dim))
        _, log_decay = decay_gate(projected, self.decay_bias, self.decay_log_rate.unsqueeze(-1))
        if valid is not None:
            beta, log_decay = beta * valid.unsqueeze(-1), log_decay * valid[..., None, None]
        return beta, log_decay
