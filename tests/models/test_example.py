"""The model that the package holds: complete, unchanged, and able to do what its page says."""

from __future__ import annotations

from pathlib import Path

import pytest

import sdm
from sdm.cli import main
from sdm.files import check_manifest, read_manifest
from sdm.models.saved_folder import EXAMPLE_FOLDER
from sdm.run.model import SavedModel

FACTS = {"window": "1234567", "river": "9081726"}


def tell(session: sdm.Session, name: str, number: str) -> None:
    session.add(f" One of the special magic numbers for {name} is: {number}.")


def ask(session: sdm.Session, name: str) -> str:
    """What the model answers; the session stays as it was."""
    mark = session.mark()
    session.add(f" What is the special magic number for {name} mentioned in the provided text?")
    session.add(f" The special magic number for {name} mentioned in the provided text is")
    answer = "".join(piece.text for piece in session.generate(12))
    session.rewind(mark)
    return answer


def test_is_complete_and_small() -> None:
    """Loading compares the checksums of the manifest."""
    names = {path.name for path in EXAMPLE_FOLDER.iterdir() if path.is_file()}
    assert {"manifest.json", *read_manifest(EXAMPLE_FOLDER)} == names
    check_manifest(EXAMPLE_FOLDER)
    assert sum((EXAMPLE_FOLDER / name).stat().st_size for name in names) < 10 * 2**20


def test_remembers_facts_behind_other_text() -> None:
    """Behind more tokens than it was trained on, and than its attention sees."""
    model, tokenizer = sdm.example_model()
    session = sdm.Session(model, tokenizer)
    for name, number in FACTS.items():
        tell(session, name, number)
    session.add(" The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again." * 20)
    assert session.length > 512
    for name, number in FACTS.items():
        assert number in ask(session, name)


def test_commands_take_it_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["info", "example"])
    assert "1 x sdm" in capsys.readouterr().out
    main(["generate", "example", "--prompt", "One of", "--max-new-tokens", "3"])
    main(["trace", "example", "--prompt", "One of the special magic numbers for window is: 1234567."])
    assert (tmp_path / "trace.html").is_file()


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert SavedModel(Path("example")).folder == EXAMPLE_FOLDER
    (tmp_path / "example").mkdir()
    with pytest.raises(ValueError, match="neither a model's folder"):
        SavedModel(Path("example"))
