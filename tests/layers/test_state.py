"""A state stores, reorders, restarts and names itself, whatever layer it is of."""

from __future__ import annotations

import pytest
import torch

from helpers import assert_close, assert_identical
from sdm.layers import FullAttention, GatedDeltaNet, MemoryTable, ShiftedKeys, SparseDeltaMemory

SIZE = 16


def sparse() -> SparseDeltaMemory:
    return SparseDeltaMemory(SIZE, num_slots=16, num_writes=3, num_reads=3)


def test_names_join_those_of_a_state_within() -> None:
    assert list(sparse().start_state(2).tensors()) == ["memory"]
    assert list(ShiftedKeys(sparse()).start_state(2).tensors()) == ["inner.memory", "previous"]
    state = ShiftedKeys(GatedDeltaNet(SIZE, 2)).start_state(2)
    assert list(state.tensors()) == ["inner.memory", "inner.tail", "previous"]
    again = state.with_tensors(state.tensors())
    assert type(again) is type(state)
    assert all(again.tensors()[name] is x for name, x in state.tensors().items())
    with pytest.raises(KeyError, match="memory"):
        state.with_tensors({"previous": state.previous})


def test_map_reaches_every_tensor() -> None:
    state = ShiftedKeys(GatedDeltaNet(SIZE, 2)).start_state(3).map(lambda x: x[:2] + 1)
    assert state.streams == 2
    assert all(x.min() == x.max() == 1 for x in state.tensors().values())
    assert state.nbytes == sum(x.nbytes for x in state.tensors().values())


def test_streams_restart_from_what_is_learned() -> None:
    layer = ShiftedKeys(sparse())
    _, state = layer(torch.randn(3, 5, SIZE), return_state=True)
    begins = torch.tensor([False, True, False])
    restarted = state.map(torch.Tensor.detach).restarted(begins, layer.start_state(3, learn=True))
    fresh = layer.start_state(3)
    for name, x in restarted.tensors().items():
        assert_identical([x[1], x[::2]], [fresh.tensors()[name][1], state.tensors()[name][::2]])
    restarted.tensors()["inner.memory"].sum().backward()
    assert layer.layer.initial_state is not None
    assert_identical([layer.layer.initial_state.grad], [torch.ones(1, 16, SIZE)])


def test_spare_room_is_trimmed_away() -> None:
    layer = FullAttention(SIZE, 2)
    state = layer.start_state(1)
    tokens = torch.randn(1, 4, SIZE)
    for t in range(3):
        layer.step_(tokens[:, t], state)
    trimmed = state.trimmed()
    assert state.key.shape[2] > trimmed.key.shape[2] == 3
    assert_close([layer(tokens[:, 3:], trimmed)], [layer(tokens[:, 3:], state)], 1e-6)


def test_a_memory_may_be_a_plain_tensor() -> None:
    layer, x = sparse(), torch.randn(2, 4, SIZE)
    _, state = layer(x, return_state=True)
    assert isinstance(state, MemoryTable)
    assert_identical([layer(x, state=state.memory)], [layer(x, state=state)])
    table = state.memory.detach().clone()
    y = layer.step_(x[:, 0], table)
    assert_close([y], [layer(x[:, :1], state=state)[:, 0]], 1e-6)
    assert not torch.equal(table, state.memory)
