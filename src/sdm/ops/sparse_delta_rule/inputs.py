"""The inputs of the sparse delta rule and what must be true of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sdm.ops.checks import (
    check_cu_seqlens,
    check_decay,
    check_float,
    check_integer,
    check_shape,
    check_tensor,
    has_values,
)

UPDATES = ("delta", "slot")


class Tokens(NamedTuple):
    """What a call says about its tokens: B batch, T time, H heads, W writes, R reads, D value channels."""

    write_index: Tensor  # [B,T,H,W]
    write_weight: Tensor  # [B,T,H,W]
    value: Tensor  # [B,T,H,D]
    beta: Tensor  # [B,T,H]
    log_decay: Tensor  # [B,T,H] or [B,T,H,W]
    read_index: Tensor  # [B,T,H,R]
    read_weight: Tensor  # [B,T,H,R]

    def to(self, dtype: torch.dtype) -> Tokens:
        """Convert every floating-point tensor to this dtype."""
        return Tokens(*(x.to(dtype) if x.is_floating_point() else x for x in self))


def check_shapes(
    tokens: Tokens,
    initial_state: Tensor | None,
    num_slots: int | None,
    cu_seqlens: Tensor | None,
    update: str,
    single_step: bool = False,
    in_place: bool = False,
) -> int:
    """Raise for anything that shapes, dtypes and devices can tell. Returns the number of slots.

    The tensors of a single step have no time axis. The state of a call that changes it in place is called `state`.
    """
    _check_tensors(tokens)
    lead = tokens.value.shape[:-1]
    letters = "B,H" if single_step else "B,T,H"
    if tokens.value.dim() != (3 if single_step else 4):
        raise ValueError(f"value must be [{letters},D], got shape {list(tokens.value.shape)}")
    for name, letter in (("write_index", "W"), ("write_weight", "W"), ("read_index", "R"), ("read_weight", "R")):
        check_shape(name, getattr(tokens, name), (*lead, None), f"[{letters},{letter}]")
    num_writes, num_reads = tokens.write_index.shape[-1], tokens.read_index.shape[-1]
    check_shape("write_weight", tokens.write_weight, (*lead, num_writes), "the shape of write_index")
    check_shape("read_weight", tokens.read_weight, (*lead, num_reads), "the shape of read_index")
    check_shape("beta", tokens.beta, lead, f"[{letters}]")
    if tokens.log_decay.shape != lead:
        check_shape("log_decay", tokens.log_decay, (*lead, num_writes), f"[{letters}] or [{letters},W]")
    for name, size in (("write_index", num_writes), ("read_index", num_reads), ("value", tokens.value.shape[-1])):
        if size < 1:
            shape = list(getattr(tokens, name).shape)
            raise ValueError(f"{name} must have a last dimension of at least 1, got shape {shape}")

    num_slots = _check_state(
        tokens, initial_state, num_slots, cu_seqlens, "state" if single_step or in_place else "initial_state"
    )
    if num_writes > num_slots:
        raise ValueError(
            f"write_index has W = {num_writes} slots per token, but the memory has only num_slots = {num_slots}"
        )
    if update not in UPDATES:
        raise ValueError(f"update must be one of {UPDATES}, got {update!r}")
    return num_slots


def _check_tensors(tokens: Tokens) -> None:
    check_tensor("value", tokens.value)
    for name, x in tokens._asdict().items():
        check_tensor(name, x, tokens.value.device)
        (check_integer if name.endswith("index") else check_float)(name, x)


def _check_state(
    tokens: Tokens, initial_state: Tensor | None, num_slots: int | None, cu_seqlens: Tensor | None, name: str
) -> int:
    batch, heads, channels = tokens.value.shape[0], tokens.value.shape[-2], tokens.value.shape[-1]
    sequences, what = batch, "batch"
    if cu_seqlens is not None:
        sequences, what = check_cu_seqlens(cu_seqlens, batch, tokens.value.device), "documents"
    if initial_state is None:
        if num_slots is None:
            raise ValueError("num_slots is needed when initial_state is None")
        if not isinstance(num_slots, int | torch.SymInt) or num_slots < 1:
            raise ValueError(f"num_slots must be a positive integer, got {num_slots!r}")
        return num_slots
    check_tensor(name, initial_state, tokens.value.device)
    check_float(name, initial_state)
    if initial_state.dim() == 3:
        check_shape(name, initial_state, (heads, None, channels), "[H,N,D] or one such table per sequence")
    elif name == "state":
        check_shape(name, initial_state, (batch, heads, None, channels), "[B,H,N,D]")
    else:
        shape = (sequences, heads, None, channels)
        check_shape(name, initial_state, shape, f"[H,N,D], or [S,H,N,D] with S = {sequences} ({what})")
    if num_slots is not None and num_slots != initial_state.shape[-2]:
        raise ValueError(f"num_slots = {num_slots}, but {name} has {initial_state.shape[-2]} slots")
    return initial_state.shape[-2]


def check_values(tokens: Tokens, num_slots: int) -> None:
    """Raise for indices out of range or repeated, and for decays that would grow the memory. A traced graph has no
    values to look at."""
    if not has_values(tokens.value):
        return
    check_range("write_index", tokens.write_index, num_slots)
    check_range("read_index", tokens.read_index, num_slots)
    index = tokens.write_index
    # Sorted indices, which product keys give, need one comparison; only unsorted ones pay for a sort.
    if not _ascending(index) and not _ascending(index := index.sort(-1).values):
        repeated = index[..., 1:][index[..., 1:] == index[..., :-1]]
        raise ValueError(
            f"write_index names slot {int(repeated[0])} more than once within a token; the slots of a token must be "
            "distinct (add up the weights of repeated slots first)"
        )
    check_decay(tokens.log_decay)


def _ascending(index: Tensor) -> bool:
    return bool((index[..., 1:] > index[..., :-1]).all())


def check_range(name: str, index: Tensor, num_slots: int) -> None:
    """Raise an IndexError unless every slot lies in [0, num_slots)."""
    if index.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(index))
    if low < 0 or high >= num_slots:
        raise IndexError(f"{name} must lie in [0, num_slots) = [0, {num_slots}), got values from {low} to {high}")
