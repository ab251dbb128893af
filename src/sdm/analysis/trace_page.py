"""A trace as one self-contained HTML page: point at a token, and the tokens that it reads light up.

The text is data, never markup: it travels as JSON in which `<` is escaped, and scripts put it into text nodes.

Shapes: T time, H heads, K pairs of a row that the page keeps, A addresses.
"""

from __future__ import annotations

import base64
import html
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sdm.analysis.tracing import LayerTrace, Trace, trace
from sdm.evaluation.eval_model import has_tokenizer, open_model
from sdm.evaluation.probe import Probe, probe_texts
from sdm.files import write_bytes

BUDGET = 3_400_000
"""Bytes of numbers in a page; as text they take a third more."""
MOST_PAIRS, FEWEST_PAIRS = 24, 3
MOST_ADDRESSES = 64
RUN_TOKENS = 768  # of a run's text, from the beginning
NO_SOURCE = 2**32 - 1


def write_trace_page(
    trace: Trace, path: Path, tokenizer: PreTrainedTokenizerBase | None = None, title: str = "Trace"
) -> Path:
    """Write the page of a trace.

    Args:
        trace: what `sdm.analysis.trace` returned.
        path: the file to write.
        tokenizer: to show the tokens as text; None shows their numbers.
        title: of the page.
    """
    write_bytes(path, trace_page(trace, tokenizer, title).encode())
    return path


def trace_page(trace: Trace, tokenizer: PreTrainedTokenizerBase | None = None, title: str = "Trace") -> str:
    """Return the page of a trace as HTML. Long texts keep fewer sources of each token, so that the page stays small."""
    rows = len(trace) * sum(layer.num_heads for layer in trace.layers)
    addresses = sum(_address_bytes(layer, len(trace)) for layer in trace.layers)
    pairs = max(FEWEST_PAIRS, min(MOST_PAIRS, (BUDGET - addresses) // (9 * max(rows, 1))))
    layers = [_layer_data(layer, pairs, keep_addresses=addresses < BUDGET) for layer in trace.layers]
    memories = [place for place, layer in enumerate(trace.layers) if layer.reads.tokens is not None]
    data = {
        "tokens": token_texts(trace.input_ids.tolist(), tokenizer),
        "nll": [None if math.isnan(x) else round(x, 3) for x in trace.nll.tolist()],
        "past": trace.past,
        "layers": layers,
        "start": str(memories[0]) if memories else "all",
    }
    # `<` would end the script element; U+2028 and U+2029 end lines for old readers of JSON.
    escaped = json.dumps(data, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c")
    template = (Path(__file__).parent / "trace_page.html").read_text(encoding="utf-8")
    return template.replace("@TITLE@", html.escape(title)).replace("@DATA@", escaped)


def token_texts(ids: list[int], tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    """The text of each token. One that is only part of a character is shown as the tokenizer names it."""
    if tokenizer is None:
        return [f"{token} " for token in ids]
    texts = []
    for token in ids:
        text = str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if not text or "\ufffd" in text:
            text = str(tokenizer.convert_ids_to_tokens(token) or token)
        texts.append(text)
    return texts


def _address_bytes(layer: LayerTrace, time: int) -> int:
    tokens = layer.reads.tokens
    if tokens is None or layer.layer_type != "sdm":
        return 0
    counts = (min(x.shape[-1], MOST_ADDRESSES) for x in (tokens.write_index, tokens.read_index))
    return 4 * time * layer.num_heads * sum(counts)


def _layer_data(layer: LayerTrace, pairs: int, keep_addresses: bool) -> dict[str, Any]:
    """The numbers of a layer as little-endian arrays in base64, rows in the order [H,T]."""
    time, heads = layer.reads.read_map.shape[2], layer.num_heads
    source = torch.full((heads, time, pairs), NO_SOURCE, dtype=torch.int64)
    weight, share = torch.zeros(heads, time, pairs), torch.zeros(heads, time, pairs)
    before = layer.before_share()
    for head in range(heads):
        matrix, sizes = layer.matrix(head), layer.contributions(head).values()
        offsets = matrix.crow_indices().tolist()
        for t in range(time):
            row = slice(offsets[t], offsets[t + 1])
            if row.start == row.stop:
                continue
            total = float(sizes[row].sum())
            kept = sizes[row].topk(min(pairs, row.stop - row.start)).indices
            source[head, t, : len(kept)] = matrix.col_indices()[row][kept]
            weight[head, t, : len(kept)] = matrix.values()[row][kept].float()
            if total > 0:
                share[head, t, : len(kept)] = (sizes[row][kept] / total * (1 - before[t, head])).float()
    data: dict[str, Any] = {
        "index": layer.index,
        "type": layer.layer_type,
        "heads": heads,
        "pairs": pairs,
        "source": _packed(source.to(torch.uint32)),
        "weight": _packed(weight),
        "share": _packed((255 * share).round().to(torch.uint8)),
        "before": _packed((255 * before.T).round().to(torch.uint8)),
        "slots": 0,
    }
    tokens = layer.reads.tokens
    if keep_addresses and tokens is not None and layer.layer_type == "sdm":
        assert layer.reads.initial_state is not None
        writes = _heaviest(tokens.write_index, tokens.write_weight)
        reads = _heaviest(tokens.read_index, tokens.read_weight)
        data |= {
            "slots": layer.reads.initial_state.shape[-2],
            "written": writes.shape[-1],
            "readings": reads.shape[-1],
            "writes": _packed(writes.to(torch.uint32)),
            "reads": _packed(reads.to(torch.uint32)),
        }
    return data


def _heaviest(index_BTHA: Tensor, weight_BTHA: Tensor) -> Tensor:
    """The slots of each token with the largest weights, [H,T,A]."""
    kept = weight_BTHA.abs().topk(min(MOST_ADDRESSES, index_BTHA.shape[-1])).indices
    return index_BTHA.gather(-1, kept)[0].transpose(0, 1).cpu()


def _packed(x: Tensor) -> str:
    return base64.b64encode(x.contiguous().numpy().tobytes()).decode("ascii")


def write_run_trace(folder: Path, path: Path) -> Path:
    """Trace a run on the beginning of a held-out document, or on a row of its task, and write the page.

    Args:
        folder: of the run.
        path: the page to write.

    Raises:
        UserError: if there is no such text.
        ValueError: if no layer of the model can be traced.
    """
    lm = open_model(folder)
    row = probe_texts(lm, Probe(documents=1, length=RUN_TOKENS)).rows[0][0]
    tokenizer = AutoTokenizer.from_pretrained(lm.tokenizer_folder) if has_tokenizer(lm.tokenizer_folder) else None
    return write_trace_page(trace(lm.model, row), path, tokenizer, f"{folder.name}: which tokens are read")
