"""Samples of text that a model writes while it is trained (`monitor.sample_every`)."""

from __future__ import annotations

from typing import Any

import torch

from sdm.data.tokenization import Tokenizer
from sdm.layers.memory_statistics import evaluating
from sdm.models import SDMForCausalLM

TOKENS = 64
TEMPERATURE = 0.8


def sample_text(model: SDMForCausalLM, tokenizer: Tokenizer, seed: int, tokens: int = TOKENS) -> str:
    """Let a model write the beginning of a document. The weights, buffers and random numbers of the run stay.

    Args:
        model: the model, on any device, in training mode or not.
        tokenizer: of the model's data.
        seed: decides the sample.
        tokens: length of the sample at most.
    """
    generating: Any = model  # transformers types the method for its own classes alone
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    with evaluating(model), torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(seed)
        written = generating.generate(
            torch.tensor([[tokenizer.eos_id]], device=device),
            attention_mask=torch.ones(1, 1, dtype=torch.int64, device=device),
            max_new_tokens=tokens,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            use_cache=True,
            pad_token_id=tokenizer.eos_id,
        )
    return tokenizer.decode(written[0, 1:].tolist())
