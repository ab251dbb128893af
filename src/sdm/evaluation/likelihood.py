"""Negative log-likelihood of tokens, in nats.

Shapes: B rows, T time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sdm.data.batch import IGNORED, Batch
from sdm.models import SDMForCausalLM

CHUNK = 2048  # tokens whose logits are in memory together


@dataclass(frozen=True)
class Likelihood:
    """A mean over tokens."""

    nll: float  # nats per token
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)


@torch.inference_mode()
def token_nll(model: SDMForCausalLM, batch: Batch) -> Tensor:
    """[B,T] float32 negative log-likelihood of each label, zero where there is none. Rows stand for themselves."""
    if batch.reset is not None:
        raise ValueError(
            "batch.reset: the rows of a stream continue those of the batch before, whose state is not carried here; "
            'open the corpus with layout "packed" or "rows"'
        )
    device = next(model.parameters()).device
    batch = batch.to(device)
    hidden = model.model(input_ids=batch.input_ids, cu_seqlens=batch.cu_seqlens, use_cache=False).last_hidden_state
    pieces = [
        F.cross_entropy(model.lm_head(x).float(), labels, ignore_index=IGNORED, reduction="none")
        for x, labels in zip(hidden.flatten(0, 1).split(CHUNK), batch.labels.flatten().split(CHUNK), strict=True)
    ]
    return torch.cat(pieces).view(batch.labels.shape)


def likelihood(model: SDMForCausalLM, batches: Iterable[Batch]) -> Likelihood:
    """The mean over all labels of the batches."""
    total, tokens = 0.0, 0
    for batch in batches:
        total += float(token_nll(model, batch).double().sum())
        tokens += batch.num_labels
    return Likelihood(total / max(tokens, 1), tokens)
