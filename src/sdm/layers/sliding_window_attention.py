"""Attention to the last `window` tokens, at a cost linear in T on every device.

Time is cut into blocks. A block of queries meets its own keys and the `window` keys before it, and nothing else is
ever multiplied: no T x T mask, no T x T scores. On GPUs one kernel does that (`flex_attention.py`).

Shapes: B batch, T time, S streams (batch rows or documents), H heads, D head channels, W window, P history (keys
before the first query), N blocks of Q queries.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sdm.errors import check_size
from sdm.layers import flex_attention
from sdm.layers.attention import GatedAttention, KeyValueState, write_
from sdm.layers.interface import Streams
from sdm.layers.rope import Rope


class SlidingWindowAttention(GatedAttention):
    """Multi-head attention of each token to itself and the `window - 1` tokens before it.

    The state is a ring: the key at position p lies in place p mod W, so that a step overwrites the one key that has
    just left the window.

    Args:
        hidden_size: width of the input and output.
        num_heads: None takes heads of `default_head_dim` channels: 128 from a hidden size of 512 on.
        window: how many tokens a token sees, itself included.
        rope_theta: base of the rotary frequencies.
        rope: other frequencies than those of rope_theta, for scaled positions.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int | None = None,
        window: int = 128,
        *,
        rope_theta: float = 500_000.0,
        rope: Rope | None = None,
    ) -> None:
        check_size(window=window)
        super().__init__(hidden_size, num_heads, None, rope or Rope(rope_theta))
        self.window = window
        # Every query meets Q + W keys: short blocks waste less of them, long ones multiply larger matrices.
        self.block = max(16, window // 2)

    def _start_capacity(self) -> int:
        return self.window

    def _check_state(self, state: KeyValueState, streams: int, device: torch.device) -> None:
        super()._check_state(state, streams, device)
        if state.key.shape[2] != self.window:
            raise ValueError(
                f"state.key must hold window = {self.window} keys, got {state.key.shape[2]}: is it of another layer?"
            )

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
        if streams.bounds is not None and state is not None:
            return self._attend_documents(
                query_BTHD, key_BTGD, value_BTGD, position, state, streams.bounds, return_state
            )
        batch, time = query_BTHD.shape[:2]
        if state is None:
            # The sizes of an exported graph must not depend on the length of the example.
            history = self.window if torch.compiler.is_exporting() else min(self.window, time)
            before = torch.zeros(streams.count, dtype=torch.int64, device=query_BTHD.device)
            key, value = (F.pad(x, (0, 0, 0, 0, history, 0)) for x in (key_BTGD, value_BTGD))
        else:
            history, before = self.window, state.length
            key = torch.cat((unroll(state.key, before), key_BTGD), dim=1)
            value = torch.cat((unroll(state.value, before), value_BTGD), dim=1)
        # A token sees no further back than its stream's first token: that hides empty history and other documents.
        visible = (position + 1).clamp(max=self.window).expand(batch, time)
        mixed = None
        if flex_attention.serves(query_BTHD):
            mixed = flex_attention.interval_attention(query_BTHD, key, value, visible)
        elif torch.compiler.is_exporting():
            mixed = masked_attention(query_BTHD, key, value, visible)
        if mixed is None:
            mixed = banded_attention(query_BTHD, key, value, visible, min(self.block, max(time, 1)))
        if not return_state:
            return mixed, None
        after = before + streams.totals(time, before.device)
        # Where position 0 of each stream lies, or would lie, among the keys.
        origin = history - before if streams.bounds is None else history + streams.bounds[:-1]
        return mixed, KeyValueState(
            _roll(key, origin, after, self.window), _roll(value, origin, after, self.window), after
        )

    def _attend_step_(self, query_BHD: Tensor, key_BGD: Tensor, value_BGD: Tensor, state: KeyValueState) -> Tensor:
        write_(state, key_BGD, value_BGD, state.length % self.window)
        filled = torch.arange(self.window, device=key_BGD.device) <= state.length[:, None, None, None]
        key, value = state.key.to(query_BHD.dtype), state.value.to(query_BHD.dtype)
        return F.scaled_dot_product_attention(query_BHD.unsqueeze(2), key, value, attn_mask=filled).squeeze(2)

    def extra_repr(self) -> str:
        """Sizes and options for `print(layer)`."""
        return f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, window={self.window}"


def banded_attention(query_BTHD: Tensor, key: Tensor, value: Tensor, visible: Tensor, block: int) -> Tensor:
    """Attention of query t, which lies at place P + t of the keys, to the `visible` [B,T] last places up to its own.

    key, value: [B,P+T,H,D]; no query sees more than P + 1 places. Returns [B,T,H,D].
    """
    time = query_BTHD.shape[1]
    if time == 0:
        return query_BTHD
    history = key.shape[1] - time
    short = -time % block
    # Queries that only fill up the last block see themselves, for a softmax over nothing is not a number.
    visible_BNQ = F.pad(visible, (0, short), value=1).unflatten(1, (-1, block))
    query_BNHQD = F.pad(query_BTHD, (0, 0, 0, 0, 0, short)).unflatten(1, (-1, block)).transpose(2, 3)
    key_BNHKD, value_BNHKD = (
        F.pad(x, (0, 0, 0, 0, 0, short)).unfold(1, history + block, block).transpose(-1, -2) for x in (key, value)
    )
    own = torch.arange(block, device=key.device) + history
    distance_QK = own.unsqueeze(-1) - torch.arange(history + block, device=key.device)
    mask_BNQK = (distance_QK >= 0) & (distance_QK < visible_BNQ.unsqueeze(-1))
    mixed = F.scaled_dot_product_attention(
        query_BNHQD.flatten(0, 1),
        key_BNHKD.flatten(0, 1),
        value_BNHKD.flatten(0, 1),
        attn_mask=mask_BNQK.flatten(0, 1).unsqueeze(1),
    )
    return mixed.unflatten(0, query_BNHQD.shape[:2]).transpose(2, 3).flatten(1, 2)[:, :time]


def masked_attention(query_BTHD: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Compute what `banded_attention` computes, by a mask over all keys.

    It takes memory in proportion to T^2, and has no blocks whose number a graph for every length would have to know:
    `torch.export` traces it.
    """
    time = query_BTHD.shape[1]
    history = key.shape[1] - time
    own = torch.arange(time, device=key.device) + history
    distance_QK = own.unsqueeze(-1) - torch.arange(history + time, device=key.device)
    mask_BQK = (distance_QK >= 0) & (distance_QK < visible.unsqueeze(-1))
    query, key, value = (x.transpose(1, 2) for x in (query_BTHD, key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask_BQK.unsqueeze(1)).transpose(1, 2)


def unroll(ring_SHWD: Tensor, length: Tensor) -> Tensor:
    """The last W places of each stream in order of time, [S,W,H,D]. Places before the first token are zeros."""
    window = ring_SHWD.shape[2]
    place = (length.unsqueeze(-1) + torch.arange(window, device=length.device)) % window
    return _take(ring_SHWD.transpose(1, 2), place)


def _roll(stream_BLHD: Tensor, origin: Tensor, length: Tensor, window: int) -> Tensor:
    """The ring [S,H,W,D] of streams of these lengths, whose position 0 lies at place `origin` [S] of the stream."""
    last = length.unsqueeze(-1) - 1
    position = last - (last - torch.arange(window, device=length.device)) % window
    place = (origin.unsqueeze(-1) + position).clamp(min=0, max=max(stream_BLHD.shape[1] - 1, 0))
    if stream_BLHD.shape[1] == 0:
        ring = stream_BLHD.new_zeros(len(length), window, *stream_BLHD.shape[2:])
    elif stream_BLHD.shape[0] == len(length):
        ring = _take(stream_BLHD, place)
    else:
        ring = stream_BLHD[0, place]
    return ring.masked_fill((position < 0)[..., None, None], 0).transpose(1, 2).contiguous()


def _take(x: Tensor, place: Tensor) -> Tensor:
    """x [S,L,H,D] at the places [S,W] of each stream: [S,W,H,D]."""
    return x.gather(1, place[..., None, None].expand(-1, -1, *x.shape[2:]))
