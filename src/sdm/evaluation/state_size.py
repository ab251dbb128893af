"""How much a model keeps of what it has read."""

from __future__ import annotations

from typing import Any

import torch

from sdm.evaluation.subject import Subject
from sdm.models import cost


def state_elements(subject: Subject, length: int) -> int | None:
    """Numbers that the layers keep behind `length` tokens: recurrent states, keys and values, windows. None if a model
    of others does not say."""
    if subject.is_ours:
        return sum(layer.state_elements(length) for layer in cost(subject.model.config).layers)
    with torch.inference_mode():
        output = subject.model(torch.zeros(1, length, dtype=torch.int64, device=subject.device), use_cache=True)
    for name in ("past_key_values", "cache_params", "state"):
        kept = output.get(name)
        if kept is not None:
            return sum({id(x): x.numel() for x in _tensors(kept, 4)}.values()) or None
    return None


def _tensors(value: Any, depth: int) -> list[torch.Tensor]:
    """All tensors in an object of any library, a few levels deep."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if depth == 0:
        return []
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else None
    if inside is None:
        inside = vars(value).values() if hasattr(value, "__dict__") else ()
    return [x for one in inside for x in _tensors(one, depth - 1)]
