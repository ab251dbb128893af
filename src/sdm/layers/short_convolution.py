"""A causal convolution over a few tokens, each channel by itself, followed by SiLU.

Shapes: B batch, T time, S streams (batch rows or documents), C channels, K taps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdm.errors import check_size
from sdm.layers.streams import Streams, documents_of


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
