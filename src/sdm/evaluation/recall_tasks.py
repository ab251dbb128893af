"""The tasks that `sdm eval recall` asks: rows of tokens with answers that only the row, or training, can give.

A task has sizes, by which it gets harder: the number of pairs, or the length of a row. A row is a function of the size
and its number, and so the same for every model.

`text_needle` is a needle in a haystack of text, for language models: a number is told somewhere in a long text, and
asked for at its end. It is simpler than RULER's: one needle, one form of words, and the answer is right if every token
of it is the likeliest one, which takes one pass and no generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from sdm.data.batch import IGNORED, Batch
from sdm.data.config import CorpusConfig, DataConfig, NeedleConfig, RebindingConfig, RetrievalConfig, TaskConfig
from sdm.data.facts import Facts, FactsConfig
from sdm.data.mad import MAD, MADTask, MADTaskConfig
from sdm.data.mqar import MQAR, MQARTaskConfig
from sdm.data.needle import needle_rows
from sdm.data.randomness import generator_of, hash_of
from sdm.data.rebinding import rebinding_rows
from sdm.data.recall import RecallConfig, recall_batch
from sdm.data.retrieval import SHARES, SHORTEST_ROW, Retrieval
from sdm.data.sources import open_source
from sdm.errors import DataError, UserError, did_you_mean
from sdm.evaluation.eval_model import EvalModel
from sdm.run.config_file import to_json

PAIRS = (16, 32, 64, 128, 256, 512)
BOUND_PAIRS = (4, 8, 16, 32, 64, 128)
LENGTHS = tuple(64 * 2**step for step in range(12))
BEYOND = 4  # times the length that was trained on, to which needles are hidden
PUBLISHED_ROWS = {"mqar": 1000, "mad": 1280}  # held-out rows of the published comparisons
TEXT_NEEDLE, RETRIEVAL = "text-needle", "retrieval"

Axis = Literal["pairs to keep apart (K)", "tokens of a row", "facts"]


@dataclass(frozen=True)
class Row:
    """A row and its answers."""

    batch: Batch
    """One row."""
    depth: Tensor | None = None
    """Of each answer: how far into the row it stood, from 0 to 1."""
    former: Tensor | None = None
    """Of each answer: those that once were right."""


@dataclass(frozen=True)
class Size:
    """A size of a task."""

    number: int
    """Pairs, or tokens."""
    length: int
    """Tokens of a row."""
    answers: int
    """Of a row, on average."""


@dataclass(frozen=True)
class Task:
    """A task of recall: how its rows are made, and at which sizes."""

    name: str
    title: str
    vocab_size: int
    axis: Axis
    sizes: tuple[Size, ...]
    row: Callable[[Size, int], Row]
    data: dict[str, Any]
    """What identifies the rows."""
    rows: int | None = None
    """Rows at each size; None: as many as the wanted number of answers takes."""


def task_of(config: TaskConfig | RetrievalConfig, sizes: tuple[int, ...], seed: int) -> Task:
    """The task of a configuration, at the sizes given or its own."""
    return _TASKS[type(config)](config, sizes, seed)


def default_config(name: str) -> TaskConfig:
    """What a task is by itself, whatever a model was trained on."""
    if name == RETRIEVAL:
        raise UserError(f"--task {name} asks what a run of `sdm train retrieval` was trained on; this model is none")
    if name not in _DEFAULTS:
        choices = [*_DEFAULTS, TEXT_NEEDLE]
        raise UserError(f"--task: there is no task {name!r}; {did_you_mean(name, choices)}")
    return _DEFAULTS[name]


def name_of(config: DataConfig) -> str:
    """What a task is called."""
    if isinstance(config, CorpusConfig):
        return "text"
    if isinstance(config, RetrievalConfig):
        return RETRIEVAL
    if isinstance(config, MADTaskConfig):
        return f"mad-{config.task}"
    kinds: dict[type, str] = {
        RecallConfig: "recall",
        RebindingConfig: "rebinding",
        NeedleConfig: "needle",
        MQARTaskConfig: "mqar",
        FactsConfig: "facts",
    }
    return kinds[type(config)]


_CONFIGS: tuple[TaskConfig, ...] = (
    RecallConfig(),
    RebindingConfig(),
    NeedleConfig(),
    MQARTaskConfig(),
    FactsConfig(),
    *(MADTaskConfig(task) for task in get_args(MADTask)),
)
_DEFAULTS = {name_of(config): config for config in _CONFIGS}


def _recall(config: RecallConfig, sizes: tuple[int, ...], seed: int) -> Task:
    known = []
    for pairs in _allowed("recall", sizes, PAIRS, config.num_keys, "num_keys"):
        asked = min(config.num_queries or pairs, pairs)
        known.append(Size(pairs, 2 * pairs + asked, asked))
    single_row = replace(config, batch_size=1)

    def row(size: Size, number: int) -> Row:
        return Row(recall_batch(single_row, size.number, generator_of(seed, "eval recall", size.number, number)))

    keys = {"num_keys": config.num_keys, "num_values": config.num_values, "num_queries": config.num_queries}
    vocabulary = config.num_keys + config.num_values
    return Task("recall", "Associative recall", vocabulary, "pairs to keep apart (K)", tuple(known), row, keys)


def _rebinding(config: RebindingConfig, sizes: tuple[int, ...], seed: int) -> Task:
    times = config.num_bindings
    allowed = _allowed("rebinding", sizes, BOUND_PAIRS, config.num_keys, "num_keys")

    def row(size: Size, number: int) -> Row:
        generator = generator_of(seed, "eval rebinding", size.number, times, number)
        made = rebinding_rows(config, size.number, times, 1, generator)
        return Row(made.batch, former=made.former_BKJ[0])

    return Task(
        "rebinding",
        f"Recall of the last of {times} values",
        config.num_keys + config.num_values,
        "pairs to keep apart (K)",
        tuple(Size(pairs, pairs * (2 * times + 1), pairs) for pairs in allowed),
        row,
        {"num_keys": config.num_keys, "num_values": config.num_values, "num_bindings": times},
    )


def _needle(config: NeedleConfig, sizes: tuple[int, ...], seed: int) -> Task:
    own = [length for length in LENGTHS if length <= BEYOND * config.sequence_length]
    least = 3 * config.num_needles
    for length in sizes:
        if length < least:
            raise UserError(f"--sizes: a row of {config.num_needles} needles has at least {least} tokens, got {length}")
    lengths = sizes or tuple(length for length in own if length >= least) or (config.sequence_length,)

    def row(size: Size, number: int) -> Row:
        made = needle_rows(config, size.number, 1, generator_of(seed, "eval needle", size.number, number))
        return Row(made.batch, depth=made.depth_BK[0])

    names = ("num_needles", "num_keys", "num_values", "num_fillers")
    return Task(
        "needle",
        f"{config.num_needles} needles in a haystack of tokens",
        config.num_keys + config.num_values + config.num_fillers,
        "tokens of a row",
        tuple(Size(length, length, config.num_needles) for length in lengths),
        row,
        {name: getattr(config, name) for name in names},
    )


def _mqar(config: MQARTaskConfig, sizes: tuple[int, ...], seed: int) -> Task:
    lengths = {pairs: length for length, pairs in config.test_segments}
    unknown = [pairs for pairs in sizes if pairs not in lengths]
    if unknown:
        raise UserError(f"--sizes: MQAR is held out with {', '.join(map(str, lengths))} pairs, got {unknown[0]}")
    # Rows of a held-out batch are functions of its step, and the step of the segment.
    steps = {pairs: step for step, (_, pairs) in enumerate(config.test_segments)}
    source = MQAR(replace(config, seed=config.seed + seed - 1), "test")

    def row(size: Size, number: int) -> Row:
        return Row(source.batch(steps[size.number], [number]))

    data = {name: to_json(getattr(config, name)) for name in ("vocab_size", "power", "random_filler", "seed")}
    return Task(
        "mqar",
        "MQAR",
        config.vocab_size,
        "pairs to keep apart (K)",
        tuple(Size(pairs, lengths[pairs], pairs) for pairs in sizes or lengths),
        row,
        data | {"test_segments": to_json(config.test_segments)},
        rows=PUBLISHED_ROWS["mqar"],
    )


def _facts(config: FactsConfig, sizes: tuple[int, ...], seed: int) -> Task:
    """All facts that a model was trained on, in other rows."""
    for facts in sizes:
        if facts != config.num_facts:
            raise UserError(f"--sizes: the model was trained on num_facts = {config.num_facts} facts, got {facts}")
    source = Facts(config, "test")
    rows = -(-config.num_facts // config.asked)

    def row(size: Size, number: int) -> Row:
        step, place = divmod((seed - 1) * rows + number, config.batch_size)
        return Row(source.batch(step, [place]))

    data = {key: value for key, value in to_json(config).items() if key != "kind"}
    size = Size(config.num_facts, source.sequence_length, config.asked)
    return Task("facts", "Facts of training", source.vocab_size, "facts", (size,), row, data, rows)


def _retrieval(config: RetrievalConfig, sizes: tuple[int, ...], seed: int) -> Task:
    """Needles in text that are asked for one by one, of the generator of training; rows may be longer than its own."""
    lengths = sizes or tuple(config.sequence_length * 4**step for step in range(3))
    if min(lengths) < SHORTEST_ROW:
        raise UserError(f"--sizes: a row of {RETRIEVAL} has at least {SHORTEST_ROW} tokens, got {min(lengths)}")
    shares: dict[str, Any] = dict.fromkeys(SHARES, 0.0)
    configs = {
        length: replace(config, sequence_length=length, curriculum=False, batch_size=1, seed=seed, **shares)
        for length in lengths
    }
    sources = {length: Retrieval(single, "test") for length, single in configs.items()}

    def row(size: Size, number: int) -> Row:
        return Row(sources[size.number].batch(number, [0]))

    first = sources[lengths[0]]
    sized = tuple(Size(length, length, 1) for length in lengths)
    data = {"source": config.source, "ruler_phrasing": config.ruler_phrasing, "rows": first.fingerprint}
    title = "Needles in text, of the generator of training"
    return Task(RETRIEVAL, title, first.vocab_size, "tokens of a row", sized, row, data, rows=100)


def _held_out(config: MADTaskConfig, sizes: tuple[int, ...], seed: int) -> Task:
    """A task of one size: other rows of what was trained on."""
    if sizes:
        raise UserError(f"--sizes: {name_of(config)} has one size, that of its rows")
    source = MAD(config, "test")

    def row(size: Size, number: int) -> Row:
        # In memorization the seed is part of the task: only the place of a row may change.
        return Row(source.batch(seed - 1, [number]))

    answers = source.batch(seed - 1, range(8)).num_targets // 8
    data = {key: value for key, value in to_json(config).items() if key not in ("kind", "batch_size")}
    size = Size(source.sequence_length, source.sequence_length, max(answers, 1))
    title, rows = f"MAD: {config.task}", PUBLISHED_ROWS["mad"]
    return Task(name_of(config), title, source.vocab_size, "tokens of a row", (size,), row, data, rows)


_TASKS: dict[type, Callable[[Any, tuple[int, ...], int], Task]] = {
    RecallConfig: _recall,
    RebindingConfig: _rebinding,
    NeedleConfig: _needle,
    MQARTaskConfig: _mqar,
    MADTaskConfig: _held_out,
    FactsConfig: _facts,
    RetrievalConfig: _retrieval,
}


def _allowed(task: str, sizes: tuple[int, ...], own: tuple[int, ...], most: int, field: str) -> list[int]:
    """Numbers of pairs that there are keys for."""
    for pairs in sizes:
        if not 1 <= pairs <= most:
            raise UserError(f"--sizes: {task} has between 1 and {field} = {most} pairs, got {pairs}")
    return [*sizes] or [pairs for pairs in own if pairs <= most] or [most]


TEXT_LENGTHS = (256, 512, 1024, 2048)
DIGITS = 5
PLACES = ("harbour", "garden", "library", "castle", "bakery", "station", "museum", "mill", "chapel", "market")
TOLD, ASKED = "\nThe secret number of the {place} is {number}.\n", "\nThe secret number of the {place} is"
CHARACTERS = 2**22  # of haystack, at most


def text_needle(lm: EvalModel, source: str, sizes: tuple[int, ...], seed: int) -> Task:
    """The task in the tokens of a model."""
    limit = lm.context_limit
    lengths = sizes or tuple(length for length in TEXT_LENGTHS if limit is None or length <= limit) or TEXT_LENGTHS[:1]
    words = [lm.encode(text.format(place=PLACES[0], number="1" * DIGITS)) for text in (TOLD, ASKED)]
    least = 2 * sum(map(len, words))
    for length in lengths:
        if length < least:
            raise UserError(f"--sizes: needle and question take a text of {least} tokens at least, got {length}")
    hay = _haystack(lm, source, max(lengths))
    lengths = sizes or tuple(length for length in lengths if length <= len(hay)) or lengths[:1]
    if len(hay) < max(lengths):
        raise UserError(f"--haystack: {source!r} has {len(hay)} tokens, fewer than a row of {max(lengths)}")

    def row(size: Size, number: int) -> Row:
        rng = Random(hash_of(seed, TEXT_NEEDLE, size.number, number))
        place, secret = rng.choice(PLACES), "".join(rng.choices("0123456789", k=DIGITS))
        told = lm.encode(TOLD.format(place=place, number=secret))
        asked = lm.encode(ASKED.format(place=place))
        answer = lm.encode(f"{ASKED.format(place=place)} {secret}")[len(asked) :]
        room = size.number - 1 - len(told) - len(asked) - len(answer)
        start, depth = rng.randrange(len(hay) - room + 1), rng.random()
        cut = start + round(depth * room)
        whole = [lm.start_id, *hay[start:cut], *told, *hay[cut : start + room], *asked, *answer]
        targets = torch.full((1, size.number - 1), IGNORED)
        targets[0, -len(answer) :] = torch.tensor(answer)
        return Row(Batch(torch.tensor([whole[:-1]]), targets), depth=torch.full((len(answer),), depth))

    sized = tuple(Size(length, length, 1) for length in lengths)
    data = {"haystack": source, "tokens": len(hay), "sha": hash_of(*map(str, hay))}
    return Task(TEXT_NEEDLE, "A number told in a text", lm.vocab_size, "tokens of a row", sized, row, data)


def _haystack(lm: EvalModel, source: str, length: int) -> list[int]:
    """Tokens of the first documents of a source, four times as many as a row takes."""
    tokens: list[int] = []
    for text in _texts(source):
        tokens += lm.encode(text + "\n")
        if len(tokens) >= 4 * length:
            break
    return tokens


def _texts(source: str) -> Iterator[str]:
    left = CHARACTERS
    try:
        for document in open_source(source).documents():
            yield document.text[:left]
            left -= len(document.text)
            if left <= 0:
                return
    except DataError as error:
        raise UserError(f"--haystack: {error}") from error
