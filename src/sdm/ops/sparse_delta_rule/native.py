"""The sparse delta rule on CPUs, through the compiled core.

`B` batch, `T` time, `H` heads, `N` slots, `D` value channels, `W` writes, `R` reads, `S` sequences (the batch, or the
documents of a packed batch of one).

Backward keeps the inputs and the error `v - retrieved` [B,T,H,D], nothing of the memory: it runs the writes again to
reach the final memory, copying the few old rows that its plan names, and then walks back by inverting writes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdm.native import core, require_core

# A copied row costs memory traffic, an inverted one up to exp(threshold) units of rounding; see the README of this op.
INVERSION_THRESHOLD = 3.0
MAX_INVERSIONS = 1024

_library = torch.library.Library("sdm", "FRAGMENT")
_INPUTS = (
    "Tensor write_index, Tensor write_weight, Tensor value, Tensor beta, Tensor log_decay, "
    "Tensor read_index, Tensor read_weight, Tensor? initial_state, int num_slots, Tensor? cu_seqlens, bool slot_rule"
)
_library.define(
    f"sparse_delta_rule({_INPUTS}, bool output_final_state, bool save_error, float threshold, int max_inversions)"
    " -> (Tensor y, Tensor final_state, Tensor error)"
)
_library.define(
    f"sparse_delta_rule_backward(Tensor? grad_y, Tensor? grad_final_state, Tensor error, {_INPUTS}, "
    "bool grad_initial, float threshold, int max_inversions)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "sparse_delta_rule_(Tensor(a!) state, Tensor write_index, Tensor write_weight, Tensor value, Tensor beta, "
    "Tensor log_decay, Tensor read_index, Tensor read_weight, Tensor? cu_seqlens, bool slot_rule) -> Tensor"
)


def sparse_delta_rule_native(
    write_index: Tensor,
    write_weight: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    read_index: Tensor,
    read_weight: Tensor,
    initial_state: Tensor | None,
    num_slots: int,
    cu_seqlens: Tensor | None = None,
    update: str = "delta",
    output_final_state: bool = True,
    threshold: float = INVERSION_THRESHOLD,
    max_inversions: int = MAX_INVERSIONS,
) -> tuple[Tensor, Tensor]:
    """y [B,T,H,D] in the dtype of `value`, and the final state [S,H,N,D] (empty unless asked for).

    Computes in float64 if `value` is float64, else in float32. `threshold` < 0 makes backward copy every old row,
    infinity (with a huge `max_inversions`) none.
    """
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    floats = [x.to(dtype) for x in (write_weight, value, beta, log_decay, read_weight)]
    track = torch.is_grad_enabled() and any(
        x.requires_grad for x in (*floats, *(() if initial_state is None else (initial_state,)))
    )
    if initial_state is not None and not (initial_state.dtype == torch.bfloat16 and not track):
        initial_state = initial_state.to(dtype)
    write_weight, value_, beta, log_decay, read_weight = floats
    y, final_state, _ = torch.ops.sdm.sparse_delta_rule(
        _kernel_index(write_index),
        write_weight,
        value_,
        beta,
        log_decay,
        _kernel_index(read_index),
        read_weight,
        initial_state,
        num_slots,
        cu_seqlens,
        update == "slot",
        output_final_state,
        track and update != "slot",
        threshold,
        max_inversions,
    )
    return y.to(value.dtype), final_state


def sparse_delta_rule_native_(
    state: Tensor,
    write_index: Tensor,
    write_weight: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    read_index: Tensor,
    read_weight: Tensor,
    cu_seqlens: Tensor | None = None,
    update: str = "delta",
) -> Tensor:
    """Runs T tokens over `state` [S,H,N,D] (float32, float64 or bfloat16) in place, without gradients."""
    dtype = torch.float64 if state.dtype == torch.float64 else torch.float32
    arguments = (
        state,
        _kernel_index(write_index),
        *(x.to(dtype) for x in (write_weight, value, beta, log_decay)),
        _kernel_index(read_index),
        read_weight.to(dtype),
        cu_seqlens,
        update == "slot",
    )
    # A decode step is mostly overhead; outside of torch.compile the dispatcher has nothing to add.
    op = torch.ops.sdm.sparse_delta_rule_ if torch.compiler.is_compiling() else _forward_in_place
    return op(*arguments).to(value.dtype)


def sparse_delta_step_native_(
    state: Tensor,
    write_index: Tensor,
    write_weight: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    read_index: Tensor,
    read_weight: Tensor,
    update: str = "delta",
) -> Tensor:
    """One token for each sequence: shapes without T, `state` [B,H,N,D] updated in place."""
    tokens = (x.unsqueeze(1) for x in (write_index, write_weight, value, beta, log_decay, read_index, read_weight))
    return sparse_delta_rule_native_(state, *tokens, None, update).squeeze(1)


def saved_rows(
    write_index: Tensor,
    write_weight: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    read_index: Tensor,
    read_weight: Tensor,
    num_slots: int,
    update: str = "delta",
    threshold: float = INVERSION_THRESHOLD,
    max_inversions: int = MAX_INVERSIONS,
) -> int:
    """How many of the B*T*H*W old rows backward copies instead of recovering them by inversion."""
    tensors = (write_index, write_weight, value, beta, log_decay, read_index, read_weight)
    inputs = _prepared(*tensors, num_slots, None, update == "slot")
    return require_core().sparse_delta_rule_saved_rows(*_problem(*inputs), threshold, max_inversions)


def _kernel_index(index: Tensor) -> Tensor:
    return index if index.dtype in (torch.int32, torch.int64) else index.to(torch.int32)


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def _problem(
    write_index: Tensor,
    write_weight: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    read_index: Tensor,
    read_weight: Tensor,
    num_slots: int,
    cu_seqlens: Tensor | None,
    slot_rule: bool,
) -> tuple:
    """What every function of the core is told first: sizes, flags and the token arrays."""
    B, T, H, D = value.shape
    if write_index.dtype != read_index.dtype:
        raise TypeError(f"write_index is {write_index.dtype} but read_index {read_index.dtype}")
    return (
        value.dtype == torch.float64,
        torch.get_num_threads(),
        B if cu_seqlens is None else cu_seqlens.numel() - 1,
        T,
        H,
        num_slots,
        D,
        write_index.shape[-1],
        read_index.shape[-1],
        write_index.dtype == torch.int64,
        log_decay.dim() == 4,
        slot_rule,
        _pointer(cu_seqlens),
        write_index.data_ptr(),
        write_weight.data_ptr(),
        value.data_ptr(),
        beta.data_ptr(),
        log_decay.data_ptr(),
        read_index.data_ptr(),
        read_weight.data_ptr(),
    )


def _prepared(*inputs: Tensor | int | bool | None) -> list:
    """The arguments of `_problem`, contiguous, with both indices of one width and cu_seqlens as int64."""
    *tensors, num_slots, cu_seqlens, slot_rule = inputs
    tensors = _contiguous(*tensors)
    if tensors[0].dtype != tensors[5].dtype:
        tensors[0], tensors[5] = tensors[0].to(torch.int64), tensors[5].to(torch.int64)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens.to(torch.int64).contiguous()
    return [*tensors, num_slots, cu_seqlens, slot_rule]


def _forward(
    write_index: Tensor,
    write_weight: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    read_index: Tensor,
    read_weight: Tensor,
    initial_state: Tensor | None,
    num_slots: int,
    cu_seqlens: Tensor | None,
    slot_rule: bool,
    output_final_state: bool,
    save_error: bool,
    threshold: float,
    max_inversions: int,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = _prepared(
        write_index, write_weight, value, beta, log_decay, read_index, read_weight, num_slots, cu_seqlens, slot_rule
    )
    (initial,) = _contiguous(initial_state)
    y, final_state, error = _empty_outputs(value, num_slots, cu_seqlens, output_final_state, save_error)
    require_core().sparse_delta_rule_forward(
        *_problem(*inputs),
        _pointer(initial),
        initial is not None and initial.dim() == 4,
        initial is not None and initial.dtype == torch.bfloat16,
        y.data_ptr(),
        error.data_ptr() if save_error else None,
        final_state.data_ptr() if output_final_state else None,
        False,
    )
    return y, final_state, error


def _empty_outputs(
    value: Tensor, num_slots: int, cu_seqlens: Tensor | None, output_final_state: bool, save_error: bool
) -> tuple[Tensor, Tensor, Tensor]:
    B, _, H, D = value.shape
    sequences = B if cu_seqlens is None else cu_seqlens.numel() - 1
    y = torch.empty_like(value, memory_format=torch.contiguous_format)
    final_state = value.new_empty((sequences, H, num_slots, D) if output_final_state else (0,))
    error = torch.empty_like(y) if save_error else value.new_empty(0)
    return y, final_state, error


def _forward_fake(
    write_index: Tensor,
    write_weight: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    read_index: Tensor,
    read_weight: Tensor,
    initial_state: Tensor | None,
    num_slots: int,
    cu_seqlens: Tensor | None,
    slot_rule: bool,
    output_final_state: bool,
    save_error: bool,
    threshold: float,
    max_inversions: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_outputs(value, num_slots, cu_seqlens, output_final_state, save_error)


def _empty_gradients(inputs: tuple, grad_initial: bool) -> tuple[Tensor, ...]:
    _, write_weight, value, beta, log_decay, _, read_weight, initial_state, *_ = inputs
    likes = (write_weight, value, beta, log_decay, read_weight)
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in likes]
    if grad_initial:
        grads.append(torch.empty_like(initial_state, memory_format=torch.contiguous_format))
    else:
        grads.append(value.new_empty(0))
    return tuple(grads)


def _backward(
    grad_y: Tensor | None,
    grad_final_state: Tensor | None,
    error: Tensor,
    *rest: Tensor | int | float | bool | None,
) -> tuple[Tensor, ...]:
    *inputs, grad_initial, threshold, max_inversions = rest
    *tokens, initial_state, num_slots, cu_seqlens, slot_rule = inputs
    value = tokens[2]
    if grad_y is None:
        grad_y = torch.zeros_like(value)
    prepared = _prepared(*tokens, num_slots, cu_seqlens, slot_rule)
    initial, grad_y, grad_final_state = _contiguous(initial_state, grad_y, grad_final_state)
    grads = _empty_gradients(tuple(inputs), grad_initial)
    require_core().sparse_delta_rule_backward(
        *_problem(*prepared),
        _pointer(initial),
        initial is not None and initial.dim() == 4,
        threshold,
        max_inversions,
        None if slot_rule else error.data_ptr(),
        grad_y.data_ptr(),
        _pointer(grad_final_state),
        *(x.data_ptr() for x in grads[:5]),
        grads[5].data_ptr() if grad_initial else None,
    )
    return grads


def _backward_fake(
    grad_y: Tensor | None,
    grad_final_state: Tensor | None,
    error: Tensor,
    *rest: Tensor | int | float | bool | None,
) -> tuple[Tensor, ...]:
    *inputs, grad_initial, _, _ = rest
    return _empty_gradients(tuple(inputs), grad_initial)


def _forward_in_place(
    state: Tensor,
    write_index: Tensor,
    write_weight: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    read_index: Tensor,
    read_weight: Tensor,
    cu_seqlens: Tensor | None,
    slot_rule: bool,
) -> Tensor:
    if not state.is_contiguous():
        raise ValueError("a state that is updated in place must be contiguous")
    inputs = _prepared(
        write_index,
        write_weight,
        value,
        beta,
        log_decay,
        read_index,
        read_weight,
        state.shape[-2],
        cu_seqlens,
        slot_rule,
    )
    y = torch.empty(value.shape, dtype=value.dtype)
    half = state.dtype == torch.bfloat16
    core.sparse_delta_rule_forward(  # type: ignore[union-attr]
        *_problem(*inputs), state.data_ptr(), True, half, y.data_ptr(), None, state.data_ptr(), half
    )
    return y


def _forward_in_place_fake(state: Tensor, write_index: Tensor, write_weight: Tensor, value: Tensor, *_: object) -> Tensor:
    return value.new_empty(value.shape)


def _setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:  # type: ignore[no-untyped-def]
    *tokens, initial_state, num_slots, cu_seqlens, slot_rule, _, save_error, threshold, max_inversions = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tokens, initial_state, cu_seqlens, output[2])
    ctx.options = num_slots, slot_rule, threshold, max_inversions


def _gradients(ctx, grad_y: Tensor | None, grad_final_state: Tensor | None, _: Tensor | None) -> tuple:  # type: ignore[no-untyped-def]
    *tokens, initial_state, cu_seqlens, error = ctx.saved_tensors
    num_slots, slot_rule, threshold, max_inversions = ctx.options
    grad_initial = initial_state is not None and ctx.needs_input_grad[7]
    if grad_final_state is not None and grad_final_state.dim() == 1:
        grad_final_state = None
    write_weight, value, beta, log_decay, read_weight, initial = torch.ops.sdm.sparse_delta_rule_backward(
        grad_y,
        grad_final_state,
        error,
        *tokens,
        initial_state,
        num_slots,
        cu_seqlens,
        slot_rule,
        grad_initial,
        threshold,
        max_inversions,
    )
    grads = (None, write_weight, value, beta, log_decay, None, read_weight, initial if grad_initial else None)
    return *grads, *(None,) * 7


_library.impl("sparse_delta_rule", _forward, "CPU")
_library.impl("sparse_delta_rule_backward", _backward, "CPU")
_library.impl("sparse_delta_rule_", _forward_in_place, "CPU")
torch.library.register_fake("sdm::sparse_delta_rule", _forward_fake, lib=_library)
torch.library.register_fake("sdm::sparse_delta_rule_backward", _backward_fake, lib=_library)
torch.library.register_fake("sdm::sparse_delta_rule_", _forward_in_place_fake, lib=_library)
torch.library.register_autograd(
    "sdm::sparse_delta_rule", _gradients, setup_context=_setup_context, lib=_library
)
