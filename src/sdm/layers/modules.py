"""Modules that layers are made of: projections and decay gates in float32, the gated MLP, batch normalisation that does
not see padding, and short convolutions.

Shapes: B batch, T time, S streams (batch rows or documents), C channels, K taps, H heads.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdm.errors import check_size
from sdm.layers.interface import Streams, documents_of

LARGEST_DECAY_RATE = 16.0


class Float32Linear(nn.Linear):
    """A projection in float32 (float64 if the input is), whatever the dtype of its weight; autocast does not lower it.

    It is a module of its own, and not a function of the weight, so that adapters such as LoRA find it and count.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Project x in float32, whatever its dtype."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        x, weight, bias = x.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)
        if not torch.is_autocast_enabled(x.device.type):
            return F.linear(x, weight, bias)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight, bias)


def decay_gate(projected: Tensor, bias: Tensor, log_rate: Tensor) -> tuple[Tensor, Tensor]:
    """The time step softplus(W x + b) of a projection W x and the log decay -A times it, each [...,H].

    The decay multiplies over thousands of tokens, so that it is computed in float32 whatever the dtype of the model.
    """
    step = F.softplus(projected + bias.to(projected.dtype))
    return step, -log_rate.to(step.dtype).exp() * step


def reset_decay(
    log_rate: nn.Parameter, bias: nn.Parameter, lowest_rate: float = 0.0, largest_rate: float = LARGEST_DECAY_RATE
) -> None:
    """Draw A uniformly, kept as its logarithm; b is the inverse softplus of a step log-uniform in [0.001, 0.1]."""
    with torch.no_grad():
        log_rate.uniform_(lowest_rate, largest_rate).clamp_(min=1e-4).log_()
        step = bias.uniform_(math.log(1e-3), math.log(1e-1)).exp()
        bias.copy_(step + torch.log(-torch.expm1(-step)))


class GatedMLP(nn.Module):
    """Two projections up, one through SiLU, multiplied, and one down. Each token by itself: there is no state."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        check_size(hidden_size=hidden_size, intermediate_size=intermediate_size)
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to every token of x [..., hidden_size]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MaskedBatchNorm(nn.Module):
    """Normalises each feature over the valid tokens of the batch; in evaluation, by running statistics.

    Like every batch normalisation it ties the rows of a training batch together and behaves differently in
    evaluation. Without a valid token to learn from, training falls back to the running statistics. What activation
    checkpointing computes again in backward is not learned from twice.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_features: int, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x [..., features]; mask [...] is True where a token counts."""
        mean, var = self.running_mean, self.running_var
        if self.training:
            mean, var = self._batch_statistics(x, mask)
        return (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias

    def _batch_statistics(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        share = torch.ones_like(x[..., :1]) if mask is None else mask.unsqueeze(-1).to(x.dtype)
        dims = tuple(range(x.dim() - 1))
        total = share.sum()
        share = share / total.clamp(min=1)
        mean = (x * share).sum(dims)
        var = ((x - mean).square() * share).sum(dims)
        # With one token or none there is no variance to speak of.
        enough = total > 1
        mean, var = torch.where(enough, mean, self.running_mean), torch.where(enough, var, self.running_var)
        if not _in_backward():
            self._learn(mean, var)
        return mean, var

    @torch.no_grad()
    def _learn(self, mean: Tensor, var: Tensor) -> None:
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_(var.to(self.running_var.dtype), self.momentum)


def _in_backward() -> bool:
    # torch.compile cannot trace the question; what it traces is the forward pass.
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class ShortConvolution(nn.Module):
    """y_t = silu(sum_k weight[:, k] x_{t - K + 1 + k} + bias). Its state is the tail [S, K-1, C] of its last inputs.

    A few shifted additions beat a general depthwise convolution on CPUs, and need no transposition of time.

    Args:
        channels: channels, each convolved by itself.
        kernel_size: taps.
        bias: whether there is a bias.
        shifted: channels that start as the token before; the others then start as the token itself. None starts all at
            random.
    """

    activation: bool = True

    def __init__(
        self, channels: int, kernel_size: int = 4, bias: bool = False, *, shifted: slice | None = None
    ) -> None:
        super().__init__()
        check_size(channels=channels, kernel_size=kernel_size)
        self.channels, self.kernel_size, self.shifted = channels, kernel_size, shifted
        self.weight = nn.Parameter(torch.empty(channels, kernel_size))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_own_parameters()

    def reset_own_parameters(self) -> None:
        """Draw weights and bias as `nn.Conv1d` does, or start as the token before and the token itself."""
        if self.shifted is not None:
            with torch.no_grad():
                self.weight.zero_()[:, -1] = 1
                self.weight[self.shifted, -2:] = self.weight.new_tensor([1.0, 0.0])
                if self.bias is not None:
                    self.bias.zero_()
            return
        bound = self.kernel_size**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, tail: Tensor | None, streams: Streams) -> tuple[Tensor, Tensor]:
        """x [B,T,C] in left-aligned rows or packed. Returns y [B,T,C] and the tail after the last token."""
        history = self.kernel_size - 1
        if tail is None:
            tail = x.new_zeros(streams.count, history, self.channels)
        time = x.shape[1]
        if streams.bounds is None:
            stream = torch.cat((tail, x), dim=1)
            if streams.lengths is None:
                return self._convolve(stream), stream[:, time:].clone()
            last = streams.lengths.unsqueeze(-1) + torch.arange(history, device=x.device)
            return self._convolve(stream), stream.gather(1, last.unsqueeze(-1).expand(-1, -1, self.channels))

        # Each document is preceded by its own tail: document s moves back by s + 1 tails.
        token = torch.arange(time, device=x.device) + (documents_of(streams.bounds, time) + 1) * history
        moved = torch.arange(streams.count, device=x.device) * history
        place = torch.arange(history, device=x.device)
        front = ((streams.bounds[:-1] + moved).unsqueeze(-1) + place).flatten()
        stream = torch.cat((tail.flatten(0, 1), x[0]))
        stream = torch.zeros_like(stream).index_copy(0, torch.cat((front, token)), stream).unsqueeze(0)
        back = (streams.bounds[1:] + moved).unsqueeze(-1) + place
        return self._convolve(stream)[:, token - history], stream[0, back]

    @torch.no_grad()
    def step_(self, x: Tensor, tail: Tensor) -> Tensor:
        """x [B,C] gives y of the same shape; the tail [B,K-1,C] changes in place."""
        window = torch.cat((tail, x.unsqueeze(1)), dim=1)
        tail.copy_(window[:, 1:])
        return self._convolve(window).squeeze(1)

    def _convolve(self, stream: Tensor) -> Tensor:
        time = stream.shape[1] - self.kernel_size + 1
        weight = self.weight.to(stream.dtype)
        y = stream[:, :time] * weight[:, 0]
        for tap in range(1, self.kernel_size):
            y = torch.addcmul(y, stream[:, tap : tap + time], weight[:, tap])
        y = y if self.bias is None else y + self.bias.to(stream.dtype)
        return F.silu(y) if self.activation else y

    def extra_repr(self) -> str:
        """Sizes and options for `print(layer)`."""
        return f"{self.channels}, kernel_size={self.kernel_size}, bias={self.bias is not None}"
