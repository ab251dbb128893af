"""The gated delta rule by the compiled core, registered as a torch op.

Shapes: B batch, T time, H heads, K key size, D value channels, S sequences (batch rows or documents). Forward saves the
residuals (value minus retrieved) and the state before every SEGMENT-th token; backward recomputes the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdm.native import missing_because, require_core
from sdm.ops.backends import Backend, core_refuses, goes_past_dispatcher
from sdm.ops.checks import check_kernel_floats, check_kernel_state, check_one_device, check_shape, mark_changed
from sdm.ops.gated_delta_rule.inputs import Tokens, check_state, check_step
from sdm.ops.sequences import Call

SEGMENT = 32  # kGatedDeltaSegment of the core


def _check(tokens: Tokens, states: dict[str, Tensor], cu_seqlens: Tensor | None) -> int:
    """The core takes addresses, and anybody can call a registered op: what the public function checks, again.

    `states` are [S,H,K,D]. Returns S.
    """
    sequences = check_state(tokens, None, cu_seqlens)
    check_kernel_floats(tokens.value.dtype, **tokens._asdict(), **states)
    for name, state in states.items():
        check_shape(name, state, (sequences, *tokens.key.shape[2:], tokens.value.shape[-1]), "[S,H,K,D]")
    return sequences


def _sizes(key: Tensor, value: Tensor, initial_state: Tensor) -> tuple[int, int, int, int, int]:
    batch, time, heads, key_size = key.shape
    return initial_state.shape[0], batch * time, heads, key_size, value.shape[-1]


def _outputs(tokens: Tokens, initial_state: Tensor, save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    value, (sequences, tokens_count, *rest) = tokens.value, _sizes(tokens.key, tokens.value, initial_state)
    segments = tokens_count // SEGMENT + sequences if save else 0
    return (
        value.new_empty(value.shape),
        value.new_empty(initial_state.shape),
        value.new_empty(value.shape if save else (0,)),
        value.new_empty((segments, *rest)),
    )


def _offsets(cu_seqlens: Tensor | None) -> Tensor | None:
    return None if cu_seqlens is None else cu_seqlens.to("cpu", torch.int64).contiguous()


def _run(
    tokens: Tokens, initial_state: Tensor, cu_seqlens: Tensor | None, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = Tokens(*(x.contiguous() for x in tokens))
    initial_state, offsets = initial_state.contiguous(), _offsets(cu_seqlens)
    y, final_state, residual, saved = _outputs(tokens, initial_state, save)
    require_core().gated_delta_forward(
        *(x.data_ptr() for x in tokens),
        initial_state.data_ptr(),
        None if offsets is None else offsets.data_ptr(),
        y.data_ptr(),
        final_state.data_ptr(),
        residual.data_ptr() if save else None,
        saved.data_ptr() if save else None,
        *_sizes(tokens.key, tokens.value, initial_state),
        tokens.value.dtype == torch.float64,
        torch.get_num_threads(),
    )
    return y, final_state, residual, saved


@torch.library.custom_op("sdm::gated_delta_rule", mutates_args=(), device_types="cpu")
def _rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = Tokens(query, key, value, beta, log_decay)
    _check(tokens, {"initial_state": initial_state}, cu_seqlens)
    return _run(tokens, initial_state, cu_seqlens, save)


@_rule.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_one_device(query, key, value, beta, log_decay, initial_state, cu_seqlens)
    return _outputs(Tokens(query, key, value, beta, log_decay), initial_state, save)


@torch.library.custom_op("sdm::gated_delta_rule_backward", mutates_args=(), device_types="cpu")
def _rule_backward(
    query: Tensor,
    key: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    cu_seqlens: Tensor | None,
    residual: Tensor,
    saved: Tensor,
    grad_y: Tensor,
    grad_final_state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    states = {"grad_final_state": grad_final_state}
    sequences = _check(Tokens(query, key, grad_y, beta, log_decay), states, cu_seqlens)
    segments = grad_y.shape[0] * grad_y.shape[1] // SEGMENT + sequences
    check_kernel_floats(grad_y.dtype, residual=residual, saved=saved)
    check_shape("residual", residual, grad_y.shape, "the shape of grad_y")
    check_shape("saved", saved, (segments, *grad_final_state.shape[1:]), "[segments,H,K,D] as forward saves it")
    query, key, beta, log_decay = (x.contiguous() for x in (query, key, beta, log_decay))
    residual, saved, grad_y, grad_final_state = (x.contiguous() for x in (residual, saved, grad_y, grad_final_state))
    offsets = _offsets(cu_seqlens)
    gradients = _gradients(query, key, beta, log_decay, grad_y, grad_final_state)
    require_core().gated_delta_backward(
        *(x.data_ptr() for x in (query, key, beta, log_decay)),
        None if offsets is None else offsets.data_ptr(),
        *(x.data_ptr() for x in (residual, saved, grad_y, grad_final_state)),
        *(x.data_ptr() for x in gradients),
        *_sizes(key, grad_y, grad_final_state),
        grad_y.dtype == torch.float64,
        torch.get_num_threads(),
    )
    return gradients


def _gradients(
    query: Tensor, key: Tensor, beta: Tensor, log_decay: Tensor, grad_y: Tensor, grad_final_state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    likes = (query, key, grad_y, beta, log_decay, grad_final_state)
    a, b, c, d, e, f = (x.new_empty(x.shape) for x in likes)
    return a, b, c, d, e, f


@_rule_backward.register_fake
def _(
    query: Tensor,
    key: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    cu_seqlens: Tensor | None,
    residual: Tensor,
    saved: Tensor,
    grad_y: Tensor,
    grad_final_state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    check_one_device(query, key, beta, log_decay, cu_seqlens, residual, saved, grad_y, grad_final_state)
    return _gradients(query, key, beta, log_decay, grad_y, grad_final_state)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, beta, log_decay, initial_state, cu_seqlens, save = inputs
    _, _, residual, saved = output
    ctx.mark_non_differentiable(residual, saved)
    # A graph that was traced where nobody asked for gradients (torch.export under no_grad) has to run again.
    again = (None, None) if save else (value, initial_state)
    ctx.save_for_backward(query, key, beta, log_decay, cu_seqlens, residual, saved, *again)


def _backward(ctx: Any, grad_y: Tensor, grad_final_state: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    query, key, beta, log_decay, cu_seqlens, residual, saved, value, initial_state = ctx.saved_tensors
    if value is not None:
        *_, residual, saved = _rule(query, key, value, beta, log_decay, initial_state, cu_seqlens, True)
    gradients = _rule_backward(query, key, beta, log_decay, cu_seqlens, residual, saved, grad_y, grad_final_state)
    return *gradients, None, None


torch.library.register_autograd("sdm::gated_delta_rule", _backward, setup_context=_save)


def gated_delta_rule_native(call: Call) -> tuple[Tensor, Tensor]:
    tokens, initial_state = call.in_full()
    if goes_past_dispatcher(*tokens, initial_state):
        return _run(tokens, initial_state, call.cu_seqlens, save=False)[:2]
    save = torch.is_grad_enabled() and any(x.requires_grad for x in (*tokens, initial_state))
    return _rule(*tokens, initial_state, call.cu_seqlens, save)[:2]


def gated_delta_step_native_(call: Call) -> Tensor:
    assert call.state is not None
    token, state = call.tokens.to(call.dtype), call.state
    if state.dtype != call.dtype or not state.is_contiguous():  # what the core does not change in place
        state = state.to(call.dtype).contiguous()
    y = _run_step(state, token) if goes_past_dispatcher(state, *token) else _step(state, *token)
    if state is not call.state:
        call.state.copy_(state)
    return y


NATIVE = Backend("native", gated_delta_rule_native, gated_delta_step_native_, "cpu", missing_because, core_refuses)


@torch.library.custom_op("sdm::gated_delta_step_", mutates_args=("state",), device_types="cpu")
def _step(state: Tensor, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    token = Tokens(query, key, value, beta, log_decay)
    check_step(state, token)
    check_kernel_floats(state.dtype, **token._asdict(), state=state)
    check_kernel_state(state)
    return _run_step(state, token)


@_step.register_fake
def _(state: Tensor, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    check_one_device(state, query, key, value, beta, log_decay)
    return value.new_empty(value.shape)


def _run_step(state: Tensor, token: Tokens) -> Tensor:
    token = Tokens(*(x.contiguous() for x in token))
    y = torch.empty_like(token.value)
    batch, heads, key_size, channels = state.shape
    address = state.data_ptr()
    require_core().gated_delta_forward(
        *(x.data_ptr() for x in token),
        address,
        None,
        y.data_ptr(),
        address,
        None,
        None,
        batch,
        batch,
        heads,
        key_size,
        channels,
        state.dtype == torch.float64,
        torch.get_num_threads(),
    )
    mark_changed(state)
    return y
