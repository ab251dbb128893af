"""The inputs of the gated delta rule and what must be true of them.

Shapes and dtypes are checked before a backend is called and cost nothing. What needs a pass over the data is checked
inside the backend.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """What one call says about each token; a single step has no T."""

    query: Tensor  # [B,T,H,K]
    key: Tensor  # [B,T,H,K]
    value: Tensor  # [B,T,H,D]
    beta: Tensor  # [B,T,H]
    log_decay: Tensor  # [B,T,H]

    def to(self, dtype: torch.dtype) -> Tokens:
        return Tokens(*(x.to(dtype) for x in self))


def compute_dtype(tokens: Tokens, state: Tensor | None) -> torch.dtype:
    """The widest float among the inputs, at least float32."""
    dtype = torch.float32
    for x in (*tokens, state):
        if x is not None:
            dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def check_shapes(tokens: Tokens, time: str = "T,") -> None:
    """Raise for anything that shapes, dtypes and devices can tell about the tokens."""
    for name, x in tokens._asdict().items():
        _check_float(name, x, tokens.value)
    letters = f"B,{time}H"
    if tokens.value.dim() != (4 if time else 3):
        raise ValueError(f"value must be [{letters},D], got shape {list(tokens.value.shape)}")
    lead = tokens.value.shape[:-1]
    for name in ("query", "key"):
        x = getattr(tokens, name)
        if x.shape[:-1] != lead or x.dim() != tokens.value.dim():
            raise ValueError(f"{name} must be [{letters},K] = {[*lead, 'K']}, got shape {list(x.shape)}")
    if tokens.query.shape != tokens.key.shape:
        raise ValueError(f"query must have the shape of key, {list(tokens.key.shape)}, got {list(tokens.query.shape)}")
    for name in ("key", "value"):
        if getattr(tokens, name).shape[-1] < 1:
            raise ValueError(f"{name} must have at least one channel, got shape {list(getattr(tokens, name).shape)}")
    for name in ("beta", "log_decay"):
        if getattr(tokens, name).shape != lead:
            raise ValueError(
                f"{name} must be [{letters}] = {list(lead)}, got shape {list(getattr(tokens, name).shape)}"
            )


def check_state(tokens: Tokens, initial_state: Tensor | None, cu_seqlens: Tensor | None) -> int:
    """Check the state and the documents against the tokens. Returns the number of sequences."""
    batch, _, heads, key_size = tokens.key.shape
    sequences = batch
    if cu_seqlens is not None:
        sequences = _check_cu_seqlens(cu_seqlens, batch)
    if initial_state is not None:
        _check_float("initial_state", initial_state, tokens.value)
        shape = (heads, key_size, tokens.value.shape[-1])
        if tuple(initial_state.shape) not in (shape, (sequences, *shape)):
            raise ValueError(
                f"initial_state must be [H,K,D] = {list(shape)}, or one such state for each of the {sequences} "
                f"sequences, got shape {list(initial_state.shape)}"
            )
    return sequences


def _check_float(name: str, x: Tensor, value: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {x.dtype}")
    if x.device != value.device:
        raise ValueError(f"{name} is on {x.device}, but value is on {value.device}; move it there")


def _check_cu_seqlens(cu_seqlens: Tensor, batch: int) -> int:
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be a torch.Tensor or None, got {type(cu_seqlens).__name__}")
    if cu_seqlens.is_floating_point() or cu_seqlens.is_complex() or cu_seqlens.dtype == torch.bool:
        raise TypeError(f"cu_seqlens must be an integer tensor, got {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError(
            "cu_seqlens must be [documents + 1] offsets, the first 0 and the last T, "
            f"got shape {list(cu_seqlens.shape)}"
        )
    if batch != 1:
        raise ValueError(f"cu_seqlens packs documents into one row: the batch must be 1, got {batch}")
    return cu_seqlens.numel() - 1


def document_bounds(cu_seqlens: Tensor, time: int) -> list[int]:
    """The offsets as numbers, checked."""
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != time:
        raise ValueError(f"cu_seqlens must start at 0 and end at T = {time}, got {bounds[0]} and {bounds[-1]}")
    for document, (start, end) in enumerate(itertools.pairwise(bounds)):
        if end < start:
            raise ValueError(
                f"cu_seqlens must not decrease, got {start} then {end}: document {document} would overlap the next"
            )
    return bounds


def check_decay(log_decay: Tensor) -> None:
    """Raise for decays that would grow the state. A traced graph carries no such check: its inputs have no values."""
    if not torch.compiler.is_compiling() and not bool((log_decay <= 0).all()):
        raise ValueError(f"log_decay must be at most 0 (a decay factor of at most 1), got {log_decay.max().item()}")
