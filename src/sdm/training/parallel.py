"""Where ranks differ: the one file of the trainer that knows how its work is dealt to processes.

It answers which rows of a batch this process computes and in which pieces, where the weights are, how values and
gradients of all processes become those of the whole batch, how long the gradient is, and who writes (`ranks.first`).
The trainer makes the same calls whatever the number of processes; with one they cost nothing. What the processes say
to each other besides is in `sdm.ranks`, which degrees there are in `sdm.run.mesh`.

The engine is torch's: a `DeviceMesh` with the dimensions "data", "context" and "channel", and FSDP2 over the first two,
whose ranks have the same weights and different tokens. Ranks along "channel" have the same tokens.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from sdm.data.batch import IGNORED, Batch, BatchSource
from sdm.models import SDMForCausalLM
from sdm.parallel import ChannelShard, TimeSlice, from_full_, shard_dim, split_channels, split_time, to_full
from sdm.ranks import ALONE, Ranks, join, world_size
from sdm.run.config import TrainConfig
from sdm.run.errors import TrainingError
from sdm.run.mesh import ONE, Mesh, resolve


def start(config: TrainConfig) -> Parallel:
    """Meet the other processes of a run, unless its mesh cannot work: that is known before."""
    mesh = resolve(config, world_size())
    device = _device(config.compute.device)
    return Parallel(mesh, join(device), device, config.compute.mesh.keep_weights)


class Parallel:
    """The ranks of a run."""

    def __init__(
        self,
        mesh: Mesh = ONE,
        ranks: Ranks = ALONE,
        device: torch.device | None = None,
        keep_weights: bool = False,
    ) -> None:
        self.mesh, self.ranks, self._keep_weights = mesh, ranks, keep_weights
        self.device = device or torch.device("cpu")
        self.device_mesh: DeviceMesh | None = None
        self.channel_shards: dict[str, ChannelShard] = {}  # the parameters of which this rank has some channels
        if torch.distributed.is_initialized() and ranks.size > 1:
            shape = (mesh.data, mesh.context, mesh.channel)
            self.device_mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("data", "context", "channel"))

    def pieces(self, batch_size: int, accumulation: int = 1) -> list[range]:
        """The rows of a batch that this rank computes, in pieces whose gradients are added up.

        Data ranks get consecutive rows, the same number but for the last ones, and all the same number of pieces. A
        piece is never larger than the batch cut into `accumulation`, so that fewer ranks take more pieces and no more
        memory. Where rows run out a piece is empty: see `draw`.
        """
        each = math.ceil(batch_size / self.mesh.data)
        number = math.ceil(each / math.ceil(batch_size / accumulation))
        first = self.ranks.rank // (self.mesh.context * self.mesh.channel) * each
        rows, size = range(batch_size)[first : first + each], math.ceil(each / number)
        return [rows[place * size : (place + 1) * size] for place in range(number)]

    def sum(self, *values: float) -> tuple[float, ...]:
        """Each value, added up over the tokens of all ranks. Those along "channel" have the same ones."""
        return tuple(value / self.mesh.channel for value in self.ranks.sum(*values))

    def add_up_(self, x: Tensor) -> Tensor:
        """A tensor of every rank, added up in place as `sum` does."""
        if self.device_mesh is not None:
            torch.distributed.all_reduce(x)
            x /= self.mesh.channel
        return x

    def largest_(self, x: Tensor) -> Tensor:
        """The largest of each element over the ranks, in place."""
        if self.device_mesh is not None:
            torch.distributed.all_reduce(x, torch.distributed.ReduceOp.MAX)
        return x

    def shard(self, model: SDMForCausalLM) -> None:
        """Deal the weights of a model to the ranks, block by block: each holds its share and gathers a block's weights
        when it runs. The rest, embeddings and head, is gathered for the whole of a pass. The weights are those of the
        first rank; elsewhere the model may be on the meta device."""
        if self.device_mesh is None:
            return
        mesh = self.device_mesh["data"]
        if self.mesh.context > 1:
            mesh = self.device_mesh["data", "context"]._flatten("shards")
        whole = model.state_dict() if self.ranks.first else {}
        if self.mesh.channel > 1:
            self.channel_shards = split_channels(model, self.device_mesh["channel"].get_group())
        if self.mesh.context > 1:
            split_time(model, self.device_mesh["context"].get_group())
        for module in (*model.model.layers, model):
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=False if self._keep_weights else None,  # None: all but the root
                shard_placement_fn=lambda x: Shard(shard_dim(x.shape, mesh.size())),
            )
            assert isinstance(module, FSDPModule)
            # The loss is divided by the targets of the whole batch: gradients are added up, and not averaged.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
        register_fsdp_forward_method(model, "nll")
        _materialize(model, whole, self.device, self.channel_shards)

    def reduce_gradients(self, model: nn.Module, last: bool) -> None:
        """Say before a piece is computed whether it is the last one: only after it the ranks add up what they have."""
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)

    def gradient_norm(self, model: nn.Module) -> Tensor:
        """The length of the whole gradient."""
        if self.device_mesh is None or not self.channel_shards:
            return _length(model.parameters())
        # Of the parameters that are cut every rank along "channel" has another part, of the others the same.
        named = [(name, x) for name, x in model.named_parameters() if x.grad is not None]
        squares = _length(x for name, x in named if name in self.channel_shards).square()
        torch.distributed.all_reduce(squares, group=self.device_mesh["channel"].get_group())
        return (squares + _length(x for name, x in named if name not in self.channel_shards).square()).sqrt()

    def clip_(self, parameters: Sequence[nn.Parameter], longest: float, norm: Tensor) -> None:
        """Shorten a gradient of length `norm`."""
        torch.nn.utils.clip_grads_with_norm_(parameters, longest, norm)

    def full(self, parameter: str, x: Tensor) -> Tensor:
        """`x`, which belongs to a parameter of this rank, as its share of the whole, or as the whole itself."""
        if parameter not in self.channel_shards or x.dim() == 0:
            return x
        assert self.device_mesh is not None
        return to_full(x, self.channel_shards[parameter], self.device_mesh)

    def from_full_(self, parameter: str, x: Tensor, full: Tensor) -> None:
        """The inverse: fill `x`."""
        if parameter in self.channel_shards and x.dim() > 0:
            from_full_(x, full, self.channel_shards[parameter])

    def draw(self, source: BatchSource, step: int, rows: range) -> Batch:
        """What this rank computes of these rows of a step's batch. One that has none takes part with a row of which
        nothing is to be predicted: ranks only get on together."""
        if rows:
            return self.slice(source.batch(step, rows))
        batch = source.batch(step, range(1))
        return self.slice(replace(batch, targets=torch.full_like(batch.targets, IGNORED)))

    def slice(self, batch: Batch) -> Batch:
        """The tokens of a batch that this rank computes."""
        if self.mesh.context == 1:
            return batch
        rank = self.ranks.rank // self.mesh.channel % self.mesh.context
        part = TimeSlice.of(batch.input_ids, batch.targets, batch.cu_seqlens, rank, self.mesh.context)
        return replace(batch, input_ids=part.input_ids, targets=part.targets, cu_seqlens=part.cu_seqlens)

    def rows_of_all(self, own: Tensor, batch_size: int) -> Tensor:
        """What this rank has of each of its rows, [rows, ...], as its share of [batch_size, ...]."""
        if self.device_mesh is None:
            return own
        shape = torch.Size([batch_size, *own.shape[1:]])
        stride = torch.empty(shape, device="meta").stride()
        own = own.contiguous()
        return DTensor.from_local(
            own, self.device_mesh["data"], [Shard(0)], run_check=False, shape=shape, stride=stride
        )

    def own_rows(self, shared: Tensor) -> Tensor:
        """The inverse of `rows_of_all`."""
        return local(shared)


def local(x: Tensor) -> Tensor:
    """This rank's share of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def _length(parameters: Iterable[nn.Parameter]) -> Tensor:
    norm = torch.nn.utils.get_total_norm([x.grad for x in parameters if x.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _materialize(
    model: SDMForCausalLM, whole: dict[str, Any], device: torch.device, shards: dict[str, ChannelShard]
) -> None:
    """Give the shares of a model their memory and the values of the first rank."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    if any(x.is_meta for x in (*model.parameters(), *model.buffers())):
        model.to_empty(device=device)
        model.tie_weights()
    else:
        nn.Module.to(model, device)
    if shards:  # one after the other, so that no rank holds all of them
        for name, x in model.state_dict().items():
            shape = shards[name].full_shape(x.shape) if name in shards else x.shape
            value = whole[name].to(device) if whole else torch.empty(shape, dtype=x.dtype, device=device)
            torch.distributed.broadcast(value, 0)
            from_full_(x, value, shards.get(name))
        return
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def _device(name: str) -> torch.device:
    """The device of this process. Processes of one machine take its GPUs in turn."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and world_size() > 1:
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # the latter from a torch without CUDA
        reason = str(error).splitlines()[0]
        raise TrainingError(f"compute.device = {name!r} cannot be used here: {reason}; try 'auto'") from error
    return device
