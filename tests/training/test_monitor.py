"""What a person sees of a run, and what the file of metrics keeps."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from sdm.errors import TrainingError
from sdm.run import Run
from sdm.run.config import MonitorConfig
from sdm.training.monitor import LiveDisplay, Monitor
from training.runs import assert_same, recall_run, text_run, train

METRICS = {
    "loss": 2.3456,
    "valid/loss": 2.4567,
    "lr": 3e-3,
    "tokens_per_second": 12345.6,
    "memory/slots_written": 0.95,
    "memory/slots_read": 0.9,
    "seconds_left": 3723.4,
}


@pytest.mark.parametrize("name", ["tiny-code", "a-long-name-" * 8])
def test_live_display_fits_into_80_columns(name: str) -> None:
    file = io.StringIO()
    display = LiveDisplay(name, 100_000, Console(file=file, width=80, force_terminal=True, color_system=None))
    display.update(12_345, METRICS)
    display.close()
    shown = file.getvalue()
    for text in (name[:20], "12345/100000", "━", "loss 2.3456", "12,346 tokens/s", "1:02:03 left"):
        assert text in shown


def test_display_begins_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails before it leaves the terminal as it was."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("sdm.training.monitor.make_display", lambda *arguments: pytest.fail("began"))
    with pytest.raises(TrainingError, match=r"monitor\.wandb needs wandb"):
        Monitor(Run(tmp_path), MonitorConfig(wandb="project"), 4)


@pytest.mark.parametrize("end", ["", '\n{"step": 3', '\n{"step": 9, "loss": 1.0}\n'])
def test_rewind_mends_the_end(tmp_path: Path, end: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}' + end)
    monitor = Monitor(Run(tmp_path), MonitorConfig(display="none"), 4)
    monitor.rewind(2)
    monitor.log(3, {"loss": 1.0})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert len(Run(tmp_path).metrics()) == 3


@pytest.mark.parametrize(
    "line",
    [b"[" * 100_000, b'{"step": "3"}', b'{"step": null}', b'{"step": NaN}', b'{"step": {}}', b"[1]", b"3", b"\xff"],
)
def test_damaged_lines_are_left_out(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 2}\n')
    assert Run(tmp_path).metrics() == [{"step": 1}, {"step": 2}]
    Monitor(Run(tmp_path), MonitorConfig(display="none"), 4).rewind(3)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_samples_are_logged_and_change_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = replace(text_run(tmp_path).monitor, display="plain")
    plain = train(text_run(tmp_path, monitor=monitor), tmp_path / "plain")
    with caplog.at_level("INFO", "sdm"):
        sampled = train(text_run(tmp_path, monitor=replace(monitor, sample_every=3)), tmp_path / "sampled")
    said = [record.getMessage() for record in caplog.records if "a sample after step" in record.getMessage()]
    assert [message.split(" step ")[1].split(":")[0] for message in said] == ["3", "6", "8"]
    assert_same(sampled, plain)


def test_samples_need_text(tmp_path: Path) -> None:
    monitor = replace(recall_run().monitor, sample_every=2)
    with pytest.raises(TrainingError, match=r"monitor\.sample_every cannot be served, because the data is no text"):
        train(recall_run(monitor=monitor), tmp_path)
