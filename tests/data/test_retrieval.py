"""Retrieval tasks in text: rows are functions of their place, answers are in them, and no key is RULER's."""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sdm.data import IGNORED, Batches, DataError, RetrievalConfig, open_data
from sdm.data.retrieval import Retrieval, last_sentences
from sdm.data.retrieval_rows import SYLLABLES, Difficulty, RowMaker, key_words, single_words

WORDS = ("harbours", "gardens", "libraries", "walked", "talking", "quickly", "measured", "counted", "colder")
RESERVED = frozenset(single_words())
SMALL = {
    "sequence_length": 256,
    "start_length": 64,
    "num_sentences": 300,
    "tokenizer": "bpe:640",
    "digits": 2,
    "batch_size": 4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of sentences, with RULER's words among them."""
    folder = tmp_path_factory.mktemp("text")
    rng = random.Random(0)
    words = [*WORDS, *rng.sample(sorted(RESERVED), 50)]
    for number in range(3):
        sentences = [" ".join(rng.choices(words, k=6)).capitalize() + "." for _ in range(150)]
        (folder / f"{number}.txt").write_text(" ".join(sentences))
    return folder


@pytest.fixture(scope="module")
def config(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> RetrievalConfig:
    return RetrievalConfig(**SMALL, source=str(folder), cache_dir=tmp_path_factory.mktemp("cache"))


def test_rows_are_functions_of_the_step(config: RetrievalConfig) -> None:
    source, again = (open_data(config, "train", 100) for _ in range(2))
    whole = source.batch(25, range(4))
    short = len(whole.input_ids) // 4
    assert short > 1, "short rows of the curriculum take the place of one"
    for row in (3, 0):
        alone = again.batch(25, [row])
        assert torch.equal(alone.input_ids, whole.input_ids[row * short : (row + 1) * short])
        assert torch.equal(alone.targets, whole.targets[row * short : (row + 1) * short])
    assert not torch.equal(source.batch(51, range(4)).input_ids, whole.input_ids)
    other = open_data(replace(config, seed=1), "train", 100).batch(25, range(4))
    held_out = open_data(config, "valid", 100).batch(25, range(4))
    assert not torch.equal(other.input_ids, whole.input_ids)
    assert held_out.input_ids.shape == (4, 256), "held-out rows have the full length"


def test_continues_on_other_ranks(config: RetrievalConfig) -> None:
    source = open_data(config, "train", 100)
    alone = Batches(source)
    for _ in range(3):
        next(alone)
    ranks = [Batches(source, rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(alone.state_dict())
    assert torch.equal(torch.cat([next(rank).input_ids for rank in ranks]), next(alone).input_ids)
    with pytest.raises(DataError, match="data changed"):
        Batches(open_data(replace(config, text=0.2), "train", 100)).load_state_dict(alone.state_dict())


def test_the_tokenizer_counts_by_what_it_does(config: RetrievalConfig, tmp_path: Path) -> None:
    """A run that continues reads its tokenizer from its own folder."""
    source = Retrieval(config, "train", 100)
    source.tokenizer.save(tmp_path)
    moved = Retrieval(replace(config, tokenizer=str(tmp_path), cache_dir=None), "train", 100)
    assert moved.fingerprint == source.fingerprint
    assert torch.equal(moved.batch(7, [1]).input_ids, source.batch(7, [1]).input_ids)


def test_answers_are_in_their_rows(config: RetrievalConfig) -> None:
    """By a program that reads the pairs out of the text: the value that is to be predicted was told before."""
    source = Retrieval(replace(config, multivalue=0.1), "valid")
    asked = 0
    for index in range(120):
        row = source.row(0, index, 256)
        # Where the first digits of a value are to be predicted, behind "KEY is: ".
        for place in (place for place, predicted in enumerate(row.predicted) if predicted):
            before = source.tokenizer.decode(row.ids[:place])
            if (key := re.search(r"([a-z]+-[a-z]+) is: $", before)) is None:
                continue
            assert not RESERVED.intersection(key[1].split("-"))
            told = re.findall(rf"{key[1]} is: (\d{{7}})\.", before)
            digits = source.tokenizer.decode([row.ids[place]])
            assert any(number.startswith(digits) for number in told)
            asked += 1
    assert asked > 100


def test_no_key_is_made_of_rulers_words(config: RetrievalConfig) -> None:
    sentences = last_sentences(config.source, config.num_sentences)
    assert RESERVED.intersection(word for sentence in sentences for word in sentence.lower().split()), "in the text"
    words = key_words(sentences)
    assert set(words) == {word for word in WORDS if len(word) <= 9}
    maker = RowMaker(lambda text: list(text.encode()), 0, ["A walk."], [*words, *SYLLABLES], 0.5, sparse=True)
    rng = random.Random(0)
    keys = [maker.key(rng) for _ in range(20000)]
    assert not RESERVED.intersection(part for key in keys for part in key.split("-"))


def test_text_is_the_end_of_the_source(config: RetrievalConfig) -> None:
    """RULER's essays are the beginning."""
    sentences = last_sentences(config.source, 150)
    texts = [path.read_text() for path in sorted(Path(config.source).iterdir())]
    assert " ".join(sentences) == texts[-1]
    with pytest.raises(DataError, match=r"num_sentences = 5000: .* has 450; ask for fewer"):
        last_sentences(config.source, 5000)


@pytest.mark.parametrize(
    ("digits", "size", "groups"),
    [(1, 500, list("1234567")), (2, 640, ["12", "34", "56", "7"]), (3, 1640, ["123", "456", "7"])],
)
def test_tokens(config: RetrievalConfig, digits: int, size: int, groups: list[str]) -> None:
    tokenizer = Retrieval(replace(config, digits=digits, tokenizer=f"bpe:{size}"), "valid").tokenizer

    def pieces(text: str) -> list[str]:
        return [tokenizer.decode([token]) for token in tokenizer.encode(text)]

    assert pieces(" 1234567.") == [" ", *groups, "."]
    assert all(len(tokenizer.encode(f"{group:0{digits}d}")) == 1 for group in range(10**digits))
    assert pieces("VAR QXZJK")[-5:] == list("QXZJK")
    assert pieces("VAR QXZJK")[0] == "VAR"


@pytest.mark.parametrize("task", ["pairs", "needles", "multivalue", "multiquery", "dense", "tracking", "text"])
def test_every_task_fits_and_predicts(config: RetrievalConfig, task: str) -> None:
    source = Retrieval(config, "train", 100)
    for length in (64, 256):
        for level in (0.0, 0.35, 1.0):
            for number in range(10):
                row = source._maker.row(random.Random(number), task, length, Difficulty(level, easy=level < 1))
                assert len(row.ids) == len(row.predicted) <= length
                assert any(row.predicted)


@pytest.mark.parametrize("length", [256, 1024])
def test_rows_of_needles_only(config: RetrievalConfig, length: int) -> None:
    """Needles and questions are all there is, every key has one value, and the row is full whatever its length."""
    source = Retrieval(replace(config, dense=0.5, multiquery=0.1, text=0.0), "valid")
    told, filled = [], []
    for seed in range(20):
        row = source._maker.row(random.Random(seed), "dense", length, Difficulty())
        filled.append(len(row.ids) / length)
        needles, _, questions = source.tokenizer.decode(row.ids).rpartition(".\n\n")
        pairs = re.findall(r"([a-z]+-[a-z]+) is: (\d{7})", needles)
        lines = (needles + ".").splitlines()
        assert sum(bool(re.search(r"is: \d{7}\.$", line)) for line in lines) >= len(lines) - 1, "and an introduction"
        assert len(dict(pairs)) == len(pairs), "no key twice"
        answers = re.findall(r"([a-z]+-[a-z]+) is: (\d{7})", questions)
        assert 1 <= len(answers) <= 4
        assert set(answers) <= set(pairs)
        told.append(len(pairs))
    assert min(filled) > (0.75 if length == 256 else 0.95)
    assert min(told) >= length // 100
    easy = source._maker.row(random.Random(0), "dense", length, Difficulty(easy=True))
    needles, _, _ = source.tokenizer.decode(easy.ids).rpartition(".\n\n")
    assert len(re.findall(r"is: \d{7}", needles)) <= 4 + 5, "few at the beginning"


def test_rows_without_dense_ones_are_as_before(config: RetrievalConfig) -> None:
    """Rows of the configurations that are older than `dense` do not change."""
    source = Retrieval(config, "train", 100)
    text = "\n".join(source.tokenizer.decode(source.row(step, 0, 256).ids) for step in range(100))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "3ad9a7ec88afbb11"


def test_targets_follow_their_tokens(config: RetrievalConfig) -> None:
    batch = open_data(config, "train", 100).batch(90, range(4))
    chosen = batch.targets[:, :-1] != IGNORED
    assert chosen.any()
    assert torch.equal(batch.targets[:, :-1][chosen], batch.input_ids[:, 1:][chosen])
    assert (batch.targets[:, -1] == IGNORED).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pairs": 0.9, "multiquery": 0.5}, "add up to more than 1"),
        ({"text": 1.5}, "text must be a share between 0 and 1, got 1.5"),
        ({"start_length": 1024}, "start_length = 1024 must not exceed sequence_length = 512"),
        ({"start_length": 8}, "at least 32 tokens"),
        ({"ruler_phrasing": -0.1}, "ruler_phrasing must be a share"),
        ({"digits": 4}, "digits must be 1, 2 or 3, got 4"),
        ({"digits": 0}, "digits must be 1, 2 or 3, got 0"),
    ],
)
def test_impossible_settings(fields: dict[str, float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        RetrievalConfig(**fields)


def test_wrong_tokenizer(config: RetrievalConfig) -> None:
    with pytest.raises(DataError, match="'bpe:SIZE' or a path, got 'bpe:many'"):
        open_data(replace(config, tokenizer="bpe:many"), "valid")
