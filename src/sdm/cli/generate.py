"""`sdm generate MODEL`."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from sdm.cli.command import Command
from sdm.errors import UserError
from sdm.files import explained
from sdm.signals import PostponedSignals

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from sdm.run.model import SavedModel


@dataclass(frozen=True)
class Generate(Command):
    """Continue a prompt, printing tokens as they come."""

    model: Annotated[Path, tyro.conf.Positional]
    """A run's folder or a model's folder."""
    prompt: str | None = None
    """Text to continue; - reads it from standard input. May be left out when a state file is resumed."""
    tokens: tuple[int, ...] = ()
    """The prompt as token ids, for a model without a tokenizer; ids are printed then."""
    state: Path | None = None
    """State file: resumed from if it exists, and written at the end."""
    max_new_tokens: int = 64
    """How many tokens to generate at most."""
    greedy: bool = False
    """Take the likeliest token, which is what a temperature of 0 does; refused together with a temperature."""
    temperature: float = 0.0
    """0 takes the likeliest token; otherwise tokens are sampled, and the prompt is printed in front of them."""
    top_k: int = 0
    """Sample among so many tokens only; 0: among all."""
    weights: Literal["float32", "bfloat16", "int8"] = "float32"
    """How to hold the weights of linear layers: as they are, or rounded, so that a token has less to read."""
    seed: int = 0
    """Of the sampling."""
    json: bool = False
    """Print one JSON object at the end: prompt, text, tokens, finish_reason."""

    def run(self) -> None:
        """Generate, print the continuation and write the state file if one is named."""
        import torch
        from transformers import TextStreamer

        from sdm.models import MemoryState
        from sdm.models.causal_lm import empty_cache
        from sdm.models.decoding import eos_tokens
        from sdm.run.model import SavedModel

        self.check_options()
        saved = SavedModel(self.model)
        model = load_for_decoding(saved, self.weights)
        tokenizer = None if self.tokens else load_tokenizer(saved.folder)
        resumed = None
        if self.state is not None and self.state.exists():
            with explained("cannot resume --state"):
                resumed = MemoryState.load(self.state, model)
        prompt = list(self.tokens)
        given = self.prompt
        if given == "-":
            with explained("cannot read the prompt from standard input"):
                given = sys.stdin.read()
        if given is not None:
            if tokenizer is None:
                raise UserError(f"{str(self.model)!r} has no tokenizer; give the prompt as token ids with --tokens")
            with explained("cannot tokenize --prompt"):
                prompt = tokenizer(given, add_special_tokens=resumed is None)["input_ids"]
        ids = ([] if resumed is None else list(resumed.pending)) + prompt
        if not ids:
            raise UserError("nothing to continue: give --prompt or --tokens, or resume a --state")
        cache = empty_cache(model) if resumed is None else resumed.cache(model)
        self.check_tokens(model.config, prompt)
        sampling: dict[str, Any] = {"do_sample": False}
        if self.temperature > 0:
            sampling = {"do_sample": True, "temperature": self.temperature, "top_k": self.top_k}
        torch.manual_seed(self.seed)
        if sampling["do_sample"] and given is not None and not self.json:
            print(given, end="", flush=True)
        # Without a state there is nothing to save: a signal need not wait for the token that is being computed.
        signals = PostponedSignals()
        with torch.inference_mode(), contextlib.nullcontext() if self.state is None else signals:
            output = model.generate(
                torch.tensor([ids]),
                # A mask as long as the whole stream tells generate() that the ids are only its end.
                attention_mask=torch.ones(1, cache.get_seq_length() + len(ids), dtype=torch.int64),
                past_key_values=cache,
                max_new_tokens=self.max_new_tokens,
                streamer=None if tokenizer is None or self.json else TextStreamer(tokenizer, skip_prompt=True),
                stopping_criteria=[lambda ids, scores: torch.full(ids.shape[:1], signals.received is not None)],
                **sampling,
            )
            new = output[0, len(ids) :].tolist()
            if self.json:
                print(json.dumps(self.report(given, new, tokenizer, eos_tokens(model))))
            elif tokenizer is None:
                print(*new)
            if self.state is not None:
                # The model has not seen the last token yet: it comes first when the stream is resumed.
                MemoryState.from_cache(model, cache, pending=new[-1:]).save(self.state)
        if signals.received is not None:
            print(f"stopped: {signals.received} after {len(new)} tokens; {self.state} is saved", file=sys.stderr)
            raise SystemExit(signals.received.exit_code)

    def report(
        self, prompt: str | None, new: list[int], tokenizer: PreTrainedTokenizerBase | None, eos: tuple[int, ...]
    ) -> dict[str, Any]:
        """Return what --json prints."""
        reason = "eos" if new[-1] in eos else "length" if len(new) == self.max_new_tokens else "signal"
        text = None if tokenizer is None else tokenizer.decode(new, skip_special_tokens=True)
        return {"prompt": prompt, "text": text, "tokens": new, "finish_reason": reason}

    def check_options(self) -> None:
        """Refuse what cannot work before anything is loaded."""
        if self.tokens and self.prompt is not None:
            raise UserError("give either --prompt or --tokens")
        if self.greedy and self.temperature != 0:
            raise UserError(f"--greedy and --temperature {self.temperature} exclude each other")
        if self.max_new_tokens < 1:
            raise UserError(f"--max-new-tokens must be at least 1, got {self.max_new_tokens}")
        # Below that, scores divided by the temperature overflow.
        if self.temperature != 0 and not 1e-6 <= self.temperature < math.inf:
            raise UserError(f"--temperature must be 0 or a number from 1e-6 on, got {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"--top-k must be at least 1, or 0 for all tokens, got {self.top_k}")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"--seed must be within 0 ... 2^63 - 1, got {self.seed}")
        if self.state is not None:
            # A state that turns out not to be writable in the end would be lost.
            if self.state.exists() and not self.state.is_file():
                raise UserError(f"--state must be a file, got {str(self.state)!r}")
            if not (self.state.parent.is_dir() and os.access(self.state.parent, os.W_OK)):
                raise UserError(
                    f"--state must be in an existing folder that can be written to, got {str(self.state)!r}"
                )

    def check_tokens(self, config: PreTrainedConfig, prompt: list[int]) -> None:
        """Refuse tokens that the model does not know."""
        for token in prompt:
            if not 0 <= token < config.vocab_size:
                option = "--tokens" if self.tokens else "--prompt"
                raise UserError(f"{option} must be of tokens within 0 ... {config.vocab_size - 1}, got {token}")


def load_for_decoding(saved: SavedModel, weights: str) -> Any:
    """The model, with linear layers that are fast for single tokens."""
    import torch

    import sdm

    model = saved.load()
    if weights == "float32" and model.dtype != torch.float32:
        return model
    with explained(f"cannot hold --weights as {weights}"):
        return sdm.optimize_for_decoding(model, weights)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside the model, or None."""
    from transformers import AutoTokenizer

    if not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json")):
        return None
    with explained(f"cannot load the tokenizer in {folder}"):
        return AutoTokenizer.from_pretrained(folder)
