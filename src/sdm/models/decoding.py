"""Choosing the next token of one stream, and turning tokens into text as they come."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"  # what tokenizers write for the first bytes of a character


class Piece(NamedTuple):
    """One generated token, and the text that it completes: empty within a character, and without a tokenizer."""

    token: int
    text: str


@dataclass(frozen=True)
class DecodingOptions:
    """When to stop, and how to sample."""

    max_new_tokens: int = 256
    """Tokens to generate at most."""
    temperature: float = 0.0
    """0 takes the likeliest token; otherwise tokens are sampled from the scores divided by it."""
    top_k: int = 0
    """Sample among the likeliest k tokens; 0: among all."""
    top_p: float = 1.0
    """Sample among the likeliest tokens that make up this probability together."""
    seed: int | None = None
    """Seed of the sampling; None draws one."""
    stop: tuple[str, ...] = ()
    """Strings that end the generation. They are not part of the text."""

    def __post_init__(self) -> None:
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be a positive integer, got {self.max_new_tokens!r}")
        # Below that, scores divided by the temperature overflow.
        if self.temperature != 0 and not 1e-6 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or a number from 1e-6 on, got {self.temperature}")
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k must be an integer of at least 1, or 0 for all tokens, got {self.top_k!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be within 0 (exclusive) ... 1, got {self.top_p}")
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop must be strings that are not empty, got {self.stop!r}")


class Decoding:
    """One generation: it takes the logits of a stream token by token until it is finished.

    Args:
        options: how to sample and when to stop.
        tokenizer: makes text of the tokens, or None.
        eos: tokens that end the generation.
    """

    def __init__(self, options: DecodingOptions, tokenizer: PreTrainedTokenizerBase | None, eos: Sequence[int]) -> None:
        if options.stop and tokenizer is None:
            raise ValueError("stop strings need a tokenizer; this session has none")
        self.options, self._eos = options, frozenset(eos)
        self._generator = torch.Generator()
        if options.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(options.seed)
        self._text = TextStream(tokenizer, options.stop)
        self._count = 0
        self.reason: str | None = None
        """Why it has finished: "eos", "stop" (a stop string) or "length"; None before."""

    def accept(self, logits: Tensor) -> Piece:
        """Choose the next token by the logits [V]."""
        token = choose(logits, self.options, self._generator)
        self._count += 1
        text = self._text.add(token)
        if token in self._eos:
            self.reason = "eos"
        elif self._text.stopped:
            self.reason = "stop"
        elif self._count == self.options.max_new_tokens:
            self.reason = "length"
        if self.reason is not None and self.reason != "stop":
            text += self._text.rest()
        return Piece(token, text)


def eos_tokens(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the tokens that end a text, of the generation configuration or of the model's."""
    for config in (getattr(model, "generation_config", None), model.config):
        tokens = getattr(config, "eos_token_id", None)
        if tokens is not None:
            return (tokens,) if isinstance(tokens, int) else tuple(tokens)
    return ()


def choose(logits: Tensor, options: DecodingOptions, generator: torch.Generator) -> int:
    """Return the likeliest token, or a sampled one."""
    if options.temperature == 0:
        return int(logits.argmax())
    scores = logits.detach().float().cpu() / options.temperature
    if 0 < options.top_k < len(scores):
        scores = scores.masked_fill(scores < scores.topk(options.top_k).values[-1], -math.inf)
    probability = scores.softmax(-1)
    if options.top_p < 1:
        ordered, place = probability.sort(descending=True)
        # The token that crosses the limit is the last one that may be drawn.
        ordered[ordered.cumsum(-1) - ordered >= options.top_p] = 0
        probability = torch.zeros_like(probability).scatter(0, place, ordered)
    return int(torch.multinomial(probability, 1, generator=generator))


class TextStream:
    """Turns tokens into text as they come. Text that may yet become a stop string is held back."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []
        self._shown = 0  # tokens whose text is complete
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Return the text that is certain now."""
        if self._tokenizer is None or self.stopped:
            return ""
        self._ids.append(token)
        before, now = self._decode(self._ids[: self._shown]), self._decode(self._ids)
        if now.endswith(INCOMPLETE):
            return ""
        # A few tokens stay: a tokenizer may write a token differently at the start of a text.
        self._ids, self._shown = self._ids[self._shown :], len(self._ids) - self._shown
        return self._let_go(now[len(before) :])

    def rest(self) -> str:
        """Return what was held back, at the end of the stream."""
        if self._tokenizer is None or self.stopped:
            return ""
        unfinished = self._decode(self._ids)[len(self._decode(self._ids[: self._shown])) :]
        self._shown = len(self._ids)
        text, self._held = self._held + unfinished, ""
        return text

    def _let_go(self, text: str) -> str:
        text = self._held + text
        ends = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _decode(self, ids: list[int]) -> str:
        if self._tokenizer is None or not ids:
            return ""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
