"""How much memory a training step takes of a rank, by kind."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sdm.models import cost
from sdm.plan.rehearsal import Rehearsal
from sdm.plan.workload import FLOAT, Workload


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the moment when it has most."""

    weights: float  # its share, and what is gathered of the others' for the blocks at work
    initial_states: float  # M0, likewise
    optimizer: float  # two moments
    gradients: float
    states: float  # the tables of the memory at work, and their gradients
    saved_rows: float  # rows that backward cannot recover
    activations: float  # kept for backward, the block at work and the logits

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def memory(work: Workload, blocks: dict[str, Rehearsal]) -> Memory:
    """The larger of two moments: when backward begins, all activations are there and few gradients; when it ends, all
    gradients are there and few activations."""
    model, mesh = work.model, work.mesh
    stack = [blocks[kind] for kind in model.layer_types or []]
    root = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2) + model.hidden_size
    weights, tables = root + sum(one.weights for one in stack), sum(one.initial_state for one in stack)

    shards = mesh.shards
    # With shards, the root is gathered for the whole pass, and a block while the next one is fetched already.
    gathered = 0 if shards == 1 else root + 2 * max(one.weights for one in stack)
    gathered_tables = 0 if shards == 1 else max(one.initial_state for one in stack)
    largest = max(one.weights + one.initial_state for one in stack)

    inputs = FLOAT * work.tokens * model.hidden_size
    at_work = max(one.saved for one in stack) + 3 * FLOAT * work.tokens * (model.intermediate_size or 0)
    kept = len(stack) * inputs + at_work if work.checkpointing == "block" else sum(one.saved for one in stack)
    logits = 3 * FLOAT * min(model.loss_chunk_size or work.tokens, work.tokens) * model.vocab_size
    begin = kept + 3 * inputs + logits
    # Gradients that are not exchanged yet, because pieces of the batch are to come, are whole on every rank.
    whole, shared = weights + tables, (weights + tables) / shards
    first = whole if work.pieces > 1 and shards > 1 else (shared if work.pieces > 1 else 0) + largest
    last = whole if work.pieces > 1 and shards > 1 else shared + largest
    activations, gradients = max((begin, first), (at_work, last), key=lambda pair: pair[0] + FLOAT * pair[1])

    layers = cost(model).layers
    table = max((layer.state for layer in layers if layer.state_moved), default=0)
    split = mesh.context * mesh.channel
    written = max((_written(layer.state_moved, model) for layer in layers), default=0)
    return Memory(
        weights=FLOAT * (weights / shards + gathered),
        initial_states=FLOAT * (tables / shards + gathered_tables),
        optimizer=2 * FLOAT * (weights + tables) / shards,
        gradients=FLOAT * gradients,
        states=2 * FLOAT * work.rows * table / split,
        saved_rows=FLOAT * work.saved_share * work.rows * work.sequence_length * written / split,
        activations=activations,
    )


def _written(moved: int, model: object) -> float:
    """Elements that a token overwrites, of those that it moves: writes are read and written, reads are read."""
    writes, reads = getattr(model, "num_writes", 1) or 1, getattr(model, "num_reads", 1) or 1
    return moved * writes / (2 * writes + reads)
