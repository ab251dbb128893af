"""FwPKM against its equations in float64 and by autograd, and what its writes do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import assert_close, assert_identical
from sdm.layers import FastWeightMemory
from sdm.ops import sparse_delta_rule


def equations(layer: FastWeightMemory, x: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    """Output, table and keys of one stream: tokens one by one, losses written down and differentiated."""
    weight = {name: parameter.detach().double() for name, parameter in layer.named_parameters()}
    x, side, chunk = x.double(), layer.side, layer.chunk_size
    query = x @ weight["query_proj.weight"].T + weight["query_proj.bias"]
    value = x @ weight["value_proj.weight"].T + weight["value_proj.bias"]
    value = (value - value.mean(-1, keepdim=True)) / torch.sqrt(value.var(-1, keepdim=True, unbiased=False) + 1e-5)
    gate = torch.sigmoid((x @ weight["beta_proj.weight"].T + weight["beta_proj.bias"]).mean(-1))
    table = torch.zeros(layer.num_slots, layer.hidden_size, dtype=torch.float64)
    keys = weight["initial_keys"].clone()
    half = layer.key_dim // 2

    def scores(t: int, keys: Tensor) -> list[Tensor]:
        parts = query[t, :half], query[t, half:]
        return [-torch.log(1e-3 + (keys[h] - parts[h]).square().sum(-1)) for h in range(2)]

    def address(t: int, keys: Tensor) -> tuple[list[int], Tensor]:
        first, second = scores(t, keys)
        total = (first.unsqueeze(-1) + second).flatten()
        best = total.topk(layer.num_reads).indices
        return best.tolist(), total[best].softmax(0)

    y = torch.zeros_like(x)
    for start in range(0, len(x), chunk):
        times = range(start, min(start + chunk, len(x)))
        slots, read = [], []
        for t in times:
            index, share = address(t, keys)
            slots.append(index)
            read.append((share.unsqueeze(-1) * table[index]).sum(0))
            mixed = gate[t] * read[-1] + (1 - gate[t]) * value[t]
            mixed = mixed / torch.sqrt(mixed.square().mean() + eps) * weight["output_norm.weight"]
            y[t] = weight["out_proj.weight"] @ mixed
        if start + chunk >= len(x):  # written when the token behind the chunk is there
            break
        learned = table.clone().requires_grad_()
        loss = torch.zeros((), dtype=torch.float64)
        for t, index in zip(times, slots, strict=True):
            share = address(t, keys)[1]
            target = value[t + 1] if layer.lookahead else value[t]
            loss = loss + gate[t] * (target - (share.unsqueeze(-1) * learned[index]).sum(0)).square().sum() / 2
        (gradient,) = torch.autograd.grad(loss, learned)
        reads = (
            torch.bincount(torch.tensor(list(itertools.chain(*slots))), minlength=layer.num_slots).clamp(min=1).double()
        )
        new_keys = keys.clone().requires_grad_()
        entropy = torch.zeros((), dtype=torch.float64)
        for h in range(2):
            mean = torch.zeros(side, dtype=torch.float64)
            for t in times:
                best = scores(t, new_keys)[h].topk(min(layer.num_reads, side))
                mean = mean.index_add(0, best.indices, best.values.softmax(0) / chunk)
            mean = mean[mean > 0]
            entropy = entropy - (mean * mean.log()).sum()
        (ascent,) = torch.autograd.grad(entropy, new_keys)
        table = table - layer.num_reads / reads.unsqueeze(-1) * gradient
        keys = keys + ascent
    return y, table, keys


@pytest.mark.parametrize("lookahead", [True, False])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_it_follows_the_equations(lookahead: bool, chunk: int) -> None:
    layer = FastWeightMemory(16, 25, 4, key_dim=12, chunk_size=chunk, lookahead=lookahead)
    with torch.no_grad():
        layer.output_norm.weight.uniform_(0.5, 1.5)
    x = torch.randn(2, 33, 16)
    expected = [equations(layer, row) for row in x]
    y, state = layer(x, return_state=True)
    assert_close([y, state.table, state.keys], [torch.stack(parts) for parts in zip(*expected, strict=True)], 1e-5)
    wide, state = layer.double()(x.double(), return_state=True)
    assert_close([wide, state.table, state.keys], [torch.stack(parts) for parts in zip(*expected, strict=True)], 1e-10)


def test_chunks_of_one_token_without_lookahead_are_a_delta_rule() -> None:
    """`sparse_delta_rule` with beta = num_reads gamma, no decay, and a reading before the write."""
    layer = FastWeightMemory(16, 25, 4, chunk_size=1, lookahead=False).double()
    x = torch.randn(1, 20, 16, dtype=torch.float64)
    with torch.no_grad():
        state = layer.start_state(1)
        index, weight, rows, value, gate = [], [], [], [], []
        for t in range(20):
            features = layer._features(x[:, t], None)
            layer._append_(features, state)
            read = layer._read(features.unsqueeze(1), state.table, state.keys)
            rows.append(read[0]), weight.append(read[1]), index.append(read[2])
            value.append(layer._parts(features)[1]), gate.append(layer._parts(features)[2])
        index, weight = (torch.cat(parts, 1).unsqueeze(2) for parts in (index, weight))
        value, gate = torch.stack(value, 1).unsqueeze(2), torch.stack(gate, 1)
        _, table = sparse_delta_rule(
            *(index, weight, value, layer.num_reads * gate, 0 * gate, index, weight),
            num_slots=25,
            output_final_state=True,
        )
        layer._append_(features, state)  # the last token is written when another comes
    assert table is not None
    assert_close([state.table], [table[:, 0]], 1e-10)


def test_tokens_of_a_chunk_do_not_see_its_writes() -> None:
    layer = FastWeightMemory(16, 25, 4, chunk_size=6).double()
    x = torch.randn(1, 12, 16, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x)[:, 5].sum(), x)
    assert not gradient[:, :5].any()  # its own chunk is not written yet
    (gradient,) = torch.autograd.grad(layer(x)[:, 6].sum(), x)
    assert (gradient[:, :6] != 0).any(-1).all()


def test_a_slot_that_several_tokens_read_moves_by_their_mean() -> None:
    layer = FastWeightMemory(8, 1, 1, key_dim=2, chunk_size=3).double()
    x = torch.randn(1, 4, 8, dtype=torch.float64)
    with torch.no_grad():
        _, state = layer(x, return_state=True)
        _, value, gate = layer._parts(layer._features(x, None))
    assert_close([state.table[0, 0]], [(gate * value.roll(-1, 1))[0, :3].mean(0)], 1e-12)


def test_a_closed_gate_writes_nothing() -> None:
    layer = FastWeightMemory(16, 25, 4, chunk_size=3)
    with torch.no_grad():
        layer.beta_proj.bias.fill_(-1e4)
    _, state = layer(torch.randn(2, 20, 16), return_state=True)
    assert not state.table.any()


def test_a_state_is_the_callers_own() -> None:
    """A cache changes the rows of a state in place: neither the learned keys nor another state may follow."""
    layer, x = FastWeightMemory(16, 25, 4, chunk_size=5), torch.randn(2, 4, 16)
    with torch.no_grad():
        before = layer.initial_keys.clone()
        _, state = layer(x, return_state=True)
        _, later = layer(x[:, :1], state, return_state=True)
        kept = [part.clone() for part in state.tensors().values()]
        for part in later.tensors().values():
            part[0] = part[1] + 1
        assert_identical([layer.initial_keys], [before])
        assert_identical(list(state.tensors().values()), kept)
        undo = []
        layer.step_(x[:, 0], state, undo.append)
        layer.step_(x[:, 0], state, undo.append)  # writes the chunk
        kept = [part.clone() for part in undo[1].tensors().values()]
        for part in state.tensors().values():
            part[0] = part[1] + 1
        assert_identical(list(undo[1].tensors().values()), kept)


def test_a_row_of_a_batch_is_as_alone() -> None:
    layer, x = FastWeightMemory(16, 25, 4, chunk_size=3), torch.randn(3, 20, 16)
    y, state = layer(x, return_state=True)
    for row in range(3):
        alone, own = layer(x[row : row + 1], return_state=True)
        assert_close([alone[0], own.table[0]], [y[row], state.table[row]], 1e-6)


def test_threads_change_nothing() -> None:
    layer, x = FastWeightMemory(64, 64, 8, chunk_size=16), torch.randn(4, 200, 64)
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y, state = layer(x, return_state=True)
            results.append([y, state.table, state.keys, *torch.autograd.grad(y.square().sum(), layer.initial_keys)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert_identical(other, results[0])


def test_gradients_pass_through_the_writes() -> None:
    layer = FastWeightMemory(8, 9, 3, key_dim=4, chunk_size=3).double()
    x = torch.randn(1, 8, 8, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def call(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,))

    leaves = [parameter.detach().clone().requires_grad_() for parameter in parameters]
    assert torch.autograd.gradcheck(call, (x, *leaves), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_slots": 24}, "num_slots must be a perfect square"),
        ({"num_slots": 4, "num_reads": 5}, "num_reads = 5 exceeds num_slots = 4"),
        ({"key_dim": 5}, "key_dim must be even, for two halves, got 5"),
        ({"chunk_size": 0}, "chunk_size must be a positive integer, got 0"),
        ({"backend": "gpu"}, "backend must be one of"),
    ],
)
def test_bad_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FastWeightMemory(16, **arguments)
