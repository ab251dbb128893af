"""Many runs side by side, and what is made of their results."""

from __future__ import annotations

import io
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
from rich.console import Console

from processes import stop
from sdm.errors import UserError
from sdm.evaluation.measurement import Measurement
from sdm.evaluation.nll import Likelihood
from sdm.evaluation.position import Position
from sdm.evaluation.recall import Recall
from sdm.reproduce import progress
from sdm.reproduce.jobs import Job, JobFailed, Outcome, Standing, run_jobs
from sdm.reproduce.progress import make_progress, time_left
from sdm.run import Run
from sdm.run.config import ScheduleConfig
from sdm.run.config_file import to_json
from training.runs import recall_run, text_run

RECALL = {"recall": Recall()}
POSITION = {"position": Position(gain=False)}


def recall_job(name: str = "a", **sections: Any) -> Job:
    return Job(name, recall_run(**sections), RECALL)


def facts(outcome: Outcome) -> dict[str, Any]:
    assert outcome.facts is not None
    return outcome.facts


def test_jobs(tmp_path: Path) -> None:
    """Two runs side by side, their results as JSON; a second call finds them done."""
    pair = text_run(tmp_path, "rows", schedule=ScheduleConfig(steps=4, warmup=1))
    jobs = [recall_job("recall"), Job("language", pair, POSITION)]
    seen: list[Mapping[str, Standing]] = []
    found = run_jobs(jobs, tmp_path / "runs", 2, lambda standings: seen.append(dict(standings)))
    assert set(found["recall"].measured["recall"]["accuracy"]) == {"8"}  # as many pairs as the task has keys
    assert found["language"].measured["position"]["positions"][0]["nll"] > 0
    assert {name: one.state for name, one in seen[-1].items()} == {"recall": "done", "language": "done"}
    assert facts(found["language"])["steps"] == seen[-1]["language"].metrics["step"] == 4
    assert found["recall"].results("recall").complete
    written = modified(tmp_path / "runs")
    assert run_jobs(jobs, tmp_path / "runs", 2) == found
    assert modified(tmp_path / "runs") == written
    longer = recall_job("recall", schedule=ScheduleConfig(steps=10, warmup=2))
    assert facts(run_jobs([longer], tmp_path / "runs", 2)["recall"])["steps"] == 10


def modified(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


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
    assert changed == {"job.json", "evaluation.json"}

    other = Position(gain=False, first_bin=16)
    found = run_jobs([Job("a", config, {**more, "position": other})], tmp_path, 1)["a"]
    assert found.measured["position"]["positions"][0]["stop"] == 16
    last = modified(tmp_path / "a")
    for path in again:
        if "position" not in path.parts and path.is_file() and path.name not in ("job.json", "evaluation.json"):
            assert last[path] == again[path], path


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


def test_results_of_older_descriptions_are_kept(tmp_path: Path) -> None:
    """What is left out or called by another name in an old job.json is no other job."""
    job = recall_job("recall")
    folder = tmp_path / "recall"
    folder.mkdir()
    config = to_json(job.config)
    del config["monitor"]["memory_tokens"]
    (folder / "job.json").write_text(json.dumps({"name": "recall", "config": config, "measure": "recall"}))
    (folder / "evaluation.json").write_text('{"accuracy": {}, "steps": 8}')
    language = Job("language", text_run(tmp_path), POSITION)
    (tmp_path / "language").mkdir()
    written = json.dumps({"name": "language", "config": to_json(language.config), "measure": "language"})
    (tmp_path / "language" / "job.json").write_text(written)
    (tmp_path / "language" / "evaluation.json").write_text('{"positions": []}')
    found = run_jobs([job, language], tmp_path, 1)
    assert found["recall"].facts == {"steps": 8}
    assert {name: one.measured for name, one in found.items()} == {
        "recall": {"recall": {"accuracy": {}}},
        "language": {"position": {"positions": []}},
    }


def test_a_job_that_fails_says_why_and_does_not_stop_the_others(tmp_path: Path) -> None:
    """The next call tries it again, and only it."""
    config = text_run(tmp_path)
    text = (tmp_path / "texts" / "0.txt").read_bytes()
    (tmp_path / "texts" / "0.txt").write_bytes(b"\xff")
    jobs = [Job("bad", config, POSITION, work=2.0), recall_job("good")]
    seen: list[Mapping[str, Standing]] = []
    found = run_jobs(jobs, tmp_path / "runs", 1, lambda standings: seen.append(dict(standings)))
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
        "if 'sdm.reproduce.worker' in sys.orig_argv:\n"
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
    """A result that is damaged is made again; a description that is damaged might be of anything."""
    job, folder = recall_job(), tmp_path / "a"
    expected = run_jobs([job], tmp_path, 1)
    text = (folder / "evaluation.json").read_text()
    (folder / "evaluation.json").write_text(text.replace('"steps": 8', '"steps": 9'))
    assert run_jobs([job], tmp_path, 1) == expected
    for content in ("{", "[]", "[" * 100_000):
        (folder / "job.json").write_text(content)
        with pytest.raises(JobFailed, match=r"job\.json is damaged.*delete it to continue"):
            run_jobs([job], tmp_path, 1)


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
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


def test_time_left() -> None:
    """The speed of a job is its own once it is known; the longest begin first; the processes share what is left."""
    jobs = [
        Job(name, recall_run(schedule=ScheduleConfig(steps=100)), work=work)
        for name, work in zip("abcd", (4, 2, 2, 1), strict=True)
    ]
    waiting = Standing("waiting")
    assert time_left(jobs, dict.fromkeys("abcd", waiting), 2) is None
    half = Standing("running", {"step": 50}, seconds=90.0)  # 45% of work 4: 50 seconds per unit
    # a: 110 s. b, c and d at the same speed: 100, 100 and 50, one after the other.
    assert time_left(jobs, {"a": half, "b": waiting, "c": waiting, "d": waiting}, 2) == pytest.approx(200.0)
    assert time_left(jobs, {"a": half, "b": waiting, "c": waiting, "d": waiting}, 1) == pytest.approx(360.0)
    done = {"a": half, **dict.fromkeys("bcd", Standing("done"))}
    assert time_left(jobs, done, 2) == pytest.approx(110.0)
    continued = Standing("running", {"step": 50}, seconds=9.0, first_step=45)
    assert time_left(jobs[:1], {"a": continued}, 2) == pytest.approx(110.0)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_says_what_is_done_and_what_is_left(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    jobs = [Job(name, recall_run(schedule=ScheduleConfig(steps=100))) for name in "abc"]
    file = io.StringIO()
    with make_progress(jobs, 1, Console(file=file, force_terminal=terminal, width=100)) as update:
        update({"a": Standing("waiting"), "b": Standing("waiting"), "c": Standing("waiting")})
        half = Standing("running", {"step": 50, "loss": 1.25}, seconds=45.0)
        update({"a": Standing("done"), "b": half, "c": Standing("waiting")})
        update(
            {"a": Standing("done"), "b": Standing("failed", {"step": 50, "loss": 1.25}, 45.0), "c": Standing("done")}
        )
    printed = file.getvalue()
    assert "1 of 3 runs done, about 0:02:35 left" in printed  # 55% of b and all of c, at 100 seconds each
    assert "2 of 3 runs done, 1 failed" in printed
    assert ("b: step 50/100  loss 1.250" if terminal else "b: failed after 45 s  loss 1.250") in printed
