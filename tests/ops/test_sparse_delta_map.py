"""The map from readings to writes: the core against the reference, and readings put together again from their parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sdm.native import core
from sdm.ops import sparse_delta_map, sparse_delta_rule
from sdm.ops.sparse_delta_map import ReadMap, native, sparse_delta_writes

BACKENDS = ["reference", *(["native"] if core is not None else [])]


def random_tokens(
    batch: int = 2,
    time: int = 23,
    heads: int = 2,
    writes: int = 3,
    reads: int = 4,
    slots: int = 9,
    channels: int = 5,
    *,
    dtype: torch.dtype = torch.float64,
    per_write: bool = False,
    seed: int = 0,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def rand(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator, dtype=dtype)

    lead = (batch, time, heads)
    write_index = rand(*lead, slots).argsort(-1)[..., :writes]
    read_index = torch.randint(0, slots, (*lead, reads), generator=generator)
    log_decay = -3 * rand(*lead, *([writes] if per_write else []))
    weights, readings = rand(*lead, writes).softmax(-1), rand(*lead, reads) - 0.3
    return [write_index, weights, rand(*lead, channels) - 0.5, rand(*lead), log_decay, read_index, readings]


@pytest.mark.skipif(core is None, reason="needs the compiled core")
@pytest.mark.parametrize("update", ["delta", "slot"])
@pytest.mark.parametrize("case", range(6))
def test_core_equals_reference(case: int, update: str) -> None:
    packed = case % 3 == 0
    tokens = random_tokens(1 if packed else 2, per_write=case % 2 == 0, seed=case)
    if case == 5:
        tokens[4].zero_()
    cu_seqlens = torch.tensor([0, 7, 7, 20, 23]) if packed else None
    options = {"num_slots": 9, "cu_seqlens": cu_seqlens, "update": update, "threshold": 0.04 * (case % 2)}
    ours, expected = (sparse_delta_map(*tokens, **options, backend=name) for name in ("native", "reference"))
    assert torch.equal(ours.source, expected.source)
    assert torch.equal(ours.row_offsets, expected.row_offsets)
    for name in ("weight", "initial_weight", "dropped"):
        torch.testing.assert_close(getattr(ours, name), getattr(expected, name), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("update", ["delta", "slot"])
@pytest.mark.parametrize("packed", [False, True])
def test_readings_are_the_sum_of_their_parts(backend: str, update: str, packed: bool) -> None:
    tokens = random_tokens(1 if packed else 2, per_write=True, seed=3)
    cu_seqlens = torch.tensor([0, 7, 7, 23]) if packed else None
    table = torch.randn(3 if packed else 2, 2, 9, 5, dtype=torch.float64)
    rule = {"initial_state": table, "cu_seqlens": cu_seqlens, "update": update}
    expected, final_state = sparse_delta_rule(*tokens, **rule, output_final_state=True)
    readings, delta, state = sparse_delta_writes(*tokens, **rule)
    torch.testing.assert_close(readings, expected)
    torch.testing.assert_close(state, final_state)
    read_map = sparse_delta_map(*tokens, num_slots=9, cu_seqlens=cu_seqlens, update=update, backend=backend)
    parts = read_map.apply(delta) + read_map.apply_initial(table, tokens[5], cu_seqlens)
    torch.testing.assert_close(parts, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_write_that_is_forgotten_leaves_nothing(backend: str) -> None:
    """With a decay of zero, or a slot rule that overwrites, only the last write of a slot is read."""
    tokens = random_tokens(1, 6, 1, 1, 1, 1)
    tokens[4].fill_(-torch.inf)
    read_map = sparse_delta_map(*tokens, num_slots=1, backend=backend)
    assert read_map.source.tolist() == list(range(6))
    assert not read_map.initial_weight.any()
    tokens[4].zero_()
    tokens[3].fill_(1)  # beta k = 1: the old row is gone
    overwritten = sparse_delta_map(*tokens, num_slots=1, update="slot", backend=backend)
    assert overwritten.source.tolist() == list(range(6))


@pytest.mark.skipif(core is None, reason="needs the compiled core")
def test_threads_do_not_change_the_map() -> None:
    tokens, threads = random_tokens(time=200, slots=16), torch.get_num_threads()
    maps: list[ReadMap] = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            maps.append(sparse_delta_map(*tokens, num_slots=16, backend="native"))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(maps[0].weight, maps[1].weight)
    assert torch.equal(maps[0].source, maps[1].source)


def test_dropped_mass_is_reported() -> None:
    tokens = random_tokens()
    whole, cut = (sparse_delta_map(*tokens, num_slots=9, threshold=x) for x in (0.0, 0.1))
    assert len(cut.source) < len(whole.source)
    assert not whole.dropped.any()
    torch.testing.assert_close(whole.dense().abs().sum(-1), cut.dense().abs().sum(-1) + cut.dropped)


def test_no_tokens_give_an_empty_map() -> None:
    read_map = sparse_delta_map(*random_tokens(time=0), num_slots=9)
    assert read_map.row_offsets.tolist() == [0]
    assert read_map.dense().shape == (2, 2, 0, 0)


def test_bad_input_is_refused() -> None:
    tokens = random_tokens()
    with pytest.raises(ValueError, match="threshold"):
        sparse_delta_map(*tokens, num_slots=9, threshold=1.0)
    with pytest.raises(IndexError, match=r"num_slots\) = \[0, 8\)"):
        sparse_delta_map(*tokens, num_slots=8)
    tokens[0][..., 1] = tokens[0][..., 0]
    with pytest.raises(ValueError, match="more than once"):
        sparse_delta_map(*tokens, num_slots=9)


@pytest.mark.skipif(core is None, reason="needs the compiled core")
def test_a_map_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pairs are counted before memory is taken for them."""
    tokens = random_tokens(time=40)
    pairs = len(sparse_delta_map(*tokens, num_slots=9).source)
    monkeypatch.setattr(native, "available_memory", lambda device: 24.0 * pairs / 4)
    with pytest.raises(ValueError, match=f"40 tokens has {pairs:,} pairs.*enough for about 20 tokens"):
        sparse_delta_map(*tokens, num_slots=9, backend="native")
    monkeypatch.setattr(native, "available_memory", lambda device: 24.0 * pairs)
    assert len(sparse_delta_map(*tokens, num_slots=9, backend="native").source) == pairs
