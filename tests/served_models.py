"""Folders that vLLM serves in tests, and the tokens that it should give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sdm.layers.attention import GatedAttention
from sdm.models import SDMForCausalLM
from tiny_models import VOCABULARY, tiny_model
from tiny_tokenizer import tiny_tokenizer

SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_slots": 64, "initial_state_std": 1.0, "eos_token_id": None}
NEW = 32


def save(folder: Path, stack: str = "sdm", **fields: Any) -> SDMForCausalLM:
    model = tiny_model(stack, **(SIZES | fields))
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


def prompts_of(lengths: list[int]) -> list[list[int]]:
    return [torch.randint(0, VOCABULARY, (length,)).tolist() for length in lengths]


def expected(model: Any, prompts: list[list[int]], new: int = NEW) -> list[list[int]]:
    outputs = [model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False) for ids in prompts]
    return [output[0, len(ids) :].tolist() for ids, output in zip(prompts, outputs, strict=True)]


def state_gib(model: SDMForCausalLM, sequences: int) -> float:
    """The memory for states that holds so many sequences, and the initial state."""
    recurrent = [block.mixer for block in model.model.layers if not isinstance(block.mixer, GatedAttention)]
    return (sequences + 1) * sum(mixer.start_state(1).nbytes for mixer in recurrent) / 2**30
