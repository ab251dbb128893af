"""`sdm chat` and what `sdm generate` prints, called as a user calls them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sdm
from sdm.cli import main
from sdm.models.saved_folder import write_chat_template
from tiny_models import tiny_model
from tiny_tokenizer import tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("mixed", max_position_embeddings=200).save_pretrained(tmp_path / "m")
    tiny_tokenizer().save_pretrained(tmp_path / "m")
    return tmp_path / "m"


@pytest.fixture
def chat(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def run(*lines: str, options: tuple[str, ...] = ()) -> Any:
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
        main(["chat", str(folder), "--max-new-tokens", "8", "--temperature", "0", *options])
        return capsys.readouterr()

    return run


def test_undo_takes_back_the_last_exchange(chat: Callable[..., Any]) -> None:
    plain = chat("hello", "again").out.splitlines()
    undone = chat("hello", "something else", "/undo", "again").out.splitlines()
    assert len(plain) == 2
    assert [undone[0], undone[2]] == plain
    assert "there is no exchange to take back" in chat("/undo").err


def test_fork_and_back(chat: Callable[..., Any]) -> None:
    plain = chat("hello", "again").out.splitlines()
    out = chat("hello", "/fork", "x", "/back", "again", "/back", "again").out.splitlines()
    assert [out[0], out[2], out[3]] == [plain[0], plain[1], plain[1]]


def test_save_load_and_state(chat: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "chat.sdm"
    out = chat("hello", f"/save {path}", "again", "/state").out.splitlines()
    assert "slots written" in out[2]
    assert f"{2 * 5 + 2 * 8} tokens of 200" in out[2]
    assert chat(f"/load {path}", "again").out.splitlines() == out[1:2]
    assert chat("again", options=("--load", str(path))).out.splitlines() == out[1:2]
    assert "exists already" in chat("hello", f"/save {path}").err
    assert "there is no state file" in chat("/load nothing", "/save").err
    assert "there is no command /what" in chat("/what", "/help").err


def test_the_context_limit_ends_an_answer_not_the_chat(chat: Callable[..., Any]) -> None:
    printed = chat("x" * 250, "hello", "/state")
    assert "context limit (max_position_embeddings) is 200" in printed.err
    assert "13 tokens of 200" in printed.out


def test_a_chat_template_is_used(chat: Callable[..., Any], folder: Path) -> None:
    plain = chat("hello").out
    assert write_chat_template(folder)
    templated = chat("hello", "/state", options=("--system", "be kind"))
    text = "system: be kind\nuser: hello\nassistant:"
    assert f"{len(text) + 8} tokens" in templated.out
    model, tokenizer = sdm.SDMForCausalLM.from_pretrained(folder).eval(), tiny_tokenizer()
    session = sdm.Session(model, tokenizer)
    session.add(text)
    first = "".join(piece.text for piece in session.generate(8))
    assert templated.out.splitlines()[0] == first
    # The answer was cut off by its length: the token that ends it is added, as the template has it.
    session.add("<eos>\nuser: again\nassistant:")
    second = "".join(piece.text for piece in session.generate(8))
    assert chat("hello", "again", options=("--system", "be kind")).out.splitlines()[:2] == [first, second]
    assert chat("hello", options=("--plain",)).out == plain
    assert chat("hello", "x", "/undo", "again").out.splitlines()[-1] == chat("hello", "again").out.splitlines()[-1]


def test_chat_refuses(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="neither a model's folder"):
        main(["chat", str(tmp_path)])
    with pytest.raises(SystemExit, match="--system needs a tokenizer with a chat template"):
        main(["chat", str(folder), "--system", "x"])
    tiny_model().save_pretrained(tmp_path / "bare")
    with pytest.raises(SystemExit, match="has no tokenizer, which a chat needs"):
        main(["chat", str(tmp_path / "bare")])
    session = sdm.Session(tiny_model())
    session.add([1, 2])
    session.save(tmp_path / "other.sdm")
    with pytest.raises(SystemExit, match=r"cannot continue --load.*another model"):
        main(["chat", str(folder), "--load", str(tmp_path / "other.sdm")])


def test_generate_reads_standard_input_and_prints_json(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--max-new-tokens", "6"]

    def generated(*arguments: str) -> str:
        main(["generate", str(folder), *arguments, *options])
        return capsys.readouterr().out

    text = generated("--prompt", "memory")
    monkeypatch.setattr("sys.stdin", io.StringIO("memory"))
    assert generated("--prompt", "-", "--greedy") == text
    report = json.loads(generated("--prompt", "memory", "--json"))
    assert report["prompt"] == "memory"
    assert report["text"].strip() == text.replace("<eos>", "").strip()
    assert tiny_tokenizer().decode(report["tokens"], skip_special_tokens=True) == report["text"]
    assert report["finish_reason"] == ("eos" if report["tokens"][-1] == 96 else "length")
    assert generated("--prompt", "memory", "--temperature", "1").startswith("memory")
    with pytest.raises(SystemExit, match="--greedy and --temperature"):
        generated("--prompt", "x", "--greedy", "--temperature", "1")
