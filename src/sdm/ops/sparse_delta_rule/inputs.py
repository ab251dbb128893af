"""The inputs of the sparse delta rule and what must be true of them.

Shapes and dtypes are checked before a backend is called and cost nothing. What needs a pass over the data is checked
inside the backend, so that a compiled graph checks it too.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

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

    def floats_to(self, dtype: torch.dtype) -> Tokens:
        return Tokens(*(x.to(dtype) if x.is_floating_point() else x for x in self))


def compute_dtype(tokens: Tokens, state: Tensor | None) -> torch.dtype:
    """The widest float among the inputs, at least float32."""
    dtype = torch.float32
    for x in (*tokens, state):
        if x is not None and x.is_floating_point():
            dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def check_shapes(
    tokens: Tokens,
    initial_state: Tensor | None,
    num_slots: int | None,
    cu_seqlens: Tensor | None,
    update: str,
    time: str = "T,",
) -> int:
    """Raise for anything that shapes, dtypes and devices can tell. Returns the number of slots.

    `time` is empty for a single step, whose tensors have no time axis.
    """
    _check_tensors(tokens)
    lead = tokens.value.shape[:-1]
    letters = f"B,{time}H"
    if tokens.value.dim() != (4 if time else 3):
        raise ValueError(f"value must be [{letters},D], got shape {list(tokens.value.shape)}")
    for name, letter in (("write_index", "W"), ("write_weight", "W"), ("read_index", "R"), ("read_weight", "R")):
        _expect(name, getattr(tokens, name), (*lead, None), f"[{letters},{letter}]")
    num_writes, num_reads = tokens.write_index.shape[-1], tokens.read_index.shape[-1]
    _expect("write_weight", tokens.write_weight, (*lead, num_writes), "the shape of write_index")
    _expect("read_weight", tokens.read_weight, (*lead, num_reads), "the shape of read_index")
    _expect("beta", tokens.beta, lead, f"[{letters}]")
    if tokens.log_decay.shape != lead:
        _expect("log_decay", tokens.log_decay, (*lead, num_writes), f"[{letters}] or [{letters},W]")
    for name, size in (("write_index", num_writes), ("read_index", num_reads), ("value", tokens.value.shape[-1])):
        if size < 1:
            raise ValueError(f"{name} must have a last dimension of at least 1, got shape {list(tokens[0].shape)}")

    num_slots = _check_state(tokens, initial_state, num_slots, cu_seqlens)
    if num_writes > num_slots:
        raise ValueError(
            f"write_index has W = {num_writes} slots per token, but the memory has only num_slots = {num_slots}"
        )
    if update not in UPDATES:
        raise ValueError(f"update must be one of {UPDATES}, got {update!r}")
    return num_slots


def _check_tensors(tokens: Tokens) -> None:
    for name, x in tokens._asdict().items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    for name, x in tokens._asdict().items():
        if x.device != tokens.value.device:
            raise ValueError(f"{name} is on {x.device}, but value is on {tokens.value.device}; move it there")
        if name.endswith("index"):
            _expect_integers(name, x)
        elif not x.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {x.dtype}")


def _expect_integers(name: str, x: Tensor) -> None:
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name} must be an integer tensor, got {x.dtype}")


def _expect(name: str, x: Tensor, shape: tuple[int | None, ...], meaning: str) -> None:
    """None in `shape` stands for any size."""
    if x.dim() != len(shape) or any(want is not None and want != got for want, got in zip(shape, x.shape, strict=True)):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must be {meaning}, here ({sizes}), got shape {list(x.shape)}")


def _check_state(tokens: Tokens, initial_state: Tensor | None, num_slots: int | None, cu_seqlens: Tensor | None) -> int:
    batch, heads, channels = tokens.value.shape[0], tokens.value.shape[-2], tokens.value.shape[-1]
    sequences, what = batch, "batch"
    if cu_seqlens is not None:
        sequences, what = _check_cu_seqlens(cu_seqlens, batch), "documents"
    if initial_state is None:
        if num_slots is None:
            raise ValueError("num_slots is needed when initial_state is None")
        if not isinstance(num_slots, int | torch.SymInt) or num_slots < 1:
            raise ValueError(f"num_slots must be a positive integer, got {num_slots!r}")
        return num_slots
    if not isinstance(initial_state, Tensor):
        raise TypeError(f"initial_state must be a torch.Tensor or None, got {type(initial_state).__name__}")
    if not initial_state.is_floating_point():
        raise TypeError(f"initial_state must be a floating-point tensor, got {initial_state.dtype}")
    if initial_state.device != tokens.value.device:
        raise ValueError(f"initial_state is on {initial_state.device}, but value is on {tokens.value.device}")
    if initial_state.dim() == 3:
        _expect("initial_state", initial_state, (heads, None, channels), "[H,N,D] or one such table per sequence")
    else:
        shape = (sequences, heads, None, channels)
        _expect("initial_state", initial_state, shape, f"[H,N,D], or [S,H,N,D] with S = {sequences} ({what})")
    if num_slots is not None and num_slots != initial_state.shape[-2]:
        raise ValueError(f"num_slots = {num_slots}, but initial_state has {initial_state.shape[-2]} slots")
    return initial_state.shape[-2]


def _check_cu_seqlens(cu_seqlens: Tensor, batch: int) -> int:
    """Returns the number of documents."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be a torch.Tensor or None, got {type(cu_seqlens).__name__}")
    _expect_integers("cu_seqlens", cu_seqlens)
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
        raise ValueError(
            f"cu_seqlens must start at 0 and end at T = {time}, got {bounds[0]} and {bounds[-1]}; "
            "it holds the offset of every document's start and, last, the length of the row"
        )
    for document, (start, end) in enumerate(itertools.pairwise(bounds)):
        if end < start:
            raise ValueError(
                f"cu_seqlens must not decrease, got {start} then {end}: document {document} would overlap the next"
            )
    return bounds


def check_values(tokens: Tokens, num_slots: int) -> None:
    """Raise for indices out of range or repeated, and for decays that would grow the memory."""
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
    if not bool((tokens.log_decay <= 0).all()):
        worst = tokens.log_decay.max().item()
        raise ValueError(f"log_decay must be at most 0 (a decay factor of at most 1), got {worst}")


def _ascending(index: Tensor) -> bool:
    return bool((index[..., 1:] > index[..., :-1]).all())


def check_range(name: str, index: Tensor, num_slots: int) -> None:
    if index.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(index))
    if low < 0 or high >= num_slots:
        raise IndexError(f"{name} must lie in [0, num_slots) = [0, {num_slots}), got values from {low} to {high}")
