"""Memory that a training step takes of a rank, by kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from sdm.models import cost
from sdm.plan.dry_run import BlockCost
from sdm.plan.workload import FLOAT, Workload


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank, at one moment."""

    weights: float  # its share, and what is gathered of the others' for the blocks at work
    initial_states: float  # M0, likewise
    optimizer: float  # two moments
    gradients: float
    states: float  # the tables of the memory at work, and their gradients
    saved_rows: float  # rows that backward cannot recover
    activations: float  # kept for backward, the block at work and the logits
    elsewhere: float = 0.0  # of states and rows: not there at this moment, and not in the total

    @property
    def total(self) -> float:
        """Bytes of all kinds that exist at this moment."""
        return sum(getattr(self, field.name) for field in fields(self)) - 2 * self.elsewhere


def memory(work: Workload, blocks: dict[str, BlockCost]) -> Memory:
    """Return the memory of a rank at its peak. States and rows are listed even if their peak is at another moment."""
    most = max(_moments(work, blocks), key=lambda moment: moment.total)
    states, rows = _tables(work)
    elsewhere = states + rows - most.states - most.saved_rows
    return replace(most, states=states, saved_rows=rows, elsewhere=elsewhere)


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
        saved_rows: float = 0,
    ) -> Memory:
        if work.pieces > 1:  # those of the pieces before, which are not exchanged before the last one
            gradients = root + inner + tables
        return Memory(
            weights=FLOAT * ((root + inner) / shards + (root + gathered if fsdp else 0)),
            initial_states=FLOAT * (tables / shards + (gathered_tables if fsdp else 0)),
            optimizer=2 * FLOAT * (root + inner + tables) / shards,
            gradients=FLOAT * gradients,
            states=states,
            saved_rows=saved_rows,
            activations=activations,
        )

    kept = [inputs if work.checkpointing == "block" else block.saved for block in stack]
    logits = 3 * FLOAT * min(model.loss_chunk_size or work.tokens, work.tokens) * model.vocab_size
    table, rows = _tables(work)
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
            yield moment(below + block.in_recurrence, gradients, *_gathered(there), table, rows)
    first = stack[0].weights + stack[0].initial_state
    yield moment(inputs, root + inner + tables if shards == 1 else root + (inner + tables) / shards + first)


def _gathered(blocks: Sequence[BlockCost]) -> tuple[float, float]:
    """Elements of weights and of initial states."""
    return sum(block.weights for block in blocks), sum(block.initial_state for block in blocks)


def _tables(work: Workload) -> tuple[float, float]:
    """Bytes of the tables of a memory and their gradients, and of the rows that are kept for backward."""
    layers = [layer for layer in cost(work.model).layers if layer.state_moved]
    split = work.mesh.context * work.mesh.channel
    share = 1.0
    if work.channels_at_once is not None and layers:
        heads = getattr(work.model, "num_memory_heads", 1) or 1
        share = min(1.0, work.channels_at_once / (work.model.hidden_size // heads // split))
    table = max((layer.state for layer in layers), default=0) / split
    written = max((_written(layer.state_moved, work.model) for layer in layers), default=0) / split
    rows = work.saved_share * work.rows * work.sequence_length * written
    return share * 2 * FLOAT * work.rows * table, share * FLOAT * rows


def _written(moved: int, model: object) -> float:
    """Elements that a token overwrites, of those that it moves: writes are read and written, reads are read."""
    writes, reads = getattr(model, "num_writes", 1) or 1, getattr(model, "num_reads", 1) or 1
    return moved * writes / (2 * writes + reads)
