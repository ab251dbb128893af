"""The estimate of a run's duration."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdm.training import time_estimate
from training.runs import assert_same, recall_run, text_run, train


@pytest.mark.parametrize("layout", ["recall", "packed", "rows", "stream"])
def test_the_time_is_said_before_a_run_and_changes_nothing(
    tmp_path: Path, layout: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recall_run() if layout == "recall" else text_run(tmp_path, layout)
    config = replace(config, model=replace(config.model, normalize_scores=True))
    expected = train(config, tmp_path / "silent")
    caplog.set_level("INFO", "sdm.training")
    for flops in (1e11, 1.0):  # whole pieces, and cut ones
        monkeypatch.setattr(time_estimate, "FLOPS", flops)
        folder = tmp_path / f"said-{flops}"
        assert_same(train(replace(config, monitor=replace(config.monitor, display="plain")), folder), expected)
        assert re.search(r"about \d+ seconds for 8 steps", caplog.text)


def test_durations_in_words() -> None:
    seconds = [0.2, 45, 150, 5900, 7200, 86400 * 3, 86400 * 365 * 20]
    words = ["1 seconds", "45 seconds", "2.5 minutes", "1.6 hours", "2 hours", "3 days", "7,300 days"]
    assert [time_estimate.about(value) for value in seconds] == [f"about {value}" for value in words]


@pytest.mark.parametrize(("load", "share", "said"), [(6.0, 0.3, True), (6.0, 0.95, False), (1.5, 0.3, False)])
def test_taken_cores_are_noticed(
    tmp_path: Path,
    load: float,
    share: float,
    said: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    clock = time.perf_counter
    monkeypatch.setattr(time, "thread_time", lambda: share * clock())
    config = recall_run()
    train(replace(config, monitor=replace(config.monitor, display="plain")), tmp_path)
    text = f"oversubscribed: load average {load} on 2 cores, and steps compute for {share:.0%} of the time only"
    assert (text in caplog.text) == said
    assert ("oversubscribed" in caplog.text) == said


def test_a_system_without_a_load_average(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError("no load average")

    monkeypatch.setattr(os, "getloadavg", missing)
    assert time_estimate.oversubscription(0.1) is None
