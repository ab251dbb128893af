"""The map, token by token: the specification that the compiled map is compared with.

Each slot holds, instead of a row of value channels, one number for every token that could have written it.

Shapes: B batch, T time, H heads, W writes, R reads, N slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sdm.ops.backends import Backend
from sdm.ops.checks import document_bounds
from sdm.ops.sparse_delta_map.inputs import MapCall, ReadMap, sparse_map
from sdm.ops.sparse_delta_rule.inputs import Tokens


def sparse_delta_map_reference(call: MapCall) -> ReadMap:
    """Serve a call of `sparse_delta_map` by N x (T + 1) numbers for each stream."""
    tokens = call.tokens.to(torch.float64)
    batch, time, heads = tokens.beta.shape
    initial_weight = torch.zeros(tokens.read_weight.shape, dtype=torch.float64)
    dense = torch.zeros(batch, heads, time, time, dtype=torch.float64)
    starts = {0} if call.cu_seqlens is None else set(document_bounds(call.cu_seqlens, time))
    for b in range(batch):
        for h in range(heads):
            share_NT = torch.zeros(call.num_slots, time, dtype=torch.float64)
            initial_N = torch.ones(call.num_slots, dtype=torch.float64)
            for t in range(time):
                if t in starts:
                    share_NT.zero_()
                    initial_N.fill_(1)
                token = Tokens(*(x[b, t, h] for x in tokens))
                factor_W = write_factor(token, call.update)
                share_NT[token.write_index.long()] *= factor_W.unsqueeze(-1)
                initial_N[token.write_index.long()] *= factor_W
                share_NT[token.write_index.long(), t] += token.write_weight
                dense[b, h, t] = token.read_weight @ share_NT[token.read_index.long()]
                initial_weight[b, t, h] = token.read_weight * initial_N[token.read_index.long()]
    return sparse_map(dense, initial_weight, call.threshold)


def write_factor(token: Tokens, update: str) -> Tensor:
    """The factors [W] by which a token's write scales what its slots hold."""
    decay = token.log_decay.exp()
    if update == "slot":
        return decay * (1 - token.beta * token.write_weight)
    return decay.expand(token.write_weight.shape)


REFERENCE = Backend("reference", sparse_delta_map_reference)
