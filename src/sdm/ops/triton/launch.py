"""Every kernel is launched by `launch`, so that launches can be looked at, or recorded without running.

On tensors without memory (meta and fake ones) nothing runs. The function that launches an op's kernels is therefore
also its own shape function, `register_fake(host)`, and on meta tensors its launches are recorded at any size::

    with record() as launches:
        sparse_delta_rule(*meta_tensors, backend="triton")

It may look at shapes, never at values: what would wait for the GPU raises on a meta tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from sdm.ops.triton.availability import missing_because, version

NEAR = 2**31 - 1  # bytes
ALIGNMENT = 16  # bytes; Triton compiles another kernel for pointers that are not multiples of it
NVIDIA_OPTIONS = ("maxnreg",)  # of a launch, that other compilers do not know
LARGEST_GRID = (2**31 - 1, 65535, 65535)  # of CUDA and ROCm


class Kernel(Protocol):
    """A function made by `triton.jit`, compiled or interpreted."""

    __name__: str
    arg_names: list[str]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """Return the function that launches the kernel over a grid."""


class Pointer(NamedTuple):
    """What a kernel is compiled for when an argument is a tensor."""

    dtype: torch.dtype
    aligned: bool
    near: bool = True
    """Whether 32 bits reach all of its memory: AMD's kernels are then compiled with other instructions."""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel."""

    kernel: Kernel
    grid: tuple[int, ...]
    arguments: dict[str, object]
    """By the names of the kernel; a tensor is a Pointer."""
    options: dict[str, object] = field(default_factory=dict)
    """num_warps, num_stages and the like."""

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return str(self.kernel.__name__)


_observers: list[Callable[[Launch], None]] = []
_runners: list[Callable[[Launch, dict[str, object]], None]] = []
_dry = False


def recording() -> bool:
    """Whether launches are being recorded."""
    return bool(_observers)


@contextmanager
def observe(observer: Callable[[Launch], None]) -> Iterator[None]:
    """Tell the observer of each launch, before it happens."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@contextmanager
def record() -> Iterator[list[Launch]]:
    """The launches of a block. On meta tensors nothing else happens."""
    launches: list[Launch] = []
    with observe(launches.append):
        yield launches


@contextmanager
def run_with(runner: Callable[[Launch, dict[str, object]], None]) -> Iterator[None]:
    """Hand each launch of a block to `runner`, with the kernel's arguments by name, instead of running it.

    An emulator of compiled kernels stands in for a GPU this way; calls on CPU tensors that name the backend are taken.
    """
    _runners.append(runner)
    try:
        yield
    finally:
        _runners.remove(runner)


def replaced() -> bool:
    """Whether something else than Triton runs the kernels."""
    return bool(_runners)


@contextmanager
def dry_run() -> Iterator[None]:
    """Let calls on fake CPU tensors that name the backend pass as if a GPU and Triton were there. No kernel runs."""
    global _dry
    before, _dry = _dry, True
    try:
        yield
    finally:
        _dry = before


def dry_running() -> bool:
    """Whether calls are made for the shapes and the memory of their tensors only."""
    return _dry


def is_traced(x: Tensor) -> bool:
    """Whether a graph is made of the call, for which the shapes of its results are enough.

    Sizes may be symbols then: a loop over them would fix the graph to the example's.
    """
    return isinstance(x, FakeTensor) and not _dry


def load_kernel(package: str, module: str, name: str) -> Kernel | None:
    """Import a kernel where it is launched. In a dry run without Triton there is none, and none is needed."""
    if _dry and missing_because(version()):
        return None
    return cast(Kernel, getattr(import_module(f"{package}.{module}"), name))


def launch(kernel: Kernel | None, grid: tuple[int, ...], *arguments: object, **keywords: object) -> None:
    """`kernel[grid](*arguments, **keywords)`, on the device of its tensors. An empty grid or no kernel is no launch."""
    if kernel is None or any(size == 0 for size in grid):
        return
    for size, largest in zip(grid, LARGEST_GRID, strict=False):
        if size > largest:
            name = getattr(kernel, "__name__", "a kernel")
            raise ValueError(f"the grid of {name} is {grid}, but a GPU takes at most {LARGEST_GRID}")
    if _observers or _runners:
        seen = _describe(kernel, grid, arguments, keywords)
        for observer in tuple(_observers):
            observer(seen)
    first = next(x for x in (*arguments, *keywords.values()) if isinstance(x, Tensor))
    if first.is_meta or isinstance(first, FakeTensor):
        return
    if _runners:
        _runners[-1](seen, dict(zip(kernel.arg_names, arguments, strict=False)) | keywords)
        return
    if type(kernel).__name__ == "InterpretedFunction":
        from sdm.ops.triton.interpreter import quick_and_quiet

        with quick_and_quiet():
            kernel[grid](*arguments, **keywords)
        return
    if first.device.type != "cuda" or torch.version.hip is not None:
        keywords = {name: x for name, x in keywords.items() if name not in NVIDIA_OPTIONS}
    with _current_device(first.device):
        kernel[grid](*arguments, **keywords)


def _describe(
    kernel: Kernel, grid: tuple[int, ...], arguments: tuple[object, ...], keywords: Mapping[str, object]
) -> Launch:
    named = {**dict(zip(kernel.arg_names, arguments, strict=False)), **keywords}
    described = {name: _argument(x) for name, x in named.items()}
    return Launch(
        kernel,
        grid,
        {name: described[name] for name in kernel.arg_names if name in described},
        {name: x for name, x in described.items() if name not in kernel.arg_names},
    )


def _argument(x: object) -> object:
    if not isinstance(x, Tensor):
        return x
    # A tensor without memory lies where an allocator would put it, but for the start of a view.
    without_memory = x.is_meta or isinstance(x, FakeTensor)
    address = x.storage_offset() * x.element_size() if without_memory else x.data_ptr()
    size = x.untyped_storage().nbytes()
    return Pointer(x.dtype, address % ALIGNMENT == 0, size <= NEAR)


def _current_device(device: torch.device) -> AbstractContextManager[object]:
    """Kernels go to the current device, which is not always that of the tensors."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        return torch.cuda.device(device)
    if device.type == "xpu" and device.index != torch.xpu.current_device():
        return torch.xpu.device(device)
    return nullcontext()
