"""The calls of a ladder level on tensors without memory, whose launches can be recorded at any size.

d width, H heads, N slots of D channels, W = R = 64; see the paper's table of scaling ladder configurations.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sdm import ops
from sdm.models.cost import LEVELS, ladder
from sdm.ops.triton.launch import Launch, record

ACCESSES = 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def sizes(level: int) -> tuple[int, int, int]:
    """H, sqrt(N) and D."""
    width, heads = LEVELS[level].hidden_size, LEVELS[level].num_memory_heads
    return heads, width // (4 * heads), width // heads


def _tokens(lead: tuple[int, ...], channels: int, dtype: torch.dtype, grad: bool) -> list[Tensor]:
    """In the order of the op. Gates are float32, as the layers compute them."""

    def floats(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(*lead, *shape, dtype=dtype, device="meta", requires_grad=grad)

    def index() -> Tensor:
        return torch.empty(*lead, ACCESSES, dtype=torch.int64, device="meta")

    gates = [floats(dtype=torch.float32) for _ in range(2)]
    weights = [floats(ACCESSES, dtype=torch.float32) for _ in range(2)]
    return [index(), weights[0], floats(channels), *gates, index(), weights[1]]


def draw_slots(lead: tuple[int, ...], count: int, slots: int, zipf: bool, generator: torch.Generator) -> Tensor:
    """[*lead, count] distinct slots in ascending order, drawn evenly or by Zipf's law."""
    cells = math.prod(lead)
    if not zipf:
        drawn = torch.randint(slots, (cells, count), generator=generator).sort(-1).values
        # Repeated slots are drawn again; a few rounds leave none where slots are many.
        while bool((repeated := drawn[:, 1:] == drawn[:, :-1]).any()):
            drawn[:, 1:] = torch.where(
                repeated, torch.randint(slots, repeated.shape, generator=generator), drawn[:, 1:]
            )
            drawn = drawn.sort(-1).values
        return drawn.view(*lead, count)
    weight = 1 / torch.arange(1, slots + 1).double()
    place = torch.randperm(slots, generator=generator)  # which slots are popular
    drawn = torch.multinomial(weight.expand(cells, slots), count, generator=generator)
    return place[drawn].sort(-1).values.view(*lead, count)


def sparse_tokens(
    batch: int, time: int, heads: int, slots: int, channels: int, dtype: torch.dtype = torch.float32, zipf: bool = False
) -> tuple[list[Tensor], Tensor]:
    """Tokens with values, in the order of the op, and an initial table [H,N,D]."""
    generator = torch.Generator().manual_seed(0)
    lead = (batch, time, heads)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*lead, *shape, generator=generator)

    write, read = (draw_slots(lead, ACCESSES, slots, zipf, generator) for _ in range(2))
    gates = [normal().sigmoid(), -0.4 * torch.rand(*lead, generator=generator)]
    weights = [normal(ACCESSES).softmax(-1) for _ in range(2)]
    tokens = [write, weights[0], normal(channels).to(dtype), *gates, read, weights[1]]
    return tokens, torch.randn(heads, slots, channels, generator=generator).to(dtype) / 8


def topk(level: int, dtype: torch.dtype, time: int = 2048) -> None:
    heads, n, _ = sizes(level)
    scores = torch.empty(1, time, heads, 2 * n, dtype=dtype, device="meta", requires_grad=True)
    ops.product_key_topk(scores, ACCESSES, backend="triton")[0].sum().backward()


def rule(
    level: int, dtype: torch.dtype, time: int = 2048, update: str = "delta", training: bool = True, batch: int = 1
) -> None:
    """Forward, and backward if training, with a learned initial table of this dtype."""
    heads, n, channels = sizes(level)
    tokens = _tokens((batch, time, heads), channels, dtype, training)
    table = torch.empty(heads, n * n, channels, dtype=dtype, device="meta", requires_grad=training)
    y, final = ops.sparse_delta_rule(
        *tokens, initial_state=table, output_final_state=True, update=update, backend="triton"
    )
    if training:
        assert final is not None
        (y.float().sum() + final.float().sum()).backward()


def step(level: int, dtype: torch.dtype) -> None:
    heads, n, channels = sizes(level)
    state = torch.empty(1, heads, n * n, channels, dtype=dtype, device="meta")
    ops.sparse_delta_step_(state, *_tokens((1, heads), channels, dtype, False), backend="triton")


def gated_rule(level: int, dtype: torch.dtype, by_channel: bool = False, time: int = 2048) -> None:
    """Forward and backward of the dense rule as Gated DeltaNet has it, or Kimi Delta Attention with its decays."""
    config = ladder(level, "gdn")
    heads, keys = config.num_attention_heads, config.recurrent_key_dim
    assert heads is not None
    assert keys is not None

    def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(1, time, heads, *shape, dtype=dtype, device="meta", requires_grad=True)

    decay = floats(keys) if by_channel else floats()
    tokens = floats(keys, dtype=dtype), floats(keys, dtype=dtype), floats(config.hidden_size // heads, dtype=dtype)
    ops.gated_delta_rule(*tokens, floats(), decay, backend="triton")[0].float().sum().backward()


def launches_of(call: Callable[[], None]) -> list[Launch]:
    with record() as launches:
        call()
    return launches


def calls(level: int, dtype: torch.dtype) -> dict[str, Callable[[], None]]:
    """Everything that a model of this level asks of the ops."""
    return {
        "top-k": lambda: topk(level, dtype),
        "rule": lambda: rule(level, dtype),
        "rule, batch": lambda: rule(level, dtype, batch=8),
        "rule, slot": lambda: rule(level, dtype, update="slot"),
        "rule, no gradients": lambda: rule(level, dtype, training=False),
        "step": lambda: step(level, dtype),
        "gated rule": lambda: gated_rule(level, dtype),
        "gated rule, by channel": lambda: gated_rule(level, dtype, by_channel=True),
    }
