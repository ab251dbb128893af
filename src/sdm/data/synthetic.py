"""Six synthetic tasks of this project's own, in the manner of MAD's; `sdm.data.mad` has the published ones.

Content tokens come first: in the recall tasks the lower half are keys, the upper half values. Then come a marker and a
blank, then, for noisy recall, the noise. A task is a function from a random generator to one row.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from sdm.data.randomness import hash_of
from sdm.data.rows import DrawnRows, RowTokens
from sdm.data.task_config import SyntheticConfig

NUM_NOISE = 16


def in_context_recall(config: SyntheticConfig, rng: Random) -> RowTokens:
    """Pairs of a key and its value, which the row alone defines. A key that comes again predicts its value."""
    return _recall(config, rng, noise=0)


def noisy_recall(config: SyntheticConfig, rng: Random) -> RowTokens:
    """In-context recall with tokens between the pairs that mean nothing."""
    return _recall(config, rng, noise=round(config.noise * config.length))


def fuzzy_recall(config: SyntheticConfig, rng: Random) -> RowTokens:
    """In-context recall whose keys and values are several tokens long. All tokens of a value are predicted."""
    half = config.content // 2
    keys = _prefix_free_motifs(half, half, config.max_motif, rng)
    values = [tuple(half + token for token in _motif(half, config.max_motif, rng)) for _ in keys]
    tokens: list[int] = []
    targets: dict[int, int] = {}
    seen = set()
    while True:
        pair = rng.randrange(len(keys))
        if len(tokens) + len(keys[pair]) + len(values[pair]) > config.length:
            break
        tokens += keys[pair]
        if pair in seen:
            targets.update({len(tokens) - 1 + i: token for i, token in enumerate(values[pair])})
        tokens += values[pair]
        seen.add(pair)
    return tokens + [_blank(config)] * (config.length - len(tokens)), targets


def selective_copying(config: SyntheticConfig, rng: Random) -> RowTokens:
    """A few tokens among blanks; then markers, at which the tokens are to be said in their order."""
    content = [rng.randrange(config.content) for _ in range(config.num_copied)]
    tokens = [_blank(config)] * (config.length - config.num_copied)
    for place, token in zip(sorted(rng.sample(range(len(tokens)), len(content))), content, strict=True):
        tokens[place] = token
    targets = {len(tokens) + i: token for i, token in enumerate(content)}
    return tokens + [_marker(config)] * len(content), targets


def compression(config: SyntheticConfig, rng: Random) -> RowTokens:
    """Random tokens, then markers, at which all of them are to be said in their order.

    In MAD a decoder of its own rebuilds the tokens from the output at one marker. A batch has no such decoder, so that
    a model with attention may look back here: the two are not comparable.
    """
    content = [rng.randrange(config.content) for _ in range(config.length // 2)]
    targets = {len(content) + i: token for i, token in enumerate(content)}
    return content + [_marker(config)] * (config.length - len(content)), targets


def memorization(config: SyntheticConfig, rng: Random) -> RowTokens:
    """Keys, each followed by a marker at which its value is predicted. Keys keep their values in all rows, and no row
    shows a value: they can only be learned."""
    half = config.content // 2
    value_of = Random(hash_of(config.seed, "memorization")).choices(range(half, config.content), k=half)
    keys = [rng.randrange(half) for _ in range(config.length // 2)]
    tokens = [token for key in keys for token in (key, _marker(config))]
    targets = {2 * i + 1: value_of[key] for i, key in enumerate(keys)}
    return tokens + [_blank(config)] * (config.length - len(tokens)), targets


TASKS: dict[str, Callable[[SyntheticConfig, Random], RowTokens]] = {
    "in-context-recall": in_context_recall,
    "fuzzy-recall": fuzzy_recall,
    "noisy-recall": noisy_recall,
    "selective-copying": selective_copying,
    "compression": compression,
    "memorization": memorization,
}


class Synthetic(DrawnRows):
    """The task of a configuration."""

    @property
    def sequence_length(self) -> int:
        return self.config.length

    @property
    def vocab_size(self) -> int:
        return self.config.content + 2 + (NUM_NOISE if self.config.task == "noisy-recall" else 0)

    def row(self, step: int, number: int) -> RowTokens:
        return TASKS[self.config.task](self.config, Random(hash_of(self.config.seed, self.split, step, number)))


def _recall(config: SyntheticConfig, rng: Random, noise: int) -> RowTokens:
    half = config.content // 2
    value_of = [rng.randrange(half, config.content) for _ in range(half)]
    pairs = (config.length - noise) // 2
    noise = config.length - 2 * pairs
    is_pair = [True] * pairs + [False] * noise
    if config.task == "noisy-recall":
        rng.shuffle(is_pair)
    tokens: list[int] = []
    targets: dict[int, int] = {}
    seen = set()
    for pair in is_pair:
        if not pair:
            filler = _blank(config)
            tokens.append(filler + 1 + rng.randrange(NUM_NOISE) if config.task == "noisy-recall" else filler)
            continue
        key = rng.randrange(half)
        if key in seen:
            targets[len(tokens)] = value_of[key]
        seen.add(key)
        tokens += (key, value_of[key])
    return tokens, targets


def _motif(num_tokens: int, max_length: int, rng: Random) -> tuple[int, ...]:
    return tuple(rng.randrange(num_tokens) for _ in range(rng.randint(1, max_length)))


def _prefix_free_motifs(count: int, num_tokens: int, max_length: int, rng: Random) -> list[tuple[int, ...]]:
    """At most `count` keys, none the beginning of another: the end of a key can be told without looking ahead."""
    motifs: list[tuple[int, ...]] = []
    for _ in range(20 * count):
        new = _motif(num_tokens, max_length, rng)
        if len(motifs) < count and not any(new[: len(old)] == old or old[: len(new)] == new for old in motifs):
            motifs.append(new)
    return motifs


def _marker(config: SyntheticConfig) -> int:
    return config.content


def _blank(config: SyntheticConfig) -> int:
    return config.content + 1
