"""Gated DeltaNet: the dense relative of Sparse Delta Memory, with a small matrix per head as its state.

Shapes: B batch, T time, S streams (batch rows or documents), H heads, K key channels, D value channels.
"""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdm.errors import check_one_of, check_size
from sdm.layers.modules import LARGEST_DECAY_RATE, Float32Linear, ShortConvolution, decay_gate, reset_decay
from sdm.layers.recurrent_layer import Gates, RecurrentLayer, RuleOptions
from sdm.layers.sizes import default_heads
from sdm.ops.backends import check_backend
from sdm.ops.gated_delta_rule import gated_delta_rule, gated_delta_step_
from sdm.ops.state_space import state_space, state_space_step_

OUTPUT_GATES = ("silu", "sigmoid")


class GatedDeltaNet(RecurrentLayer):
    """Linear attention that erases what a key held before it writes to it, with a decay gate per head.

    Queries, keys and values pass a short convolution; queries and keys have unit length; the memory follows
    `sdm.ops.gated_delta_rule`; what is read is normalised per head, gated elementwise and projected back. The
    projections have the sizes of `SparseDeltaMemory` with its default number of slots.

    Args:
        hidden_size: width of the input and output.
        num_heads: None takes heads of `default_head_dim` value channels: 128 from a hidden size of 512 on.
        key_dim: key channels per head; None takes half of the value channels.
        learned_initial_state: start from a learned state shared by the batch instead of zeros.
        conv_size: taps of the short convolution; 0 leaves it out and keeps its SiLU.
        shift_convolution: start the convolution with the keys at the token before and the rest at the token itself,
            instead of at random. With W_q = W_k at the start, a token then finds what followed it earlier. Training may
            leave this; it is no part of the published model.
        output_gate: "silu" or "sigmoid".
        initial_state_std: scale of the learned state at initialisation.
        largest_decay_rate: decay rates A start uniform between 0 and this.
        norm_eps: of the RMS norm and of the unit lengths.
        decay: whether the state decays; without, this is DeltaNet.
        correction: whether a write erases what its key held before; without it and without decay, this is linear
            attention.
        backend: passed to the op.
    """

    lowest_decay_rate = 0.0  # of A at initialisation

    def __init__(
        self,
        hidden_size: int,
        num_heads: int | None = None,
        key_dim: int | None = None,
        learned_initial_state: bool = False,
        *,
        conv_size: int = 4,
        shift_convolution: bool = False,
        output_gate: str = "silu",
        initial_state_std: float = 0.002,
        largest_decay_rate: float = LARGEST_DECAY_RATE,
        norm_eps: float = 1e-6,
        decay: bool = True,
        correction: bool = True,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_heads = hidden_size, default_heads(hidden_size, num_heads)
        self.head_dim = hidden_size // self.num_heads
        self.key_dim = max(1, self.head_dim // 2) if key_dim is None else key_dim
        check_size(key_dim=self.key_dim)
        check_one_of(OUTPUT_GATES, output_gate=output_gate)
        check_backend(backend, "gated_delta_rule" if correction else "state_space")
        if not isinstance(conv_size, int) or conv_size < 0:
            raise ValueError(f"conv_size must be a number of taps, or 0 for no convolution, got {conv_size!r}")
        if shift_convolution and conv_size < 2:
            raise ValueError(
                f"shift_convolution needs a conv_size of at least 2, to see the token before, got {conv_size}"
            )
        if initial_state_std < 0:
            raise ValueError(f"initial_state_std must not be negative, got {initial_state_std}")
        if not largest_decay_rate > 0:
            raise ValueError(f"largest_decay_rate must be positive, got {largest_decay_rate}")
        self.largest_decay_rate = largest_decay_rate
        self.output_gate, self.initial_state_std, self.norm_eps = output_gate, initial_state_std, norm_eps
        self.correction, self.backend = correction, backend

        key_size = self.num_heads * self.key_dim
        self.query_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.key_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.value_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        shifted = slice(key_size, 2 * key_size) if shift_convolution else None
        self.conv = ShortConvolution(2 * key_size + hidden_size, conv_size, shifted=shifted) if conv_size else None
        self.beta_proj = Float32Linear(hidden_size, self.num_heads, bias=False)
        self.decay_proj: Float32Linear | None = None
        if decay:
            self.decay_proj = Float32Linear(hidden_size, self.num_heads, bias=False)
            self.decay_log_rate = nn.Parameter(torch.empty(self.num_heads))  # log A
            self.decay_bias = nn.Parameter(torch.empty(self.num_heads))  # b_dt
        self.gate_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.output_norm = nn.RMSNorm(self.head_dim, eps=norm_eps)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        if learned_initial_state:
            self.initial_state = nn.Parameter(torch.empty(self.num_heads, self.key_dim, self.head_dim))
        else:
            self.register_parameter("initial_state", None)
        self.reset_own_parameters()

    def reset_own_parameters(self) -> None:
        """Initialise the gates and the learned state; the projections keep torch's or the model's own scheme."""
        if self.decay_proj is not None:
            reset_decay(self.decay_log_rate, self.decay_bias, self.lowest_decay_rate, self.largest_decay_rate)
        if self.initial_state is not None:
            nn.init.normal_(self.initial_state, std=self.initial_state_std)

    def _rule(self, *tokens: Tensor, **options: Unpack[RuleOptions]) -> tuple[Tensor, Tensor | None]:
        return (gated_delta_rule if self.correction else state_space)(*tokens, **options)

    def _step_rule_(self, memory: Tensor, *token: Tensor, backend: str) -> Tensor:
        return (gated_delta_step_ if self.correction else state_space_step_)(memory, *token, backend=backend)

    def _memory_shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.key_dim, self.head_dim

    def _project(self, x: Tensor, key_input: Tensor | None) -> Tensor:
        """Queries, keys and values side by side, as the convolution takes them."""
        key = self.key_proj(x if key_input is None else key_input)
        projected = torch.cat((self.query_proj(x), key, self.value_proj(x)), dim=-1)
        return projected if self.conv is not None else F.silu(projected)

    def _heads(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        both, value = projected.split((2 * self.num_heads * self.key_dim, self.hidden_size), dim=-1)
        query, key = _unit(both.unflatten(-1, (-1, self.key_dim)), self.norm_eps).chunk(2, dim=-2)
        return query * self.key_dim**-0.5, key, value.unflatten(-1, (self.num_heads, self.head_dim))

    def _gates(self, x: Tensor, valid: Tensor | None) -> Gates:
        beta = torch.sigmoid(self.beta_proj(x))
        log_decay = torch.zeros_like(beta)
        if self.decay_proj is not None:
            _, log_decay = decay_gate(self.decay_proj(x), self.decay_bias, self.decay_log_rate)
        if valid is not None:
            beta, log_decay = beta * valid.unsqueeze(-1), log_decay * valid.unsqueeze(-1)
        return beta, log_decay

    def _output(self, x: Tensor, readings: Tensor, value: Tensor | None = None) -> Tensor:
        gate = self.gate_proj(x)
        gate = F.silu(gate) if self.output_gate == "silu" else torch.sigmoid(gate)
        normed = self.output_norm(readings.to(self.output_norm.weight.dtype))
        return self.out_proj(normed.flatten(-2).to(gate.dtype) * gate)

    def extra_repr(self) -> str:
        """Sizes and options for `print(layer)`."""
        return (
            f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, key_dim={self.key_dim}, "
            f"learned_initial_state={self.initial_state is not None}"
        )


def _unit(x: Tensor, eps: float) -> Tensor:
    """x / |x| in float32, and zero where x is zero."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
