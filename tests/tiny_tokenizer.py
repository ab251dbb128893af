"""A tokenizer for the models of `tiny_models`."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable character."""
    vocabulary = {chr(code): code - 32 for code in range(32, 127)} | {"<pad>": 95, "<eos>": 96}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
