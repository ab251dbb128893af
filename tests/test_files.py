"""Files are complete or not there."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from sdm.files import new_file, write_json


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
