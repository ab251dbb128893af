"""Likelihoods of continuations of contexts, where what they have in common is computed once.

The tokens with which all contexts of a batch begin, such as examples before a question, are computed for all of them,
and a context for all of its continuations, such as the choices of an answer. The states of the layers go on from there,
which is exact. Logits are computed where they are needed.

Shapes: G contexts, R continuations, T time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sdm.models import SDMCache, SDMForCausalLM

Scored = tuple[float, bool]
"""Log-likelihood of a continuation, and whether it is the likeliest one token by token."""


@torch.inference_mode()
def score(
    model: SDMForCausalLM, contexts: Sequence[list[int]], owner: Sequence[int], continuations: Sequence[list[int]]
) -> list[Scored]:
    """What the model makes of each continuation behind the context of number owner[r]; neither is empty."""
    device = model.device
    cache = SDMCache(model.config)
    shared = _in_common(contexts)
    if shared:
        model.model(
            input_ids=torch.tensor([contexts[0][:shared]], device=device), past_key_values=cache, use_cache=True
        )
        cache.batch_repeat_interleave(len(contexts))
    ids, mask = _padded([context[shared:] for context in contexts], device, left=True)
    hidden = model.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True).last_hidden_state
    # The last token of a context predicts the first of every continuation.
    first = torch.tensor([continuation[0] for continuation in continuations], device=device)
    owner_R = torch.tensor(owner, device=device)
    logits_GV = model.lm_head(hidden[:, -1]).float()
    total_R = logits_GV.log_softmax(-1)[owner_R, first]
    greedy_R = logits_GV.argmax(-1)[owner_R] == first

    longer = [place for place, continuation in enumerate(continuations) if len(continuation) > 1]
    if longer:
        cache.batch_select_indices(owner_R[longer])
        ids, mask = _padded([continuations[place][:-1] for place in longer], device)
        wanted, _ = _padded([continuations[place][1:] for place in longer], device)
        hidden = model.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        logits, targets = model.lm_head(hidden.last_hidden_state[mask]).float(), wanted[mask]
        scored = torch.zeros(mask.shape, device=device)
        scored[mask] = logits.log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1)
        likeliest = mask.logical_not()
        likeliest[mask] = logits.argmax(-1) == targets
        total_R[longer] += scored.sum(1)
        greedy_R[longer] &= likeliest.all(1)
    return list(zip(total_R.tolist(), greedy_R.tolist(), strict=True))


def _in_common(contexts: Sequence[list[int]]) -> int:
    """How many tokens all contexts begin with, a last token of its own left to each; none if there is one context."""
    if len(contexts) == 1:
        return 0
    least, most = min(contexts), max(contexts)  # in alphabetical order: all others lie between them
    longest = min(map(len, contexts)) - 1
    return next((place for place in range(longest) if least[place] != most[place]), longest)


def _padded(rows: Sequence[Sequence[int]], device: torch.device, left: bool = False) -> tuple[Tensor, Tensor]:
    """Rows as one tensor, and where they are in it."""
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, tokens in enumerate(rows):
        place = slice(width - len(tokens), width) if left else slice(0, len(tokens))
        ids[row, place] = torch.tensor(tokens)
        mask[row, place] = True
    return ids.to(device), mask.to(device)
