"""The model that the package holds: complete, unchanged, and able to do what its page says."""

from __future__ import annotations

from pathlib import Path

import pytest

import sdm
from sdm.cli import main
from sdm.models.example import FOLDER
from sdm.models.manifest import check_manifest, read_manifest
from sdm.run.model import SavedModel

FACTS = {"door": "green", "window": "red", "table": "blue", "name": "first", "line": "new"}


def ask(session: sdm.Session, line: str) -> str:
    """What the model answers to a line."""
    session.add(f"user: {line}\nassistant:")
    answer = "".join(piece.text for piece in session.generate(16))
    session.add("\n")
    return answer.strip()


def test_is_complete_and_small() -> None:
    """Loading compares the checksums of the manifest."""
    names = {path.name for path in FOLDER.iterdir() if path.is_file()}
    assert {"manifest.json", *read_manifest(FOLDER)} == names
    check_manifest(FOLDER)
    assert sum((FOLDER / name).stat().st_size for name in names) < 10 * 2**20


def test_remembers_facts() -> None:
    """Facts that were told one after the other, asked for in another order."""
    model, tokenizer = sdm.example_model()
    session = sdm.Session(model, tokenizer)
    for noun, value in FACTS.items():
        ask(session, f"the {noun} is {value}.")
    right = [value in ask(session, f"what is the {noun}?") for noun, value in reversed(FACTS.items())]
    assert sum(right) >= len(FACTS) - 1


def test_commands_take_it_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["info", "example"])
    assert "1 x sdm" in capsys.readouterr().out
    main(["generate", "example", "--prompt", "def ", "--max-new-tokens", "3"])
    main(["trace", "example", "--prompt", "user: the door is green."])
    assert (tmp_path / "trace.html").is_file()


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert SavedModel(Path("example")).folder == FOLDER
    (tmp_path / "example").mkdir()
    with pytest.raises(ValueError, match="neither a model's folder"):
        SavedModel(Path("example"))
