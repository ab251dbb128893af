"""Models and tokenizers that are not of this library: loaded from a folder, without a hub and without its code."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
import torch
from torch import Tensor, nn

from sdm.data.tokenization import HFTokenizer, Tokenizer
from sdm.errors import UserError
from sdm.files import explained, read_json
from sdm.models.config_file import check_attention_implementation
from sdm.models.saved_folder import CONFIG, WEIGHTS, no_progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_foreign_model(path: Path, dtype: torch.dtype | None = None) -> Any:
    """Load any causal language model that transformers knows.

    Args:
        path: a folder with config.json and weights as safetensors.
        dtype: precision of the weights; None: as they were saved.

    Raises:
        UserError: if the folder names a kernel or weights outside of it, or if weights are missing.
    """
    from transformers import AutoModelForCausalLM

    loaded: Any
    with explained(f"cannot load the model in {path}"), no_progress_bar():
        fields = read_json(path / CONFIG)
        check_attention_implementation(fields)
        if fields.get("transformers_weights") is not None:  # transformers would read that file, whatever it is
            raise ValueError(f"transformers_weights in {CONFIG} must be left out, the weights are in {WEIGHTS}")
        loaded = AutoModelForCausalLM.from_pretrained(
            path,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,  # other formats are pickles
            dtype="auto" if dtype is None else dtype,
            output_loading_info=True,
        )
        model, info = loaded
        for fault in ("missing_keys", "mismatched_keys"):  # transformers would fill them with random numbers
            if info.get(fault):
                names = sorted(map(str, info[fault]))
                raise ValueError(f"{fault.removesuffix('_keys')} weights: {', '.join(names[:5])}")
    if is_length_dependent(model.config):
        model.register_forward_pre_hook(_reset_rope, with_kwargs=True)
    return model


def is_length_dependent(config: PreTrainedConfig) -> bool:
    """Whether a token's position embedding depends on the length of the sequence at hand (longrope, dynamic NTK).

    Such a model gives other numbers for the first part of a document than for the whole, and for a row beside a longer
    one than for the row alone. A short trial cannot show it: frequencies change beyond the length of pretraining.
    """
    return any(kind in ("longrope", "su") or "dynamic" in kind for kind in _rope_types(config.to_dict()))


def _rope_types(fields: Mapping[str, Any]) -> Iterator[str]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            if name == "rope_scaling" and isinstance(value.get("type"), str):  # the older form
                yield value["type"]
            yield from _rope_types(value)
        elif name == "rope_type" and isinstance(value, str):
            yield value


def _reset_rope(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Forget the longest sequence so far, where a new one begins: dynamic frequencies would be those of that one."""
    cache = kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        return
    for module in model.modules():
        for name in [name for name in vars(module) if name.endswith("max_seq_len_cached")]:
            prefix = name.removesuffix("max_seq_len_cached")
            frequencies = getattr(module, f"{prefix}inv_freq", None)
            original = getattr(module, f"{prefix}original_inv_freq", None)
            if isinstance(frequencies, Tensor) and isinstance(original, Tensor):
                module.register_buffer(f"{prefix}inv_freq", original.to(frequencies.device), persistent=False)
                setattr(module, name, module.original_max_seq_len)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a file of a tokenizer."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def open_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of any model that transformers loads.

    Its `eos_id`, the token before every document, is the token that begins a text (bos) where there is one, else the
    token that ends it.
    """
    from transformers import AutoTokenizer

    with explained(f"cannot load the tokenizer in {folder}"):
        loaded: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    start = loaded.bos_token or loaded.eos_token
    if start is None:
        raise UserError(
            f"the tokenizer in {folder} has no token that stands before a document; name one as bos_token or eos_token "
            "in tokenizer_config.json"
        )
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        return PythonTokenizer(loaded, start)
    return HFTokenizer(tokenizers.Tokenizer.from_str(backend.to_str()), str(start))


class PythonTokenizer:
    """A tokenizer of transformers that is not made by the `tokenizers` library, as a `Tokenizer`."""

    def __init__(self, tokenizer: Any, start: str) -> None:
        self._tokenizer = tokenizer
        self.eos_id: int = tokenizer.convert_tokens_to_ids(start)

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self._tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """Checksum of the class, the vocabulary and the start token."""
        parts = [type(self._tokenizer).__name__, str(sorted(self._tokenizer.get_vocab().items())), str(self.eos_id)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; names of special tokens are text."""
        return self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)

    def encode_batch(self, texts: Sequence[str]) -> list[Tensor]:
        """Token ids of several texts, as int32 tensors."""
        return [torch.tensor(self.encode(text), dtype=torch.int32) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files."""
        self._tokenizer.save_pretrained(folder)
