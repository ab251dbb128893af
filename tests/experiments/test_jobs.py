"""Many runs side by side, and what is made of their results."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from processes import stop
from sdm.experiments.jobs import Job, JobFailed, run_jobs
from sdm.experiments.reproduce import quick_jobs, report
from sdm.recipes.recall import recall
from sdm.run.config_file import to_json
from sdm.training import ScheduleConfig
from training.runs import recall_run, text_run


def test_jobs(tmp_path: Path) -> None:
    """Two runs side by side, their results as JSON; a second call finds them done."""
    pair = text_run(tmp_path, "rows", schedule=ScheduleConfig(steps=4, warmup=1))
    jobs = [Job("recall", recall_run(), "recall"), Job("language", pair, "position")]
    seen: list[dict[str, dict[str, float]]] = []
    results = run_jobs(jobs, tmp_path / "runs", 2, seen.append)
    assert set(results["recall"]["accuracy"]) == {"8"}  # as many pairs as the task has keys
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
    language = Job("language", text_run(tmp_path), "position")
    (tmp_path / "language").mkdir()
    written = json.dumps({"name": "language", "config": to_json(language.config), "measure": "language"})
    (tmp_path / "language" / "job.json").write_text(written)
    (tmp_path / "language" / "evaluation.json").write_text('{"positions": []}')
    results = run_jobs([job, language], tmp_path, 1, lambda newest: None)
    assert results == {"recall": {"accuracy": {}}, "language": {"positions": []}}


def test_a_job_that_fails_says_why_in_one_line(tmp_path: Path) -> None:
    config = text_run(tmp_path)
    (tmp_path / "texts" / "0.txt").write_bytes(b"\xff")
    with pytest.raises(JobFailed, match=r"^a failed:\nerror: source .* is not UTF-8") as failed:
        run_jobs([Job("a", config, "position")], tmp_path / "runs", 1, lambda newest: None)
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


JOBS = """
import sys
from pathlib import Path
from sdm.ending import CONTINUES, ending_with_one_message
from sdm.experiments.jobs import Job, run_jobs
from training.runs import recall_run
from sdm.training import ScheduleConfig
job = Job("a", recall_run(schedule=ScheduleConfig(steps=100_000, warmup=2)), "recall")
with ending_with_one_message(CONTINUES):
    run_jobs([job], Path(sys.argv[1]), 1, lambda newest: None)
"""


def test_jobs_save_before_a_signal_ends_them(tmp_path: Path) -> None:
    _, said = stop(["-c", JOBS, str(tmp_path)], signal.SIGTERM, (tmp_path / "a" / "metrics.jsonl").is_file)
    assert said == "stopped: SIGTERM; the same command continues\n"
    assert "which is saved" in (tmp_path / "a" / "log.txt").read_text()
    assert list((tmp_path / "a" / "checkpoints").iterdir())


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


@pytest.mark.slow
def test_recall_at_256_pairs(tmp_path: Path) -> None:
    """The mean of three seeds."""
    jobs = [Job(f"sdm-{seed}", recall("sdm", seed=seed), "recall") for seed in range(3)]
    results = run_jobs(jobs, tmp_path, 2, lambda newest: None)
    accuracy = [result["accuracy"]["256"] for result in results.values()]
    assert sum(accuracy) / 3 >= 0.97, accuracy
