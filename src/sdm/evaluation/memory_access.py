"""How a model uses its memories: the keys of a token (the probe of the paper's appendix), and what layers read.

Of each token and head, p are the weights of the k slots that it writes (k = W) or reads (k = R), after the softmax.

    C(m) = p_(1) + ... + p_(m)        mass of the m heaviest keys
    u(p) = exp(H(p)) / k              effective keys as a share of k: 1 if all weigh the same, 1/k if one has everything

Probing has no side effects: no weight, no mode and no random number changes. Tokens are counted into fine histograms,
so that memory does not grow with the text; quantiles are exact to a thousandth.

What layers read comes from the exact map of each layer (`sdm.layers.reads`), whose parts are checked to add up to the
layer's readings: how far back, how much of the initial state M0, and how long writes survive. Distances and positions
are counted in powers of two, so that results stay small whatever the length of the texts.

Shapes: B batch, T time, H heads, K keys of a token, J bins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sdm.evaluation.report import Chart, Grid, Point, Table
from sdm.layers import ShiftedKeys, SparseDeltaMemory
from sdm.layers.memory_statistics import (
    LayerStatistics,
    before_share,
    distances,
    evaluating,
    half_life,
    observed,
    sdm_layers,
    write_survival,
)
from sdm.layers.reads import Reads
from sdm.models import SDMCache, SDMForCausalLM, SDMModel
from sdm.models.fingerprint import base_model
from sdm.models.reads import model_reads
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


def memory_stats(model: nn.Module, input_ids: Texts, *, piece: int = 2048) -> MemoryStats:
    """Gates (smallest, mean, largest), shares of the slots written and read, and their entropies, on a text. The
    arguments are those of `probe_access`."""
    seen: dict[SparseDeltaMemory, LayerStatistics] = {}

    def see(layer: SparseDeltaMemory, tokens: Tokens) -> None:
        if layer not in seen:
            seen[layer] = LayerStatistics.of_layer(layer, tokens.beta.device)
        seen[layer].add(Tokens(*(x.flatten(0, 1) for x in tokens)))

    names = _look(model, input_ids, see, piece)
    layers = {names[layer]: statistics.result() for layer, statistics in seen.items()}
    numbers = next(iter(layers.values()))
    return MemoryStats(layers, {name: sum(stats[name] for stats in layers.values()) / len(layers) for name in numbers})


def _look(
    model: nn.Module,
    texts: Texts,
    see: Callable[[SparseDeltaMemory, Tokens], None],
    piece: int,
    forward: Callable[[Tensor], Any] | None = None,
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


TOLERANCE = 1e-4
"""Largest deviation of the parts of a reading from the reading, relative to the largest; half precision exceeds it."""
FAR = 64

LayerReads = dict[str, Any]
"""The numbers of a layer as JSON."""


@dataclass
class HeadSums:
    """Sums over texts of one head, by powers of two."""

    distance: dict[int, float] = field(default_factory=dict)
    """Share of the contributions that come from [2^(i-1), 2^i) tokens back, by i; 0 is the token itself."""
    initial: dict[int, list[float]] = field(default_factory=dict)
    """Number of tokens at positions [2^i - 1, 2^(i+1) - 1), and the sum of their shares of M0, by i."""
    survival: dict[int, list[float]] = field(default_factory=dict)
    """Number of writes, sum of what decay leaves of them and sum of what is left at all, by the distance."""
    far: float = 0.0
    shares: float = 0.0

    def add(self, reads: Reads, head: int) -> None:
        """Add the distances and the shares of M0 of a text."""
        distance, share = distances(reads, head)
        self.shares += float(share.sum())
        self.far += float(share[distance >= FAR].sum())
        for i, total in _by_power(distance, share).items():
            self.distance[i] = self.distance.get(i, 0.0) + total
        initial = before_share(reads, head)
        place = torch.arange(1, len(initial) + 1)
        for i, total in _by_power(place, initial).items():
            count = int(((place >= 1 << (i - 1)) & (place < 1 << i)).sum())
            sums = self.initial.setdefault(i - 1, [0.0, 0.0])
            sums[0], sums[1] = sums[0] + count, sums[1] + total

    def add_survival(self, survival: Mapping[int, tuple[Tensor, Tensor]], head: int) -> None:
        """Add the survival of the followed writes of a text."""
        for distance, (kept, decayed) in survival.items():
            open_gate = ~kept[:, head].isnan()
            sums = self.survival.setdefault(distance, [0.0, 0.0, 0.0])
            sums[0] += int(open_gate.sum())
            sums[1] += float(decayed[open_gate, head].sum())
            sums[2] += float(kept[open_gate, head].sum())

    def result(self) -> dict[str, Any]:
        """Summarise as JSON."""
        last = max(self.distance, default=0)
        total = max(self.shares, 1e-300)
        cumulative: list[float] = []
        for i in range(last + 1):
            cumulative.append((cumulative[-1] if cumulative else 0.0) + self.distance.get(i, 0.0) / total)
        survival = {d: sums for d, sums in sorted(self.survival.items()) if sums[0]}
        after = list(survival)
        decay = [sums[1] / sums[0] for sums in survival.values()]
        kept = [sums[2] / sums[0] for sums in survival.values()]
        # What overwriting alone leaves: the rest, relative to what decay leaves.
        overwritten = [k / d if d else 0.0 for k, d in zip(kept, decay, strict=True)]
        tokens = sum(count for count, _ in self.initial.values())
        return {
            "distance": cumulative,
            "far": self.far / total,
            "initial": [total / count for _, (count, total) in sorted(self.initial.items())],
            "initial_mean": sum(total for _, total in self.initial.values()) / max(tokens, 1),
            "survival": {"after": after, "decay": decay, "kept": kept},
            "half_life": {"decay": half_life(after, decay), "overwriting": half_life(after, overwritten)},
        }


@torch.no_grad()
def probe_reads(model: nn.Module, texts: Iterable[Tensor]) -> dict[str, LayerReads]:
    """Measure what the SDM layers of a model read on texts, by the number of the block.

    Args:
        model: a model with SDM layers.
        texts: rows of tokens [B,T].

    Raises:
        ArithmeticError: if the parts of a layer's readings do not add up to the readings.
    """
    base = base_model(model)
    blocks = {i: block for i, block in enumerate(base.layers) if _memory(block.mixer) is not None}
    sums: dict[int, list[HeadSums]] = {}
    errors: dict[int, float] = dict.fromkeys(blocks, 0.0)
    for rows in texts:
        for row in rows:
            for index, reads in model_reads(base, row[None].to(base.device), blocks):
                errors[index] = max(errors[index], reads.error())
                if not errors[index] <= TOLERANCE:
                    raise ArithmeticError(
                        f"the parts of the readings of block {index} deviate from the readings by {errors[index]:.2g} "
                        "of the largest one: probe the model in float32"
                    )
                memory = _memory(blocks[index].mixer)
                assert memory is not None
                assert reads.tokens is not None
                survival = write_survival(reads.tokens, memory.num_slots, memory.update)
                heads = sums.setdefault(index, [HeadSums() for _ in range(memory.num_heads)])
                for head, head_sums in enumerate(heads):
                    head_sums.add(reads, head)
                    head_sums.add_survival(survival, head)
    return {
        str(index): {"heads": [head.result() for head in heads], "error": errors[index]}
        for index, heads in sums.items()
    }


def reads_table(name: str, layers: Mapping[str, LayerReads]) -> Table:
    """A row for every layer and head."""
    rows = []
    for index, layer in layers.items():
        for number, head in enumerate(layer["heads"]):
            rows.append(
                (
                    index,
                    str(number),
                    f"{_median(head['distance'])}",
                    f"{head['far']:.1%}",
                    f"{head['initial_mean']:.1%}",
                    *(_tokens(head["half_life"][cause], head) for cause in ("decay", "overwriting")),
                )
            )
    columns = ("layer", "head", "distance\nmedian", f"{FAR}+\nback", "M0", "half-life\ndecay", "half-life\noverwriting")
    caption = (
        "distance: half of what a token reads was written fewer tokens back; M0: share of the initial state in a "
        "reading; half-life: tokens until half of a write is left, by decay and by overwriting alone."
    )
    return Table(f"Reads and writes of {name}", columns, rows, caption)


def reads_chart(models: Mapping[str, Mapping[str, LayerReads]]) -> Grid:
    """How far back layers read, their share of M0 by position, and what is left of a write; means over heads."""
    back: dict[str, Sequence[Point]] = {}
    initial: dict[str, Sequence[Point]] = {}
    left: dict[str, Sequence[Point]] = {}
    for model, layers in models.items():
        for index, layer in layers.items():
            label, heads = f"{model}, layer {index}", layer["heads"]
            back[label] = _points([head["distance"] for head in heads], lambda i: 1 << i)
            initial[label] = _points([head["initial"] for head in heads], lambda i: 1 << i)
            after = heads[0]["survival"]["after"]
            left[label] = _points([head["survival"]["kept"] for head in heads], after.__getitem__)
    charts = [
        Chart("reads-distance", "How far back", "tokens back, fewer than", "share of what is read", back, True),
        Chart(
            "reads-initial",
            "Initial state M0",
            "position of the token, from",
            "share of M0 in a reading",
            initial,
            True,
        ),
        Chart("reads-survival", "Survival of a write", "tokens later", "left of a write", left, True),
    ]
    return Grid("reads", "", charts, width=3)


def _points(heads: Sequence[Sequence[float]], x: Callable[[int], float]) -> list[Point]:
    """The mean over heads with the range from the lowest to the highest."""
    length = min(map(len, heads))
    columns = [[values[i] for values in heads] for i in range(length)]
    return [Point(x(i), sum(column) / len(column), min(column), max(column)) for i, column in enumerate(columns)]


def _median(cumulative: Sequence[float]) -> int:
    """The smallest power of two such that half of what is read was written fewer tokens back."""
    return next((1 << i for i, share in enumerate(cumulative) if share >= 0.5), 1 << len(cumulative))


def _tokens(half: float | None, head: Mapping[str, Any]) -> str:
    if half is not None:
        return f"{half:.3g}"
    after = head["survival"]["after"]
    return f"> {after[-1]:,}" if after else "unknown"


def _by_power(place: Tensor, amount: Tensor) -> dict[int, float]:
    """Sum amounts by the number of bits of their place: 0, 1, 2 to 3, 4 to 7, ..."""
    bits = torch.where(place > 0, place.double().clamp(min=1).log2().floor() + 1, 0).long()
    sums = torch.zeros(int(bits.max()) + 1 if len(bits) else 0, dtype=torch.float64).index_add_(0, bits, amount)
    return {i: float(total) for i, total in enumerate(sums) if bool((bits == i).any())}


def _memory(mixer: nn.Module) -> SparseDeltaMemory | None:
    inner = mixer.layer if isinstance(mixer, ShiftedKeys) else mixer
    return inner if isinstance(inner, SparseDeltaMemory) else None
