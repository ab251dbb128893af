"""A static product-key memory (Lample et al. 2019): a learned table of which every token reads a few slots.

Shapes: B batch, T time, S streams, H heads, N slots, D value channels, R reads.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdm.errors import check_size
from sdm.layers.interface import check_input, streams_of, without_weight_decay
from sdm.layers.sizes import check_slots, default_slots
from sdm.layers.state import LayerState, Record, Snapshot, Undo, check_state
from sdm.ops import product_key_topk
from sdm.ops.backends import check_backend


@dataclasses.dataclass
class NoState(LayerState):
    """Nothing is remembered; only how many streams there are."""

    nothing: Tensor  # [S,0]

    def undo(self) -> Snapshot:
        """Record nothing."""
        return Snapshot(self)


class ProductKeyMemory(nn.Module):
    """Reads `num_reads` slots of a learned table, found by product keys; nothing is ever written.

    It is a `SparseDeltaMemory` without writes: the same addresses, norm, gate and projections, on a table that is the
    same for every stream. It sees one token at a time, so that what it adds to a model is knowledge and no recall.

    Args:
        hidden_size: width of the input and output.
        num_heads: tables side by side, each with hidden_size / num_heads channels.
        num_slots: slots per head, a perfect square. None takes (hidden_size / (4 num_heads))^2, as SDM does.
        num_reads: slots read per token and head.
        table_std: scale of the table at initialisation.
        norm_eps: of the RMS norm.
        backend: of the selection.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 1,
        num_slots: int | None = None,
        num_reads: int = 64,
        *,
        table_std: float = 0.02,
        norm_eps: float = 1e-6,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_size(hidden_size=hidden_size, num_heads=num_heads, num_reads=num_reads)
        check_backend(backend, "product_key_topk")
        num_slots = default_slots(hidden_size, num_heads) if num_slots is None else num_slots
        check_size(num_slots=num_slots)
        check_slots(hidden_size, {"num_heads": num_heads}, {"num_slots": num_slots}, num_reads=num_reads)
        self.hidden_size, self.num_heads, self.num_slots, self.num_reads = hidden_size, num_heads, num_slots, num_reads
        self.table_std, self.backend = table_std, backend
        self.head_dim = hidden_size // num_heads
        self.query_proj = nn.Linear(hidden_size, num_heads * 2 * math.isqrt(num_slots), bias=False)
        self.table = nn.Parameter(torch.empty(num_heads * num_slots, self.head_dim))
        self.gate_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.output_norm = nn.RMSNorm(self.head_dim, eps=norm_eps)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.reset_own_parameters()

    def reset_own_parameters(self) -> None:
        """Initialise the table; the projections keep torch's or the model's own scheme."""
        nn.init.normal_(self.table, std=self.table_std)

    def forward(
        self,
        x: Tensor,
        state: NoState | None = None,
        return_state: bool = False,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, NoState]:
        """Mix a stretch of tokens, as every `sdm.layers.interface.SequenceLayer` does."""
        check_input(x, self.hidden_size)
        streams = streams_of(x, attention_mask, cu_seqlens)
        if state is not None:
            check_state(state, NoState, streams.count, x.device, nothing=(0,))
        y = streams.restore(self._read(streams.align(x)))
        return (y, self.start_state(streams.count)) if return_state else y

    @torch.no_grad()
    def step_(self, x: Tensor, state: NoState, record: Record | None = None) -> Tensor:
        """Decode one token: x [B,hidden_size] gives y of the same shape."""
        check_input(x, self.hidden_size, "[B,hidden_size]")
        check_state(state, NoState, len(x), x.device, nothing=(0,))
        if record is not None:
            record(state.undo())
        return self._read(x)

    @torch.no_grad()
    def extend_(
        self, x: Tensor, state: NoState, attention_mask: Tensor | None = None, record: Record | None = None
    ) -> Tensor:
        """Mix a stretch of tokens, as every `sdm.layers.interface.SequenceLayer` does."""
        if record is not None:
            record(state.undo())
        return self(x, state, attention_mask=attention_mask)

    def replay_(self, state: NoState, undo: Undo) -> None:
        """Do nothing: there is no state."""

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimizer should not decay: norms and biases."""
        return without_weight_decay(self)

    def start_state(self, batch_size: int, learn: bool = False) -> NoState:
        """The state of streams without tokens, as every `sdm.layers.interface.SequenceLayer` has it."""
        return NoState(self.table.new_zeros(batch_size, 0))

    def _read(self, x: Tensor) -> Tensor:
        scores = self.query_proj(x).unflatten(-1, (self.num_heads, -1))
        selected, index = product_key_topk(scores, self.num_reads, backend=self.backend)
        first = torch.arange(self.num_heads, device=x.device).unsqueeze(-1) * self.num_slots
        weight, place = selected.softmax(-1).flatten(0, -2), (index + first).flatten(0, -2)
        table = self.table.to(weight.dtype)
        # Not through [B,T,H,R,D]: the rows are weighted and added as they are fetched.
        readings = F.embedding_bag(place, table, per_sample_weights=weight, mode="sum")
        readings = readings.view(*scores.shape[:-1], self.head_dim)
        normed = self.output_norm(readings.to(self.output_norm.weight.dtype)).flatten(-2)
        return self.out_proj(normed * torch.sigmoid(self.gate_proj(x)))

    def extra_repr(self) -> str:
        """Sizes and options for `print(layer)`."""
        return (
            f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, num_slots={self.num_slots}, "
            f"num_reads={self.num_reads}"
        )
