"""A causal language model with its tokenizer, as measurements use it: of a run, an export or any folder.

Models and tokenizers that are not of this library are loaded from their folder, without a hub and without its code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from sdm.data.tokenization import Tokenizer, load_tokenizer
from sdm.errors import UserError
from sdm.evaluation.inference import CACHES, Generator, Past, Scorer, Stream, cache_tensors, likeliest
from sdm.files import explained, read_json
from sdm.models import SDMConfig, SDMForCausalLM, cost
from sdm.models.causal_lm import is_length_dependent, load_foreign_model
from sdm.models.fingerprint import checksum
from sdm.models.saved_folder import CONFIG
from sdm.run import Run
from sdm.run.model import SavedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel
import hashlib
from typing import TYPE_CHECKING, cast

import tokenizers

from sdm.data.tokenization import HFTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Precision = Literal["auto", "float32", "bfloat16", "float16"]
# Fields of a configuration that change no number; the precision has an entry of its own in the fingerprint.
_NO_NUMBERS = ("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version")


class EvalModel:
    """A model that gives likelihoods, the likeliest tokens and answers, with its tokenizer.

    Token ids are plain lists or tensors on any device. A text begins a document: the model sees `start_id` before it.
    """

    def __init__(self, name: str, path: Path, model: PreTrainedModel, tokenizer_folder: Path, run: Run | None) -> None:
        self.name, self.path, self.run = name, path, run
        self.model: Any = model.eval()
        self.tokenizer_folder = tokenizer_folder

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.model.device

    @property
    def is_ours(self) -> bool:
        """Whether the model is of this library."""
        return isinstance(self.model, SDMForCausalLM)

    @cached_property
    def is_length_dependent(self) -> bool:
        """Whether documents must be scored whole and alone (`sdm.models.causal_lm.is_length_dependent`)."""
        return not self.is_ours and is_length_dependent(self.model.config)

    @property
    def vocab_size(self) -> int:
        """Number of ids that the model takes; the tokenizer may have fewer."""
        return self.model.get_input_embeddings().weight.shape[0]

    @property
    def context_limit(self) -> int | None:
        """Tokens of the longest stream that the model takes; None if there is no limit."""
        config = self.model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        return limit if isinstance(limit, int) and 0 < limit < 2**40 else None

    def check_length(self, tokens: int, advice: str) -> None:
        """Raise a UserError that ends in `advice` unless the model takes a stream of so many tokens."""
        limit = self.context_limit
        if limit is not None and tokens > limit:
            raise UserError(f"{self.name} takes at most {limit} tokens, got {tokens}: {advice}")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer beside the model; a UserError if there is none."""
        if not has_tokenizer(self.tokenizer_folder):
            raise UserError(
                f"{self.name} has no tokenizer in {self.tokenizer_folder}, which measuring on text needs; copy it "
                "there, or take a measurement of token ids, such as recall"
            )
        # A run's own tokenizer is known by its checksums, which the token cache uses.
        own = self.is_ours and (self.tokenizer_folder / "tokenizer.json").is_file()
        tokenizer = load_tokenizer(self.tokenizer_folder) if own else open_tokenizer(self.tokenizer_folder)
        if tokenizer.vocab_size > self.vocab_size:
            raise UserError(
                f"the tokenizer in {self.tokenizer_folder} has {tokenizer.vocab_size} ids, but {self.name} takes "
                f"{self.vocab_size}: it is another model's"
            )
        return tokenizer

    @property
    def start_id(self) -> int:
        """The token before a document."""
        return self.tokenizer.eos_id

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; nothing is added, and names of special tokens are text."""
        return self.tokenizer.encode(text)

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a text that begins a document."""
        return [self.start_id, *self.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return self.tokenizer.decode(ids)

    def nll(
        self, input_ids: Tensor, targets: Tensor, past: Past | None = None, carry: bool = False
    ) -> tuple[Tensor, Past | None]:
        """Compute the negative log-likelihood of targets.

        Args:
            input_ids: [B,T] tokens.
            targets: [B,T] the token after each; -100 where there is none.
            past: the state after earlier tokens of the same rows.
            carry: whether to return the state after these tokens.

        Returns:
            [B,T] float32 nats on the CPU, zero where the target is -100; and with `carry` the state.
        """
        nats, after = self._scorer.nll(input_ids.to(self.device), targets.to(self.device), past, carry)
        return nats.cpu(), after

    def stream(self) -> Stream:
        """Begin rows of tokens that are read as generation reads them."""
        return Stream(self.model, self._scorer.continues)

    def predict(self, input_ids: Tensor, wanted: Tensor) -> Tensor:
        """Return the likeliest next token [n] at the places of input_ids [B,T] where `wanted` [B,T] is True."""
        return likeliest(self.model, input_ids, wanted)

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop: Sequence[str] = ()
    ) -> list[list[int]]:
        """Generate the likeliest continuation of each prompt, the same as by itself, without the token that ends it.

        Args:
            prompts: token ids, of different lengths; they are computed side by side.
            max_new_tokens: most tokens of an answer.
            stop: texts of which the first ends an answer. The answer holds it.
        """
        if not prompts:
            return []
        if not all(prompts):
            raise ValueError(f"prompts[{[bool(prompt) for prompt in prompts].index(False)}] is empty")
        # The model does not see the last new token.
        length = max(map(len, prompts)) + max_new_tokens - 1
        self.check_length(length, "shorten the prompts, or generate fewer tokens")

        def stopped(ids: list[int]) -> bool:
            text = self.decode(ids)
            return any(end in text for end in stop)

        return self._generator(prompts, max_new_tokens, stopped if stop else None)

    def answer(self, prompts: Sequence[str], max_new_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        """Generate from text to text; answers are cut before the first of `stop`."""
        texts = map(self.decode, self.generate([self.encode_prompt(text) for text in prompts], max_new_tokens, stop))
        return [text[: min((text.find(end) for end in stop if end in text), default=None)] for text in texts]

    def state_elements(self, length: int) -> int | None:
        """Count the numbers that the layers keep after `length` tokens: recurrent states, keys and values, windows.

        Returns:
            The count, or None if a foreign model returns no cache.
        """
        if self.is_ours:
            return sum(layer.state_elements(length) for layer in cost(self.model.config).layers)
        with torch.inference_mode():
            output = self.model(torch.zeros(1, length, dtype=torch.int64, device=self.device), use_cache=True)
        cache = next((output[name] for name in CACHES if output.get(name) is not None), None)
        return sum(tensor.numel() for tensor in cache_tensors(cache) if tensor.is_floating_point()) or None

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Everything that decides the numbers: configuration, weights, precision, tokenizer, tokens that end answers.

        The configuration is there field by field, so that an error can name the field that has changed.
        """
        config = json.loads(self.model.config.to_json_string(use_diff=False))
        return {
            "architecture": self.model.config.model_type,
            "config": {name: value for name, value in sorted(config.items()) if name not in _NO_NUMBERS},
            "weights": checksum(self.model.state_dict()),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "tokenizer": self.tokenizer.fingerprint if has_tokenizer(self.tokenizer_folder) else None,
            "end_ids": self._end_ids,
        }

    def describe(self) -> dict[str, Any]:
        """The entry `model` of results.json."""
        return {
            "name": self.name,
            "path": str(self.path),
            "parameters": sum(x.numel() for x in self.model.parameters()),
            "vocabulary": self.vocab_size,
            "context_limit": self.context_limit,
            "device": str(self.device),
            "fingerprint": self.fingerprint,
        }

    @cached_property
    def _end_ids(self) -> list[int]:
        ids: set[int] = set()
        configured = self.model.generation_config.eos_token_id if self.model.generation_config else None
        for entry in (configured, self.model.config.get_text_config().eos_token_id):
            ids |= set(entry if isinstance(entry, (list, tuple)) else [] if entry is None else [entry])
        if self.is_ours and has_tokenizer(self.tokenizer_folder):
            ids.add(self.tokenizer.eos_id)
        return sorted(ids)

    @cached_property
    def _scorer(self) -> Scorer:
        return Scorer(self.model, self.context_limit, whole=self.is_length_dependent)

    @cached_property
    def _generator(self) -> Generator:
        return Generator(self.model, self._end_ids, self.context_limit, whole=self.is_length_dependent)


def open_model(path: Path, device: str = "auto", precision: Precision = "auto", name: str | None = None) -> EvalModel:
    """Open the model in a folder. Nothing is downloaded, and no code of the folder is run.

    Args:
        path: folder of a run, finished or not, of an export, or of any causal model that transformers knows.
        device: "cpu", "cuda", ...; "auto" takes a GPU if there is one.
        precision: of the weights; "auto": as they were saved.
        name: what tables call the model; by default the name of the folder.
    """
    run = Run.around(path)
    dtype = None if precision == "auto" else getattr(torch, precision)
    if run is None and _model_type(path) != SDMConfig.model_type:
        model: Any = load_foreign_model(path, dtype)
        folder = path
    else:
        saved = SavedModel(path)
        model, folder = saved.load(), saved.folder
    if precision != "auto":
        model = model.to(getattr(torch, precision))
    with explained(f"cannot move {path} to --device {device}"):
        model = model.to(default_device() if device == "auto" else device)
    return EvalModel(name or path.resolve().name, path, model, folder, run)


def default_device() -> str:
    """Return a GPU if there is one, under torchrun that of this process; else "cpu"."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"


def _model_type(path: Path) -> str | None:
    if not (path / CONFIG).is_file():
        raise UserError(f"{str(path)!r} is neither a run's folder nor a model's: it has no {CONFIG}")
    return read_json(path / CONFIG).get("model_type")


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


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

    def __init__(self, tokenizer: PreTrainedTokenizerBase, start: str) -> None:
        self._tokenizer = tokenizer
        self.eos_id = cast(int, tokenizer.convert_tokens_to_ids(start))

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
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files."""
        self._tokenizer.save_pretrained(folder)
