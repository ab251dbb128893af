"""The estimate of a run's duration."""

from __future__ import annotations

import re
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
