"""What a task makes: a prompt of a wanted length and the answers that it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from sdm.errors import UserError


@dataclass(frozen=True)
class Sample:
    """One question about one context."""

    task: str
    length: int
    """Tokens that the prompt and the answer may take together."""
    index: int
    question: str
    """The prompt up to where the answer begins."""
    answer_prefix: str
    """The beginning of the answer, given to the model so that it goes on with what is scored."""
    answers: tuple[str, ...]
    """What the metric looks for."""
    prompt_tokens: int
    new_tokens: int
    """Tokens that the model may generate."""

    @property
    def prompt(self) -> str:
        return self.question + self.answer_prefix

    def record(self) -> dict[str, Any]:
        """A line of JSON with the names that RULER's own files have, and this sample's place."""
        return {
            "task": self.task,
            "max_length": self.length,
            "index": self.index,
            "input": self.question,
            "answer_prefix": self.answer_prefix,
            "outputs": list(self.answers),
            "length": self.prompt_tokens + self.new_tokens,
            "tokens_to_generate": self.new_tokens,
        }


class Draft(Protocol):
    """A sample before its length is known: everything is drawn but how much haystack there is.

    The same draft gives the same prompt for the same amount, whatever was asked before.
    """

    @property
    def answers(self) -> tuple[str, ...]: ...

    @property
    def answer_prefix(self) -> str: ...

    def question(self, units: int, filler: str = "") -> str:
        """With so many units of haystack (sentences, needles, list entries, documents), from zero on, and a piece
        of the filler behind them."""

    def filler(self, units: int) -> str:
        """Text that may follow so many units and can be cut anywhere. It is longer than the next unit."""


class TooShort(UserError):
    """A length does not hold a task, however small its haystack."""

    def __init__(self, task: str, length: int, smallest: int) -> None:
        super().__init__(f"{task} does not fit into {length} tokens: with this tokenizer it takes at least {smallest}")
        self.task, self.length, self.smallest = task, length, smallest
