"""Files are complete or not there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sdm.files import (
    DamagedFile,
    new_file,
    new_folder,
    read_checked_json,
    read_json,
    remove_leftovers,
    write_checked_json,
    write_json,
)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})

    def interrupted() -> None:
        with new_file(path) as temporary:
            assert temporary.suffix == ".json", "writers choose the format by the suffix"
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == '{\n  "old": 1\n}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_others_may_read_what_the_user_lets_them(tmp_path: Path) -> None:
    ordinary, ours = tmp_path / "ordinary", tmp_path / "ours"
    ordinary.write_bytes(b"")
    write_json(ours, 1)
    assert stat.S_IMODE(ours.stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)
    (tmp_path / "folder").mkdir()
    with new_folder(tmp_path / "new"):
        pass
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "folder").stat().st_mode


def test_others_may_read_what_libraries_hide(tmp_path: Path) -> None:
    """safetensors writes files that only their owner may read."""
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    with new_file(tmp_path / "a") as temporary:
        temporary.touch(mode=0o600)
    with new_folder(tmp_path / "new") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "b").touch(mode=0o600)
    for path in (tmp_path / "a", tmp_path / "new" / "sub" / "b"):
        assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)
    before = os.umask(0o027)
    try:
        write_json(tmp_path / "team", 1)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "team").stat().st_mode) == 0o640
    assert {path.name for path in tmp_path.iterdir()} == {"ordinary", "a", "new", "team"}


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = set()

    def fsync(descriptor: int) -> None:
        assert not (tmp_path / "new").exists() or len(synced) == 3
        synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr("os.fsync", fsync)
    with new_folder(tmp_path / "new") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_text("a")
    assert synced >= {path.stat().st_ino for path in (tmp_path / "new", *(tmp_path / "new").rglob("*"))}


def test_only_what_nobody_writes_is_left_over(tmp_path: Path) -> None:
    (tmp_path / ".a-deadbeef").mkdir()
    (tmp_path / ".b-deadbeef").mkdir()
    with new_folder(tmp_path / "a") as folder:
        remove_leftovers(tmp_path / "a")
        assert {path.name for path in tmp_path.iterdir()} == {folder.name, ".b-deadbeef"}
    remove_leftovers(tmp_path / "nowhere" / "a")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"[]", b"3", b"[" * 100_000, b'{"a": ' + b"1" * 5000 + b"}"], ids=range(7)
)
def test_what_is_no_object_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(DamagedFile, match=r"a\.json is damaged") as error:
        read_json(path)
    assert "\n" not in str(error.value)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(OSError, match=r"a\.json is not a regular file"):
        read_json(tmp_path / "a.json")


def test_checksums_notice_every_value(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_checked_json(path, {"a": 1, "b": {"c": "x"}})
    assert read_checked_json(path) == {"a": 1, "b": {"c": "x"}}
    for old, new in (("1", "2"), ("x", "y"), ('"a"', '"d"')):
        text = path.read_text()
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(DamagedFile, match="checksum"):
            read_checked_json(path)
        path.write_text(text)
