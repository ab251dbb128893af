"""The tasks are those that RULER defines: what is hidden, how much of it, where, how often."""

from __future__ import annotations

import re
import uuid
from collections import Counter
from itertools import pairwise

import pytest

from sdm.data.retrieval_rows import single_words, split_sentences, word_lists
from sdm.data.tokenization import ByteTokenizer
from sdm.evaluation.ruler.questions import NOISE, MadeQuestions, adjective_nouns, compounds
from sdm.evaluation.ruler.sample import Generator, Sample, counter
from sdm.evaluation.ruler.tasks import DEPTHS, TASKS, counts

NEEDLE = re.compile(r"One of the special magic (number|uuid)s for (\S+) is: (\S+)\.(?=\s)")


@pytest.fixture(scope="module")
def generator() -> Generator:
    return Generator(counter(ByteTokenizer()))


def needles(sample: Sample) -> list[tuple[str, str, str]]:
    return NEEDLE.findall(sample.question)


def test_there_are_thirteen() -> None:
    assert len(TASKS) == 13
    assert {name: task.new_tokens for name, task in TASKS.items()} == {
        **{name: 128 for name in TASKS if name.startswith("niah")},
        "vt": 30,
        "cwe": 120,
        "fwe": 50,
        "qa_1": 32,
        "qa_2": 32,
    }
    assert {name for name, task in TASKS.items() if task.metric == "part"} == {"qa_1", "qa_2"}


@pytest.mark.parametrize(
    ("task", "keys", "values", "asked"),
    [
        ("niah_single_1", 1, 1, 1),
        ("niah_single_2", 1, 1, 1),
        ("niah_single_3", 1, 1, 1),
        ("niah_multikey_1", 4, 1, 1),
        ("niah_multivalue", 1, 4, 1),
        ("niah_multiquery", 4, 1, 4),
    ],
)
def test_needles(generator: Generator, task: str, keys: int, values: int, asked: int) -> None:
    for sample in generator.samples(task, 4096, 5):
        hidden = needles(sample)
        assert len(hidden) == keys * values
        assert len({key for _, key, _ in hidden}) == keys
        assert len({value for _, _, value in hidden}) == keys * values
        queried = {key for _, key, _ in hidden if key in sample.answer_prefix}
        assert len(queried) == asked
        assert {value for _, key, value in hidden if key in queried} == set(sample.answers)
        adjectives, nouns = (set(word_lists()[kind]) for kind in ("adjectives", "nouns"))
        for kind, key, value in hidden:
            adjective, noun = key.split("-")
            assert adjective in adjectives
            assert noun in nouns
            if task == "niah_single_3":
                assert kind == "uuid"
                assert uuid.UUID(value).version == 4
            else:
                assert kind == "number"
                assert re.fullmatch(r"[1-9]\d{6}", value)
        plural = keys * values > 1 and task != "niah_multikey_1"
        assert sample.question.startswith("Some special magic" if plural else "A special magic")
        assert ("are all the" in sample.question) == plural
        assert sample.answer_prefix.endswith(" are" if plural else " is")


@pytest.mark.parametrize("task", ["niah_multikey_2", "niah_multikey_3"])
def test_the_haystack_is_needles(generator: Generator, task: str) -> None:
    sample = generator.sample(task, 16384, 0)
    hidden = needles(sample)
    lines = sample.question.split("\n")[1:-1]
    assert len(hidden) in (len(lines), len(lines) - 1)  # the rest is filled with words that are no needle
    assert len(hidden) > 100
    assert len({key for _, key, _ in hidden}) == len(hidden)
    assert [value for _, key, value in hidden if key in sample.answer_prefix] == list(sample.answers)
    if task == "niah_multikey_3":
        assert all(uuid.UUID(text).version == 4 for _, key, value in hidden for text in (key, value))


def test_noise(generator: Generator) -> None:
    lines = generator.sample("niah_single_1", 8192, 0).question.split("\n")[1:-1]
    assert sum(line == NOISE for line in lines) >= len(lines) - 2


def chi_squared(seen: Counter[int], bins: int, total: int) -> float:
    return sum((seen[number] - total / bins) ** 2 for number in range(bins)) / (total / bins)


@pytest.mark.parametrize("task", ["niah_single_1", "niah_single_2", "niah_multikey_2", "niah_multiquery"])
def test_depths_are_spread_evenly(generator: Generator, task: str) -> None:
    """1,000 needles over ten bins: 27.9 is exceeded by chance once in a thousand, and the seed is fixed."""
    seen: Counter[int] = Counter()
    total = 0
    for index in range(1000 if task != "niah_multiquery" else 250):
        draft = generator._draft(task, 4096, index)
        context = draft.context(400)  # type: ignore[attr-defined]
        asked = re.findall(r"for (\S+?)(?:,|$| mentioned)", draft.answer_prefix)
        spans = [match for match in NEEDLE.finditer(context + " ") if task != "niah_multikey_2" or match[2] in asked]
        if task.endswith(("single_2", "multiquery")):  # essays: the depths are of sentences
            depths = draft._depths  # type: ignore[attr-defined]
            assert set(depths) <= set(DEPTHS)
            shares = [depth / 100 for depth in depths]
        else:
            shares = [match.start() / len(context) for match in spans]
        for share in shares:
            seen[min(9, int(share * 10))] += 1
            total += 1
    assert total == 1000
    # The 40 depths do not fall evenly into ten bins: their own frequencies are what is expected.
    if task.endswith(("single_2", "multiquery")):
        expected = Counter(min(9, depth // 10) for depth in DEPTHS)
        chi = sum((seen[n] - 25 * expected[n]) ** 2 / (25 * expected[n]) for n in range(10))
    else:
        chi = chi_squared(seen, 10, total)
    assert chi < 27.9


def test_essay_needles_stand_between_sentences(generator: Generator) -> None:
    essays = generator._essays.sentences(0, 60)
    for index in range(20):
        context = generator._draft("niah_multiquery", 4096, index).context(60)  # type: ignore[attr-defined]
        assert " ".join(NEEDLE.sub("\0", context + " ").replace("\0", " ").split()) == " ".join(
            " ".join(essays).split()
        )
        before = [context[: match.start()].rstrip() for match in NEEDLE.finditer(context + " ")]
        ends = {sentence[-12:] for sentence in essays}
        assert all(not text or text[-12:] in ends or text.endswith(".") for text in before)


def test_depths() -> None:
    assert len(DEPTHS) == 40
    assert (DEPTHS[0], DEPTHS[-1]) == (0, 100)
    assert {after - before for before, after in pairwise(DEPTHS)} == {2, 3}


def test_variables(generator: Generator) -> None:
    """The worked example has two spaces before its answer, as published."""
    for sample in generator.samples("vt", 4096, 10):
        assert sample.prompt.endswith("they are: ")
        example, own = sample.question.split("\n\nMemorize", 1)
        assert re.search(r"they are:  [A-Z]{3}( [A-Z]{3}){4}$", example)
        lines = re.findall(r"^VAR ([A-Z]{5}) = (?:VAR )?(\w+)", own, re.MULTILINE)
        assert [name for name, _ in lines] == list(sample.answers)
        assert len(lines) == 5
        assert re.fullmatch(r"\d{5}", lines[0][1])
        assert [value for _, value in lines[1:]] == [name for name, _ in lines[:-1]]
        assert f"5 variables are assigned the value {lines[0][1]}, they are: " in sample.answer_prefix
        assert len(set(sample.answers)) == 5


def listed(text: str) -> Counter[str]:
    numbered = re.findall(r"(\d+)\. (\S+)", text)
    assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
    return Counter(word for _, word in numbered)


@pytest.mark.parametrize(
    ("length", "common", "others", "example"), [(2048, 6, 1, (3, 1, 20)), (16384, 30, 3, (10, 3, 40))]
)
def test_common_words(
    generator: Generator, length: int, common: int, others: int, example: tuple[int, int, int]
) -> None:
    for sample in generator.samples("cwe", length, 5):
        shown, own = (part.split("\n")[1] for part in sample.question.split("Below is")[1:])
        seen = listed(own)
        assert {word for word, times in seen.items() if times == common} == set(sample.answers)
        left = [times for word, times in seen.items() if word not in sample.answers]
        assert sum(times != others for times in left) <= 2  # the last ones, cut where the length is reached
        assert max(left) <= others + 1
        assert Counter(listed(shown).values()) == {example[0]: 10, example[1]: example[2] - 10}
        answered = re.search(r"in the list are: (.*)\nBelow", sample.question)
        assert answered is not None
        assert set(listed(answered[1])) == {word for word, times in listed(shown).items() if times == example[0]}


def test_long_lists_have_enough_words(generator: Generator) -> None:
    sample = generator.sample("cwe", 131072, 0)
    seen = listed(sample.question.rsplit("most often.\n", 1)[1].split("\n")[0])
    assert {word for word, times in seen.items() if times == 30} == set(sample.answers)
    assert len(seen) > 3000
    assert Counter(seen.values())[3] >= len(seen) - 12


@pytest.mark.parametrize("length", [2048, 16384, 131072])
def test_frequent_words(generator: Generator, length: int) -> None:
    for sample in generator.samples("fwe", length, 2):
        coded = sample.question.split("coded words. ", 1)[1].split("\nQuestion")[0].split()
        seen = Counter(word for word in coded if set(word) != {"."})
        assert all(re.fullmatch("[a-z]{6}", word) for word in seen)
        ranked = [times for _, times in seen.most_common()]
        assert {word for word, _ in seen.most_common(3)} == set(sample.answers)
        # The law: so many words of which rank k has 1 / (k^2 zeta(2)), rounded down, the first rank being dots.
        words = next(n for n in range(10, 10**6) if counts(n)[1:4] == ranked[:3] and sum(counts(n)[1:]) == sum(ranked))
        assert counts(words)[1:] == ranked
        dots = len(coded) - sum(ranked)
        assert counts(words)[0] <= dots <= counts(words)[0] + 0.1 * len(coded)


def test_zipf() -> None:
    found = counts(100_000)
    assert found[:4] == [60792, 15198, 6754, 3799]  # 100000 * 6 / (pi^2 k^2)
    assert min(found) == 1


def test_words_are_distinct() -> None:
    for words in (*word_lists().values(), single_words(), compounds()):
        assert len(words) == len(set(words))
        assert all(re.fullmatch("[a-z]{3,}", word) for word in words)
    assert len(single_words()) > 2900
    assert len(compounds()) > 200_000
    import random

    assert len(set(adjective_nouns(random.Random(0), 50_000))) == 50_000


def test_made_questions_have_one_answer() -> None:
    questions = MadeQuestions(1, 0)
    founders = {questions._facts(pair)[1] for pair in range(0, 2**20, 37)}
    assert len(founders) == len(range(0, 2**20, 37))
    buildings = {questions._facts(pair)[0] for pair in range(5000)}
    assert len(buildings) == 5000


def test_sentences() -> None:
    text = 'He came. "Who?" she\nasked.  (Yes.) "So!" It is 3.14 here. Word ' + "word " * 130
    sentences = split_sentences(text)
    assert sentences[:5] == ["He came.", '"Who?" she asked.', "(Yes.)", '"So!"', "It is 3.14 here."]
    assert " ".join(sentences) == " ".join(text.split())
    assert max(len(sentence.split()) for sentence in sentences) <= 60
