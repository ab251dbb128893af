"""Negative log-likelihood of tokens, in nats.

Shapes: B rows, T time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from sdm.data.batch import Batch
from sdm.data.config import CorpusConfig
from sdm.data.corpus import open_corpus
from sdm.data.loader import Batches
from sdm.models import SDMForCausalLM
from sdm.models.likelihood import nll

BATCHES = 64  # at most


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
    """[B,T] float32 negative log-likelihood of each target, zero where there is none. Rows stand for themselves."""
    if batch.reset is not None:
        raise ValueError(
            "batch.reset: the rows of a stream continue those of the batch before, whose state is not carried here; "
            'open the corpus with layout "packed" or "rows"'
        )
    batch = batch.to(next(model.parameters()).device)
    return nll(model, batch.input_ids, batch.targets, batch.cu_seqlens, reduction="none")[0]


def likelihood(model: SDMForCausalLM, batches: Iterable[Batch]) -> Likelihood:
    """The mean over all targets of the batches."""
    total, tokens = 0.0, 0
    for batch in batches:
        total += float(token_nll(model, batch).double().sum())
        tokens += batch.num_targets
    return Likelihood(total / max(tokens, 1), tokens)


def measure(model: SDMForCausalLM, data: CorpusConfig) -> dict[str, Any]:
    """On documents that neither training nor, as validation does, a choice has seen; each for itself."""
    held_out = Batches(open_corpus(replace(data, layout="packed", shuffle=False), "test"))
    found = likelihood(model, islice(held_out, BATCHES))
    return {"nll": found.nll, "perplexity": found.perplexity, "tokens": found.tokens}
