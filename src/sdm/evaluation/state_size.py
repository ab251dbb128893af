"""How much a model keeps of what it has read."""

from __future__ import annotations

import torch

from sdm.evaluation.kept import CACHES, tensors
from sdm.evaluation.subject import Subject
from sdm.models import cost


def state_elements(subject: Subject, length: int) -> int | None:
    """Numbers that the layers keep behind `length` tokens: recurrent states, keys and values, windows. None if a model
    of others does not say."""
    if subject.is_ours:
        return sum(layer.state_elements(length) for layer in cost(subject.model.config).layers)
    with torch.inference_mode():
        output = subject.model(torch.zeros(1, length, dtype=torch.int64, device=subject.device), use_cache=True)
    for name in CACHES:
        kept = output.get(name)
        if kept is not None:
            return sum(one.numel() for one in tensors(kept) if one.is_floating_point()) or None
    return None
