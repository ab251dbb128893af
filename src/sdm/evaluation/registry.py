"""Every measurement by its name. A new one is a function in a file of its own and a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sdm.data.config import CorpusConfig, DataConfig, MQARTaskConfig, RecallConfig
from sdm.errors import UserError
from sdm.evaluation import likelihood, mqar, position, recall
from sdm.models import SDMForCausalLM


@dataclass(frozen=True)
class Measurement:
    data: type
    """What it is measured on."""
    run: Callable[[SDMForCausalLM, Any], dict[str, Any]]
    """From a model and such data to plain JSON."""


MEASUREMENTS: dict[str, Measurement] = {
    "nll": Measurement(CorpusConfig, likelihood.measure),
    "position": Measurement(CorpusConfig, position.measure),
    "recall": Measurement(RecallConfig, recall.measure),
    "mqar": Measurement(MQARTaskConfig, mqar.measure),
}


def measure(name: str, model: SDMForCausalLM, data: DataConfig) -> dict[str, Any]:
    """A measurement of a model, on held-out data where the data has some."""
    if name not in MEASUREMENTS:
        raise UserError(f"there is no measurement {name!r}; there are {', '.join(MEASUREMENTS)}")
    measurement = MEASUREMENTS[name]
    if not isinstance(data, measurement.data):
        raise UserError(f"{name} is measured on {measurement.data.__name__}, got data of {type(data).__name__}")
    return measurement.run(model, data)
