"""The whole measurement: an oracle gets everything right, models get the same answers in batches, nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ruler_oracle as oracle
from sdm.analysis.draw import draw
from sdm.cli import main
from sdm.data.tokenization import ByteTokenizer, Tokenizer
from sdm.errors import UserError
from sdm.evaluation.eval_model import open_model
from sdm.evaluation.measurement import evaluate
from sdm.evaluation.report import Grid
from sdm.evaluation.results import read_results
from sdm.evaluation.ruler.measurement import Ruler, summarise
from sdm.evaluation.ruler.tasks import SIX, TASKS
from sdm.evaluation.statistics import compare
from sdm.models.saved_folder import no_progress_bar
from tiny_models import tiny_model


class Answerer:
    """A model that answers by a program, in the tokens that it may generate."""

    def __init__(self, tokenizer: Tokenizer, answer: Any, name: str = "oracle") -> None:
        self.tokenizer, self.name, self._answer = tokenizer, name, answer
        self.asked: list[str] = []

    def check_length(self, tokens: int, what: str) -> None:
        if tokens > 10**6:
            raise UserError(f"{self.name} takes at most {10**6} tokens, got {tokens}: {what}")

    def answer(self, prompts: Sequence[str], max_new_tokens: int) -> list[str]:
        self.asked += prompts
        texts = (self._answer(prompt) for prompt in prompts)
        return [self.tokenizer.decode(self.tokenizer.encode(text)[:max_new_tokens]) for text in texts]

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "path": self.name, "fingerprint": {"weights": self.name}}


def answerer(tokenizer: Tokenizer, answer: Any, name: str = "oracle") -> Any:
    return Answerer(tokenizer, answer, name)


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_the_oracle_gets_everything_right(kind: str, tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    measurement = Ruler(lengths=(2048, 4096), samples=3, batch_size=2)
    lm = answerer(tokenizers[kind], lambda prompt: f" {oracle.answer(prompt)}")
    results = evaluate("ruler", measurement, [(lm, tmp_path)])[0]
    assert results.complete
    assert results.planned == 13 * 2 * 3
    summary = results.summary
    assert summary is not None
    assert {task: one["accuracy"] for task, one in summary["tasks"].items()} == dict.fromkeys(TASKS, 1.0)
    assert summary["averages"]["all 13"]["accuracy"] == 1
    assert summary["averages"]["the paper's 6"]["tasks"] == list(SIX)
    assert set(summary["averages"]) == {"all 13", "the paper's 6"}
    for one in results.units.values():
        assert 0.99 * one["length"] <= one["tokens"] + TASKS[one["task"]].new_tokens <= one["length"]


def test_a_wrong_answer_gets_nothing(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    measurement = Ruler(lengths=(2048,), samples=2)
    results = evaluate("ruler", measurement, [(answerer(tokenizers["bpe"], lambda prompt: " 0000"), tmp_path)])[0]
    assert results.summary is not None
    assert {one["accuracy"] for one in results.summary["tasks"].values()} == {0.0}
    cell = results.summary["tasks"]["vt"]["lengths"]["2048"]
    assert cell["low"] == 0
    assert 0.5 < cell["high"] < 1  # two samples say little


def test_half_of_the_answers_get_half(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    def half(prompt: str) -> str:
        found = oracle.answer(prompt).split(", ")
        return ", ".join(found[: len(found) // 2])

    measurement = Ruler(tasks=("niah_multiquery", "niah_multivalue"), lengths=(2048,), samples=4)
    results = evaluate("ruler", measurement, [(answerer(tokenizers["bpe"], half), tmp_path)])[0]
    assert results.summary is not None
    assert [one["accuracy"] for one in results.summary["tasks"].values()] == [0.5, 0.5]
    assert set(results.summary["averages"]) == {"these 2"}


def test_what_is_done_is_not_asked_again(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    """Also with another size of batches, on which no result depends."""
    tasks = ("niah_single_1", "vt")
    first = answerer(tokenizers["byte"], oracle.answer)
    evaluate("ruler", Ruler(tasks=tasks, lengths=(2048,), samples=4), [(first, tmp_path / "a")], limit=2)
    assert len(first.asked) == 4
    second = answerer(tokenizers["byte"], oracle.answer)
    results = evaluate(
        "ruler", Ruler(tasks=tasks, lengths=(2048,), samples=4, batch_size=3), [(second, tmp_path / "a")]
    )[0]
    assert len(second.asked) == 4
    whole = answerer(tokenizers["byte"], oracle.answer)
    at_once = evaluate("ruler", Ruler(tasks=tasks, lengths=(2048,), samples=4), [(whole, tmp_path / "b")])[0]
    assert results.units == at_once.units
    assert results.summary == at_once.summary
    assert sorted(first.asked + second.asked) == sorted(whole.asked)


def test_other_settings_and_other_text_are_other_results(
    tokenizers: dict[str, Tokenizer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "sdm")
    (tmp_path / "essays.txt").write_text("Some text. And more. " * 20)
    lm = answerer(tokenizers["byte"], oracle.answer)
    fields: dict[str, Any] = {"tasks": ("niah_single_2",), "lengths": (1024,), "samples": 1}
    own = Ruler(**fields, essays=str(tmp_path / "essays.txt"))
    evaluate("ruler", own, [(lm, tmp_path / "results")])
    before = (tmp_path / "results" / "results.json").read_bytes()
    evaluate("ruler", Ruler(**fields, essays=own.essays, seed=7), [(lm, tmp_path / "results")])
    assert "holds results of other settings (settings.seed was 42 and is 7)" in caplog.text
    (tmp_path / "essays.txt").write_text("Other text. And more. " * 20)
    evaluate("ruler", own, [(lm, tmp_path / "results")])
    assert "holds results of other data (data.essays was" in caplog.text
    assert (tmp_path / "results" / "results.json").read_bytes() == before
    assert len(list(tmp_path.glob("results-*"))) == 2


def test_what_is_comparable_is_said() -> None:
    results = {f"{task} 4096 0": {"task": task, "length": 4096, "index": 0, "score": 1.0} for task in TASKS}
    built_in = Ruler().summary(results)
    assert [task for task, one in built_in["tasks"].items() if not one["comparable"]] == [
        *("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery", "qa_1", "qa_2")
    ]
    assert not built_in["comparable"]
    table = Ruler().report({"model": built_in}).tables[0]
    assert {row[0] for row in table.rows} >= {"niah_single_1", "niah_single_2 *", "qa_1 *", "cwe"}
    assert "not comparable" in table.caption
    given = Ruler(essays="essays.json", squad=Path("squad.json"), hotpot=Path("hotpot.json"))
    assert given.summary(results)["comparable"]
    assert "not comparable" not in given.report({"model": given.summary(results)}).tables[0].caption


def test_averages_are_of_whole_sets(tmp_path: Path) -> None:
    def scored(task: str, length: int, index: int, score: float) -> dict[str, Any]:
        return {"task": task, "length": length, "index": index, "score": score}

    found = [scored(task, 4096, index, index / 3) for task in SIX for index in range(4)]
    found += [scored("vt", 8192, index, 1.0) for index in range(4)]
    summary = summarise({str(number): one for number, one in enumerate(found)}, dict.fromkeys([*SIX, "cwe"], True))
    six = summary["averages"]["the paper's 6"]
    assert list(six["lengths"]) == ["4096"]
    assert six["accuracy"] == pytest.approx(0.5)
    assert six["low"] < 0.5 < six["high"]
    assert "all 13" not in summary["averages"]
    assert summary["tasks"]["vt"]["accuracy"] == pytest.approx(0.75)
    assert summary["tasks"]["cwe"] == {"lengths": {}, "accuracy": None, "comparable": True}
    rows = {row[0]: row[1:] for row in Ruler().report({"model": summary}).tables[0].rows}
    assert rows["vt"] == ("50.0", "100.0", "75.0")
    assert rows["cwe"] == ("-", "-", "-")
    assert rows["mean of the paper's 6"] == ("50.0", "-", "50.0")


def test_models_are_compared_by_sample(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    measurement = Ruler(tasks=("vt", "fwe"), lengths=(2048, 4096), samples=5)
    half = answerer(tokenizers["byte"], lambda prompt: oracle.answer(prompt) if "VAR" in prompt else "", "half")
    models = [
        (answerer(tokenizers["byte"], oracle.answer), tmp_path / "oracle"),
        (half, tmp_path / "half"),
    ]
    first, second = evaluate("ruler", measurement, models)
    found = {one.quantity: one.difference for one in compare(measurement, first, second)}
    assert found["accuracy"].value == -0.5
    assert found["accuracy"].count == 10  # questions, each at two lengths
    assert found["accuracy at 2,048"].value == -0.5
    assert found["accuracy on fwe"].value == -1
    assert found["accuracy on vt"].value == 0
    report = measurement.report({"oracle": first.summary or {}, "half": second.summary or {}})
    assert [table.title for table in report.tables] == [f"RULER: accuracy (%) of {name}" for name in ("oracle", "half")]
    (grid,) = report.charts
    assert isinstance(grid, Grid)
    assert [chart.title for chart in grid.charts] == ["vt", "fwe", "mean of these 2"]
    assert all(list(chart.curves) == ["oracle", "half"] for chart in grid.charts)
    axes = [panel for panel in draw(grid).axes if panel.get_visible()]
    assert [panel.get_title() for panel in axes] == [chart.title for chart in grid.charts]
    assert all(len(panel.get_lines()) >= 2 for panel in axes)


def test_lengths_that_hold_no_sample_are_refused_together() -> None:
    lm = answerer(ByteTokenizer(), oracle.answer)
    with pytest.raises(UserError, match=r"512 tokens do not hold vt \(takes \d+\), cwe \(takes .* --skip-short"):
        Ruler(tasks=("niah_single_1", "vt", "cwe"), lengths=(512, 4096), samples=3).plan(lm)
    plan = Ruler(tasks=("niah_single_1", "vt", "cwe"), lengths=(512, 4096), samples=3, skip_short=True).plan(lm)
    assert list(dict.fromkeys(unit.group for unit in plan.units)) == [
        *("niah_single_1 512", "niah_single_1 4096", "vt 4096", "cwe 4096")
    ]
    with pytest.raises(UserError, match="do not hold vt"):  # nothing is left
        Ruler(tasks=("vt",), lengths=(512,), samples=3, skip_short=True).plan(lm)


def test_lengths_beyond_the_model_are_refused() -> None:
    with pytest.raises(UserError, match="takes at most 1000000 tokens, got 2000000: leave out longer --lengths"):
        Ruler(lengths=(4096, 2_000_000)).plan(answerer(ByteTokenizer(), oracle.answer))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tasks": ("niah_singel_1",)}, "did you mean niah_single_1"),
        ({"samples": 0}, "samples"),
        ({"batch_size": 0}, "batch_size"),
        ({"lengths": ()}, "lengths: name at least one"),
        ({"lengths": (4096, 4096)}, "each once"),
        ({"lengths": (-1,)}, "lengths"),
    ],
)
def test_wrong_settings(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Ruler(**fields)


def byte_model(kind: str, folder: Path) -> Path:
    """A model over bytes, with weights large enough for answers to depend on everything."""
    torch.manual_seed(3)
    if kind == "sdm":
        model: Any = tiny_model(vocab_size=257)
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=257,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=2048,
                initializer_range=0.3,
                bos_token_id=256,
                eos_token_id=256,
            )
        )
    with no_progress_bar():
        model.save_pretrained(folder)
    ByteTokenizer().save(folder)
    return folder


@pytest.mark.parametrize("kind", ["sdm", "llama"])
def test_batches_change_no_answer(kind: str, tmp_path: Path) -> None:
    """Eight prompts of different lengths at a time, and one by one."""
    lm = open_model(byte_model(kind, tmp_path / "model"))
    measured = {}
    for size in (1, 8):
        measurement = Ruler(tasks=("niah_single_2", "fwe"), lengths=(640,), samples=8, batch_size=size)
        results = evaluate("ruler", measurement, [(lm, tmp_path / str(size))])[0]
        measured[size] = results.units
    assert measured[1] == measured[8]
    lengths = {one["tokens"] for one in measured[8].values() if one["task"] == "niah_single_2"}
    assert len(lengths) > 1
    assert len({one["output"] for one in measured[8].values()}) > 8  # the prompt does decide the answer


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = [str(byte_model(kind, tmp_path / kind)) for kind in ("sdm", "llama")]
    output = tmp_path / "results"
    settings = ["--tasks", "niah_single_1", "--lengths", "520", "640", "--samples", "2", "--output", str(output)]
    main(["eval", "ruler", *models, *settings])
    shown = capsys.readouterr().out
    assert "RULER: accuracy (%) of llama" in shown
    assert "Paired differences" in shown
    assert (output / "figures" / "ruler.png").is_file()
    assert read_results(output / "sdm").complete
    with pytest.raises(SystemExit, match="llama takes at most 2048 tokens, got 4096"):
        main(["eval", "ruler", models[1], "--lengths", "4096", "--output", str(tmp_path / "other")])
    assert not (tmp_path / "other").exists()


def test_samples_are_written_for_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "samples.jsonl"
    main(["ruler", "byte", str(file), "--tasks", "vt", "niah_single_2", "--lengths", "2048", "1500", "--samples", "2"])
    assert capsys.readouterr().out.strip() == str(file)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(one["task"], one["max_length"], one["index"]) for one in records] == [
        (task, length, index) for length in (1500, 2048) for task in ("vt", "niah_single_2") for index in (0, 1)
    ]
    assert {one["task"]: one["comparable"] for one in records} == {"vt": True, "niah_single_2": False}
    for one in records:
        prompt = one["input"] + one["answer_prefix"]
        assert len(prompt.encode()) + 1 + one["tokens_to_generate"] == one["length"] <= one["max_length"]
        assert all(answer in oracle.answer(prompt) for answer in one["outputs"])
    assert [path.name for path in file.parent.iterdir()] == ["samples.jsonl"]
