"""Causal attention to every earlier token, with key-value heads shared by groups of query heads.

Shapes: B batch, T time, S streams (batch rows or documents), H query heads, G key-value heads, R = H / G query heads
per key-value head, D head channels, C places of the key-value buffer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from sdm.layers import flex_attention
from sdm.layers.attention import GatedAttention, KeyValueState, LengthUndo, reading_is_free, write_
from sdm.layers.interface import Streams
from sdm.layers.rope import Rope
from sdm.layers.sizes import default_heads, default_kv_heads
from sdm.layers.state import Undo

QUERY_BLOCK = 256
MIN_CAPACITY = 64


@dataclasses.dataclass
class GrowingKeyValues(KeyValueState):
    """Buffers in which the key at position p lies in place p, with room for tokens to come."""

    def __post_init__(self) -> None:
        # Tokens that every stream has places for, or fewer; None: unknown. On a CPU the lengths themselves are read.
        self._room: int | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> GrowingKeyValues:
        """Apply `function` to each tensor, which may choose, repeat or copy streams."""
        state = super().map(function)
        if state.key.shape[2] == self.key.shape[2]:
            state._room = self._room
        return state

    def assign_(self, other: GrowingKeyValues) -> None:
        """Make this state refer to the tensors of another one."""
        super().assign_(other)
        self._room = other._room

    def reserve_(self, tokens: int) -> None:
        """Make room for so many tokens of every stream, so that a captured step (a CUDA graph) finds its buffers."""
        missing = tokens - self.room
        if missing > 0:
            self.key, self.value = (F.pad(x, (0, 0, 0, missing)) for x in (self.key, self.value))
            self._room = tokens

    @property
    def room(self) -> int:
        """Tokens that every stream has places for, or fewer. A device is asked once, for a state from elsewhere."""
        if self._room is None or reading_is_free(self.length):
            self._room = self.key.shape[2] - (int(self.length.max()) if self.length.numel() else 0)
        return self._room

    def take_room(self) -> None:
        """Count a token of every stream, for which there is room."""
        self._room = self.room - 1

    def _undo_type(self) -> type[Undo]:
        return LengthUndo

    def undo(self, key_STGD: Tensor, value_STGD: Tensor, valid_ST: Tensor) -> Undo:
        """Record the number of tokens: keys and values are cropped."""
        return LengthUndo(self.length.clone(), valid_ST)

    def trimmed(self) -> GrowingKeyValues:
        """Drop the room that is kept for tokens to come."""
        length = int(self.length.max())
        return dataclasses.replace(self, key=self.key[:, :, :length], value=self.value[:, :, :length])


class FullAttention(GatedAttention):
    """Grouped-query attention of each token to itself and all earlier ones.

    The state is a buffer that doubles when it is full, so that a step copies it only once in a while.

    Args:
        hidden_size: width of the input and output.
        num_heads: None takes heads of `default_head_dim` channels: 128 from a hidden size of 512 on.
        num_kv_heads: None takes half of num_heads, or the nearest number that divides it.
        rope_theta: base of the rotary frequencies.
        rope: other frequencies than those of rope_theta, for scaled positions.
    """

    state_type = GrowingKeyValues

    def __init__(
        self,
        hidden_size: int,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        *,
        rope_theta: float = 500_000.0,
        rope: Rope | None = None,
    ) -> None:
        num_heads = default_heads(hidden_size, num_heads)
        if num_kv_heads is None:
            num_kv_heads = default_kv_heads(num_heads)
        super().__init__(hidden_size, num_heads, num_kv_heads, rope or Rope(rope_theta))

    def _start_capacity(self) -> int:
        return 0

    def _attend(
        self,
        query_BTHD: Tensor,
        key_BTGD: Tensor,
        value_BTGD: Tensor,
        position: Tensor,
        state: KeyValueState | None,
        streams: Streams,
        return_state: bool,
    ) -> tuple[Tensor, KeyValueState | None]:
        if streams.bounds is not None and state is None and not return_state and flex_attention.serves(query_BTHD):
            visible = (position + 1).expand(query_BTHD.shape[:2])
            mixed = flex_attention.interval_attention(query_BTHD, key_BTGD, value_BTGD, visible)
            if mixed is not None:
                return mixed, None
        if streams.bounds is not None:
            return self._attend_documents(
                query_BTHD, key_BTGD, value_BTGD, position, state, streams.bounds, return_state
            )
        time = query_BTHD.shape[1]
        query, key, value = (x.transpose(1, 2) for x in (query_BTHD, key_BTGD, value_BTGD))
        if state is None or state.key.shape[2] == 0:
            mixed = query
            if time > 0:
                mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            length = torch.zeros(query.shape[0], dtype=torch.int64, device=query.device)
        else:
            length = state.length
            assert isinstance(state, GrowingKeyValues)
            capacity = state.key.shape[2] - state.room + time
            key = _append(state.key, key, length, capacity)
            value = _append(state.value, value, length, capacity)
            mixed = attend_blocks(query, key, value, length)
        if not return_state:
            return mixed.transpose(1, 2), None
        after = GrowingKeyValues(key.contiguous(), value.contiguous(), length + streams.totals(time, length.device))
        after._room = 0
        return mixed.transpose(1, 2), after

    def _attend_step_(self, query_BHD: Tensor, key_BGD: Tensor, value_BGD: Tensor, state: KeyValueState) -> Tensor:
        assert isinstance(state, GrowingKeyValues)
        if not reading_is_free(state.length):
            return self._attend_buffer_(query_BHD, key_BGD, value_BGD, state)
        shortest, longest = (int(length) for length in torch.aminmax(state.length))
        filled, capacity = longest + 1, state.key.shape[2]
        if filled > capacity:
            grown = (0, 0, 0, max(2 * capacity, filled, MIN_CAPACITY) - capacity)
            state.key, state.value = F.pad(state.key, grown), F.pad(state.value, grown)
        write_(state, key_BGD, value_BGD, state.length)
        mask = None
        if shortest != longest:
            mask = torch.arange(filled, device=key_BGD.device) <= state.length[:, None, None, None]
        # The query heads that share keys stand where time stands otherwise: nothing is repeated.
        query_BGRD = query_BHD.unflatten(1, (self.num_kv_heads, -1))
        key, value = (x[:, :, :filled].to(query_BHD.dtype) for x in (state.key, state.value))
        return F.scaled_dot_product_attention(query_BGRD, key, value, attn_mask=mask).flatten(1, 2)

    def _attend_buffer_(self, query_BHD: Tensor, key_BGD: Tensor, value_BGD: Tensor, state: GrowingKeyValues) -> Tensor:
        """`_attend_step_` without waiting for the device: over the whole buffer, of which a mask shows what is filled.

        Shapes and addresses stay the same until the buffer is full, so that a CUDA graph can be replayed.
        """
        if state.room == 0:
            state.reserve_(max(state.key.shape[2], MIN_CAPACITY))
        state.take_room()
        write_(state, key_BGD, value_BGD, state.length)
        mask = torch.arange(state.key.shape[2], device=key_BGD.device) <= state.length[:, None, None, None]
        query_BGRD = query_BHD.unflatten(1, (self.num_kv_heads, -1))
        key, value = state.key.to(query_BHD.dtype), state.value.to(query_BHD.dtype)
        return F.scaled_dot_product_attention(query_BGRD, key, value, attn_mask=mask).flatten(1, 2)

    def extra_repr(self) -> str:
        """Sizes and options for `print(layer)`."""
        return f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"


def _append(buffer_SGCD: Tensor, new_SGTD: Tensor, length: Tensor, capacity: int) -> Tensor:
    """A copy of the buffer with `capacity` places and the new entries behind those of each stream."""
    resized = F.pad(buffer_SGCD, (0, 0, 0, capacity - buffer_SGCD.shape[2])).to(new_SGTD.dtype)
    place = length.unsqueeze(-1) + torch.arange(new_SGTD.shape[2], device=length.device)
    return resized.scatter(2, place[:, None, :, None].expand_as(new_SGTD), new_SGTD)


def attend_blocks(query_BHTD: Tensor, key_BGCD: Tensor, value_BGCD: Tensor, length: Tensor) -> Tensor:
    """Attention of query t of a row to the first `length` + t + 1 places, a block of queries at a time.

    A mask over all queries and places would grow with T^2. A compiled graph has one block, for the number of blocks
    would tie it to the length of its example.
    """
    groups = key_BGCD.shape[1]
    place = torch.arange(key_BGCD.shape[2], device=length.device)
    outputs = []
    starts = [0] if torch.compiler.is_compiling() else range(0, query_BHTD.shape[2], QUERY_BLOCK)
    size = query_BHTD.shape[2] if torch.compiler.is_compiling() else QUERY_BLOCK
    for start in starts:
        query = query_BHTD[:, :, start : start + size]
        own = length.unsqueeze(-1) + torch.arange(start, start + query.shape[2], device=length.device)
        # Places behind the last one that the block's queries see need not be looked at.
        end = key_BGCD.shape[2] - query_BHTD.shape[2] + start + query.shape[2]
        mask_BTC = place[:end] <= own.unsqueeze(-1)
        shared = query.unflatten(1, (groups, -1)).flatten(2, 3)
        mask = mask_BTC.repeat(1, query.shape[1] // groups, 1).unsqueeze(1)
        mixed = F.scaled_dot_product_attention(shared, key_BGCD[:, :, :end], value_BGCD[:, :, :end], attn_mask=mask)
        outputs.append(mixed.unflatten(2, (-1, query.shape[2])).flatten(1, 2))
    return torch.cat(outputs, dim=2) if outputs else query_BHTD
