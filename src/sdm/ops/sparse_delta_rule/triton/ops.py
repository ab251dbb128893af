"""The kernels as torch ops: shapes, gradients, and no second derivatives.

`B` batch, `T` time, `H` heads, `N` slots, `D` value channels, `W` writes, `R` reads, `S` sequences (the batch, or the
documents of a packed batch of one).

Forward keeps the inputs and the residual `v - retrieved` [B,T,H,D] for backward, nothing of the memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sdm.ops.checks import check_one_device, check_shape, document_bounds
from sdm.ops.registration import Context
from sdm.ops.sparse_delta_rule.inputs import Tokens, check_shapes, check_values
from sdm.ops.sparse_delta_rule.triton import host
from sdm.ops.sparse_delta_rule.triton.host import Plan, Problem

_Args = tuple[Any, ...]


def _problem(arguments: _Args) -> tuple[Problem, _Args]:
    """From an op's flat arguments: the problem, and what comes after it."""
    return Problem(Tokens(*arguments[:7]), *arguments[7:11]), arguments[11:]


def _check(problem: Problem) -> None:
    """What the public function checks, again: anybody can call a registered op.

    Values are looked at where that waits for nobody, which is on a CPU. On a GPU an index outside of the table turns
    to NaN what it touches, offsets of documents are cut to the row, and decays above 0 are taken as they are.
    """
    tokens, cu_seqlens = problem.tokens, problem.cu_seqlens
    check_shapes(tokens, problem.initial_state, problem.num_slots, cu_seqlens, "delta")
    if type(cu_seqlens) is Tensor and cu_seqlens.is_cpu:
        document_bounds(cu_seqlens, tokens.value.shape[1])
    if type(tokens.value) is Tensor and tokens.value.is_cpu:
        check_values(tokens, problem.num_slots)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem, (output_final_state, save_residual, *_) = _problem(arguments)
    _check(problem)
    y, table, residual = host.forward(problem, final=output_final_state)
    if not output_final_state:
        table = table.new_empty(0)
    # The slot rule pushes the value itself.
    if not save_residual or problem.slot_rule:
        residual = residual.new_empty(0)
    return y, table, residual


def backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Serve the registered backward op: gradients of write weights, values, gates, read weights and initial state."""
    grad_y, grad_final_state, residual = arguments[:3]
    problem, (grad_initial, *plan) = _problem(arguments[3:])
    _check(problem)
    value, initial = problem.tokens.value, problem.initial_state
    if problem.slot_rule:
        residual = value.to(problem.dtype)
    check_shape("residual", residual, value.shape, "the shape of value")
    if grad_y is not None:
        check_shape("grad_y", grad_y, value.shape, "the shape of value")
    if grad_final_state is not None:
        state = (problem.sequences, value.shape[2], problem.num_slots, value.shape[3])
        check_shape("grad_final_state", grad_final_state, state, "[S,H,N,D]")
    residual, grad_initial = residual.to(problem.dtype), grad_initial and initial is not None
    grads = host.backward(problem, Plan(*plan), residual, grad_y, grad_final_state, grad_initial)
    grad_state = value.new_empty(0)
    if grad_initial:
        assert initial is not None
        grad_state = (grads.table.sum(0) if initial.dim() < grads.table.dim() else grads.table).to(initial.dtype)
    return grads.write_weight, grads.value.to(value.dtype), grads.beta, grads.log_decay, grads.read_weight, grad_state


def _forward_(state: Tensor, *arguments: Any) -> Tensor:
    *token, slot_rule = arguments
    tokens = Tokens(*token)
    check_shape("state", state, (None,) * 4, "[B,H,N,D]")
    check_shapes(tokens, state, state.shape[2], None, "delta", in_place=True)
    if type(state) is Tensor and state.is_cpu:
        check_values(tokens, state.shape[2])
    return host.forward_(state, tokens, slot_rule)


def _step(state: Tensor, *arguments: Any) -> Tensor:
    *token, slot_rule = arguments
    tokens = Tokens(*token)
    check_shape("state", state, (None,) * 4, "[B,H,N,D]")
    check_shapes(tokens, state, state.shape[2], None, "delta", single_step=True)
    if type(state) is Tensor and state.is_cpu:
        check_values(tokens, state.shape[2])
    return host.step_(state, tokens, slot_rule)


def _setup_context(ctx: Context, inputs: _Args, output: tuple[Tensor, Tensor, Tensor]) -> None:
    problem, (_, _, *plan) = _problem(inputs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*problem.tokens, problem.initial_state, problem.cu_seqlens, output[2])
    ctx.options = problem.num_slots, problem.slot_rule, plan


def _gradients(ctx: Context, grad_y: Tensor | None, grad_final_state: Tensor | None, _: Tensor | None) -> _Args:
    *tokens, initial_state, cu_seqlens, residual = ctx.saved_tensors
    num_slots, slot_rule, plan = ctx.options
    grad_initial = ctx.needs_input_grad[7]
    problem = (*tokens, initial_state, num_slots, cu_seqlens, slot_rule)
    if not slot_rule and residual.numel() < tokens[2].numel():
        # The graph was traced where nobody asked for gradients (torch.export under no_grad).
        residual = torch.ops.sdm.sparse_delta_rule_triton(*problem, False, True, *plan)[2]
    # A final state that was not asked for is empty, and so is its gradient.
    if grad_final_state is not None and grad_final_state.dim() == 1:
        grad_final_state = None
    write_weight, value, beta, log_decay, read_weight, initial = torch.ops.sdm.sparse_delta_rule_triton_backward(
        grad_y, grad_final_state, residual, *problem, grad_initial, *plan
    )
    grads = (None, write_weight, value, beta, log_decay, None, read_weight, initial if grad_initial else None)
    return *grads, *(None,) * (5 + len(plan))


def _second_gradients(ctx: Context, *grads: Tensor) -> None:
    raise NotImplementedError(
        'second derivatives of sparse_delta_rule are not available with backend "triton"; use backend="reference"'
    )


_TOKENS = (
    "Tensor write_index, Tensor write_weight, Tensor value, Tensor beta, Tensor log_decay, "
    "Tensor read_index, Tensor read_weight"
)
_PROBLEM = f"{_TOKENS}, Tensor? initial_state, SymInt num_slots, Tensor? cu_seqlens, bool slot_rule"
_PLAN = "float rounding_limit, int share, str kind"
_library = torch.library.Library("sdm", "FRAGMENT")


def _register(schema: str, implementation: Any) -> None:
    """The function that launches kernels launches none on tensors without memory, so that it tells the shapes too."""
    name = schema[: schema.index("(")]

    def fake(*arguments: Any) -> Any:
        check_one_device(*(x for x in arguments if x is not None))
        return implementation(*arguments)

    _library.define(schema)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sdm::{name}", fake, lib=_library)


_register(
    f"sparse_delta_rule_triton({_PROBLEM}, bool output_final_state, bool save_residual, "
    f"{_PLAN}) -> (Tensor y, Tensor final_state, Tensor residual)",
    _forward,
)
_register(
    f"sparse_delta_rule_triton_backward(Tensor? grad_y, Tensor? grad_final_state, Tensor residual, {_PROBLEM}, "
    f"bool grad_initial, {_PLAN}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    backward,
)
_register(f"sparse_delta_rule_triton_(Tensor(a!) state, {_TOKENS}, bool slot_rule) -> Tensor", _forward_)
_register(f"sparse_delta_step_triton_(Tensor(a!) state, {_TOKENS}, bool slot_rule) -> Tensor", _step)
torch.library.register_autograd("sdm::sparse_delta_rule_triton", _gradients, setup_context=_setup_context, lib=_library)
torch.library.register_autograd("sdm::sparse_delta_rule_triton_backward", _second_gradients, lib=_library)
