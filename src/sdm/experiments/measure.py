"""What a finished run of a reproduction is measured by, as plain JSON."""

from __future__ import annotations

from typing import Any

from sdm.data.loader import open_data
from sdm.evaluation.measurement import Measurement
from sdm.evaluation.position import Position
from sdm.evaluation.registry import find
from sdm.evaluation.session import evaluate
from sdm.evaluation.subject import open_subject
from sdm.models import cost
from sdm.run import Run

# Where a job measures otherwise than `sdm eval NAME RUN` by default.
SETTINGS: dict[str, Measurement] = {"position": Position(gain=False)}


def measure_run(name: str, run: Run) -> dict[str, Any]:
    """A measurement, beside what the run has cost and how it went."""
    measurement = SETTINGS.get(name) or find(name)()
    subject = open_subject(run.folder)
    results = evaluate(name, measurement, [(subject, run.evaluations / name)])[0]
    config, costs = run.config(), cost(subject.model.config)
    metrics = run.metrics()
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
    } | (results.summary or {})
