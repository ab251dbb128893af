"""`sdm eval position`: likelihood by position, what a model gains from context, and how far back it still gains.

A document is read once, at constant memory for models whose states have a fixed size. Text that is harder at some
positions looks like forgetting; so the same tokens are scored a second time with the context beyond the local layers'
reach withheld, and the difference, the *context gain*, is what the long-range layers bring from there.

The reach r of the local layers is what they see stacked: the sum of each one's, `LayerType.reach`. Tokens are scored in
blocks of s = max(r, 64); the withheld context of a block is the token that stands before a document, then the r tokens
before the block and the block itself. So a token has all that its local layers can see, and between r and r + s tokens
of what the long-range layers could. The start token keeps the withheld text a document like any other, and is
beyond the reach of the tokens that count: for a model of local layers alone the gain is zero.

Shapes: B documents, T time.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sdm.data.config import CorpusConfig
from sdm.data.shards import TokenStore
from sdm.errors import DataError, UserError, check_not_negative, check_size
from sdm.evaluation.documents import HeldOut, TextMeasurement
from sdm.evaluation.eval_model import EvalModel
from sdm.evaluation.measurement import Data, Pairs, Partial, Plan, Result, Unit
from sdm.evaluation.report import Chart, Point, Reference, Report, Table
from sdm.evaluation.statistics import PairedDifference, weighted_mean
from sdm.models.layer_types import local_reach

TOKENS = 8192  # at a time, over all rows
SMALLEST_BLOCK = 64
POSITION = "position in the document (tokens)"
GAIN = "gain"  # what quantities are called that are made with context withheld


@dataclass(frozen=True)
class Position(TextMeasurement):
    """Likelihood by position in the document, and the context gain, on documents of up to millions of tokens."""

    length: int | None = None
    """Tokens of a document that are scored; longer ones are cut. None: the sequence length of the run."""
    documents: int = 48
    """How many documents, at most, of each source."""
    join: Literal["auto", "always", "never"] = "auto"
    """Join the documents of a source, one after the other, to such as are long enough. auto: if no single one is."""
    gain: bool = True
    """Also measure the context gain, which reads every token two or three times more."""
    reach: int | None = None
    """Tokens of context that are not withheld. None: what the local layers see stacked, for models of this library;
    others have no gain without it."""
    first_bin: int = 64
    """Tokens of the first stretch of positions; each that follows reaches twice as far."""
    bins_per_doubling: int = 1
    """Stretches that each doubling is cut into."""

    def __post_init__(self) -> None:
        check_size(documents=self.documents, first_bin=self.first_bin, bins_per_doubling=self.bins_per_doubling)
        if self.length is not None:
            check_size(length=self.length)
        if self.reach is not None:
            check_not_negative(reach=self.reach)

    def plan(self, lm: EvalModel) -> Plan:
        """Choose documents that are long enough, joined if necessary; a unit is one of them."""
        length = self.length or _sequence_length(lm)
        lm.check_length(length, "lower --length")
        edges = position_edges(length, self.first_bin, self.bins_per_doubling)
        reach = self._reach(lm, length)
        units, manifest, stores, partial = [], [], [], Partial()
        cost = length + (0 if reach is None else _withheld_tokens(length, reach))
        for place, held_out in enumerate(self.held_out(lm)):
            store = held_out.tokens(lm.tokenizer)
            joined, documents = self._documents(held_out, store, length)
            stores.append(store)
            manifest.append({**held_out.manifest(), "tokens": store.fingerprint, "joined": joined})
            units += [
                Unit(f"{held_out.name}:{number}", held_out.name, (place, held_out.name, parts), cost=cost)
                for number, parts in enumerate(documents)
            ]

        def measure(batch: Sequence[Unit]) -> Iterator[Result]:
            rows = torch.stack([_tokens(stores[unit.payload[0]], unit.payload[2], length + 1) for unit in batch])
            full, withheld = score_by_position(lm, rows, edges, reach, partial)
            for number, unit in enumerate(batch):
                _, source, parts = unit.payload
                yield {
                    "source": source,
                    "joined": len(parts),
                    "edges": edges,
                    "nll": full[number],
                    "withheld": None if withheld is None else withheld[number],
                }

        data = {"sources": manifest, "length": length, "reach": reach}
        return Plan(units, measure, data, batch=max(1, TOKENS // length), partial=partial)

    def _reach(self, lm: EvalModel, length: int) -> int | None:
        if not self.gain:
            return None
        reach = local_reach(lm.model.config) if self.reach is None and lm.is_ours else self.reach
        if reach is not None and _withheld_tokens(length, reach):
            window = 1 + reach + _blocks(reach)[0]
            lm.check_length(window, "so many are read where context is withheld; lower --reach, or take --no-gain")
        return reach

    def _documents(self, held_out: HeldOut, store: TokenStore, length: int) -> tuple[bool, list[list[int]]]:
        """Whether documents are joined, and for each that is measured the numbers of those in the store."""
        # One token more than is read: the last one has to be predicted.
        single = [[number] for number in (store.lengths > length).nonzero().squeeze(1).tolist()]
        if self.join != "always" and (single or self.join == "never"):
            documents, joined = single, False
        else:
            documents, joined = list(_joined(store.lengths.tolist(), length + 1)), True
        if not documents:
            longest = int(store.num_tokens if joined else store.lengths.max()) - 1
            raise DataError(
                f"source {held_out.name!r}, split {held_out.split}: no document is longer than {length} tokens, the "
                f"longest {'of all joined ' if joined else ''}has {longest}; lower --length, add text, take --split all"
                + ("" if joined else ", or --join auto")
            )
        return joined, documents[: self.documents]

    def summary(self, results: Mapping[str, Result]) -> dict[str, Any]:
        """Mean and interval over documents of each range of positions."""
        documents = list(results.values())
        edges = documents[0]["edges"]
        bins = [_bin(documents, place, *edge) for place, edge in enumerate(itertools.pairwise(edges))]
        tokens = sum(span["tokens"] for span in bins)
        mean = sum(span["nll"] * span["tokens"] for span in bins) / tokens
        return {
            "positions": bins,
            "nll": mean,
            "perplexity": math.exp(min(mean, 700.0)),
            "tokens": tokens,
            "documents": len(documents),
            "joined": max(document["joined"] for document in documents) > 1,
        }

    def report(self, summaries: Mapping[str, dict[str, Any]]) -> Report:
        """Tables with a row per model, and charts by position."""
        gain = "What the context beyond the local layers' reach brings"
        charts = [
            _chart("position", "Likelihood by position", "nats per token", summaries),
            _chart("perplexity", "Perplexity by position", "perplexity", summaries, scale=math.exp),
            _chart("context-gain", gain, "context gain (nats per token)", summaries, "gain"),
        ]
        return Report(_tables(summaries), charts)

    def pairs(self, results: Mapping[str, Result]) -> Pairs:
        """Nats per token and gain of each document, over all positions and by range."""
        pairs: Pairs = {}
        for key, document in results.items():
            tokens = document["edges"][-1]
            pairs.setdefault("nats/token", {})[key] = sum(document["nll"]) / tokens, tokens
            for place, (start, stop) in enumerate(itertools.pairwise(document["edges"])):
                at = pairs.setdefault(_quantity(stop), {})
                at[key] = document["nll"][place] / (stop - start), 1.0
        for key, document in results.items():
            for place, (start, stop) in enumerate(
                itertools.pairwise(document["edges"]) if document["withheld"] else ()
            ):
                gain = document["withheld"][place] - document["nll"][place]
                pairs.setdefault(_gain_quantity(stop), {})[key] = gain / (stop - start), 1.0
        return pairs

    def difference_charts(
        self, summary: Mapping[str, Any], baseline: str, differences: Mapping[str, Sequence[PairedDifference]]
    ) -> list[Chart]:
        """Nats per token and context gain above the baseline's on the same documents, by position.

        Documents differ far more than models do: the intervals of the differences are narrow where those of the models
        hide everything.
        """
        label = "difference (nats per token), with 95% interval"
        charts = []
        for name, what, quantity in (
            ("position-differences", "Loss", _quantity),
            ("context-gain-differences", "Context gain", _gain_quantity),
        ):
            curves: dict[str, list[Point]] = {}
            for model, entries in differences.items():
                means = {entry.quantity: entry.difference for entry in entries}
                points = [
                    Point(_middle(span), mean.value, mean.low, mean.high)
                    for span in summary["positions"]
                    if (mean := means.get(quantity(span["stop"]))) is not None
                ]
                if points:
                    curves[f"{model} - {baseline}"] = points
            title = f"{what} above that of {baseline} on the same documents"
            if curves:
                charts.append(Chart(name, title, POSITION, label, curves, log_x=True, references=(Reference(0.0),)))
        return charts

    def pairable(self, quantity: str, data: tuple[Data, Data], same_tokenizer: bool) -> bool:
        """Documents are numbered: the tokens must be the same, and for gains what is withheld too."""
        parts = ("sources", "length", "reach") if quantity.startswith(GAIN) else ("sources", "length")
        return all(data[0][part] == data[1][part] for part in parts)


def _quantity(stop: int) -> str:
    return f"nats/token to {stop:,}"


def _gain_quantity(stop: int) -> str:
    return f"{GAIN} to {stop:,}"


def _middle(span: Mapping[str, Any]) -> float:
    """Return the geometric middle of a range of positions."""
    return math.sqrt(max(span["start"], span["stop"] / 4) * span["stop"])


def position_points(positions: Sequence[Mapping[str, Any]], quantity: str = "nll") -> list[Point]:
    """Read the points of a summary.

    Args:
        positions: The ranges of positions of the summary.
        quantity: "nll" or "gain".

    Returns:
        A point at the geometric middle of each range that has the quantity.
    """
    low, high = ("low", "high") if quantity == "nll" else (f"{quantity}_low", f"{quantity}_high")
    return [
        Point(_middle(span), span[quantity], span.get(low), span.get(high)) for span in positions if quantity in span
    ]


UnitValue = Callable[[Mapping[str, Any]], float]
"""A number of one document, from its result of `Position`."""


def whole(unit: Mapping[str, Any]) -> float:
    """Nats per token of a document's first tokens, as many as the measurement takes."""
    return math.fsum(unit["nll"]) / int(unit["edges"][-1])


def stretch(place: int) -> UnitValue:
    """Nats per token between two edges; -1 is the last stretch, the second half."""

    def value(unit: Mapping[str, Any]) -> float:
        sums, edges = unit["nll"], unit["edges"]
        index = place % len(sums)
        return float(sums[index]) / int(edges[index + 1] - edges[index])

    return value


def growth(unit: Mapping[str, Any]) -> float:
    """Nats per token in the last stretch minus those in the first."""
    return stretch(-1)(unit) - stretch(0)(unit)


def nats(summary: Mapping[str, Any]) -> float:
    """Nats per token over all positions."""
    return float(summary["nll"])


def nats_at(place: int, quantity: str = "nll") -> Callable[[Mapping[str, Any]], float | None]:
    """Nats per token in a stretch of positions, or their "gain" by context; -1 is the last stretch, the second half."""
    return lambda summary: summary["positions"][place][quantity]


def position_edges(length: int, first: int = 64, per_doubling: int = 1) -> list[int]:
    """0, first, 2 first, 4 first, ... up to length, and with more per doubling those in between."""
    edges = {0, length}
    for step in itertools.count():
        edge = round(first * 2 ** (step / per_doubling))
        if edge >= length:
            return sorted(edges)
        edges.add(edge)
    raise AssertionError("the loop returns")


def score_by_position(
    lm: EvalModel,
    rows: Tensor,
    edges: Sequence[int],
    reach: int | None = None,
    partial: Callable[[float], None] = lambda tokens: None,
) -> tuple[list[list[float]], list[list[float]] | None]:
    """The summed nats of each row [B,T+1] between two edges, in one pass; and with `reach` those with the context
    beyond it withheld. `partial` is told how many tokens are done."""
    full, withheld = _Bins(len(rows), edges), _Bins(len(rows), edges)
    past, step = None, rows.shape[1] if lm.is_length_dependent else max(1, TOKENS // len(rows))
    block, whole = (0, 0) if reach is None else _blocks(reach)
    time, done = rows.shape[1] - 1, 0
    for start in range(0, time, step):
        stop = min(start + step, time)
        ids, targets = rows[:, start:stop].long(), rows[:, start + 1 : stop + 1].long()
        nats, past = lm.nll(ids, targets, past, carry=stop < time)
        full.add(nats, start)
        withheld.add(nats[:, : max(0, whole - start)], start)
        done += ids.numel()
        partial(done)
    if reach is None:
        return full.sums(), None
    for number, row in enumerate(rows):
        for starts, nats in _withheld(lm, row, range(whole, time, block), block, reach):
            for start, block_nats in zip(starts, nats, strict=True):
                withheld.add(block_nats[: time - start].unsqueeze(0), start, number)
            done += len(starts) * (1 + reach + block)
            partial(done)
    return full.sums(), withheld.sums()


def _blocks(reach: int) -> tuple[int, int]:
    """Tokens of a block, and up to where nothing is withheld: those tokens count as they are."""
    block = max(reach, SMALLEST_BLOCK)
    return block, math.ceil((reach + 1) / block) * block


def _withheld_tokens(length: int, reach: int) -> int:
    """How many tokens are read to score a document with the context beyond `reach` withheld."""
    block, whole = _blocks(reach)
    return len(range(whole, length, block)) * (1 + reach + block)


def _withheld(
    lm: EvalModel, row: Tensor, starts: range, block: int, reach: int
) -> Iterator[tuple[Sequence[int], Tensor]]:
    """The nats [n,block] of blocks of a document [T+1] that see `reach` tokens of what went before; several at a
    time. The last block may reach beyond the document."""
    width = 1 + reach + block
    size = max(1, TOKENS // width)
    for first in range(0, len(starts), size):
        some = starts[first : first + size]
        windows = torch.zeros(len(some), width + 1, dtype=torch.int64)
        for place, start in enumerate(some):
            piece = row[start - reach : start + block + 1]
            windows[place, 0] = lm.start_id
            windows[place, 1 : 1 + len(piece)] = piece
        # Behind the end of the document there is token 0, which is not counted.
        nats, _ = lm.nll(windows[:, :-1], windows[:, 1:])
        yield some, nats[:, 1 + reach :]


class _Bins:
    """Sums of nats between two edges, for each row."""

    def __init__(self, rows: int, edges: Sequence[int]) -> None:
        self._edges = list(edges)
        self._sums = torch.zeros(rows, len(self._edges) - 1, dtype=torch.float64)

    def add(self, nats: Tensor, start: int, row: int = 0) -> None:
        """Add those of tokens [B,T] from position `start` on, to the rows from `row` on."""
        stop = start + nats.shape[1]
        place = bisect.bisect_right(self._edges, start) - 1
        while start < stop:
            end = min(stop, self._edges[place + 1])
            self._sums[row : row + len(nats), place] += nats[:, : end - start].double().sum(1)
            nats, start, place = nats[:, end - start :], end, place + 1

    def sums(self) -> list[list[float]]:
        return self._sums.tolist()


def _sequence_length(lm: EvalModel) -> int:
    config = None if lm.run is None else lm.run.config().data
    if not isinstance(config, CorpusConfig):
        raise UserError(f"--length: {lm.name} is no run that was trained on text; say how many tokens to score")
    return config.sequence_length


def _joined(lengths: Sequence[int], wanted: int) -> Iterator[list[int]]:
    """Consecutive documents that have so many tokens together; each is used once."""
    parts: list[int] = []
    tokens = 0
    for number, length in enumerate(lengths):
        parts.append(number)
        tokens += length
        if tokens >= wanted:
            yield parts
            parts, tokens = [], 0


def _tokens(store: TokenStore, parts: Sequence[int], count: int) -> Tensor:
    """The first tokens of joined documents, in 32 bits: a million of them need not take more."""
    pieces = []
    for number in parts:
        pieces.append(store.document(number, 0, count).int())
        count -= len(pieces[-1])
    return torch.cat(pieces)


def _bin(results: list[Result], place: int, start: int, stop: int) -> dict[str, Any]:
    """The mean over documents of one stretch of positions."""
    size = stop - start
    values = [document["nll"][place] / size for document in results]
    mean = weighted_mean(values)
    deviation = math.sqrt(sum((x - mean.value) ** 2 for x in values) / max(len(values) - 1, 1))
    span = {
        "start": start,
        "stop": stop,
        "nll": mean.value,
        "error": deviation / math.sqrt(len(values)),  # standard error of the mean over documents
        "tokens": size * len(values),
        "low": mean.low,
        "high": mean.high,
    }
    if all(document["withheld"] is not None for document in results):
        gain = weighted_mean([(document["withheld"][place] - document["nll"][place]) / size for document in results])
        span |= {"gain": gain.value, "gain_low": gain.low, "gain_high": gain.high}
    return span


def _tables(summaries: Mapping[str, dict[str, Any]]) -> list[Table]:
    """A row per model and a column per range of positions; models may have been read to different lengths."""
    stops = sorted({entry["stop"] for summary in summaries.values() for entry in summary["positions"]})
    columns = ("model", *(f"to {stop:,}" for stop in stops), "all")
    losses, gains = [], []
    for name, summary in summaries.items():
        bins = {entry["stop"]: entry for entry in summary["positions"]}
        cells = (f"{bins[stop]['nll']:.4f}" if stop in bins else "" for stop in stops)
        losses.append((name, *cells, f"{summary['nll']:.4f}"))
        if "gain" in summary["positions"][0]:
            gain = sum(entry["gain"] * entry["tokens"] for entry in bins.values()) / summary["tokens"]
            cells = (f"{bins[stop]['gain']:+.4f}" if stop in bins else "" for stop in stops)
            gains.append((name, *cells, f"{gain:+.4f}"))
    counts = dict.fromkeys(f"{summary['documents']:,}" for summary in summaries.values())
    joined = any(summary["joined"] for summary in summaries.values())
    caption = f"{' or '.join(counts)} documents{', made long by joining several' if joined else ''}."
    tables = [Table("Nats per token, by position in the document", columns, losses, caption)]
    if gains:
        caption = "Nats per token that the context beyond the reach of the local layers brings."
        tables.append(Table("Context gain, by position in the document", columns, gains, caption))
    return tables


def _chart(
    name: str,
    title: str,
    label: str,
    summaries: Mapping[str, dict[str, Any]],
    quantity: str = "nll",
    scale: Callable[[float], float] = lambda x: x,
) -> Chart:
    def scaled(point: Point) -> Point:
        # Between documents intervals are wide: those of several models would hide the curves.
        low, high = (point.low, point.high) if len(summaries) == 1 else (None, None)
        return Point(
            point.x, scale(point.y), None if low is None else scale(low), None if high is None else scale(high)
        )

    curves = {
        model: [scaled(point) for point in position_points(summary["positions"], quantity)]
        for model, summary in summaries.items()
    }
    curves = {model: points for model, points in curves.items() if points}
    if any(point.low is not None for points in curves.values() for point in points):  # one document has no interval
        label = f"{label}, with 95% interval"
    return Chart(name, title, POSITION, label, curves, log_x=True)
