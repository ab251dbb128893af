from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sdm.data import ByteTokenizer, DataError, TokenStore
from sdm.data.shards import TokenWriter
from sdm.files import new_folder

TEXTS = ["first", "", "x" * 100, "ü", "last document"]
Make = Callable[..., TokenStore]


def test_documents_come_back(make_store: Make) -> None:
    store = make_store(TEXTS)
    texts = [text for text in TEXTS if text]
    assert len(store.manifest["shards"]) > 1
    assert store.num_documents == len(texts)
    assert store.num_bytes == sum(len(text.encode()) for text in texts)
    assert store.num_tokens == store.num_bytes + len(texts) == int(store.lengths.sum())
    for i, text in enumerate(texts):
        document = store.document(i)
        assert document.dtype == torch.int64
        assert document.tolist() == [256, *text.encode()]
    assert store.document(1, 3, 7).tolist() == [ord("x")] * 4
    assert store.document(0, 4, 99).tolist() == list(b"st")
    with pytest.raises(IndexError):
        store.document(len(texts))


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    class Large(ByteTokenizer):
        vocab_size = 100_000
        eos_id = 99_999

    writer = TokenWriter(tmp_path, Large(), {})
    writer.write(["ab"])
    writer.finish()
    assert TokenStore(tmp_path).document(0).tolist() == [99_999, 97, 98]


def test_shards_do_not_change_the_tokens(make_store: Make) -> None:
    one, many = make_store(TEXTS, 10**6, "one"), make_store(TEXTS, 1, "many")
    assert [one.document(i).tolist() for i in range(4)] == [many.document(i).tolist() for i in range(4)]
    assert make_store(TEXTS, 1, "again").fingerprint == many.fingerprint
    assert make_store([*TEXTS[:-1], "Last document"], 1, "other").fingerprint != many.fingerprint


@pytest.mark.parametrize("name", ["tokens-00000.bin", "tokens-00001.bin", "documents.bin", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damage_is_refused(make_store: Make, name: str, damage: str) -> None:
    folder = make_store(TEXTS).folder
    file = folder / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x40
    if damage == "flip" and name != "manifest.json":
        file.write_bytes(data)
    elif damage == "remove":
        file.unlink()
    else:
        file.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=r"damaged.*delete the folder|holds no tokens"):
        TokenStore(folder)


def test_sizes_are_checked_without_verifying(make_store: Make) -> None:
    folder = make_store(TEXTS).folder
    data = (folder / "tokens-00000.bin").read_bytes()
    (folder / "tokens-00000.bin").write_bytes(data[:-1])
    with pytest.raises(DataError, match="damaged"):
        TokenStore(folder, verify=False)


def test_a_mapped_store_cannot_change_its_file(make_store: Make) -> None:
    store = make_store(TEXTS)
    before = (store.folder / "tokens-00000.bin").read_bytes()
    store._shards[0].zero_()
    assert (store.folder / "tokens-00000.bin").read_bytes() == before


def test_a_failed_folder_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with new_folder(tmp_path / "a" / "b") as folder:
            (folder / "file").touch()
            raise RuntimeError("no space left")

    with pytest.raises(RuntimeError, match="no space left"):
        fail()
    assert list((tmp_path / "a").iterdir()) == []


def test_the_first_of_two_folders_stays(tmp_path: Path) -> None:
    with new_folder(tmp_path / "a") as slow:
        (slow / "slow").touch()
        with new_folder(tmp_path / "a") as fast:
            (fast / "fast").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["fast"]
