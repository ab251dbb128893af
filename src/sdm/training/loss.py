"""The loss of a batch, with states that are carried from step to step or from segment to segment.

States are one per layer, as the layers return them; None stands for streams that have not begun.

Shapes: B rows, T time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sdm.data.batch import IGNORED, Batch
from sdm.layers import LayerState
from sdm.models import SDMCache, SDMForCausalLM
from sdm.models.loss import chunked_cross_entropy

States = list[LayerState]


def batch_loss(model: SDMForCausalLM, batch: Batch, num_labels: int) -> Tensor:
    """The summed cross-entropy of rows that stand for themselves, divided by `num_labels`."""
    hidden = model.model(input_ids=batch.input_ids, cu_seqlens=batch.cu_seqlens, use_cache=False).last_hidden_state
    return _cross_entropy(model, hidden, batch.labels, num_labels)


def carried_loss(
    model: SDMForCausalLM, batch: Batch, num_labels: int, states: States | None, segment_length: int | None
) -> tuple[Tensor, States]:
    """The same behind `states`, and the states after the batch.

    With a segment length, time is cut into segments of which only the states in between are kept: backward computes
    each segment again when it gets there. Gradients pass through the states, so that nothing is truncated and the
    result is that of the whole; memory is that of one segment, whatever T.
    """

    def segment(input_ids: Tensor, labels: Tensor, before: States | None) -> tuple[Tensor, States]:
        cache = SDMCache(model.config)
        if before is not None:
            for layer, state in zip(cache.layers, before, strict=True):
                layer.state = state
        hidden = model.model(input_ids=input_ids, past_key_values=cache, use_cache=True).last_hidden_state
        after = [layer.state for layer in cache.layers if layer.state is not None]
        return _cross_entropy(model, hidden, labels, num_labels), after

    if segment_length is None:
        return segment(batch.input_ids, batch.labels, states)
    losses = []
    pieces = zip(batch.input_ids.split(segment_length, 1), batch.labels.split(segment_length, 1), strict=True)
    for input_ids, labels in pieces:
        if torch.is_grad_enabled():
            loss, states = checkpoint(segment, input_ids, labels, states, use_reentrant=False, preserve_rng_state=False)
        else:
            loss, states = segment(input_ids, labels, states)
        losses.append(loss)
    assert states is not None
    return torch.stack(losses).sum(), states


def begin_streams(model: SDMForCausalLM, states: States | None, reset: Tensor) -> States | None:
    """The states to start a step from: carried on, cut off from the gradients of the step before, except where `reset`
    [B] says that a row begins anew. A learned initial state gets its gradient from the rows that begin."""
    if states is None or bool(reset.all()):
        return None
    carried = [state.map(Tensor.detach) for state in states]
    if not bool(reset.any()):
        return carried
    return [
        state.restarted(reset, block.mixer.start_state(len(reset), learn=True))
        for block, state in zip(model.model.layers, carried, strict=True)
    ]


def _cross_entropy(model: SDMForCausalLM, hidden: Tensor, labels: Tensor, num_labels: int) -> Tensor:
    wanted = labels != IGNORED
    if 2 * int(wanted.sum()) <= labels.numel():
        # Tasks with few answers need few logits.
        hidden, labels = hidden[wanted].unsqueeze(0), labels[wanted].unsqueeze(0)
    chunk_size = model.config.loss_chunk_size or max(labels.numel(), 1)
    return chunked_cross_entropy(hidden, model.lm_head, labels, chunk_size, max(num_labels, 1))
