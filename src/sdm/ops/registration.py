"""Registered torch ops over the compiled core.

Anybody can call a registered op, and the core reads and writes by address: an implementation checks its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from sdm.ops.checks import check_one_device

_library = torch.library.Library("sdm", "FRAGMENT")


class Context(FunctionCtx):
    """What an autograd function keeps from forward to backward: tensors in `saved_tensors`, the rest as attributes."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    if TYPE_CHECKING:

        def save_for_backward(self, *tensors: Tensor | None) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: object) -> None: ...


def register(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    gradients: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
) -> None:
    """Define the op `sdm::<schema>` for CPUs. `fake` makes its outputs, but for the numbers in them."""
    name = schema[: schema.index("(")]

    def checked_fake(*arguments: object) -> object:
        check_one_device(*arguments)
        return fake(*arguments)

    _library.define(schema)
    _library.impl(name, implementation, "CPU")
    torch.library.register_fake(f"sdm::{name}", checked_fake, lib=_library)
    if gradients is not None:
        torch.library.register_autograd(f"sdm::{name}", gradients, setup_context=setup_context, lib=_library)


def no_second_gradients(op: str) -> Callable[..., None]:
    """For ops that are the gradients of `op`."""

    def refuse(ctx: object, *grads: object) -> None:
        raise NotImplementedError(
            f'second derivatives of {op} are not available with backend "native"; use backend="reference"'
        )

    return refuse
