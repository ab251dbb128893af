"""Samples: their length is right for every tokenizer, and a program that reads everything answers all of them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

import ruler_oracle as oracle
from sdm.data.tokenization import ByteTokenizer, Tokenizer
from sdm.errors import UserError
from sdm.evaluation.ruler.sample import Generator, Sample, Sources, TooShort, counter, score
from sdm.evaluation.ruler.tasks import SIX, TASKS, check_tasks

FITS = {"byte": 2048, "bpe": 1024}  # from here on, every task does


def check(sample: Sample, tokenizer: Tokenizer) -> None:
    """Length, answerability, and room for the answer."""
    tokens = 1 + len(tokenizer.encode_batch([sample.prompt])[0])
    assert tokens == sample.prompt_tokens
    assert 0.99 * sample.length <= tokens + sample.new_tokens <= sample.length
    metric = TASKS[sample.task].metric
    said = oracle.answer(sample.prompt)
    assert score(metric, said, sample.answers) == 1
    assert len(tokenizer.encode(" " + said)) <= sample.new_tokens
    assert score(metric, "0000", sample.answers) == 0


@pytest.mark.parametrize("length", [512, 1024, 4096, 16384])
@pytest.mark.parametrize("kind", FITS)
@pytest.mark.parametrize("task", TASKS)
def test_oracle_answers_everything(
    task: str, kind: str, length: int, generators: dict[str, Generator], tokenizers: dict[str, Tokenizer]
) -> None:
    if length < FITS[kind]:
        smallest = generators[kind].smallest_length(task, length, 3)
        if smallest > length:
            with pytest.raises(TooShort, match=rf"{task} does not fit into {length} tokens: .* at least \d+"):
                for _ in generators[kind].samples(task, length, 3):
                    pass
            return
    for sample in generators[kind].samples(task, length, 3):
        check(sample, tokenizers[kind])


@pytest.mark.parametrize("kind", FITS)
@pytest.mark.parametrize("task", TASKS)
def test_oracle_answers_at_the_longest_published_length(
    task: str, kind: str, generators: dict[str, Generator], tokenizers: dict[str, Tokenizer]
) -> None:
    check(generators[kind].sample(task, 131072, 0), tokenizers[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", FITS)
@pytest.mark.parametrize("task", TASKS)
def test_oracle_answers_at_a_million_tokens(
    task: str, kind: str, generators: dict[str, Generator], tokenizers: dict[str, Tokenizer]
) -> None:
    check(generators[kind].sample(task, 2**20, 0), tokenizers[kind])


@pytest.mark.parametrize("task", TASKS)
def test_answers_to_other_questions_score_nothing(task: str, generators: dict[str, Generator]) -> None:
    one, other = (generators["bpe"].sample(task, 4096, index) for index in (5, 6))
    assert score(TASKS[task].metric, oracle.answer(other.prompt), one.answers) == 0


@settings(max_examples=150, deadline=None)
@given(
    task=st.sampled_from(list(TASKS)),
    length=st.integers(512, 9000),
    index=st.integers(0, 10**6),
    kind=st.sampled_from(list(FITS)),
)
def test_every_length_is_kept(
    task: str,
    length: int,
    index: int,
    kind: str,
    generators: dict[str, Generator],
    tokenizers: dict[str, Tokenizer],
) -> None:
    try:
        sample = generators[kind].sample(task, length, index)
    except TooShort:
        assert length < FITS[kind]
    else:
        check(sample, tokenizers[kind])


def words_and_signs() -> Library:
    """Unlike bytes and BPE: a word is one token, however long."""
    library = Library(models.WordLevel({"?": 0}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    return library


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "count",
    [
        lambda text: len(words_and_signs().encode(text).ids),
        lambda text: len(text.encode("utf-16")),
        lambda text: 7 + 3 * len(text),
    ],
    ids=["words", "utf-16", "three a character"],
)
def test_other_ways_of_counting(task: str, count: object) -> None:
    assert callable(count)
    sample = Generator(count).sample(task, 9000, 0)
    assert count(sample.prompt) == sample.prompt_tokens
    assert 0.99 * 9000 <= sample.prompt_tokens + sample.new_tokens <= 9000
    assert score(TASKS[task].metric, oracle.answer(sample.prompt), sample.answers) == 1


def test_a_tokenizer_that_drops_text_ends_in_an_error() -> None:
    with pytest.raises(ValueError, match="the tokenizer drops text"):
        Generator(lambda text: 5).sample("niah_single_1", 512, 0)


@pytest.mark.parametrize("task", TASKS)
def test_sample_depends_on_its_place_alone(task: str, tokenizers: dict[str, Tokenizer]) -> None:
    count = counter(tokenizers["byte"])
    in_order = list(Generator(count, seed=7).samples(task, 2048, 4))
    alone = Generator(count, seed=7)
    assert [alone.sample(task, 2048, index) for index in (3, 1, 2, 0)] == [in_order[index] for index in (3, 1, 2, 0)]
    assert len({sample.prompt for sample in in_order}) == 4
    assert Generator(count, seed=8).sample(task, 2048, 0).prompt != in_order[0].prompt


@pytest.mark.parametrize("task", TASKS)
def test_the_tokenizer_decides_the_amount_alone(task: str, generators: dict[str, Generator]) -> None:
    first, second = (generator.sample(task, 3000, 0) for generator in generators.values())
    if task != "cwe":  # whose words must fit into the answer
        assert first.answers == second.answers
    assert len(first.prompt) < len(second.prompt)


@pytest.mark.parametrize("task", TASKS)
def test_smallest_length_is_the_smallest(task: str, generators: dict[str, Generator]) -> None:
    generator = generators["byte"]
    smallest = generator.smallest_length(task, 512, 1)
    with pytest.raises(TooShort) as caught:
        generator.sample(task, smallest - 1, 0)
    assert caught.value.smallest == smallest
    assert generator.sample(task, smallest, 0).prompt_tokens + TASKS[task].new_tokens == smallest


@pytest.mark.parametrize("task", TASKS)
def test_the_same_is_asked_at_every_length(task: str, generators: dict[str, Generator]) -> None:
    short, long = (generators["bpe"].sample(task, length, 3) for length in (1024, 3000))
    assert short.answers == long.answers
    assert short.answer_prefix == long.answer_prefix


def test_records_are_lines_of_json(generators: dict[str, Generator]) -> None:
    sample = generators["byte"].sample("vt", 2048, 1)
    record = json.loads(json.dumps(sample.record()))
    assert record["input"] + record["answer_prefix"] == sample.prompt
    assert record["outputs"] == list(sample.answers)
    assert record["length"] == sample.prompt_tokens + 30


def test_samples_are_not_kept(tokenizers: dict[str, Tokenizer]) -> None:
    """A thousand samples of 8k take 8 MB of text; a generator that kept them would show."""
    import tracemalloc

    generator = Generator(counter(tokenizers["byte"]))
    for _ in generator.samples("niah_single_1", 8192, 5):
        pass
    tracemalloc.start()
    for _ in generator.samples("niah_single_1", 8192, 300):
        pass
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 200_000


def test_unknown_tasks_are_told_the_nearest() -> None:
    with pytest.raises(UserError, match="'niah_single1'; did you mean niah_single_1 or niah_single"):
        check_tasks(["vt", "niah_single1"])
    with pytest.raises(UserError, match="'zzz'; there are niah_single_1, "):
        check_tasks(["zzz"])
    with pytest.raises(UserError, match="vt is named twice"):
        check_tasks(["vt", "vt"])
    with pytest.raises(UserError, match="at least one"):
        check_tasks([])
    check_tasks(SIX)


def test_score() -> None:
    assert score("all", "It is 12 and 34.", ["12", "34", "56", "78"]) == 0.5
    assert score("all", "BRAVE-Otter", ["brave-otter"]) == 1
    assert score("part", "somewhere in paris, maybe", ["Paris", "the city of Paris"]) == 1
    assert score("part", "london", ["Paris", "the city of Paris"]) == 0
    assert score("all", "", ["12"]) == 0


def test_essays_of_the_user(tmp_path: Path) -> None:
    for name, content in {
        "one.txt": "First here. Second there! Third?",
        "two.json": json.dumps({"text": "First here. Second there! Third?"}),
        "three.json": json.dumps(["First here. Second there!", "Third?"]),
        "four.jsonl": "\n".join(json.dumps({"text": text}) for text in ("First here. Second there!", "Third?")),
    }.items():
        (tmp_path / name).write_text(content)
        sample = Generator(counter(ByteTokenizer()), sources=Sources(str(tmp_path / name))).sample(
            "niah_single_2", 700, 0
        )
        context = sample.question.split("\n")[1].replace("First here.", "").replace("Second there!", "")
        left = context.replace("Third?", "").split("One of the special")[0]
        assert set(left) <= {" "} or left in " First here. Second there! Third?", name


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'{"text": "x",\n oops}', r"a\.json, line 2: it is not JSON"),
        ("a.json", b'{"text": "x",\n "\xff"}', r"a\.json, line 2: it is not UTF-8"),
        ("a.json", b'["x", {"words": 3}]', r'a\.json, record 2: expected a text or an object with a "text"'),
        ("a.json", b"[]", "there is no text in it"),
        ("a.txt", b"  \n ", "there is no text in it"),
        ("a.jsonl", b'{"text": "x"}\n{"text": 5}', r"a\.jsonl, line 2"),
        ("a.json", b'["\\ud800 x"]', r"a\.json, record 1"),
    ],
)
def test_malformed_essays(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    generator = Generator(counter(ByteTokenizer()), sources=Sources(str(tmp_path / name)))
    with pytest.raises(UserError, match=message):
        generator.sample("niah_single_2", 700, 0)


def test_missing_files_are_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.json"
    for task, sources in {
        "niah_single_2": Sources(essays=str(missing)),
        "qa_1": Sources(squad=missing),
        "qa_2": Sources(hotpot=missing),
    }.items():
        with pytest.raises(UserError, match=r"missing\.json"):
            Generator(counter(ByteTokenizer()), sources=sources).sample(task, 2048, 0)


def test_essays_begin_again(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Only this. And that.")
    generator = Generator(counter(ByteTokenizer()), sources=Sources(str(tmp_path / "short.txt")))
    sample = generator.sample("niah_single_2", 4096, 0)
    assert sample.question.count("Only this. And that.") > 100
    check(sample, ByteTokenizer())


def test_counts_of_words_do_not_repeat_a_draw() -> None:
    """Common words differ from sample to sample, and so do their places: fixed places would be learnable."""
    generator = Generator(counter(ByteTokenizer()))
    places = []
    for sample in generator.samples("cwe", 2048, 4):
        entries = sample.question.rsplit("most often.\n", 1)[1].split("\n")[0].split(" ")[1::2]
        places.append([number for number, word in enumerate(entries) if word in sample.answers])
    assert all(one != other for one, other in itertools.combinations(places, 2))
