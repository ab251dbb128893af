"""The estimate of a training step on accelerators that are not at hand: memory, traffic and time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from sdm.models import SDMConfig, cost
from sdm.models.layer_types.base import derived
from sdm.parallel import shard_size
from sdm.plan.dry_run import BlockCost, Sent, dry_run
from sdm.plan.kernel_time import GPUS, Estimate, MemoryCall
from sdm.run.config import TrainConfig
from sdm.run.mesh import Mesh, valid_meshes

CHUNK = 64  # tokens for which kernels of dense recurrences keep the state on the chip
MOST_CONTEXT = 64  # ranks for one sequence
FLOAT = 4  # bytes of weights, gradients, moments, states and gates


@dataclass(frozen=True)
class Workload:
    """One optimizer step on every rank of a mesh."""

    model: SDMConfig
    mesh: Mesh
    sequence_length: int
    batch_size: int
    """Rows of a step, of all ranks."""
    rows: int = 1
    """Rows that a rank computes at a time."""
    precision: str = "bfloat16"
    """Type of matrix products and activations: "float32" or "bfloat16"."""
    checkpointing: str = "block"
    """What backward recomputes: "none" or "block"."""
    keep_weights: bool = False
    """Whether ranks keep the weights of a block from forward to backward (`compute.mesh.keep_weights`)."""
    on_cpu: bool = False
    """Whether memories run on the CPU core, which has tables of a few channels at a time."""
    saved_share: float = 0.07
    """CPU core: share of the written rows that backward cannot recover, and forward saves."""
    channels_at_once: int = 64
    """CPU core: value channels of the tables of a thread."""

    @property
    def pieces(self) -> int:
        """Pieces that a rank's rows are computed in; gradients are added up over them."""
        return math.ceil(math.ceil(self.batch_size / self.mesh.data) / self.rows)

    @property
    def slice_length(self) -> int:
        """Tokens of a row that a rank has."""
        return math.ceil(self.sequence_length / self.mesh.context)

    @property
    def tokens(self) -> int:
        """Tokens that a rank computes at a time."""
        return self.rows * self.slice_length


# Shares of the vendors' peaks that an estimate assumes. Matrix products of real models reach about this, so do streams
# of rows. They are printed beside every estimate.
MATRIX_SHARE, MEMORY_SHARE, WIRE_SHARE = 0.5, 0.8, 0.8
USABLE = 0.92  # of the memory: the rest goes to the context, the allocator and the collectives' buffers


@dataclass(frozen=True)
class Accelerator:
    """One device, by its vendor's data sheet."""

    name: str
    memory: float  # bytes
    bandwidth: float  # bytes of its memory per second
    flops: float  # dense bfloat16 per second
    link: float  # bytes per second to a neighbour in the machine, each way
    network: float  # bytes per second to another machine, each way
    modelled: str  # GPU of the latency model whose kernels it is given, with its own bandwidth
    per_machine: int = 8

    def speed(self, span: int) -> float:
        """Return the bytes per second between ranks of a group that spans so many consecutive devices."""
        return WIRE_SHARE * (self.link if span <= self.per_machine else self.network)


ACCELERATORS = {
    "a100": Accelerator("A100 80GB SXM", 80e9, 2.04e12, 312e12, 300e9, 25e9, "A100"),
    "h100": Accelerator("H100 SXM", 80e9, 3.35e12, 989e12, 450e9, 50e9, "H100"),
    "h200": Accelerator("H200 SXM", 141e9, 4.8e12, 989e12, 450e9, 50e9, "H100"),
    "mi300x": Accelerator("MI300X", 192e9, 5.3e12, 1307e12, 448e9, 50e9, "H100"),
}


@dataclass(frozen=True)
class Plan:
    """What a training step takes on a mesh."""

    work: Workload
    device: Accelerator
    memory: Memory  # of one rank
    sent: Sent  # by one rank in one step
    matrix_seconds: float  # of matrix products
    recurrence: Estimate  # seconds of recurrent layers and memories, without their matrix products
    wire_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds of a step, without overlap, at the slow end of the recurrences' range."""
        return self.matrix_seconds + self.recurrence.high + self.wire_seconds

    @property
    def least_seconds(self) -> float:
        """The same at the fast end."""
        return self.matrix_seconds + self.recurrence.low + self.wire_seconds

    @property
    def fits(self) -> bool:
        """Whether a rank's memory fits into the device."""
        return self.memory.total <= USABLE * self.device.memory


def mesh_plans(config: TrainConfig, gpus: int, gpu: str, length: int, **options: Any) -> Iterator[Plan]:
    """Plan a run on every mesh that can work, with channels split within one machine at most.

    Many ranks for rows come first, then few for channels and few for the tokens of a row.

    Args:
        config: the run.
        gpus: number of accelerators.
        gpu: a key of `ACCELERATORS`.
        length: tokens of a row that are computed at a time.
        options: further fields of `Workload`.
    """
    model, device = config.model.build(config.model.vocab_size or 0), ACCELERATORS[gpu]
    for mesh in sorted(valid_meshes(config, gpus), key=lambda mesh: (-mesh.data, mesh.channel, mesh.context)):
        if mesh.channel <= device.per_machine and mesh.context <= min(MOST_CONTEXT, length):
            yield make_plan(Workload(model, mesh, length, config.data.batch_size, **options), device)


def make_plan(work: Workload, device: Accelerator) -> Plan:
    """Estimate a training step from a dry run of the blocks.

    The time is that of matrix products at half of the peak, of recurrences (`recurrence_seconds`) and of the wire at
    four fifths of its speed, one after the other.

    Args:
        work: the step.
        device: what every rank runs on.
    """
    blocks = dry_run(work)
    sent, model = traffic(work, blocks), cost(work.model)
    tokens = work.pieces * work.tokens
    flops = model.training_flops_per_token(work.sequence_length)
    if work.checkpointing == "block":
        flops = flops * 4 // 3  # forward runs twice
    return Plan(
        work,
        device,
        memory(work, blocks),
        sent,
        tokens * flops / (MATRIX_SHARE * device.flops),
        recurrence_seconds(work, device),
        seconds_on_wire(work, sent, device),
    )


def recurrence_seconds(work: Workload, device: Accelerator) -> Estimate:
    """Return the seconds of a step that a rank spends in recurrences and memories, beside matrix products.

    Those of sparse delta memories are modelled from their compiled kernels (`sdm.plan.kernel_time`). Others are bound
    by the bandwidth, of which they reach four fifths: once in forward, twice in backward. Kernels of layers that would
    move their whole state for each token keep it on the chip for a chunk of tokens.
    """
    passes = 2 if work.checkpointing == "block" else 1  # of forward
    model, total, moved = work.model, Estimate(), 0.0
    for layer in cost(model).layers:
        if layer.kind == "sdm":
            heads = model.num_memory_heads
            channels = math.ceil(model.hidden_size // heads / work.mesh.context / work.mesh.channel)
            accesses = derived(model.num_writes), derived(model.num_reads)
            call = MemoryCall(work.rows, work.sequence_length, heads, channels, *accesses)
            forward, backward = call.seconds(GPUS[device.modelled], device.bandwidth)
            total += (forward * passes + backward) * work.pieces
        elif layer.state_moved >= layer.state > 0:
            moved += layer.state_moved / CHUNK
        else:
            moved += layer.state_moved
    seconds = work.pieces * work.tokens * moved / work.mesh.channel * FLOAT * (passes + 2)
    seconds /= MEMORY_SHARE * device.bandwidth
    return total + Estimate(seconds, seconds, seconds)


def traffic(work: Workload, blocks: dict[str, BlockCost]) -> Sent:
    """Return the bytes that one rank passes to collectives in a step, by dimension of the mesh and kind."""
    sent: Sent = {"data": _of_shards(work, blocks), "context": {}, "channel": {}}
    # Recomputation in backward sends again.
    again = 2 if work.checkpointing == "block" else 1
    for kind in work.model.layer_types or []:
        for part, times in ((blocks[kind].forward, again), (blocks[kind].backward, 1)):
            for dim, kinds in part.items():
                for collective, count in kinds.items():
                    sent[dim][collective] = sent[dim].get(collective, 0) + times * work.pieces * count
    return {dim: kinds for dim, kinds in sent.items() if kinds}


def _of_shards(work: Workload, blocks: dict[str, BlockCost]) -> dict[str, float]:
    """FSDP gathers each block for forward and, unless it is kept, again for backward, the root once, piece by piece;
    gradients are reduced after the last piece."""
    shards = work.mesh.shards
    if shards == 1:
        return {}
    model = work.model
    embedding = shard_size(torch.Size((model.vocab_size, model.hidden_size)), shards)
    norm = shard_size(torch.Size((model.hidden_size,)), shards)
    root = embedding * (1 if model.tie_word_embeddings else 2) + norm
    inner = sum(blocks[kind].shard for kind in model.layer_types or [])
    return {
        "all_gather": FLOAT * work.pieces * ((1 if work.keep_weights else 2) * inner + root),
        "reduce_scatter": FLOAT * shards * (inner + root),
    }


def seconds_on_wire(work: Workload, sent: Sent, device: Accelerator) -> float:
    """Return the seconds of all collectives of a step, one after the other.

    A ring moves (P - 1) / P of a tensor for each half of an all-reduce.
    """
    mesh, total = work.mesh, 0.0
    spans = {"channel": mesh.channel, "context": mesh.context * mesh.channel, "data": mesh.size}
    ranks = {"channel": mesh.channel, "context": mesh.context, "data": mesh.shards}
    for dim, kinds in sent.items():
        count, speed = ranks[dim], device.speed(spans[dim])
        share = (count - 1) / count
        factors = {"all_reduce": 2 * share, "all_gather": count - 1, "neighbour": 1}
        total += sum(factors.get(kind, share) * size for kind, size in kinds.items()) / speed
    return total


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, at one moment."""

    weights: float  # its share, and what is gathered of the others' for the blocks at work
    initial_states: float  # M0, likewise
    optimizer: float  # two moments
    gradients: float
    states: float  # the tables of the memory at work, and their gradients
    scratch: float  # of its backward: rows that it cannot recover, on a GPU links between accesses, parts of gradients
    activations: float  # kept for backward, the block at work and the logits
    elsewhere: float = 0.0  # of states and scratch: not there at this moment, and not in the total

    @property
    def total(self) -> float:
        """Bytes of all kinds that exist at this moment."""
        return sum(getattr(self, field.name) for field in fields(self)) - 2 * self.elsewhere


def memory(work: Workload, blocks: dict[str, BlockCost]) -> Memory:
    """Return the memory of a rank at its peak. States and scratch are listed even if theirs is at another moment."""
    most = max(_moments(work, blocks), key=lambda moment: moment.total)
    states, scratch = max(_in_recurrence(work, block) for block in blocks.values())
    elsewhere = states + scratch - most.states - most.scratch
    return replace(most, states=states, scratch=scratch, elsewhere=elsewhere)


def _moments(work: Workload, blocks: dict[str, BlockCost]) -> Iterator[Memory]:
    """The moments that can be the peak: those of backward, from the logits to the embeddings, where activations become
    fewer and gradients more; and those of forward, if weights are kept."""
    model, shards = work.model, work.mesh.shards
    fsdp = work.mesh.size > 1  # FSDP gathers blocks when they run; a single rank with the same channels copies them
    stack = [blocks[kind] for kind in model.layer_types or []]
    head = model.vocab_size * model.hidden_size
    root = head * (1 if model.tie_word_embeddings else 2) + model.hidden_size
    inner, tables = sum(block.weights for block in stack), sum(block.initial_state for block in stack)
    inputs = FLOAT * work.tokens * model.hidden_size

    def moment(
        activations: float,
        gradients: float,
        gathered: float = 0,
        gathered_tables: float = 0,
        states: float = 0,
        scratch: float = 0,
    ) -> Memory:
        if work.pieces > 1:  # those of the pieces before, which are not exchanged before the last one
            gradients = root + inner + tables
        return Memory(
            weights=FLOAT * ((root + inner) / shards + (root + gathered if fsdp else 0)),
            initial_states=FLOAT * (tables / shards + (gathered_tables if fsdp else 0)),
            optimizer=2 * FLOAT * (root + inner + tables) / shards,
            gradients=FLOAT * gradients,
            states=states,
            scratch=scratch,
            activations=activations,
        )

    kept = [inputs if work.checkpointing == "block" else block.saved for block in stack]
    logits = 3 * FLOAT * min(model.loss_chunk_size or work.tokens, work.tokens) * model.vocab_size
    whole = work.keep_weights and fsdp  # blocks that backward has not reached are there whole
    there = stack if whole else stack[-1:]
    if whole and shards > 1:  # forward, where the blocks come one by one, as below in backward
        for place, block in enumerate(stack):
            weights, states = _gathered(stack[: place + 1])
            yield moment(sum(kept[:place]) + inputs, 0, weights + block.weights, states + 2 * block.initial_state)
    yield moment(sum(kept) + 3 * inputs + logits, head, *_gathered(there))
    for place in reversed(range(len(stack))):
        block, later = stack[place], stack[place + 1 :]
        gradients: float = head + sum(block.weights + block.initial_state for block in later)
        if shards > 1:  # the head's are exchanged at the end, with those of the embeddings
            on_wire = later[0].weights + later[0].initial_state if later else 0
            gradients = head + (gradients - head) / shards + on_wire
            if not whole:
                # The weights come in one piece and are taken apart; tables cut by slots are put together besides.
                yield moment(sum(kept[: place + 1]) + inputs, gradients, 2 * block.weights, 3 * block.initial_state)
        # One is fetched while the one after it is at work; what that one said of its weights is on the wire.
        there = stack[: place + 1] if whole else stack[max(place - 1, 0) : place + 1] if shards > 1 else [block]
        below = sum(kept[:place]) + inputs
        yield moment(below + block.peak, gradients, *_gathered(there))
        if block.in_recurrence:
            memory_at_work = _in_recurrence(work, block)
            yield moment(below + block.in_recurrence, gradients, *_gathered(there), *memory_at_work)
    first = stack[0].weights + stack[0].initial_state
    yield moment(inputs, root + inner + tables if shards == 1 else root + (inner + tables) / shards + first)


def _gathered(blocks: Sequence[BlockCost]) -> tuple[float, float]:
    """Elements of weights and of initial states."""
    return sum(block.weights for block in blocks), sum(block.initial_state for block in blocks)


def _in_recurrence(work: Workload, block: BlockCost) -> tuple[float, float]:
    """Bytes of the tables while a block's memory runs backward, and of what else that allocates."""
    if not work.on_cpu or not block.in_recurrence:
        return block.tables, block.scratch
    layers = [layer for layer in cost(work.model).layers if layer.state_moved]
    split = work.mesh.context * work.mesh.channel
    heads = getattr(work.model, "num_memory_heads", 1) or 1
    share = min(1.0, work.channels_at_once / (work.model.hidden_size // heads // split)) if layers else 1.0
    table = max((layer.state for layer in layers), default=0) / split
    written = max((_written(layer.state_moved, work.model) for layer in layers), default=0) / split
    rows = work.saved_share * work.rows * work.sequence_length * written
    return share * 2 * FLOAT * work.rows * table, share * FLOAT * rows


def _written(moved: int, model: object) -> float:
    """Elements that a token overwrites, of those that it moves: writes are read and written, reads are read."""
    writes, reads = getattr(model, "num_writes", 1) or 1, getattr(model, "num_reads", 1) or 1
    return moved * writes / (2 * writes + reads)
