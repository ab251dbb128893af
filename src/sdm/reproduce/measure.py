"""What a finished run of an experiment is measured by, as plain JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sdm.data.loader import open_data
from sdm.evaluation.eval_model import open_model
from sdm.evaluation.measurement import Measurement
from sdm.evaluation.position import Position
from sdm.evaluation.registry import MEASUREMENTS, find
from sdm.evaluation.results import FILE, Results, read_results
from sdm.evaluation.runner import evaluate, settings_of
from sdm.files import remove_folder
from sdm.models import cost
from sdm.run import Run
from sdm.run.config_file import from_json
from sdm.run.model import SavedModel

FACTS = (
    "parameters",
    "initial_state_parameters",
    "state_elements",
    "flops_per_token",
    "steps",
    "lr",
    "seconds",
    "valid_loss",
    "slot_use",
)
_OLDER_NAMES = {"language": "position"}


def kind_of(measurement: Measurement) -> str:
    """The name that `measurement_of` finds its class by."""
    for name, kind in MEASUREMENTS.items():
        if type(measurement) is kind:
            return name
    raise ValueError(f"{type(measurement).__name__} is no measurement of sdm.evaluation.registry")


def measurement_of(entry: dict[str, Any]) -> Measurement:
    """From its name and its settings as JSON."""
    return from_json(find(str(entry.get("name"))), entry.get("settings"), "settings")


def older_measurement(name: str) -> tuple[str, Measurement]:
    """What jobs of older versions, which knew measurements by name alone, measured by it."""
    name = _OLDER_NAMES.get(name, name)
    return name, Position(gain=False) if name == "position" else find(name)()


def measure(measurement: Measurement, run: Run, name: str) -> dict[str, Any]:
    """The summary of a measurement, which is kept in evaluations/NAME of the run; what is there already is not measured
    again, unless it is of other settings."""
    folder = run.evaluations / name
    before = earlier(measurement, folder)
    if before is not None and before.complete and before.summary is not None:
        return before.summary
    results = evaluate(kind_of(measurement), measurement, [(open_model(run.folder), folder)])[0]
    assert results.summary is not None, "a plan has units"
    return results.summary


def earlier(measurement: Measurement, folder: Path) -> Results | None:
    """What is in a folder of results already, complete or not. What is of other settings is removed."""
    if not (folder / FILE).is_file():
        return None
    before = read_results(folder)
    if before.measurement == kind_of(measurement) and before.settings == settings_of(measurement):
        return before
    remove_folder(folder)
    return None


def facts_of(run: Run) -> dict[str, Any]:
    """What a run has cost and how it went."""
    config, metrics = run.config(), run.metrics()
    costs = cost(SavedModel(run.folder).config())
    context = open_data(config.data, "test", config.schedule.steps).sequence_length
    return {
        "parameters": costs.parameters,
        "initial_state_parameters": costs.initial_state_parameters,
        "state_elements": costs.state_elements or costs.kv_elements_per_token * context,
        "flops_per_token": costs.training_flops_per_token(context) // 3,
        "steps": config.schedule.steps,
        "lr": config.optim.lr,
        "seconds": metrics[-1]["seconds"],
        "valid_loss": metrics[-1].get("valid/loss"),
        "slot_use": [
            (line["step"], line["memory/slots_written"], line["memory/slots_read"])
            for line in metrics
            if "memory/slots_written" in line
        ],
    }
