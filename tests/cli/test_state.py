"""`sdm state show` and `sdm state diff`, called as a user calls them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sdm
from cli.test_commands import refusal
from sdm.cli import main
from sdm.models.state_summary import stream_writes, summarize_state
from tiny_models import tiny_model, tokens


def save_state(model: sdm.SDMForCausalLM, ids: torch.Tensor, path: Path) -> sdm.MemoryState:
    cache = sdm.SDMCache(model.config)
    with torch.no_grad():
        model(ids[None], past_key_values=cache, use_cache=True)
    state = sdm.MemoryState.from_cache(model, cache)
    state.save(path)
    return state


@pytest.fixture
def saved(tmp_path: Path) -> tuple[sdm.SDMForCausalLM, torch.Tensor, Path]:
    """A model, a text and the folder with the model and two states: of the text, and of a part of it."""
    model, ids = tiny_model("mixed"), tokens(9)
    model.save_pretrained(tmp_path / "model")
    save_state(model, ids, tmp_path / "whole.sdm")
    save_state(model, ids[:4], tmp_path / "part.sdm")
    return model, ids, tmp_path


def test_show(
    saved: tuple[sdm.SDMForCausalLM, torch.Tensor, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    model, ids, folder = saved
    text = [str(token) for token in ids.tolist()]
    main(["state", "show", str(folder / "whole.sdm"), "--model", str(folder / "model"), "--tokens", *text])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "whole.sdm: 9 tokens" in printed
    state = sdm.MemoryState.load(folder / "whole.sdm", model)
    memory = next(layer for layer in summarize_state(state, model) if layer.slots is not None)
    row = next(line for line in printed.splitlines() if " sdm " in line)
    assert f" {memory.changed} " in row
    writes = stream_writes(model, ids)[memory.index]
    last = writes.last
    assert memory.changed == int((last >= 0).sum())
    age = 8 - last[last >= 0]
    assert f" {int(age.median())}, {int(age.max())} " in printed
    assert "What is left of each token's write" in printed
    row = next(line for line in printed.splitlines() if line.strip().startswith(f"{memory.index}.0 "))
    assert f" {float(writes.left.kept[:, 0].mean()):.1%} " in row
    assert f" {float(writes.left.decayed[:, 0].mean()):.1%} " in row


def test_every_write_and_slot_as_files(saved: tuple[sdm.SDMForCausalLM, torch.Tensor, Path]) -> None:
    """Onward from an earlier state: the writes of the text since then, and the slots that they wrote last."""
    model, ids, folder = saved
    arguments = ["state", "show", folder / "whole.sdm", "--model", folder / "model", "--since", folder / "part.sdm"]
    text = [*map(str, ids[4:].tolist())]
    main([*map(str, arguments), "--output", str(folder / "files"), "--tokens", *text])
    part = sdm.MemoryState.load(folder / "part.sdm", model)
    ((index, writes),) = stream_writes(model, ids[4:], part).items()
    lines = (folder / "files" / "writes.csv").read_text().splitlines()
    assert lines[0] == "token,id,text,layer,head,left,decay_alone,slots_not_rewritten"
    assert len(lines) == 1 + 5 * 2
    kept, decayed = (float(share[1, 0]) for share in (writes.left.kept, writes.left.decayed))
    expected = f"1,{int(ids[5])},,{index},0,{round(kept, 6)},{round(decayed, 6)},{int(writes.left.slots[1, 0])}"
    assert lines[3] == expected
    slots = [tuple(map(int, line.split(","))) for line in (folder / "files" / "slots.csv").read_text().split()[1:]]
    assert {(head, slot): last for _, head, slot, last in slots} == {
        (head, slot): int(writes.last[head, slot])
        for head in range(2)
        for slot in range(25)
        if writes.last[head, slot] >= 0
    }
    assert (folder / "files" / "survival.png").read_bytes().startswith(b"\x89PNG")
    whole = stream_writes(model, ids)[index]
    torch.testing.assert_close(writes.left.kept, whole.left.kept[4:], rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_summary_equals_the_tables() -> None:
    model, ids = tiny_model("sdm"), tokens(1, 9)
    cache = sdm.SDMCache(model.config)
    model(ids, past_key_values=cache, use_cache=True)
    state = sdm.MemoryState.from_cache(model, cache)
    for layer, block in zip(summarize_state(state, model), model.model.layers, strict=True):
        if layer.slots is None:
            continue
        change = cache.layers[layer.index].state.memory[0] - block.mixer.initial_state
        assert layer.norm == pytest.approx(float(change.norm()), rel=1e-5)
        assert layer.largest == pytest.approx(float(change.norm(dim=-1).max()), rel=1e-5)
        assert layer.changed == int((change != 0).any(-1).sum())
        assert layer.slots == 2 * 25
    assert sum(layer.nbytes for layer in summarize_state(state, model)) == state.nbytes
    with pytest.raises(ValueError, match="weights"):
        summarize_state(state, tiny_model("sdm"))


def test_diff(saved: tuple[sdm.SDMForCausalLM, torch.Tensor, Path], capsys: pytest.CaptureFixture[str]) -> None:
    model, _, folder = saved
    files = [folder / "whole.sdm", folder / "part.sdm"]
    main(["state", "diff", *map(str, files), "--model", str(folder / "model")])
    printed = capsys.readouterr().out
    (changes,) = sdm.MemoryState.load(files[0], model).diff(sdm.MemoryState.load(files[1], model)).values()
    assert "Difference of whole.sdm (9 tokens) and part.sdm (4 tokens)" in printed
    row = next(line for line in printed.splitlines() if "head" in line and "slot " in line)
    assert f" {len(changes)} " in row
    main(["state", "diff", str(files[0]), str(files[0]), "--model", str(folder / "model")])
    assert " 0 " in capsys.readouterr().out


def test_what_is_refused(saved: tuple[sdm.SDMForCausalLM, torch.Tensor, Path]) -> None:
    _, ids, folder = saved
    model, file = ("--model", folder / "model"), folder / "whole.sdm"
    assert "takes 2 state files, got 1" in refusal("state", "diff", file, *model)
    assert "takes 1 state file, got 2" in refusal("state", "show", file, file, *model)
    assert "there is no state file" in refusal("state", "show", folder / "nowhere.sdm", *model)
    assert "the text has 2 tokens, but the state has read 9" in refusal("state", "show", file, *model, "--tokens", 1, 2)
    assert "belong to `sdm state show`" in refusal("state", "diff", file, file, *model, "--tokens", 1)
    wrong = [1 + (int(token) == 1) for token in ids]
    assert "not what the state has read" in refusal("state", "show", file, *model, "--tokens", *wrong)
    assert "--since needs the text" in refusal("state", "show", file, *model, "--since", file)
    assert "--output needs the text" in refusal("state", "show", file, *model, "--output", folder / "new")
    text = ["--tokens", *ids.tolist()]
    assert "exists" in refusal("state", "show", file, *model, "--output", folder, *text)
    assert "after the 9 of --since" in refusal("state", "show", file, *model, "--since", file, *text)
    assert "tokens must lie within" in refusal("state", "show", file, *model, "--tokens", 9999)
    assert "has no tokenizer" in refusal("state", "show", file, *model, "--prompt", "text")
    tiny_model("mixed").save_pretrained(folder / "other")
    assert "weights" in refusal("state", "show", file, "--model", folder / "other")
    tiny_model("sdm").save_pretrained(folder / "another")
    assert "cannot read" in refusal("state", "diff", file, file, "--model", folder / "another")
    (folder / "broken.sdm").write_bytes(b"text")
    assert "damaged" in refusal("state", "show", folder / "broken.sdm", *model)
