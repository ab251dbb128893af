"""A model's folder that was damaged or made to do harm is refused before it costs time or memory."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import is_flash_attn_2_available

from sdm.models import SDMConfig, modeling
from sdm.models.configuration import check_attention_implementation
from sdm.models.saved_folder import INDEX, WEIGHTS, load_config, load_model
from tiny_models import STACKS, tiny_model, tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("sdm").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 50_000_000}, "vocab_size = 50000000, they have 97"),
        ({"hidden_size": 2**19, "num_attention_heads": 4, "head_dim": 2**17}, "hidden_size = 524288, they have 32"),
        ({"num_hidden_layers": 9000, "sdm_layer_types": ["sdm"] * 9000}, "num_hidden_layers = 9000, they have 4"),
        ({"num_hidden_layers": 20_000, "sdm_layer_types": None}, "num_hidden_layers must be at most 10000, got 20000"),
    ],
)
def test_sizes_that_the_weights_do_not_have(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str
) -> None:
    def no_block(*arguments: Any) -> NoReturn:
        raise AssertionError("a block was built")

    monkeypatch.setattr(modeling, "SDMBlock", no_block)
    edit(folder / "config.json", **fields)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=message):
        load_model(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "KiB"


@pytest.mark.parametrize("fields", [{"num_slots": 2**40}, {"intermediate_size": 2**38}, {"recurrent_key_dim": 2**38}])
def test_other_sizes_are_compared_without_memory(tmp_path: Path, fields: dict[str, int]) -> None:
    folder = tmp_path / "model"
    tiny_model("all_recurrent").save_pretrained(folder)
    edit(folder / "config.json", **fields)
    with pytest.raises(ValueError, match=r"mismatched: model\.layers"):
        load_model(folder)


@pytest.mark.parametrize("place", ["weights.bin", "../other.safetensors", "/etc/passwd.safetensors", 3, None])
def test_an_index_names_safetensors_beside_it(folder: Path, place: Any) -> None:
    (folder / "weights.bin").write_bytes(b"a pickle")
    (folder.parent / "other.safetensors").write_bytes((folder / WEIGHTS).read_bytes())
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"model.norm.weight": place}}))
    with pytest.raises(ValueError, match=r"must name \.safetensors files beside it"):
        load_model(folder)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": "missing.safetensors"}}, []])
def test_a_damaged_index(folder: Path, index: Any) -> None:
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"cannot load the weights in {folder}"):
        load_model(folder)


def test_pickled_weights_are_not_loaded(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"there is no file model\.safetensors"):
        load_model(folder)


def test_a_config_that_names_other_weights(folder: Path) -> None:
    shutil.copy(folder / WEIGHTS, folder / "other.safetensors")
    edit(folder / "config.json", transformers_weights="other.safetensors")
    with pytest.raises(ValueError, match="transformers_weights must be left out"):
        load_model(folder)


@pytest.mark.parametrize("name", ["_attn_implementation", "attn_implementation", "_attn_implementation_internal"])
@pytest.mark.parametrize(
    "value", ["owner/kernel", "owner/kernel@main:f", {"": "owner/kernel"}, "paged|owner/kernel", [1]]
)
def test_a_config_that_names_a_kernel_of_a_hub(folder: Path, name: str, value: Any) -> None:
    edit(folder / "config.json", **{name: value})
    with pytest.raises(
        ValueError, match=f"{name} must be one of eager, sdpa, .* not taken from a hub; remove the field"
    ):
        load_model(folder)
    with pytest.raises(ValueError, match="not taken from a hub"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_attention_implementations_of_foreign_configurations() -> None:
    check_attention_implementation({"model_type": "llama", "_attn_implementation": "sdpa"})
    check_attention_implementation({"text_config": {"_attn_implementation": None}, "hidden_size": 3})
    with pytest.raises(ValueError, match="not taken from a hub"):
        check_attention_implementation({"text_config": {"_attn_implementation": "owner/kernel"}})
    if not is_flash_attn_2_available():  # transformers would take it from a hub instead
        with pytest.raises(ValueError, match="not taken from a hub"):
            check_attention_implementation({"_attn_implementation": "flash_attention_2"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("lm_head.weight"), "missing: lm_head.weight"),
        (lambda weights: weights.update({"extra": torch.ones(1)}), "unexpected: model.extra"),
        (lambda weights: weights.update({"lm_head.weight": torch.ones(96, 32)}), "mismatched: lm_head.weight"),
        (lambda weights: weights.pop("model.embed_tokens.weight"), "no table model.embed_tokens.weight"),
        (lambda weights: weights.update({"norm.weight": torch.ones(32)}), "norm.weight is there more than once"),
    ],
)
def test_weights_that_do_not_fit(folder: Path, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load_model(folder)


@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"vocab_size": ' + b"9" * 5000 + b"}", b"null", b"\xff"])
def test_a_damaged_configuration(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot load .*config\.json"):
        load_config(folder)


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("tied", [False, True])
def test_good_folders_are_loaded(tmp_path: Path, stack: str, tied: bool) -> None:
    """Whole and split, with tied weights and without."""
    model, ids = tiny_model(stack, tie_word_embeddings=tied), tokens(2, 9)
    with torch.no_grad():
        expected = model(ids).logits
        for name, size in (("whole", "1GB"), ("parts", "20KB")):
            model.save_pretrained(tmp_path / name, max_shard_size=size)
            loaded = load_model(tmp_path / name)
            assert torch.equal(loaded(ids).logits, expected)
            assert not loaded.training
    assert (tmp_path / "parts" / INDEX).is_file()


def test_a_model_saved_without_its_head(tmp_path: Path) -> None:
    model, ids = tiny_model("sdm", tie_word_embeddings=True), tokens(1, 5)
    model.model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size", "num_slots", "num_writes"])
@pytest.mark.parametrize("size", [10**18, 10**6000], ids=["long", "longer"])
def test_sizes_beyond_any_model(name: str, size: int) -> None:
    """They are refused before anything is counted up to them."""
    with pytest.raises(ValueError, match=f"{name} must be at most"):
        SDMConfig(**{name: size})
