"""Progress of the jobs of a study, on a terminal and without one."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from sdm.cli import progress
from sdm.cli.progress import study_progress, time_left
from sdm.reproduce.jobs import Job, JobStatus
from sdm.run.config import ScheduleConfig
from training.runs import recall_run


def test_time_left() -> None:
    """The speed of a job is its own once it is known; the longest begin first; the processes share what is left."""
    jobs = [
        Job(name, recall_run(schedule=ScheduleConfig(steps=100)), work=work)
        for name, work in zip("abcd", (4, 2, 2, 1), strict=True)
    ]
    waiting = JobStatus("waiting")
    assert time_left(jobs, dict.fromkeys("abcd", waiting), 2) is None
    half = JobStatus("running", {"step": 50}, seconds=90.0)  # 45% of work 4: 50 seconds per unit
    # a: 110 s. b, c and d at the same speed: 100, 100 and 50, one after the other.
    assert time_left(jobs, {"a": half, "b": waiting, "c": waiting, "d": waiting}, 2) == pytest.approx(200.0)
    assert time_left(jobs, {"a": half, "b": waiting, "c": waiting, "d": waiting}, 1) == pytest.approx(360.0)
    done = {"a": half, **dict.fromkeys("bcd", JobStatus("done"))}
    assert time_left(jobs, done, 2) == pytest.approx(110.0)
    continued = JobStatus("running", {"step": 50}, seconds=9.0, first_step=45)
    assert time_left(jobs[:1], {"a": continued}, 2) == pytest.approx(110.0)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_says_what_is_done_and_what_is_left(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    jobs = [Job(name, recall_run(schedule=ScheduleConfig(steps=100))) for name in "abc"]
    file = io.StringIO()
    with study_progress(jobs, 1, Console(file=file, force_terminal=terminal, width=100)) as update:
        update({"a": JobStatus("waiting"), "b": JobStatus("waiting"), "c": JobStatus("waiting")})
        half = JobStatus("running", {"step": 50, "loss": 1.25}, seconds=45.0)
        update({"a": JobStatus("done"), "b": half, "c": JobStatus("waiting")})
        update(
            {"a": JobStatus("done"), "b": JobStatus("failed", {"step": 50, "loss": 1.25}, 45.0), "c": JobStatus("done")}
        )
    printed = file.getvalue()
    assert "1 of 3 runs done, about 0:02:35 left" in printed  # 55% of b and all of c, at 100 seconds each
    assert "2 of 3 runs done, 1 failed" in printed
    assert ("b: step 50/100  loss 1.250" if terminal else "b: failed after 45 s  loss 1.250") in printed
