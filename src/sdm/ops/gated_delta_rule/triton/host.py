"""Launches the kernels of `carry.py`, registered as torch ops with gradients. Looks at shapes, never at values.

Shapes: P rows (batch times heads), S sequences, H heads, G chunks of C tokens, K key size, D value channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdm.ops.checks import check_one_device, check_shape
from sdm.ops.registration import Context
from sdm.ops.triton.launch import is_traced, launch, load_kernel

LARGEST_KEY = 128  # more than that does not fit into registers
LEAST = 16  # rows and columns of a tile
SLAB = LEAST  # value channels of a program


def power(x: int) -> int:
    """The next power of two that a tile can have."""
    return max(1 << (x - 1).bit_length(), LEAST)


def chunk_size(key: int, time: int) -> int:
    """Tokens of a chunk: as many as fit into registers beside the state. A compiled graph is for every length."""
    size = 64 if key <= 64 else 16
    return size if torch.compiler.is_compiling() else min(size, power(time))


def _sizes(from_state: Tensor, free: Tensor, decay: Tensor, chunks: Tensor | None, heads: int) -> dict[str, Any]:
    rows, groups, size, key = from_state.shape
    check_shape("from_state", from_state, (rows, groups, size, key), "[P,G,C,K]")
    check_shape("free", free, (rows, groups, size, None), "[P,G,C,D]")
    if decay.shape not in ((rows, groups, 1), (rows, groups, key)):
        raise ValueError(f"decay must be [P,G,1] or [P,G,K], got shape {list(decay.shape)}")
    if rows % heads or (chunks is not None and rows != heads):
        raise ValueError(f"from_state has {rows} rows, which are not the {heads} heads of whole sequences")
    if size != power(size) or key > LARGEST_KEY:
        raise ValueError(f"the kernels take chunks of 2^n >= 16 tokens and K <= {LARGEST_KEY}, got {size} and {key}")
    channels = free.shape[-1]
    options = {"PER_CHANNEL": decay.shape[-1] > 1, "PACKED": chunks is not None}
    sizes = {"groups": groups, "H": heads, "C": size, "K": key, "D": channels, "KP": power(key), "S": SLAB}
    return {**sizes, **options, "num_warps": 8, "num_stages": 1}


def _forward(
    from_state: Tensor, free: Tensor, keys: Tensor, decay: Tensor, initial: Tensor, chunks: Tensor | None, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = _sizes(from_state, free, decay, chunks, heads)
    rows, groups, key, channels = *from_state.shape[:2], sizes["K"], sizes["D"]
    # Chunks behind the last document are not walked.
    make = free.new_empty if chunks is None else free.new_zeros
    states, delta = make((rows, groups, key, channels)), make(free.shape)
    final = torch.empty_like(initial, memory_format=torch.contiguous_format)
    check_shape("initial", initial, (None, key, channels), "[S*H,K,D]")
    if not is_traced(free):
        launch(
            load_kernel(__package__, "carry", "carry_kernel"),
            (initial.shape[0] * -(-channels // SLAB),),
            *(x.contiguous() for x in (from_state, free, keys, decay, initial)),
            None if chunks is None else chunks.contiguous(),
            states,
            delta,
            final,
            **sizes,
        )
    return states, delta, final


def _backward(
    from_state: Tensor,
    keys: Tensor,
    decay: Tensor,
    chunks: Tensor | None,
    grad_states: Tensor,
    grad_delta: Tensor,
    grad_final: Tensor,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = _sizes(from_state, grad_delta, decay, chunks, heads)
    check_shape("grad_states", grad_states, (*from_state.shape[:2], sizes["K"], sizes["D"]), "[P,G,K,D]")
    make = torch.empty_like if chunks is None else torch.zeros_like
    grads, grad_free = (make(x, memory_format=torch.contiguous_format) for x in (grad_states, grad_delta))
    grad_initial = torch.empty_like(grad_final, memory_format=torch.contiguous_format)
    if not is_traced(grad_delta):
        launch(
            load_kernel(__package__, "carry", "carry_backward_kernel"),
            (grad_final.shape[0] * -(-sizes["D"] // SLAB),),
            *(x.contiguous() for x in (from_state, keys, decay)),
            None if chunks is None else chunks.contiguous(),
            *(x.contiguous() for x in (grad_states, grad_delta, grad_final)),
            grads,
            grad_free,
            grad_initial,
            **sizes,
        )
    return grads, grad_free, grad_initial


def _setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    from_state, _, keys, decay, _, chunks, ctx.heads = inputs
    ctx.save_for_backward(from_state, keys, decay, chunks, *output[:2])


def _gradients(ctx: Context, grad_states: Tensor, grad_delta: Tensor, grad_final: Tensor) -> tuple[Any, ...]:
    """The walk leaves the gradients of all states; those of W, keys and decays are products over whole chunks."""
    from_state, keys, decay, chunks, states, delta = ctx.saved_tensors
    grads, grad_free, grad_initial = torch.ops.sdm.gated_delta_carry_triton_backward(
        from_state, keys, decay, chunks, grad_states, grad_delta, grad_final, ctx.heads
    )
    grad_from_state = -(grad_free @ states.mT)
    grad_keys = delta @ grads.mT
    grad_decay = (grads * states).sum(-1)
    if decay.shape[-1] == 1:
        grad_decay = grad_decay.sum(-1, keepdim=True)
    return grad_from_state, grad_free, grad_keys, grad_decay, grad_initial, None, None


def _second_gradients(ctx: Context, *grads: Tensor) -> None:
    raise NotImplementedError(
        'second derivatives of gated_delta_rule are not available with backend "triton"; use backend="reference"'
    )


_library = torch.library.Library("sdm", "FRAGMENT")
for _schema, _implementation in (
    (
        "gated_delta_carry_triton(Tensor from_state, Tensor free, Tensor keys, Tensor decay, Tensor initial, "
        "Tensor? chunks, int heads) -> (Tensor states, Tensor delta, Tensor final)",
        _forward,
    ),
    (
        "gated_delta_carry_triton_backward(Tensor from_state, Tensor keys, Tensor decay, Tensor? chunks, "
        "Tensor grad_states, Tensor grad_delta, Tensor grad_final, int heads) -> (Tensor, Tensor, Tensor)",
        _backward,
    ),
):

    def _fake(*arguments: Any, implementation: Any = _implementation) -> Any:
        check_one_device(*arguments)
        return implementation(*arguments)

    _name = _schema[: _schema.index("(")]
    _library.define(_schema)
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sdm::{_name}", _fake, lib=_library)
torch.library.register_autograd("sdm::gated_delta_carry_triton", _gradients, setup_context=_setup_context, lib=_library)
torch.library.register_autograd("sdm::gated_delta_carry_triton_backward", _second_gradients, lib=_library)
