"""How a model uses the keys of its memories: the probe of the paper's appendix, on any model with SDM layers.

Of each token and head, p are the weights of the k slots that it writes (k = W) or reads (k = R), after the softmax.

    C(m) = p_(1) + ... + p_(m)        mass of the m heaviest keys
    u(p) = exp(H(p)) / k              effective keys as a share of k: 1 if all weigh the same, 1/k if one has everything

Probing has no side effects: no weight, no mode and no random number changes. Tokens are counted into fine histograms,
so that memory does not grow with the text; quantiles are exact to a thousandth.

Shapes: B batch, T time, H heads, K keys of a token, J bins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sdm.layers import SparseDeltaMemory
from sdm.layers.memory_statistics import LayerStatistics, evaluating, observed, sdm_layers
from sdm.models import SDMCache, SDMForCausalLM, SDMModel
from sdm.ops.sparse_delta_rule.inputs import Tokens

BINS = 1000  # of numbers between 0 and 1
QUANTILES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
SIDES = ("write", "read")
Array = NDArray[np.float64]
Texts = Tensor | Iterable[Tensor]


@dataclass(frozen=True, eq=False)
class KeyUse:
    """How tokens spread their weight over k keys."""

    keys: int
    """k, the keys of a token: W or R."""
    count: int
    """Distributions seen: tokens times heads times layers."""
    mass: Array
    """[k] C(m) for m = 1 ... k, the mean."""
    mass_low: Array
    """[k] its 10% quantile over tokens."""
    mass_high: Array
    """[k] its 90% quantile."""
    effective_mean: float
    """Mean of u(p)."""
    effective_quantiles: dict[float, float]
    """Of u(p), by their share; 0.5 is the median."""
    effective_counts: NDArray[np.int64]
    """[1000] how many u(p) fell into each of so many equal parts of 0 ... 1 ([100] if read from JSON)."""

    @property
    def effective_median(self) -> float:
        """Median of u(p)."""
        return self.effective_quantiles[0.5]

    def describe(self) -> dict[str, Any]:
        """As plain JSON, with a hundred parts."""
        return {
            "keys": self.keys,
            "count": self.count,
            **{name: [round(float(x), 6) for x in getattr(self, name)] for name in ("mass", "mass_low", "mass_high")},
            "effective_mean": self.effective_mean,
            "effective_quantiles": {str(share): value for share, value in self.effective_quantiles.items()},
            "effective_counts": self.effective_counts.reshape(100, -1).sum(1).tolist(),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> KeyUse:
        """Read what `describe` gave, for figures of stored results."""
        mass, low, high = (np.array(fields[name], dtype=np.float64) for name in ("mass", "mass_low", "mass_high"))
        quantiles = {float(share): value for share, value in fields["effective_quantiles"].items()}
        counts = np.array(fields["effective_counts"], dtype=np.int64)
        return cls(fields["keys"], fields["count"], mass, low, high, fields["effective_mean"], quantiles, counts)


@dataclass(frozen=True)
class LayerAccess:
    """One layer, its heads together and apart."""

    name: str
    """In the model."""
    write: KeyUse
    read: KeyUse
    heads: tuple[Mapping[str, KeyUse], ...]
    """For each head its "write" and its "read"."""


@dataclass(frozen=True)
class AccessProbe:
    """What `probe_access` found."""

    tokens: int
    layers: tuple[LayerAccess, ...]
    write: KeyUse
    """Over all tokens, heads and layers, as in the paper's figures."""
    read: KeyUse

    @property
    def sides(self) -> dict[str, KeyUse]:
        """ "write" and "read", as figures take them."""
        return {"write": self.write, "read": self.read}

    def describe(self) -> dict[str, Any]:
        """As plain JSON."""
        layers = [
            {
                "name": layer.name,
                "write": layer.write.describe(),
                "read": layer.read.describe(),
                "heads": [{side: head[side].describe() for side in SIDES} for head in layer.heads],
            }
            for layer in self.layers
        ]
        return {
            "tokens": self.tokens,
            "write": self.write.describe(),
            "read": self.read.describe(),
            "layers": layers,
        }


@dataclass(frozen=True)
class MemoryStats:
    """What `memory_stats` found: numbers by their names, the same as in a run's metrics.jsonl."""

    layers: dict[str, dict[str, float]]
    """By the name of the layer in the model."""
    mean: dict[str, float]
    """Over the layers."""


def probe_access(
    model: nn.Module, input_ids: Texts, *, piece: int = 2048, forward: Callable[[Tensor], Any] | None = None
) -> AccessProbe:
    """How the SDM layers of a model spread their writes and reads on a text.

    Args:
        model: a model of this library, or any module with `sdm.SparseDeltaMemory` layers.
        input_ids: what the model takes, [B,T,...] without padding; or several of them, such as one [1,T] for each
            document.
        piece: tokens that a model of this library reads at a time, its states carried on; others read a tensor whole.
        forward: how to call the model; None: `model(x)`.

    With layers whose k differ there is no common curve: k must be the same in all, or take them one by one.
    """
    seen: dict[SparseDeltaMemory, dict[str, _Counts]] = {}

    def see(layer: SparseDeltaMemory, tokens: Tokens) -> None:
        sides = seen.setdefault(layer, {side: _Counts() for side in SIDES})
        sides["write"].add(tokens.write_weight)
        sides["read"].add(tokens.read_weight)

    names = _look(model, input_ids, see, piece, forward)
    by_layer = {names[layer]: sides for layer, sides in seen.items()}
    layers = []
    for name, sides in by_layer.items():
        heads = tuple(
            {side: sides[side].heads(slice(head, head + 1)) for side in SIDES}
            for head in range(len(sides["write"].effective_HJ))
        )
        write, read = (sides[side].heads(slice(None)) for side in SIDES)
        layers.append(LayerAccess(name, write, read, heads))
    write, read = (_pooled([sides[side] for sides in by_layer.values()], side) for side in SIDES)
    return AccessProbe(next(iter(by_layer.values()))["write"].tokens, tuple(layers), write, read)


def memory_stats(
    model: nn.Module,
    input_ids: Texts,
    *,
    weighted: bool = False,
    piece: int = 2048,
    forward: Callable[[Tensor], Any] | None = None,
) -> MemoryStats:
    """Gates (smallest, mean, largest), shares of the slots written and read, and their entropies, on a text. With
    `weighted`, entropies count accesses by their strength. The other arguments are those of `probe_access`."""
    seen: dict[SparseDeltaMemory, LayerStatistics] = {}

    def see(layer: SparseDeltaMemory, tokens: Tokens) -> None:
        if layer not in seen:
            seen[layer] = LayerStatistics.of_layer(layer, tokens.beta.device)
        seen[layer].add(Tokens(*(x.flatten(0, 1) for x in tokens)), weighted)

    names = _look(model, input_ids, see, piece, forward)
    layers = {names[layer]: statistics.result() for layer, statistics in seen.items()}
    numbers = next(iter(layers.values()))
    return MemoryStats(layers, {name: sum(stats[name] for stats in layers.values()) / len(layers) for name in numbers})


def _look(
    model: nn.Module,
    texts: Texts,
    see: Callable[[SparseDeltaMemory, Tokens], None],
    piece: int,
    forward: Callable[[Tensor], Any] | None,
) -> dict[SparseDeltaMemory, str]:
    """Read texts with somebody looking on. Returns the names of the layers."""
    names = {layer: name for name, layer in sdm_layers(model).items()}
    if not names:
        raise ValueError("model has no SDM layer, so there is no memory to look at")
    if piece < 2:
        raise ValueError(f"piece must be at least 2 tokens, got {piece}")
    device, tokens = next(model.parameters()).device, 0

    def count(layer: SparseDeltaMemory, shown: Tokens) -> None:
        nonlocal tokens
        tokens += shown.beta.shape[0] * shown.beta.shape[1]
        if shown.beta.numel():
            see(layer, shown)

    with torch.no_grad(), evaluating(model), observed(model, count):
        for text in [texts] if isinstance(texts, Tensor) else texts:
            text = text.to(device)
            if forward is not None:
                forward(text)
            elif isinstance(model, (SDMForCausalLM, SDMModel)):
                _read(model, text, piece)
            else:
                model(text)
    if not tokens:
        raise ValueError("input_ids has no tokens, or none of them reached an SDM layer")
    return names


def _read(model: SDMForCausalLM | SDMModel, ids: Tensor, piece: int) -> None:
    """Read a text piece by piece. A single token would be decoded, which nobody is shown: a piece takes it along."""
    inner, length = (model.model if isinstance(model, SDMForCausalLM) else model), ids.shape[1]
    cache = SDMCache(model.config)
    starts = list(range(0, length, piece))
    if len(starts) > 1 and length - starts[-1] == 1:
        starts.pop()
    for start, stop in zip(starts, [*starts[1:], length], strict=True):
        last = stop == length
        inner(input_ids=ids[:, start:stop], past_key_values=None if last and start == 0 else cache, use_cache=not last)


class _Counts:
    """Sums over the tokens of one side of a layer."""

    def __init__(self) -> None:
        self.tokens = 0

    def add(self, weight_BTHK: Tensor) -> None:
        weight_THK = weight_BTHK.flatten(0, 1).double().abs()
        tokens, heads, keys = weight_THK.shape
        # Weights of a layer with weighting = "l2" are no distribution: their shares are.
        p = weight_THK / weight_THK.sum(-1, keepdim=True).clamp(min=1e-300)
        mass_THK = p.sort(-1, descending=True).values.cumsum(-1).clamp(max=1.0)
        effective_TH = (torch.special.entr(p).sum(-1).exp() / keys).clamp(max=1.0)
        if self.tokens == 0:
            self.mass_HK = np.zeros((heads, keys))
            self.mass_HKJ = np.zeros((heads, keys, BINS), dtype=np.int64)
            self.effective_H = np.zeros(heads)
            self.effective_HJ = np.zeros((heads, BINS), dtype=np.int64)
        self.tokens += tokens
        self.mass_HK += mass_THK.sum(0).cpu().numpy()
        self.mass_HKJ += _histograms(mass_THK)
        self.effective_H += effective_TH.sum(0).cpu().numpy()
        self.effective_HJ += _histograms(effective_TH)

    def heads(self, which: slice) -> KeyUse:
        return _use(
            self.tokens * len(self.effective_H[which]),
            self.mass_HK[which].sum(0),
            self.mass_HKJ[which].sum(0),
            float(self.effective_H[which].sum()),
            self.effective_HJ[which].sum(0),
        )


def _pooled(layers: list[_Counts], side: str) -> KeyUse:
    sizes = sorted({layer.mass_HK.shape[1] for layer in layers})
    if len(sizes) > 1:
        raise ValueError(f"the layers {side} {' and '.join(map(str, sizes))} keys a token: probe them one by one")
    return _use(
        sum(layer.tokens * len(layer.effective_H) for layer in layers),
        np.sum([layer.mass_HK.sum(0) for layer in layers], 0),
        np.sum([layer.mass_HKJ.sum(0) for layer in layers], 0),
        float(sum(layer.effective_H.sum() for layer in layers)),
        np.sum([layer.effective_HJ.sum(0) for layer in layers], 0),
    )


def _use(
    count: int, mass_K: Array, mass_KJ: NDArray[np.int64], effective: float, effective_J: NDArray[np.int64]
) -> KeyUse:
    low, high = (np.array([quantile(counts, share) for counts in mass_KJ]) for share in (0.1, 0.9))
    low[-1] = high[-1] = 1.0  # all keys together, whatever the width of a bin
    quantiles = {share: quantile(effective_J, share) for share in QUANTILES}
    return KeyUse(len(mass_K), count, mass_K / count, low, high, effective / count, quantiles, effective_J)


def _histograms(values_T: Tensor) -> NDArray[np.int64]:
    """[T,...] numbers between 0 and 1, counted over time into [...,J]."""
    shape = values_T.shape[1:]
    bins = (values_T.flatten(1) * BINS).long().clamp(0, BINS - 1)
    first = torch.arange(bins.shape[1], device=bins.device) * BINS
    counts = torch.bincount((bins + first).flatten(), minlength=bins.shape[1] * BINS)
    return counts.view(*shape, BINS).cpu().numpy()


def quantile(counts_J: NDArray[np.int64], share: float) -> float:
    """Of numbers between 0 and 1 that were counted into equal bins, taken as spread evenly over each bin."""
    total = np.concatenate([[0], np.cumsum(counts_J)])
    return float(np.interp(share * total[-1], total, np.linspace(0, 1, len(total))))
