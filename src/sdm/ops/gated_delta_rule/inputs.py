"""The inputs of the gated delta rule and what must be true of them."""

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
    beta: Tensor  # [B,T,H]
    log_decay: Tensor  # [B,T,H], or [B,T,H,K]: of each key channel

    def to(self, dtype: torch.dtype) -> Tokens:
        """Convert every tensor to this dtype."""
        return Tokens(*(x if x.dtype == dtype else x.to(dtype) for x in self))


def check_shapes(tokens: Tokens, time: str = "T,", by_channel: bool = True) -> None:
    """Raise for anything that shapes, dtypes and devices can tell about the tokens.

    Args:
        tokens: the tokens.
        time: "T," for sequences, "" for a single step.
        by_channel: whether log_decay may have a decay for each key channel.
    """
    check_tensor("value", tokens.value)
    for name, x in tokens._asdict().items():
        check_tensor(name, x, tokens.value.device)
        check_float(name, x)
    letters = f"B,{time}H"
    if tokens.value.dim() != (4 if time else 3):
        raise ValueError(f"value must be [{letters},D], got shape {list(tokens.value.shape)}")
    lead = tokens.value.shape[:-1]
    for name, meaning in (("query", f"[{letters},K]"), ("key", "the shape of query")):
        size = None if name == "query" else tokens.query.shape[-1]
        check_shape(name, getattr(tokens, name), (*lead, size), meaning)
    for name in ("query", "value"):
        if getattr(tokens, name).shape[-1] < 1:
            raise ValueError(f"{name} must have at least one channel, got shape {list(getattr(tokens, name).shape)}")
    check_shape("beta", tokens.beta, lead, f"[{letters}]")
    if not by_channel:
        check_shape("log_decay", tokens.log_decay, lead, f"[{letters}]")
    elif tuple(tokens.log_decay.shape) not in (tuple(lead), tuple(tokens.key.shape)):
        raise ValueError(
            f"log_decay must be [{letters}], or [{letters},K] for a decay of each key channel, here {tuple(lead)} or "
            f"{tuple(tokens.key.shape)}, got shape {list(tokens.log_decay.shape)}"
        )


def check_state(
    tokens: Tokens, initial_state: Tensor | None, cu_seqlens: Tensor | None, by_channel: bool = True
) -> int:
    """Check the tokens, and the state and the documents against them. Returns the number of sequences."""
    check_shapes(tokens, by_channel=by_channel)
    batch, _, heads, key_size = tokens.key.shape
    sequences = batch if cu_seqlens is None else check_cu_seqlens(cu_seqlens, batch, tokens.value.device)
    if initial_state is not None:
        check_tensor("initial_state", initial_state, tokens.value.device)
        check_float("initial_state", initial_state)
        shape = (heads, key_size, tokens.value.shape[-1])
        if tuple(initial_state.shape) not in (shape, (sequences, *shape)):
            raise ValueError(
                f"initial_state must be [H,K,D] = {list(shape)}, or one such state for each of the {sequences} "
                f"sequences, got shape {list(initial_state.shape)}"
            )
    return sequences


def check_step(
    state: Tensor,
    token: Tokens,
    step: str = "gated_delta_step_",
    rule: str = "gated_delta_rule",
    by_channel: bool = True,
) -> None:
    """Check one token and the state that it updates in place."""
    check_shapes(token, time="", by_channel=by_channel)
    check_tensor("state", state, token.value.device)
    check_float("state", state)
    check_shape("state", state, (*token.key.shape, token.value.shape[-1]), "[B,H,K,D]")
    check_no_gradients(step, rule, state, *token)
