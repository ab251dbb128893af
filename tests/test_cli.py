"""The command line, called as a user calls it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import sdm
from models.test_interoperation import tiny_tokenizer
from sdm.cli import main
from tiny_models import tiny_model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with an exported model and tokenizer."""
    tiny_model("mixed").save_pretrained(tmp_path / "run" / "export")
    tiny_tokenizer().save_pretrained(tmp_path / "run" / "export")
    return tmp_path / "run"


def test_ladder(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    main(["ladder"])
    printed = capsys.readouterr().out
    for number in ("7,962,624,000", "2,211,840", "56,623,104", "8.14B", "264."):
        assert number in printed


def test_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("figure.png", "deep/figure.svg"):
        main(["figure", "state-vs-flops", "--output", str(tmp_path / name)])
        assert (tmp_path / name).stat().st_size > 5000
        assert name in capsys.readouterr().out


def test_info(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for folder in (run, run / "export"):
        main(["info", str(folder)])
        printed = capsys.readouterr().out
        assert "2 x sliding_attention" in printed
        assert "1 x sdm" in printed
        assert "reference" in printed


def generated(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    main(["generate", *arguments])
    return capsys.readouterr().out


def test_generate_and_resume(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = generated([str(run), "--tokens", "5", "6", "7", "--max-new-tokens", "12"], capsys)
    state = ["--state", str(tmp_path / "state")]
    first = generated([str(run), "--tokens", "5", "6", "7", "--max-new-tokens", "5", *state], capsys)
    model = sdm.SDMForCausalLM.from_pretrained(run / "export")
    assert len(sdm.MemoryState.load(tmp_path / "state", model)) == 3 + 5 - 1
    # --tokens switches to token ids; the pending token is then followed by one of the user's.
    text = generated([str(run), "--max-new-tokens", "7", *state], capsys)
    decoded = tiny_tokenizer().decode([int(token) for token in whole.split()[5:]])
    assert first.split() == whole.split()[:5]
    assert text.rstrip("\n") == decoded


def test_generate_from_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(run), "--prompt", "memory", "--max-new-tokens", "6"]
    assert generated(arguments, capsys) == generated(arguments, capsys)
    sampled = [*arguments, "--temperature", "1.5", "--seed", "3"]
    assert generated(sampled, capsys) == generated(sampled, capsys)


def test_clear_errors(run: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="neither a model's folder"):
        main(["info", str(tmp_path / "nothing")])
    with pytest.raises(SystemExit, match="nothing to continue"):
        main(["generate", str(run)])
    (tmp_path / "poem").write_text("a poem")
    with pytest.raises(SystemExit, match=r"poem.*of another format"):
        main(["generate", str(run), "--prompt", "x", "--state", str(tmp_path / "poem")])
    assert (tmp_path / "poem").read_text() == "a poem"
    for path in (run / "export").glob("tokenizer*"):
        path.unlink()
    with pytest.raises(SystemExit, match="--tokens"):
        main(["generate", str(run), "--prompt", "x"])


def test_help_is_quick_and_needs_no_transformers() -> None:
    code = "import sys, sdm.cli; print('transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
