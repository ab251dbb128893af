"""A configuration that was written is read back; whatever else is in the file is refused by its name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from sdm.errors import TrainingError, UserError
from sdm.run.config import ComputeConfig, ScheduleConfig, TrainConfig
from sdm.run.config_file import from_json, read_config, to_json, write_config
from training.runs import recall_run, text_run


def changed(name: str, value: Any) -> dict[str, Any]:
    """A configuration as JSON with one field, a.b.c, set to something else."""
    fields = json.loads(json.dumps(to_json(recall_run())))
    *sections, last = name.split(".")
    inner = fields
    for section in sections:
        inner = inner[section]
    inner[last] = value
    return fields


def test_round_trip(tmp_path: Path) -> None:
    for config in (TrainConfig(), recall_run(), text_run(tmp_path, init_from=tmp_path)):
        write_config(tmp_path / "run.json", config)
        assert read_config(tmp_path / "run.json") == config


@pytest.mark.parametrize("value", [None, "many", [1], {"a": 1}, True, 1.5])
@pytest.mark.parametrize(
    "name", ["schedule.steps", "optim.lr", "optim.betas", "data.batch_size", "model.layer_types", "compute", "seed"]
)
def test_wrong_types_name_the_field(name: str, value: Any) -> None:
    if (name, value) == ("optim.lr", 1.5):
        value = float("nan")
    if (name, value) == ("model.layer_types", None):
        value = 3
    with pytest.raises(UserError, match=rf"{name} (must be|has no field)") as error:
        from_json(TrainConfig, changed(name, value))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("monitor.display", "loud"),
        ("optim.betas", [0.9, 0.95, 0.99]),
        ("optim.betas", [0.9, "b"]),
        ("model.layer_types", ["sdm", 3]),
        ("model.backend", 3),
        ("init_from", 3),
    ],
)
def test_wrong_values_name_the_field(name: str, value: Any) -> None:
    with pytest.raises(TrainingError, match=rf"config\.{name} must be"):
        from_json(TrainConfig, changed(name, value))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"seed": ' + b"1" * 5000 + b"}",
        b'{"seed": -1}',
        b'{"data": {"batch_size": 0}}',
        b'{"optim": []}',
    ],
    ids=range(8),
)
def test_files_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(TrainingError, match=r"run\.json") as error:
        read_config(tmp_path / "run.json")
    assert "\n" not in str(error.value)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(OSError, match=r"run\.json is not a regular file"):
        read_config(tmp_path / "run.json")


def test_numbers_beyond_all_measure() -> None:
    for steps in (10**16, 10**4000):
        with pytest.raises(TrainingError, match=r"schedule\.steps must be at most 1000000000"):
            ScheduleConfig(steps=steps)
    with pytest.raises(TrainingError, match=r"compute\.threads must be at most 1024, got 1000000"):
        ComputeConfig(threads=10**6)
    with pytest.raises(UserError, match=r"compute\.segment_length must be below 2\^64"):
        ComputeConfig(segment_length=10**400)
