"""The mesh of a run: how many processes there are, and what each dimension splits.

The degrees of a mesh multiply to the number of processes. `resolve` refuses a mesh that cannot work before the
processes connect, and names the nearest meshes that can.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from sdm.errors import TrainingError, check_size

if TYPE_CHECKING:
    from sdm.models import SDMConfig
    from sdm.run.config import TrainConfig

SHOWN = 3  # nearest meshes that a refusal names


@dataclass(frozen=True)
class MeshConfig:
    """Degrees of parallelism. Processes are started by torchrun."""

    data: int | None = None
    """Ranks that share the rows of a batch and the weights (FSDP); None: as many as there are for it."""
    context: int = 1
    """Ranks that share the tokens of a row."""
    channel: int = 1
    """Ranks that share the value channels of the memories."""
    keep_weights: bool = False
    """Keep the weights of a block from forward to backward instead of gathering them twice: faster, where there is
    memory for all of them on every rank."""

    def __post_init__(self) -> None:
        degrees = {"data": self.data, "context": self.context, "channel": self.channel}
        check_size("compute.mesh", **{name: degree for name, degree in degrees.items() if degree is not None})


@dataclass(frozen=True)
class Mesh:
    """Degrees that fit a number of processes. Neighbouring ranks differ in the last dimension first: those that
    communicate most are on one machine."""

    data: int = 1
    context: int = 1
    channel: int = 1

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.data * self.context * self.channel

    @property
    def shards(self) -> int:
        """Ranks that share weights (FSDP) and have different tokens."""
        return self.data * self.context

    def __str__(self) -> str:
        return f"data {self.data} x context {self.context} x channel {self.channel}"


ONE = Mesh()


def resolve(config: TrainConfig, world_size: int) -> Mesh:
    """Return the mesh of a run on so many processes.

    Raises:
        TrainingError: the degrees do not multiply to the number of processes, or the run cannot use them.
    """
    wanted = config.compute.mesh
    others = wanted.context * wanted.channel
    if config.adapt is not None and world_size > 1:
        raise TrainingError(f"a run with adapt is one process, got {world_size}; for several, use transformers.Trainer")
    mesh = Mesh(wanted.data or max(world_size // others, 1), wanted.context, wanted.channel)
    if mesh.size != world_size:
        processes = "1 process" if world_size == 1 else f"{world_size} processes"
        mismatch = f"compute.mesh = {mesh} takes {mesh.size}, but there are {processes}".replace("are 1", "is 1")
        advice = f"torchrun --nproc-per-node {mesh.size} -m sdm train ... starts {mesh.size} on one machine"
        raise TrainingError(f"{mismatch}; {advice}. {_nearest(config, mesh, world_size)}")
    reason = unsupported_reason(config, mesh)
    if reason is not None:
        raise TrainingError(f"compute.mesh = {mesh} cannot work: {reason}. {_nearest(config, mesh, world_size)}")
    return mesh


def valid_meshes(config: TrainConfig, world_size: int) -> list[Mesh]:
    """Return all meshes of so many processes that this run can use."""
    small = [degree for degree in range(1, math.isqrt(world_size) + 1) if world_size % degree == 0]
    degrees = sorted({*small, *(world_size // degree for degree in small)})
    every = [
        Mesh(world_size // (context * channel), context, channel)
        for context in degrees
        for channel in degrees
        if world_size % (context * channel) == 0
    ]
    return [mesh for mesh in every if unsupported_reason(config, mesh) is None]


def unsupported_reason(config: TrainConfig, mesh: Mesh) -> str | None:
    """Return why a run cannot use a mesh; None if it can."""
    if mesh.data > config.data.batch_size:
        return f"data.batch_size = {config.data.batch_size} rows are too few for {mesh.data} ranks"
    if mesh.shards > 1 and getattr(config.model, "query_batch_norm", False):
        return "model.query_batch_norm takes the mean over all tokens of a batch, which ranks do not share"
    if mesh.context * mesh.channel == 1:
        return None
    if getattr(config.data, "layout", None) == "stream":
        return 'data.layout = "stream" carries states from step to step, which only data ranks can'
    if mesh.context > 1 and config.compute.checkpointing == "segment":
        return 'compute.checkpointing = "segment" cuts time too; take "block" or "none"'
    return _model_unsupported_reason(config.model.build(config.model.vocab_size or 256), mesh.context, mesh.channel)


def _model_unsupported_reason(config: SDMConfig, context: int, channel: int) -> str | None:
    """Why the layers of a model cannot be split over so many ranks along time and along channels; None if they can."""
    import torch  # here, so that reading a configuration does not load the layers
    from torch import nn

    from sdm.models.modeling import SDMBlock
    from sdm.parallel.channels import check_channels
    from sdm.parallel.context import check_context

    kinds = config.layer_types or []
    with torch.device("meta"):  # one layer of each type stands for all
        mixers = [SDMBlock(config, kinds.index(kind)).mixer for kind in dict.fromkeys(kinds)]
    model = nn.ModuleDict({str(place): nn.ModuleDict({"mixer": mixer}) for place, mixer in enumerate(mixers)})
    try:
        if channel > 1:
            check_channels(model, channel)
        if context > 1:
            check_context(model, context, channel)
    except ValueError as error:
        return str(error)
    return None


def _nearest(config: TrainConfig, wanted: Mesh, world_size: int) -> str:
    def distance(mesh: Mesh) -> float:
        return sum(abs(math.log(a / b)) for a, b in zip(astuple(mesh), astuple(wanted), strict=True))

    nearest = sorted(valid_meshes(config, world_size), key=distance)[:SHOWN]
    if not nearest:
        fewer = next((size for size in range(world_size - 1, 0, -1) if valid_meshes(config, size)), None)
        return "No mesh can" + ("" if fewer is None else f" with {world_size} processes; with {fewer} there is one")
    return f"The nearest that can on {world_size}: {'; '.join(map(str, nearest))}"
