"""Likelihoods of tokens behind a state that is carried on, for any causal model of transformers.

`Scorer` asks our own models for their states (`sdm.models.likelihood`). Others keep a cache, which most of them can
continue with several tokens at a time; whether this one does is tried out, and where it does not, what went before is
computed again.

Shapes: B rows, T time, V vocabulary.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sdm.evaluation.kept import CACHES, tensors
from sdm.models import SDMForCausalLM
from sdm.models.likelihood import IGNORED, nll

PIECE = 4096  # tokens of a stream at a time, over all rows
LOGITS = 2**26  # numbers that are computed at a time, at most
AGREEMENT = 1e-3  # of logits, relative to the largest: whole and in two parts


@dataclass
class Past:
    """What a row of tokens left behind. It is used once: the model changes it."""

    content: Any
    tokens: int


class Scorer:
    """Scores rows of tokens of one model."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._ours = isinstance(model, SDMForCausalLM)
        self._cache: str | None = None if self._ours else _continued_cache(model)

    @property
    def continues(self) -> bool:
        """Whether the model goes on from what it keeps, with several tokens at a time."""
        return self._ours or self._cache is not None

    @torch.inference_mode()
    def nll(
        self, input_ids: Tensor, targets: Tensor, past: Past | None = None, carry: bool = False
    ) -> tuple[Tensor, Past | None]:
        """[B,T] float32 nats of each target, zero where it is -100; with `carry`, what the next tokens go on from."""
        seen = (0 if past is None else past.tokens) + input_ids.shape[1]
        if self._ours:
            states = None if past is None else past.content
            nats, after = nll(self._model, input_ids, targets, states=states, carry=carry, reduction="none")
            return nats, Past(after, seen) if carry else None
        if self._cache is None:
            before = 0 if past is None else past.tokens
            ids = input_ids if past is None else torch.cat([past.content, input_ids], 1)
            logits = self._model(ids, use_cache=False).logits[:, before:]
            return _cross_entropy(logits, targets), Past(ids, seen) if carry else None
        content, found = None if past is None else past.content, []
        size = max(16, LOGITS // (len(input_ids) * self._model.get_input_embeddings().weight.shape[0]))
        pieces = list(zip(input_ids.split(size, 1), targets.split(size, 1), strict=True))
        for number, (ids, wanted) in enumerate(pieces):
            keep = carry or number + 1 < len(pieces)
            output = self._model(ids, **_given(self._cache, content), use_cache=keep or content is not None)
            content = output[self._cache] if keep else None
            found.append(_cross_entropy(output.logits, wanted))
        return torch.cat(found, 1), Past(content, seen) if carry else None


class Stream:
    """Rows of tokens that are read as generating reads them: logits of the last token only, and what is kept of the
    others."""

    def __init__(self, model: Any, in_pieces: bool) -> None:
        """in_pieces: whether the model goes on from what it keeps with more than one token."""
        self._model, self._in_pieces = model, in_pieces
        self._name, self._content = CACHES[0], None
        few = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._options: dict[str, Any] = {"use_cache": True, **({"logits_to_keep": 1} if few else {})}

    @torch.inference_mode()
    def read(self, input_ids: Tensor) -> Tensor:
        """The logits [B,V] after the last token."""
        size = max(1, PIECE // len(input_ids)) if self._in_pieces else input_ids.shape[1]
        for ids in input_ids.split(size, 1):
            output = self._model(ids, **_given(self._name, self._content), **self._options)
            if self._content is None:
                self._name = next((name for name in CACHES if output.get(name) is not None), self._name)
            self._content = output.get(self._name)
        return output.logits[:, -1]

    def nbytes(self) -> int:
        """Bytes of what is kept."""
        return sum(one.nbytes for one in tensors(self._content))


@torch.inference_mode()
def likeliest(model: Any, input_ids: Tensor, wanted: Tensor) -> Tensor:
    """The likeliest next token [n] at the places of input_ids [B,T] where `wanted` [B,T] is True, on the CPU."""
    input_ids, wanted = input_ids.to(model.device), wanted.to(model.device)
    if isinstance(model, SDMForCausalLM):  # logits where they are wanted only
        hidden = model.model(input_ids=input_ids, use_cache=False).last_hidden_state
        return model.lm_head(hidden[wanted]).argmax(-1).cpu()
    return model(input_ids, use_cache=False).logits[wanted].argmax(-1).cpu()


def _given(name: str, content: Any) -> dict[str, Any]:
    return {} if content is None else {name: content}


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    flat = logits.float().flatten(0, 1)
    return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction="none").view(targets.shape)


@torch.inference_mode()
def _continued_cache(model: Any) -> str | None:
    """The name of the cache that the model takes and returns, if it goes on from it exactly."""
    taken = inspect.signature(model.forward).parameters
    vocabulary, device = model.get_input_embeddings().weight.shape[0], model.device
    ids = (torch.arange(24, device=device) * 7919 % vocabulary).view(1, -1)
    whole = model(ids, use_cache=False).logits[:, 16:].float()
    for name in CACHES:
        if name not in taken:
            continue
        try:
            first = model(ids[:, :16], use_cache=True)
            second = model(ids[:, 16:], **{name: first[name]}, use_cache=True).logits.float()
        except Exception:  # each architecture fails in its own way over what it cannot do
            continue
        if (second - whole).abs().max() <= AGREEMENT * whole.abs().max():
            return name
    print(
        f"{type(model).__name__} does not go on from its cache exactly: what went before is computed again, which "
        "takes time and memory for long documents",
        file=sys.stderr,
    )
    return None
