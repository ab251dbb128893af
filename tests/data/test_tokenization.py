from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from sdm.data import ByteTokenizer, DataError, HFTokenizer, Tokenizer, load_tokenizer, train_bpe
from sdm.data.tokenization import WordCache

TEXTS = [
    "def f(x):\n    return x + 1  # naïve\n\n\n",
    "It's we'll I'D 'tis 12345 ... ?!  \n \t end ",
    "über\u00a0\n x \u2028\n\x85\x1c 漢字<|endoftext|>",
    "",
    " ",
    "\n\n",
]


@pytest.fixture(scope="module")
def bpe() -> HFTokenizer:
    return train_bpe([*TEXTS, Path(__file__).read_text()] * 3, 400)


@pytest.fixture(params=["byte", "bpe"])
def tokenizer(request: pytest.FixtureRequest, bpe: HFTokenizer) -> Tokenizer:
    return ByteTokenizer() if request.param == "byte" else bpe


def test_round_trip(tokenizer: Tokenizer) -> None:
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert ids.tolist() == tokenizer.encode(text)
        assert tokenizer.decode([*ids.tolist(), tokenizer.eos_id]) == text
        assert tokenizer.eos_id not in ids
        assert len(ids) == 0 or int(ids.max()) < tokenizer.vocab_size


def test_transformers_reads_what_is_saved(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == tokenizer.eos_id
    assert len(theirs) == tokenizer.vocab_size
    for text in TEXTS:
        ids = theirs(text.replace("<|endoftext|>", ""), add_special_tokens=False).input_ids
        assert ids == tokenizer.encode(text.replace("<|endoftext|>", ""))
        assert theirs.decode(ids) == text.replace("<|endoftext|>", "")


def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path)
    for spec in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(spec)
        assert type(loaded) is type(tokenizer)
        assert loaded.fingerprint == tokenizer.fingerprint
        assert (loaded.eos_id, loaded.vocab_size) == (tokenizer.eos_id, tokenizer.vocab_size)


def test_fingerprints_tell_tokenizers_apart(bpe: HFTokenizer) -> None:
    assert ByteTokenizer().fingerprint == ByteTokenizer().fingerprint
    assert len({ByteTokenizer().fingerprint, bpe.fingerprint, train_bpe(TEXTS * 3, 300).fingerprint}) == 3


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet=st.one_of(st.characters(max_codepoint=0x7F), st.sampled_from(" \n'slé\u00a0\u2028\x85漢字。"))))
def test_looking_words_up_changes_nothing(bpe: HFTokenizer, text: str) -> None:
    assert WordCache(bpe._tokenizer).encode(text).tolist() == bpe.encode(text)


def test_memory_of_words_is_bounded(bpe: HFTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that are not ASCII may be whole documents: they are not kept. The others are, while there is room."""
    words = WordCache(bpe._tokenizer)
    document = "漢字仮名交じり文。\n" * 500 + "code = 1\n"
    assert words.encode(document).tolist() == bpe.encode(document)
    assert all(word.isascii() for word in words)
    monkeypatch.setattr("sdm.data.tokenization.MAX_BYTES", 10_000)
    text = " ".join(f"word{number:x}" for number in range(1000))
    assert words.encode(text).tolist() == bpe.encode(text)
    assert 0 < sum(sys.getsizeof(word) + sys.getsizeof(ids) for word, ids in words.items()) <= 10_000


def test_words_are_only_looked_up_where_it_is_exact(bpe: HFTokenizer) -> None:
    assert WordCache.serves(bpe._tokenizer)
    for change in ("prefix", "token", "normalizer"):
        other = tokenizers.Tokenizer.from_str(bpe._tokenizer.to_str())
        if change == "prefix":
            other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        elif change == "token":
            other.add_tokens(["return x"])
        else:
            other.normalizer = tokenizers.normalizers.NFC()
        assert not WordCache.serves(other)
        slow = HFTokenizer(other, "<|endoftext|>")
        assert [ids.tolist() for ids in slow.encode_batch(TEXTS)] == [slow.encode(text) for text in TEXTS]


def test_any_hugging_face_tokenizer(tmp_path: Path) -> None:
    """Of another kind, with its end of text in tokenizer_config.json and settings for batches that must not act."""
    model = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2, "END": 3}, unk_token="?"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.enable_padding(length=9)
    model.enable_truncation(1)
    model.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "END"}, "chat_template": "kept"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (3, 4)
    assert tokenizer.encode_batch(["a b c"])[0].tolist() == [0, 1, 2]
    tokenizer.save(tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / "tokenizer_config.json").read_text()) == config | {"pad_token": "END"}


def test_bad_tokenizers_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json is not there"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)
    tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="name it as eos_token"):
        load_tokenizer(tmp_path)
    for content, message in (
        (b'{"eos_token": ', "is damaged"),
        (b"\xff", "is damaged"),
        (b"[]", "is damaged: it must hold an object"),
    ):
        (tmp_path / "tokenizer_config.json").write_bytes(content)
        with pytest.raises(DataError, match=rf"tokenizer_config\.json {message}"):
            load_tokenizer(tmp_path)


def test_vocabulary_sizes_that_cannot_be() -> None:
    with pytest.raises(DataError, match="vocab_size must be at least 257"):
        train_bpe(TEXTS, 100)
    with pytest.raises(DataError, match="the text only gives"):
        train_bpe(["ab"], 1000)
    for nothing in ([], ["", ""]):
        with pytest.raises(DataError, match="there is no text"):
            train_bpe(nothing, 257)


def test_isolated_matches_are_words_of_their_own() -> None:
    """Merges of numbers stay within pairs of digits, however often longer ones occur."""
    texts = [f"{number:02d} 1234567" for number in range(100)]
    paired = train_bpe(texts, 357, isolate=(r"\d{1,2}",))
    plain = train_bpe(texts, 270)

    def pieces(tokenizer: HFTokenizer, text: str) -> list[str]:
        return [tokenizer.decode([token]) for token in tokenizer.encode(text)]

    assert pieces(paired, " 1234567") == [" ", "12", "34", "56", "7"]
    assert pieces(plain, " 1234567") == [" 1234567"]
    assert paired.encode_batch(["12345"])[0].tolist() == paired.encode("12345")
    assert paired.decode(paired.encode("A1 23\n")) == "A1 23\n"
