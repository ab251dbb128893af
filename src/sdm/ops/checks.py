"""What every op asks of its tensors, said in the same words.

Shapes, dtypes and devices cost nothing to check. What needs a pass over the data is checked inside the backends, so
that a compiled graph checks it too.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The widest float among the tensors, at least float32."""
    dtype = torch.float32
    for x in tensors:
        if x is not None and x.dtype != dtype and x.is_floating_point():
            dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def check_tensor(name: str, x: Tensor, device: torch.device | None = None) -> None:
    """Raise unless x is a tensor, on this device if one is given."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if device is not None and x.device != device:
        raise ValueError(f"{name} is on {x.device}, but value is on {device}; move it there")


def check_float(name: str, x: Tensor) -> None:
    """Raise a TypeError unless x has a floating-point dtype."""
    if not x.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {x.dtype}")


def check_integer(name: str, x: Tensor) -> None:
    """Raise a TypeError unless x has an integer dtype."""
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name} must be an integer tensor, got {x.dtype}")


def check_shape(name: str, x: Tensor, shape: tuple[int | None, ...], meaning: str) -> None:
    """None in `shape` stands for any size."""
    if x.dim() != len(shape) or any(want is not None and want != got for want, got in zip(shape, x.shape, strict=True)):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must be {meaning}, here ({sizes}), got shape {list(x.shape)}")


def check_kernel_floats(dtype: torch.dtype, **tensors: Tensor | None) -> None:
    """For the registered ops, which anybody can call and whose kernels read by address: floats on the CPU of one dtype
    that the core computes in."""
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(f"the compiled core computes in float32 or float64, got {dtype}")
    for name, x in tensors.items():
        if x is None:
            continue
        if not x.is_cpu:
            raise ValueError(f"{name} is on {x.device}, but the compiled core works on CPU tensors; move it there")
        if x.dtype != dtype:
            raise TypeError(f"{name} must be {dtype} like the other floats of this call, got {x.dtype}")


def check_one_device(*arguments: object) -> None:
    """For the shapes of a traced op: a meta tensor among others would make the op return memory that nobody wrote."""
    devices = {x.device for x in arguments if isinstance(x, Tensor)}
    if len(devices) > 1:
        raise ValueError(f"all tensors must be on one device, got {sorted(map(str, devices))}")


def check_kernel_state(state: Tensor) -> None:
    """For kernels that change the state where it lies."""
    if not state.is_contiguous():
        raise ValueError(f"state must be contiguous, it is changed in place; got strides {list(state.stride())}")


def check_cu_seqlens(cu_seqlens: Tensor, batch: int, device: torch.device) -> int:
    """Returns the number of documents."""
    check_tensor("cu_seqlens", cu_seqlens)
    check_tensor("cu_seqlens", cu_seqlens, None if cu_seqlens.is_cpu else device)
    check_integer("cu_seqlens", cu_seqlens)
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


def has_values(x: Tensor) -> bool:
    """Whether its numbers can be looked at: those of a graph that is being traced, or of shapes alone, cannot."""
    return not torch.compiler.is_compiling() and not x.is_meta and not isinstance(x, FakeTensor)


def check_decay(log_decay: Tensor) -> None:
    """Raise for decays that would grow the state, NaN included. A traced graph has no values to look at, and reading
    those of a GPU would wait for it."""
    if log_decay.is_cpu and has_values(log_decay) and not bool((log_decay <= 0).all()):
        raise ValueError(f"log_decay must be at most 0 (a decay factor of at most 1), got {log_decay.max().item()}")


def mark_changed(x: Tensor) -> None:
    """Tell autograd that a kernel has changed x behind its back, so that it refuses to use what it saved of it."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


def check_no_gradients(name: str, functional: str, *tensors: Tensor) -> None:
    """For functions that work in place."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError(
            f"{name} updates its state in place and records no gradients: call it under torch.no_grad(), "
            f"or use {functional}"
        )


def available_memory(device: torch.device) -> float:
    """Return the bytes that are free now, within the limit of a container if there is one."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    free = float("inf")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = 1024.0 * int(line.split()[1])
    except OSError:
        return free
    for limit, used in (("memory.max", "memory.current"),):
        try:
            group = Path("/sys/fs/cgroup")
            free = min(free, float((group / limit).read_text()) - float((group / used).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return free
