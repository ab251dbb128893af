"""Sizes that follow from the width, and what must fit together: one rule for the layers and for configurations."""

from __future__ import annotations

import math

from sdm.errors import check_size


def default_head_dim(hidden_size: int) -> int:
    """Channels per head: the largest power of two up to 128 that leaves at least four heads, or else the smallest that
    divides. 128 from 512 channels on, as in the paper's models."""
    sizes = [size for size in (128, 64, 32, 16, 8, 4, 2) if hidden_size % size == 0] or [hidden_size]
    return next((size for size in sizes if hidden_size // size >= 4), sizes[-1])


def default_heads(hidden_size: int, num_heads: int | None) -> int:
    """Return the number of heads, by default as many as `default_head_dim` makes of the width."""
    check_size(hidden_size=hidden_size)
    if num_heads is None:
        return hidden_size // default_head_dim(hidden_size)
    check_size(num_heads=num_heads)
    if hidden_size % num_heads:
        raise ValueError(f"hidden_size = {hidden_size} must be divisible by num_heads = {num_heads}")
    return num_heads


def default_kv_heads(num_heads: int) -> int:
    """Half of the heads, or the nearest number that divides them."""
    divisors = [count for count in range(1, num_heads + 1) if num_heads % count == 0]
    return min(divisors, key=lambda count: abs(2 * count - num_heads))


def default_slots(hidden_size: int, num_heads: int) -> int:
    """Slots per head: (hidden_size / (4 num_heads))^2, which makes the keys as wide as half of the values."""
    return max(1, hidden_size // (4 * num_heads)) ** 2


def check_slots(hidden_size: int, heads: dict[str, int], slots: dict[str, int], **counts: int) -> None:
    """Raise unless the heads divide the width, the slots are a square, and no count of slots exceeds them."""
    ((heads_name, num_heads),), ((slots_name, num_slots),) = heads.items(), slots.items()
    if hidden_size % num_heads:
        raise ValueError(f"hidden_size = {hidden_size} must be divisible by {heads_name} = {num_heads}")
    side = math.isqrt(num_slots)
    if side * side != num_slots:
        raise ValueError(
            f"{slots_name} must be a perfect square (product keys address sqrt(N) x sqrt(N) slots), got {num_slots}; "
            f"the nearest are {side**2} and {(side + 1) ** 2}"
        )
    for name, count in counts.items():
        if count > num_slots:
            raise ValueError(f"{name} = {count} exceeds {slots_name} = {num_slots}; lower it or add slots")
