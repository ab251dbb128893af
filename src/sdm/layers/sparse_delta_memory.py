"""The Sparse Delta Memory layer: a recurrent sequence mixer whose state is a table of N slots per head.

Shapes: B batch, T time, H heads, N slots, K = sqrt(N), D value channels, W writes, R reads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdm.errors import check_one_of, check_size
from sdm.layers.decode_linear import project_together
from sdm.layers.interface import check_input, check_mask, without_weight_decay
from sdm.layers.modules import LARGEST_DECAY_RATE, Float32Linear, MaskedBatchNorm, decay_gate, reset_decay
from sdm.layers.sizes import check_slots, default_slots
from sdm.layers.state import LayerState, Record, Undo, check_state, start_memory
from sdm.ops import product_key_topk, sparse_delta_rule, sparse_delta_rule_, sparse_delta_step_
from sdm.ops.backends import check_backend
from sdm.ops.checks import check_shape, check_tensor
from sdm.ops.sparse_delta_rule.inputs import UPDATES, Tokens

WEIGHTINGS = ("softmax", "l2")
OUTPUT_GATES = ("sigmoid", "silu")


class TableState(LayerState):
    """Base of the states of a Sparse Delta Memory, which say where the rows of its tables lie."""

    def check(self, streams: int, shape: tuple[int, int, int], device: torch.device) -> None:
        """Raise unless this is the state of so many streams of a layer with tables of this shape [H,N,D]."""
        raise NotImplementedError

    def undo(self, tokens: Tokens) -> Undo:
        """Record what the tokens are about to change."""
        raise NotImplementedError

    def write_and_read_(self, tokens: Tokens, update: str, backend: str) -> Tensor:
        """Write and read tokens [S,T,H,...] in place: readings [S,T,H,D]."""
        raise NotImplementedError


@dataclasses.dataclass
class MemoryTable(TableState):
    """The state of a Sparse Delta Memory: a whole table for each stream."""

    memory: Tensor  # [S,H,N,D], at least float32 unless a caller stores it in less

    def _undo_type(self) -> type[Undo]:
        return TableUndo

    def undo(self, tokens: Tokens) -> TableUndo:
        """Record the rows that the tokens are about to write, or the whole table if it is not much larger."""
        S, T, H, W = tokens.write_index.shape
        N, D = self.memory.shape[2:]
        if 2 * T * W >= N:
            rows = self.memory.clone()
        else:
            rows = self.memory.view(-1, D).index_select(0, _flat_rows(tokens.write_index, N)).view(S, T, H, W, D)
        return TableUndo(*tokens[:5], rows)

    def check(self, streams: int, shape: tuple[int, int, int], device: torch.device) -> None:
        """Raise unless this is the state of so many streams with tables of this shape [H,N,D]."""
        check_state(self, MemoryTable, streams, device, memory=shape)

    def write_and_read_(self, tokens: Tokens, update: str, backend: str) -> Tensor:
        """Write and read tokens [S,T,H,...] in place: readings [S,T,H,D]."""
        if tokens.value.shape[1] == 1:
            token = (tensor.squeeze(1) for tensor in tokens)
            return sparse_delta_step_(self.memory, *token, update=update, backend=backend).unsqueeze(1)
        return sparse_delta_rule_(self.memory, *tokens, update=update, backend=backend)


@dataclasses.dataclass
class TableWrites(Undo):
    """The writes of tokens, which put them back."""

    write_index: Tensor  # [S,T,H,W]
    write_weight: Tensor  # [S,T,H,W]
    value: Tensor  # [S,T,H,D]
    beta: Tensor  # [S,T,H]
    log_decay: Tensor  # [S,T,H] or [S,T,H,W]

    over_time = ("write_index", "write_weight", "value", "beta", "log_decay")


@dataclasses.dataclass
class TableUndo(TableWrites):
    """The rows that tokens wrote, as they were before the first of them, and the writes themselves."""

    rows: Tensor  # [S,T,H,W,D], or the whole table [S,H,N,D]

    def restore_(self, state: MemoryTable) -> None:
        """Put the old rows back. A slot that several tokens wrote has the same old row for each of them."""
        if self.rows.dim() == 4:
            state.memory.copy_(self.rows)
            return
        N, D = state.memory.shape[2:]
        rows = self.rows.reshape(-1, D)
        state.memory.view(-1, D).index_copy_(0, _flat_rows(self.write_index, N), rows)

    def first(self, tokens: int) -> TableUndo:
        """Return the record of the first tokens, with their rows or the whole table."""
        rows = self.rows if self.rows.dim() == 4 else self.rows[:, :tokens]
        return dataclasses.replace(super().first(tokens), rows=rows)


class SparseDeltaMemory(nn.Module):
    """Writes each token into `num_writes` slots of a large memory and reads `num_reads` of them.

    Every token projects to product-key scores for writing and reading, a value, and two gates; the memory follows
    `sdm.ops.sparse_delta_rule`; what is read is normalised per head, gated elementwise and projected back.

    Args:
        hidden_size: width of the input and output.
        num_heads: memories side by side, each with hidden_size / num_heads value channels. Fewer heads make a larger
            state at the same cost.
        num_slots: slots per head, a perfect square. None takes (hidden_size / (4 num_heads))^2, the paper's choice.
        num_writes: slots written per token and head.
        num_reads: slots read per token and head.
        learned_initial_state: start from a learned table shared by the batch instead of zeros.
        initial_state_std: scale of the learned table at initialisation. One write moves a slot by about
            1 / num_writes of a value; a table much larger than that drowns the first writes.
        largest_decay_rate: decay rates A start uniform between 0 and this; a small one makes a memory that forgets
            slowly from the start.
        update: "delta", or "slot" for the per-slot form of the write.
        weighting: "softmax" over the selected scores, or "l2": the selected scores divided by their norm.
        temperature: the softmax divides the scores by it.
        decay_per_write: weight the decay of each written slot by its share of the write instead of decaying all
            written slots alike. The mean over the slots of a token stays the same.
        normalize_scores: RMS-normalise each half of the scores, against the collapse onto few slots.
        query_batch_norm: batch-normalise the read scores over the valid tokens, against the same collapse. It makes
            the rows of a training batch depend on each other, and training differ from evaluation.
        output_gate: "sigmoid" or "silu".
        norm_eps: of the RMS norms.
        backend: passed to the ops: "auto", or one of `sdm.ops.available_backends()`.
    """

    # Is shown the slots, weights and gates of every forward pass, for statistics.
    observer: Callable[[Tokens], None] | None = None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 1,
        num_slots: int | None = None,
        num_writes: int = 64,
        num_reads: int = 64,
        learned_initial_state: bool = True,
        *,
        initial_state_std: float = 0.002,
        largest_decay_rate: float = LARGEST_DECAY_RATE,
        update: str = "delta",
        weighting: str = "softmax",
        temperature: float = 1.0,
        decay_per_write: bool = False,
        normalize_scores: bool = False,
        query_batch_norm: bool = False,
        output_gate: str = "sigmoid",
        norm_eps: float = 1e-6,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_size(hidden_size=hidden_size, num_heads=num_heads, num_writes=num_writes, num_reads=num_reads)
        check_one_of(UPDATES, update=update)
        check_one_of(WEIGHTINGS, weighting=weighting)
        check_one_of(OUTPUT_GATES, output_gate=output_gate)
        check_backend(backend, "sparse_delta_rule", "product_key_topk")
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        if initial_state_std < 0:
            raise ValueError(f"initial_state_std must not be negative, got {initial_state_std}")
        if not largest_decay_rate > 0:
            raise ValueError(f"largest_decay_rate must be positive, got {largest_decay_rate}")
        self.largest_decay_rate = largest_decay_rate
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.num_slots = default_slots(hidden_size, num_heads) if num_slots is None else num_slots
        check_size(num_slots=self.num_slots)
        self.num_writes, self.num_reads = num_writes, num_reads
        counts = {"num_writes": num_writes, "num_reads": num_reads}
        check_slots(hidden_size, {"num_heads": num_heads}, {"num_slots": self.num_slots}, **counts)
        self.head_dim = hidden_size // num_heads
        self.initial_state_std = initial_state_std
        self.update, self.weighting, self.temperature = update, weighting, temperature
        self.decay_per_write, self.output_gate, self.backend = decay_per_write, output_gate, backend

        score_size = 2 * math.isqrt(self.num_slots)
        self.query_proj = nn.Linear(hidden_size, num_heads * score_size, bias=False)
        self.key_proj = nn.Linear(hidden_size, num_heads * score_size, bias=False)
        self.value_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.beta_proj = Float32Linear(hidden_size, num_heads, bias=False)
        self.decay_proj = Float32Linear(hidden_size, num_heads, bias=False)
        self.decay_log_rate = nn.Parameter(torch.empty(num_heads))  # log A
        self.decay_bias = nn.Parameter(torch.empty(num_heads))  # b_dt
        self.query_norm = nn.RMSNorm(score_size // 2, eps=norm_eps) if normalize_scores else None
        self.key_norm = nn.RMSNorm(score_size // 2, eps=norm_eps) if normalize_scores else None
        self.query_batch_norm = MaskedBatchNorm(num_heads * score_size) if query_batch_norm else None
        self.gate_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.output_norm = nn.RMSNorm(self.head_dim, eps=norm_eps)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        if learned_initial_state:
            self.initial_state = nn.Parameter(torch.empty(num_heads, self.num_slots, self.head_dim))
        else:
            self.register_parameter("initial_state", None)
        self.reset_own_parameters()

    def reset_own_parameters(self) -> None:
        """Initialise the gates and the learned table; the projections keep torch's or the model's own scheme."""
        reset_decay(self.decay_log_rate, self.decay_bias, largest_rate=self.largest_decay_rate)
        if self.initial_state is not None:
            nn.init.normal_(self.initial_state, std=self.initial_state_std)

    def forward(
        self,
        x: Tensor,
        state: MemoryTable | Tensor | None = None,
        return_state: bool = False,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        key_input: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, MemoryTable]:
        """Mix a stretch of tokens.

        Args:
            x: [B,T,hidden_size].
            state: the memory to continue from, or its tensor [B,H,N,D] ([documents,H,N,D] with cu_seqlens); None starts
                anew. It is not changed.
            return_state: also return the memory after the last token.
            attention_mask: [B,T], zero or False on padding, left or right. Padding leaves the memory as it is and
                gives zeros.
            cu_seqlens: [documents + 1] offsets of documents packed into one row (B = 1).
            key_input: [B,T,hidden_size], what the write addresses are projected from instead of x.

        Returns:
            y [B,T,hidden_size], or (y, state).
        """
        check_input(x, self.hidden_size)
        mask = check_mask(x, attention_mask, cu_seqlens)
        if key_input is not None:
            check_tensor("key_input", key_input, x.device)
            check_shape("key_input", key_input, tuple(x.shape), "the shape of x")
        x, key_input = _without_padding(x, key_input, mask)
        for_channels = self._for_channels(x)
        tokens = self._tokens(x, for_channels, mask, key_input)
        if self.observer is not None:
            self.observer(tokens)
        if isinstance(state, TableState) and not isinstance(state, MemoryTable):
            raise TypeError(f"{type(state).__name__} changes in place: use step_ or extend_, under torch.no_grad()")
        initial_state = self.initial_state if state is None else _table(state).memory  # type: ignore[attr-defined]
        readings, final_state = self._recur(
            tokens, initial_state, output_final_state=return_state, cu_seqlens=cu_seqlens
        )
        y = self._output(for_channels, readings)
        if mask is not None:
            y = y * mask.unsqueeze(-1)
        return (y, MemoryTable(final_state)) if final_state is not None else y

    @torch.no_grad()
    def step_(
        self, x: Tensor, state: TableState | Tensor, record: Record | None = None, key_input: Tensor | None = None
    ) -> Tensor:
        """Decode one token: x [B,hidden_size] gives y of the same shape; `state` changes in place."""
        check_input(x, self.hidden_size, "[B,hidden_size]")
        if key_input is not None:
            check_tensor("key_input", key_input, x.device)
            check_shape("key_input", key_input, tuple(x.shape), "the shape of x")
            key_input = key_input.unsqueeze(1)
        state = _table(state)
        state.check(len(x), (self.num_heads, self.num_slots, self.head_dim), x.device)
        projected, gate = self._project_step(x, key_input)
        tokens = self._tokens_of(projected, None)
        if record is not None:
            record(state.undo(tokens))
        return self._output(x, state.write_and_read_(tokens, self.update, self.backend).squeeze(1), gate)

    @torch.no_grad()
    def extend_(
        self,
        x: Tensor,
        state: TableState,
        attention_mask: Tensor | None = None,
        record: Record | None = None,
        key_input: Tensor | None = None,
    ) -> Tensor:
        """Mix a stretch of tokens in place, as every `sdm.layers.interface.SequenceLayer` does."""
        check_input(x, self.hidden_size)
        mask = check_mask(x, attention_mask, None)
        state = _table(state)
        state.check(len(x), (self.num_heads, self.num_slots, self.head_dim), x.device)
        x, key_input = _without_padding(x, key_input, mask)
        tokens = self._tokens(x, x, mask, key_input)
        if self.observer is not None:
            self.observer(tokens)
        if record is not None:
            record(state.undo(tokens))
        y = self._output(x, state.write_and_read_(tokens, self.update, self.backend))
        return y if mask is None else y * mask.unsqueeze(-1)

    @torch.no_grad()
    def replay_(self, state: TableState, undo: TableWrites) -> None:
        """Write the tokens of an undo record again."""
        reads = undo.write_index[..., :1], undo.write_weight[..., :1]
        tokens = Tokens(undo.write_index, undo.write_weight, undo.value, undo.beta, undo.log_decay, *reads)
        state.write_and_read_(tokens, self.update, self.backend)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimizer should not decay: norms, decay rates, gates, the initial state."""
        return without_weight_decay(self)

    def start_state(self, batch_size: int, learn: bool = False) -> MemoryTable:
        """The state of streams without tokens, as every `sdm.layers.interface.SequenceLayer` has it."""
        shape = (batch_size, self.num_heads, self.num_slots, self.head_dim)
        return MemoryTable(start_memory(self.initial_state, shape, self.value_proj.weight, learn))

    def sparse_tables(self) -> dict[str, SparseDeltaMemory]:
        """The tensors of the state of which a stream changes few rows, each with the layer that it belongs to."""
        return {"memory": self}

    def _for_channels(self, x: Tensor) -> Tensor:
        """What values and output gates are computed from: the input, which ranks that split the channels share."""
        return x

    def _recur(self, tokens: Tokens, initial_state: Tensor | None, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Readings [B,T,H,D] and the final state: the one place where tokens meet."""
        return sparse_delta_rule(
            *tokens,
            initial_state=initial_state,
            num_slots=self.num_slots,
            update=self.update,
            backend=self.backend,
            **options,
        )

    def _tokens(self, x: Tensor, for_channels: Tensor, mask: Tensor | None, key_input: Tensor | None) -> Tokens:
        """What the memory is told about each token, [B,T,H,...]; padding neither decays nor writes."""
        return self._tokens_of(self._project(x, for_channels, key_input), mask)

    def _project(self, x: Tensor, for_channels: Tensor, key_input: Tensor | None) -> tuple[Tensor, ...]:
        """The projections of query, key, value, beta and decay, [B,T,...]."""
        key = self.key_proj(x if key_input is None else key_input)
        return self.query_proj(x), key, self.value_proj(for_channels), self.beta_proj(x), self.decay_proj(x)

    def _project_step(self, x: Tensor, key_input: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """What `_project` gives for one token x [B,hidden_size], and the projected gate if it is at hand."""
        layers = self.query_proj, self.key_proj, self.value_proj, self.beta_proj, self.decay_proj, self.gate_proj
        together = project_together(x.unsqueeze(1), *layers) if key_input is None else None
        if together is None:
            return self._project(x.unsqueeze(1), x.unsqueeze(1), key_input), None
        *projected, gate = together.split([layer.out_features for layer in layers], dim=-1)
        return tuple(projected), gate.squeeze(1)

    def _tokens_of(self, projected: tuple[Tensor, ...], mask: Tensor | None) -> Tokens:
        query, key, value, beta, decay = projected
        if self.query_batch_norm is not None:
            query = self.query_batch_norm(query, mask)
        query, key = self._scores(query, self.query_norm), self._scores(key, self.key_norm)
        if self.num_reads == self.num_writes:  # one call instead of two
            weights, indices = self._address(torch.stack((query, key)), self.num_reads)
            (read_weight, write_weight), (read_index, write_index) = weights.unbind(), indices.unbind()
        else:
            read_weight, read_index = self._address(query, self.num_reads)
            write_weight, write_index = self._address(key, self.num_writes)
        value = value.unflatten(-1, (self.num_heads, self.head_dim))
        beta = torch.sigmoid(beta)
        _, log_decay = decay_gate(decay, self.decay_bias, self.decay_log_rate)
        if mask is not None:
            beta, log_decay = beta * mask.unsqueeze(-1), log_decay * mask.unsqueeze(-1)
        if self.decay_per_write:
            share = F.normalize(write_weight.abs(), p=1.0, dim=-1) * self.num_writes
            log_decay = log_decay.unsqueeze(-1) * share
        return Tokens(write_index, write_weight, value, beta, log_decay, read_index, read_weight)

    def _scores(self, projected: Tensor, norm: nn.Module | None) -> Tensor:
        """[B,T,H,2K], the two halves side by side."""
        *lead, width = projected.shape
        scores = projected.reshape(*lead, self.num_heads, width // self.num_heads)
        return scores if norm is None else norm(scores.unflatten(-1, (2, -1))).flatten(-2)

    def _address(self, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The weights and slots of the `count` best of the N outer sums of the two halves of the scores."""
        selected, index = product_key_topk(scores, count, backend=self.backend)
        if self.weighting == "l2":
            return F.normalize(selected, dim=-1), index
        if self.temperature != 1:
            selected = selected / self.temperature
        return selected.softmax(-1), index

    def _output(self, x: Tensor, readings: Tensor, gate: Tensor | None = None) -> Tensor:
        """The output of what is read; `gate`: its projection, if it is known."""
        gate = self.gate_proj(x) if gate is None else gate
        gate = F.silu(gate) if self.output_gate == "silu" else torch.sigmoid(gate)
        return self.out_proj(self.output_norm(readings.to(self.output_norm.weight.dtype)).flatten(-2) * gate)

    def extra_repr(self) -> str:
        """Sizes and options for `print(layer)`."""
        return (
            f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, num_slots={self.num_slots}, "
            f"num_writes={self.num_writes}, num_reads={self.num_reads}, "
            f"learned_initial_state={self.initial_state is not None}"
        )


def _flat_rows(index_STHW: Tensor, slots: int) -> Tensor:
    """The rows of a table [S*H*N,D] that an index names."""
    S, _, H, _ = index_STHW.shape
    table = torch.arange(S * H, device=index_STHW.device).view(S, 1, H, 1) * slots
    return (index_STHW + table).flatten()


def _without_padding(x: Tensor, key_input: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if mask is None:
        return x, key_input
    padding = ~mask.unsqueeze(-1)
    return x.masked_fill(padding, 0), None if key_input is None else key_input.masked_fill(padding, 0)


def _table(state: TableState | Tensor) -> TableState:
    """Accept a bare tensor as state."""
    if isinstance(state, Tensor):
        return MemoryTable(state)
    if not isinstance(state, TableState):
        raise TypeError(f"state must be a MemoryTable, a tensor or None, got {type(state).__name__}")
    return state
