"""Raven: attention over a fixed number of slots, of which a router chooses those that a token is written to.

Shapes: B batch, T time, H heads, M slots, K key channels, D value channels.
"""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdm.errors import check_size
from sdm.layers.modules import Float32Linear, decay_gate, reset_decay
from sdm.layers.recurrent_layer import Gates, RecurrentLayer, RuleOptions
from sdm.layers.sizes import default_heads
from sdm.ops.backends import check_backend
from sdm.ops.slot_attention import slot_attention, slot_attention_step_


class Raven(RecurrentLayer):
    """Writes a token into the `num_writes` slots that a router chooses, and reads all slots by a softmax.

    With m = sigmoid(W_r x), r its largest `num_writes` entries divided by their sum (zero elsewhere) and
    a = -A softplus(w x + b) for each head, slot i keeps exp(a r_i) of its key and value and takes the rest from the
    token. The memory follows `sdm.ops.slot_attention`. Queries and keys are RMS-normalised; there is neither a
    convolution nor a rotary embedding. What is read passes SiLU, a norm per head and a SiLU gate.

    The published model draws Gumbel noise for its router in training; this layer has none.

    Args:
        hidden_size: width of the input and output.
        num_heads: None takes heads of `default_head_dim` value channels: 128 from a hidden size of 512 on.
        key_dim: key channels per head; None takes a quarter of the value channels.
        num_slots: slots per head; None takes half as many as value channels. With the default key_dim the layer then
            has the weights of `GatedDeltaNet` and 1.25 times its state.
        num_writes: slots that a token is written to, per head; None takes an eighth of the slots, at least 2. With a
            single one r is 1 and the router learns nothing.
        norm_eps: of the RMS norms.
        backend: passed to the op.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int | None = None,
        key_dim: int | None = None,
        num_slots: int | None = None,
        num_writes: int | None = None,
        *,
        norm_eps: float = 1e-6,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.hidden_size, self.num_heads = hidden_size, default_heads(hidden_size, num_heads)
        self.head_dim = hidden_size // self.num_heads
        self.key_dim, self.num_slots, self.num_writes = default_slot_sizes(
            self.head_dim, key_dim, num_slots, num_writes
        )
        check_size(key_dim=self.key_dim, num_slots=self.num_slots, num_writes=self.num_writes)
        if self.num_writes > self.num_slots:
            raise ValueError(f"num_writes = {self.num_writes} exceeds num_slots = {self.num_slots}; lower it")
        check_backend(backend, "slot_attention")
        self.backend = backend

        key_size = self.num_heads * self.key_dim
        self.conv = None
        self.query_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.key_proj = nn.Linear(hidden_size, key_size, bias=False)
        self.value_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.query_norm = nn.RMSNorm(self.key_dim, eps=norm_eps)
        self.key_norm = nn.RMSNorm(self.key_dim, eps=norm_eps)
        self.router_proj = Float32Linear(hidden_size, self.num_heads * self.num_slots, bias=False)
        self.decay_proj = Float32Linear(hidden_size, self.num_heads, bias=False)
        self.decay_log_rate = nn.Parameter(torch.empty(self.num_heads))  # log A
        self.decay_bias = nn.Parameter(torch.empty(self.num_heads))  # b_dt
        self.gate_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.output_norm = nn.RMSNorm(self.head_dim, eps=norm_eps)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.register_parameter("initial_state", None)
        self.reset_own_parameters()

    def reset_own_parameters(self) -> None:
        """Initialise the decay gate; the projections keep torch's or the model's own scheme."""
        reset_decay(self.decay_log_rate, self.decay_bias)

    def _rule(self, *tokens: Tensor, **options: Unpack[RuleOptions]) -> tuple[Tensor, Tensor | None]:
        return slot_attention(*tokens, **options)

    def _step_rule_(self, memory: Tensor, *token: Tensor, backend: str) -> Tensor:
        return slot_attention_step_(memory, *token, backend=backend)

    def _memory_shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.num_slots, self.key_dim + self.head_dim

    def _project(self, x: Tensor, key_input: Tensor | None) -> Tensor:
        key = self.key_proj(x if key_input is None else key_input)
        return F.silu(torch.cat((self.query_proj(x), key, self.value_proj(x)), dim=-1))

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        key_size = self.num_heads * self.key_dim
        query, key, value = (
            x.unflatten(-1, (self.num_heads, -1)) for x in mixed.split((key_size, key_size, self.hidden_size), dim=-1)
        )
        dtype = torch.promote_types(mixed.dtype, torch.float32)
        query, key = (
            F.rms_norm(x.to(dtype), norm.normalized_shape, norm.weight.to(dtype), norm.eps)
            for x, norm in ((query, self.query_norm), (key, self.key_norm))
        )
        return query, key, value

    def _gates(self, x: Tensor, valid: Tensor | None) -> Gates:
        """Nothing [...,0] and log_decay [...,H,M], which is zero for the slots that the router leaves out."""
        logits = self.router_proj(x).unflatten(-1, (self.num_heads, self.num_slots))
        chosen = logits.topk(self.num_writes, dim=-1).indices
        kept = torch.zeros_like(logits).scatter(-1, chosen, torch.sigmoid(logits).gather(-1, chosen))
        # Where all of them have underflowed, nothing is written.
        route = kept / kept.sum(-1, keepdim=True).clamp(min=torch.finfo(kept.dtype).tiny)
        _, strength = decay_gate(self.decay_proj(x), self.decay_bias, self.decay_log_rate)
        log_decay = strength.unsqueeze(-1) * route
        if valid is not None:
            log_decay = log_decay * valid[..., None, None]
        return log_decay.new_zeros(*log_decay.shape[:-2], 0), log_decay

    def _tokens(self, mixed: Tensor, gates: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return *self._heads(mixed), gates[1]

    def _output(self, x: Tensor, readings: Tensor, value: Tensor) -> Tensor:
        gate = F.silu(self.gate_proj(x))
        normed = self.output_norm(F.silu(readings).to(self.output_norm.weight.dtype))
        return self.out_proj(normed.flatten(-2).to(gate.dtype) * gate)

    def extra_repr(self) -> str:
        """Sizes and options for `print(layer)`."""
        return (
            f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, key_dim={self.key_dim}, "
            f"num_slots={self.num_slots}, num_writes={self.num_writes}"
        )


def default_slot_sizes(
    head_dim: int, key_dim: int | None, num_slots: int | None, num_writes: int | None
) -> tuple[int, int, int]:
    """Key channels, slots and writes of a head with `head_dim` value channels, where they are not given."""
    key_dim = max(1, head_dim // 4) if key_dim is None else key_dim
    num_slots = max(2, head_dim // 2) if num_slots is None else num_slots
    num_writes = min(num_slots, max(2, num_slots // 8)) if num_writes is None else num_writes
    return key_dim, num_slots, num_writes
