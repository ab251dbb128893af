"""The inputs of slot attention and what must be true of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sdm.ops.checks import check_cu_seqlens, check_float, check_no_gradients, check_shape, check_tensor


class Tokens(NamedTuple):
    """What one call says about each token; a single step has no T."""

    query: Tensor  # [B,T,H,K]
    key: Tensor  # [B,T,H,K]
    value: Tensor  # [B,T,H,D]
    log_decay: Tensor  # [B,T,H,M]

    def to(self, dtype: torch.dtype) -> Tokens:
        """Convert every tensor to this dtype."""
        return Tokens(*(x if x.dtype == dtype else x.to(dtype) for x in self))

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """[H,M,K+D] of a sequence."""
        return self.value.shape[-2], self.log_decay.shape[-1], self.key.shape[-1] + self.value.shape[-1]


def check_tokens(tokens: Tokens, time: str = "T,") -> None:
    """Raise for anything that shapes, dtypes and devices can tell about the tokens."""
    check_tensor("value", tokens.value)
    for name, x in tokens._asdict().items():
        check_tensor(name, x, tokens.value.device)
        check_float(name, x)
    letters = f"B,{time}H"
    if tokens.value.dim() != (4 if time else 3):
        raise ValueError(f"value must be [{letters},D], got shape {list(tokens.value.shape)}")
    lead = tokens.value.shape[:-1]
    check_shape("query", tokens.query, (*lead, None), f"[{letters},K]")
    check_shape("key", tokens.key, tuple(tokens.query.shape), "the shape of query")
    check_shape("log_decay", tokens.log_decay, (*lead, None), f"[{letters},M]")
    for name, x in tokens._asdict().items():
        if x.shape[-1] < 1:
            raise ValueError(f"{name} must not be empty in its last dimension, got shape {list(x.shape)}")


def start(tokens: Tokens, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Check the tokens, the state and the documents. Returns the states [S,H,M,K+D] that the sequences start from."""
    check_tokens(tokens)
    batch, device, shape = tokens.value.shape[0], tokens.value.device, tokens.state_shape
    sequences = batch if cu_seqlens is None else check_cu_seqlens(cu_seqlens, batch, device)
    if initial_state is None:
        return tokens.value.new_zeros(sequences, *shape)
    check_tensor("initial_state", initial_state, device)
    check_float("initial_state", initial_state)
    if tuple(initial_state.shape) not in (shape, (sequences, *shape)):
        raise ValueError(
            f"initial_state must be [H,M,K+D] = {list(shape)}, or one such state for each of the {sequences} "
            f"sequences, got shape {list(initial_state.shape)}"
        )
    return initial_state.expand(sequences, *shape)


def check_step(state: Tensor, token: Tokens) -> None:
    """Check one token and the state that it updates in place."""
    check_tokens(token, time="")
    check_tensor("state", state, token.value.device)
    check_float("state", state)
    check_shape("state", state, (len(token.value), *token.state_shape), "[B,H,M,K+D]")
    check_no_gradients("slot_attention_step_", "slot_attention", state, *token)
