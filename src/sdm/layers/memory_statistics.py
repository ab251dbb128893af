"""What memories do: gates, slots in use and how evenly, how far back layers read, and how long what they write stays.

Every SDM layer shows what it tells its memory about the tokens (`SparseDeltaMemory.observer`): nothing is computed a
second time, and the slots are those that were in fact written and read.

Shapes: B batch, T time, H heads, W writes, R reads, N slots, A accesses, D value channels, P pairs, C sampled writes.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from sdm.layers.reads import Reads
from sdm.layers.sparse_delta_memory import SparseDeltaMemory
from sdm.ops import sparse_delta_rule_
from sdm.ops.sparse_delta_rule.inputs import Tokens


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Look without leaving a trace: in training, batch normalisation learns from whatever passes through it."""
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in training.items():
            part.training = mode


@contextlib.contextmanager
def observed(model: nn.Module, see: Callable[[SparseDeltaMemory, Tokens], None]) -> Iterator[None]:
    """Show the tokens [B,T,H,...] of every SDM layer of a model to `see`, in the forward passes in this block."""
    before = {layer: layer.observer for layer in sdm_layers(model).values()}
    for layer in before:
        layer.observer = partial(see, layer)
    try:
        yield
    finally:
        for layer, observer in before.items():
            layer.observer = observer


def sdm_layers(model: nn.Module) -> dict[str, SparseDeltaMemory]:
    """The SDM layers of a model by their names in it, in its order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseDeltaMemory)}


@dataclass
class Gate:
    """The numbers of a gate, added up: their smallest, sum and largest, and how many."""

    low: Tensor
    total: Tensor
    high: Tensor
    count: float = 0

    @classmethod
    def of_none(cls, device: torch.device) -> Gate:
        """Return the statistics of no values."""
        low, high = (torch.tensor(x, device=device) for x in (math.inf, -math.inf))
        return cls(low, torch.zeros((), dtype=torch.float64, device=device), high)

    def add(self, gate: Tensor) -> None:
        """Add the values of a gate."""
        self.low, self.high = torch.minimum(self.low, gate.min()), torch.maximum(self.high, gate.max())
        self.total = self.total + gate.double().sum()
        self.count += gate.numel()


@dataclass
class LayerStatistics:
    """Sums over the tokens of one layer; they stay on its device until the result is asked for."""

    tokens: float = 0
    gates: dict[str, Gate] = field(default_factory=dict)
    strength_HN: dict[str, Tensor] = field(default_factory=dict)
    """How often, or how strongly, each slot was "written" and "read"."""
    used_HN: dict[str, Tensor] = field(default_factory=dict)
    """Whether it was at all."""

    @classmethod
    def of_layer(cls, layer: SparseDeltaMemory, device: torch.device) -> LayerStatistics:
        """Return the statistics of a layer before its first token."""
        size, names = (layer.num_heads, layer.num_slots), ("written", "read")
        return cls(
            gates={name: Gate.of_none(device) for name in ("forget_gate", "input_gate")},
            strength_HN={name: torch.zeros(size, dtype=torch.float64, device=device) for name in names},
            used_HN={name: torch.zeros(size, dtype=torch.bool, device=device) for name in names},
        )

    def add(self, tokens: Tokens, weighted: bool = False) -> None:
        """Add tokens without a batch dimension, [T,H,...]. With `weighted` an access counts by its strength, the weight
        of a read or the weight of a write times its input gate, instead of as one."""
        if not len(tokens.beta):
            return
        self.tokens += len(tokens.beta)
        self.gates["forget_gate"].add(tokens.log_decay.float().exp())
        self.gates["input_gate"].add(tokens.beta.float())
        written = tokens.write_weight.abs() * tokens.beta.unsqueeze(-1)
        self._access("written", tokens.write_index, written if weighted else None)
        self._access("read", tokens.read_index, tokens.read_weight.abs() if weighted else None)

    def _access(self, name: str, index_THA: Tensor, strength_THA: Tensor | None) -> None:
        heads, slots = self.used_HN[name].shape
        first_H1 = torch.arange(heads, device=index_THA.device).unsqueeze(-1) * slots
        place = (index_THA.long() + first_H1).flatten()
        strength = torch.ones_like(place) if strength_THA is None else strength_THA.flatten()
        self.strength_HN[name].view(-1).index_add_(0, place, strength.double())
        self.used_HN[name].view(-1)[place] = True

    def result(self) -> dict[str, float]:
        """Summarise as numbers: ranges and means of the gates, use and entropy of the slots."""
        result: dict[str, float] = {"tokens": self.tokens}
        for name, gate in self.gates.items():
            mean = float(gate.total) / max(gate.count, 1)
            result |= {f"{name}_min": float(gate.low), f"{name}_mean": mean, f"{name}_max": float(gate.high)}
        for name, strength in self.strength_HN.items():
            result[f"slots_{name}"] = float(self.used_HN[name].double().mean())
            result[f"entropy_{name}"] = normalized_entropy(strength)
        return result


def normalized_entropy(strength_HN: Tensor) -> float:
    """The entropy of the distribution of accesses over the slots of a head, as a share of the largest possible; the
    mean over the heads."""
    slots = strength_HN.shape[-1]
    total_H1 = strength_HN.double().sum(-1, keepdim=True)
    probability = strength_HN / torch.where(total_H1 > 0, total_H1, 1.0)
    entropy = -torch.xlogy(probability, probability).sum(-1).mean()
    return float(entropy) / math.log(slots) if slots > 1 else 0.0


SAMPLES = 16
"""Writes of a text whose survival is followed, evenly spread."""
FOLLOWED = 64
"""Writes that `writes_left` follows at a time, each in a channel of its own."""


def contributions(reads: Reads, head: int, batch: int = 0) -> Tensor:
    """|S[t,l]| |delta[l]| as a sparse CSR tensor [T,T]: how much of token l is in the reading of token t."""
    matrix = reads.read_map.matrix(batch, head)
    sizes = reads.delta[batch, :, head].norm(dim=-1).double().cpu()[matrix.col_indices()]
    with warnings.catch_warnings():  # torch calls its CSR tensors a beta feature
        warnings.filterwarnings("ignore", "Sparse CSR")
        return torch.sparse_csr_tensor(
            matrix.crow_indices(),
            matrix.col_indices(),
            matrix.values().abs() * sizes,
            tuple(matrix.shape),
            check_invariants=True,
        )


def before_share(reads: Reads, head: int, batch: int = 0) -> Tensor:
    """[T] what the state before the first token brings to each reading, as a share of the sizes of all its parts."""
    before = reads.before[batch, :, head].norm(dim=-1).double().cpu()
    matrix = contributions(reads, head, batch)
    total = before + _row_sums(matrix, _rows(matrix))
    return torch.where(total > 0, before / total.clamp(min=torch.finfo(torch.float64).tiny), 0.0)


def distances(reads: Reads, head: int, batch: int = 0) -> tuple[Tensor, Tensor]:
    """How far back a head reads: [P] distances t - l, and [P] their shares of their rows' contributions."""
    matrix = contributions(reads, head, batch)
    row = _rows(matrix)
    total = _row_sums(matrix, row)[row]
    share = torch.where(total > 0, matrix.values() / total.clamp(min=1e-300), 0.0)
    return row - matrix.col_indices(), share


@torch.no_grad()
def write_survival(tokens: Tokens, num_slots: int, update: str = "delta") -> dict[int, tuple[Tensor, Tensor]]:
    """Follow some writes of a text: how much of each is left after 1, 2, 4, ... tokens.

    A write spreads over its slots in proportion to its weights k. Later writes decay some of these slots, and the delta
    rule (or the slot rule) overwrites them. Both are linear in what a memory holds, so that the op itself follows a
    write: in a channel of its own, in which all other tokens write zero.

    Args:
        tokens: of one text, [1,T,H,...].
        num_slots: N.
        update: "delta" or "slot".

    Returns:
        By the distance in tokens: the length of what is left of a write relative to the write, [C,H], and the same if
        nothing were overwritten, [C,H]. NaN for a write whose gate was closed.
    """
    time, heads = tokens.beta.shape[1:]
    period = 1 << max(0, int(math.log2(max(time // SAMPLES, 1))))
    writes = list(range(period - 1, time, period))[:SAMPLES]
    places = torch.tensor(writes, device=tokens.beta.device)
    value = torch.zeros(1, time, heads, len(writes), device=tokens.value.device)
    value[0, places, :, torch.arange(len(writes))] = 1
    followed = tokens._replace(
        value=value,
        read_index=tokens.read_index[..., :1],
        read_weight=tokens.read_weight[..., :1],
        **{name: getattr(tokens, name).float() for name in ("write_weight", "beta", "log_decay")},
    )
    followed = followed._replace(read_weight=followed.read_weight.float())
    memory = torch.zeros(1, heads, num_slots, len(writes), device=value.device)
    decay = torch.zeros(heads, num_slots, dtype=torch.float64, device=value.device)
    index_CHW = tokens.write_index[0, places].long()
    key_CHW = tokens.write_weight[0, places].double()
    size_CH = key_CHW.norm(dim=-1) * tokens.beta[0, places].double()
    at_write = torch.zeros_like(key_CHW)
    left: dict[int, list[tuple[Tensor, Tensor]]] = {}
    start = 0
    for end in _cuts(time, period, len(writes)):
        _run(followed, start, end, memory, decay, update)
        start = end
        for number in range(min(end // period, len(writes))):
            distance = end - 1 - writes[number]
            if distance == 0:
                at_write[number] = decay.gather(1, index_CHW[number])
            elif distance & (distance - 1) == 0:
                kept = memory[0, :, :, number].double().norm(dim=-1) / size_CH[number]
                factor = (decay.gather(1, index_CHW[number]) - at_write[number]).exp()
                decayed = (key_CHW[number] * factor).norm(dim=-1) / key_CHW[number].norm(dim=-1)
                closed = size_CH[number] < 1e-6
                pair = (kept.masked_fill(closed, torch.nan), decayed.masked_fill(closed, torch.nan))
                left.setdefault(distance, []).append(pair)
    return {
        distance: (torch.stack([kept for kept, _ in pairs]).cpu(), torch.stack([decayed for _, decayed in pairs]).cpu())
        for distance, pairs in sorted(left.items())
    }


@dataclass(frozen=True, eq=False)
class WritesLeft:
    """How much of each write of a text is left after its last token."""

    kept: Tensor
    """[T,H] the length of what is left of a write relative to the write. NaN for a write whose gate was closed."""
    decayed: Tensor
    """[T,H] the same by decay alone, had no later token overwritten anything."""
    slots: Tensor
    """[T,H] how many slots of a write no later token has written."""


@torch.no_grad()
def writes_left(tokens: Tokens, num_slots: int, update: str = "delta") -> WritesLeft:
    """Compute how much of every write of a text is left at its end. Takes time proportional to T^2 W.

    What is left of a write is the difference between the memory as it is and the memory had the token written the
    value zero, for a value of length 1. By decay alone it is L_j(l,T) k_{l,j} in the slot j, with L_j(l,T) the product
    of the decays of slot j after token l; the delta rule and the slot rule take something of it away, or move it.

    Args:
        tokens: of one text, [1,T,H,...].
        num_slots: N.
        update: "delta", "slot", or "add" for a memory that overwrites nothing.
    """
    key_THW = tokens.write_weight[0].double()
    write_TH, decay_THW, is_last_THW = key_THW.norm(dim=-1), *_decay_after(tokens, num_slots)
    closed = write_TH * tokens.beta[0].double() < 1e-6
    decayed = (key_THW * decay_THW.exp()).norm(dim=-1) / write_TH
    kept = decayed if update == "add" else _length_left(tokens, num_slots, update) / write_TH
    kept, decayed = (share.masked_fill(closed, torch.nan).cpu() for share in (kept, decayed))
    return WritesLeft(kept, decayed, is_last_THW.sum(-1).cpu())


def last_writes(tokens: Tokens, num_slots: int) -> Tensor:
    """Number the token of a text [1,T,H,...] that wrote each slot last, [H,N]; -1 for none."""
    time = torch.arange(tokens.write_index.shape[1])
    index_HTW = tokens.write_index[0].long().cpu().transpose(0, 1)
    last_HN = torch.full((index_HTW.shape[0], num_slots), -1, dtype=torch.int64)
    return last_HN.scatter_reduce(1, index_HTW.flatten(1), time.view(1, -1, 1).expand_as(index_HTW).flatten(1), "amax")


def _decay_after(tokens: Tokens, num_slots: int) -> tuple[Tensor, Tensor]:
    """Log of the decay of each slot of each write after it, and whether it is the last write of that slot, [T,H,W]."""
    index_THW = tokens.write_index[0].long()
    heads = index_THW.shape[1]
    log_decay = tokens.log_decay[0].double()
    amount = (log_decay if log_decay.dim() == 3 else log_decay.unsqueeze(-1)).expand(index_THW.shape).flatten()
    place = (torch.arange(heads, device=index_THW.device).view(1, -1, 1) * num_slots + index_THW).flatten()
    order = place.argsort(stable=True)  # the writes of a slot one after the other, in time
    place, total = place[order], amount[order].cumsum(0)
    is_last = torch.ones_like(place, dtype=torch.bool)
    is_last[:-1] = place[1:] != place[:-1]
    ends = is_last.nonzero().squeeze(1)
    end = ends[torch.searchsorted(ends, torch.arange(len(place), device=place.device))]
    after, last = torch.empty_like(total), torch.empty_like(is_last)
    after[order], last[order] = total[end] - total, is_last
    return after.view(index_THW.shape), last.view(index_THW.shape)


def _length_left(tokens: Tokens, num_slots: int, update: str) -> Tensor:
    """[T,H] length of what is left of each write of the value 1 / beta, by the op: a channel for each write."""
    time, heads = tokens.beta.shape[1:]
    names = ("write_weight", "beta", "log_decay", "read_weight")
    followed = tokens._replace(
        read_index=tokens.read_index[..., :1],
        **{name: getattr(tokens, name).float() for name in names},
    )
    followed = followed._replace(read_weight=followed.read_weight[..., :1])
    left = torch.zeros(time, heads, dtype=torch.float64, device=tokens.beta.device)
    for start in range(0, time, FOLLOWED):
        count = min(FOLLOWED, time - start)
        place = torch.arange(count, device=left.device)
        value = torch.zeros(1, time - start, heads, count, device=left.device)
        value[0, place, :, place] = 1
        piece = Tokens(*(x[:, start:] for x in followed._replace(value=followed.beta)))._replace(value=value)
        memory = torch.zeros(1, heads, num_slots, count, device=left.device)
        sparse_delta_rule_(memory, *piece, update=update)
        left[start : start + count] = memory[0].double().norm(dim=1).T
    return left / tokens.beta[0].double().clamp(min=torch.finfo(torch.float64).tiny)


def half_life(distance: list[int], left: list[float]) -> float | None:
    """The distance at which a survival curve falls to one half, interpolated; None if it does not within the text."""
    x, y = 0.0, 1.0
    for here, value in zip(distance, left, strict=True):
        if value <= 0.5:
            return x + (here - x) * (y - 0.5) / max(y - value, 1e-12)
        x, y = float(here), value
    return None


def _cuts(time: int, period: int, writes: int) -> list[int]:
    """Numbers of tokens after which some followed write is a power of two old, or new."""
    cuts = set()
    for write in range(writes):
        first = period * (write + 1)
        cuts |= {first, *(first + (1 << i) for i in range(time.bit_length()))}
    return sorted(cut for cut in cuts if cut <= time)


def _run(tokens: Tokens, start: int, end: int, memory: Tensor, decay: Tensor, update: str) -> None:
    """Advance the memory, and the sum of log decays of every slot, by the tokens start ... end - 1."""
    piece = Tokens(*(x[:, start:end] for x in tokens))
    sparse_delta_rule_(memory, *piece, update=update)
    log_decay = piece.log_decay if piece.log_decay.dim() == 4 else piece.log_decay.unsqueeze(-1)
    index_HTW = piece.write_index[0].long().transpose(0, 1)
    amount_HTW = log_decay[0].double().transpose(0, 1).expand_as(index_HTW)
    decay.scatter_add_(1, index_HTW.flatten(1), amount_HTW.flatten(1))


def _rows(matrix: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(matrix.shape[0]), matrix.crow_indices().diff())


def _row_sums(matrix: Tensor, row: Tensor) -> Tensor:
    return torch.zeros(matrix.shape[0], dtype=matrix.dtype).index_add_(0, row, matrix.values())
