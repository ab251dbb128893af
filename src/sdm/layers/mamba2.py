"""Mamba2: a selective state space with one decay per head.

Shapes: B batch, T time, S streams (batch rows or documents), H heads, K key channels, D value channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdm.errors import check_size
from sdm.layers.determinism import is_deterministic, token_by_token
from sdm.layers.gates import Float32Linear, decay_gate, reset_decay
from sdm.layers.interface import check_input, without_weight_decay
from sdm.layers.recurrent_state import RecurrentState, RecurrentUndo, start_memory
from sdm.layers.short_convolution import ShortConvolution
from sdm.layers.sizes import default_heads
from sdm.layers.state import Record, check_state
from sdm.layers.streams import Streams, streams_of
from sdm.ops.backends import check_backend
from sdm.ops.state_space import state_space, state_space_step_


class Mamba2(nn.Module):
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
        self.reset_own_parameters()

    def reset_own_parameters(self) -> None:
        """Initialise the gate and the skip; the projections keep torch's or the model's own scheme."""
        reset_decay(self.decay_log_rate, self.decay_bias, lowest_rate=1.0)
        nn.init.ones_(self.skip)

    def forward(
        self,
        x: Tensor,
        state: RecurrentState | None = None,
        return_state: bool = False,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, RecurrentState]:
        """Mix a stretch of tokens, as every `sdm.layers.interface.SequenceLayer` does."""
        check_input(x, self.hidden_size)
        streams = streams_of(x, attention_mask, cu_seqlens)
        if state is not None:
            self._check_state(state, streams.count, x.device)
        aligned = streams.align(x)
        gates = self._gates(aligned, streams.valid(x.shape[1]))
        readings, value, after = self._recur(self._project(aligned), gates, state, streams, return_state, cu_seqlens)
        y = streams.restore(self._output(aligned, readings, value))
        return y if after is None else (y, after)

    @torch.no_grad()
    def step_(self, x: Tensor, state: RecurrentState, record: Record | None = None) -> Tensor:
        """Decode one token: x [B,hidden_size] gives y of the same shape; `state` changes in place."""
        check_input(x, self.hidden_size, "[B,hidden_size]")
        self._check_state(state, x.shape[0], x.device)
        projected, gates = self._project(x), self._gates(x, None)
        if record is not None:
            record(state.undo(projected.unsqueeze(1), *(gate.unsqueeze(1) for gate in gates)))
        return self._output(x, *self._mix_token_(projected, gates, state))

    def _mix_token_(self, projected: Tensor, gates: tuple[Tensor, ...], state: RecurrentState) -> tuple[Tensor, Tensor]:
        """The readings and the value [B,H,D] of one token, from what is projected."""
        query, key, value = self._heads(self.conv.step_(projected, state.tail))
        return state_space_step_(state.memory, query, key, value, *gates, backend=self.backend), value

    @torch.no_grad()
    def extend_(
        self, x: Tensor, state: RecurrentState, attention_mask: Tensor | None = None, record: Record | None = None
    ) -> Tensor:
        """Mix a stretch of tokens in place, as every `sdm.layers.interface.SequenceLayer` does."""
        check_input(x, self.hidden_size)
        streams = streams_of(x, attention_mask, None)
        self._check_state(state, streams.count, x.device)
        aligned = streams.align(x)
        projected, gates = self._project(aligned), self._gates(aligned, streams.valid(x.shape[1]))
        if record is not None:
            record(state.undo(projected, *gates))
        if is_deterministic():

            def mix(t: int) -> Tensor:
                return torch.stack(self._mix_token_(projected[:, t], tuple(gate[:, t] for gate in gates), state))

            readings, value = token_by_token(mix, x.shape[1], projected.new_zeros(2, 0, 0, 0)).unbind(0)
            return self._output(aligned, readings.transpose(0, 1), value.transpose(0, 1))
        readings, value, after = self._recur(projected, gates, state, streams, True, None)
        assert after is not None
        state.assign_(after)
        return streams.restore(self._output(aligned, readings, value))

    @torch.no_grad()
    def replay_(self, state: RecurrentState, undo: RecurrentUndo) -> None:
        """Run the tokens of an undo record again."""
        gates = undo.beta, undo.log_decay
        after = self._recur(undo.projected, gates, state, Streams(len(undo.beta)), True, None)[2]
        assert after is not None
        state.assign_(after)

    def _recur(
        self,
        projected: Tensor,
        gates: tuple[Tensor, Tensor],
        state: RecurrentState | None,
        streams: Streams,
        return_state: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor, RecurrentState | None]:
        """Readings and values [B,T,H,D] and the state after the last token, from what is projected."""
        mixed, tail = self.conv(projected, state.tail if state is not None else None, streams)
        query, key, value = self._heads(mixed)
        readings, memory = state_space(
            query,
            key,
            value,
            *gates,
            initial_state=state.memory if state is not None else None,
            output_final_state=return_state,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
        )
        return readings, value, None if memory is None else RecurrentState(memory, tail)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimizer should not decay: norms, biases, decay rates, the skip."""
        return without_weight_decay(self)

    def start_state(self, batch_size: int, learn: bool = False) -> RecurrentState:
        """The state of streams without tokens, as every `sdm.layers.interface.SequenceLayer` has it."""
        weight = self.value_proj.weight
        memory = start_memory(None, (batch_size, self.num_heads, self.key_dim, self.head_dim), weight, learn)
        return RecurrentState(memory, weight.new_zeros(batch_size, self.conv.kernel_size - 1, self.conv.channels))

    def _check_state(self, state: RecurrentState, streams: int, device: torch.device) -> None:
        memory = (self.num_heads, self.key_dim, self.head_dim)
        tail = (self.conv.kernel_size - 1, self.conv.channels)
        check_state(state, RecurrentState, streams, device, memory=memory, tail=tail)

    def _project(self, x: Tensor) -> Tensor:
        """Values, keys and queries side by side, as the convolution takes them."""
        return torch.cat((self.value_proj(x), self.key_proj(x), self.query_proj(x)), dim=-1)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        key_size = self.num_groups * self.key_dim
        value, key, query = mixed.split((self.hidden_size, key_size, key_size), dim=-1)
        shared = self.num_heads // self.num_groups
        query, key = (
            x.unflatten(-1, (self.num_groups, self.key_dim)).repeat_interleave(shared, dim=-2) for x in (query, key)
        )
        return query, key, value.unflatten(-1, (self.num_heads, self.head_dim))

    def _gates(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
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
