"""What the mixers of a model read, taken apart: `sdm.layers.reads` on the inputs that the mixers get in the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from sdm.layers.memory_statistics import evaluating
from sdm.layers.reads import Reads, layer_reads
from sdm.models.cache import SDMCache
from sdm.models.modeling import SDMBlock, SDMModel


@torch.no_grad()
def model_reads(model: SDMModel, input_ids: Tensor, blocks: Mapping[int, SDMBlock]) -> Iterator[tuple[int, Reads]]:
    """Take the readings of some blocks of a model on new texts apart, one block at a time.

    Args:
        model: the model without its head.
        input_ids: [B,T].
        blocks: by their numbers, those to take apart; all must have a map (`sdm.layers.reads.has_reads`).
    """
    with evaluating(model):
        with captured_inputs(blocks) as inputs:
            model(input_ids=input_ids, past_key_values=SDMCache(model.config), use_cache=True)
        for index, block in blocks.items():
            yield index, layer_reads(block.mixer, inputs.pop(index))


@contextmanager
def captured_inputs(blocks: Mapping[int, SDMBlock]) -> Iterator[dict[int, Tensor]]:
    """Collect what the mixers of these blocks are given in the forward passes inside of the `with` block."""
    inputs: dict[int, Tensor] = {}
    handles = [
        block.mixer_norm.register_forward_hook(lambda module, args, output, i=i: inputs.__setitem__(i, output))
        for i, block in blocks.items()
    ]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()
