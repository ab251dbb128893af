"""Likelihood by position: what a model gains from context, and how far back it still gains."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sdm.data.batch import Batch
from sdm.data.config import CorpusConfig
from sdm.data.corpus import open_corpus
from sdm.data.shards import TokenStore
from sdm.evaluation.likelihood import token_nll
from sdm.models import SDMForCausalLM

DOCUMENTS = 48  # at most: held-out documents of a whole sequence may be fewer


@dataclass(frozen=True)
class PositionBin:
    """Tokens from position `start` to before `stop` of their document."""

    start: int
    stop: int
    nll: float  # nats per token
    error: float  # standard error of the mean over documents
    tokens: int


def document_batches(store: TokenStore, length: int, batch_size: int = 4, limit: int | None = None) -> Iterator[Batch]:
    """The first `length` tokens of the documents that have so many and one more, in the store's order."""
    long = (store.lengths > length).nonzero().squeeze(1).tolist()[:limit]
    for start in range(0, len(long), batch_size):
        rows = torch.stack([store.document(index, 0, length + 1) for index in long[start : start + batch_size]])
        yield Batch(rows[:, :-1], rows[:, 1:])


def doubling_edges(length: int, first: int = 64) -> list[int]:
    """0, first, 2 first, 4 first, ... up to length."""
    edges = [0]
    while edges[-1] < length:
        edges.append(min(length, 2 * edges[-1] or first))
    return edges


def nll_by_position(model: SDMForCausalLM, batches: Iterable[Batch], edges: Sequence[int]) -> list[PositionBin]:
    """The mean over all rows of each stretch of positions. Rows are as long as the last edge."""
    scored = [token_nll(model, batch).double() for batch in batches]
    if not scored:
        raise ValueError(f"batches: no document is longer than {edges[-1]} tokens; take a shorter length or more text")
    rows = torch.cat(scored)
    bins = []
    for start, stop in itertools.pairwise(edges):
        means = rows[:, start:stop].mean(1)
        error = float(means.std()) / math.sqrt(len(means)) if len(means) > 1 else 0.0
        bins.append(PositionBin(start, stop, float(means.mean()), error, len(rows) * (stop - start)))
    return bins


def measure(model: SDMForCausalLM, data: CorpusConfig) -> dict[str, Any]:
    """On documents that neither training nor, as validation does, a choice has seen."""
    store, length = open_corpus(data, "test").stores[0], data.sequence_length
    bins = nll_by_position(model, document_batches(store, length, limit=DOCUMENTS), doubling_edges(length))
    tokens = sum(one.tokens for one in bins)
    return {
        "positions": [asdict(one) for one in bins],
        "nll": sum(one.nll * one.tokens for one in bins) / tokens,
        "tokens": tokens,
    }
