from __future__ import annotations

import ast
import inspect
from dataclasses import fields
from itertools import pairwise
from typing import Any

import pytest

from sdm.data import (
    CorpusConfig,
    MADTaskConfig,
    MQARTaskConfig,
    NeedleConfig,
    RebindingConfig,
    RecallConfig,
)
from sdm.errors import UserError

CONFIGS = [
    CorpusConfig,
    RecallConfig,
    RebindingConfig,
    NeedleConfig,
    MADTaskConfig,
    MQARTaskConfig,
]


@pytest.mark.parametrize(
    ("make", "changes", "field"),
    [
        (CorpusConfig, {"sources": ()}, "sources"),
        (CorpusConfig, {"sources": ("code", "text", "code")}, "sources names 'code' more than once"),
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
        (RecallConfig, {"num_pairs": 513}, "num_keys"),
        (RecallConfig, {"num_pairs": 4}, "start_pairs"),
        (RecallConfig, {"num_queries": 0}, "num_queries"),
        (RebindingConfig, {"num_pairs": 513}, "num_keys"),
        (RebindingConfig, {"num_bindings": 65}, "num_values"),
        (RebindingConfig, {"num_pairs": 7}, "start_pairs"),
        (NeedleConfig, {"num_needles": 65}, "num_keys"),
        (NeedleConfig, {"start_length": 11}, "start_length must be at least 12"),
        (NeedleConfig, {"sequence_length": 31}, "start_length = 32 must not exceed"),
        (NeedleConfig, {"num_fillers": 0}, "num_fillers"),
        (MADTaskConfig, {"task": "fuzzy-recall"}, "task"),
        (MADTaskConfig, {"sequence_length": 7}, "sequence_length"),
        (MADTaskConfig, {"num_examples": 0}, "num_examples"),
        (MADTaskConfig, {"task": "noisy-in-context-recall", "vocab_size": 20}, "vocab_size"),
        (MADTaskConfig, {"noise_fraction": 1.0}, "noise_fraction"),
        (MADTaskConfig, {"task": "selective-copying", "num_copied": 128}, "num_copied"),
        (MADTaskConfig, {"task": "fuzzy-in-context-recall", "key_motif": 8}, "key_motif"),
        (MADTaskConfig, {"task": "fuzzy-in-context-recall", "sequence_length": 20}, "sequence_length"),
        (MQARTaskConfig, {"power": 0.0}, "power"),
        (MQARTaskConfig, {"test_segments": ()}, "test_segments"),
        (MQARTaskConfig, {"test_segments": ((64, 17),)}, "test_segments: .* got 64 with 17 pairs"),
        (MQARTaskConfig, {"vocab_size": 64}, "vocab_size"),
        (MQARTaskConfig, {"batch_size": 20_001}, "train_segments"),
    ],
)
def test_impossible_values_name_their_field(make: type, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError, match=field):
        make(**changes)


@pytest.mark.parametrize("config", CONFIGS)
def test_every_field_is_documented(config: type) -> None:
    body = ast.parse(inspect.getsource(config)).body[0].body  # type: ignore[attr-defined]
    documented = {
        field.target.id
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    assert documented == {field.name for field in fields(config)}
