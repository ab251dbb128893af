"""What a model would say had it not written some tokens, or had it never seen them.

    removed = sdm.analysis.mask_writes(model, input_ids, [12, 13])     # no memory holds them
    removed = sdm.analysis.forget_tokens(model, input_ids, [12, 13])   # they were never there
    removed.change                                                     # how much the answer changed, in nats

`LayerTrace.without` answers the same question for a single layer.

Shapes: T time, A places that are asked about, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sdm.layers import SparseDeltaMemory
from sdm.layers.memory_statistics import evaluating
from sdm.layers.recurrent_layer import RecurrentLayer
from sdm.models import MemoryState, SDMCache, SDMForCausalLM

MEMORIES = (SparseDeltaMemory, RecurrentLayer)


@dataclass(frozen=True, eq=False)
class Counterfactual:
    """The predictions of a model on a text as it is, and with some of its tokens taken away."""

    places: tuple[int, ...]
    """[A] tokens of the text whose prediction of the next token is asked for."""
    before: Tensor
    """[A,V] log-probabilities of the next token on the text as it is."""
    after: Tensor
    """[A,V] log-probabilities with the tokens taken away."""

    @property
    def change(self) -> Tensor:
        """[A] Kullback-Leibler divergence of the predictions from what they were, in nats."""
        return (self.before.exp() * (self.before - self.after)).sum(-1)


@torch.no_grad()
def mask_writes(
    model: SDMForCausalLM,
    input_ids: Tensor,
    tokens: Sequence[int],
    *,
    state: MemoryState | None = None,
    layers: Sequence[int] | None = None,
    places: Sequence[int] | None = None,
) -> Counterfactual:
    """Run a model again with the writes of some tokens left out of its memories.

    The tokens still read, and attention, short convolutions and shifted keys still see them.

    Args:
        model: an `sdm.SDMForCausalLM`.
        input_ids: [T] or [1,T], one text.
        tokens: tokens of the text that write nothing and let nothing decay.
        state: the state of an earlier text to go on from. It is not changed.
        layers: numbers of the blocks whose writes are left out; None: every SDM layer and every layer
            with a small state (GDN, DeltaNet, KDA, Mamba2, Raven).
        places: tokens whose prediction of the next one is returned; None: the last of the text.

    Raises:
        ValueError: if no layer of the model, or one of `layers`, is no memory.
    """
    ids, removed, asked = _checked(model, input_ids, tokens, places)
    memories = {i: memory for i, block in enumerate(model.model.layers) if (memory := _memory(block.mixer)) is not None}
    unknown = [i for i in layers or () if i not in memories]
    if unknown or not memories:
        raise ValueError(f"layers must be blocks with a memory, which are {list(memories)}, got {unknown or 'none'}")
    chosen = [memory for i, memory in memories.items() if layers is None or i in layers]
    with evaluating(model):
        before = _predictions(model, ids, asked, _cache(model, state))
        with _silenced(chosen, removed):
            after = _predictions(model, ids, asked, _cache(model, state))
    return Counterfactual(tuple(asked), before, after)


@torch.no_grad()
def forget_tokens(
    model: SDMForCausalLM,
    input_ids: Tensor,
    tokens: Sequence[int],
    *,
    state: MemoryState | None = None,
    places: Sequence[int] | None = None,
) -> Counterfactual:
    """Rewind a model to before some tokens and let it read the rest again, as if they had never been there.

    The memories, the keys of attention and all positions are those of the text without the tokens.
    `MemoryState.forget` does the same to a saved state.

    Args:
        model: an `sdm.SDMForCausalLM`.
        input_ids: [T] or [1,T], one text.
        tokens: the tokens to forget.
        state: the state of an earlier text to go on from. It is not changed.
        places: tokens whose prediction of the next one is returned, none of them forgotten; None: the last that is
            left.
    """
    ids, removed, asked = _checked(model, input_ids, tokens, places)
    left = [t for t in range(ids.shape[1]) if t not in set(removed)]
    if not left:
        raise ValueError(f"tokens must leave some of the {ids.shape[1]} tokens of the text, got all of them")
    if places is None:
        asked = [left[-1]]
    if lost := sorted(set(asked) & set(removed)):
        raise ValueError(f"places must not be forgotten, got {lost}")
    start = min(removed, default=ids.shape[1])
    cache = _cache(model, state)
    with evaluating(model):
        early, late = [t for t in asked if t < start], [t for t in asked if t >= start]
        shared = _predictions(model, ids[:, :start], early, cache)
        cache.record(tokens=max(ids.shape[1] - start, 1), nbytes=1 << 62)  # for this function only
        mark = cache.mark()
        before = _predictions(model, ids[:, start:], [t - start for t in late], cache)
        cache.rewind(mark)
        tail = [t for t in left if t >= start]
        after = _predictions(model, ids[:, tail], [tail.index(t) for t in late], cache)
    order = torch.tensor([(early + late).index(t) for t in asked], dtype=torch.int64)
    return Counterfactual(tuple(asked), torch.cat((shared, before))[order], torch.cat((shared, after))[order])


def _checked(
    model: SDMForCausalLM, input_ids: Tensor, tokens: Sequence[int], places: Sequence[int] | None
) -> tuple[Tensor, list[int], list[int]]:
    """The text [1,T], the tokens to take away and the places that are asked about."""
    if not isinstance(model, SDMForCausalLM):
        raise TypeError(f"model must be an sdm.SDMForCausalLM, got {type(model).__name__}")
    ids = input_ids.unsqueeze(0) if input_ids.dim() == 1 else input_ids
    if ids.dim() != 2 or len(ids) != 1 or not ids.shape[1]:
        raise ValueError(f"input_ids must be one text, [T] or [1,T] with T >= 1, got shape {list(input_ids.shape)}")
    asked = [ids.shape[1] - 1] if places is None else list(places)
    for name, numbers in (("tokens", tokens), ("places", asked)):
        for number in numbers:
            if not 0 <= number < ids.shape[1]:
                raise IndexError(f"{name} must lie in [0, {ids.shape[1]}), the tokens of the text, got {number}")
    return ids.to(model.device), sorted(set(tokens)), asked


def _cache(model: SDMForCausalLM, state: MemoryState | None) -> SDMCache:
    return SDMCache(model.config) if state is None else state.cache(model)


def _predictions(model: SDMForCausalLM, ids: Tensor, places: list[int], cache: SDMCache) -> Tensor:
    """Read a text behind the cache and return log-probabilities [A,V] in the order of the places."""
    if not ids.shape[1]:
        return torch.zeros(0, model.config.vocab_size)
    wanted = torch.tensor(places, dtype=torch.int64, device=ids.device)
    logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=wanted).logits
    return logits[0].float().log_softmax(-1).cpu()


def _memory(mixer: nn.Module) -> nn.Module | None:
    """The memory within a mixer, which may wrap it; None if there is none."""
    return next((module for module in mixer.modules() if isinstance(module, MEMORIES)), None)


@contextmanager
def _silenced(memories: Sequence[nn.Module], tokens: list[int]) -> Iterator[None]:
    """Close the gates of some tokens: an input of minus infinity makes the write gate and the decay zero."""

    def close(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        closed = output.clone()
        (closed if output.dim() == 3 else closed.unsqueeze(1))[:, tokens] = -torch.inf
        return closed

    gates = [getattr(memory, name, None) for memory in memories for name in ("beta_proj", "decay_proj")]
    handles = [gate.register_forward_hook(close) for gate in gates if gate is not None]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
