"""States that bring their journal: rewound, saved and loaded with it, and without a span of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import sdm
from helpers import assert_close, assert_identical
from sdm.models import state_file
from sdm.models.fingerprint import fingerprint
from tiny_models import STACKS, tiny_model, tokens


@torch.no_grad()
def listen(model: sdm.SDMForCausalLM, pieces: list[Tensor], cache: sdm.SDMCache | None = None) -> sdm.SDMCache:
    if cache is None:
        cache = sdm.SDMCache(model.config)
        cache.mark()
    for piece in pieces:
        model(piece, past_key_values=cache)
    return cache


@torch.no_grad()
def logits(model: sdm.SDMForCausalLM, ids: Tensor, state: sdm.MemoryState) -> list[Tensor]:
    return [model(ids, past_key_values=state.cache(model)).logits]


@pytest.mark.parametrize("stack", STACKS)
def test_rewinding_and_saving(stack: str, tmp_path: Path) -> None:
    model, ids, probe = tiny_model(stack), tokens(2, 20), tokens(1, 3)
    pieces = list(ids.split([9, 1, 1, 6, 3], dim=1))
    cache = listen(model, pieces[:3])
    earlier = sdm.MemoryState.from_cache(model, cache, row=1)
    state = sdm.MemoryState.from_cache(model, listen(model, pieces[3:], cache), row=1, pending=[5])
    assert state.marks == [17, 11, 10, 9, 0]
    expected = logits(model, probe, earlier)
    assert_identical(logits(model, probe, state.rewind(model, 9)), expected)
    assert_identical(logits(model, probe, state.fork().rewind(model, 3).rewind(model, 6)), expected)
    partly = sdm.MemoryState.from_cache(model, listen(model, [ids[1:, :14]]))
    assert_close(logits(model, probe, state.rewind(model, 6)), logits(model, probe, partly), 1e-4)

    state.save(tmp_path / "state", history=8)
    loaded = sdm.MemoryState.load(tmp_path / "state", model)
    assert loaded.marks == [17, 11]
    assert_identical(logits(model, probe, loaded.rewind(model, 9)), expected)
    assert_close(logits(model, probe, loaded.rewind(model, 6)), logits(model, probe, partly), 1e-4)
    with pytest.raises(ValueError, match="cannot take back 10 tokens: the journal reaches back 9, to a length of 11"):
        loaded.rewind(model, 10)
    state.save(tmp_path / "state")
    plain = sdm.MemoryState.load(tmp_path / "state", model)
    assert plain.marks == []
    assert_identical(logits(model, probe, plain), logits(model, probe, state))
    with pytest.raises(ValueError, match="no history to go back in"):
        plain.rewind(model, 1)
    assert len(plain.rewind(model, 0)) == 20


@pytest.mark.parametrize("stack", ["sdm", "mixed", "all_recurrent"])
def test_forgetting_a_span(stack: str) -> None:
    model, ids, probe = tiny_model(stack), tokens(1, 20), tokens(1, 3)
    state = sdm.MemoryState.from_cache(model, listen(model, list(ids.split([9, 5, 6], dim=1))), pending=[7])
    expected = sdm.MemoryState.from_cache(model, listen(model, [ids[:, :9], ids[:, 14:]]))
    forgotten = state.forget(model, (9, 14), ids[0, 14:].tolist())
    assert_identical(logits(model, probe, forgotten), logits(model, probe, expected))
    assert (len(forgotten), forgotten.pending) == (15, (7,))
    ended = state.forget(model, (9, 20))
    assert_identical(logits(model, probe, ended), logits(model, probe, state.rewind(model, 11)))
    with pytest.raises(ValueError, match="tail must be the 6 tokens behind the span"):
        state.forget(model, (9, 14))
    with pytest.raises(ValueError, match="span must be within the stream of 20 tokens"):
        state.forget(model, (9, 21))


def test_rewinding_changes_no_other_state() -> None:
    model, ids, probe = tiny_model("shifted"), tokens(1, 12), tokens(1, 3)
    state = sdm.MemoryState.from_cache(model, listen(model, list(ids.split(4, dim=1))))
    before = logits(model, probe, state)
    first = state.rewind(model, 8)
    cache = first.cache(model)
    listen(model, [tokens(1, 3), tokens(1, 1)], cache)
    assert_identical(logits(model, probe, state.rewind(model, 8)), logits(model, probe, first))
    assert_identical(logits(model, probe, state), before)


class TestBadFiles:
    def test_a_journal_of_another_model(self, tmp_path: Path) -> None:
        model = tiny_model("sdm")
        state = sdm.MemoryState.from_cache(model, listen(model, [tokens(1, 5)]))
        state.save(tmp_path / "state", history=5)
        with pytest.raises(ValueError, match="weights differ"):
            sdm.MemoryState.load(tmp_path / "state", tiny_model("sdm"))

    @pytest.mark.parametrize(
        ("counts", "name", "message"),
        [
            ([9], None, "longer than its stream"),
            ([2, 2], "history.2.layers.0.key", "a history of 2 entries"),
            ([2], "history.0.layers.0.strange", "not those of this model"),
            ([2], "history.0.layers.3.value", "has value of shape"),
        ],
    )
    def test_histories_that_do_not_fit(self, tmp_path: Path, counts: list[int], name: str, message: str) -> None:
        """Whatever the checksum says."""
        model, path = tiny_model("sdm"), tmp_path / "state"
        cache = listen(model, [tokens(1, 2), tokens(1, 2), tokens(1, 2)])
        sdm.MemoryState.from_cache(model, cache).save(path, history=sum(counts) if sum(counts) < 6 else 6)
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, not a mapping
        if name is not None:
            tensors[name] = torch.zeros(2, 1)
        state_file.write(path, tensors, fingerprint(model), 6, (), counts)
        with pytest.raises(ValueError, match=message):
            sdm.MemoryState.load(path, model)

    def test_bad_numbers(self) -> None:
        model = tiny_model("sdm")
        state = sdm.MemoryState.from_cache(model, listen(model, [tokens(1, 5)]))
        for tokens_back in (-1, 1.5, True):
            with pytest.raises(ValueError, match="tokens must be a number of tokens to take back"):
                state.rewind(model, tokens_back)  # type: ignore[arg-type]
