"""The processes of a run must be about the same thing: one with another configuration, version or data is refused by
its rank before anything is computed."""

from __future__ import annotations

import platform
from typing import Any

import torch

from sdm import __version__
from sdm.data.batch import BatchSource
from sdm.ranks import Ranks
from sdm.run.config import TrainConfig
from sdm.run.config_file import differences, to_json
from sdm.run.errors import TrainingError

# What may differ between machines.
OWN = {"config.compute.device", "config.compute.threads", "config.data.cache_dir"}


def of_process(config: TrainConfig) -> dict[str, Any]:
    """What a process was started with."""
    return {"version": {"sdm": __version__, "torch": torch.__version__}, "config": to_json(config)}


def of_data(*sources: BatchSource | None) -> dict[str, Any]:
    """What a process reads."""
    return {"data": [None if source is None else source.fingerprint for source in sources]}


def check_alike(ranks: Ranks, own: dict[str, Any]) -> None:
    """Raise on a rank that differs from the first one, and with it on all."""
    first = ranks.gather_call(lambda: own)[0]

    def compare() -> None:
        found = [entry for entry in differences(first, own) if entry[0] not in OWN]
        if not found:
            return
        what = "; ".join(f"{name} is {ours!r} here and {theirs!r} on rank 0" for name, theirs, ours in found[:5])
        raise TrainingError(f"the process on {platform.node()} is not of this run: {what}")

    ranks.gather_call(compare)
