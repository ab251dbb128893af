"""A causal language model with its tokenizer, as measurements use it: of a run, an export or any folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sdm.data.tokenization import Tokenizer, load_tokenizer
from sdm.errors import UserError
from sdm.evaluation.foreign import has_tokenizer, open_tokenizer
from sdm.evaluation.inference import CACHES, Generator, Past, Scorer, Stream, cache_tensors, likeliest
from sdm.files import explained, read_json
from sdm.models import SDMConfig, SDMForCausalLM, cost
from sdm.models.fingerprint import checksum
from sdm.models.saved_folder import CONFIG, no_progress_bar
from sdm.run import Run
from sdm.run.model import SavedModel

Precision = Literal["auto", "float32", "bfloat16", "float16"]


class EvalModel:
    """A model that can be asked for likelihoods, the likeliest tokens and answers, and its tokenizer.

    Token ids are plain lists or tensors on any device. A text begins a document: what the model sees before it is
    `start_id`.
    """

    def __init__(self, name: str, path: Path, model: Any, tokenizer_folder: Path, run: Run | None) -> None:
        self.name, self.path, self.run = name, path, run
        self.model: Any = model.eval()
        self.tokenizer_folder = tokenizer_folder

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def is_ours(self) -> bool:
        return isinstance(self.model, SDMForCausalLM)

    @property
    def vocab_size(self) -> int:
        """Ids that the model takes; the tokenizer may have fewer."""
        return self.model.get_input_embeddings().weight.shape[0]

    @property
    def context_limit(self) -> int | None:
        """Tokens of the longest stream that the model takes; None if there is no limit."""
        config = self.model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        return limit if isinstance(limit, int) and 0 < limit < 2**40 else None

    def check_length(self, tokens: int, what: str) -> None:
        """Raise unless the model takes a stream of so many tokens. `what` names it and what to do about it."""
        limit = self.context_limit
        if limit is not None and tokens > limit:
            raise UserError(f"{self.name} takes at most {limit} tokens, got {tokens}: {what}")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, or an error that says that there is none."""
        if not has_tokenizer(self.tokenizer_folder):
            raise UserError(
                f"{self.name} has no tokenizer in {self.tokenizer_folder}, which measuring on text needs; copy it "
                "there, or take a measurement of token ids, such as recall"
            )
        # Runs know theirs by its checksums, and by tokens that they have in the cache.
        own = self.is_ours and (self.tokenizer_folder / "tokenizer.json").is_file()
        found = load_tokenizer(self.tokenizer_folder) if own else open_tokenizer(self.tokenizer_folder)
        if found.vocab_size > self.vocab_size:
            raise UserError(
                f"the tokenizer in {self.tokenizer_folder} has {found.vocab_size} ids, but {self.name} takes "
                f"{self.vocab_size}: it is another model's"
            )
        return found

    @property
    def start_id(self) -> int:
        """The token before a document."""
        return self.tokenizer.eos_id

    def encode(self, text: str) -> list[int]:
        """The ids of a text; nothing is added, and the names of special tokens are text like any other."""
        return self.tokenizer.encode(text)

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a text that begins a document."""
        return [self.start_id, *self.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text without special tokens."""
        return self.tokenizer.decode(ids)

    def nll(
        self, input_ids: Tensor, targets: Tensor, past: Past | None = None, carry: bool = False
    ) -> tuple[Tensor, Past | None]:
        """[B,T] float32 nats of each target after each token of input_ids [B,T], on the CPU, zero where the target is
        -100; and with `carry` what the next tokens of the rows go on from."""
        found, after = self._scorer.nll(input_ids.to(self.device), targets.to(self.device), past, carry)
        return found.cpu(), after

    def stream(self) -> Stream:
        """Rows of tokens to read as generating reads them."""
        return Stream(self.model, self._scorer.continues)

    def predict(self, input_ids: Tensor, wanted: Tensor) -> Tensor:
        """The likeliest next token [n] at the places of input_ids [B,T] where `wanted` [B,T] is True, on the CPU."""
        return likeliest(self.model, input_ids, wanted)

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop: Sequence[str] = ()
    ) -> list[list[int]]:
        """The likeliest continuation of each prompt, without what ends it; each the same as by itself.

        Args:
            prompts: token ids, of different lengths; they are computed side by side.
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
            return any(one in text for one in stop)

        return self._generator(prompts, max_new_tokens, stopped if stop else None)

    def answer(self, prompts: Sequence[str], max_new_tokens: int, stop: Sequence[str] = ()) -> list[str]:
        """The same from text to text; answers are cut before the first of `stop`."""
        texts = map(self.decode, self.generate([self.encode_prompt(text) for text in prompts], max_new_tokens, stop))
        return [text[: min((text.find(one) for one in stop if one in text), default=None)] for text in texts]

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
        """What decides the numbers: the weights, in their precision, and the tokenizer."""
        tensors = self.model.state_dict()
        tokenizer = self.tokenizer.fingerprint if has_tokenizer(self.tokenizer_folder) else None
        return {
            "architecture": self.model.config.model_type,
            "weights": checksum(tensors),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "tokenizer": tokenizer,
        }

    def describe(self) -> dict[str, Any]:
        """For results."""
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
    def _scorer(self) -> Scorer:
        return Scorer(self.model)

    @cached_property
    def _generator(self) -> Generator:
        known: set[int] = set()
        configured = self.model.generation_config.eos_token_id if self.model.generation_config else None
        for ids in (configured, self.model.config.get_text_config().eos_token_id):
            known |= set(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
        if self.is_ours and has_tokenizer(self.tokenizer_folder):
            known.add(self.tokenizer.eos_id)
        return Generator(self.model, sorted(known))


def open_model(path: Path, device: str = "auto", precision: Precision = "auto", name: str | None = None) -> EvalModel:
    """The model in a folder: a run's, finished or not, an export's, or that of any causal LM that transformers knows.
    Nothing is downloaded, and no code of the folder is run."""
    run = Run.around(path)
    ours = run is not None or _model_type(path) == SDMConfig.model_type
    if ours:
        saved = SavedModel(path)
        model: Any = saved.load()
        folder = saved.folder
    else:
        model, folder = _load_any(path, precision), path
    if precision != "auto":
        model = model.to(getattr(torch, precision))
    with explained(f"cannot move {path} to --device {device}"):
        model = model.to(default_device() if device == "auto" else device)
    return EvalModel(name or path.resolve().name, path, model, folder, run)


def default_device() -> str:
    """A GPU if there is one; under torchrun, that of this process."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"


def _model_type(path: Path) -> str | None:
    if not (path / CONFIG).is_file():
        raise UserError(f"{str(path)!r} is neither a run's folder nor a model's: it has no {CONFIG}")
    return read_json(path / CONFIG).get("model_type")


def _load_any(path: Path, precision: Precision) -> Any:
    from transformers import AutoModelForCausalLM

    loaded: Any
    with explained(f"cannot load the model in {path}"), no_progress_bar():
        loaded = AutoModelForCausalLM.from_pretrained(
            path,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,  # other formats are pickles
            dtype=precision if precision == "auto" else getattr(torch, precision),
            output_loading_info=True,
        )
        model, found = loaded
        for fault in ("missing_keys", "mismatched_keys"):  # transformers would fill them with random numbers
            if found.get(fault):
                names = sorted(map(str, found[fault]))
                raise ValueError(f"{fault.removesuffix('_keys')} weights: {', '.join(names[:5])}")
    return model
