"""`sdm eval nll`: likelihood of held-out documents, each read from its beginning with the state carried on.

Shapes: B rows, T time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sdm.errors import UserError, check_size
from sdm.evaluation.documents import HeldOut, Listing, Reader, TextMeasurement, listing
from sdm.evaluation.eval_model import EvalModel
from sdm.evaluation.measurement import Data, Pairs, Partial, Plan, Result, Unit
from sdm.evaluation.report import Report, Table
from sdm.evaluation.statistics import weighted_mean
from sdm.models.likelihood import IGNORED

DOCUMENTS = 16  # at a time: short ones are computed side by side
TOKENS = 8192  # at a time, over all rows


@dataclass(frozen=True)
class Likelihood(TextMeasurement):
    """Negative log-likelihood, perplexity and bits per byte of held-out text, document by document."""

    context: int | None = None
    """Cut documents into pieces of so many tokens and score each by itself; none: whole documents, the state carried on
    to their end."""

    def __post_init__(self) -> None:
        if self.context is not None:
            check_size(context=self.context)

    def plan(self, lm: EvalModel) -> Plan:
        """List the documents; a unit is a document."""
        sources = self.held_out(lm)
        units, manifest = [], []
        for place, held_out in enumerate(sources):
            documents = listing(held_out)
            self._check_longest(lm, held_out, documents)
            manifest.append({**held_out.manifest(), "documents": len(documents.names), "sha256": documents.sha256})
            units += [
                Unit(f"{held_out.name}:{name}", held_out.name, (place, number, size), cost=size)
                for number, (name, size) in enumerate(zip(documents.names, documents.num_bytes, strict=True))
            ]
        partial = Partial()
        measure = _Documents(lm, sources, self.context, partial)
        return Plan(units, measure, {"sources": manifest}, batch=DOCUMENTS, partial=partial)

    def _check_longest(self, lm: EvalModel, held_out: HeldOut, documents: Listing) -> None:
        """Whether the model takes the largest document is said before anything is measured."""
        largest = max(range(len(documents.names)), key=documents.num_bytes.__getitem__)
        if self.context is None and documents.num_bytes[largest] > (lm.context_limit or math.inf):
            document = Reader(held_out).document(largest)
            check_length(lm, len(lm.encode(document.text)), document.name)

    def summary(self, results: Mapping[str, Result]) -> dict[str, Any]:
        """Nats per token, perplexity and bits per byte, of all sources and of each."""
        by_source: dict[str, list[Result]] = {}
        for result in results.values():
            by_source.setdefault(result["source"], []).append(result)
        total = _means(list(results.values()))
        return {**total, "sources": {source: _means(of_source) for source, of_source in by_source.items()}}

    def report(self, summaries: Mapping[str, dict[str, Any]]) -> Report:
        """A table with a row per model and source."""
        rows = []
        for name, summary in summaries.items():
            for source, means in summary["sources"].items():
                interval = f" ± {means['margin']:.4f}" if means["margin"] is not None else ""
                numbers = f"{means['nll']:.4f}{interval}", f"{means['perplexity']:.3f}", f"{means['bits_per_byte']:.4f}"
                rows.append((name, source, *numbers, f"{means['documents']:,}", f"{means['tokens']:,}"))
        title = "Likelihood of held-out text"
        columns = ("model", "source", "nats/token", "perplexity", "bits/byte", "documents", "tokens")
        return Report([Table(title, columns, rows, "±: 95% interval of the mean over documents.")])

    def pairs(self, results: Mapping[str, Result]) -> Pairs:
        """Nats per token and bits per byte of each document."""
        scored = {key: result for key, result in results.items() if result["tokens"]}
        return {
            "nats/token": {key: (result["nll"] / result["tokens"], result["tokens"]) for key, result in scored.items()},
            "bits/byte": {
                key: (result["nll"] / math.log(2) / result["bytes"], result["bytes"]) for key, result in scored.items()
            },
        }

    def pairable(self, quantity: str, data: tuple[Data, Data], same_tokenizer: bool) -> bool:
        """Documents are known by name and size, also where sources differ; what a token is the tokenizer decides."""
        return same_tokenizer or quantity == "bits/byte"


def check_length(lm: EvalModel, tokens: int, name: str) -> None:
    """Raise unless the model takes a document of so many tokens, or the piece of it."""
    lm.check_length(tokens, f"{name!r} is longer; cut documents with --context N, and N tokens are scored at a time")


def _means(results: list[Result]) -> dict[str, Any]:
    """Over all tokens; the interval is that of documents that are drawn at random."""
    # Of white space some tokenizers make nothing.
    results = [result for result in results if result["tokens"]]
    if not results:
        raise UserError("the documents have no tokens: the tokenizer drops all of their text")
    tokens, size = (sum(result[key] for result in results) for key in ("tokens", "bytes"))
    mean = weighted_mean(
        [result["nll"] / result["tokens"] for result in results], [result["tokens"] for result in results]
    )
    return {
        "nll": mean.value,
        "margin": None if mean.high is None else mean.high - mean.value,
        "perplexity": math.exp(min(mean.value, 700.0)),
        "bits_per_byte": mean.value * tokens / size / math.log(2),
        "tokens": tokens,
        "bytes": size,
        "documents": len(results),
    }


class _Documents:
    """Scores documents of the sources of one model."""

    def __init__(self, lm: EvalModel, sources: list[HeldOut], context: int | None, partial: Partial) -> None:
        self._lm, self._context, self._partial = lm, context, partial
        self._names, self._readers = [source.name for source in sources], [Reader(source) for source in sources]

    def __call__(self, units: Sequence[Unit]) -> Iterator[Result]:
        rows: list[list[Tensor]] = []
        for unit in units:
            place, number, _ = unit.payload
            document = self._readers[place].document(number)
            rows.append(self._pieces(self._lm.encode(document.text), document.name))
        totals = [0.0] * len(rows)
        owners = [(piece, owner) for owner, pieces in enumerate(rows) for piece in pieces]
        whole, cost, before = sum(len(piece) for piece, _ in owners), sum(unit.cost for unit in units), 0
        for group in _by_length(owners, alone=self._lm.is_length_dependent):
            sums = self._score([row for row, _ in group], lambda tokens: self._partial(cost * tokens / whole), before)
            before += sum(len(row) for row, _ in group)
            for (_, owner), value in zip(group, sums, strict=True):
                totals[owner] += value
        for unit, pieces, total in zip(units, rows, totals, strict=True):
            place, _, size = unit.payload
            tokens = sum(len(piece) - 1 for piece in pieces)
            yield {"source": self._names[place], "nll": total, "tokens": tokens, "bytes": size}

    def _pieces(self, ids: list[int], name: str) -> list[Tensor]:
        """Rows of tokens, each behind the one that stands before a document."""
        size = self._context or len(ids)
        check_length(self._lm, min(size, len(ids)), name)
        pieces = [ids[start : start + size] for start in range(0, len(ids), max(size, 1))]
        return [torch.tensor([self._lm.start_id, *piece]) for piece in pieces]

    def _score(self, rows: list[Tensor], tell: Callable[[int], None], before: int) -> list[float]:
        """The nats of each row, in stretches of time that the state is carried over. `tell` is told of how many tokens
        that is done, with those `before`."""
        width = max(len(row) for row in rows) - 1
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        targets = torch.full((len(rows), width), IGNORED)
        for place, row in enumerate(rows):
            ids[place, : len(row) - 1], targets[place, : len(row) - 1] = row[:-1], row[1:]
        totals, past = torch.zeros(len(rows), dtype=torch.float64), None
        step = width if self._lm.is_length_dependent else max(1, TOKENS // len(rows))
        for start in range(0, width, step):
            stretch = slice(start, start + step)
            nats, past = self._lm.nll(ids[:, stretch], targets[:, stretch], past, carry=start + step < width)
            totals += nats.double().sum(1)
            tell(before + sum(min(len(row), start + step) for row in rows))
        return totals.tolist()


def _by_length(rows: list[tuple[Tensor, int]], alone: bool) -> Iterator[list[tuple[Tensor, int]]]:
    """Rows of similar length side by side, so that little is padding; a long one, or with `alone` each, by itself."""
    group: list[tuple[Tensor, int]] = []
    for row in sorted(rows, key=lambda entry: len(entry[0])):
        if group and (alone or (len(group) + 1) * len(row[0]) > TOKENS):
            yield group
            group = []
        group.append(row)
    if group:
        yield group
