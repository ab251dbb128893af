"""Files that anything has happened to are refused, or give what they gave before: never something else."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

import sdm
from run.test_export import content
from sdm.data import load_tokenizer
from sdm.models import SDMForCausalLM
from sdm.run.checkpoint import CheckpointStore
from sdm.run.config import CheckpointConfig
from sdm.run.model import export_run, load_weights
from sdm.training import Trainer
from tiny_models import tiny_model, tokens
from training.runs import text_run

NAMES = (
    "copy of {}",
    "{} (1).safetensors",
    "0.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    ".{}.swp",
)
Load = Callable[[], Any]


def mutate(folder: Path, kind: str, rng: random.Random) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    file = rng.choice(files)
    data = bytearray(file.read_bytes())
    if kind == "flip" and data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
    elif kind == "cut":
        file.write_bytes(data[: rng.randrange(len(data) + 1)])
    elif kind == "rename":
        other = rng.choice([*files, file.with_name(f"{file.name}.bak"), file.parent.with_name(file.name)])
        file.replace(other)
    elif kind == "stray":
        name = rng.choice(NAMES).format(file.name)
        text = rng.choice([bytes(data), b"", b"{}", rng.randbytes(100), b'{"bos_token": "a", "eos_token": "b"}'])
        target = rng.choice(files).with_name(name)
        if not target.exists():
            target.write_bytes(text)


def checkpoint(folder: Path) -> Load:
    tensors = {"a": torch.randn(3, 5), "b.c": torch.arange(7), "scalar": torch.tensor(2.5)}
    store = CheckpointStore(folder)
    store.save(4, tensors, {"config": {"seed": 3}, "guard": {"recent": [1.5, 2.5]}})

    def load() -> Any:
        found = {name: torch.full_like(x, 9) for name, x in tensors.items()}
        state = CheckpointStore(folder).newest(lambda state: store.load(state["step"], found))
        return state, save(found)

    return load


def state(folder: Path) -> Load:
    model = tiny_model("mixed", query_batch_norm=True)
    cache = sdm.SDMCache(model.config)
    with torch.no_grad():
        model(tokens(1, 9), past_key_values=cache)
    folder.mkdir()
    sdm.MemoryState.from_cache(model, cache, pending=[5, 6]).save(folder / "state")

    def load() -> Any:
        loaded = sdm.MemoryState.load(folder / "state", model)
        loaded.save(folder.parent / "again")
        return len(loaded), loaded.pending, save(load_file(folder.parent / "again"))

    return load


def trained(folder: Path) -> Any:
    config = text_run(folder.parent, checkpoint=CheckpointConfig(every=100, keep=1))
    config = replace(config, data=replace(config.data, tokenizer="bpe:270"))
    Trainer(config, folder).run()
    # One checkpoint alone: where another is left, a run goes on from that one and says so.
    for older in sorted((folder / "checkpoints").iterdir())[:-1]:
        shutil.rmtree(older)
    return config


def run(folder: Path) -> Load:
    config = trained(folder)

    def load() -> Any:
        output = folder.parent / "output"
        shutil.rmtree(output, ignore_errors=True)
        exported = content(export_run(folder, output))
        trainer = Trainer(config, folder)
        try:
            trainer.resume()
            return exported, trainer.step, save(dict(trainer.model.state_dict()))
        finally:
            trainer.close()

    return load


def export(folder: Path) -> Load:
    trained(folder.parent / "trained")
    shutil.copytree(folder.parent / "trained" / "export", folder)
    model = SDMForCausalLM.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)

    def load() -> Any:
        load_weights(model, folder, tokenizer)
        return save(dict(model.state_dict())), load_tokenizer(folder).encode("a memory of many slots")

    return load


def trials(make: Callable[[Path], Load], tmp_path: Path, kind: str, count: int) -> None:
    folder, whole = tmp_path / "subject", tmp_path / "whole"
    load = make(folder)
    expected, refused = load(), 0
    shutil.copytree(folder, whole)
    for seed in range(count):
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        mutate(folder, kind, random.Random(seed))
        try:
            found = load()
        except (ValueError, OSError):
            refused += 1
        else:
            assert found == expected, f"seed {seed} loads as something else"
    assert refused > 0


@pytest.mark.parametrize("kind", ["flip", "cut", "rename", "stray"])
@pytest.mark.parametrize(("make", "count"), [(checkpoint, 40), (state, 40), (run, 8), (export, 8)])
def test_mutations(make: Callable[[Path], Load], count: int, tmp_path: Path, kind: str) -> None:
    if make is state and kind == "stray":
        pytest.skip("a state is one file, and what lies beside it is not read")
    trials(make, tmp_path, kind, count)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flip", "cut", "rename", "stray"])
@pytest.mark.parametrize("make", [checkpoint, state, run, export])
def test_a_thousand_mutations(make: Callable[[Path], Load], tmp_path: Path, kind: str) -> None:
    if make is state and kind == "stray":
        pytest.skip("a state is one file, and what lies beside it is not read")
    trials(make, tmp_path, kind, 1000)
