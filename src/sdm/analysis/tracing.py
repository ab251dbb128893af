"""Which earlier tokens each token reads: an exact attention map of every mixer of a model.

    trace = sdm.analysis.trace(model, input_ids)
    trace.layers[2].sources(token=40, head=0)      # [(12, 0.83), (31, 0.05), ...]
    trace.layers[2].without([12])                  # the layer's readings, had token 12 not been written

Each layer's readings are the sum of what earlier tokens added and of what the state held before (`sdm.layers.reads`).
That sum is compared with the layer's own readings on every trace, and a deviation is an error.

Shapes: T time, H heads, D value channels, N slots, R reads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdm.layers import GatedDeltaNet, Mamba2, ShiftedKeys, memory_statistics
from sdm.layers.attention import GatedAttention
from sdm.layers.memory_statistics import WritesLeft, evaluating, writes_left
from sdm.layers.reads import Reads, has_reads, in_float64, layer_reads, memory_reads, relative_deviation
from sdm.layers.state import LayerState
from sdm.models import MemoryState, SDMCache, SDMForCausalLM
from sdm.models.modeling import SDMBlock
from sdm.models.reads import captured_inputs
from sdm.ops.checks import available_memory
from sdm.ops.sparse_delta_map import sparse_delta_writes

TOLERANCE = 1e-5
"""The largest deviation of the sum of a reading's parts from the reading, relative to the largest reading."""
ROUNDING = 1e-3
"""The largest deviation that is put down to the rounding of float32 over a long text, and then checked in float64."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """The readings of one layer, by source."""

    index: int
    """Of the block in the model."""
    layer_type: str
    mixer: nn.Module
    reads: Reads
    """S, what each token adds, and the part from before, with a batch dimension of 1."""
    error: float
    """Deviation of the sum of the parts from the layer's own readings, relative to the largest reading."""

    @property
    def num_heads(self) -> int:
        """Heads of the layer."""
        return self.reads.read_map.shape[1]

    def matrix(self, head: int = 0) -> Tensor:
        """S of a head as a sparse CSR tensor [T,T]: rows read, columns wrote."""
        return self.reads.read_map.matrix(0, head)

    def sources(self, token: int, head: int = 0, most: int | None = None) -> list[tuple[int, float]]:
        """List the tokens that a token reads with their weights S[token, l], largest magnitude first."""
        self._check_place(token, head)
        read_map, time = self.reads.read_map, self.reads.read_map.shape[2]
        row = head * time + token
        pairs = slice(int(read_map.row_offsets[row]), int(read_map.row_offsets[row + 1]))
        weight = read_map.weight[pairs]
        order = weight.abs().argsort(descending=True, stable=True)[:most]
        return [(int(read_map.source[pairs][i]), float(weight[i])) for i in order]

    def _check_place(self, token: int, head: int) -> None:
        time = self.reads.read_map.shape[2]
        if not 0 <= token < time:
            raise IndexError(f"token must lie in [0, {time}), the traced tokens, got {token}")
        if not 0 <= head < self.num_heads:
            raise IndexError(f"head must lie in [0, {self.num_heads}), got {head}")

    def contributions(self, head: int = 0) -> Tensor:
        """|S[t,l]| |delta[l]| as a sparse CSR tensor [T,T]: how much of token l is in the reading of token t."""
        return memory_statistics.contributions(self.reads, head)

    def reading_shares(self, token: int, head: int = 0) -> Tensor:
        """[T] the share of a token's reading that each token brings: (S[t,l] delta[l] . y[t]) / (y[t] . y[t]).

        The shares and that of the state before the first token add up to 1. A part that points against the reading
        has a negative share; parts across the reading, which other parts cancel, have none.
        """
        self._check_place(token, head)
        reading = self.reads.readings[0, token, head].double().cpu()
        weight = self.matrix(head)[token].to_dense()
        along = self.reads.delta[0, :, head].double().cpu() @ reading
        return weight * along / reading.square().sum().clamp(min=torch.finfo(torch.float64).tiny)

    def before_share(self) -> Tensor:
        """[T,H] the size of what the state before the first token brings, as a share of the sizes of all parts."""
        return torch.stack([memory_statistics.before_share(self.reads, head) for head in range(self.num_heads)], dim=-1)

    def distances(self) -> tuple[Tensor, Tensor]:
        """How far back the layer reads: [P] distances t - l, and [P] their shares of their rows' contributions."""
        heads = [memory_statistics.distances(self.reads, head) for head in range(self.num_heads)]
        return torch.cat([distance for distance, _ in heads]), torch.cat([share for _, share in heads])

    def survival(self) -> WritesLeft:
        """Compute how much of each write of the text is left after its last token, by decay and by overwriting.

        Raises:
            TypeError: for attention, which writes into no memory.
        """
        if self.reads.tokens is None or self.reads.initial_state is None:
            raise TypeError(f"block {self.index} is {self.layer_type}, which has no memory that could lose a write")
        return writes_left(self.reads.tokens, self.reads.initial_state.shape[-2], self.reads.update)

    @torch.no_grad()
    def without(self, tokens: Sequence[int], *, hold: bool = False) -> Tensor:
        """Compute the layer's readings [T,H,D] with the writes of some tokens left out.

        Args:
            tokens: the tokens that write nothing.
            hold: keep what all other tokens write, and the decays, as they were. Otherwise later writes are computed
                again, as if these tokens had been padding for this layer; attention weights are normalised again.
        """
        reads = self.reads
        time = reads.read_map.shape[2]
        left_out = torch.zeros(time, dtype=torch.bool)
        for token in tokens:
            if not 0 <= token < time:
                raise IndexError(f"tokens must lie in [0, {time}), the traced tokens, got {token}")
            left_out[token] = True
        kept = reads.delta * ~left_out[None, :, None, None].to(reads.delta.device)
        if hold:
            return (reads.before.cpu() + reads.read_map.apply(kept.cpu()).to(reads.before.dtype))[0]
        if reads.tokens is None:
            weight = reads.read_map.dense()[0] * ~left_out
            past = 1 - reads.read_map.dense()[0].sum(-1)
            total = (weight.sum(-1) + past).clamp(min=1e-300).T.unsqueeze(-1)
            parts = torch.einsum("htl,lhd->thd", weight, reads.delta[0].double().cpu()) + reads.before[0].double().cpu()
            return (parts / total).to(reads.readings.dtype)
        silent = left_out.to(reads.tokens.beta.device)[None, :, None]
        log_decay = reads.tokens.log_decay
        mute = silent if log_decay.dim() == 3 else silent.unsqueeze(-1)
        changed = reads.tokens._replace(
            beta=reads.tokens.beta.masked_fill(silent, 0), log_decay=log_decay.masked_fill(mute, 0)
        )
        if reads.update == "add":
            assert reads.initial_state is not None
            return memory_reads(changed, reads.initial_state, "add").readings[0]
        return sparse_delta_writes(*changed, initial_state=reads.initial_state, update=reads.update)[0][0]


@dataclass(frozen=True, eq=False)
class Trace:
    """The readings of a model's mixers on one text, by source."""

    input_ids: Tensor
    """[T]."""
    nll: Tensor
    """[T] negative log-likelihood of each token given those before it, in nats; NaN for the first of a text."""
    layers: tuple[LayerTrace, ...]
    """Of the mixers that read earlier tokens, in the model's order."""
    past: int
    """Tokens that the state had seen before the first one."""
    threshold: float
    """Pairs below this share of their row's mass were left out; each map reports their mass as `dropped`."""

    def __len__(self) -> int:
        return len(self.input_ids)

    def layer(self, index: int) -> LayerTrace:
        """Return the trace of the block with this number."""
        for layer in self.layers:
            if layer.index == index:
                return layer
        raise IndexError(f"block {index} has no trace; these have: {[layer.index for layer in self.layers]}")


@torch.no_grad()
def trace(
    model: SDMForCausalLM,
    input_ids: Tensor,
    *,
    state: MemoryState | None = None,
    layers: Sequence[int] | None = None,
    threshold: float = 0.0,
) -> Trace:
    """Trace what every mixer of a model reads on a text.

    Args:
        model: an `sdm.SDMForCausalLM`.
        input_ids: [T] or [1,T], one text.
        state: the state of an earlier text to go on from. Its past is one source, "before". It is not changed.
        layers: numbers of the blocks to trace; None takes all that read earlier tokens.
        threshold: leave out the pairs below this share of their row's mass; their mass is reported.

    Raises:
        ValueError: if no layer can be traced, or the maps would not fit into memory; it says how many tokens would.
        ArithmeticError: if the parts of a layer's readings do not add up to the readings.
    """
    if not isinstance(model, SDMForCausalLM):
        raise TypeError(f"model must be an sdm.SDMForCausalLM, got {type(model).__name__}")
    if input_ids.dim() == 1:
        input_ids = input_ids.unsqueeze(0)
    if input_ids.dim() != 2 or len(input_ids) != 1 or not input_ids.shape[1]:
        raise ValueError(f"input_ids must be one text, [T] or [1,T] with T >= 1, got shape {list(input_ids.shape)}")
    blocks = {i: block for i, block in enumerate(model.model.layers) if has_reads(block.mixer)}
    if layers is not None:
        unknown = [i for i in layers if i not in blocks]
        if unknown:
            raise ValueError(f"layers must be blocks with a map, which are {list(blocks)}, got {unknown}")
        blocks = {i: blocks[i] for i in sorted(set(layers))}
    if not blocks:
        raise ValueError("no layer of this model reads a weighted sum of earlier tokens, so there is nothing to trace")
    _check_memory(blocks.values(), input_ids.shape[1])
    cache = SDMCache(model.config) if state is None else state.cache(model)
    before = {i: _copied(cache.layers[i].state) for i in blocks}
    past = cache.get_seq_length()
    with evaluating(model), captured_inputs(blocks) as inputs:
        logits = model(input_ids=input_ids.to(model.device), past_key_values=cache, use_cache=True).logits
        traced = tuple(_trace_layer(i, block, inputs[i], before[i], threshold) for i, block in blocks.items())
    nll = torch.full((input_ids.shape[1],), torch.nan)
    nll[1:] = F.cross_entropy(logits[0, :-1].float(), input_ids[0, 1:].to(logits.device), reduction="none").cpu()
    return Trace(input_ids[0].cpu(), nll, traced, past, threshold)


def _trace_layer(index: int, block: SDMBlock, x: Tensor, state: LayerState | None, threshold: float) -> LayerTrace:
    whole = layer_reads(block.mixer, x, state)
    error = whole.error()
    if not error <= TOLERANCE and error <= ROUNDING and whole.tokens is not None:
        exact = in_float64(whole)
        if (own := relative_deviation(whole.readings, exact.readings)) <= ROUNDING:
            _log.info("block %d rounds its readings by %.1g in float32: its parts are taken in float64", index, own)
            whole, error = exact, exact.error()
    if not error <= TOLERANCE:
        raise ArithmeticError(
            f"the parts of the readings of block {index} deviate from the readings by {error:.2g} of the largest one, "
            f"more than {TOLERANCE:g}: is the model in half precision? Trace it in float32 (model.float())"
        )
    if threshold:
        whole = replace(whole, read_map=layer_reads(block.mixer, x, state, threshold=threshold).read_map)
    return LayerTrace(index, block.layer_type, block.mixer, whole, error)


def _copied(state: LayerState | None) -> LayerState | None:
    return None if state is None else state.map(Tensor.clone)


def _check_memory(blocks: Iterable[SDMBlock], time: int) -> None:
    """Refuse what would not fit: attention and dense memories have a pair for every two tokens."""
    heads = 0
    for block in blocks:
        mixer = block.mixer.layer if isinstance(block.mixer, ShiftedKeys) else block.mixer
        if isinstance(mixer, GatedAttention):
            heads = max(heads, 4 * mixer.num_heads)  # scores, weights and two copies of them
        elif isinstance(mixer, GatedDeltaNet | Mamba2):
            heads += mixer.num_heads
    available = min(available_memory(torch.device("cpu")), 1e15)
    most = int((available / 2 / (12 * heads)) ** 0.5) if heads else time
    if time > most:
        raise ValueError(
            f"input_ids has {time} tokens, and the maps of attention and dense memories take a number for every two: "
            f"about {most} tokens fit into this machine's free memory. Trace fewer tokens, or only sparse memories "
            "(layers=...)"
        )
