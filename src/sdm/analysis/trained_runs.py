"""Finished runs as points of a scaling law: compute, loss, and the ladder that they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sdm.data.config import CorpusConfig
from sdm.data.loader import open_data
from sdm.errors import UserError
from sdm.evaluation.results import FILE, read_results
from sdm.models import SDMConfig, cost
from sdm.models.layer_types import LAYER_TYPES
from sdm.run import Run
from sdm.run.config_file import differences, to_json
from sdm.run.model import SavedModel

Loss = Literal["valid", "train", "test"]
LAST_LINES = 10  # of the training loss, as the paper has it
_NAMES = {"sdm": "SDM", "gdn": "GDN", "full_attention": "full attention", "mamba2": "Mamba2"}
_SAME_TEXT = ("batch_size", "seed", "cache_dir", "verify")  # fields of the data that may differ within a ladder
_SAME_MODEL = ("kind", "backend", "layer_types", "global_layer", "initializer_range")


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: its compute, its loss and its configuration."""

    name: str
    architecture: str
    """Kinds of its global layers; `ladders` adds the options in which runs of one architecture differ."""
    flops: float
    """FLOPs of the whole training: forward and backward of all tokens."""
    tokens: int
    parameters: int
    loss: float
    options: dict[str, Any]
    """Fields of the model that are no sizes."""
    sizes: dict[str, Any]
    training: dict[str, Any]
    """Optimizer and schedule."""
    data: dict[str, Any]


def trained_run(path: Path, loss: Loss = "valid", name: str | None = None) -> TrainedRun:
    """Read what a finished run has cost and reached.

    Args:
        path: The folder of the run.
        loss: "valid" is its last held-out loss, "train" the mean of the last ten lines of its training loss, "test"
            what `sdm eval nll` measured.
        name: Name of the run, by default that of its folder.

    Raises:
        UserError: If the folder is no run, the run is not finished, or it has no such loss.
    """
    run = Run(path)
    if not run.exists():
        raise UserError(f"{str(path)!r} is not a run's folder; name the folders that `sdm train` made")
    if not run.is_finished():
        raise UserError(
            f"the run in {path} is not finished, so its loss is not its last: `sdm train {path}` trains the rest"
        )
    config, model = run.config(), SavedModel(path).config()
    data = config.data
    length = (
        data.sequence_length
        if isinstance(data, CorpusConfig)
        else open_data(data, "train", config.schedule.steps).sequence_length
    )
    tokens = config.schedule.steps * data.batch_size * length
    costs = cost(model)
    fields = to_json(config.model)
    # Whole numbers are sizes, which grow along a ladder; anything else is a choice.
    options = {
        key: value
        for key, value in fields.items()
        if key not in _SAME_MODEL and isinstance(value, (bool, str, float, dict))
    }
    sizes = {key: getattr(model, key, None) for key in fields if key not in options and key not in _SAME_MODEL}
    return TrainedRun(
        name=name or path.resolve().name,
        architecture=architecture_of(model),
        flops=float(costs.training_flops_per_token(length)) * tokens,
        tokens=tokens,
        parameters=costs.parameters,
        loss=_loss(run, loss),
        options=options,
        sizes=sizes,
        training={"optim": to_json(config.optim), "schedule": to_json(config.schedule.resolved())},
        data={key: value for key, value in to_json(data).items() if key not in _SAME_TEXT},
    )


def architecture_of(config: SDMConfig) -> str:
    """Name the kinds of the global layers as figures call them."""
    kinds = [kind for kind in dict.fromkeys(config.layer_types or ()) if LAYER_TYPES[kind].scope == "global"]
    if sorted(kinds) == ["full_attention", "sdm"]:
        return "mixed"
    return " + ".join(_NAMES.get(kind, kind) for kind in kinds) or "local layers alone"


def ladders(runs: Sequence[TrainedRun]) -> dict[str, list[TrainedRun]]:
    """Group runs by architecture, and by the options in which runs of one architecture differ.

    Raises:
        UserError: If losses are not of the same data, or runs of one size differ in more than the seed.
    """
    for other in runs[1:]:
        for field, first, second in differences(runs[0].data, other.data, "data")[:1]:
            raise UserError(
                f"{runs[0].name} and {other.name} were trained on different data, so their losses cannot be compared: "
                f"{field} is {first!r} and {second!r}"
            )
    groups: dict[str, list[TrainedRun]] = {}
    for run in runs:
        kin = [other for other in runs if other.architecture == run.architecture]
        varied = [key for key in run.options if any(other.options[key] != run.options[key] for other in kin)]
        name = ", ".join((run.architecture, *(f"{key} = {_text(run.options[key])}" for key in varied)))
        groups.setdefault(name, []).append(replace(run, architecture=name))
    for name, group in groups.items():
        _check_levels(name, group)
    return groups


def _check_levels(name: str, group: Sequence[TrainedRun]) -> None:
    """Raise unless runs of one width and depth have cost the same and were trained alike, as seeds of one level are."""
    seen: dict[tuple[Any, Any], TrainedRun] = {}
    for run in group:
        first = seen.setdefault((run.sizes["hidden_size"], run.sizes["num_hidden_layers"]), run)
        if first.flops != run.flops:
            changed = [key for key in run.sizes if run.sizes[key] != first.sizes[key]]
            what = (
                f"{changed[0]} is {first.sizes[changed[0]]} and {run.sizes[changed[0]]}"
                if changed
                else (f"tokens are {first.tokens:,} and {run.tokens:,}")
            )
            raise UserError(
                f"{name}: {first.name} and {run.name} have the same width and depth but not the same cost ({what}): "
                "they are no levels of one ladder; leave one out"
            )
        for field, mine, other in differences(first.training, run.training)[:1]:
            raise UserError(
                f"{name}: {first.name} and {run.name} have the same size but were not trained alike, as seeds of one "
                f"level are: {field} is {mine!r} and {other!r}; leave one out"
            )


def _loss(run: Run, loss: Loss) -> float:
    if loss == "test":
        path = run.evaluations / "nll" / FILE
        if not path.is_file():
            raise UserError(f"{run.folder} has no {path.relative_to(run.folder)}: `sdm eval nll {run.folder}` makes it")
        results = read_results(path)
        if results.summary is None or not results.complete:
            raise UserError(f"{path} is not complete: `sdm eval nll {run.folder}` measures the rest")
        return float(results.summary["nll"])
    key = "valid/loss" if loss == "valid" else "loss"
    values = [line[key] for line in run.metrics() if key in line]
    if not values:
        other = "train" if loss == "valid" else "valid"
        raise UserError(f"{run.metrics_file} has no {key!r}; take --loss {other}")
    last = values[-1:] if loss == "valid" else values[-LAST_LINES:]
    return sum(last) / len(last)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
