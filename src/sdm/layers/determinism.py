"""A mode in which prefill, pieces and steps of any length give the same bits on CPUs.

Matrix products of another number of rows, vectorised loops of another length and attention over blocks that are cut
elsewhere round differently. Within `deterministic()`

- projections are computed row by row by the compiled core (`sdm.ops.linear_rows`), or where that does not serve them in
  blocks of `ROWS` rows, the last one filled up with zeros;
- elementwise functions are computed in blocks of `LANES` numbers;
- layers with a cache project all tokens of a call at once and then mix them one by one. The sparse delta rule itself
  does not depend on how time is cut.

It applies to calls with a cache and without gradients, whose rows have no padding.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sdm.ops.linear_rows import MISSING, linear_rows

ROWS = 16
LANES = 64

_active: contextvars.ContextVar[bool] = contextvars.ContextVar("sdm_deterministic", default=False)


def is_deterministic() -> bool:
    """Whether the call is within `deterministic()`."""
    return _active.get()


@contextmanager
def deterministic() -> Iterator[None]:
    """Compute logits that do not depend on how a stream is cut into calls, nor on the rows beside it.

    For reproducible serving and for reinforcement learning, where the probabilities of sampled tokens are computed
    again by a prefill::

        with sdm.layers.deterministic(), torch.no_grad():
            model(ids, past_key_values=cache)

    It costs time: docs/rewinding.md has figures.
    """
    token = _active.set(True)
    try:
        with _FixedBlocks():
            yield
    finally:
        _active.reset(token)


class _FixedBlocks(TorchFunctionMode):
    """Replaces the functions whose rounding depends on the size of their input."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func in _ELEMENTWISE:
            return _elementwise(func, *args, **kwargs)
        return func(*args, **kwargs)


_ELEMENTWISE = {
    *(torch.sigmoid, torch.exp, torch.cos, torch.sin, F.softplus, F.silu, torch.rsqrt),
    *(torch.log, torch.expm1, Tensor.log, Tensor.expm1),
    *(Tensor.sigmoid, Tensor.exp, Tensor.cos, Tensor.sin, Tensor.rsqrt),
}


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.dtype in (torch.float32, torch.float64) and x.dtype == weight.dtype and x.is_cpu and not MISSING:
        return linear_rows(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    rows = F.pad(rows, (0, 0, 0, -count % ROWS))
    blocks = [torch._C._nn.linear(block, weight, bias) for block in rows.split(ROWS)]
    y = blocks[0] if len(blocks) == 1 else torch.cat(blocks) if blocks else rows.new_zeros(0, len(weight))
    return y[:count].view(*x.shape[:-1], len(weight))


def _elementwise(func: Callable[..., Tensor], x: Tensor, *args: object, **kwargs: object) -> Tensor:
    # Threads take equal shares, which are whole blocks.
    block = LANES * torch.get_num_threads()
    flat = F.pad(x.reshape(-1), (0, -x.numel() % block))
    return func(flat, *args, **kwargs)[: x.numel()].view(x.shape)


def token_by_token(mix: Callable[[int], Tensor], tokens: int, like: Tensor) -> Tensor:
    """Stack what `mix` gives for each token along the second axis; `like` has the shape of a call without tokens."""
    return torch.stack([mix(t) for t in range(tokens)], dim=1) if tokens else like
