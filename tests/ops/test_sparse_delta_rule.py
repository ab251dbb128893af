"""The sparse delta rule: every backend against the reference, and the reference against the equations."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import (
    assert_close,
    assert_identical,
    cpu_backends,
    distinct_slots,
    matrix_backends,
    outputs_and_gradients,
    random_tokens,
)
from sdm.ops import sparse_delta_rule, sparse_delta_step_
from sdm.ops.sequences import Call
from sdm.ops.sparse_delta_rule.chunked import sparse_delta_rule_chunked
from sdm.ops.sparse_delta_rule.inputs import Tokens

BACKENDS = matrix_backends()
FAST = BACKENDS[1:]  # all but the reference
UPDATES = ["delta", "slot"]


def run(backend: str, **options: Any) -> Any:
    def call(*inputs: Tensor) -> tuple[Tensor, ...]:
        y, state = sparse_delta_rule(
            *inputs[:7], initial_state=inputs[7], output_final_state=True, backend=backend, **options
        )
        assert state is not None
        return y, state

    return call


def compare(
    tokens: Tokens,
    state: Tensor,
    backend: str,
    tolerance: float = 1e-12,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> None:
    """Output, final state and every gradient of a backend, against the reference in float64."""
    inputs = (*tokens, state)
    if dtype is not None:
        inputs = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
    expected = outputs_and_gradients(run("reference", **options), inputs, torch.float64)
    assert_close(outputs_and_gradients(run(backend, **options), inputs), expected, tolerance)


def test_reference_is_the_equations() -> None:
    B, T, H, N, D = 2, 7, 3, 11, 4
    tokens = random_tokens(B, T, H, N=N, D=D)
    memory = torch.randn(H, N, D, dtype=torch.float64)
    y, final = run("reference")(*tokens, memory)
    for b in range(B):
        for h in range(H):
            M = memory[h].clone()
            for t in range(T):
                w, k, v, beta, g, r, q = (x[b, t, h] for x in tokens)
                decayed = g.exp() * M[w]
                delta = beta * (v - k @ decayed)
                M[w] = decayed + torch.outer(k, delta)
                torch.testing.assert_close(y[b, t, h], q @ M[r])
            torch.testing.assert_close(final[b, h], M)


def test_slot_update_is_the_printed_equation() -> None:
    tokens = random_tokens(1, 1, 1)
    memory = torch.randn(1, 9, 5, dtype=torch.float64)
    _, final = run("reference", update="slot")(*tokens, memory)
    w, k, v, beta, g, _, _ = (x[0, 0, 0] for x in tokens)
    expected = memory[0].clone()
    expected[w] = (g.exp() * (1 - beta * k))[:, None] * memory[0, w] + (beta * k)[:, None] * v
    torch.testing.assert_close(final[0, 0], expected)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("per_write", [False, True])
@pytest.mark.parametrize("shared", [True, False])
def test_backend_equals_reference(backend: str, update: str, per_write: bool, shared: bool) -> None:
    tokens = random_tokens(2, 70, 2, W=5, R=7, N=30, D=6, per_write=per_write)
    state = torch.randn(*([] if shared else [2]), 2, 30, 6, dtype=torch.float64)
    compare(tokens, state, backend, update=update)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("initial", ["zeros", "shared", "each"])
def test_without_the_final_state(backend: str, update: str, initial: str) -> None:
    """Rows whose slots nobody comes back to may be forgotten then; results must not change."""
    tokens = random_tokens(2, 40, 2, W=5, R=4, N=30, D=40)
    states = {"zeros": (), "shared": (torch.randn(2, 30, 40).double(),), "each": (torch.randn(2, 2, 30, 40).double(),)}

    def call(name: str) -> Any:
        def only_y(*inputs: Tensor) -> tuple[Tensor]:
            state = inputs[7] if len(inputs) > 7 else None
            y, _ = sparse_delta_rule(*inputs[:7], initial_state=state, num_slots=30, update=update, backend=name)
            return (y,)

        return only_y

    inputs = (*tokens, *states[initial])
    assert_close(outputs_and_gradients(call(backend), inputs), outputs_and_gradients(call("reference"), inputs), 1e-12)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("update", UPDATES)
def test_packed_documents_equal_separate_ones(backend: str, update: str) -> None:
    bounds = [0, 5, 5, 71, 72, 90]
    tokens = random_tokens(1, 90, 2, N=16)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    state = torch.randn(2, 16, 5, dtype=torch.float64)
    y, final = run(backend, cu_seqlens=cu_seqlens, update=update)(*tokens, state)
    assert final.shape == (5, 2, 16, 5)
    for document, (start, end) in enumerate(itertools.pairwise(bounds)):
        piece = Tokens(*(x[:, start:end] for x in tokens))
        y_alone, final_alone = run("reference", update=update)(*piece, state)
        assert_close([y[:, start:end], final[document : document + 1]], [y_alone, final_alone], 1e-12)
    per_document = torch.randn(5, 2, 16, 5, dtype=torch.float64)
    for initial in (state, per_document):
        compare(tokens, initial, backend, cu_seqlens=cu_seqlens, update=update)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("update", UPDATES)
def test_splitting_changes_nothing(backend: str, update: str) -> None:
    tokens = random_tokens(2, 67, 2)
    state = torch.randn(2, 2, 9, 5, dtype=torch.float64)
    whole = run(backend, update=update)(*tokens, state)
    for cuts in ([0, 1, 40, 67], [0, 64, 67], list(range(68))):
        pieces, carried = [], state
        for start, end in itertools.pairwise(cuts):
            y, carried = run(backend, update=update)(*(x[:, start:end] for x in tokens), carried)
            pieces.append(y)
        assert_close([torch.cat(pieces, 1), carried], whole, 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_alone_equals_itself_in_a_batch(backend: str) -> None:
    tokens = random_tokens(3, 66, 2)
    state = torch.randn(2, 9, 5, dtype=torch.float64)
    y, final = run(backend)(*tokens, state)
    for b in range(3):
        for h in range(2):
            alone = run(backend)(*(x[b : b + 1, :, h : h + 1] for x in tokens), state[h : h + 1])
            assert_close(alone, [y[b : b + 1, :, h : h + 1], final[b : b + 1, h : h + 1]], 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("update", UPDATES)
def test_gradcheck(backend: str, update: str) -> None:
    for T, per_write in ((1, False), (5, True)):
        tokens = random_tokens(1, T, 1, W=2, R=2, N=4, D=2, per_write=per_write)
        state = torch.randn(1, 4, 2, dtype=torch.float64)
        leaves = [x.requires_grad_() if x.is_floating_point() else x for x in (*tokens, state)]
        # The gates are squashed so that the perturbed inputs stay legal.
        leaves[4] = (leaves[4].detach() - 0.1).requires_grad_()
        assert torch.autograd.gradcheck(run(backend, update=update), leaves)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-2)])
@pytest.mark.parametrize("update", UPDATES)
def test_precision(backend: str, dtype: torch.dtype, tolerance: float, update: str) -> None:
    tokens = random_tokens(2, 200, 2, W=12, R=24, N=100, D=16)
    compare(tokens, torch.randn(2, 100, 16), backend, tolerance, dtype, update=update)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes_of_the_results(backend: str) -> None:
    tokens = random_tokens(dtype=torch.bfloat16)
    y, state = sparse_delta_rule(*tokens, num_slots=9, output_final_state=True, backend=backend)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    y, state = sparse_delta_rule(*tokens, num_slots=9, backend=backend)
    assert state is None
    short = tokens._replace(
        write_index=tokens.write_index.to(torch.int16), read_index=tokens.read_index.to(torch.uint8)
    )
    assert_identical([sparse_delta_rule(*short, num_slots=9, backend=backend)[0]], [y])


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("decay", [0.0, 3.0, 16.0, 50.0, 1000.0])
def test_strong_and_absent_decay(backend: str, update: str, decay: float) -> None:
    tokens = random_tokens(1, 150, 1, W=4, R=4, N=12)._replace(log_decay=torch.full((1, 150, 1), -decay).double())
    compare(tokens, torch.randn(1, 12, 5, dtype=torch.float64), backend, 1e-10, update=update)
    compare(tokens, torch.randn(1, 12, 5), backend, 1e-5, torch.float32, update=update)
    # A slot that is wiped now and then and barely decays in between keeps full precision.
    mixed = tokens._replace(log_decay=torch.where(torch.rand(1, 150, 1) < 0.1, -decay, -1e-3).double())
    compare(mixed, torch.randn(1, 12, 5), backend, 1e-5, torch.float32, update=update)


@pytest.mark.parametrize("backend", FAST)
def test_slot_update_that_overwrites_completely(backend: str) -> None:
    """beta k = 1 leaves nothing of the old row; its factor has no logarithm, its gradient is not zero."""
    tokens = random_tokens(1, 70, 1, W=1, N=5)
    tokens = tokens._replace(write_weight=torch.ones(1, 70, 1, 1).double(), beta=torch.ones(1, 70, 1).double())
    compare(tokens, torch.randn(1, 5, 5, dtype=torch.float64), backend, update="slot")


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("backend", FAST)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape(backend: str, data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**31)))
    N = draw(st.sampled_from([1, 4, 25, 100]))
    shape = {
        "B": draw(st.integers(1, 3)),
        "T": draw(st.sampled_from([0, 1, 2, 17, 64, 65, 130])),
        "H": draw(st.integers(1, 2)),
        "W": min(N, draw(st.sampled_from([1, 2, 12, 24, 96]))),
        "R": min(N, draw(st.sampled_from([1, 3, 12, 96]))),
        "N": N,
        "D": draw(st.sampled_from([1, 3, 16, 33])),
    }
    tokens = random_tokens(**shape, per_write=draw(st.booleans()), decay=draw(st.sampled_from([0.0, 0.2, 50.0])))
    if draw(st.booleans()):  # every token hits the same slots
        tokens = tokens._replace(write_index=tokens.write_index[:1, :1].expand_as(tokens.write_index))
    state = torch.randn(shape["H"], N, shape["D"], dtype=torch.float64)
    compare(tokens, state, backend, 1e-9, update=draw(st.sampled_from(UPDATES)))


@pytest.mark.parametrize("update", UPDATES)
def test_chunk_size_changes_nothing(update: str) -> None:
    tokens = random_tokens(2, 45, 2)
    state = torch.randn(2, 2, 9, 5, dtype=torch.float64)
    expected = outputs_and_gradients(run("reference", update=update), (*tokens, state))
    for size in (1, 7, 16, 45, 1000):

        def chunked(*inputs: Tensor, size: int = size) -> tuple[Tensor, Tensor]:
            return sparse_delta_rule_chunked(Call(Tokens(*inputs[:7]), inputs[7], 9, update=update), size)

        assert_close(outputs_and_gradients(chunked, (*tokens, state)), expected, 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_unsorted_indices_and_strided_inputs(backend: str) -> None:
    tokens = random_tokens(2, 20, 2)
    state = torch.randn(2, 9, 5, dtype=torch.float64)
    expected = run(backend)(*tokens, state)
    flipped = [x.flip(-1) if name.startswith(("write", "read")) else x for name, x in tokens._asdict().items()]
    assert_close(run(backend)(*flipped, state), expected, 1e-12)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tokens]
    assert_close(run(backend)(*strided, state.mT.contiguous().mT), expected, 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_initial_state_is_zeros(backend: str) -> None:
    tokens = random_tokens()
    y, state = sparse_delta_rule(*tokens, num_slots=9, output_final_state=True, backend=backend)
    assert_identical([y, state], run(backend)(*tokens, torch.zeros(2, 9, 5, dtype=torch.float64)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("B", "T"), [(2, 0), (0, 5), (0, 0)])
def test_empty(backend: str, B: int, T: int) -> None:
    tokens = random_tokens(B, T)
    state = torch.randn(2, 9, 5, dtype=torch.float64)
    y, final, *gradients = outputs_and_gradients(run(backend), (*tokens, state))
    assert y.shape == (B, T, 2, 5)
    assert_identical([final], [state.expand(B, 2, 9, 5)])
    assert gradients[-1].shape == state.shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_twice_and_without_gradients(backend: str) -> None:
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in random_tokens()]
    state = torch.randn(2, 9, 5, dtype=torch.float64, requires_grad=True)
    y, final = run(backend)(*leaves, state)
    loss = y.sum() + final.square().sum()
    differentiable = [x for x in (*leaves, state) if x.requires_grad]
    first = torch.autograd.grad(loss, differentiable, retain_graph=True)
    assert_identical(torch.autograd.grad(loss, differentiable), first)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            again, final_again = run(backend)(*leaves, state)
        assert not again.requires_grad
        assert_identical([again, final_again], [y, final])
    # Gradients through one of the two results only.
    y, final = run(backend)(*leaves, state)
    through_state = torch.autograd.grad(final.sum(), differentiable, allow_unused=True, materialize_grads=True)
    y, final = run("reference")(*leaves, state)
    expected = torch.autograd.grad(final.sum(), differentiable, allow_unused=True, materialize_grads=True)
    assert_close(through_state, expected, 1e-12)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("per_write", [False, True])
def test_step_equals_the_rule(update: str, per_write: bool) -> None:
    tokens = random_tokens(3, 40, 2, per_write=per_write)
    state = torch.randn(3, 2, 9, 5, dtype=torch.float64)
    y, final = run("reference", update=update)(*tokens, state)
    steps = [sparse_delta_step_(state, *(x[:, t] for x in tokens), update=update) for t in range(40)]
    stepped = torch.stack(steps, dim=1)
    assert_close([stepped, state], [y, final], 1e-12)


def test_step_in_bfloat16() -> None:
    tokens = random_tokens(2, 30, 1, dtype=torch.float32)
    state = torch.randn(2, 1, 9, 5).bfloat16()
    y, final = run("reference")(*tokens, state)
    stepped = torch.stack([sparse_delta_step_(state, *(x[:, t] for x in tokens)) for t in range(30)], dim=1)
    assert state.dtype == torch.bfloat16
    assert_close([stepped, state], [y, final], 2e-2)


@pytest.mark.parametrize("backend", FAST)
def test_compile_and_export(backend: str) -> None:
    tokens = random_tokens(2, 20, 2, dtype=torch.float32)
    state = torch.randn(2, 9, 5)
    expected = outputs_and_gradients(run(backend), (*tokens, state))
    compiled = torch.compile(run(backend), fullgraph=True, backend="aot_eager")
    assert_close(outputs_and_gradients(compiled, (*tokens, state)), expected, 1e-6)

    class Module(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
            return run(backend)(*inputs)

    exported = torch.export.export(Module(), (*tokens, state)).module()
    assert_close(exported(*tokens, state), expected[:2], 1e-6)


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("backend", BACKENDS)
def test_bit_identical_for_any_thread_count(backend: str) -> None:
    tokens = random_tokens(2, 140, 2, W=16, R=16, N=64, D=200, dtype=torch.float32)
    state = torch.randn(2, 64, 200)
    results = []
    for threads in (1, 2, 3, 2):
        torch.set_num_threads(threads)
        results.append(outputs_and_gradients(run(backend), (*tokens, state)))
    for other in results[1:]:
        assert_identical(other, results[0])


def test_registered_op_passes_opcheck() -> None:
    tokens = random_tokens(1, 6, 1, dtype=torch.float32)
    floats = [x.requires_grad_() if x.is_floating_point() else x for x in tokens]
    state = torch.randn(1, 1, 9, 5, requires_grad=True)
    torch.library.opcheck(torch.ops.sdm.sparse_delta_rule_chunked, (*floats, state, None, "delta", 4))


def test_chunked_backward_memory_does_not_grow_with_the_table() -> None:
    """Many slots, few of them touched: the backward holds rows, not tables."""
    tokens = random_tokens(1, 640, 1, W=2, R=2, N=16, D=8, dtype=torch.float32)
    N = 20_000
    tokens = tokens._replace(write_index=tokens.write_index * 1000, read_index=tokens.read_index * 1000)
    state = torch.randn(1, N, 8, requires_grad=True)
    y, _ = sparse_delta_rule(*tokens, initial_state=state, backend="chunked")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        y.sum().backward()
    table = N * 8 * 4
    live, peak = 0, 0
    for event in profile.profiler.kineto_results.events():  # allocations and frees, in order of time
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    # state, its gradient, the gradient handed to autograd and working space; ten chunks would be ten tables.
    assert 2 * table <= peak <= 6 * table, f"peak of {peak / table:.1f} tables"


def test_log_decay_at_the_boundary_of_float() -> None:
    tokens = random_tokens(1, 3, 1)._replace(log_decay=torch.full((1, 3, 1), -math.inf).double())
    for backend in cpu_backends():
        y, _ = run(backend)(*tokens, torch.randn(1, 9, 5, dtype=torch.float64))
        assert y.isfinite().all()


def bad(**changes: Any) -> dict[str, Any]:
    return changes


@pytest.mark.parametrize("backend", ["auto", *cpu_backends()])
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (bad(value=torch.zeros(2, 13, 5)), ValueError, "value must be"),
        (bad(value=[1.0]), TypeError, "value must be a torch.Tensor"),
        (bad(write_index=torch.zeros(2, 13, 2, 3)), TypeError, "write_index must be an integer"),
        (bad(read_index=torch.zeros(2, 13, 2, 4, dtype=torch.bool)), TypeError, "read_index must be an integer"),
        (bad(beta=torch.zeros(2, 13, 2, dtype=torch.int64)), TypeError, "beta must be a floating-point"),
        (bad(write_weight=torch.zeros(2, 13, 2, 2)), ValueError, "write_weight must be the shape of write_index"),
        (bad(read_weight=torch.zeros(2, 12, 2, 4)), ValueError, "read_weight must be"),
        (bad(beta=torch.zeros(2, 13)), ValueError, "beta must be"),
        (bad(log_decay=torch.zeros(2, 13, 2, 4)), ValueError, "log_decay must be"),
        (bad(value=torch.zeros(2, 13, 2, 5, device="meta")), ValueError, "is on cpu, but value is on meta"),
        (bad(log_decay=torch.full((2, 13, 2), 0.1)), ValueError, "log_decay must be at most 0"),
        (bad(log_decay=torch.full((2, 13, 2), math.nan)), ValueError, "log_decay must be at most 0"),
        (bad(write_index=torch.tensor([0, 1, 9]).expand(2, 13, 2, 3)), IndexError, "write_index"),
        (bad(write_index=torch.tensor([-1, 0, 1]).expand(2, 13, 2, 3)), IndexError, "write_index"),
        (bad(read_index=torch.full((2, 13, 2, 4), 2**40)), IndexError, "read_index"),
        (bad(read_index=torch.full((2, 13, 2, 4), 2**32)), IndexError, "read_index"),
        (bad(write_index=torch.tensor([4, 2, 4]).expand(2, 13, 2, 3)), ValueError, "write_index names slot 4"),
        (bad(initial_state=torch.zeros(2, 9, 6)), ValueError, "initial_state must be"),
        (bad(initial_state=torch.zeros(3, 2, 9, 5)), ValueError, "initial_state must be"),
        (bad(initial_state=torch.zeros(2, 9, 5, dtype=torch.int32)), TypeError, "initial_state must be"),
        (bad(initial_state=torch.zeros(2, 2, 5)), ValueError, "num_slots = 2"),
        (bad(initial_state=None), ValueError, "num_slots is needed"),
        (bad(initial_state=None, num_slots=0), ValueError, "num_slots must be a positive integer"),
        (bad(num_slots=10), ValueError, "num_slots = 10, but initial_state has 9"),
        (bad(update="both"), ValueError, "update must be one of"),
        (bad(backend="cuda"), ValueError, "backend must be one of"),
        (bad(cu_seqlens=torch.tensor([0, 13])), ValueError, "the batch must be 1"),
        (bad(cu_seqlens=torch.tensor([0.0, 13.0])), TypeError, "cu_seqlens must be an integer"),
        (bad(cu_seqlens=torch.tensor([0])), ValueError, "cu_seqlens must be"),
    ],
)  # fmt: skip
def test_bad_input(backend: str, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {**random_tokens(dtype=torch.float32)._asdict(), "initial_state": torch.zeros(2, 9, 5)}
    arguments |= {"backend": backend, **changes}
    with pytest.raises(error, match=message):
        sparse_delta_rule(**arguments)


@pytest.mark.parametrize("backend", cpu_backends())
@pytest.mark.parametrize("bounds", [[0, 5], [1, 13], [0, 8, 4, 13], [0, 20, 13], [-3, 13]])
def test_bad_cu_seqlens(backend: str, bounds: list[int]) -> None:
    tokens = random_tokens(B=1)
    with pytest.raises(ValueError, match="cu_seqlens must"):
        sparse_delta_rule(*tokens, num_slots=9, cu_seqlens=torch.tensor(bounds), backend=backend)


def test_a_document_may_end_in_forgetting_everything() -> None:
    tokens = random_tokens(B=1, T=6)
    tokens.log_decay[:, 1] = -torch.inf
    bounds = torch.tensor([0, 2, 6])
    expected, *others = (
        sparse_delta_rule(*tokens, num_slots=9, output_final_state=True, cu_seqlens=bounds, backend=backend)
        for backend in cpu_backends()
    )
    for other in others:
        assert_close(other, expected, 1e-10)


def test_a_step_that_fails_changes_nothing() -> None:
    token = Tokens(*(x[:, 0] for x in random_tokens(8, 1, 1, W=2, R=3, N=3, dtype=torch.float32)))
    token.read_index[7, 0, 0] = 99
    state = torch.randn(8, 1, 3, 5)
    before = state.clone()
    with pytest.raises(IndexError, match="read_index"):
        sparse_delta_step_(state, *token)
    assert_identical([state], [before])


@pytest.mark.filterwarnings("ignore:backend .chunked., slower than .native.")
def test_a_step_computes_in_the_widest_dtype() -> None:
    token = [x[:, 0] for x in random_tokens(2, 1, 1)]
    state = torch.randn(2, 1, 9, 5)
    expected = sparse_delta_step_(state.double(), *token)
    assert_close([sparse_delta_step_(state, *token)], [expected], 1e-7)


def test_offsets_without_numbers() -> None:
    with pytest.raises(ValueError, match="cu_seqlens is on meta"):
        sparse_delta_rule(*random_tokens(B=1), num_slots=9, cu_seqlens=torch.tensor([0, 13], device="meta"))


def test_bad_step() -> None:
    tokens = [x[:, 0] for x in random_tokens(dtype=torch.float32)]
    with pytest.raises(ValueError, match=r"state must be \[B,H,N,D\]"):
        sparse_delta_step_(torch.zeros(2, 9, 5), *tokens)
    with pytest.raises(ValueError, match=r"state must be \[B,H,N,D\]"):
        sparse_delta_step_(torch.zeros(1, 2, 9, 5), *tokens)
    with pytest.raises(RuntimeError, match="records no gradients"):
        sparse_delta_step_(torch.zeros(2, 2, 9, 5, requires_grad=True), *tokens)
    with pytest.raises(IndexError, match="write_index"):
        sparse_delta_step_(torch.zeros(2, 2, 3, 5), *tokens)
    with pytest.raises(TypeError, match=r"state must be a torch\.Tensor"):
        sparse_delta_step_(None, *tokens)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"write_index must be \[B,H,W\]"):
        sparse_delta_step_(torch.zeros(2, 2, 9, 5), torch.tensor(1), *tokens[1:])


def test_distinct_slots_helper() -> None:
    index = distinct_slots((50,), 5, 9)
    assert (index[:, 1:] > index[:, :-1]).all()
