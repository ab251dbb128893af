from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sdm.data import ByteTokenizer, DataError, load_tokenizer, prepare_tokenizer, prepare_tokens
from sdm.data.prepare import cache_folder

Make = Callable[..., Any]
TEXTS = [f"document {i} " * 5 for i in range(300)]


def test_splits_hold_every_document_once(make_source: Make, tmp_path: Path) -> None:
    found = []
    for split in ("train", "valid", "test"):
        store = prepare_tokens(make_source(TEXTS), ByteTokenizer(), split, cache_dir=tmp_path)
        assert store.manifest["source"]["split"] == split
        found += [ByteTokenizer().decode(store.document(i).tolist()) for i in range(store.num_documents)]
    assert sorted(found) == sorted(TEXTS)


def test_a_second_run_reads_the_cache(
    make_source: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "sdm")
    prepare_tokens(make_source(TEXTS), ByteTokenizer(), cache_dir=tmp_path)
    source = make_source(TEXTS)
    monkeypatch.setattr(source, "documents", lambda: pytest.fail("read again"))
    for split in ("train", "test"):
        prepare_tokens(source, ByteTokenizer(), split, cache_dir=tmp_path)
    assert len(caplog.records) == 1
    prepare_tokens(make_source([*TEXTS, "more"]), ByteTokenizer(), cache_dir=tmp_path)
    assert len(caplog.records) == 2


def test_nothing_to_read(make_source: Make, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'list' is empty"):
        prepare_tokens(make_source(["", ""]), ByteTokenizer(), cache_dir=tmp_path)
    assert list((tmp_path / "tokens").iterdir()) == []
    with pytest.raises(DataError, match="no documents in split 'valid'; raise valid_fraction"):
        prepare_tokens(make_source(["abc"]), ByteTokenizer(), "valid", 0.0, 0.0, tmp_path)


def test_a_disk_that_cannot_be_written(make_source: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sdm.data.shards.write_bytes", full)
    with pytest.raises(DataError, match=r"cannot be written to .* No space left"):
        prepare_tokens(make_source(TEXTS), ByteTokenizer(), cache_dir=tmp_path)
    assert list((tmp_path / "tokens").iterdir()) == []


def test_a_tokenizer_that_cannot_be_written(make_source: Make, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"the tokenizer 'bpe:270' cannot be written to .*set data\.cache_dir"):
        prepare_tokenizer("bpe:270", (make_source(TEXTS),), cache_dir=tmp_path / "cache")


def test_what_a_killed_process_left_is_removed(make_source: Make, tmp_path: Path) -> None:
    prepare_tokens(make_source(TEXTS), ByteTokenizer(), cache_dir=tmp_path)
    (folder,) = (tmp_path / "tokens").iterdir()
    left = folder.rename(folder.with_name(f".{folder.name}-deadbeef"))
    prepare_tokens(make_source(TEXTS), ByteTokenizer(), cache_dir=tmp_path)
    assert not left.exists()
    assert list((tmp_path / "tokens").iterdir()) == [folder]


def test_trained_tokenizer_is_cached(make_source: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "sdm")
    source = make_source(TEXTS)
    first = prepare_tokenizer("bpe:270", (source,), cache_dir=tmp_path)
    second = prepare_tokenizer("bpe:270", (source,), cache_dir=tmp_path)
    assert first.vocab_size == 270
    assert first.fingerprint == second.fingerprint
    assert len(caplog.records) == 1
    assert load_tokenizer(next((tmp_path / "tokenizers").iterdir())).fingerprint == first.fingerprint


def test_a_large_source_is_sampled(make_source: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdm.data.prepare.BPE_BYTES", 2000)
    assert prepare_tokenizer("bpe:270", (make_source(["a text that repeats. " * 1000]),), cache_dir=tmp_path)


@pytest.mark.parametrize("spec", ["bpe:", "bpe:many", "nowhere"])
def test_bad_tokenizer_names(make_source: Make, tmp_path: Path, spec: str) -> None:
    with pytest.raises(DataError, match="tokenizer"):
        prepare_tokenizer(spec, (make_source(TEXTS),), cache_dir=tmp_path)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SDM_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    assert cache_folder(tmp_path / "a") == tmp_path / "a"
    monkeypatch.delenv("SDM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "sdm"
