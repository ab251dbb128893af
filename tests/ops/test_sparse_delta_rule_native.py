"""The native sparse delta rule: what the comparison of all backends in test_sparse_delta_rule.py does not reach."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from helpers import assert_close, assert_identical, outputs_and_gradients, random_tokens
from sdm.ops import available_backends, sparse_delta_rule, sparse_delta_step_
from sdm.ops.sequences import Call
from sdm.ops.sparse_delta_rule.inputs import Tokens
from sdm.ops.sparse_delta_rule.native import saved_rows, sparse_delta_rule_native

pytestmark = pytest.mark.skipif("native" not in available_backends(), reason="the compiled core is missing")

UPDATES = ["delta", "slot"]
SAVE_ALL = {"rounding_limit": 0.0}
INVERT_ALL = {"rounding_limit": math.inf}


def native(update: str = "delta", cu_seqlens: Tensor | None = None, **limit: float) -> Any:
    def call(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        *tokens, state = inputs
        call = Call(Tokens(*tokens), state, state.shape[-2], cu_seqlens, update=update)
        return sparse_delta_rule_native(call, **limit)

    return call


def step_(state: Tensor, token: Tokens, update: str = "delta") -> Tensor:
    return sparse_delta_step_(state, *token, update=update, backend="native")


def reference(**options: Any) -> Any:
    def call(*inputs: Tensor) -> tuple[Tensor, ...]:
        *tokens, state = inputs
        return sparse_delta_rule(*tokens, initial_state=state, output_final_state=True, backend="reference", **options)

    return call


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.usefixtures("poisoned_memory", "restore_threads")
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("initial", [False, True])
def test_more_slots_than_the_cache_holds(update: str, initial: bool) -> None:
    """Backward recycles rows then, and must find them again on its way back."""
    N, D = 30_000, 40
    tokens = random_tokens(1, 350, 1, W=32, R=32, N=N, D=D)
    inputs = (*tokens, torch.randn(1, N, D, dtype=torch.float64)) if initial else tuple(tokens)

    def call(backend: str) -> Any:
        def only_y(*inputs: Tensor) -> tuple[Tensor]:
            state = inputs[7] if initial else None
            y, _ = sparse_delta_rule(*inputs[:7], initial_state=state, num_slots=N, update=update, backend=backend)
            return (y,)

        return only_y

    results = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results[threads] = outputs_and_gradients(call("native"), inputs)
    assert_identical(results[2], results[1])
    assert_close(results[1], outputs_and_gradients(call("chunked"), inputs), 1e-12)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("per_write", [False, True])
@pytest.mark.parametrize("D", [1, 15, 16, 40, 64, 100, 130])
def test_every_width_of_slab(update: str, per_write: bool, D: int) -> None:
    tokens = random_tokens(2, 21, 2, W=5, R=9, N=20, D=D, per_write=per_write)
    state = torch.randn(2, 20, D, dtype=torch.float64)
    expected = outputs_and_gradients(reference(update=update), (*tokens, state))
    assert_close(outputs_and_gradients(native(update=update), (*tokens, state)), expected, 1e-12)


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("options", [SAVE_ALL, INVERT_ALL, {"rounding_limit": 4.0}, {"rounding_limit": 1e3}])
def test_the_plan_does_not_change_the_gradient(update: str, options: dict[str, Any]) -> None:
    tokens = random_tokens(2, 60, 2, N=12, D=20, decay=0.1)
    state = torch.randn(2, 12, 20, dtype=torch.float64)
    expected = outputs_and_gradients(reference(update=update), (*tokens, state))
    got = outputs_and_gradients(native(update=update, **options), (*tokens, state))
    assert_close(got, expected, 1e-7 if options is INVERT_ALL else 1e-11)


def test_inverting_everything_fails_where_the_plan_does_not() -> None:
    """Otherwise the test above would not show that the setting is used."""
    tokens = random_tokens(1, 200, 1, N=8, D=16, decay=1.0)
    state = torch.randn(1, 8, 16)
    single = tuple(x.float() if x.is_floating_point() else x for x in tokens)
    expected = outputs_and_gradients(reference(), (*tokens, state), torch.float64)
    assert_close(outputs_and_gradients(native(), (*single, state)), expected, 2e-5)
    inverted = outputs_and_gradients(native(**INVERT_ALL), (*single, state))
    errors = [(a.double() - e).abs().max() / e.abs().max() for a, e in zip(inverted, expected, strict=True)]
    assert not max(errors) < 1e-2


def test_share_of_saved_rows() -> None:
    T = N = 1024
    tokens = random_tokens(1, T, 1, W=16, R=1, N=N, D=1, dtype=torch.float32)
    tokens = tokens._replace(log_decay=torch.full((1, T, 1), -0.18))
    writes = T * 16
    assert saved_rows(tokens, N) <= 0.07 * writes
    # The first write to a slot finds it zero, which needs no copy.
    assert saved_rows(tokens, N, **SAVE_ALL) == writes - tokens.write_index.unique().numel()
    assert saved_rows(tokens, N, **INVERT_ALL) == 0


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize(("N", "D"), [(400, 67), (4, 40)])
def test_in_place(update: str, dtype: torch.dtype, tolerance: float, N: int, D: int) -> None:
    tokens = random_tokens(2, 1, 2, N=N, D=D)
    state = torch.randn(2, 2, N, D, dtype=torch.float64).to(dtype)
    y_expected, expected = reference(update=update)(*tokens, state.double())
    token = Tokens(*(x[:, 0].to(dtype) if x.is_floating_point() else x[:, 0] for x in tokens))
    y = step_(state, token, update)
    assert y.dtype == dtype
    assert_close([y, state], [y_expected[:, 0], expected], tolerance)


def test_steps_in_place_equal_one_pass() -> None:
    tokens = random_tokens(2, 30, 2, N=300, D=33, dtype=torch.float32)
    state = torch.randn(2, 2, 300, 33)
    stepped = state.clone()
    y, whole = native()(*tokens, state)
    steps = [step_(stepped, Tokens(*(x[:, t] for x in tokens))) for t in range(30)]
    assert_close([torch.stack(steps, 1), stepped], [y, whole], 1e-6)


def test_a_large_table_that_calls_come_back_to_gives_the_same_bits() -> None:
    """From the third call on it lies on huge pages, where the system has them."""
    N, D = 128 * 128, 300  # 19 MB, not a multiple of a huge page
    tokens = random_tokens(1, 24, 1, N=N, D=D, dtype=torch.float32)
    table = torch.randn(1, N, D, requires_grad=True)
    before, results = table.detach().clone(), []
    for _ in range(4):
        y, final = sparse_delta_rule(*tokens, initial_state=table, output_final_state=True, backend="native")
        (gradient,) = torch.autograd.grad(y.sum() + final.square().sum(), table)
        results.append((y.detach(), final.detach(), gradient))
    for result in results[1:]:
        assert_identical(result, results[0])
    assert torch.equal(table, before)


def test_bfloat16_initial_state_without_gradients() -> None:
    tokens = random_tokens(2, 30, 2, N=40, D=33, dtype=torch.float32)
    state = torch.randn(2, 40, 33).bfloat16()
    with torch.no_grad():
        got = native()(*tokens, state)
    assert_identical(got, native()(*tokens, state.float()))


@pytest.mark.parametrize("update", UPDATES)
def test_hot_slots(update: str) -> None:
    """Every token writes and reads the same slots, the longest possible chain of inversions."""
    tokens = random_tokens(1, 400, 1, W=4, R=4, N=6, D=16, decay=0.05)
    same = {name: getattr(tokens, name)[:, :1].expand(1, 400, 1, 4) for name in ("write_index", "read_index")}
    tokens = tokens._replace(**same)
    state = torch.randn(1, 6, 16)
    expected = outputs_and_gradients(reference(update=update), (*tokens, state), torch.float64)
    single = tuple(x.float() if x.is_floating_point() else x for x in tokens)
    assert_close(outputs_and_gradients(native(update=update), (*single, state)), expected, 1e-5)


def test_mixed_index_types_and_misaligned_memory() -> None:
    tokens = random_tokens(2, 20, 2, D=24, dtype=torch.float32)
    state = torch.randn(2, 9, 24)
    expected = outputs_and_gradients(native(), (*tokens, state))
    mixed = tokens._replace(write_index=tokens.write_index.int(), read_index=tokens.read_index.to(torch.uint8))
    assert_identical(outputs_and_gradients(native(), (*mixed, state)), expected)

    def shifted(x: Tensor) -> Tensor:
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)

    moved = tuple(shifted(x) for x in (*tokens, state))
    assert all(x.data_ptr() % 16 for x in moved)
    assert_identical(outputs_and_gradients(native(), moved), expected)


def test_checkpointing() -> None:
    tokens = random_tokens(2, 20, 2)
    state = torch.randn(2, 9, 5, dtype=torch.float64)

    def checkpointed(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return checkpoint(native(), *inputs, use_reentrant=False)

    expected = outputs_and_gradients(native(), (*tokens, state))
    assert_identical(outputs_and_gradients(checkpointed, (*tokens, state)), expected)


@pytest.mark.parametrize("update", UPDATES)
def test_registered_ops_pass_opcheck(update: str) -> None:
    tokens = random_tokens(1, 6, 1, dtype=torch.float32)
    floats = [x.requires_grad_() if x.is_floating_point() else x for x in tokens]
    state = torch.randn(1, 9, 5, requires_grad=True)
    slot = update == "slot"
    torch.library.opcheck(torch.ops.sdm.sparse_delta_rule, (*floats, state, 9, None, slot, True, not slot, 256.0))
    plain = [x.detach()[:, 0] for x in tokens]
    torch.library.opcheck(torch.ops.sdm.sparse_delta_step_, (torch.randn(1, 1, 9, 5), *plain, slot))


def test_compiled_step_updates_its_state() -> None:
    token = Tokens(*(x[:, 0] for x in random_tokens(2, 1, 2, dtype=torch.float32)))
    state = torch.randn(2, 2, 9, 5)
    expected_state = state.clone()
    expected = step_(expected_state, token)
    compiled = torch.compile(step_, fullgraph=True, backend="aot_eager")
    assert_identical([compiled(state, token), state], [expected, expected_state])


def float64_and_float32_gradients(tokens: Tokens, update: str) -> tuple[list[Tensor], list[Tensor]]:
    state = torch.zeros(1, 64, tokens.value.shape[-1], dtype=torch.float64)
    expected = outputs_and_gradients(reference(update=update), (*tokens, state))
    return expected, outputs_and_gradients(native(update=update), (*tokens.to(torch.float32), state.float()))


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("size", [1e2, 1e4, 1e8])
def test_one_huge_value_does_not_spoil_what_came_before(update: str, size: float) -> None:
    """Inverting its writes would leave their rounding, larger than all that the rows held."""
    tokens = random_tokens(1, 300, 1, W=8, R=8, N=64, D=16)
    tokens.log_decay.fill_(-0.001)
    tokens.value[:, 200] *= size
    expected, actual = float64_and_float32_gradients(tokens, update)
    before = [x[:, :200] for x in expected[2:7]], [x[:, :200] for x in actual[2:7]]
    assert_close(before[1], before[0], 1e-5)


def test_growth_is_no_credit_for_later_inversions() -> None:
    """The slot rule with negative weights lets a row grow; to shrink it again must not be inverted without end."""
    tokens = random_tokens(1, 200, 1, W=1, R=1, N=1, D=8)
    weight = torch.ones(1, 200, 1, 1, dtype=torch.float64)
    weight[:, :60], weight[:, 60:120] = -1, 0.5
    tokens.value[:, :60] = 0
    tokens.log_decay.zero_()
    tokens = tokens._replace(write_weight=weight, beta=torch.ones_like(tokens.beta))
    expected, actual = float64_and_float32_gradients(tokens, "slot")
    assert_close(actual, expected, 1e-5)


def test_only_what_backward_needs_is_kept() -> None:
    tokens = random_tokens(1, 64, 1, N=5000, D=32, dtype=torch.float32)
    leaves = Tokens(*(x.requires_grad_() if x.is_floating_point() else x for x in tokens))
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        sparse_delta_rule(*leaves, num_slots=5000, backend="native")
    assert max(saved) <= 64 * 32


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "none-such"])
def test_every_instruction_set(isa: str) -> None:
    """The instruction set is chosen once per process, so each has a process of its own."""
    code = """
import torch
from helpers import assert_close, outputs_and_gradients, random_tokens
from ops.test_sparse_delta_rule_native import native, reference
from sdm.native import require_core
try:
    print("runs", require_core().isa_name())
except ValueError as error:
    print("cannot run:", error)
    raise SystemExit
for update in ("delta", "slot"):
    tokens = random_tokens(2, 21, 2, W=9, R=11, N=20, D=100)
    state = torch.randn(2, 20, 100, dtype=torch.float64)
    expected = outputs_and_gradients(reference(update=update), (*tokens, state))
    assert_close(outputs_and_gradients(native(update=update), (*tokens, state)), expected, 1e-12)
    single = tuple(x.float() if x.is_floating_point() else x for x in (*tokens, state))
    assert_close(outputs_and_gradients(native(update=update), single), expected, 1e-5)
"""
    folder = os.path.dirname(os.path.dirname(__file__))
    environment = {**os.environ, "SDM_ISA": isa, "PYTHONPATH": folder}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"runs {isa}" in done.stdout or "cannot run:" in done.stdout
    if isa in ("portable", "none-such"):
        assert ("cannot run:" in done.stdout) == (isa == "none-such")


def test_state_over_two_to_the_31_elements_is_addressed_in_64_bits() -> None:
    """A bfloat16 table of 2^31 + 2^26 elements, of which only the touched pages exist."""
    N, D = (2**31 + 2**26) // 64, 64
    state = torch.empty(1, 1, N, D, dtype=torch.bfloat16)
    last = torch.tensor([[[N - 2, N - 1]]])
    rows = torch.randn(1, 1, 2, D)
    state[0, 0, N - 2 :] = rows[0, 0]
    small = state[:, :, N - 2 :].clone()
    weight, value, gate = torch.rand(1, 1, 2), torch.randn(1, 1, D), torch.rand(1, 1)
    token = Tokens(last, weight, value, gate, -gate, last, weight)
    y = step_(state, token)
    first = last - (N - 2)
    expected = step_(small, token._replace(write_index=first, read_index=first))
    assert_identical([y, state[:, :, N - 2 :]], [expected, small])


def test_initial_state_over_two_to_the_31_elements() -> None:
    """The same for a sequence, in float32."""
    D, spread = 1024, 215_000
    N = 10 * spread + 1
    small = random_tokens(1, 40, 1, W=4, R=4, N=11, D=D, dtype=torch.float32)
    large = small._replace(write_index=small.write_index * spread, read_index=small.read_index * spread)
    assert int(large.write_index.max()) * D > 2**31
    state = torch.empty(1, N, D)
    state[:, ::spread] = torch.randn(1, 11, D)
    y, _ = sparse_delta_rule(*large, initial_state=state, backend="native")
    expected, _ = sparse_delta_rule(*small, initial_state=state[:, ::spread].contiguous(), backend="native")
    assert_identical([y], [expected])


def test_memory_of_large_gradients_is_used_again() -> None:
    """Not before the last tensor on it is gone, and not with what it held."""
    T, N, D = 4, 65_600, 64
    tokens = random_tokens(1, T, 1, N=N, D=D, dtype=torch.float32)
    state = torch.randn(1, N, D, requires_grad=True)

    def gradient(scale: float) -> Tensor:
        y, _ = native()(*tokens._replace(value=scale * tokens.value), state)
        return torch.autograd.grad(y.sum(), state)[0]

    first, second = gradient(1.0), gradient(2.0)
    kept, row = first.clone(), first[0, 7]
    assert first.data_ptr() != second.data_ptr()
    address = first.data_ptr()
    del first
    assert gradient(3.0).data_ptr() != address, "a view is left"
    assert torch.equal(row, kept[0, 7])
    del row
    third = gradient(1.0)
    assert third.data_ptr() == address
    assert torch.equal(third, kept)
    state.grad = third
    del third
    state.grad = None
    assert gradient(1.0).data_ptr() == address
