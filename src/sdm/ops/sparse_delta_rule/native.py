"""The sparse delta rule on CPUs, through the compiled core.

`B` batch, `T` time, `H` heads, `N` slots, `D` value channels, `W` writes, `R` reads, `S` sequences (the batch, or the
documents of a packed batch of one).

Backward keeps the inputs and the residual `v - retrieved` [B,T,H,D], nothing of the memory: it runs the writes again to
reach the final memory, copying the few old rows that inverting would not bring back, and then walks back by inverting
the other writes.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from sdm.native import call_core, missing_because, require_core
from sdm.ops.backends import Backend, core_unsupported_reason, goes_past_dispatcher
from sdm.ops.checks import (
    check_kernel_floats,
    check_kernel_state,
    check_shape,
    compute_dtype,
    mark_changed,
)
from sdm.ops.registration import Context, no_second_gradients, register
from sdm.ops.sequences import Call
from sdm.ops.sparse_delta_rule.inputs import Tokens, check_shapes

# How many units of rounding a row of the memory may take up in backward, relative to its size, before it is copied
# instead of recovered by inversion; see the README of this op.
ROUNDING_LIMIT = 192.0
Argument: TypeAlias = Tensor | float | None
"""What a registered op takes; integers and booleans are floats to a type checker."""
_InPlace: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool]
"""The tokens, and whether it is the slot rule."""


def sparse_delta_rule_native(call: Call, rounding_limit: float = ROUNDING_LIMIT) -> tuple[Tensor, Tensor]:
    """A `rounding_limit` of 0 makes backward copy every old row, infinity none that can be inverted at all."""
    tokens, initial_state, cu_seqlens = _kernel_types(call.tokens, call.dtype), call.state, call.cu_seqlens
    needs_grad = [x.requires_grad for x in (*tokens, initial_state) if x is not None]
    track = torch.is_grad_enabled() and any(needs_grad)
    # Without gradients a bfloat16 state is read as it is, at half the traffic.
    if initial_state is not None and (track or initial_state.dtype != torch.bfloat16 or call.dtype == torch.float64):
        initial_state = initial_state.to(call.dtype)
    slot_rule = call.update == "slot"
    given = [x for x in (initial_state, cu_seqlens) if x is not None]
    run = _forward if goes_past_dispatcher(*tokens, *given) else torch.ops.sdm.sparse_delta_rule
    y, final_state, _ = run(
        *tokens,
        initial_state,
        call.rows,
        cu_seqlens,
        slot_rule,
        call.output_final_state,
        track and not slot_rule,
        rounding_limit,
    )
    return y, final_state


def sparse_delta_step_native_(call: Call) -> Tensor:
    """Serve a single step with the compiled core; the state changes in place."""
    token = _kernel_types(call.tokens, call.dtype)
    y: Tensor = torch.ops.sdm.sparse_delta_step_(call.state, *token, call.update == "slot")
    return y


def sparse_delta_rule_native_(call: Call) -> Tensor:
    """Update the state in place; the core takes any number of tokens."""
    state, tokens = call.state, _kernel_types(call.tokens, call.dtype)
    assert state is not None
    run = _run_in_place if goes_past_dispatcher(state, *tokens) else torch.ops.sdm.sparse_delta_rule_
    return run(state, *tokens, call.update == "slot")


def _unsupported_reason(call: Call) -> str | None:
    reason, state = core_unsupported_reason(call), call.state
    if reason is None and (call.single_step or call.in_place) and state is not None:
        halves = call.dtype == torch.float32 and state.dtype == torch.bfloat16
        if not state.is_contiguous() or not (state.dtype == call.dtype or halves):
            return (
                "the compiled core changes contiguous states of float32, bfloat16 or, with float64 tokens, float64, "
                f"got {state.dtype} and strides {state.stride()} with tokens of {call.dtype}"
            )
    return reason


NATIVE = Backend(
    "native",
    sparse_delta_rule_native,
    sparse_delta_step_native_,
    "cpu",
    missing_because,
    _unsupported_reason,
    run_=sparse_delta_rule_native_,
)


def usual_step(state: Tensor, tokens: Tokens) -> bool:
    """Whether a step is of the kind that decoding takes a million times: float32 throughout, contiguous, consistent.

    The kernel takes a few microseconds, so its arguments are checked in one expression. Anything unusual, errors
    included, goes the long way.
    """
    write_index, write_weight, value, beta, log_decay, read_index, read_weight = tokens
    if not goes_past_dispatcher(state, *tokens):
        return False
    for x in (state, *tokens):
        if not x.is_contiguous():
            return False
    if not (
        state.dtype is write_weight.dtype is value.dtype is beta.dtype is log_decay.dtype is read_weight.dtype
        and value.dtype is torch.float32
        and write_index.dtype is read_index.dtype is torch.int64
        and state.dim() == 4
        and write_index.dim() == read_index.dim() == 3
    ):
        return False
    B, H, N, D = state.shape
    W, R = write_index.shape[2], read_index.shape[2]
    return (
        value.shape == (B, H, D)
        and beta.shape == log_decay.shape == (B, H)
        and write_index.shape == write_weight.shape == (B, H, W)
        and read_index.shape == read_weight.shape == (B, H, R)
        and B > 0 < H
        and D > 0 < R
        and 0 < W <= N
    )


def take_usual_step_(state: Tensor, tokens: Tokens, slot_rule: bool) -> Tensor:
    """One token for each sequence, for arguments that `usual_step` has seen.

    They are spelled out: to collect them would take a third of the kernel's time.
    """
    B, H, N, D = state.shape
    write_index, write_weight, value, beta, log_decay, read_index, read_weight = tokens
    y = torch.empty_like(value)
    at = state.data_ptr()
    require_core().sparse_delta_rule_forward(
        False,
        threads=torch.get_num_threads(),
        sequences=B,
        tokens=1,
        heads=H,
        slots=N,
        channels=D,
        writes=write_index.shape[2],
        reads=read_index.shape[2],
        wide_index=True,
        decay_per_write=False,
        slot_rule=slot_rule,
        cu_seqlens=None,
        write_index=write_index.data_ptr(),
        write_weight=write_weight.data_ptr(),
        value=value.data_ptr(),
        beta=beta.data_ptr(),
        log_decay=log_decay.data_ptr(),
        read_index=read_index.data_ptr(),
        read_weight=read_weight.data_ptr(),
        initial_state=at,
        initial_per_sequence=True,
        initial_bf16=False,
        y=y.data_ptr(),
        residual=None,
        final_state=at,
    )
    mark_changed(state)
    return y


def saved_rows(
    tokens: Tokens,
    num_slots: int,
    initial_state: Tensor | None = None,
    update: str = "delta",
    rounding_limit: float = ROUNDING_LIMIT,
) -> int:
    """How many of the B*T*H*W old rows backward copies instead of recovering them by inversion."""
    slot_rule = update == "slot"
    tokens = _kernel_types(tokens, compute_dtype(*tokens))
    problem = _Problem(tokens, initial_state, num_slots, None, slot_rule)
    with torch.no_grad():
        _, _, residual = _forward(*tokens, *problem[1:], False, not slot_rule)
    count: int = problem.call("sparse_delta_rule_saved_rows", rounding_limit=rounding_limit, residual=residual)
    return count


def _kernel_types(tokens: Tokens, dtype: torch.dtype) -> Tokens:
    """Floats of one dtype, indices of 32 or 64 bits."""
    write, *floats, read = (*tokens[:5], tokens.read_weight, tokens.read_index)
    write_weight, value, beta, log_decay, read_weight = (x if x.dtype == dtype else x.to(dtype) for x in floats)
    if write.dtype != read.dtype or write.dtype not in (torch.int32, torch.int64):
        write, read = write.to(torch.int64), read.to(torch.int64)
    return Tokens(write, write_weight, value, beta, log_decay, read, read_weight)


class _Problem(NamedTuple):
    """The arguments that all registered ops share."""

    tokens: Tokens
    initial_state: Tensor | None
    num_slots: int
    cu_seqlens: Tensor | None
    slot_rule: bool

    @staticmethod
    def of(arguments: tuple[Any, ...]) -> tuple[_Problem, tuple[Any, ...]]:
        """From an op's flat arguments: the problem, and what comes after it."""
        return _Problem(Tokens(*arguments[:7]), *arguments[7:11]), arguments[11:]

    @property
    def sequences(self) -> int:
        return self.tokens.value.shape[0] if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    def check(self, single_step: bool = False, bfloat16_state: bool = True, in_place: bool = False) -> None:
        """The core takes addresses, and anybody can call a registered op: what the public function checks, again."""
        tokens, state = self.tokens, self.initial_state
        check_shapes(tokens, state, self.num_slots, self.cu_seqlens, "delta", single_step, in_place)
        dtype = tokens.value.dtype
        floats = {name: x for name, x in tokens._asdict().items() if not name.endswith("index")}
        if state is not None and not (bfloat16_state and state.dtype == torch.bfloat16 and dtype == torch.float32):
            floats["state" if single_step or in_place else "initial_state"] = state
        check_kernel_floats(dtype, **floats)
        kinds = tokens.write_index.dtype, tokens.read_index.dtype
        if kinds not in ((torch.int32,) * 2, (torch.int64,) * 2):
            raise TypeError(
                f"write_index and read_index must both be int32 or both int64, got {kinds[0]} and {kinds[1]}"
            )

    def call(self, function: str, **fields: Tensor | float | None) -> Any:
        """Call the core with what all of its functions are told first, and with `fields`."""
        tokens = self.tokens._asdict()
        value, state, cu_seqlens = self.tokens.value, self.initial_state, self.cu_seqlens
        return call_core(
            function,
            value.dtype,
            sequences=self.sequences,
            tokens=value.shape[1] if value.dim() == 4 else 1,
            heads=value.shape[-2],
            slots=self.num_slots,
            channels=value.shape[-1],
            writes=tokens["write_index"].shape[-1],
            reads=tokens["read_index"].shape[-1],
            wide_index=tokens["write_index"].dtype == torch.int64,
            decay_per_write=tokens["log_decay"].dim() == value.dim(),
            slot_rule=self.slot_rule,
            cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(torch.int64).contiguous(),
            **{name: x.contiguous() for name, x in tokens.items()},
            initial_state=None if state is None else state.contiguous(),
            initial_per_sequence=state is not None and state.dim() == 4,
            initial_bf16=state is not None and state.dtype == torch.bfloat16,
            **fields,
        )


def _empty_outputs(*arguments: Argument) -> tuple[Tensor, Tensor, Tensor]:
    problem, (output_final_state, save_residual, *_) = _Problem.of(arguments)
    value = problem.tokens.value
    shape = (problem.sequences, value.shape[2], problem.num_slots, value.shape[3])
    y = torch.empty_like(value, memory_format=torch.contiguous_format)
    final_state = value.new_empty(shape if output_final_state else (0,))
    # The slot rule has no residual of a token as a whole.
    has_residual = save_residual and not problem.slot_rule
    return y, final_state, torch.empty_like(y) if has_residual else value.new_empty(0)


def _forward(*arguments: Argument) -> tuple[Tensor, Tensor, Tensor]:
    problem, _ = _Problem.of(arguments)
    y, final_state, residual = _empty_outputs(*arguments)
    problem.call("sparse_delta_rule_forward", y=y, residual=residual, final_state=final_state)
    return y, final_state, residual


def _checked_forward(*arguments: Argument) -> tuple[Tensor, Tensor, Tensor]:
    _Problem.of(arguments)[0].check()
    return _forward(*arguments)


def _empty_gradients(*arguments: Argument) -> tuple[Tensor, ...]:
    return _gradients_in(torch.empty_like, *arguments)


def _gradients_in(empty_table: Callable[..., Tensor], *arguments: Argument) -> tuple[Tensor, ...]:
    """Outputs of backward; `empty_table` makes the one of the initial state."""
    problem, (grad_initial, *_) = _Problem.of(arguments[3:])
    floats = [x for x in problem.tokens if x.is_floating_point()]
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in floats]
    if grad_initial and problem.initial_state is not None:
        grads.append(empty_table(problem.initial_state, memory_format=torch.contiguous_format))
    return *grads, *(floats[0].new_empty(0) for _ in range(6 - len(grads)))


class _TableMemory:
    """Keeps the memory of large gradients that went out of use for the next ones.

    The system clears fresh pages, which takes a tenth of the time of backward and empties the caches.
    """

    smallest, most_kept = 16 << 20, 256 << 20

    def __init__(self) -> None:
        self._free: dict[int, deque[Tensor]] = {}  # by bytes; any thread may lend or take back

    def empty_like(self, x: Tensor, memory_format: torch.memory_format) -> Tensor:
        """As `torch.empty_like` for a dense tensor on the CPU."""
        if x.nbytes < self.smallest or type(x) not in (Tensor, torch.nn.Parameter):
            return torch.empty_like(x, memory_format=memory_format)
        try:
            memory = self._free.setdefault(x.nbytes, deque()).pop()  # the last one that went out of use
        except IndexError:
            memory = torch.empty(x.nbytes, dtype=torch.uint8)
        # torch holds the array as long as a tensor uses its bytes, and nobody else does.
        lent = (ctypes.c_byte * x.nbytes).from_address(memory.data_ptr())
        weakref.finalize(lent, self._take_back, memory).atexit = False
        return torch.frombuffer(lent, dtype=x.dtype).view(x.shape)

    def _take_back(self, memory: Tensor) -> None:
        kept = sum(size * len(free) for size, free in list(self._free.items()))
        if kept + memory.numel() <= self.most_kept:
            self._free[memory.numel()].append(memory)


_table_memory = _TableMemory()


def _backward(
    grad_y: Tensor | None, grad_final_state: Tensor | None, residual: Tensor | None, *arguments: Argument
) -> tuple[Tensor, ...]:
    problem, (_, rounding_limit) = _Problem.of(arguments)
    problem.check(bfloat16_state=False)
    value = problem.tokens.value
    if problem.slot_rule or value.numel() == 0:
        residual = None
    state = (problem.sequences, value.shape[2], problem.num_slots, value.shape[3])
    check_kernel_floats(value.dtype, residual=residual, grad_y=grad_y, grad_final_state=grad_final_state)
    for name, x in (("residual", residual), ("grad_y", grad_y)):
        if x is not None:
            check_shape(name, x, value.shape, "the shape of value")
    if grad_final_state is not None:
        check_shape("grad_final_state", grad_final_state, state, "[S,H,N,D]")
    grads = _gradients_in(_table_memory.empty_like, grad_y, grad_final_state, residual, *arguments)
    names = ("write_weight", "value", "beta", "log_decay", "read_weight", "initial_state")
    problem.call(
        "sparse_delta_rule_backward",
        rounding_limit=rounding_limit,
        residual=None if residual is None else residual.contiguous(),
        grad_y=torch.zeros(value.shape, dtype=value.dtype) if grad_y is None else grad_y.contiguous(),
        grad_final_state=None if grad_final_state is None else grad_final_state.contiguous(),
        **{f"grad_{name}": grad for name, grad in zip(names, grads, strict=True)},
    )
    return grads


def _step(state: Tensor, *arguments: *_InPlace) -> Tensor:
    check_shape("state", state, (None,) * 4, "[B,H,N,D]")
    check_kernel_state(state)
    _Problem(Tokens(*arguments[:7]), state, state.shape[2], None, arguments[7]).check(single_step=True)
    return _run_in_place(state, *arguments)


def _checked_run_in_place(state: Tensor, *arguments: *_InPlace) -> Tensor:
    check_shape("state", state, (None,) * 4, "[B,H,N,D]")
    check_kernel_state(state)
    _Problem(Tokens(*arguments[:7]), state, state.shape[2], None, arguments[7]).check(in_place=True)
    return _run_in_place(state, *arguments)


def _run_in_place(state: Tensor, *arguments: *_InPlace) -> Tensor:
    tokens = Tokens(*arguments[:7])
    problem = _Problem(tokens, state, state.shape[2], None, arguments[7])
    y = _empty_output(state, *arguments)
    problem.call("sparse_delta_rule_forward", y=y, residual=None, final_state=state)
    mark_changed(state)
    return y


def _empty_output(state: Tensor, *arguments: *_InPlace) -> Tensor:
    return torch.empty_like(arguments[2], memory_format=torch.contiguous_format)


def _setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    problem, (_, _, *plan) = _Problem.of(inputs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*problem.tokens, problem.initial_state, problem.cu_seqlens, output[2])
    ctx.options = problem.num_slots, problem.slot_rule, plan


def _gradients(
    ctx: Context, grad_y: Tensor | None, grad_final_state: Tensor | None, _: Tensor | None
) -> tuple[Any, ...]:
    *tokens, initial_state, cu_seqlens, residual = ctx.saved_tensors
    num_slots, slot_rule, plan = ctx.options
    grad_initial = ctx.needs_input_grad[7]
    if not slot_rule and residual.numel() < tokens[2].numel():
        # The graph was traced where nobody asked for gradients (torch.export under no_grad).
        problem = (*tokens, initial_state, num_slots, cu_seqlens, slot_rule)
        residual = torch.ops.sdm.sparse_delta_rule(*problem, False, True, *plan)[2]
    # A final state that was not asked for is empty, and so is its gradient.
    if grad_final_state is not None and grad_final_state.dim() == 1:
        grad_final_state = None
    write_weight, value, beta, log_decay, read_weight, initial = torch.ops.sdm.sparse_delta_rule_backward(
        grad_y,
        grad_final_state,
        residual,
        *tokens,
        initial_state,
        num_slots,
        cu_seqlens,
        slot_rule,
        grad_initial,
        *plan,
    )
    grads = (None, write_weight, value, beta, log_decay, None, read_weight, initial if grad_initial else None)
    return *grads, *(None,) * 6


_TOKENS = (
    "Tensor write_index, Tensor write_weight, Tensor value, Tensor beta, Tensor log_decay, "
    "Tensor read_index, Tensor read_weight"
)
_PROBLEM = f"{_TOKENS}, Tensor? initial_state, SymInt num_slots, Tensor? cu_seqlens, bool slot_rule"

register(
    f"sparse_delta_rule({_PROBLEM}, bool output_final_state, bool save_residual, float rounding_limit)"
    " -> (Tensor y, Tensor final_state, Tensor residual)",
    _checked_forward,
    _empty_outputs,
    _gradients,
    _setup_context,
)
register(
    f"sparse_delta_rule_backward(Tensor? grad_y, Tensor? grad_final_state, Tensor residual, {_PROBLEM}, "
    "bool grad_initial, float rounding_limit) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _empty_gradients,
    no_second_gradients("sparse_delta_rule"),
)
register(
    f"sparse_delta_rule_(Tensor(a!) state, {_TOKENS}, bool slot_rule) -> Tensor",
    _checked_run_in_place,
    _empty_output,
)
register(
    f"sparse_delta_step_(Tensor(a!) state, {_TOKENS}, bool slot_rule) -> Tensor",
    _step,
    _empty_output,
)
