"""What the layers with a small state per head have in common: the calls, the state and its undo records.

Shapes: B batch, T time, S streams (batch rows or documents), H heads, K rows of a head's memory, D value channels,
C channels of what is projected.
"""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn

from sdm.layers.determinism import is_deterministic
from sdm.layers.interface import Streams, check_input, streams_of, without_weight_decay
from sdm.layers.modules import ShortConvolution
from sdm.layers.state import Record, RecurrentState, RecurrentUndo, check_state, start_memory

Gates = tuple[Tensor, Tensor]
"""beta and log_decay of each token; what they are is the layer's own."""


class RuleOptions(TypedDict):
    """What a rule over a sequence takes beside the tokens."""

    initial_state: Tensor | None
    output_final_state: bool
    cu_seqlens: Tensor | None
    backend: str


class RecurrentLayer(nn.Module):
    """Base of the layers that keep a memory [H,K,D] and, before it, the tail of a short convolution.

    A layer says what it projects (`_project`), its gates (`_gates`), what its rule takes (`_tokens`), the rule over a
    sequence and of a single step (`_rule`, `_step_rule_`), the shape of its memory (`_memory_shape`) and its output
    (`_output`).
    """

    hidden_size: int
    num_heads: int
    backend: str
    conv: ShortConvolution | None
    initial_state: nn.Parameter | None
    query_proj: nn.Linear
    key_proj: nn.Linear
    value_proj: nn.Linear

    def forward(
        self,
        x: Tensor,
        state: RecurrentState | None = None,
        return_state: bool = False,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        key_input: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, RecurrentState]:
        """Mix a stretch of tokens, as every `sdm.layers.interface.SequenceLayer` does.

        key_input [B,T,hidden_size]: what the keys are projected from instead of x.
        """
        check_input(x, self.hidden_size)
        streams = streams_of(x, attention_mask, cu_seqlens)
        if state is not None:
            self._check_state(state, streams.count, x.device)
        aligned = streams.align(x)
        projected = self._project(aligned, None if key_input is None else streams.align(key_input))
        gates = self._gates(aligned, streams.valid(x.shape[1]))
        readings, value, after = self._recur(projected, gates, state, streams, return_state, cu_seqlens)
        y = streams.restore(self._output(aligned, readings, value))
        return y if after is None else (y, after)

    @torch.no_grad()
    def step_(
        self, x: Tensor, state: RecurrentState, record: Record | None = None, key_input: Tensor | None = None
    ) -> Tensor:
        """Decode one token: x [B,hidden_size] gives y of the same shape; `state` changes in place."""
        check_input(x, self.hidden_size, "[B,hidden_size]")
        self._check_state(state, x.shape[0], x.device)
        projected, gates = self._project(x, key_input), self._gates(x, None)
        if record is not None:
            record(state.undo(projected.unsqueeze(1), *(gate.unsqueeze(1) for gate in gates)))
        return self._output(x, *self._mix_token_(projected, gates, state))

    def _mix_token_(self, projected: Tensor, gates: tuple[Tensor, ...], state: RecurrentState) -> tuple[Tensor, Tensor]:
        """The readings and the value [B,H,D] of one token, from what is projected."""
        mixed = projected if self.conv is None else self.conv.step_(projected, state.tail)
        token = self._tokens(mixed, gates)
        return self._step_rule_(state.memory, *token, backend=self.backend), token[2]

    @torch.no_grad()
    def extend_(
        self,
        x: Tensor,
        state: RecurrentState,
        attention_mask: Tensor | None = None,
        record: Record | None = None,
        key_input: Tensor | None = None,
    ) -> Tensor:
        """Mix a stretch of tokens in place, as every `sdm.layers.interface.SequenceLayer` does."""
        check_input(x, self.hidden_size)
        streams = streams_of(x, attention_mask, None)
        self._check_state(state, streams.count, x.device)
        aligned = streams.align(x)
        projected = self._project(aligned, None if key_input is None else streams.align(key_input))
        gates = self._gates(aligned, streams.valid(x.shape[1]))
        if record is not None:
            record(state.undo(projected, *gates))
        if is_deterministic() and x.shape[1]:
            tokens = [
                self._mix_token_(projected[:, t], tuple(gate[:, t] for gate in gates), state) for t in range(x.shape[1])
            ]
            readings, value = (torch.stack(parts, dim=1) for parts in zip(*tokens, strict=True))
            return self._output(aligned, readings, value)
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
        gates: Gates,
        state: RecurrentState | None,
        streams: Streams,
        return_state: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor, RecurrentState | None]:
        """Readings and values [B,T,H,D] and the state after the last token, from what is projected."""
        mixed, tail = projected, projected.new_zeros(streams.count, 0, 0)
        if self.conv is not None:
            mixed, tail = self.conv(projected, state.tail if state is not None else None, streams)
        tokens = self._tokens(mixed, gates)
        readings, memory = self._rule(
            *tokens,
            initial_state=self.initial_state if state is None else state.memory,
            output_final_state=return_state,
            cu_seqlens=cu_seqlens,
            backend=self.backend,
        )
        return readings, tokens[2], None if memory is None else RecurrentState(memory, tail)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimizer should not decay; see `sdm.layers.interface`."""
        return without_weight_decay(self)

    def start_state(self, batch_size: int, learn: bool = False) -> RecurrentState:
        """The state of streams without tokens, as every `sdm.layers.interface.SequenceLayer` has it."""
        weight = self.value_proj.weight
        started = start_memory(self.initial_state, (batch_size, *self._memory_shape()), weight, learn)
        return RecurrentState(started, weight.new_zeros(batch_size, *self._tail_shape()))

    def _tail_shape(self) -> tuple[int, int]:
        """Of a stream."""
        return (self.conv.kernel_size - 1, self.conv.channels) if self.conv is not None else (0, 0)

    def _check_state(self, state: RecurrentState, streams: int, device: torch.device) -> None:
        check_state(state, RecurrentState, streams, device, memory=self._memory_shape(), tail=self._tail_shape())

    def _memory_shape(self) -> tuple[int, int, int]:
        """Of a stream."""
        raise NotImplementedError

    def _project(self, x: Tensor, key_input: Tensor | None) -> Tensor:
        """What goes into the convolution, [...,C]."""
        raise NotImplementedError

    def _gates(self, x: Tensor, valid: Tensor | None) -> Gates:
        """The gates, of no effect where `valid` [B,T] is False."""
        raise NotImplementedError

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [...,H,channels], of what the convolution gives."""
        raise NotImplementedError

    def _tokens(self, mixed: Tensor, gates: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the rule takes of each token: query, key and value first."""
        return *self._heads(mixed), *gates

    def _rule(self, *tokens: Tensor, **options: Unpack[RuleOptions]) -> tuple[Tensor, Tensor | None]:
        """Readings [B,T,H,D] and the memory after the last token."""
        raise NotImplementedError

    def _step_rule_(self, memory: Tensor, *token: Tensor, backend: str) -> Tensor:
        """Readings [B,H,D] of one token; the memory changes in place."""
        raise NotImplementedError

    def _output(self, x: Tensor, readings: Tensor, value: Tensor) -> Tensor:
        """The output [...,hidden_size], from the input and, per head, what is read and the value."""
        raise NotImplementedError
