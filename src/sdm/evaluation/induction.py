"""`sdm eval induction`: whether layers read the token before, and what followed the same token earlier.

A model that predicts "b" after "a" because "a b" came earlier in the text needs two steps: something that joins a token
to the one before it, and a reading of what followed the earlier "a". Both show in the exact maps of the mixers
(`output_attentions`), from every token to the tokens that it reads, as shares of a token's whole reading:

- *previous*: what is read from the token before;
- *at offset k*: what is read k tokens after earlier occurrences of the same token. Offset 1 is what followed, the
  successor. Offsets 2 and 3 are as far away and of no use: they are what distance alone would give.

Shapes: H heads, T time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sdm.errors import DataError, UserError, check_size
from sdm.evaluation.documents import TextMeasurement
from sdm.evaluation.eval_model import EvalModel
from sdm.evaluation.measurement import Pairs, Plan, Result, Unit
from sdm.evaluation.report import Report, Table
from sdm.evaluation.statistics import weighted_mean
from sdm.layers.modules import ShortConvolution
from sdm.models.fingerprint import base_model
from sdm.models.reads import MAX_LENGTH

OFFSETS = 4  # 0: the same token, 1: its successor, 2 and 3: for comparison


@dataclass(frozen=True)
class Induction(TextMeasurement):
    """Whether layers read the token before, and what followed the same token earlier in the text."""

    documents: int = 32
    """How many documents of each source, spread evenly over it."""
    length: int = 512
    """Tokens of each document, from its beginning; maps have a number for every two of them."""

    def __post_init__(self) -> None:
        check_size(documents=self.documents)
        if not 2 * OFFSETS <= self.length <= MAX_LENGTH:
            raise UserError(f"length must be from {2 * OFFSETS} to {MAX_LENGTH}, got {self.length}")

    def plan(self, lm: EvalModel) -> Plan:
        """Choose documents that are long enough; a unit is one of them."""
        if not lm.is_ours:
            raise UserError(f"{lm.path} is no model of this library: its layers have no maps that can be compared")
        units, manifest, stores = [], [], []
        for place, held_out in enumerate(self.held_out(lm)):
            store = held_out.tokens(lm.tokenizer)
            numbers = (store.lengths >= self.length).nonzero().squeeze(1).tolist()
            if not numbers:
                raise DataError(
                    f"source {held_out.name!r}, split {held_out.split}: no document has {self.length} tokens; lower "
                    "--length or add text"
                )
            stores.append(store)
            manifest.append({**held_out.manifest(), "tokens": store.fingerprint})
            count = min(self.documents, len(numbers))
            chosen = [numbers[i * len(numbers) // count] for i in range(count)]
            units += [Unit(f"{held_out.name}:{number}", held_out.name, (place, number)) for number in chosen]

        def measure(batch: Sequence[Unit]) -> Iterator[Result]:
            for unit in batch:
                place, number = unit.payload
                yield induction(lm.model, stores[place].document(number, 0, self.length))

        return Plan(units, measure, {"sources": manifest})

    def summary(self, results: Mapping[str, Result]) -> dict[str, Any]:
        """Mean over documents for every head of every block; and the taps of the convolutions."""
        documents = list(results.values())
        blocks: dict[str, dict[str, Any]] = {}
        for index, block in documents[0]["blocks"].items():
            heads = []
            for head in range(len(block["previous"])):
                shares = [document["blocks"][index]["offsets"][head] for document in documents]
                offsets = [_mean(column) for column in zip(*shares, strict=True)]
                previous = _mean([document["blocks"][index]["previous"][head] for document in documents])
                heads.append({"previous": previous, "offsets": offsets, "lift": lift(offsets)})
            blocks[index] = {"kind": block["kind"], "heads": heads}
        return {"blocks": blocks, "taps": documents[0]["taps"], "documents": len(documents)}

    def report(self, summaries: Mapping[str, dict[str, Any]]) -> Report:
        """A table with a row per head, and one of the convolutions' taps."""
        rows, taps = [], []
        for name, summary in summaries.items():
            for index, block in summary["blocks"].items():
                for number, head in enumerate(block["heads"]):
                    cells = (f"{head['previous']:.1%}", *(f"{share:.2%}" for share in head["offsets"]))
                    rows.append((name, f"{index} {block['kind']}", str(number), *cells, f"{head['lift']:.2f}"))
            for convolution, shares in summary["taps"].items():
                taps.append((name, convolution, " ".join(f"{share:.0%}" for share in reversed(shares))))
        columns = ("model", "block", "head", "previous", "same", "successor", "offset 2", "offset 3", "lift")
        caption = (
            "Shares of a token's reading: of the token before, of earlier occurrences of the same token, and of what "
            "followed them by so many tokens. Lift: successor over the mean of offsets 2 and 3."
        )
        tables = [Table("Induction", columns, rows, caption)]
        if taps:
            caption = "Mean share of the absolute weights: the token itself, the one before, and so on."
            tables.append(Table("Taps of the convolutions", ("model", "convolution", "taps"), taps, caption))
        return Report(tables)

    def pairs(self, results: Mapping[str, Result]) -> Pairs:
        """The share of the strongest head of any block, for the token before and for successors."""
        pairs: Pairs = {"previous": {}, "successor": {}}
        for key, document in results.items():
            blocks = document["blocks"].values()
            pairs["previous"][key] = max(share for block in blocks for share in block["previous"]), 1.0
            pairs["successor"][key] = max(head[1] for block in blocks for head in block["offsets"]), 1.0
        return pairs


def previous_share(summary: Mapping[str, Any]) -> float:
    """How much the strongest head below the first block that is not local attention reads of the token before."""
    blocks, long_range = summary["blocks"], _long_range(summary)
    below = [block for index, block in blocks.items() if int(index) < int(long_range)]
    return max(float(head["previous"]) for block in below for head in block["heads"])


def successor_lift(summary: Mapping[str, Any]) -> float:
    """The largest lift of a head in the first block that is not local attention."""
    return max(float(head["lift"]) for head in summary["blocks"][_long_range(summary)]["heads"])


def _long_range(summary: Mapping[str, Any]) -> str:
    return next(index for index, block in summary["blocks"].items() if block["kind"] != "sliding_attention")


def lift(offsets: Sequence[float]) -> float:
    """The share of successors over that of the tokens behind them; 1: nothing but distance."""
    control = math.fsum(offsets[2:]) / (OFFSETS - 2)
    return offsets[1] / control if control > 0 else float("nan")


@torch.no_grad()
def induction(model: nn.Module, tokens: Tensor) -> Result:
    """Measure one text.

    Args:
        model: A model of this library.
        tokens: [T].

    Returns:
        For every block with a map, by its number: its layer type, and for every head the share of the token before
        and those at the offsets. Also the mean share of each tap of every convolution, the latest token last.
    """
    row = tokens.long()
    maps = model(input_ids=row[None].to(next(model.parameters()).device), output_attentions=True).attentions
    places = [_places(row, offset) for offset in range(OFFSETS)]
    counted = places[0].any(1)  # tokens that came earlier in the text
    blocks, kinds = {}, base_model(model).config.layer_types
    for index, read_map in enumerate(maps):
        if read_map.shape[1] == 0:
            continue
        share_HTT = read_map[0].abs().double().cpu()
        total = share_HTT.sum(-1, keepdim=True)
        share_HTT = torch.where(total > 0, share_HTT / total, 0.0)
        previous = share_HTT.diagonal(-1, 1, 2).mean(-1)
        offsets = [(share_HTT * place)[:, counted].sum(-1).mean(-1) for place in places]
        blocks[str(index)] = {
            "kind": kinds[index],
            "previous": previous.tolist(),
            "offsets": torch.stack(offsets, -1).tolist(),
        }
    return {"blocks": blocks, "taps": _taps(model)}


def _places(tokens: Tensor, offset: int) -> Tensor:
    """[T,T]: whether the column is before the row's token, and `offset` after an earlier occurrence of it."""
    same = (tokens[:, None] == tokens[None, :]).tril(-1)
    if offset:
        same = torch.cat((torch.zeros_like(same[:, :offset]), same[:, :-offset]), 1)
    return same.tril(-1)


def _taps(model: nn.Module) -> dict[str, list[float]]:
    taps = {}
    for name, module in model.named_modules():
        if isinstance(module, ShortConvolution):
            weight = module.weight.detach().abs().double()
            taps[name.removeprefix("model.layers.")] = (weight / weight.sum(1, keepdim=True)).mean(0).tolist()
    return taps


def _mean(values: Sequence[float]) -> float:
    return weighted_mean(values).value
