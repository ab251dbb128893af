"""Mamba2: a selective state space with one decay per head.

Shapes: B batch, T time, S streams (batch rows or documents), H heads, K key channels, D value channels.
"""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdm.errors import check_size
from sdm.layers.modules import Float32Linear, ShortConvolution, decay_gate, reset_decay
from sdm.layers.recurrent_layer import Gates, RecurrentLayer, RuleOptions
from sdm.layers.sizes import default_heads
from sdm.ops.backends import check_backend
from sdm.ops.state_space import state_space, state_space_step_


class Mamba2(RecurrentLayer):
    """Writes every token into a small matrix per head, decayed by a gate that is also the strength of the write.

    Values, keys and queries (x, B and C in Mamba's letters) pass a short convolution; the memory follows
    `sdm.ops.state_space`; a learned share of the value skips it; what is read is gated, normalised over all heads and
    projected back. The value channels are as many as the hidden size: Mamba's expansion is 1 here, so that state and
    projections have the sizes of `GatedDeltaNet`.

    Args:
        hidden_size: width of the input and output.
        num_heads: None takes heads of `default_head_dim` value channels: 128 from a hidden size of 512 on.
        key_dim: key channels per head (Mamba's state size); None takes half of the value channels.
        num_groups: how many different keys and queries there are for the heads to share; None gives each head its own.
        conv_size: taps of the short convolution.
        norm_eps: of the RMS norm.
        backend: passed to the op.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int | None = None,
        key_dim: int | None = None,
        num_groups: int | None = None,
        *,
        conv_size: int = 4,
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_heads = hidden_size, default_heads(hidden_size, num_heads)
        self.head_dim = hidden_size // self.num_heads
        self.key_dim = max(1, self.head_dim // 2) if key_dim is None else key_dim
        self.num_groups = self.num_heads if num_groups is None else num_groups
        check_size(key_dim=self.key_dim, num_groups=self.num_groups, conv_size=conv_size)
        check_backend(backend, "state_space")
        if self.num_heads % self.num_groups:
            raise ValueError(f"num_heads = {self.num_heads} must be divisible by num_groups = {self.num_groups}")
        self.backend = backend

        key_size = self.num_groups * self.key_dim
        self.value_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.query_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.conv = ShortConvolution(hidden_size + 2 * key_size, conv_size, bias=True)
        self.decay_proj = Float32Linear(hidden_size, self.num_heads, bias=False)
        self.decay_log_rate = nn.Parameter(torch.empty(self.num_heads))  # log A
        self.decay_bias = nn.Parameter(torch.empty(self.num_heads))  # b_dt
        self.skip = nn.Parameter(torch.empty(self.num_heads))  # D
        self.gate_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.output_norm = nn.RMSNorm(hidden_size, eps=norm_eps)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.register_parameter("initial_state", None)
        self.reset_own_parameters()

    def reset_own_parameters(self) -> None:
        """Initialise the gate and the skip; the projections keep torch's or the model's own scheme."""
        reset_decay(self.decay_log_rate, self.decay_bias, lowest_rate=1.0)
        nn.init.ones_(self.skip)

    def _rule(self, *tokens: Tensor, **options: Unpack[RuleOptions]) -> tuple[Tensor, Tensor | None]:
        return state_space(*tokens, **options)

    def _step_rule_(self, memory: Tensor, *token: Tensor, backend: str) -> Tensor:
        return state_space_step_(memory, *token, backend=backend)

    def _memory_shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.key_dim, self.head_dim

    def _project(self, x: Tensor, key_input: Tensor | None) -> Tensor:
        """Values, keys and queries side by side, as the convolution takes them."""
        key = self.key_proj(x if key_input is None else key_input)
        return torch.cat((self.value_proj(x), key, self.query_proj(x)), dim=-1)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        key_size = self.num_groups * self.key_dim
        value, key, query = mixed.split((self.hidden_size, key_size, key_size), dim=-1)
        shared = self.num_heads // self.num_groups
        query, key = (
            x.unflatten(-1, (self.num_groups, self.key_dim)).repeat_interleave(shared, dim=-2) for x in (query, key)
        )
        return query, key, value.unflatten(-1, (self.num_heads, self.head_dim))

    def _gates(self, x: Tensor, valid: Tensor | None) -> Gates:
        """The time step is the strength of the write: beta, log_decay."""
        beta, log_decay = decay_gate(self.decay_proj(x), self.decay_bias, self.decay_log_rate)
        if valid is not None:
            beta, log_decay = beta * valid.unsqueeze(-1), log_decay * valid.unsqueeze(-1)
        return beta, log_decay

    def _output(self, x: Tensor, readings: Tensor, value: Tensor) -> Tensor:
        gate = F.silu(self.gate_proj(x))
        gated = (readings + self.skip.to(value.dtype).unsqueeze(-1) * value).flatten(-2) * gate
        return self.out_proj(self.output_norm(gated.to(self.output_norm.weight.dtype)))

    def extra_repr(self) -> str:
        """Sizes and options for `print(layer)`."""
        return (
            f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, key_dim={self.key_dim}, "
            f"num_groups={self.num_groups}"
        )
