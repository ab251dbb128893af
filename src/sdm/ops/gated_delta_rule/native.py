"""The gated delta rule by the compiled core, registered as a torch op.

Shapes: B batch, T time, H heads, K key size, D value channels, S sequences (batch rows or documents). Forward saves the
residuals (value minus retrieved) and the state before every SEGMENT-th token; backward recomputes the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdm.native import call_core, missing_because, require_core
from sdm.ops.backends import Backend, core_unsupported_reason, goes_past_dispatcher
from sdm.ops.checks import check_kernel_floats, check_kernel_state, check_shape, mark_changed
from sdm.ops.gated_delta_rule.inputs import Tokens, check_state, check_step
from sdm.ops.registration import no_second_gradients, register
from sdm.ops.sequences import Call

SEGMENT = 32  # kGatedDeltaSegment of the core


def gated_delta_rule_native(call: Call) -> tuple[Tensor, Tensor]:
    """Serve a call with the compiled core."""
    tokens, initial_state = call.in_full()
    save = torch.is_grad_enabled() and any(x.requires_grad for x in (*tokens, initial_state))
    run = _forward if goes_past_dispatcher(*tokens, initial_state) else torch.ops.sdm.gated_delta_rule
    y, final_state, *_ = run(*tokens, initial_state, call.cu_seqlens, save)
    return y, final_state


def gated_delta_step_native_(call: Call) -> Tensor:
    """Serve a single step with the compiled core; the state changes in place."""
    assert call.state is not None
    token, state = call.tokens.to(call.dtype), call.state
    if state.dtype != call.dtype or not state.is_contiguous():  # what the core does not change in place
        state = state.to(call.dtype).contiguous()
    run = _step if goes_past_dispatcher(state, *token) else torch.ops.sdm.gated_delta_step_
    y: Tensor = run(state, *token)
    if state is not call.state:
        call.state.copy_(state)
    return y


NATIVE = Backend(
    "native", gated_delta_rule_native, gated_delta_step_native_, "cpu", missing_because, core_unsupported_reason
)


def _check(tokens: Tokens, states: dict[str, Tensor], cu_seqlens: Tensor | None) -> int:
    """What the public function checks, again. `states` are [S,H,K,D]. Returns S."""
    sequences = check_state(tokens, None, cu_seqlens)
    check_kernel_floats(tokens.value.dtype, **tokens._asdict(), **states)
    for name, state in states.items():
        check_shape(name, state, (sequences, *tokens.key.shape[2:], tokens.value.shape[-1]), "[S,H,K,D]")
    return sequences


def _run(
    function: str, key: Tensor, log_decay: Tensor, state: Tensor, cu_seqlens: Tensor | None, **fields: Tensor
) -> None:
    """`key` [B,T,H,K], `log_decay` [B,T,H] or [B,T,H,K] and `state` [S,H,K,D] say the sizes."""
    sequences, heads, key_size, channels = state.shape
    call_core(
        function,
        key.dtype,
        sequences=sequences,
        tokens=key.shape[0] * key.shape[1],
        heads=heads,
        key_size=key_size,
        channels=channels,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to("cpu", torch.int64).contiguous(),
        decay_size=_decay_size(key, log_decay),
        key=key.contiguous(),
        log_decay=log_decay.contiguous(),
        **fields,
    )


def _decay_size(key: Tensor, log_decay: Tensor) -> int:
    """How many decays a token has per head."""
    return key.shape[-1] if log_decay.dim() == key.dim() else 1


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value, beta, log_decay, initial_state, cu_seqlens, _ = arguments
    y, final_state, residual, saved_states = outputs = _empty_outputs(*arguments)
    _run(
        "gated_delta_forward",
        key,
        log_decay,
        initial_state,
        cu_seqlens,
        query=query.contiguous(),
        value=value.contiguous(),
        beta=beta.contiguous(),
        initial_state=initial_state.contiguous(),
        y=y,
        final_state=final_state,
        residual=residual,
        saved_states=saved_states,
    )
    return outputs


def _checked_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *tokens, initial_state, cu_seqlens, _ = arguments
    _check(Tokens(*tokens), {"initial_state": initial_state}, cu_seqlens)
    return _forward(*arguments)


def _empty_outputs(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, _, value, _, _, initial_state, _, save = arguments
    sequences, *rest = initial_state.shape
    segments = value.shape[0] * value.shape[1] // SEGMENT + sequences if save else 0
    return (
        value.new_empty(value.shape),
        value.new_empty(initial_state.shape),
        value.new_empty(value.shape if save else (0,)),
        value.new_empty((segments, *rest)),
    )


def _backward(*arguments: Any) -> tuple[Tensor, ...]:
    query, key, beta, log_decay, cu_seqlens, residual, saved_states, grad_y, grad_final_state = arguments
    states = {"grad_final_state": grad_final_state}
    sequences = _check(Tokens(query, key, grad_y, beta, log_decay), states, cu_seqlens)
    segments = grad_y.shape[0] * grad_y.shape[1] // SEGMENT + sequences
    check_kernel_floats(grad_y.dtype, residual=residual, saved=saved_states)
    check_shape("residual", residual, grad_y.shape, "the shape of grad_y")
    check_shape("saved", saved_states, (segments, *grad_final_state.shape[1:]), "[segments,H,K,D] as forward saves it")
    grad_query, grad_key, grad_value, grad_beta, grad_log_decay, grad_initial = grads = _empty_gradients(*arguments)
    _run(
        "gated_delta_backward",
        key,
        log_decay,
        grad_final_state,
        cu_seqlens,
        query=query.contiguous(),
        beta=beta.contiguous(),
        residual=residual.contiguous(),
        saved_states=saved_states.contiguous(),
        grad_y=grad_y.contiguous(),
        grad_final_state=grad_final_state.contiguous(),
        grad_query=grad_query,
        grad_key=grad_key,
        grad_value=grad_value,
        grad_beta=grad_beta,
        grad_log_decay=grad_log_decay,
        grad_initial_state=grad_initial,
    )
    return grads


def _empty_gradients(*arguments: Any) -> tuple[Tensor, ...]:
    query, key, beta, log_decay, _, _, _, grad_y, grad_final_state = arguments
    return tuple(x.new_empty(x.shape) for x in (query, key, grad_y, beta, log_decay, grad_final_state))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, beta, log_decay, initial_state, cu_seqlens, save = inputs
    _, _, residual, saved_states = output
    ctx.mark_non_differentiable(residual, saved_states)
    # A graph that was traced where nobody asked for gradients (torch.export under no_grad) has to run again.
    again = (None, None) if save else (value, initial_state)
    ctx.save_for_backward(query, key, beta, log_decay, cu_seqlens, residual, saved_states, *again)


def _gradients(ctx: Any, grad_y: Tensor, grad_final_state: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    query, key, beta, log_decay, cu_seqlens, residual, saved_states, value, initial_state = ctx.saved_tensors
    if value is not None:
        tokens = query, key, value, beta, log_decay
        *_, residual, saved_states = torch.ops.sdm.gated_delta_rule(*tokens, initial_state, cu_seqlens, True)
    gradients = torch.ops.sdm.gated_delta_rule_backward(
        query, key, beta, log_decay, cu_seqlens, residual, saved_states, grad_y, grad_final_state
    )
    return *gradients, None, None


def _step(state: Tensor, *token: Tensor) -> Tensor:
    # The kernel takes microseconds: no time to collect its arguments.
    query, key, value, beta, log_decay = (x.contiguous() for x in token)
    y = torch.empty_like(value)
    batch, heads, key_size, channels = state.shape
    at = state.data_ptr()
    require_core().gated_delta_forward(
        state.dtype == torch.float64,
        threads=torch.get_num_threads(),
        sequences=batch,
        tokens=batch,
        heads=heads,
        key_size=key_size,
        channels=channels,
        cu_seqlens=None,
        query=query.data_ptr(),
        key=key.data_ptr(),
        beta=beta.data_ptr(),
        decay_size=_decay_size(key, log_decay),
        log_decay=log_decay.data_ptr(),
        value=value.data_ptr(),
        initial_state=at,
        y=y.data_ptr(),
        final_state=at,
        residual=None,
        saved_states=None,
    )
    mark_changed(state)
    return y


def _checked_step(state: Tensor, *token: Tensor) -> Tensor:
    tokens = Tokens(*token)
    check_step(state, tokens)
    check_kernel_floats(state.dtype, **tokens._asdict(), state=state)
    check_kernel_state(state)
    return _step(state, *token)


_TOKENS = "Tensor query, Tensor key, Tensor value, Tensor beta, Tensor log_decay"

register(
    f"gated_delta_rule({_TOKENS}, Tensor initial_state, Tensor? cu_seqlens, bool save)"
    " -> (Tensor y, Tensor final_state, Tensor residual, Tensor saved_states)",
    _checked_forward,
    _empty_outputs,
    _gradients,
    _save,
)
register(
    "gated_delta_rule_backward(Tensor query, Tensor key, Tensor beta, Tensor log_decay, Tensor? cu_seqlens, "
    "Tensor residual, Tensor saved, Tensor grad_y, Tensor grad_final_state)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _empty_gradients,
    no_second_gradients("gated_delta_rule"),
)
register(
    f"gated_delta_step_(Tensor(a!) state, {_TOKENS}) -> Tensor",
    _checked_step,
    lambda state, *token: token[2].new_empty(token[2].shape),
)
