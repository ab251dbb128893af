"""Batch normalisation that does not see padding."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
