"""The meshes that make sense for a model on a number of GPUs, each with its plan."""

from __future__ import annotations

from dataclasses import replace

from sdm.data.config import CorpusConfig
from sdm.errors import UserError
from sdm.models.ladder import LEVELS
from sdm.plan import ACCELERATORS, Plan, Workload, make_plan
from sdm.reproduce.recipes.ladder import ladder
from sdm.run.mesh import valid_meshes

MOST_CONTEXT = 64  # ranks for one sequence


def plans(
    level: int,
    global_layer: str,
    gpus: int,
    gpu: str,
    sequence_length: int,
    batch_tokens: int,
    rows: int,
    precision: str,
    checkpointing: str,
    keep_weights: bool = False,
) -> list[Plan]:
    """One for every mesh that can work, with channels split within one machine at most."""
    if level not in LEVELS:
        raise UserError(f"--level must be one of {', '.join(map(str, LEVELS))}, got {level}")
    device, batch_size = ACCELERATORS[gpu], batch_tokens // sequence_length
    config = ladder(level, global_layer)
    assert isinstance(config.data, CorpusConfig)
    data = replace(config.data, sequence_length=sequence_length, batch_size=batch_size)
    config = replace(config, data=data, compute=replace(config.compute, accumulation=1))
    meshes = [
        mesh
        for mesh in valid_meshes(config, gpus)
        if mesh.channel <= device.per_machine and mesh.context <= min(MOST_CONTEXT, sequence_length)
    ]
    if not meshes:
        raise UserError(
            f"no mesh of {gpus} GPUs works for a step of {batch_size} rows of {sequence_length} tokens; take fewer "
            "--gpus or more --batch-tokens"
        )
    model = config.model.build(config.model.vocab_size or 0)
    return [
        make_plan(
            Workload(model, mesh, sequence_length, batch_size, rows, precision, checkpointing, keep_weights), device
        )
        for mesh in meshes
    ]
