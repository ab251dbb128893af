"""The command line, called as a user calls it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import sdm
from models.test_interoperation import tiny_tokenizer
from sdm.cli import main
from sdm.files import DamagedFile
from sdm.models.cost import LEVELS
from sdm.signals import ending_with_one_message
from sdm.training import Trainer
from tiny_models import tiny_model
from training.runs import text_run


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
    for number in ("7,962,624,000", "2,211,840", "56,623,104", "8.14B", "264.", "83% (94%)", "84% (93%)"):
        assert number in printed
    assert "level 8, with 15 heads, has one for three" in " ".join(printed.split())


def test_ladder_in_a_narrow_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main(["ladder"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for level in LEVELS:
        assert sum(line.split()[:1] == [str(level)] for line in lines) == 2, "a line of sizes and one of states"
    assert any("7,962,624,000" in line for line in lines), "numbers are whole"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"sdm {version('sparse-delta-memory')}\n"


def test_info_says_that_the_core_is_missing(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["info", str(run)])
    assert "core" not in capsys.readouterr().out
    monkeypatch.setattr(sdm.ops.backends.BACKENDS["sparse_delta_rule"][0], "missing", "no compiler")
    main(["info", str(run)])
    assert "the compiled core is not installed" in capsys.readouterr().out


def test_an_unfinished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is used as it is after its newest checkpoint, also where an older export lies in it."""
    run = tmp_path / "run"
    trainer = Trainer(text_run(tmp_path), run)
    assert "has no checkpoint yet" in refusal("info", run)
    trainer.train_step()
    trainer.save()
    main(["export", str(run)])
    for _ in range(2):
        trainer.train_step()
    trainer.save()
    trainer.close()
    capsys.readouterr()
    main(["info", str(run)])
    printed, said = capsys.readouterr()
    assert "1 x sdm" in printed
    assert said == f"{run} is not finished: the model is that of the checkpoint after step 3\n"
    arguments = ["--prompt", "document", "--max-new-tokens", "8"]
    text = generated([str(run), *arguments], capsys)
    main(["export", str(run), "--output", str(tmp_path / "now")])
    capsys.readouterr()
    assert generated([str(tmp_path / "now"), *arguments], capsys) == text

    finished = Trainer(text_run(tmp_path), run)
    finished.run()
    main(["info", str(run)])
    assert "not finished" not in capsys.readouterr().err


def test_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, start in (("figure.png", b"\x89PNG"), ("deep/figure.svg", b"<?xml")):
        main(["figure", "state-vs-flops", "--output", str(tmp_path / name)])
        assert (tmp_path / name).read_bytes().startswith(start)
        assert name in capsys.readouterr().out
    assert "FLOPs per token" in (tmp_path / "deep/figure.svg").read_text()


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


def refusal(*arguments: object) -> str:
    """The one message with which a command ends; any other error than SystemExit would be a traceback."""
    with pytest.raises(SystemExit) as ending:
        main([str(argument) for argument in arguments])
    message = ending.value.code
    assert isinstance(message, str), "a code of its own would print nothing, or mean success"
    assert message.startswith("error: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--tokens 97", "--tokens must be of tokens within 0 ... 96, got 97"),
        ("--tokens -1", "--tokens must be of tokens within 0 ... 96, got -1"),
        ("--tokens 1 --prompt x", "either --prompt or --tokens"),
        ("--tokens 1 --max-new-tokens 0", "--max-new-tokens"),
        ("--tokens 1 --max-new-tokens -3", "--max-new-tokens"),
        ("--tokens 1 --top-k -1", "--top-k"),
        ("--tokens 1 --temperature -1", "--temperature"),
        ("--tokens 1 --temperature nan", "--temperature"),
        ("--tokens 1 --temperature inf", "--temperature"),
        ("--tokens 1 --temperature 1e-45", "--temperature"),
        ("--tokens 1 --seed 99999999999999999999", "--seed"),
        ("--prompt \udcff", "--prompt"),
    ],
)
def test_generate_refuses_arguments(tmp_path: Path, arguments: str, named: str) -> None:
    tiny_model("sdm", max_position_embeddings=8).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert named in refusal("generate", tmp_path, *arguments.split())


def test_a_stream_beyond_the_trained_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No positions are learned: the model continues, with one warning, and a state of it can be resumed."""
    tiny_model("sdm", max_position_embeddings=8).save_pretrained(tmp_path / "m")
    arguments = ["generate", str(tmp_path / "m"), "--tokens", "1", "--state", str(tmp_path / "s.sdm")]
    main([*arguments, "--max-new-tokens", "8"])
    assert "max_position_embeddings" not in capsys.readouterr().err
    main([*arguments, "--max-new-tokens", "20"])
    printed = capsys.readouterr()
    assert len(printed.out.split()) == 20
    assert printed.err.count("exceeds max_position_embeddings = 8; the model continues") == 1


def test_generate_refuses_a_state_that_it_could_not_write(run: Path, tmp_path: Path) -> None:
    """Before any token: the work would be lost."""
    (run / "export" / "model.safetensors").unlink()
    assert "--state must be a file" in refusal("generate", run, "--tokens", 1, "--state", tmp_path)
    for folder in ("nodir", "run/export/config.json"):
        path = tmp_path / folder / "s.sdm"
        assert "--state must be in an existing folder" in refusal("generate", run, "--tokens", 1, "--state", path)


def test_resume_without_prompt_or_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("sdm").save_pretrained(tmp_path / "model")
    model, state = str(tmp_path / "model"), ["--state", str(tmp_path / "s.sdm")]
    whole = generated([model, "--tokens", "5", "6", "--max-new-tokens", "7"], capsys).split()
    generated([model, "--tokens", "5", "6", "--max-new-tokens", "4", *state], capsys)
    assert generated([model, "--max-new-tokens", "3", *state], capsys).split() == whole[4:]
    assert "no tokenizer" in refusal("generate", model, "--prompt", "x")


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("model.safetensors", None, "the weights"),
        ("model.safetensors", b"", "the weights"),
        ("model.safetensors", 500, "the weights"),
        ("model.safetensors", -500, "the weights"),
        ("config.json", b"{", "config.json"),
        ("config.json", b"[]", "config.json"),
        ("config.json", b"\xff", "config.json"),
        ("tokenizer.json", b"{", "the tokenizer"),
        ("tokenizer.json", b"{}", "the tokenizer"),
        ("tokenizer_config.json", b"null", "the tokenizer"),
    ],
)
def test_damaged_files(run: Path, file: str, content: bytes | int | None, named: str) -> None:
    path = run / "export" / file
    if isinstance(content, int):
        content = path.read_bytes()[:content]
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    message = refusal("generate", run, "--prompt", "x")
    assert "cannot load" in message
    assert named in message
    assert str(run) in message
    if file == "config.json":
        assert "cannot load" in refusal("info", run)


def test_weights_that_do_not_fit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "export" / "model.safetensors"
    weights = load_file(path)
    head = weights.pop("lm_head.weight")
    save_file(weights, path, {"format": "pt"})
    assert "missing: lm_head.weight" in refusal("generate", run, "--tokens", 1)
    save_file(weights | {"lm_head.weight": head[:50].clone()}, path, {"format": "pt"})
    assert "mismatched: lm_head.weight" in refusal("generate", run, "--tokens", 1)
    assert "REPORT" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": -3}, "hidden_size must be a positive integer, got -3"),
        ({"num_slots": 24}, "num_slots"),
        ({"colour": 1}, "colour"),
        ({"model_type": "llama"}, "model_type must be 'sdm', got 'llama'"),
    ],
)
def test_bad_configurations(run: Path, fields: dict[str, Any], named: str) -> None:
    path = run / "export" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    for command in (["info", run], ["generate", run, "--tokens", 1]):
        message = refusal(*command)
        assert named in message
        assert str(path) in message


def test_info_refuses_a_negative_context(run: Path) -> None:
    assert "--context must not be negative, got -1" in refusal("info", run, "--context", -1)


def test_figure_refuses_outputs(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").touch()
    for name, named in (
        ("f.foo", "suffix must be one of"),
        ("f", "suffix must be one of"),
        ("folder.png", "is a folder"),
        ("file/f.png", "file"),
    ):
        message = refusal("figure", "state-vs-flops", "--output", tmp_path / name)
        assert f"cannot write --output {tmp_path / name}: " in message
        assert named in message
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.png"], "nothing is left behind"


def test_reproduce_refuses_experiments_that_it_does_not_have() -> None:
    assert "--only names experiments of this study: 'recall', 'code'; got 'cost'" in refusal(
        "reproduce", "quick", "--only", "code", "cost"
    )


def test_reproduce_refuses_no_processes() -> None:
    assert "--processes" in refusal("reproduce", "quick", "--processes", 0)
    assert "--processes" in refusal("reproduce", "crossover", "--processes", 0)


@pytest.mark.parametrize(("option", "value"), [("--widths", 33), ("--widths", 0), ("--steps", 0), ("--seeds", 0)])
def test_a_crossover_refuses_what_cannot_work(option: str, value: int) -> None:
    assert f"{option} must be" in refusal("reproduce", "crossover", option, value)


def test_traceback_on_demand(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDM_TRACEBACK", "1")
    with pytest.raises(ValueError, match="--context"):
        main(["info", str(run), "--context", "-1"])


def test_help_is_quick_and_needs_no_transformers() -> None:
    code = "import sys, sdm.cli; print('transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_names_that_are_not_text_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = tmp_path / "text.txt", tmp_path / os.fsdecode(b"\xff")
    source.write_text("a memory of many slots " * 50)
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="utf-8", errors="strict"))
    main(["tokenizer", "train", str(source), str(output), "--vocab-size", "260"])
    sys.stdout.flush()
    assert printed.getvalue().decode().endswith("\\udcff\n")
    assert (output / "tokenizer.json").is_file()


def test_claims_of_a_configuration_are_refused(run: Path) -> None:
    path = run / "export" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 50_000_000}))
    assert "it has vocab_size = 50000000, they have 97" in refusal("generate", run, "--tokens", 1)


def test_tokenizer_command(tmp_path: Path) -> None:
    text_run(tmp_path)
    main(["tokenizer", "train", str(tmp_path / "texts"), str(tmp_path / "bpe"), "--vocab-size", "260"])
    assert (tmp_path / "bpe" / "tokenizer.json").is_file()


def test_damaged_files_end_with_one_message() -> None:
    with pytest.raises(SystemExit, match=r"error: job\.json is damaged"), ending_with_one_message():
        raise DamagedFile("job.json is damaged")
