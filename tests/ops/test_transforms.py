"""What PyTorch does around an op: it traces, fakes, batches, differentiates in other ways and watches for changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers import assert_close, cpu_backends, random_tokens
from sdm import SparseDeltaMemory
from sdm.layers import GatedDeltaNet
from sdm.ops import gated_delta_rule, product_key_topk, sparse_delta_rule, sparse_delta_step_
from sdm.ops.gated_delta_rule import gated_delta_step_


def layer(kind: str) -> Any:
    if kind == "sdm":
        return SparseDeltaMemory(16, num_slots=16, num_writes=3, num_reads=3)
    return GatedDeltaNet(16, num_heads=2)


def gated_tokens(*lead: int) -> list[Tensor]:
    gate = torch.rand(*lead)
    return [torch.randn(*lead, 4), torch.randn(*lead, 4), torch.randn(*lead, 6), gate, -gate]


@pytest.mark.parametrize("kind", ["sdm", "gdn"])
def test_a_graph_traced_without_gradients_has_them(kind: str) -> None:
    module, x = layer(kind), torch.randn(2, 7, 16)
    expected = copy.deepcopy(module)
    expected(x).square().sum().backward()
    with torch.no_grad():
        program = torch.export.export(module, (x,)).module()
    program(x).square().sum().backward()
    found = dict(program.named_parameters())
    for name, parameter in expected.named_parameters():
        assert_close([found[name].grad], [parameter.grad], 1e-5)


@pytest.mark.parametrize("kind", ["sdm", "gdn"])
def test_fake_tensors_have_no_memory_to_read(kind: str) -> None:
    with FakeTensorMode(), torch.no_grad():
        module = layer(kind)
        assert module(torch.randn(2, 7, 16)).shape == (2, 7, 16)
        assert module.step_(torch.randn(2, 16), module.start_state(2)).shape == (2, 16)


@pytest.mark.parametrize("kind", ["sdm", "gdn"])
def test_a_compiled_step_is_one_graph(kind: str) -> None:
    torch.compiler.reset()
    module, x = layer(kind), torch.randn(2, 16)
    state, expected_state = module.start_state(2), module.start_state(2)
    expected = module.step_(x, expected_state)
    y = torch.compile(module.step_, fullgraph=True, backend="aot_eager")(x, state)
    states = [list(s.tensors().values()) for s in (state, expected_state)]
    assert_close([y, *states[0]], [expected, *states[1]], 1e-6)


def test_vmap() -> None:
    scores = torch.randn(4, 5, 8)
    assert_close([torch.vmap(lambda x: product_key_topk(x, 3)[0])(scores)], [product_key_topk(scores, 3)[0]], 0)


def test_views_with_a_pending_sign() -> None:
    scores = torch.randn(5, 8)
    assert_close([product_key_topk(torch._neg_view(scores), 3)[0]], [product_key_topk(-scores, 3)[0]], 0)


def test_second_derivatives_are_right_or_refused() -> None:
    tokens = random_tokens(1, 5, 1)
    value = tokens.value.requires_grad_()
    y, _ = sparse_delta_rule(*tokens, num_slots=9)
    (gradient,) = torch.autograd.grad(y.square().sum(), value, create_graph=True)
    with pytest.raises((NotImplementedError, RuntimeError), match=r"second derivatives|differentiate"):
        gradient.square().sum().backward()


@pytest.mark.filterwarnings("ignore:backend .*, slower than .native.")
def test_forward_mode_is_right_or_refused() -> None:
    tokens = random_tokens(1, 5, 1)

    def run(backend: str) -> tuple[Tensor, Tensor]:
        def y(value: Tensor) -> Tensor:
            return sparse_delta_rule(*tokens._replace(value=value), num_slots=9, backend=backend)[0]

        return torch.func.jvp(y, (tokens.value,), (tokens.value,))

    y, tangent = run("auto")
    assert_close([tangent], [y], 1e-12)  # an empty memory is linear in the values
    for backend in set(cpu_backends()) - {"reference"}:
        with pytest.raises(ValueError, match="forward-mode"):
            run(backend)
    scores = torch.randn(3, 8)
    values, tangent = torch.func.jvp(lambda x: product_key_topk(x, 3)[0], (scores,), (scores,))
    assert_close([tangent], [values], 1e-6)


@pytest.mark.parametrize("rule", ["sparse", "gated"])
def test_a_step_is_a_change_that_autograd_sees(rule: str) -> None:
    leaf = torch.randn(2, 1, 4, 6, requires_grad=True)
    state = leaf * 1.0
    loss = state.square().sum()
    with torch.no_grad():
        if rule == "sparse":
            token = [x[:, 0] for x in random_tokens(2, 1, 1, N=4, D=6, dtype=torch.float32)]
            sparse_delta_step_(state.detach(), *token)
        else:
            gated_delta_step_(state.detach(), *gated_tokens(2, 1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_number_of_slots_may_vary_in_a_compiled_graph() -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(lambda *x: sparse_delta_rule(*x[:7], initial_state=x[7])[0], backend=counter, dynamic=True)
    for slots in (9, 12, 17, 20):
        tokens = random_tokens(1, 5, 1, N=9, dtype=torch.float32)
        state = torch.randn(1, slots, 5)
        expected = sparse_delta_rule(*tokens, initial_state=state)[0]
        assert_close([run(*tokens, state)], [expected], 1e-6)
    assert counter.frame_count <= 2


def test_modules_copy_and_compile_as_any_other() -> None:
    module = nn.Sequential(layer("sdm"), layer("gdn"))
    x = torch.randn(1, 4, 16)
    assert_close([copy.deepcopy(module)(x)], [module(x)], 0)


def test_gated_rule_under_vmap() -> None:
    tokens = gated_tokens(3, 1, 5, 2)
    y = torch.vmap(lambda *x: gated_delta_rule(*x)[0])(*tokens)
    expected = torch.stack([gated_delta_rule(*(x[i] for x in tokens))[0] for i in range(3)])
    assert_close([y], [expected], 1e-6)
