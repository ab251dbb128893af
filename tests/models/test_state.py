"""A state can be taken, saved, resumed, forked and compared; a wrong file is refused."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import sdm
from helpers import assert_identical
from sdm.models import state_file
from sdm.models.fingerprint import fingerprint
from tiny_models import STACKS, tiny_model, tokens


@pytest.fixture(params=STACKS)
def model(request: pytest.FixtureRequest) -> sdm.SDMForCausalLM:
    return tiny_model(request.param)


@torch.no_grad()
def listen(model: sdm.SDMForCausalLM, ids: Tensor, cache: sdm.SDMCache | None = None) -> sdm.SDMCache:
    cache = cache or sdm.SDMCache(model.config)
    model(ids, past_key_values=cache)
    return cache


@torch.no_grad()
def logits(model: sdm.SDMForCausalLM, ids: Tensor, cache: sdm.SDMCache) -> list[Tensor]:
    """A few single tokens, then several at once."""
    return [model(piece, past_key_values=cache).logits for piece in ids.split([1, 1, 5, 1], dim=1)]


def test_resuming_continues_exactly(model: sdm.SDMForCausalLM, tmp_path: Path) -> None:
    cache, rest = listen(model, tokens(1, 11)), tokens(1, 8)
    state = sdm.MemoryState.from_cache(model, cache, pending=[3, 4])
    state.save(tmp_path / "state")
    expected = logits(model, rest, cache)
    assert_identical(logits(model, rest, state.cache(model)), expected)
    loaded = sdm.MemoryState.load(tmp_path / "state", model)
    assert_identical(logits(model, rest, loaded.cache(model)), expected)
    assert_identical(logits(model, rest, loaded.cache(model)), expected)
    assert len(loaded) == 11
    assert loaded.pending == (3, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["state"], "no temporary file stays"


def test_a_row_of_a_batch(model: sdm.SDMForCausalLM) -> None:
    ids, rest = tokens(3, 11), tokens(1, 8)
    cache = listen(model, ids)
    for row in (0, 2, -1):
        state = sdm.MemoryState.from_cache(model, cache, row=row)
        copy = sdm.SDMCache(model.config)
        listen(model, ids, copy)
        copy.batch_select_indices(torch.tensor([row % 3]))
        assert_identical(logits(model, rest, state.cache(model)), logits(model, rest, copy))
    together = logits(model, rest.repeat(2, 1), state.cache(model, batch_size=2))
    alone = logits(model, rest, state.cache(model))
    for pair, single in zip(together, alone, strict=True):
        torch.testing.assert_close(pair, single.repeat(2, 1, 1), atol=1e-5, rtol=1e-5)


def test_a_state_does_not_change(model: sdm.SDMForCausalLM) -> None:
    cache, rest = listen(model, tokens(1, 11)), tokens(1, 8)
    state = sdm.MemoryState.from_cache(model, cache)
    expected = logits(model, rest, state.cache(model))
    logits(model, tokens(1, 8), cache)
    logits(model, tokens(1, 8), state.cache(model))
    assert_identical(logits(model, rest, state.cache(model)), expected)


def test_only_changed_slots_are_kept(tmp_path: Path) -> None:
    model = tiny_model("sdm", num_slots=2500)
    state = sdm.MemoryState.from_cache(model, listen(model, tokens(1, 3)))
    state.save(tmp_path / "state")
    with safe_open(tmp_path / "state", framework="pt") as file:
        slots = file.get_tensor("layers.3.slots")
    assert 0 < len(slots) <= 3 * 2 * model.config.num_writes
    table = 2 * 2500 * 16 * 4
    assert (tmp_path / "state").stat().st_size < table / 10
    assert state.nbytes < table / 10


def test_forks_share(tmp_path: Path) -> None:
    """A hundred forks, each gone its own way for a few tokens, cost less than one table."""
    model = tiny_model("sdm", num_slots=10_000)
    state = sdm.MemoryState.from_cache(model, listen(model, tokens(1, 40)))
    table = 2 * 10_000 * 16 * 4
    forks = [state.fork() for _ in range(100)]
    assert sum(fork.nbytes for fork in forks) == 0
    grown = [sdm.MemoryState.from_cache(model, listen(model, tokens(1, 2), fork.cache(model))) for fork in forks]
    windows = sum(x.nbytes for content in state._contents for x in content.values() if isinstance(x, Tensor))
    assert sum(fork.nbytes - windows for fork in grown) < table
    rest = tokens(1, 8)
    for fork in grown[:3]:
        fork.save(tmp_path / "fork")
        loaded = sdm.MemoryState.load(tmp_path / "fork", model)
        assert_identical(logits(model, rest, loaded.cache(model)), logits(model, rest, fork.cache(model)))


def test_forks_of_forks(tmp_path: Path) -> None:
    model, cache, stream = tiny_model("sdm", num_slots=400), None, tokens(1, 40)
    for ids in stream.split(2, dim=1):
        cache = listen(model, ids, cache)
        state = sdm.MemoryState.from_cache(model, cache)
        cache = state.cache(model)
    table = state._memories()[3]
    assert len(table.changes) <= 9
    expected = listen(model, stream[:, :2])
    for ids in stream[:, 2:].split(2, dim=1):
        listen(model, ids, expected)
    assert_identical([table.table()], [expected.layers[3].state.memory[0]])


def test_diff() -> None:
    model = tiny_model("sdm", num_slots=100)
    cache = listen(model, tokens(1, 6))
    before = sdm.MemoryState.from_cache(model, cache)
    old = cache.layers[3].state.memory[0].clone()
    listen(model, tokens(1, 3), cache)
    after = sdm.MemoryState.from_cache(model, cache)
    changes = after.diff(before)
    assert list(changes) == [3]
    change = torch.zeros(2, 100)
    change[changes[3].head, changes[3].slot] = changes[3].change
    torch.testing.assert_close(change, (cache.layers[3].state.memory[0] - old).norm(dim=-1))
    assert 0 < len(changes[3]) <= 3 * 2 * 4
    assert len(after.diff(after.fork())[3]) == 0
    assert_identical([before.diff(after)[3].slot], [changes[3].slot])


def test_zero_initial_state(tmp_path: Path) -> None:
    model = tiny_model("sdm", learned_initial_state=False)
    cache, rest = listen(model, tokens(1, 6)), tokens(1, 8)
    sdm.MemoryState.from_cache(model, cache).save(tmp_path / "state")
    loaded = sdm.MemoryState.load(tmp_path / "state", model)
    assert_identical(logits(model, rest, loaded.cache(model)), logits(model, rest, cache))


def test_bfloat16(tmp_path: Path) -> None:
    model = tiny_model("mixed").to(torch.bfloat16)
    cache, rest = listen(model, tokens(1, 6)), tokens(1, 8)
    sdm.MemoryState.from_cache(model, cache).save(tmp_path / "state")
    loaded = sdm.MemoryState.load(tmp_path / "state", model)
    assert_identical(logits(model, rest, loaded.cache(model)), logits(model, rest, cache))


class TestRefused:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> tuple[sdm.SDMForCausalLM, Path]:
        model = tiny_model("sdm")
        sdm.MemoryState.from_cache(model, listen(model, tokens(1, 6))).save(tmp_path / "state")
        return model, tmp_path / "state"

    @pytest.mark.parametrize("keep", [0, 4, 100, -1, -300])
    def test_truncated(self, saved: tuple[sdm.SDMForCausalLM, Path], keep: int) -> None:
        model, path = saved
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(ValueError, match=r"state.*damaged"):
            sdm.MemoryState.load(path, model)

    @pytest.mark.parametrize("place", [3, 40, -1, -100, -2000])
    def test_a_flipped_bit(self, saved: tuple[sdm.SDMForCausalLM, Path], place: int) -> None:
        model, path = saved
        content = bytearray(path.read_bytes())
        content[place] ^= 4
        path.write_bytes(content)
        with pytest.raises(ValueError, match="state"):
            sdm.MemoryState.load(path, model)

    @pytest.mark.parametrize(("before", "after"), [(b'length\\": 6', b'length\\": 7'), (b": [3]", b": [4]")])
    def test_a_changed_header(self, tmp_path: Path, before: bytes, after: bytes) -> None:
        """All of it is under the checksum."""
        model, path = tiny_model("sdm"), tmp_path / "state"
        sdm.MemoryState.from_cache(model, listen(model, tokens(1, 6)), pending=[3]).save(path)
        content = path.read_bytes()
        assert content.count(before) == 1
        path.write_bytes(content.replace(before, after))
        with pytest.raises(ValueError, match=r"state.*damaged"):
            sdm.MemoryState.load(path, model)

    @pytest.mark.parametrize(
        "fields",
        [
            {"model": []},
            {"model": {"architecture": 1, "weights": ""}},
            {"pending": 3},
            {"length": True},
            {"history": [-1]},
            7,
        ],
    )
    def test_a_header_of_wrong_types(self, saved: tuple[sdm.SDMForCausalLM, Path], fields: Any) -> None:
        model, path = saved
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            header = json.loads(metadata["header"])
        header = header | fields if isinstance(fields, dict) else fields
        save_file({}, path, metadata | {"header": json.dumps(header)})
        with pytest.raises(ValueError, match="its header is damaged"):
            sdm.MemoryState.load(path, model)

    @pytest.mark.parametrize(
        ("stack", "name", "change", "message"),
        [
            ("sdm", "layers.0.key", lambda x: x[:, :, 1:], "key of shape"),
            ("sdm", "layers.0.length", lambda x: x + 1, "seen 7 tokens of 6"),
            ("sdm", "layers.0.length", lambda x: x.float(), "length of torch.float32"),
            ("full_attention", "layers.3.value", lambda x: x[:, :, 1:], "value of shape"),
            ("gdn", "layers.3.memory", lambda x: x[..., 1:], "memory of shape"),
            ("mamba2", "layers.3.tail", lambda x: x[:, 1:], "tail of shape"),
            ("sdm", "layers.3.slots", lambda x: x[:, None], "slots of shape"),
            ("sdm", "layers.4.key", lambda x: torch.zeros(1), "none of the model's 4 layers"),
        ],
    )
    def test_tensors_that_are_not_the_model_s(
        self, tmp_path: Path, stack: str, name: str, change: Any, message: str
    ) -> None:
        """Whatever the checksum says."""
        model, path = tiny_model(stack), tmp_path / "state"
        state = sdm.MemoryState.from_cache(model, listen(model, tokens(1, 6)))
        state.save(path)
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, not a mapping
        tensors[name] = change(tensors.get(name))
        state_file.write(path, tensors, fingerprint(model), 6, ())
        with pytest.raises(ValueError, match=message):
            sdm.MemoryState.load(path, model)

    def test_another_batch_norm(self, tmp_path: Path) -> None:
        model, path = tiny_model("sdm", query_batch_norm=True), tmp_path / "state"
        state = sdm.MemoryState.from_cache(model, listen(model, tokens(1, 6)))
        state.save(path)
        with torch.no_grad():
            model.model.layers[3].mixer.query_batch_norm.running_mean[0] += 1
        with pytest.raises(ValueError, match="buffers, such as the statistics of a batch normalisation, differ"):
            sdm.MemoryState.load(path, model)
        with pytest.raises(ValueError, match="buffers"):
            state.cache(model)

    def test_fields_that_a_file_could_not_know(self, saved: tuple[sdm.SDMForCausalLM, Path]) -> None:
        """They had their defaults when it was written."""
        model, path = saved
        state = sdm.MemoryState.load(path, model)
        known = dict(state._model_id.architecture)
        assert known.pop("query_batch_norm") is False
        state._model_id = replace(state._model_id, architecture=known)
        state.save(path)
        assert len(sdm.MemoryState.load(path, model)) == 6

    def test_foreign(self, saved: tuple[sdm.SDMForCausalLM, Path]) -> None:
        model, path = saved
        path.write_text("a poem")
        with pytest.raises(ValueError, match="of another format"):
            sdm.MemoryState.load(path, model)
        save_file({"weight": torch.zeros(3)}, path)
        with pytest.raises(ValueError, match="not a saved MemoryState"):
            sdm.MemoryState.load(path, model)
        save_file({"weight": torch.zeros(3)}, path, {"format": "sdm-memory-state", "header": "{}"})
        with pytest.raises(ValueError, match="header is damaged"):
            sdm.MemoryState.load(path, model)
        with pytest.raises(FileNotFoundError, match="nowhere"):
            sdm.MemoryState.load(path.parent / "nowhere", model)

    def test_a_newer_version(self, saved: tuple[sdm.SDMForCausalLM, Path]) -> None:
        model, path = saved
        with safe_open(path, framework="pt") as file:
            header = json.loads(file.metadata()["header"]) | {"version": 3}
        save_file({}, path, {"format": "sdm-memory-state", "header": json.dumps(header)})
        with pytest.raises(ValueError, match="version 3"):
            sdm.MemoryState.load(path, model)

    def test_another_model(self, saved: tuple[sdm.SDMForCausalLM, Path]) -> None:
        model, path = saved
        with pytest.raises(ValueError, match="another model: its num_slots is 25, expected 36"):
            sdm.MemoryState.load(path, tiny_model("sdm", num_slots=36))
        with pytest.raises(ValueError, match="another model: its layer_types"):
            sdm.MemoryState.load(path, tiny_model("gdn"))
        with pytest.raises(ValueError, match="weights differ"):
            sdm.MemoryState.load(path, tiny_model("sdm"))
        state = sdm.MemoryState.load(path, model)
        with pytest.raises(ValueError, match="weights differ"):
            state.cache(tiny_model("sdm"))

    def test_a_model_trained_further(self, saved: tuple[sdm.SDMForCausalLM, Path]) -> None:
        model, path = saved
        state = sdm.MemoryState.load(path, model)
        with torch.no_grad():
            model.model.layers[3].mixer.initial_state[0, 7] += 1
        with pytest.raises(ValueError, match="weights differ"):
            sdm.MemoryState.load(path, model)
        with pytest.raises(ValueError, match="weights differ"):
            state.cache(model)

    def test_wrong_arguments(self, saved: tuple[sdm.SDMForCausalLM, Path]) -> None:
        model, path = saved
        with pytest.raises(ValueError, match="empty"):
            sdm.MemoryState.from_cache(model, sdm.SDMCache(model.config))
        with pytest.raises(ValueError, match="row must say which of the 3 rows"):
            sdm.MemoryState.from_cache(model, listen(model, tokens(3, 6)))
        with pytest.raises(IndexError, match="row = 1"):
            sdm.MemoryState.from_cache(model, listen(model, tokens(1, 6)), row=1)
        with pytest.raises(TypeError, match="SDMCache"):
            sdm.MemoryState.from_cache(model, None)
        state = sdm.MemoryState.load(path, model)
        with pytest.raises(TypeError, match="MemoryState"):
            state.diff(None)
        with pytest.raises(ValueError, match="batch_size"):
            state.cache(model, batch_size=0)

    def test_a_failed_write_leaves_the_old_file(
        self, saved: tuple[sdm.SDMForCausalLM, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, path = saved
        before = path.read_bytes()
        monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            sdm.MemoryState.load(path, model).save(path)
        assert path.read_bytes() == before
        assert [entry.name for entry in path.parent.iterdir()] == ["state"]


def test_a_copied_cache_goes_on(model: sdm.SDMForCausalLM) -> None:
    """Transformers' way of using a prompt again."""
    state = sdm.MemoryState.from_cache(model, listen(model, tokens(1, 9)))
    cache, more = state.cache(model), tokens(1, 8)
    copied = copy.deepcopy(cache)
    assert_identical(logits(model, more, copied), logits(model, more, cache))
    taken, expected = (sdm.MemoryState.from_cache(model, x) for x in (copied, cache))
    assert all(not len(change) for change in taken.diff(expected).values())
    with pytest.raises(TypeError, match=r"save\(\)"):
        pickle.dumps(state)


def test_a_cache_of_another_model() -> None:
    cache = listen(tiny_model("sdm"), tokens(1, 5))
    with pytest.raises(ValueError, match="past_key_values is of another model: its layer_types"):
        sdm.MemoryState.from_cache(tiny_model("gdn"), cache)


def test_weights_that_changed_unseen(tmp_path: Path) -> None:
    model = tiny_model()
    sdm.MemoryState.from_cache(model, listen(model, tokens(1, 5))).save(tmp_path / "state")
    model.model.layers[0].mlp.up_proj.weight.data[3, 7] += 0.1
    with pytest.raises(ValueError, match="the weights differ"):
        sdm.MemoryState.load(tmp_path / "state", model)


@pytest.mark.parametrize("pending", [[1000], [-1], [1.5], ["a"]])
def test_pending_tokens_are_tokens(pending: list[Any]) -> None:
    model = tiny_model()
    cache = listen(model, tokens(1, 5))
    with pytest.raises(ValueError, match="pending"):
        sdm.MemoryState.from_cache(model, cache, pending=pending)


def test_what_a_deep_state_holds_is_counted() -> None:
    model = tiny_model()
    state = sdm.MemoryState.from_cache(model, listen(model, tokens(1, 5)))
    states = [state]
    for _ in range(12):
        states.append(sdm.MemoryState.from_cache(model, listen(model, tokens(1, 2), states[-1].cache(model))))
    kept = {id(x): x for s in states for m in s._memories().values() for c in m.changes for x in (c.index, c.rows)}
    rest = [x for s in states for content in s._contents for x in content.values() if isinstance(x, Tensor)]
    assert sum(s.nbytes for s in states) == sum(x.nbytes for x in (*kept.values(), *rest))


@pytest.mark.parametrize("shift_keys", [False, True])
def test_a_short_conversation_is_a_small_file(shift_keys: bool, tmp_path: Path) -> None:
    model = tiny_model(num_slots=1024, shift_keys=shift_keys)
    state = sdm.MemoryState.from_cache(model, listen(model, tokens(1, 5)))
    state.save(tmp_path / "state")
    assert (tmp_path / "state").stat().st_size < 0.3 * sdm.cost(model.config).state_bytes()
    (changes,) = state.diff(sdm.MemoryState.from_cache(model, listen(model, tokens(1, 5)))).values()
    assert len(changes) > 0
