"""What the two attention layers share: projections, rotary positions, the output gate and the key-value state.

Shapes: B batch, T time, S streams (batch rows or documents), H query heads, G key-value heads, D head channels,
C places of a key-value buffer.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdm.errors import check_size
from sdm.layers.determinism import is_deterministic, token_by_token
from sdm.layers.interface import Streams, check_input, documents_of, streams_of, without_weight_decay
from sdm.layers.rope import Rope, rotate, rotation
from sdm.layers.sizes import default_heads
from sdm.layers.state import LayerState, Record, Undo, check_state


@dataclasses.dataclass
class KeyValueState(LayerState):
    """The keys (rotated to their positions) and values that later tokens may look at."""

    key: Tensor  # [S,G,C,D]
    value: Tensor  # [S,G,C,D]
    length: Tensor  # [S] tokens seen so far, which is the position of the next one

    def stacked(self, others: Sequence[KeyValueState]) -> KeyValueState:
        """Return the state of all streams, with buffers as long as the longest."""
        states = (self, *others)
        capacity = max(state.key.shape[2] for state in states)
        return type(self)(
            torch.cat([F.pad(state.key, (0, 0, 0, capacity - state.key.shape[2])) for state in states]),
            torch.cat([F.pad(state.value, (0, 0, 0, capacity - state.value.shape[2])) for state in states]),
            torch.cat([state.length for state in states]),
        )

    def _undo_type(self) -> type[Undo]:
        return RingUndo

    def undo(self, key_STGD: Tensor, value_STGD: Tensor, valid_ST: Tensor) -> Undo:
        """Record the places of a ring that new keys and values are about to take."""
        window = self.key.shape[2]
        place = _ring_places(self.length, min(key_STGD.shape[1], window), window)[:, None, :, None]
        old_key, old_value = (x.gather(2, place.expand(-1, x.shape[1], -1, x.shape[3])) for x in (self.key, self.value))
        return RingUndo(old_key, old_value, self.length.clone(), key_STGD, value_STGD, valid_ST)


@dataclasses.dataclass
class LengthUndo(Undo):
    """The number of tokens before. Keys and values behind it are never looked at, and overwritten by later ones."""

    length: Tensor  # [S]
    valid: Tensor  # [S,T] which of the tokens are not padding

    over_time = ("valid",)

    def restore_(self, state: KeyValueState) -> None:
        """Set the number of tokens back."""
        state.length = self.length

    def replay_(self, state: KeyValueState) -> None:
        """Count the tokens again."""
        state.length = self.length + self.valid.sum(1)


@dataclasses.dataclass
class RingUndo(Undo):
    """The keys and values that left a ring for the tokens, and those of the tokens themselves."""

    old_key: Tensor  # [S,G,P,D], of the first P = min(T, W) places that the tokens took
    old_value: Tensor  # [S,G,P,D]
    length: Tensor  # [S] tokens before
    key: Tensor  # [S,T,G,D]
    value: Tensor  # [S,T,G,D]
    valid: Tensor  # [S,T] which of the tokens are not padding

    over_time = ("key", "value", "valid")

    def restore_(self, state: KeyValueState) -> None:
        """Put the old keys and values back. Where a stream had padding, its untouched places get what they have."""
        window, count = state.key.shape[2], self.old_key.shape[2]
        place = _ring_places(self.length, count, window)[:, None, :, None].expand_as(self.old_key)
        state.key.scatter_(2, place, self.old_key)
        state.value.scatter_(2, place, self.old_value)
        state.length = self.length

    def replay_(self, state: KeyValueState) -> None:
        """Put the keys and values of the tokens, none of them padding, into the ring."""
        window, time = state.key.shape[2], self.key.shape[1]
        last = min(time, window)
        place = _ring_places(self.length + (time - last), last, window)[:, None, :, None]
        for ring, new in ((state.key, self.key), (state.value, self.value)):
            new = new[:, time - last :].transpose(1, 2).to(ring.dtype)
            ring.scatter_(2, place.expand_as(new), new)
        state.length = self.length + time


def _ring_places(first: Tensor, count: int, window: int) -> Tensor:
    """The places [S,count] of the positions from `first` [S] on."""
    return (first.unsqueeze(-1) + torch.arange(count, device=first.device)) % window


class GatedAttention(nn.Module, abc.ABC):
    """Attention with rotary positions and an elementwise sigmoid gate on its output; subclasses say who sees whom.

    Positions count the valid tokens of a stream, so that padding moves nothing.
    """

    state_type: type[KeyValueState] = KeyValueState

    def __init__(self, hidden_size: int, num_heads: int | None, num_kv_heads: int | None, rope: Rope) -> None:
        super().__init__()
        num_heads = default_heads(hidden_size, num_heads)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_size(num_kv_heads=num_kv_heads)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads = {num_heads} must be divisible by num_kv_heads = {num_kv_heads}")
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, num_kv_heads
        self.head_dim, self.rope = hidden_size // num_heads, rope
        rope.check(self.head_dim)
        kv_size = num_kv_heads * self.head_dim
        self.query_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key_proj = nn.Linear(hidden_size, kv_size, bias=False)
        self.value_proj = nn.Linear(hidden_size, kv_size, bias=False)
        self.gate_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        state: KeyValueState | None = None,
        return_state: bool = False,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, KeyValueState]:
        """Mix a stretch of tokens, as every `sdm.layers.interface.SequenceLayer` does."""
        check_input(x, self.hidden_size)
        streams = streams_of(x, attention_mask, cu_seqlens)
        if state is not None:
            self._check_state(state, streams.count, x.device)
        aligned = streams.align(x)
        position = streams.places(x.shape[1], x.device)
        if state is not None and streams.bounds is None:
            position = position + state.length.unsqueeze(-1)
        elif state is not None and streams.bounds is not None:
            position = position + state.length[documents_of(streams.bounds, x.shape[1])]
        query, key, value = self._project(aligned, position)
        mixed, after = self._attend(query, key, value, position, state, streams, return_state)
        y = streams.restore(self._output(aligned, mixed))
        return (y, after) if after is not None else y

    @torch.no_grad()
    def extend_(
        self, x: Tensor, state: KeyValueState, attention_mask: Tensor | None = None, record: Record | None = None
    ) -> Tensor:
        """Mix a stretch of tokens in place, as every `sdm.layers.interface.SequenceLayer` does."""
        check_input(x, self.hidden_size)
        streams = streams_of(x, attention_mask, None)
        self._check_state(state, streams.count, x.device)
        aligned = streams.align(x)
        position = streams.places(x.shape[1], x.device) + state.length.unsqueeze(-1)
        query, key, value = self._project(aligned, position)
        if record is not None:
            valid = streams.valid(x.shape[1])
            record(state.undo(key, value, _all_valid(x) if valid is None else valid))
        if is_deterministic():
            mixed = token_by_token(
                lambda t: self._mix_token_(query[:, t], key[:, t], value[:, t], state), x.shape[1], query
            )
            return self._output(aligned, mixed)
        mixed, after = self._attend(query, key, value, position, state, streams, True)
        assert after is not None
        state.assign_(after)
        return streams.restore(self._output(aligned, mixed))

    def _mix_token_(self, query_BHD: Tensor, key_BGD: Tensor, value_BGD: Tensor, state: KeyValueState) -> Tensor:
        mixed = self._attend_step_(query_BHD, key_BGD, value_BGD, state)
        state.length += 1
        return mixed

    @torch.no_grad()
    def replay_(self, state: KeyValueState, undo: LengthUndo | RingUndo) -> None:
        """Put the keys and values of an undo record back."""
        undo.replay_(state)

    @torch.no_grad()
    def step_(self, x: Tensor, state: KeyValueState, record: Record | None = None) -> Tensor:
        """Decode one token: x [B,hidden_size] gives y of the same shape; `state` changes in place."""
        check_input(x, self.hidden_size, "[B,hidden_size]")
        self._check_state(state, x.shape[0], x.device)
        query, key, value = self._project(x, state.length)
        if record is not None:
            record(state.undo(key.unsqueeze(1), value.unsqueeze(1), _all_valid(x.unsqueeze(1))))
        return self._output(x, self._mix_token_(query, key, value, state))

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimizer should not decay: norms."""
        return without_weight_decay(self)

    def start_state(self, batch_size: int, learn: bool = False) -> KeyValueState:
        """The state of streams without tokens, as every `sdm.layers.interface.SequenceLayer` has it."""
        weight = self.key_proj.weight
        shape = (batch_size, self.num_kv_heads, self._start_capacity(), self.head_dim)
        length = torch.zeros(batch_size, dtype=torch.int64, device=weight.device)
        return self.state_type(weight.new_zeros(shape), weight.new_zeros(shape), length)

    @abc.abstractmethod
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
        """What each token reads, [B,T,H,D], and the state after the last one if it is asked for."""

    def _attend_documents(
        self,
        query_BTHD: Tensor,
        key_BTGD: Tensor,
        value_BTGD: Tensor,
        position: Tensor,
        state: KeyValueState | None,
        bounds: Tensor,
        return_state: bool,
    ) -> tuple[Tensor, KeyValueState | None]:
        """`_attend` for one packed document after the other."""
        outputs, states = [], []
        for document, (start, end) in enumerate(itertools.pairwise(bounds.tolist())):
            row = slice(document, document + 1)
            own = None if state is None else state.map(lambda x, row=row: x[row])  # type: ignore[misc]
            query, key, value, place = (x[:, start:end] for x in (query_BTHD, key_BTGD, value_BTGD, position))
            mixed, after = self._attend(query, key, value, place, own, Streams(1), return_state)
            outputs.append(mixed)
            states.append(after)
        known = [after for after in states if after is not None]
        return torch.cat(outputs, dim=1), known[0].stacked(known[1:]) if known else None

    @abc.abstractmethod
    def _attend_step_(self, query_BHD: Tensor, key_BGD: Tensor, value_BGD: Tensor, state: KeyValueState) -> Tensor:
        """Write one key and value per stream into the state, all but its length, and read it: [B,H,D]."""

    @abc.abstractmethod
    def _start_capacity(self) -> int:
        """The places of a fresh state's buffers."""

    def _check_state(self, state: KeyValueState, streams: int, device: torch.device) -> None:
        buffer = (self.num_kv_heads, None, self.head_dim)
        check_state(state, KeyValueState, streams, device, key=buffer, value=buffer, length=())

    def _project(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [...,H,D], keys and values [...,G,D]; position has the leading dimensions of x, or 1 for B."""
        cosine, sine = rotation(position, self.head_dim, self.rope)
        both = torch.cat((self.query_proj(x), self.key_proj(x)), dim=-1).unflatten(-1, (-1, self.head_dim))
        query, key = rotate(both, cosine, sine).split((self.num_heads, self.num_kv_heads), dim=-2)
        return query, key, self.value_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))

    def _output(self, x: Tensor, mixed: Tensor) -> Tensor:
        return self.out_proj(mixed.flatten(-2) * torch.sigmoid(self.gate_proj(x)))


def reading_is_free(x: Tensor) -> bool:
    """Whether the values of x can be looked at without waiting for a device."""
    return x.is_cpu


def _all_valid(x_BTC: Tensor) -> Tensor:
    return torch.ones(x_BTC.shape[:2], dtype=torch.bool, device=x_BTC.device)


def write_(state: KeyValueState, key_SGD: Tensor, value_SGD: Tensor, place: Tensor) -> None:
    """Put one key and value per stream into the place [S] of its buffer."""
    key_SG1D, value_SG1D = key_SGD.unsqueeze(2), value_SGD.unsqueeze(2)
    index = place[:, None, None, None].expand_as(key_SG1D)
    state.key.scatter_(2, index, key_SG1D.to(state.key.dtype))
    state.value.scatter_(2, index, value_SG1D.to(state.value.dtype))
