"""Models of this library and of others, small enough to measure in milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from sdm.models.saved_folder import no_progress_bar
from tiny_models import tiny_model
from tiny_tokenizer import tiny_tokenizer

# Positions that are counted, rotary positions, and a recurrent model: any architecture.
OTHERS = ("llama", "gpt2", "mamba")


def other_model(kind: str, **fields: Any) -> Any:
    torch.manual_seed(1)
    ends = {"bos_token_id": 96, "eos_token_id": 96, "pad_token_id": 95, "initializer_range": 0.3}
    if kind == "gpt2":
        sizes = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
        return GPT2LMHeadModel(GPT2Config(**(sizes | ends | fields))).eval()
    if kind == "mamba":
        sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
        return MambaForCausalLM(MambaConfig(**(sizes | ends | fields))).eval()
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    return LlamaForCausalLM(LlamaConfig(**(sizes | heads | ends | fields))).eval()


def save_model(model: Any, folder: Path, tokenizer: bool = True) -> Path:
    with no_progress_bar():
        model.save_pretrained(folder)
    if tokenizer:
        tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """A model of this library and one of another, with the same tokenizer."""
    torch.manual_seed(0)
    return {
        "sdm": save_model(tiny_model(), tmp_path / "sdm"),
        "llama": save_model(other_model("llama"), tmp_path / "llama"),
    }


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of documents of several lengths."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"Document {number}: " + "a memory of many slots. " * (1 + 3 * number))
    return folder
