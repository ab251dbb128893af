"""What a model's memory is probed on: the first long documents that were held out, or rows of a run's task.

The paper's appendix takes "the first B = 8 documents whose tokenized length is at least T = 8192, truncates each
document to 2048 tokens, and performs a single deterministic forward pass on this 8 x 8192 batch", which cannot all be
true. Taken here: the first 8 documents of at least 8192 tokens, and of each the first 2048.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from sdm.data.config import CorpusConfig
from sdm.data.loader import open_data
from sdm.errors import UserError
from sdm.evaluation.documents import Split
from sdm.evaluation.eval_model import EvalModel
from sdm.evaluation.position import Position

AT_LEAST = 8192  # tokens of a document that is probed on, after the paper


@dataclass(frozen=True)
class ProbeTexts:
    """Rows of tokens, and what they are."""

    rows: list[Tensor]
    """[1,T] each."""
    data: dict[str, Any]
    """Where they are from, as JSON."""
    note: str
    """What differs from the paper's choice; empty if nothing does."""


def probe_texts(
    lm: EvalModel, data: tuple[str, ...] = (), split: Split = "auto", documents: int = 8, length: int = 2048
) -> ProbeTexts:
    """The first `length` tokens of the first `documents` long documents; of a run that was trained on a task, as many
    rows of its test."""
    config = None if lm.run is None else lm.run.config()
    if not data and config is not None and not isinstance(config.data, CorpusConfig):
        source = open_data(config.data, "test", config.schedule.steps)
        steps = range(-(-documents // source.batch_size))
        batches = [source.batch(step, range(source.batch_size)).input_ids for step in steps]
        rows = [row[None, :length] for batch in batches for row in batch][:documents]
        note = f"Rows of the run's task, {rows[0].shape[1]:,} tokens each, instead of documents."
        return ProbeTexts(rows, {"task": type(config.data).__name__, "split": "test"}, note)
    sources = Position(data=data, split=split).held_out(lm)
    stores = [held_out.tokens(lm.tokenizer) for held_out in sources]
    found = [_Document(n, place, k) for place, one in enumerate(stores) for k, n in enumerate(one.lengths.tolist())]
    length = min(length, lm.context_limit or length)
    chosen = _choose([one for one in found if one.tokens >= 2], documents, length)
    if not chosen:
        raise UserError("--data: there is no document of two tokens or more")
    rows = [stores[one.source].document(one.number, 0, length)[None] for one in chosen]
    manifest = [
        held_out.manifest() | {"tokens": one.fingerprint} for held_out, one in zip(sources, stores, strict=True)
    ]
    return ProbeTexts(rows, {"sources": manifest}, _note(chosen, documents, length))


class _Document(NamedTuple):
    tokens: int
    source: int
    number: int


def _choose(found: list[_Document], documents: int, length: int) -> list[_Document]:
    """As the paper takes them; if there are too few, those that are long enough; at last the longest there are."""
    for least in (AT_LEAST, length):
        chosen = [one for one in found if one.tokens >= least]
        if len(chosen) >= documents:
            return chosen[:documents]
    longest = sorted(found, key=lambda one: -one.tokens)[:documents]
    return sorted(longest, key=lambda one: (one.source, one.number))


def _note(chosen: list[_Document], documents: int, length: int) -> str:
    notes, shortest = [], min(one.tokens for one in chosen)
    if len(chosen) < documents:
        notes.append(f"There are {len(chosen)} documents, not {documents}.")
    if shortest < length:
        notes.append(f"The longest documents there are: the shortest of them has {shortest:,} tokens, not {length:,}.")
    elif shortest < AT_LEAST:
        notes.append(f"There are not {documents} documents of {AT_LEAST:,} tokens, the paper's choice: of {length:,}.")
    return " ".join(notes)
