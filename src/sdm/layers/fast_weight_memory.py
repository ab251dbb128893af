"""Fast-weight product-key memory (FwPKM): a table whose rows take a gradient step after each chunk of tokens.

Shapes: B batch, T time, S streams (batch rows or documents), N = n x n slots, K key channels, D value channels,
R reads, C tokens of a chunk, F features of a token: query, value, gate and a one.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdm.errors import check_size
from sdm.layers.determinism import is_deterministic, token_by_token
from sdm.layers.interface import Streams, check_input, documents_of, streams_of, without_weight_decay
from sdm.layers.modules import Float32Linear
from sdm.layers.sizes import check_slots, default_slots
from sdm.layers.state import LayerState, Record, Undo, check_state
from sdm.ops import product_key_topk
from sdm.ops.backends import check_backend

_GATES = 8  # linear outputs whose mean is the gate, as published
_EPSILON = 1e-3  # of the inverse-distance scores, as published


@dataclasses.dataclass
class FastWeightState(LayerState):
    """The fast weights, and the tokens since they were last written."""

    table: Tensor  # [S,N,D], at least float32; replaced when it is written
    keys: Tensor  # [S,2,n,K/2], likewise
    pending: Tensor  # [S,C,F] features of the tokens of the current chunk; zeros behind the last of them

    @property
    def counts(self) -> Tensor:
        """[S] how many tokens are pending."""
        return self.pending[..., -1].sum(-1).long()

    def undo(self, features: Tensor, writes: bool) -> FastWeightUndo:
        """Record the state, its fast weights only if they are about to be written, and the features [S,T,F]."""
        table, keys = (self.table, self.keys) if writes else (self.table[:, :0], self.keys[:, :0])
        return FastWeightUndo(table.clone(), keys.clone(), self.pending.clone(), features)

    def _undo_type(self) -> type[Undo]:
        return FastWeightUndo


@dataclasses.dataclass
class FastWeightUndo(Undo):
    """The state before the tokens, and what it takes to run them again without their projections."""

    table: Tensor  # [S,N,D], or [S,0,D] if the tokens did not write it
    keys: Tensor  # [S,2,n,K/2], or without halves likewise
    pending: Tensor  # [S,C,F]
    features: Tensor  # [S,T,F]

    over_time = ("features",)

    def restore_(self, state: FastWeightState) -> None:
        """Set the state to the recorded one."""
        state.pending = self.pending
        if self.table.shape[1]:
            state.table, state.keys = self.table, self.keys


class FastWeightMemory(nn.Module):
    """Reads a few rows of a table found by product keys; after each chunk, the rows learn what followed their readers.

    A token's query is scored against each half of the keys by -log(0.001 + distance^2); the best `num_reads` of the
    product keys are weighted by a softmax, s. With v_hat = sum_i s_i V_i what is read and gamma a gate, the output is
    W_o RMSNorm(gamma v_hat + (1 - gamma) v). All tokens of a chunk read the table as it was at the chunk's start. Then

        V_i <- V_i + (num_reads / reads of slot i) sum_t gamma_t s_{t,i} (v_{t+1} - v_hat_t)

    and the keys take a gradient step that raises the entropy of each half's mean weights, so that slots are used
    evenly. Training differentiates through these steps. The chunk is written when the token behind it is there, whose
    value is the target of the chunk's last token; until then the tokens are kept in the state.

    Differences from the published code: every stream has a table and keys of its own, which start from zeros and from
    learned keys (published: one table for the whole batch that is never reset, so that it needs no start); the layer is
    a mixer, whose input the block has normalised (published: a further residual layer in front of each mixer); one
    head, as in the published models; the sizes follow the width unless given (published: 512 x 512 slots, keys and
    values of 512 channels, 8 reads, chunks of 512).

    Args:
        hidden_size: width of the input and output, and of the values.
        num_slots: slots, a perfect square; None takes (hidden_size / 4)^2, as SDM does.
        num_reads: slots that a token reads.
        key_dim: channels of queries and keys, both halves together; None takes hidden_size.
        chunk_size: tokens between two writes.
        lookahead: whether a token's target is the value behind it, as published, or its own.
        norm_eps: of the RMS norm.
        backend: of the selection.
    """

    def __init__(
        self,
        hidden_size: int,
        num_slots: int | None = None,
        num_reads: int = 8,
        key_dim: int | None = None,
        chunk_size: int = 64,
        *,
        lookahead: bool = True,
        norm_eps: float = 1e-6,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        key_dim = hidden_size if key_dim is None else key_dim
        num_slots = default_slots(hidden_size, 1) if num_slots is None else num_slots
        check_size(hidden_size=hidden_size, num_slots=num_slots, num_reads=num_reads)
        check_size(key_dim=key_dim, chunk_size=chunk_size)
        check_slots(hidden_size, {"num_heads": 1}, {"num_slots": num_slots}, num_reads=num_reads)
        if key_dim % 2:
            raise ValueError(f"key_dim must be even, for two halves, got {key_dim}")
        check_backend(backend, "product_key_topk")
        self.hidden_size, self.num_slots, self.num_reads = hidden_size, num_slots, num_reads
        self.key_dim, self.chunk_size, self.lookahead, self.backend = key_dim, chunk_size, lookahead, backend
        self.side = math.isqrt(num_slots)
        self.query_proj = Float32Linear(hidden_size, key_dim)  # distances and the steps of the keys need its digits
        self.value_proj = nn.Linear(hidden_size, hidden_size)
        self.beta_proj = Float32Linear(hidden_size, _GATES)
        self.initial_keys = nn.Parameter(torch.empty(2, self.side, key_dim // 2))
        self.output_norm = nn.RMSNorm(hidden_size, eps=norm_eps)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.reset_own_parameters()

    def reset_own_parameters(self) -> None:
        """Draw the initial keys; the projections keep torch's or the model's own scheme."""
        nn.init.normal_(self.initial_keys, std=(self.key_dim / 2) ** -0.5)

    def forward(
        self,
        x: Tensor,
        state: FastWeightState | None = None,
        return_state: bool = False,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, FastWeightState]:
        """Mix a stretch of tokens, as every `sdm.layers.interface.SequenceLayer` does."""
        check_input(x, self.hidden_size)
        streams = streams_of(x, attention_mask, cu_seqlens)
        if state is not None:
            self._check_state(state, streams.count, x.device)
        aligned = streams.align(x)
        features = self._features(aligned, streams.valid(x.shape[1]))
        rows = _to_rows(features, streams)
        readings, after = self._run(rows, state, streams.count)
        if return_state and (state is None or after.table is state.table):  # the state is the caller's, to be changed
            after.table, after.keys = after.table.clone(), after.keys.clone()
        y = streams.restore(self._output(_from_rows(readings, streams, x.shape[1]), features, x.dtype))
        return (y, after) if return_state else y

    @torch.no_grad()
    def step_(self, x: Tensor, state: FastWeightState, record: Record | None = None) -> Tensor:
        """Decode one token: x [B,hidden_size] gives y of the same shape; `state` changes in place."""
        check_input(x, self.hidden_size, "[B,hidden_size]")
        self._check_state(state, x.shape[0], x.device)
        features = self._features(x, None)
        if record is not None:
            full = bool((state.counts == self.chunk_size).any())
            record(state.undo(features.unsqueeze(1), full))
        return self._output(self._append_(features, state), features, x.dtype)

    @torch.no_grad()
    def extend_(
        self, x: Tensor, state: FastWeightState, attention_mask: Tensor | None = None, record: Record | None = None
    ) -> Tensor:
        """Mix a stretch of tokens in place, as every `sdm.layers.interface.SequenceLayer` does."""
        check_input(x, self.hidden_size)
        streams = streams_of(x, attention_mask, None)
        self._check_state(state, streams.count, x.device)
        features = self._features(streams.align(x), streams.valid(x.shape[1]))
        if record is not None:
            total = state.counts + features[..., -1].sum(-1)
            record(state.undo(features, bool((total > self.chunk_size).any())))
        if is_deterministic():
            like = features[..., : self.hidden_size]
            readings = token_by_token(lambda t: self._append_(features[:, t], state), x.shape[1], like)
        else:
            readings, after = self._run(features, state, streams.count)
            state.assign_(after)
        return streams.restore(self._output(readings, features, x.dtype))

    @torch.no_grad()
    def replay_(self, state: FastWeightState, undo: FastWeightUndo) -> None:
        """Run the tokens of an undo record again."""
        state.assign_(self._run(undo.features, state, undo.streams)[1])

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimizer should not decay: norms, biases, the gate and the initial keys."""
        return without_weight_decay(self)

    def start_state(self, batch_size: int, learn: bool = False) -> FastWeightState:
        """The state of streams without tokens, as every `sdm.layers.interface.SequenceLayer` has it."""
        dtype = torch.promote_types(self.value_proj.weight.dtype, torch.float32)
        keys = self.initial_keys.to(dtype).expand(batch_size, *self.initial_keys.shape)
        return FastWeightState(
            keys.new_zeros(batch_size, self.num_slots, self.hidden_size),
            keys if learn else keys.detach().clone(),
            keys.new_zeros(batch_size, self.chunk_size, self._num_features()),
        )

    def _num_features(self) -> int:
        return self.key_dim + self.hidden_size + 2

    def _check_state(self, state: FastWeightState, streams: int, device: torch.device) -> None:
        table, keys = (self.num_slots, self.hidden_size), (2, self.side, self.key_dim // 2)
        pending = (self.chunk_size, self._num_features())
        check_state(state, FastWeightState, streams, device, table=table, keys=keys, pending=pending)

    def _features(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """Query, value, gate and a one for each token, side by side; zeros for padding."""
        gate = torch.sigmoid(self.beta_proj(x).mean(-1, keepdim=True))
        query, value = self.query_proj(x), F.layer_norm(self.value_proj(x).to(gate.dtype), (self.hidden_size,))
        features = torch.cat((query, value, gate, torch.ones_like(gate)), dim=-1)
        return features if valid is None else features * valid.unsqueeze(-1)

    def _parts(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [...,K], value [...,D] and gate [...,1]."""
        query, value, gate, _ = features.split((self.key_dim, self.hidden_size, 1, 1), dim=-1)
        return query, value, gate

    def _run(self, features: Tensor, state: FastWeightState | None, streams: int) -> tuple[Tensor, FastWeightState]:
        """What the tokens read [S,T,D], from their features [S,T,F], left-aligned; and the state after them."""
        before, time = 0, features.shape[1]
        if state is None:
            state = self.start_state(streams, learn=True)
        elif state.pending.numel():
            before = int(state.counts.max())
        counts = state.counts
        total = counts + features[..., -1].sum(-1).long()
        place = torch.arange(before + time, device=features.device).expand(len(counts), -1)
        own = counts.unsqueeze(-1)
        stream = torch.cat((state.pending[:, :before].to(features.dtype), features), dim=1)
        source = torch.where(place < own, place, before + place - own).clamp(max=max(0, before + time - 1))
        stream = _gather(stream, source)
        stream = stream * (place < total.unsqueeze(-1)).unsqueeze(-1)
        table, keys, readings = state.table, state.keys, []
        for start in range(0, before + time, self.chunk_size):
            chunk, behind = stream[:, start : start + self.chunk_size], start + self.chunk_size
            read, weight, index = self._read(chunk, table, keys)
            readings.append(read)
            if behind < before + time:
                following = stream[:, start + 1 : behind + 1]
                complete = (total > behind).view(-1, 1, 1)
                new_table, new_keys = self._written(chunk, following, read, weight, index, table, keys)
                table = torch.where(complete, new_table, table)
                keys = torch.where(complete.unsqueeze(-1), new_keys, keys)
        read = torch.cat(readings, dim=1) if readings else features[..., : self.hidden_size]
        read = _gather(read, (own + torch.arange(time, device=features.device)).clamp(max=max(0, before + time - 1)))
        last = (total - 1).clamp(min=0) // self.chunk_size * self.chunk_size
        stream = F.pad(stream, (0, 0, 0, self.chunk_size))
        pending = _gather(stream, last.unsqueeze(-1) + torch.arange(self.chunk_size, device=features.device))
        return read, FastWeightState(table, keys, pending)

    def _append_(self, features: Tensor, state: FastWeightState) -> Tensor:
        """What one token reads [S,D], from its features [S,F]; the state changes in place."""
        counts = state.counts
        if bool((full := counts == self.chunk_size).any()):
            read, weight, index = self._read(state.pending, state.table, state.keys)
            following = torch.cat((state.pending[:, 1:], features.unsqueeze(1)), dim=1)
            table, keys = self._written(state.pending, following, read, weight, index, state.table, state.keys)
            complete = full.view(-1, 1, 1)
            state.table = torch.where(complete, table, state.table)
            state.keys = torch.where(complete.unsqueeze(-1), keys, state.keys)
            state.pending.masked_fill_(complete, 0)
            counts = counts.masked_fill(full, 0)
        state.pending[torch.arange(len(counts), device=counts.device), counts] = features.to(state.pending.dtype)
        return self._read(features.unsqueeze(1), state.table, state.keys)[0].squeeze(1)

    def _scores(self, query: Tensor, keys: Tensor) -> Tensor:
        """[S,T,2,n] inverse-distance scores of each half, from query [S,T,K] and keys [S,2,n,K/2]."""
        halves = query.unflatten(-1, (2, -1)).transpose(1, 2)
        # By the differences themselves: the short way over products loses the distance of a key that is close.
        distance = torch.cdist(halves, keys.to(query.dtype), compute_mode="donot_use_mm_for_euclid_dist")
        return -torch.log(_EPSILON + distance.square()).transpose(1, 2)

    def _read(self, features: Tensor, table: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What tokens read [S,T,D], with weights and slots [S,T,R]."""
        scores = self._scores(self._parts(features)[0], keys)
        selected, index = product_key_topk(scores.flatten(-2), self.num_reads, backend=self.backend)
        weight = selected.softmax(-1)
        first = torch.arange(len(table), device=table.device).view(-1, 1, 1) * self.num_slots
        place = (index + first).flatten(0, 1)
        rows = table.to(weight.dtype).flatten(0, 1)
        read = F.embedding_bag(place, rows, per_sample_weights=weight.flatten(0, 1), mode="sum")
        return read.view(*index.shape[:2], self.hidden_size), weight, index

    def _written(
        self,
        chunk: Tensor,
        following: Tensor,
        read: Tensor,
        weight: Tensor,
        index: Tensor,
        table: Tensor,
        keys: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The fast weights after a chunk of features [S,C,F], each token followed by `following` [S,C,F]."""
        query, value, gate = self._parts(chunk)
        target = self._parts(following)[1] if self.lookahead else value
        error = gate * (target - read)
        first = torch.arange(len(table), device=table.device).view(-1, 1, 1) * self.num_slots
        place = (index + first).flatten()
        reads = weight.new_zeros(len(table) * self.num_slots).index_add(0, place, weight.new_ones(place.shape))
        reads = reads[place].view_as(weight)
        step = (weight * (self.num_reads / reads)).unsqueeze(-1) * error.unsqueeze(2)
        rows = table.flatten(0, 1).index_add(0, place, step.flatten(0, 2).to(table.dtype))
        return rows.view_as(table), self._spread(query, keys)

    def _spread(self, query: Tensor, keys: Tensor) -> Tensor:
        """The keys after a gradient step on the entropies of the mean weights of a chunk's queries [S,C,K].

        With p_t the softmax over the best sub-scores u_t of a half, P their mean over the chunk and H its entropy,
        dH/du_t[j] = p_t[j] (g[j] - sum_l p_t[l] g[l]) / C with g = -log P - 1, and du_t[j]/dkey_j is
        2 (q_t - key_j) / (0.001 + distance^2), whose denominator is exp(-u_t[j]).
        """
        scores = self._scores(query, keys).transpose(1, 2)  # [S,2,C,n]
        best, index = scores.topk(min(self.num_reads, self.side), dim=-1)
        share = best.softmax(-1)
        mean = torch.zeros_like(scores).scatter(-1, index, share).mean(-2)
        slope = -(mean.clamp(min=torch.finfo(mean.dtype).tiny).log() + 1).unsqueeze(-2).expand_as(scores)
        slope = slope.gather(-1, index)
        slope = share * (slope - (share * slope).sum(-1, keepdim=True)) / query.shape[1]
        pull = torch.zeros_like(scores).scatter(-1, index, 2 * slope * best.exp())
        halves = query.unflatten(-1, (2, -1)).transpose(1, 2)
        with torch.autocast(query.device.type, enabled=False):  # a rounded step would address other slots
            moved = pull.transpose(-1, -2) @ halves - pull.sum(-2).unsqueeze(-1) * keys.to(query.dtype)
        return keys + moved.to(keys.dtype)

    def _output(self, read: Tensor, features: Tensor, dtype: torch.dtype) -> Tensor:
        _, value, gate = self._parts(features)
        mixed = gate * read + (1 - gate) * value
        return self.out_proj(self.output_norm(mixed.to(self.output_norm.weight.dtype)).to(dtype))

    def extra_repr(self) -> str:
        """Sizes and options for `print(layer)`."""
        return (
            f"hidden_size={self.hidden_size}, num_slots={self.num_slots}, num_reads={self.num_reads}, "
            f"key_dim={self.key_dim}, chunk_size={self.chunk_size}"
        )


def _gather(x: Tensor, place: Tensor) -> Tensor:
    """x [S,T,F] at the places [S,L]."""
    if not x.shape[1]:
        return x.new_zeros(*place.shape, x.shape[-1])
    return x.gather(1, place.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def _to_rows(features: Tensor, streams: Streams) -> Tensor:
    """[S,L,F] a row for each stream, zeros behind its last token; rows as they are, or packed documents."""
    if streams.bounds is None:
        return features
    lengths = streams.bounds.diff()
    place = torch.arange(int(lengths.max()) if lengths.numel() else 0, device=features.device)
    source = (streams.bounds[:-1].unsqueeze(-1) + place).clamp(max=max(0, features.shape[1] - 1))
    rows = _gather(features.expand(len(lengths), -1, -1), source)
    return rows * (place < lengths.unsqueeze(-1)).unsqueeze(-1)


def _from_rows(rows: Tensor, streams: Streams, time: int) -> Tensor:
    """The tokens of `_to_rows` where they were."""
    if streams.bounds is None:
        return rows
    document = documents_of(streams.bounds, time)
    place = torch.arange(time, device=rows.device) - streams.bounds[document]
    return rows[document, place].unsqueeze(0)
