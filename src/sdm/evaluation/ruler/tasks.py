"""RULER's 13 tasks by name (NVIDIA/RULER, scripts/synthetic.yaml), and which of them the averages are of.

Needles in a haystack (niah) and variable tracking (vt) hide facts in text; common words (cwe) and frequent words (fwe)
ask for the most frequent words of a list; question answering (qa) is in `sdm.evaluation.ruler.questions`.
"""

from __future__ import annotations

import itertools
import math
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from sdm.data.randomness import Permutation
from sdm.data.retrieval_rows import single_words
from sdm.errors import UserError, did_you_mean
from sdm.evaluation.ruler.questions import (
    NOISE,
    Answering,
    Essays,
    adjective_nouns,
    compounds,
    noise_words,
    numbers,
    uuids,
)

# Where needles are put into an essay, in percent of its sentences.
DEPTHS = tuple(round(step * 100 / 39) for step in range(40))
FILLER = 300  # characters: more than a needle has

Haystack = Literal["noise", "essay", "needles"]
_KINDS: dict[str, Callable[[random.Random, int], list[str]]] = {
    "word": adjective_nouns,
    "number": numbers,
    "uuid": uuids,
}


@dataclass(frozen=True)
class Needles:
    """What is hidden, in what, and how much of it is asked for."""

    haystack: Haystack
    key: str = "word"
    value: str = "number"
    num_keys: int = 1
    num_values: int = 1
    """Of each key."""
    num_queries: int = 1
    """Keys that are asked for."""
    new_tokens: int = 128
    metric: str = "all"

    def draft(self, rng: random.Random, essays: Essays) -> NeedleDraft:
        """Draw a sample."""
        return NeedleDraft(self, rng, essays)


class NeedleDraft:
    """One sample of a `Needles` task."""

    def __init__(self, task: Needles, rng: random.Random, essays: Essays) -> None:
        self._task, self._essays = task, essays
        keys = _KINDS[task.key](rng, task.num_keys)
        values = _KINDS[task.value](rng, task.num_keys * task.num_values)
        pairs = [(keys[number // task.num_values], value) for number, value in enumerate(values)]
        queries = rng.sample(range(task.num_keys), task.num_queries)
        start = [query * task.num_values for query in queries]
        self.answers = tuple(value for at in start for value in values[at : at + task.num_values])
        self._needles = [self._needle(key, value) for key, value in rng.sample(pairs, len(pairs))]
        self._keys = frozenset(keys)
        self._query = _listed([keys[query] for query in queries])
        self._depths = sorted(rng.sample(DEPTHS, len(pairs)))
        self._places = sorted(rng.random() for _ in pairs)
        self._distractor_seed = rng.getrandbits(64)
        self._one = len(self.answers) == 1

    @property
    def answer_prefix(self) -> str:
        """Beginning of the answer."""
        plural, verb = ("", "is") if self._one else ("s", "are")
        value = self._task.value
        return f" The special magic {value}{plural} for {self._query} mentioned in the provided text {verb}"

    def question(self, units: int, filler: str = "") -> str:
        """The prompt with so many sentences, lines or other needles."""
        value, plural = self._task.value, "" if self._one else "s"
        some, verb, asked = ("A", "is", "is") if self._one else ("Some", "are", "are all")
        return (
            f"{some} special magic {value}{plural} {verb} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {value}{plural} afterwards.\n{self.context(units, filler)}\n"
            f"What {asked} the special magic {value}{plural} for {self._query} mentioned in the provided text?"
        )

    def context(self, units: int, filler: str = "") -> str:
        """The haystack with its needles."""
        if self._task.haystack == "essay":
            parts, between = self._essays.sentences(0, units), " "
            places = [units * depth // 100 for depth in self._depths]
        else:
            parts, between = [NOISE] * units if self._task.haystack == "noise" else self._distractors(units), "\n"
            places = [int(place * (units + 1)) for place in self._places]
        parts = _inserted(parts, self._needles, places)
        return between.join([*parts, filler] if filler else parts)

    def filler(self, units: int) -> str:
        """The next sentences of the essay, or noise."""
        if self._task.haystack == "essay":
            return " ".join(self._essays.sentences(units, units + 3))
        return noise_words(FILLER)

    def _needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self._task.value}s for {key} is: {value}."

    def _distractors(self, count: int) -> list[str]:
        """Other keys than those that are hidden: the same key twice would have two answers."""
        rng = random.Random(self._distractor_seed)
        keys = _KINDS[self._task.key](rng, count + len(self._keys))
        others = [key for key in keys if key not in self._keys][:count]
        values = _KINDS[self._task.value](rng, count)
        return [self._needle(key, value) for key, value in zip(others, values, strict=True)]


def _inserted(parts: list[str], needles: list[str], places: list[int]) -> list[str]:
    """The parts with each needle before the part of its place; places are in order."""
    whole: list[str] = []
    start = 0
    for needle, place in zip(needles, places, strict=True):
        whole += parts[start:place]
        whole.append(needle)
        start = place
    return whole + parts[start:]


def _listed(words: list[str]) -> str:
    """`a`, `a, and b`, `a, b, and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])}, and {words[-1]}"


DIGITS = 5  # of a value
LETTERS = 5  # of a variable's name
EXAMPLE_LETTERS, EXAMPLE_LINES = 3, 5  # of the worked example


@dataclass(frozen=True)
class Variables:
    """One chain; each hop assigns the variable before to a new one."""

    num_hops: int = 4
    new_tokens: int = 30
    metric: str = "all"

    def draft(self, rng: random.Random) -> VariableDraft:
        """Draw a sample."""
        return VariableDraft(self, rng)


class VariableDraft:
    """One sample, behind a worked example."""

    def __init__(self, task: Variables, rng: random.Random) -> None:
        count = task.num_hops + 1
        own, shown = numbers(rng, 2, DIGITS)
        names = _names(rng, EXAMPLE_LETTERS, count)
        lines = _hidden(_chain(names, shown), EXAMPLE_LINES, [rng.random() for _ in names])
        self._example = _question("\n".join(lines), shown) + _prefix(count, shown) + f" {' '.join(names)}\n\n"
        self.answers = tuple(_names(rng, LETTERS, count))
        self.answer_prefix = _prefix(count, own)
        self._value = own
        self._places = [rng.random() for _ in self.answers]

    def question(self, units: int, filler: str = "") -> str:
        """The prompt with so many lines of noise, behind the worked example."""
        lines = _hidden(_chain(self.answers, self._value), units, self._places)
        return self._example + _question("\n".join([*lines, filler] if filler else lines), self._value)

    def filler(self, units: int) -> str:
        """More noise."""
        return noise_words(2 * len(NOISE))


def _names(rng: random.Random, letters: int, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    return list(names)


def _chain(names: list[str] | tuple[str, ...], value: str) -> list[str]:
    """A line per variable. RULER's lines of hops end in a space."""
    hops = [f"VAR {name} = VAR {before} " for before, name in itertools.pairwise(names)]
    return [f"VAR {names[0]} = {value}", *hops]


def _hidden(chain: list[str], lines: int, places: list[float]) -> list[str]:
    """The chain, in its order, between lines of noise."""
    whole = [NOISE] * lines
    for number, (line, place) in enumerate(zip(chain, sorted(places), strict=True)):
        whole.insert(int(place * (lines + 1)) + number, line)
    return whole


def _question(context: str, value: str) -> str:
    return (
        f"Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
        f"Question: Find all variables that are assigned the value {value} in the text above."
    )


def _prefix(count: int, value: str) -> str:
    return (
        f" Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned "
        f"the value {value}, they are: "
    )


COMMON = 10
# Below so many tokens, words appear less often, so that the list still has many.
SHORT_LENGTH = 4096
TOKENS_PER_WORD = 15  # of the list, three times with its numbers, about: says from when on the list needs compounds
REDRAWS = 100


@dataclass(frozen=True)
class Form:
    """How often words appear, and in the worked example."""

    common: int
    others: int
    example_words: int
    example_common: int
    example_others: int


LONG = Form(common=30, others=3, example_words=40, example_common=10, example_others=3)
SHORT = Form(common=6, others=1, example_words=20, example_common=3, example_others=1)


@dataclass(frozen=True)
class CommonWords:
    """The task cwe."""

    new_tokens: int = 120
    metric: str = "all"

    def draft(self, rng: random.Random, length: int, count: Callable[[str], int]) -> CommonWordsDraft:
        """In the long form if it is due and fits, else in the short one."""
        seed = rng.getrandbits(64)
        if length >= SHORT_LENGTH:
            draft = CommonWordsDraft(LONG, self.new_tokens, seed, length, count)
            if count(draft.question(0) + draft.answer_prefix) + self.new_tokens <= length:
                return draft
        return CommonWordsDraft(SHORT, self.new_tokens, seed, length, count)


class CommonWordsDraft:
    """One sample, behind a worked example. Its units are the entries of words that are not common."""

    answer_prefix = " Answer: The top 10 words that appear most often in the list are:"

    def __init__(self, form: Form, new_tokens: int, seed: int, length: int, count: Callable[[str], int]) -> None:
        self._form = form
        rng = random.Random(seed)
        singles = rng.sample(single_words(), len(single_words()))
        self._example = self._worked_example(singles[: form.example_words], rng)
        singles = singles[form.example_words :]
        # The common words are of the kinds that the others are of, or they could be told by their looks.
        share = min(1.0, TOKENS_PER_WORD * len(singles) / length)
        for _ in range(REDRAWS):
            kinds = [singles if rng.random() < share else compounds() for _ in range(COMMON)]
            common = [rng.choice(kind) for kind in kinds]
            # An answer must fit into the tokens that may be generated.
            if len({*common}) == COMMON and count(" " + _numbered(common)) <= new_tokens:
                break
        else:
            common = sorted(singles, key=len)[:COMMON]
        self.answers = tuple(common)
        self._others = [word for word in singles if word not in self.answers]
        self._more = Permutation(len(compounds()), rng.getrandbits(64))
        self._order = rng.getrandbits(64)

    def question(self, units: int, filler: str = "") -> str:
        """The prompt with so many entries of other words."""
        entries = [word for word in self.answers for _ in range(self._form.common)]
        entries += [self._other(number) for number in range(units)]
        random.Random(self._order).shuffle(entries)
        return self._example + _words_question(_numbered(entries) + filler)

    def filler(self, units: int) -> str:
        """The next entries of the list."""
        start = COMMON * self._form.common + units
        return "".join(f" {start + number + 1}. {self._other(units + number)}" for number in range(3))

    def _other(self, entry: int) -> str:
        """The word of an entry: the same for as many entries as it appears times."""
        number, singles = entry // self._form.others, len(single_words())
        while number >= len(self._others):
            if len(self._others) >= len(self._more):
                raise UserError(f"cwe: there are no more than {singles + len(self._more)} words; take a shorter length")
            start = len(self._others)
            words = (compounds()[self._more[place]] for place in range(start, min(2 * start, len(self._more))))
            self._others += [word for word in words if word not in self.answers]
        return self._others[number]

    def _worked_example(self, words: list[str], rng: random.Random) -> str:
        common, others = words[:COMMON], words[COMMON:]
        entries = common * self._form.example_common + others * self._form.example_others
        rng.shuffle(entries)
        return f"{_words_question(_numbered(entries))}{self.answer_prefix} {_numbered(common)}\n"


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _words_question(context: str) -> str:
    return (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        f"appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
    )


WORD_LETTERS = 6
ASKED = 3  # words
ZIPF = 2.0  # the exponent
ZETA = math.pi**2 / 6  # of the exponent: the sum of all shares
TOKENS_PER_CODED_WORD = 50  # of the vocabulary
DOTS = "..."
WORD_FILLER = 400  # characters: more than the next unambiguous number of words adds


@dataclass(frozen=True)
class FrequentWords:
    """The task fwe."""

    new_tokens: int = 50
    metric: str = "all"

    def draft(self, rng: random.Random, length: int) -> FrequentWordsDraft:
        """Draw a sample."""
        return FrequentWordsDraft(rng, length)


class FrequentWordsDraft:
    """One sample. Its units are words of which the law gives each rank its share, from the fewest that do."""

    answer_prefix = " Answer: According to the coded text above, the three most frequently appeared words are:"

    def __init__(self, rng: random.Random, length: int) -> None:
        size = max(ASKED + 2, length // TOKENS_PER_CODED_WORD)
        vocabulary: dict[str, None] = {}
        while len(vocabulary) < size - 1:
            vocabulary["".join(rng.choices(string.ascii_lowercase, k=WORD_LETTERS))] = None
        self._vocabulary = [DOTS, *vocabulary]
        self.answers = tuple(self._vocabulary[1 : ASKED + 1])
        self._seed = rng.getrandbits(64)

    def question(self, units: int, filler: str = "") -> str:
        """The prompt with about so many coded words."""
        times = counts(self._words(units))
        words = [word for word, often in zip(self._vocabulary, times, strict=False) for _ in range(often)]
        random.Random(self._seed).shuffle(words)
        return (
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            f"appeared coded words. {' '.join(words)}{filler}\nQuestion: Do not provide any explanation. Please ignore "
            "the dots '....'. What are the three most frequently appeared words in the above coded text?"
        )

    def filler(self, units: int) -> str:
        """More dots: of all words, only their number does not matter."""
        return f" {DOTS}" * (WORD_FILLER // (len(DOTS) + 1))

    @staticmethod
    def _words(units: int) -> int:
        """The largest number of words up to this where the last word asked for is more frequent than the next."""
        return next(words for words in range(SMALLEST + units, 0, -1) if _clear(words))


def counts(words: int) -> list[int]:
    """How often each rank appears among so many words, rounded down, as long as it does."""
    return list(takewhile(bool, (int(words / (rank**ZIPF * ZETA)) for rank in itertools.count(1))))


def _clear(words: int) -> bool:
    last, after = (int(words / (rank**ZIPF * ZETA)) for rank in (ASKED + 1, ASKED + 2))
    return last > after


SMALLEST = next(words for words in itertools.count(1) if _clear(words))


Task = Needles | Variables | CommonWords | FrequentWords | Answering

TASKS: dict[str, Task] = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("essay"),
    "niah_single_3": Needles("essay", value="uuid"),
    "niah_multikey_1": Needles("essay", num_keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", key="uuid", value="uuid"),
    "niah_multivalue": Needles("essay", num_values=4),
    "niah_multiquery": Needles("essay", num_keys=4, num_queries=4),
    "vt": Variables(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
    "qa_1": Answering("squad"),
    "qa_2": Answering("hotpot"),
}
# The paper reports the mean of all tasks, and in its ablations that of these.
SIX = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_2", "niah_multiquery", "vt")


def check_tasks(names: Sequence[str]) -> None:
    """Raise unless there are such tasks, each named once; the nearest names are offered."""
    if not names:
        raise UserError(f"tasks: name at least one of {', '.join(TASKS)}")
    for number, name in enumerate(names):
        if name not in TASKS:
            raise UserError(f"there is no RULER task {name!r}; {did_you_mean(name, TASKS, 0.4)}")
        if name in names[:number]:
            raise UserError(f"tasks: {name} is named twice")


def text_source(name: str) -> str | None:
    """Which of RULER's texts a task needs: "essays", "squad", "hotpot", or none."""
    match TASKS[name]:
        case Needles(haystack="essay"):
            return "essays"
        case Answering(source=source):
            return source
    return None
