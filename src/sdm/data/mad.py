"""The tasks of "Mechanistic Design and Scaling of Hybrid Architectures" (MAD) as its benchmark defines them.

The last tokens of a vocabulary are special; in the recall tasks the lower half of what is left are keys, the upper half
values, and noise follows them. Recall is trained on every next token of a row, as language models are, and measured, on
held-out rows, on the values of keys that came before. Compression is the one task that differs: see there.

A task is a function of a random generator and whether the row is for training, to one row. A row of the training set is
a function of its number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

import torch

from sdm.data.batch import IGNORED, Batch, BatchSource
from sdm.data.randomness import Permutation, fingerprint_of, hash_of
from sdm.errors import DataError, check_not_negative, check_one_of, check_size

# The tokens of a row, and a dictionary from positions to what they predict.
RowTokens = tuple[list[int], dict[int, int]]

MADTask = Literal[
    "in-context-recall",
    "fuzzy-in-context-recall",
    "noisy-in-context-recall",
    "selective-copying",
    "memorization",
    "compression",
]


@dataclass(frozen=True)
class MADBaseline:
    """The easiest setting of a task of MAD, from which its benchmark varies one value at a time."""

    vocab_size: int
    sequence_length: int
    num_examples: int


MAD_BASELINES: dict[str, MADBaseline] = {
    "in-context-recall": MADBaseline(16, 128, 12_800),
    "fuzzy-in-context-recall": MADBaseline(16, 128, 12_800),
    "noisy-in-context-recall": MADBaseline(32, 128, 12_800),
    "selective-copying": MADBaseline(16, 256, 12_800),
    "memorization": MADBaseline(256, 32, 256),
    "compression": MADBaseline(16, 32, 12_800),
}


@dataclass(frozen=True)
class MADTaskConfig:
    """The tasks of "Mechanistic Design and Scaling of Hybrid Architectures" (MAD)."""

    task: MADTask = "in-context-recall"
    """Which of the six."""
    vocab_size: int | None = None
    """Different tokens, special ones and noise included; None: the baseline's."""
    sequence_length: int | None = None
    """Tokens of a row as MAD counts them; None: the baseline's."""
    num_examples: int | None = None
    """Rows of the training set, which repeat in a new order in every epoch; None: the baseline's."""
    noise_fraction: float = 0.2
    """noisy-in-context-recall: how likely a pair is replaced by two tokens of noise."""
    noise_vocab_size: int = 16
    """noisy-in-context-recall: how many of the tokens are noise."""
    num_copied: int = 16
    """selective-copying: tokens to copy."""
    key_motif: int = 3
    """fuzzy-in-context-recall: most tokens of a key; keys of held-out rows all have so many."""
    value_motif: int = 3
    """fuzzy-in-context-recall: most tokens of a value."""
    batch_size: int = 128
    """Rows of a step, over all ranks and accumulated batches."""
    seed: int = 0
    """Decides every row, and in memorization the values."""

    def open(self, split: str, total_steps: int | None) -> BatchSource:
        """Return the batches of a split."""
        return MAD(self, split)

    def __post_init__(self) -> None:
        check_one_of(get_args(MADTask), task=self.task)
        check_size(
            num_examples=self.examples,
            noise_vocab_size=self.noise_vocab_size,
            num_copied=self.num_copied,
            key_motif=self.key_motif,
            value_motif=self.value_motif,
            batch_size=self.batch_size,
        )
        check_not_negative(seed=self.seed)
        if not 0 <= self.noise_fraction < 1:
            raise DataError(f"noise_fraction must be at least 0 and below 1, got {self.noise_fraction}")
        noise = self.noise_vocab_size if self.task == "noisy-in-context-recall" else 0
        if self.vocabulary - noise < 5:
            raise DataError(f"vocab_size must leave 5 tokens beside the noise, got {self.vocabulary}")
        if self.length < 4 or self.length % 2:
            raise DataError(f"sequence_length must be even and at least 4, got {self.length}")
        if self.task == "selective-copying" and self.length <= 2 * self.num_copied + 1:
            raise DataError(f"num_copied = {self.num_copied} needs a sequence_length above {2 * self.num_copied + 1}")
        if self.task == "fuzzy-in-context-recall":
            most = (self.vocabulary - 1) // 2
            if max(self.key_motif, self.value_motif) > most:
                raise DataError(f"key_motif and value_motif must be at most {most}, the tokens that they have")
            if self.length < 4 * (self.key_motif + self.value_motif):
                raise DataError(f"key_motif and value_motif need a sequence_length of four of each, got {self.length}")

    @property
    def vocabulary(self) -> int:
        """Number of different tokens: `vocab_size`, or the baseline's."""
        return MAD_BASELINES[self.task].vocab_size if self.vocab_size is None else self.vocab_size

    @property
    def length(self) -> int:
        """Tokens of a row: `sequence_length`, or the baseline's."""
        return MAD_BASELINES[self.task].sequence_length if self.sequence_length is None else self.sequence_length

    @property
    def examples(self) -> int:
        """Rows of the training set: `num_examples`, or the baseline's."""
        return MAD_BASELINES[self.task].num_examples if self.num_examples is None else self.num_examples


def in_context_recall(config: MADTaskConfig, rng: Random, training: bool) -> RowTokens:
    """Pairs of a key and its value, which the row alone defines. The last key is one that came before."""
    return _recall(config, rng, training, content=config.vocabulary, noise_fraction=0)


def noisy_in_context_recall(config: MADTaskConfig, rng: Random, training: bool) -> RowTokens:
    """The same with noise in the place of some pairs; one of them and the last are always pairs."""
    return _recall(config, rng, training, config.vocabulary - config.noise_vocab_size, config.noise_fraction)


def fuzzy_in_context_recall(config: MADTaskConfig, rng: Random, training: bool) -> RowTokens:
    """In-context recall with keys and values of several different tokens, padded on the left.

    One pair is chosen first, stands somewhere in the row and comes again at its end. In training keys have any number
    of tokens; in held-out rows the largest.
    """
    padding = config.vocabulary - 1
    keys, values = range(padding // 2), range(padding // 2, padding)

    def motif(tokens: range, most: int, least: int = 1) -> tuple[int, ...]:
        return tuple(rng.sample(tokens, rng.randint(least, most)))

    def key() -> tuple[int, ...]:
        return motif(keys, config.key_motif, 1 if training else config.key_motif)

    last_key = key()
    value_of = {last_key: motif(values, config.value_motif)}
    last_size = len(last_key) + len(value_of[last_key])
    longest = config.key_motif + config.value_motif
    end = config.length - last_size - longest
    shown_from = rng.randrange(config.length - 2 * last_size)
    tokens: list[int] = []
    answers: list[int] = []
    seen: set[tuple[int, ...]] = set()

    def append(chosen: tuple[int, ...]) -> None:
        tokens.extend(chosen)
        value = value_of.setdefault(chosen, motif(values, config.value_motif))
        if chosen in seen:
            answers.extend(range(len(tokens), len(tokens) + len(value)))
        tokens.extend(value)
        seen.add(chosen)

    while len(tokens) < end:
        # At the latest now. (MAD's own rows now and then ask for a pair that they have not shown.)
        due = len(tokens) >= min(shown_from, end - longest)
        append(last_key if due and last_key not in seen else key())
    append(last_key)
    missing = config.length + 1 - len(tokens)
    return _next_tokens([padding] * missing + tokens, [missing + answer for answer in answers], training)


def selective_copying(config: MADTaskConfig, rng: Random, training: bool) -> RowTokens:
    """Tokens among blanks, a copy token, then blanks at which the tokens are to be said in their order."""
    copy, blank = config.vocabulary - 1, config.vocabulary - 2
    content = [rng.randrange(blank) for _ in range(config.num_copied)]
    blanks_before = [0] * config.num_copied
    for _ in range(config.length - 2 * config.num_copied - 1):
        blanks_before[rng.randrange(config.num_copied)] += 1
    tokens: list[int] = []
    for blanks, token in zip(blanks_before, content, strict=True):
        tokens += [blank] * blanks + [token]
    tokens.append(copy)
    targets = dict(enumerate(content, len(tokens)))
    return tokens + [blank] * config.num_copied, targets


def memorization(config: MADTaskConfig, rng: Random, training: bool) -> RowTokens:
    """Keys, each followed by a token at which its value is predicted. Every key has a value of its own in all rows, and
    no row shows it: it can only be learned."""
    insert = config.vocabulary - 1
    values = list(range(insert // 2, insert))
    Random(hash_of(config.seed, "memorized")).shuffle(values)
    keys = [rng.randrange(insert // 2) for _ in range(config.length // 2)]
    tokens = [token for key in keys for token in (key, insert)]
    return tokens, {2 * i + 1: values[key] for i, key in enumerate(keys)}


def compression(config: MADTaskConfig, rng: Random, training: bool) -> RowTokens:
    """Random tokens, then compression tokens, at which they are to be said in their order.

    MAD has one compression token, and a decoder of its own that rebuilds all tokens from the output there. A language
    model has no such decoder: it says the tokens itself, and one with attention may look back. The content is MAD's,
    the result is not comparable.
    """
    token = config.vocabulary - 1
    content = [rng.randrange(token) for _ in range(config.length - 1)]
    return content + [token] * len(content), dict(enumerate(content, len(content)))


TASKS: dict[str, Callable[[MADTaskConfig, Random, bool], RowTokens]] = {
    "in-context-recall": in_context_recall,
    "fuzzy-in-context-recall": fuzzy_in_context_recall,
    "noisy-in-context-recall": noisy_in_context_recall,
    "selective-copying": selective_copying,
    "memorization": memorization,
    "compression": compression,
}


class MAD(BatchSource):
    """A `BatchSource` of one task. The training set repeats in a new order in every epoch; held-out rows do not."""

    num_steps = None

    def __init__(self, config: MADTaskConfig, split: str = "train") -> None:
        self.config, self.split = config, split

    @property
    def batch_size(self) -> int:
        """Rows of a step over all ranks."""
        return self.config.batch_size

    @property
    def fingerprint(self) -> str:
        """A checksum of the configuration and the split."""
        return fingerprint_of(self.config, self.split)

    @property
    def sequence_length(self) -> int:
        """Tokens that a model sees. The last one of a recall row is only predicted."""
        task, length = self.config.task, self.config.length
        if task == "compression":
            return 2 * (length - 1)
        return length - 1 if task in ("in-context-recall", "noisy-in-context-recall") else length

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: token ids are below it."""
        return self.config.vocabulary

    def batch(self, step: int, rows: Sequence[int]) -> Batch:
        """Return the chosen rows of a step."""
        drawn = [self._row(step, number) for number in rows]
        shape = (len(drawn), self.sequence_length)
        input_ids = torch.tensor([tokens for tokens, _ in drawn], dtype=torch.int64)
        targets = [[wanted.get(place, IGNORED) for place in range(len(tokens))] for tokens, wanted in drawn]
        return Batch(input_ids.view(shape), torch.tensor(targets, dtype=torch.int64).view(shape))

    def _row(self, step: int, number: int) -> RowTokens:
        config, training = self.config, self.split == "train"
        place: tuple[int, ...] = (step, number)
        if training:
            epoch, example = divmod(step * config.batch_size + number, config.examples)
            place = (Permutation(config.examples, config.seed, "order", epoch)[example],)
        return TASKS[config.task](config, Random(hash_of(config.seed, "mad", self.split, *place)), training)


def _recall(config: MADTaskConfig, rng: Random, training: bool, content: int, noise_fraction: float) -> RowTokens:
    value_of: dict[int, int] = {}
    tokens: list[int] = []
    answers: list[int] = []
    pairs = config.length // 2 - 1
    always_pair = rng.randrange(pairs)
    for i in range(pairs):
        if i != always_pair and rng.random() < noise_fraction:
            tokens += (content + rng.randrange(config.noise_vocab_size) for _ in range(2))
            continue
        key = rng.randrange(content // 2)
        if key in value_of:
            answers.append(len(tokens) + 1)
        tokens += (key, value_of.setdefault(key, rng.randrange(content // 2, content)))
    key = rng.choice(list(value_of))
    answers.append(len(tokens) + 1)
    return _next_tokens([*tokens, key, value_of[key]], answers, training)


def _next_tokens(tokens: list[int], answers: Iterable[int], training: bool) -> RowTokens:
    """A row whose tokens predict the next one: all of them in training, else those before the places of answers."""
    places = range(1, len(tokens)) if training else answers
    return tokens[:-1], {place - 1: tokens[place] for place in places}
