"""The page of a trace for a run, on text that the run was not trained on."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from sdm.analysis.trace_page import write_trace_page
from sdm.analysis.tracing import trace
from sdm.evaluation.eval_model import open_model
from sdm.evaluation.foreign import has_tokenizer
from sdm.evaluation.probe import Probe, probe_texts


def write_run_trace(folder: Path, path: Path, tokens: int = 768) -> Path:
    """Trace a run on the beginning of a held-out document, or on a row of its task, and write the page.

    Args:
        folder: of the run.
        path: the page to write.
        tokens: at most, from the beginning.

    Raises:
        UserError: if there is no such text.
        ValueError: if no layer of the model can be traced.
    """
    lm = open_model(folder)
    row = probe_texts(lm, Probe(documents=1, length=tokens)).rows[0][0]
    tokenizer = AutoTokenizer.from_pretrained(lm.tokenizer_folder) if has_tokenizer(lm.tokenizer_folder) else None
    return write_trace_page(trace(lm.model, row), path, tokenizer, f"{folder.name}: which tokens are read")
