"""Every recipe is a complete configuration, and the command runs it."""

from __future__ import annotations

import json
import re
import shlex
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from processes import stop
from sdm.cli import main
from sdm.data import CorpusConfig, MADTaskConfig, MQARTaskConfig, RecallConfig, SyntheticConfig
from sdm.data.mad import TASKS
from sdm.files import DamagedFile
from sdm.models import cost, ladder
from sdm.models.ladder import LEVELS
from sdm.recipes import RECIPES, recipe
from sdm.recipes.command import parse
from sdm.recipes.ending import ending_with_one_message
from sdm.recipes.jobs import Job, JobFailed, run_jobs
from sdm.recipes.long_context import paper_steps
from sdm.recipes.recall import recall
from sdm.recipes.registry import describe
from sdm.recipes.reproduce import quick_jobs, report
from sdm.recipes.small_pair import small_code
from sdm.training import ScheduleConfig, TrainConfig, TrainingError
from sdm.training.config_file import from_json, to_json
from training.runs import MODEL, recall_run, text_run


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_complete(name: str) -> None:
    config = recipe(name)
    assert from_json(TrainConfig, json.loads(json.dumps(to_json(config)))) == config
    assert describe(name)


@pytest.mark.parametrize("task", TASKS)
def test_tasks_of_mad(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--data.batch-size", "2", "--run-dir", str(tmp_path / "run")]
    main(["train", f"mad-{task}", "--schedule.steps", "2", *run])
    printed = capsys.readouterr().out
    assert "step 2/2" in printed
    main(shlex.split(printed.split("`")[-2].removeprefix("sdm ")))


@pytest.mark.parametrize("level", LEVELS)
def test_ladder_recipes_are_the_paper_s(level: int) -> None:
    config, row = recipe(f"ladder-{level}"), LEVELS[level]
    built, paper = config.model.build(128_256), ladder(level)
    assert cost(built) == cost(paper)
    assert config.optim.lr == row.learning_rate
    assert config.optim.betas == (0.9, 0.95)
    assert config.optim.clip == 1.0
    assert isinstance(config.data, CorpusConfig)
    tokens = config.schedule.steps * config.data.batch_size * config.data.sequence_length
    assert tokens == pytest.approx(row.tokens, rel=1e-3)
    assert config.data.batch_size * config.data.sequence_length == 2**21, "10 steps are the paper's 21M tokens"
    assert config.monitor.memory_tokens == 10 * 2**21


def test_published_tasks_are_trained_as_published() -> None:
    mqar, mad, memorization = recipe("mqar"), recipe("mad-fuzzy-in-context-recall"), recipe("mad-memorization")
    assert mqar.data == MQARTaskConfig()
    assert mqar.schedule.steps == 32 * (390 + 4 * 78)
    assert mad.data == MADTaskConfig("fuzzy-in-context-recall")
    assert (mad.schedule.steps, memorization.schedule.steps) == (200 * 100, 200 * 2)
    assert mad.optim.lr * mad.schedule.final == pytest.approx(1e-6)
    assert isinstance(recipe("recall").data, RecallConfig)
    assert isinstance(recipe("synthetic-fuzzy-recall").data, SyntheticConfig)


def test_long_context_names_the_paper_s_budget() -> None:
    assert (paper_steps(8), paper_steps(13), paper_steps(8, batch_size=16)) == (30_518, 122_071, 1_908)
    with pytest.raises(TrainingError, match="level must be one of 8, 13"):
        paper_steps(6)
    docs = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    for text in ("4B and 16B\ntokens", "30,518 and 122,071 steps", f"{50 * 131_072 / 1e6:.1f}M tokens"):
        assert text in docs


def test_recall_models_are_equal() -> None:
    """SDM and GDN in parameters and FLOPs, not in state; attention in parameters."""
    costs = {kind: cost(recall(kind).model.build(576)) for kind in ("sdm", "gdn", "full_attention")}
    sizes = [one.parameters for one in costs.values()]
    assert max(sizes) / min(sizes) < 1.02
    flops = {kind: one.training_flops_per_token(768) // 3 for kind, one in costs.items()}
    assert max(flops["sdm"], flops["gdn"]) / min(flops["sdm"], flops["gdn"]) < 1.002
    assert costs["sdm"].state_elements == 64 * costs["gdn"].state_elements
    more = f"{flops['full_attention'] / flops['sdm'] - 1:.0%} more"
    root = Path(__file__).parents[2]
    for path in ("README.md", "docs/training.md", "src/sdm/recipes/recall.py", "src/sdm/recipes/reproduce.py"):
        text = " ".join((root / path).read_text().split())
        assert more in text, path
        assert "full attention at equal parameters and FLOPs" not in text, path
    assert all(f"{one:,}" in (root / "docs/training.md").read_text() for one in flops.values())


def test_pair_differs_in_its_global_layer_alone() -> None:
    sdm, gdn = (cost(small_code(kind).model.build(1024)) for kind in ("sdm", "gdn"))
    assert max(sdm.parameters, gdn.parameters) / min(sdm.parameters, gdn.parameters) < 1.02


def test_unknown_recipe() -> None:
    with pytest.raises(TrainingError, match="there is no recipe 'tiny'"):
        recipe("tiny")
    with pytest.raises(SystemExit, match="there is no recipe"):
        main(["train", "tiny"])
    with pytest.raises(SystemExit, match=r"the recipe comes first, got --optim\.lr"):
        main(["train", "--optim.lr", "1"])


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """On the standard output, within a narrow terminal, and asking for it is no error."""
    for arguments in (["train"], ["train", "--help"]):
        with pytest.raises(SystemExit) as ending:
            main(arguments)
        assert ending.value.code == 0
        printed, complaint = capsys.readouterr()
        assert not complaint
        assert all(len(line) < 80 for line in printed.splitlines())
        named = set(printed.replace(",", " ").split())
        for name in RECIPES:
            assert re.sub(r"-\d+", "-LEVEL", name) in named
    groups = [line for line in printed.splitlines() if line.startswith("  ") and line[2] != " "]
    assert "  mqar, mqar-gdn, mqar-attention" in groups


@pytest.mark.parametrize("name", RECIPES)
def test_warmup_and_decay_follow_the_steps(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = recipe(name).schedule
    main(["train", name, "--schedule.steps", "60", "--print-config"])
    schedule = from_json(ScheduleConfig, json.loads(capsys.readouterr().out)["schedule"])
    for part in ("warmup_steps", "decay_steps"):
        assert abs(getattr(schedule, part) / 60 - getattr(whole, part) / whole.steps) < 1 / 60
    main(["train", name, "--schedule.steps=60", "--schedule.warmup=7", "--schedule.decay=2", "--print-config"])
    schedule = from_json(ScheduleConfig, json.loads(capsys.readouterr().out)["schedule"])
    assert (schedule.warmup, schedule.decay) == (7, 2)


def test_fields_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse(["tiny-code", "--optim.lr", "1e-4", "--data.sequence-length", "64", "--run-dir", "x"])
    assert options.config == replace(
        recipe("tiny-code"),
        optim=replace(recipe("tiny-code").optim, lr=1e-4),
        data=replace(recipe("tiny-code").data, sequence_length=64),
    )
    assert options.run_dir == Path("x")
    main(["train", "recall", "--print-config", "--seed", "3"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["seed"] == 3
    with pytest.raises(SystemExit) as stopped:
        main(["train", "recall", "--optim.learning-rate", "1"])
    assert stopped.value.code != 0
    assert "learning-rate" in "".join(capsys.readouterr())
    with pytest.raises(SystemExit):
        main(["train", "recall", "--optim.lr", "-1"])
    assert "optim.lr must be positive" in "".join(capsys.readouterr())


def test_train_export_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a folder of text to generated text, then on longer sequences from there."""
    text_run(tmp_path)
    fields = {
        "data.sources": tmp_path / "texts",
        "data.tokenizer": "byte",
        "data.cache-dir": tmp_path / "cache",
        "data.sequence-length": 32,
        "data.valid-fraction": 0.2,
        "model.hidden-size": 16,
        "model.num-slots": 16,
        "model.num-writes": 4,
        "model.num-reads": 4,
        "schedule.steps": 4,
        "compute.threads": 1,
        "run-dir": tmp_path / "run",
    }
    arguments = [part for name, value in fields.items() for part in (f"--{name}", str(value))]
    main(["train", "tiny-text", *arguments])
    printed = capsys.readouterr().out
    assert "step 4/4" in printed
    main([*shlex.split(printed.split("`")[-2].removeprefix("sdm ")), "--max-new-tokens", "3"])
    main(["export", str(tmp_path / "run"), "--output", str(tmp_path / "again")])
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "run" / "export" / name).read_bytes()

    longer = ["--init-from", str(tmp_path / "run"), "--sequence-length", "64", "--run-dir", str(tmp_path / "long")]
    main(["train", "long-context", *longer, "--schedule.steps", "2"])
    resolved = json.loads((tmp_path / "long" / "run.json").read_text())
    assert resolved["data"]["sequence_length"] == 64
    assert resolved["compute"]["checkpointing"] == "segment"
    assert resolved["model"]["hidden_size"] == 16
    with pytest.raises(SystemExit, match="needs --init-from"):
        main(["train", "long-context"])
    with pytest.raises(SystemExit, match="neither a model's folder"):
        main(["train", "tiny-text", *arguments[:-1], str(tmp_path / "new"), "--init-from", str(tmp_path / "nothing")])


def test_wrong_tokenizer_is_refused(tmp_path: Path) -> None:
    text_run(tmp_path)
    sources = ["--data.sources", str(tmp_path / "texts"), "--data.cache-dir", str(tmp_path / "cache")]
    run = ["--run-dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit, match="does not match the model"):
        main(["train", "tiny-text", *sources, "--data.tokenizer", "byte", "--model.vocab-size", "100", *run])


def test_tokenizer_command(tmp_path: Path) -> None:
    text_run(tmp_path)
    main(["tokenizer", "train", str(tmp_path / "texts"), str(tmp_path / "bpe"), "--vocab-size", "260"])
    assert (tmp_path / "bpe" / "tokenizer.json").is_file()


def test_jobs(tmp_path: Path) -> None:
    """Two runs side by side, their results as JSON; a second call finds them done."""
    pair = text_run(tmp_path, "rows", schedule=ScheduleConfig(steps=4, warmup=1))
    jobs = [Job("recall", recall_run(), "recall"), Job("language", pair, "language")]
    seen: list[dict[str, dict[str, float]]] = []
    results = run_jobs(jobs, tmp_path / "runs", 2, seen.append)
    assert set(results["recall"]["accuracy"]) <= {"16", "32"}
    assert results["language"]["positions"][0]["nll"] > 0
    assert seen[-1].keys() == {"recall", "language"}
    assert run_jobs(jobs, tmp_path / "runs", 2, seen.append) == results
    longer = Job("recall", recall_run(schedule=ScheduleConfig(steps=10, warmup=2)), "recall")
    assert run_jobs([longer], tmp_path / "runs", 2, seen.append)["recall"]["steps"] == 10


def test_results_of_older_descriptions_are_kept(tmp_path: Path) -> None:
    """What is left out or called by another name in an old job.json is no other job."""
    job = Job("recall", recall_run(), "recall")
    folder = tmp_path / "recall"
    folder.mkdir()
    config = to_json(job.config)
    config["data"]["kind"] = "MQARConfig"
    del config["monitor"]["memory_tokens"]
    (folder / "job.json").write_text(json.dumps({"name": "recall", "config": config, "measure": "recall"}))
    (folder / "evaluation.json").write_text('{"accuracy": {}}')
    assert run_jobs([job], tmp_path, 1, lambda newest: None) == {"recall": {"accuracy": {}}}


def test_a_job_that_fails_says_why_in_one_line(tmp_path: Path) -> None:
    config = text_run(tmp_path)
    (tmp_path / "texts" / "0.txt").write_bytes(b"\xff")
    with pytest.raises(JobFailed, match=r"^a failed:\nerror: source .* is not UTF-8") as failed:
        run_jobs([Job("a", config, "language")], tmp_path / "runs", 1, lambda newest: None)
    assert "Traceback" not in str(failed.value)


def test_jobs_do_not_import_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("random.py", "json.py", "sdm.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    run_jobs([Job("a", recall_run(), "recall")], tmp_path / "runs", 1, lambda newest: None)
    assert not (tmp_path / "executed").exists()


def test_damaged_files_of_jobs(tmp_path: Path) -> None:
    """A result that is damaged is measured again; a description that is damaged might be of anything."""
    job, folder = Job("a", recall_run(), "recall"), tmp_path / "a"
    expected = run_jobs([job], tmp_path, 1, lambda newest: None)
    text = (folder / "evaluation.json").read_text()
    (folder / "evaluation.json").write_text(text.replace('"steps": 8', '"steps": 9'))
    assert run_jobs([job], tmp_path, 1, lambda newest: None) == expected
    for content in ("{", "[]", "[" * 100_000):
        (folder / "job.json").write_text(content)
        with pytest.raises(JobFailed, match=r"job\.json is damaged.*delete it to continue"):
            run_jobs([job], tmp_path, 1, lambda newest: None)


def test_damaged_files_end_with_one_message() -> None:
    with pytest.raises(SystemExit, match=r"error: job\.json is damaged"), ending_with_one_message():
        raise DamagedFile("job.json is damaged")


JOBS = """
import sys
from pathlib import Path
from sdm.recipes.ending import ending_with_one_message
from sdm.recipes.jobs import Job, run_jobs
from training.runs import recall_run
from sdm.training import ScheduleConfig
job = Job("a", recall_run(schedule=ScheduleConfig(steps=100_000, warmup=2)), "recall")
with ending_with_one_message():
    run_jobs([job], Path(sys.argv[1]), 1, lambda newest: None)
"""
TOKENISING = """
import sys, time
import sdm.data.prepare as prepare
from sdm.cli import main
prepare._write_splits = lambda *arguments: time.sleep(60)
main(["train", *sys.argv[1:]])
"""


def test_jobs_save_before_a_signal_ends_them(tmp_path: Path) -> None:
    _, said = stop(["-c", JOBS, str(tmp_path)], signal.SIGTERM, (tmp_path / "a" / "metrics.jsonl").is_file)
    assert said == "stopped: SIGTERM; the same command continues\n"
    assert "which is saved" in (tmp_path / "a" / "log.txt").read_text()
    assert list((tmp_path / "a" / "checkpoints").iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_while_tokenising_leave_nothing(tmp_path: Path, number: signal.Signals) -> None:
    text_run(tmp_path)
    tokens, fields = tmp_path / "cache" / "tokens", ["--data.tokenizer", "byte", "--run-dir", str(tmp_path / "run")]
    fields += ["--data.sources", str(tmp_path / "texts"), "--data.cache-dir", str(tmp_path / "cache")]
    command = ["-c", TOKENISING, "tiny-text", *fields]
    _, said = stop(command, number, lambda: tokens.is_dir() and any(tokens.iterdir()))
    assert said == f"stopped: {number.name}; the same command continues\n"
    assert not any(tokens.iterdir())


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and figures are made of the results alone, and say what is not the paper's recipe."""
    from rich.console import Console

    monkeypatch.setenv("COLUMNS", "200")
    common = {"parameters": 10, "state_elements": 5, "flops_per_token": 7, "steps": 3, "lr": 1e-3, "seconds": 2.0}
    use = {"valid_loss": 1.0, "slot_use": [[1, 0.5, 0.4], [2, 0.9, 0.8]]}
    accuracy = {"accuracy": {str(k): 0.5 for k in (16, 32, 64, 128, 256, 512)}}
    bins = [{"start": 0, "stop": 64, "nll": 3.0, "error": 0.1, "tokens": 128}]
    results = {
        job.name: common | use | (accuracy if job.measure == "recall" else {"positions": bins, "nll": 3.0})
        for job in quick_jobs()
    }
    report(results, tmp_path, Console())
    printed = capsys.readouterr().out
    for text in ("K=256", "SDM", "GDN", "Not the paper's recipe", "W_q is initialised equal to W_k"):
        assert text in printed
    assert "64 tokens of 2 documents, 128 tokens in all" in " ".join(printed.split()), "captions are wrapped"
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"recall.png", "position.png", "slot_use.png"}
    assert json.loads((tmp_path / "results.json").read_text())["deviations"]


def test_model_of_the_tests_is_small() -> None:
    assert cost(MODEL.build(12)).parameters < 10_000


@pytest.mark.slow
def test_recall_at_256_pairs(tmp_path: Path) -> None:
    """The mean of three seeds."""
    jobs = [Job(f"sdm-{seed}", recall("sdm", seed=seed), "recall") for seed in range(3)]
    results = run_jobs(jobs, tmp_path, 2, lambda newest: None)
    accuracy = [result["accuracy"]["256"] for result in results.values()]
    assert sum(accuracy) / 3 >= 0.97, accuracy
