"""The kernels of the sparse delta rule in small: the whole matrix of cases is in tests/ops/test_sparse_delta_rule.py
and takes the interpreter minutes (`make triton-test`)."""

from __future__ import annotations

import math
import sys
import weakref
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import assert_close, assert_identical, outputs_and_gradients, random_tokens, relative_error
from sdm.ops import sparse_delta_rule, sparse_delta_rule_, sparse_delta_step_
from sdm.ops.sequences import Call
from sdm.ops.sparse_delta_rule.inputs import Tokens
from sdm.ops.sparse_delta_rule.triton import ROUNDING_LIMIT, sparse_delta_rule_triton
from sdm.ops.sparse_delta_rule.triton.host import Plan, Problem, backward, forward
from sdm.ops.sparse_delta_rule.triton.layout import BACKWARD, FORWARD, Accesses, Layout, chosen
from sdm.ops.triton.backend import interpreting
from sdm.ops.triton.launch import record

pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")
needs_interpreter = pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1")


def run(backend: str, **options: Any) -> Any:
    def call(*inputs: Tensor) -> tuple[Tensor, ...]:
        y, state = sparse_delta_rule(
            *inputs[:7], initial_state=inputs[7], output_final_state=True, backend=backend, **options
        )
        assert state is not None
        return y, state

    return call


@needs_interpreter
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("update", "per_write", "bounds"), [("delta", False, None), ("slot", True, [0, 3, 3, 22])])
def test_equals_the_reference(update: str, per_write: bool, bounds: list[int] | None) -> None:
    """Two chunks, of which the second is not full; slots that several tokens of a chunk write and read."""
    tokens = random_tokens(1, 22, 1, W=3, R=5, N=11, D=6, per_write=per_write)
    state = torch.randn(1, 11, 6, dtype=torch.float64)
    options = {"update": update, "cu_seqlens": None if bounds is None else torch.tensor(bounds)}
    expected = outputs_and_gradients(run("reference", **options), (*tokens, state))
    assert_close(outputs_and_gradients(run("triton", **options), (*tokens, state)), expected, 1e-12)


@needs_interpreter
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_precision(dtype: torch.dtype, tolerance: float) -> None:
    """Also where a slot is wiped now and then and barely decays in between."""
    tokens = random_tokens(1, 24, 1, W=4, R=4, N=12, D=5, dtype=dtype)
    tokens = tokens._replace(log_decay=torch.where(torch.rand(1, 24, 1) < 0.1, -50.0, -1e-3).to(dtype))
    inputs = (*tokens, torch.randn(1, 12, 5).to(dtype))
    expected = outputs_and_gradients(run("reference"), inputs, torch.float64)
    assert_close(outputs_and_gradients(run("triton"), inputs), expected, tolerance)


@needs_interpreter
def test_a_ring_that_is_too_small_changes_nothing() -> None:
    """Rows that the ring no longer holds are made again."""
    tokens = random_tokens(1, 33, 1, W=3, R=3, N=8, D=4, decay=8.0)
    call = Call(tokens, torch.randn(1, 8, 4).double(), 8)

    def gradients(share: int) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in tokens]
        y, _ = sparse_delta_rule_triton(Call(Tokens(*leaves), call.state, 8), rounding_limit=0.0, share=share)
        return list(torch.autograd.grad(y.square().sum(), [x for x in leaves if x.requires_grad]))

    assert_identical(gradients(10**9), gradients(1))


def level(number: int, time: int, batch: int = 1) -> Problem:
    heads, slots, channels = {1: (1, 36864, 768), 8: (2, 57600, 960), 13: (2, 230400, 1920)}[number]

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(batch, time, heads, *shape, dtype=dtype, device="meta")

    index, gate = meta(64, dtype=torch.int64), meta(dtype=torch.float32)
    tokens = Tokens(index, meta(64), meta(channels), gate, gate, index, meta(64))
    return Problem(tokens, torch.empty(heads, slots, channels, device="meta"), slots, None, False)


@pytest.mark.parametrize("number", [1, 8, 13])
def test_launches_do_not_depend_on_the_length(number: int) -> None:
    """On tensors without values, so that nothing can wait for one."""
    for time in (1, 64, 16384):
        problem = level(number, time)
        with record() as launches:
            y, table, residual = forward(problem)
        assert [x.name for x in launches] == ["prepare_kernel", "forward_kernel"]
        programs = launches[1].grid[0]
        assert programs == problem.tokens.value[0, 0].numel() // 8
        with record() as launches:
            backward(problem, Plan(ROUNDING_LIMIT, 8, "planned"), residual, y, table)
        names = [x.name for x in launches]
        assert names[0] == "prepare_kernel"
        # One window of time for each 256 MB of parts of gradients.
        assert names[1:] == ["backward_kernel", "reduce_kernel"] * (len(names) // 2)
        assert len(names) == 3 or time == 16384
    with record() as launches:
        sparse_delta_rule(*level(number, 64).tokens, initial_state=level(number, 64).initial_state, backend="triton")
    assert len(launches) == 2


@needs_interpreter
@pytest.mark.parametrize(("initial_grad", "programs", "groups"), [(False, 0, 8), (True, 0, 8), (True, 4, 2)])
def test_documents_share_a_table(
    monkeypatch: pytest.MonkeyPatch, initial_grad: bool, programs: int, groups: int
) -> None:
    """Documents that touch the same slots, one of them empty: one head or two documents at a time."""
    host = sys.modules[forward.__module__]
    monkeypatch.setattr(host, "TABLE_PROGRAMS", programs)
    monkeypatch.setattr(host, "PARTS", 1)  # windows of a chunk
    tokens = random_tokens(1, 25, 2, W=3, R=5, N=11, D=6)
    state = torch.randn(2, 11, 6, dtype=torch.float64)
    bounds = torch.tensor([0, 3, 3, 20, 25])

    def call(backend: str) -> Any:
        def rule(*inputs: Tensor) -> tuple[Tensor, ...]:
            initial = inputs[7] if initial_grad else state
            y, _ = sparse_delta_rule(*inputs[:7], initial_state=initial, cu_seqlens=bounds, backend=backend)
            return (y,)

        return rule

    inputs = (*tokens, state) if initial_grad else tokens
    expected = outputs_and_gradients(call("reference"), inputs)
    with record() as launches:
        result = outputs_and_gradients(call("triton"), inputs)
    assert_close(result, expected, 1e-12)
    names = [x.name for x in launches]
    assert names.count("forward_kernel") == groups
    assert names.count("restore_kernel") == groups - 1 + (groups if initial_grad else groups - 1)


class PeakMemory(TorchDispatchMode):
    """Bytes of the tensors that exist at once, of those made in the block. Works without memory."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen = {x.untyped_storage()._cdata for x in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, Tensor) and (key := x.untyped_storage()._cdata) not in self.seen:
                size = x.untyped_storage().nbytes()
                self.seen.add(key)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(x.untyped_storage(), self.gone, key, size)
        return result

    def gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def test_packed_documents_take_the_memory_of_one() -> None:
    """Backward of a row of level 13 with a learned initial table, on tensors without memory."""

    def peak(documents: int, time: int = 8192) -> int:
        problem = level(13, time)._replace(cu_seqlens=torch.empty(documents + 1, dtype=torch.int64, device="meta"))
        value = problem.tokens.value
        residual = torch.empty_like(value, dtype=torch.float32)
        assert problem.initial_state is not None
        with record(), PeakMemory(value, residual, problem.initial_state) as memory:
            backward(problem, Plan(ROUNDING_LIMIT, 8, "planned"), residual, value, None)
        return memory.peak

    one, twelve = peak(1), peak(12)
    assert one > 2 * 4 * 230400 * 3840  # a table and its gradient
    assert twelve <= 1.2 * one, (one, twelve)


def test_layouts() -> None:
    """Forward takes more tokens at a time where programs are few, backward one; all own whole sectors of rows."""
    problems = [level(1, 64, batch=batch) for batch in (1, 2, 8)]
    chunks = [(problem.layout(FORWARD).C, problem.layout(BACKWARD).C) for problem in problems]
    assert chunks == [(16, 1), (8, 1), (2, 1)]
    warps = [(problem.layout(FORWARD).warps, problem.layout(BACKWARD).warps) for problem in problems]
    assert warps == [(16, 1), (8, 1), (2, 1)]
    # Programs that could not have larger chunks do not get fewer with more channels.
    assert Layout.for_streams(16, 16, 768, FORWARD, 1).S == 16
    for problem in problems:
        for limits in (FORWARD, BACKWARD):
            layout = problem.layout(limits)
            assert layout.S == 8
    for writes, reads in ((1, 1), (4, 128), (128, 4), (64, 64), (2048, 16)):
        for accesses in (*FORWARD, *BACKWARD):
            layout = Layout.of(writes, reads, 768, accesses)
            assert layout.warps <= 16
            # No tile has more numbers than its threads keep in registers.
            rows = layout.C * max(layout.WP, layout.RP)
            assert rows * layout.S <= 32 * 64 * layout.warps, (writes, reads, layout)


@needs_interpreter
@pytest.mark.parametrize("layout", Accesses._fields)
def test_all_layouts_equal_the_reference(layout: str) -> None:
    tokens = random_tokens(2, 11, 1, W=5, R=6, N=23, D=10)
    state = torch.randn(1, 23, 10, dtype=torch.float64)
    expected = outputs_and_gradients(run("reference"), (*tokens, state))
    with chosen(layout):
        assert_close(outputs_and_gradients(run("triton"), (*tokens, state)), expected, 1e-12)


@needs_interpreter
@pytest.mark.parametrize(("update", "dtype"), [("delta", torch.float32), ("slot", torch.bfloat16)])
def test_step(update: str, dtype: torch.dtype) -> None:
    tokens = random_tokens(3, 4, 2, dtype=torch.float32, per_write=update == "slot")
    state = torch.randn(3, 2, 9, 5).to(dtype)
    expected_state = state.clone()
    for t in range(4):
        token = [x[:, t] for x in tokens]
        expected = sparse_delta_step_(expected_state, *token, update=update, backend="reference")
        with record() as launches:
            y = sparse_delta_step_(state, *token, update=update, backend="triton")
        assert [x.name for x in launches] == ["step_kernel"]
        assert_close([y, state], [expected, expected_state], 1e-5 if dtype == torch.float32 else 1e-2)


@needs_interpreter
@pytest.mark.parametrize("update", ["delta", "slot"])
def test_tokens_in_place(update: str) -> None:
    tokens, state = random_tokens(2, 21, 2, dtype=torch.float32), torch.randn(2, 2, 9, 5)
    y, final = sparse_delta_rule(
        *tokens, initial_state=state, output_final_state=True, update=update, backend="reference"
    )
    with record() as launches:
        got = sparse_delta_rule_(state, *tokens, update=update, backend="triton")
    assert [x.name for x in launches] == ["prepare_kernel", "forward_kernel"]
    assert_close([got, state], [y, final], 1e-5)


@needs_interpreter
def test_an_index_outside_of_the_table_shows() -> None:
    """Where values are not looked at before, which is on a GPU."""
    tokens = random_tokens(2, 6, 1, dtype=torch.float32)
    for name, bad in (("write_index", 9), ("read_index", -1)):
        index = getattr(tokens, name).clone()
        index[1, 3, 0, 1] = bad
        y, _, _ = forward(Problem(tokens._replace(**{name: index}), torch.randn(1, 9, 5), 9, None, False))
        assert y[0].isfinite().all()
        assert y[1, :3].isfinite().all()
        assert not y[1, 3:].isfinite().all()


@needs_interpreter
def test_second_derivatives_are_refused() -> None:
    tokens = random_tokens(1, 3, 1)
    value = tokens.value.clone().requires_grad_()
    y, _ = sparse_delta_rule(*tokens._replace(value=value), num_slots=9, backend="triton")
    (grad,) = torch.autograd.grad(y.square().sum(), value, create_graph=True)
    with pytest.raises(NotImplementedError, match='use backend="reference"'):
        grad.sum().backward()


@pytest.mark.slow
@needs_interpreter
def test_snapshots_are_less_exact_than_planned_inversion() -> None:
    """The paper keeps all old rows, at long context in few bits."""
    torch.manual_seed(0)
    tokens = random_tokens(1, 34, 1, W=4, R=4, N=16, D=8)
    state = torch.randn(1, 16, 8).double()

    def gradients(dtype: torch.dtype, kind: str) -> list[Tensor]:
        def call(*inputs: Tensor) -> tuple[Tensor, ...]:
            return sparse_delta_rule_triton(Call(Tokens(*inputs[:7]), inputs[7], 16), kind=kind)

        return outputs_and_gradients(call, (*tokens.to(dtype), state.to(dtype)))

    expected = outputs_and_gradients(run("reference"), (*tokens, state))
    error = {
        kind: max(map(relative_error, gradients(torch.float32, kind)[2:], expected[2:]))
        for kind in ("planned", "bf16", "fp8", "int4")
    }
    assert error["planned"] <= 1e-5
    assert 1e-5 < error["bf16"] < error["fp8"] < error["int4"] < math.inf, error


def test_old_gpus_refuse_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    tokens = random_tokens(1, 3, 1, dtype=torch.float32)
    with FakeTensorMode():
        there = Tokens(*(torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in tokens))
        call = Call(there, torch.empty(1, 9, 5, device="cuda"), 9)
        with pytest.raises(ValueError, match=r'"fp8" needs .* 8\.9 or newer, cuda:0 has 8\.0; use "planned"'):
            sparse_delta_rule_triton(call, kind="fp8")


def test_what_it_refuses_is_said() -> None:
    problem = level(1, 4)
    tokens = problem.tokens._replace(value=problem.tokens.value.double())
    with record(), pytest.raises(ValueError, match=r"compute in float32, got torch\.float64"):
        sparse_delta_rule(*tokens, num_slots=36864, backend="triton")


@needs_interpreter
def test_offsets_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last slots of a table of more than 2^31 numbers. Of its memory only the pages that are touched exist."""
    slots, far = 9, 2**29 + 5
    small = random_tokens(1, 5, 1, W=3, R=4, N=slots, D=4, dtype=torch.float32)
    moved = small._replace(write_index=small.write_index + far - slots, read_index=small.read_index + far - slots)
    expected, table, _ = forward(Problem(small, None, slots, None, False))

    def untouched() -> Tensor:
        return torch.from_numpy(numpy.zeros((1, 1, far, 4), numpy.float32))

    assert untouched().numel() > 2**31
    with monkeypatch.context() as patch:
        patch.setattr(Problem, "table", lambda *_: untouched())
        y, far_table, _ = forward(Problem(moved, None, far, None, False))
    assert_identical([y, far_table[:, :, -slots:]], [expected, table])
    state = untouched()
    for t in range(5):
        y = sparse_delta_step_(state, *(x[:, t] for x in moved), backend="triton")
        assert_close([y], [expected[:, t]], 1e-5)
