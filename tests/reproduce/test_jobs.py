"""Jobs: runs side by side, interrupted, damaged and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from processes import stop
from sdm.data import RecallConfig
from sdm.errors import UserError
from sdm.evaluation.measurement import Measurement
from sdm.evaluation.nll import Likelihood
from sdm.evaluation.position import Position
from sdm.evaluation.recall import Recall
from sdm.reproduce.jobs import Job, JobStatus, Outcome, RunFacts, run_jobs, study_lock
from sdm.run import Run
from sdm.run.config import ScheduleConfig
from training.runs import recall_run, text_run

RECALL = {"recall": Recall()}
POSITION = {"position": Position(gain=False)}


def recall_job(name: str = "a", **sections: Any) -> Job:
    return Job(name, recall_run(**sections), RECALL)


def facts(outcome: Outcome) -> RunFacts:
    assert outcome.facts is not None
    return outcome.facts


def test_jobs(tmp_path: Path) -> None:
    """Two runs side by side, their results as JSON; a second call finds them done."""
    pair = text_run(tmp_path, "rows", schedule=ScheduleConfig(steps=4, warmup=1))
    jobs = [recall_job("recall"), Job("language", pair, POSITION)]
    seen: list[Mapping[str, JobStatus]] = []
    found = run_jobs(jobs, tmp_path / "runs", 2, lambda statuses: seen.append(dict(statuses)))
    assert set(found["recall"].measured["recall"]["accuracy"]) == {"8"}  # as many pairs as the task has keys
    assert found["language"].measured["position"]["positions"][0]["nll"] > 0
    assert {name: one.state for name, one in seen[-1].items()} == {"recall": "done", "language": "done"}
    assert facts(found["language"]).steps == seen[-1]["language"].metrics["step"] == 4
    assert found["recall"].results["recall"].complete
    written = modified(tmp_path / "runs")
    assert run_jobs(jobs, tmp_path / "runs", 2) == found
    assert modified(tmp_path / "runs") == written
    longer = recall_job("recall", schedule=ScheduleConfig(steps=10, warmup=2))
    assert facts(run_jobs([longer], tmp_path / "runs", 2)["recall"]).steps == 10


@pytest.mark.slow
def test_a_job_begins_from_the_shorter_one_that_it_comes_after(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The longer job waits, takes only the steps that are missing, and ends as if it had been trained alone."""
    data = RecallConfig(num_pairs=4, num_keys=8, num_values=4, batch_size=4, curriculum=False)

    def job(name: str, steps: int, after: str | None = None) -> Job:
        schedule = ScheduleConfig(steps=steps, warmup=1, decay=2)
        return Job(name, recall_run(data=data, schedule=schedule), RECALL, float(steps), after)

    seen: list[Mapping[str, JobStatus]] = []
    chain = [job("long", 8, "short"), job("short", 5), job("lost", 6, "absent")]
    found = run_jobs(chain, tmp_path / "chain", 2, lambda statuses: seen.append(dict(statuses)))
    alone = run_jobs([job("long", 8)], tmp_path / "alone", 1)
    assert found["long"].measured == alone["long"].measured
    assert all(one["short"].state == "done" for one in seen if one["long"].state != "waiting")
    assert (seen[-1]["long"].first_step, seen[-1]["short"].first_step) == (2, 0)  # the newest line of metrics
    assert "lost is trained from the start, not from absent" in caplog.text
    assert facts(found["lost"]).steps == 6


def modified(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.mark.slow
def test_a_measurement_that_is_added_or_changed_leaves_the_run(tmp_path: Path) -> None:
    """Neither training nor the other measurements are repeated. Settings that only show something count as the same."""
    config = text_run(tmp_path, "rows", schedule=ScheduleConfig(steps=4, warmup=1))
    run_jobs([Job("a", config, POSITION)], tmp_path, 1)
    kept = {path: time for path, time in modified(tmp_path / "a").items() if path.is_file()}
    more: dict[str, Measurement] = {**POSITION, "nll": Likelihood()}
    shown = replace(config, monitor=replace(config.monitor, log_every=1))
    found = run_jobs([Job("a", shown, more)], tmp_path, 1)["a"]
    assert set(found.measured) == {"position", "nll"}
    again = modified(tmp_path / "a")
    changed = {path.name for path, time in kept.items() if again[path] != time}
    assert changed == {"job.json"}

    other = Position(gain=False, first_bin=16)
    found = run_jobs([Job("a", config, {**more, "position": other})], tmp_path, 1)["a"]
    assert found.measured["position"]["positions"][0]["stop"] == 16
    last = modified(tmp_path / "a")
    for path in again:
        if "position" not in path.parts and path.is_file() and path.name != "job.json":
            assert last[path] == again[path], path


@pytest.mark.slow
def test_a_job_is_the_same_whatever_its_process_did_before(tmp_path: Path) -> None:
    names = ("a", "b")
    together = run_jobs([recall_job(name) for name in names], tmp_path / "one", 1)
    alone = run_jobs([recall_job("b")], tmp_path / "two", 1)["b"]
    assert together["b"].measured == alone.measured == together["a"].measured
    losses = [
        [line["loss"] for line in Run(folder).metrics()]
        for folder in (tmp_path / "one" / "a", tmp_path / "one" / "b", tmp_path / "two" / "b")
    ]
    assert losses[0] == losses[1] == losses[2]


def test_a_job_that_fails_says_why_and_does_not_stop_the_others(tmp_path: Path) -> None:
    """The next call tries it again, and only it."""
    config = text_run(tmp_path)
    text = (tmp_path / "texts" / "0.txt").read_bytes()
    (tmp_path / "texts" / "0.txt").write_bytes(b"\xff")
    jobs = [Job("bad", config, POSITION, work=2.0), recall_job("good")]
    seen: list[Mapping[str, JobStatus]] = []
    found = run_jobs(jobs, tmp_path / "runs", 1, lambda statuses: seen.append(dict(statuses)))
    assert found["good"].failure is None
    assert found["good"].measured
    failure = found["bad"].failure or ""
    assert failure.startswith("error: source ")
    assert "is not UTF-8" in failure
    assert "Traceback" not in failure
    assert {name: one.state for name, one in seen[-1].items()} == {"bad": "failed", "good": "done"}
    good = modified(tmp_path / "runs" / "good")
    (tmp_path / "texts" / "0.txt").write_bytes(text)
    assert run_jobs(jobs, tmp_path / "runs", 1)["bad"].failure is None
    assert modified(tmp_path / "runs" / "good") == good


def test_a_measurement_that_cannot_be_made_leaves_the_others(tmp_path: Path) -> None:
    measurements: dict[str, Measurement] = {"text": Position(length=10**6, join="never"), **RECALL}
    config = text_run(tmp_path, "rows", schedule=ScheduleConfig(steps=4, warmup=1))
    found = run_jobs([Job("a", config, {**measurements, "position": Position(gain=False)})], tmp_path, 1)["a"]
    assert "position" in found.measured
    assert "text" not in found.measured
    assert found.failure is not None
    assert "text: " in found.failure
    assert "no document is longer" in found.failure


def patch_training(folder: Path, monkeypatch: pytest.MonkeyPatch, job: str, instead: str) -> None:
    """Have the processes of jobs do something else instead of training one of them."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import errno, os, signal, sys\n"
        "if 'sdm.reproduce.jobs' in sys.orig_argv:\n"
        "    import sdm.training.trainer as trainer\n"
        "    run = trainer.Trainer.run\n"
        "    def patched(self):\n"
        f"        if self.folder.name == {job!r}:\n"
        f"            {instead}\n"
        "        return run(self)\n"
        "    trainer.Trainer.run = patched\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_process_that_dies_fails_its_job_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when memory runs out: the others go on in a new process."""
    patch_training(tmp_path / "site", monkeypatch, "dies", "os.kill(os.getpid(), signal.SIGKILL)")
    found = run_jobs([recall_job("dies"), recall_job("lives")], tmp_path / "runs", 1)
    assert found["dies"].failure == "its process was ended by SIGKILL (out of memory?)"
    assert found["lives"].failure is None
    assert found["lives"].measured


def test_a_full_disk_ends_everything_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instead = "raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))"
    patch_training(tmp_path / "site", monkeypatch, "bad", instead)
    jobs = [recall_job("bad"), recall_job("never")]
    with pytest.raises(UserError, match=r"is full; make room, and the same command continues$"):
        run_jobs(jobs, tmp_path / "runs", 1)
    assert not (tmp_path / "runs" / "never").exists()


def test_a_disk_that_is_too_full_for_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_training(tmp_path / "site", monkeypatch, "bad", "raise ValueError()")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    with pytest.raises(UserError, match=r"is full; make room, and the same command continues$"):
        run_jobs([recall_job("bad")], tmp_path / "runs", 1)


def test_jobs_do_not_import_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("random.py", "json.py", "sdm.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    assert run_jobs([recall_job()], tmp_path / "runs", 1)["a"].failure is None
    assert not (tmp_path / "executed").exists()


def test_damaged_files_of_jobs(tmp_path: Path) -> None:
    """A result that is damaged is kept aside and made again; a description that is damaged might be of anything."""
    job, folder = recall_job(), tmp_path / "a"
    expected = run_jobs([job], tmp_path, 1)["a"].measured
    results = folder / "evaluations" / "recall" / "results.json"
    damaged = results.read_text().replace('"complete": true', '"complete": false')
    results.write_text(damaged)
    assert run_jobs([job], tmp_path, 1)["a"].measured == expected
    assert (folder / "replaced" / "recall-1" / "results.json").read_text() == damaged
    for content in ("{", "[]", "[" * 100_000):
        (folder / "job.json").write_text(content)
        with pytest.raises(UserError, match=r"job\.json is damaged.*delete it to continue"):
            run_jobs([job], tmp_path, 1)


def test_nothing_that_cannot_be_read_is_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run whose job.json has a field of another version, or another configuration, is moved aside."""
    run_jobs([recall_job()], tmp_path, 1)
    weights = (tmp_path / "a" / "export" / "model.safetensors").read_bytes()
    description = json.loads((tmp_path / "a" / "job.json").read_text())
    description["config"]["field_of_the_future"] = 1
    (tmp_path / "a" / "job.json").write_text(json.dumps(description))
    assert run_jobs([recall_job()], tmp_path, 1)["a"].failure is None
    assert (tmp_path / "replaced" / "a-1" / "export" / "model.safetensors").read_bytes() == weights
    assert "field_of_the_future" in caplog.text
    run_jobs([recall_job(schedule=ScheduleConfig(steps=10, warmup=2))], tmp_path, 1)
    assert (tmp_path / "replaced" / "a-2" / "export" / "model.safetensors").read_bytes() == weights


def test_one_process_at_a_time_works_in_a_folder(tmp_path: Path) -> None:
    """The lock ends with the process that has it, however it ends."""
    code = f"""
import sys, time
from pathlib import Path
from sdm.reproduce.jobs import study_lock
with study_lock(Path({str(tmp_path / "study")!r})):
    print("locked", flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(UserError, match="another `sdm reproduce` is working in"), study_lock(tmp_path / "study"):
            pass
        process.kill()
        process.wait()
    with study_lock(tmp_path / "study"):
        pass


JOBS = """
import sys
from pathlib import Path
from sdm.signals import CONTINUES, ending_with_one_message
from sdm.evaluation.recall import Recall
from sdm.reproduce.jobs import Job, run_jobs
from training.runs import recall_run
from sdm.run.config import ScheduleConfig
jobs = [
    Job("done", recall_run(), {"recall": Recall()}, work=2.0),
    Job("a", recall_run(schedule=ScheduleConfig(steps=100_000, warmup=2)), {"recall": Recall()}),
]
with ending_with_one_message(CONTINUES):
    run_jobs(jobs, Path(sys.argv[1]), 1)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_jobs_save_before_a_signal_ends_them(tmp_path: Path, number: signal.Signals) -> None:
    """What is finished by then is not repeated."""
    begun = (tmp_path / "a" / "metrics.jsonl").is_file
    _, said = stop(["-c", JOBS, str(tmp_path)], number, begun)
    assert said == f"stopped: {number.name}; the same command continues\n"
    assert "which is saved" in (tmp_path / "a" / "log.txt").read_text()
    saved = sorted((tmp_path / "a" / "checkpoints").iterdir())[-1]
    done = modified(tmp_path / "done")
    later = lambda: sorted((tmp_path / "a" / "checkpoints").iterdir())[-1] > saved  # noqa: E731
    stop(["-c", JOBS, str(tmp_path)], number, later)
    assert modified(tmp_path / "done") == done
    steps = [line["step"] for line in Run(tmp_path / "a").metrics()]
    assert steps == sorted(set(steps)), "no step is made twice"


def test_runs_save_and_end_when_whoever_started_them_is_killed(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen([sys.executable, "-c", JOBS, str(tmp_path)], env=environment) as process:
        wait_until((tmp_path / "a" / "metrics.jsonl").is_file)
        process.kill()
    wait_until(lambda: "which is saved" in (tmp_path / "a" / "log.txt").read_text())


def wait_until(happened: Callable[[], bool]) -> None:
    for _ in range(1200):
        if happened():
            return
        time.sleep(0.1)
    raise AssertionError("it did not happen")
