"""`sdm eval probe`: how a model uses its memories: keys and slots, how far back it reads, how long a write survives.

Keys and slots are measured as in the paper's appendix on memory access, the rest by `sdm.evaluation.memory_access`.

The appendix takes "the first B = 8 documents whose tokenized length is at least T = 8192, truncates each document to
2048 tokens, and performs a single deterministic forward pass on this 8 x 8192 batch", which cannot all be true. Taken
here: the first 8 documents of at least 8192 tokens, and of each the first 2048. A run that was trained on a task is
probed on rows of its test split.

All texts of a model are one unit: which slots are in use is a number of all of them together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from sdm.data.config import CorpusConfig, open_data
from sdm.errors import UserError, check_size
from sdm.evaluation.documents import TextMeasurement
from sdm.evaluation.eval_model import EvalModel
from sdm.evaluation.measurement import Plan, Result, Unit
from sdm.evaluation.memory_access import (
    SIDES,
    KeyUse,
    memory_stats,
    probe_access,
    probe_reads,
    reads_chart,
    reads_table,
)
from sdm.evaluation.report import Chart, Grid, Look, Point, Report, Table, Violin, Violins
from sdm.layers.memory_statistics import sdm_layers

AT_LEAST = 8192  # tokens of a document that is probed on, after the paper
ALIKE = "all keys alike"

Uses = Mapping[str, Mapping[str, KeyUse]]
"""By the name of the model, the use of its "write" and of its "read" keys."""


@dataclass(frozen=True)
class Probe(TextMeasurement):
    """How SDM layers use their keys and slots (the paper's appendix on memory access), and how far back they read."""

    documents: int = 8
    """The first so many documents of 8,192 tokens or more, as in the paper; shorter ones if there are not so many."""
    length: int = 2048
    """Tokens of each document, from its beginning."""

    def __post_init__(self) -> None:
        check_size(documents=self.documents)
        if self.length < 2:
            raise UserError(f"length must be at least 2, got {self.length}")

    def plan(self, lm: EvalModel) -> Plan:
        """Choose the texts: documents, or rows of the run's task."""
        if not sdm_layers(lm.model):
            raise UserError(f"{lm.path} has no SDM layer, so there is no memory to probe; name a run that has one")
        texts = probe_texts(lm, self)

        def measure(batch: Sequence[Unit]) -> Iterator[Result]:
            for _ in batch:
                stats = memory_stats(lm.model, texts.rows)
                yield {
                    "documents": len(texts.rows),
                    "note": texts.note,
                    "access": probe_access(lm.model, texts.rows).describe(),
                    "memory": {"mean": stats.mean, "layers": stats.layers},
                    "reads": probe_reads(lm.model, texts.rows),
                }

        tokens = sum(row.numel() for row in texts.rows)
        return Plan([Unit("texts", payload=texts, cost=tokens)], measure, texts.data)

    def summary(self, results: Mapping[str, Result]) -> dict[str, Any]:
        """The result of the only unit."""
        return next(iter(results.values()))

    def report(self, summaries: Mapping[str, dict[str, Any]]) -> Report:
        """Two tables per model, with a row per layer and per head, the paper's two figures, and one of the reads."""
        uses = {
            name: {side: KeyUse.from_json(summary["access"][side]) for side in SIDES}
            for name, summary in summaries.items()
        }
        reads = {name: summary["reads"] for name, summary in summaries.items()}
        tables = [_table(name, summary) for name, summary in summaries.items()]
        tables += [reads_table(name, layers) for name, layers in reads.items()]
        return Report(tables, [cumulative_mass_chart(uses), effective_keys_chart(uses), reads_chart(reads)])


def _table(name: str, summary: Mapping[str, Any]) -> Table:
    access, memory = summary["access"], summary["memory"]
    rows = [_row(_layer_number(layer["name"]), layer, memory["layers"][layer["name"]]) for layer in access["layers"]]
    rows.append(_row("all", access, memory["mean"]))
    sides = (f"{what}\n{side}" for what in ("u(p)", "C(k/2)", "slots") for side in SIDES)
    columns = ("layer", *sides, "forget\nmean", "input\nmean")
    caption = (
        f"{access['tokens']:,} tokens of {summary['documents']} documents. u(p): effective keys / k, the mean; C(k/2): "
        f"mass of the heavier half of the keys; slots: proportion in use; W = {access['write']['keys']}, "
        f"R = {access['read']['keys']}. {summary['note']}"
    )
    return Table(f"Memory access of {name}", columns, rows, caption.strip())


def _row(name: str, access: Mapping[str, Any], memory: Mapping[str, float]) -> tuple[str, ...]:
    uses = [access[side] for side in SIDES]
    return (
        name,
        *(f"{use['effective_mean']:.3f}" for use in uses),
        *(f"{use['mass'][max(use['keys'] // 2, 1) - 1]:.1%}" for use in uses),
        *(f"{memory[f'slots_{what}']:.1%}" for what in ("written", "read")),
        *(f"{memory[f'{gate}_mean']:.3f}" for gate in ("forget_gate", "input_gate")),
    )


def _layer_number(name: str) -> str:
    """The number of the layer in the model, which is what tells layers apart."""
    number = re.search(r"layers\.(\d+)", name)
    return number.group(1) if number else name


def cumulative_mass_chart(uses: Uses, name: str = "cumulative_mass") -> Grid:
    """C(m), the mass of the m heaviest keys: mean over tokens, with the range from the 10% to the 90% quantile."""
    if not uses:
        raise ValueError("uses must have at least one model")
    return Grid(name, "", [_mass_panel(uses, side) for side in SIDES], width=2)


def _mass_panel(uses: Uses, side: str) -> Chart:
    curves: dict[str, Sequence[Point]] = {}
    for model, use in uses.items():
        key_use = use[side]
        bands = zip(key_use.mass, key_use.mass_low, key_use.mass_high, strict=True)
        curves[f"{model}, k = {key_use.keys}"] = [
            Point(m, float(mean), float(low), float(high)) for m, (mean, low, high) in enumerate(bands, start=1)
        ]
    most = max((use[side].keys for use in uses.values()), default=1)
    looks = {name: Look(model) for name, model in zip(curves, uses, strict=True)}
    curves[ALIKE] = [Point(1, 1 / most), Point(most, 1)]
    looks[ALIKE] = Look(kind="reference")
    y = "cumulative mass C(m), p10 to p90"
    title = f"{side.capitalize()} keys"
    return Chart(f"cumulative_mass-{side}", title, "m heaviest keys of a token", y, curves, percent=True, looks=looks)


def effective_keys_chart(uses: Uses, name: str = "effective_keys") -> Grid:
    """u(p), the effective keys of a token as a proportion of k: the distribution over tokens, heads and layers."""
    charts = []
    for side in SIDES:
        violins = {
            f"{model}\nk = {use[side].keys}": Violin(
                use[side].effective_counts.tolist(), use[side].effective_mean, use[side].effective_median
            )
            for model, use in uses.items()
        }
        charts.append(Violins(f"{name}-{side}", f"{side.capitalize()} keys", "effective keys / k of a token", violins))
    return Grid(name, "", charts, width=2)


@dataclass(frozen=True)
class ProbeTexts:
    """Rows of tokens to probe a model on."""

    rows: list[Tensor]
    """[1,T] each."""
    data: dict[str, Any]
    """Where they are from, as JSON."""
    note: str
    """What differs from the paper's choice; empty if nothing does."""


class _Document(NamedTuple):
    tokens: int
    source: int
    number: int


def probe_texts(lm: EvalModel, settings: Probe) -> ProbeTexts:
    """Take the first tokens of the first long documents; of a run that was trained on a task, rows of its test."""
    config = None if lm.run is None else lm.run.config()
    if not settings.data and config is not None and not isinstance(config.data, CorpusConfig):
        source = open_data(config.data, "test", config.schedule.steps)
        steps = range(-(-settings.documents // source.batch_size))
        batches = [source.batch(step, range(source.batch_size)).input_ids for step in steps]
        rows = [row[None, : settings.length] for batch in batches for row in batch][: settings.documents]
        note = f"Rows of the run's task, {rows[0].shape[1]:,} tokens each, instead of documents."
        return ProbeTexts(rows, {"task": type(config.data).__name__, "split": "test"}, note)
    sources = settings.held_out(lm)
    stores = [held_out.tokens(lm.tokenizer) for held_out in sources]
    known = [
        _Document(tokens, place, number)
        for place, store in enumerate(stores)
        for number, tokens in enumerate(store.lengths.tolist())
        if tokens >= 2
    ]
    length = min(settings.length, lm.context_limit or settings.length)
    chosen = _choose(known, settings.documents, length)
    if not chosen:
        raise UserError("--data: there is no document of two tokens or more")
    rows = [stores[document.source].document(document.number, 0, length)[None] for document in chosen]
    manifest = [
        held_out.manifest() | {"tokens": store.fingerprint} for held_out, store in zip(sources, stores, strict=True)
    ]
    return ProbeTexts(rows, {"sources": manifest}, _note(chosen, settings.documents, length))


def _choose(known: list[_Document], documents: int, length: int) -> list[_Document]:
    """As the paper takes them; if there are too few, those that are long enough; at last the longest there are."""
    for least in (AT_LEAST, length):
        chosen = [document for document in known if document.tokens >= least]
        if len(chosen) >= documents:
            return chosen[:documents]
    longest = sorted(known, key=lambda document: -document.tokens)[:documents]
    return sorted(longest, key=lambda document: (document.source, document.number))


def _note(chosen: list[_Document], documents: int, length: int) -> str:
    notes, shortest = [], min(document.tokens for document in chosen)
    if len(chosen) < documents:
        notes.append(f"There are {len(chosen)} documents, not {documents}.")
    if shortest < length:
        notes.append(f"The longest documents there are: the shortest of them has {shortest:,} tokens, not {length:,}.")
    elif shortest < AT_LEAST:
        notes.append(f"There are not {documents} documents of {AT_LEAST:,} tokens, the paper's choice: of {length:,}.")
    return " ".join(notes)
