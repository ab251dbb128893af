"""What a finished run of a reproduction is measured by, as plain JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from sdm.data.config import CorpusConfig, RecallConfig
from sdm.data.corpus import open_corpus
from sdm.evaluation.position import document_batches, doubling_edges, nll_by_position
from sdm.evaluation.recall import recall_accuracy
from sdm.models import SDMForCausalLM, cost
from sdm.models.saved_folder import load_model
from sdm.training import TrainConfig
from sdm.training.export import EXPORT
from sdm.training.monitor import read_metrics

PAIRS = (16, 32, 64, 128, 256, 512)
DOCUMENTS = 48  # at most: held-out documents of a whole sequence may be fewer


def measure(kind: str, config: TrainConfig, folder: Path) -> dict[str, Any]:
    model = load_model(folder / EXPORT)
    metrics = read_metrics(folder)
    result: dict[str, Any] = {
        **_costs(model, 768 if kind == "recall" else 2048),
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
    if kind == "recall":
        assert isinstance(config.data, RecallConfig)
        accuracy = recall_accuracy(model, config.data, [k for k in PAIRS if k <= config.data.num_keys])
        return result | {"accuracy": {str(pairs): value for pairs, value in accuracy.items()}}
    assert isinstance(config.data, CorpusConfig)
    length = config.data.sequence_length
    # Choices were made on the validation documents: what is shown comes from others.
    store = open_corpus(config.data, "test").stores[0]
    bins = nll_by_position(model, document_batches(store, length, limit=DOCUMENTS), doubling_edges(length))
    tokens = sum(one.tokens for one in bins)
    return result | {
        "positions": [asdict(one) for one in bins],
        "nll": sum(one.nll * one.tokens for one in bins) / tokens,
        "tokens": tokens,
    }


def _costs(model: SDMForCausalLM, context: int) -> dict[str, Any]:
    costs = cost(model.config)
    return {
        "parameters": costs.parameters,
        "initial_state_parameters": costs.initial_state_parameters,
        "state_elements": costs.state_elements or costs.kv_elements_per_token * context,
        "flops_per_token": costs.training_flops_per_token(context) // 3,
    }
