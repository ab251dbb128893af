"""What a finished run of a reproduction is measured by, as plain JSON."""

from __future__ import annotations

from typing import Any

from sdm.data.loader import open_data
from sdm.evaluation.registry import measure
from sdm.models import cost
from sdm.run import Run
from sdm.run.model import SavedModel


def measure_run(measurement: str, run: Run) -> dict[str, Any]:
    """A measurement, beside what the run has cost and how it went."""
    config, model = run.config(), SavedModel(run.folder).load()
    metrics, costs, data = run.metrics(), cost(model.config), config.data
    context = open_data(data, "test", config.schedule.steps).sequence_length
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
    } | measure(measurement, model, data)
