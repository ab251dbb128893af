from __future__ import annotations

import ast
import inspect
from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest

from sdm.data import CorpusConfig, DataError, MADConfig, MQARConfig


@pytest.mark.parametrize(
    ("make", "changes", "field"),
    [
        (CorpusConfig, {"sources": ()}, "sources"),
        (CorpusConfig, {"weights": (1.0, 2.0)}, "weights"),
        (CorpusConfig, {"weights": (0.0,)}, r"weights\[0\]"),
        (CorpusConfig, {"weights": (float("nan"),)}, r"weights\[0\]"),
        (CorpusConfig, {"suffixes": ("py",)}, "suffixes"),
        (CorpusConfig, {"tokenizer": ""}, "tokenizer"),
        (CorpusConfig, {"valid_fraction": 1.0}, "valid_fraction"),
        (CorpusConfig, {"layout": "loose"}, "layout must be one of packed, rows, stream"),
        (CorpusConfig, {"sequence_length": 0}, "sequence_length"),
        (CorpusConfig, {"batch_size": 0}, "batch_size"),
        (CorpusConfig, {"seed": -1}, "seed"),
        (MQARConfig, {"num_pairs": 513}, "num_keys"),
        (MQARConfig, {"num_pairs": 4}, "start_pairs"),
        (MQARConfig, {"num_queries": 0}, "num_queries"),
        (MADConfig, {"task": "recall"}, "task"),
        (MADConfig, {"num_tokens": 7}, "num_tokens"),
        (MADConfig, {"noise": 1.0}, "noise"),
        (MADConfig, {"sequence_length": 2}, "sequence_length"),
        (MADConfig, {"task": "selective-copying", "num_copied": 200}, "num_copied"),
        (MADConfig, {"task": "fuzzy-recall", "max_motif": 100}, "max_motif"),
    ],
)
def test_impossible_values_name_their_field(make: type, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(DataError, match=field):
        make(**changes)


@pytest.mark.parametrize("config", [CorpusConfig, MQARConfig, MADConfig])
def test_every_field_is_documented(config: type) -> None:
    body = ast.parse(inspect.getsource(config)).body[0].body  # type: ignore[attr-defined]
    documented = {
        field.target.id
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    assert documented == {field.name for field in fields(config)}
