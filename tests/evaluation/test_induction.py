"""Induction: shares of maps that are known, and of a model whose keys are shifted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sdm.errors import DataError, UserError
from sdm.evaluation.eval_model import open_model
from sdm.evaluation.induction import Induction, _places, induction, lift, previous_share, successor_lift
from sdm.evaluation.measurement import evaluate
from sdm.models import SDMConfig, SDMForCausalLM
from training.runs import text_run, train


class Maps(nn.Module):
    """A model that gives maps that were made by hand."""

    def __init__(self, *maps: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._maps = maps
        self.config = SimpleNamespace(layer_types=["sdm"] * len(maps))

    def forward(self, input_ids: Tensor, output_attentions: bool) -> Any:
        assert output_attentions
        return SimpleNamespace(attentions=tuple(read_map[None] for read_map in self._maps))


def test_places_are_behind_earlier_occurrences() -> None:
    tokens = torch.tensor([5, 7, 8, 5, 9, 5])
    # The last 5 came at 0 and at 3. What followed it is at 1 and 4; two after is 2, and 5 is the token itself.
    found = [_places(tokens, offset)[5].nonzero().squeeze(1).tolist() for offset in range(4)]
    assert found == [[0, 3], [1, 4], [2], [3]]
    assert not any(_places(tokens, offset)[:3].any() for offset in range(4)), "nothing came before"


def test_shares_of_known_maps() -> None:
    tokens = torch.tensor([5, 7, 8, 5, 9, 5])
    previous = torch.zeros(1, 6, 6)
    previous[0, torch.arange(1, 6), torch.arange(5)] = -2.0  # the sign of a reading does not matter
    successor = torch.zeros(2, 6, 6)
    successor[0, 3, 1] = successor[0, 5, 1] = 3.0
    successor[1, 3, 0] = successor[1, 5, 3] = successor[1, 5, 2] = 1.0
    nothing = torch.zeros(0, 6, 6)
    blocks = induction(Maps(previous, successor, nothing), tokens)["blocks"]
    assert set(blocks) == {"0", "1"}, "a mixer without a map is left out"
    assert blocks["0"]["previous"] == [1.0]
    # Tokens that came before are at 3 and 5: the one before 3 is two behind, the one before 5 is a successor.
    assert blocks["0"]["offsets"] == [[0.0, 0.5, 0.5, 0.0]]
    assert blocks["1"]["previous"] == [0.0, 0.0]
    assert blocks["1"]["offsets"][0] == [0.0, 1.0, 0.0, 0.0]
    assert blocks["1"]["offsets"][1] == [0.75, 0.0, 0.25, 0.25]


def test_lift() -> None:
    assert lift([0.5, 0.3, 0.1, 0.2]) == pytest.approx(2.0)


def test_keys_of_the_token_before_read_successors() -> None:
    """From the first step on, where W_q = W_k; the plain layer has no preference."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (256,))
    found = {}
    for shifted in (False, True):
        torch.manual_seed(1)
        config = SDMConfig(
            vocab_size=64,
            hidden_size=64,
            num_hidden_layers=2,
            layer_types=["sliding_attention", "sdm"],
            num_attention_heads=2,
            sliding_window=8,
            num_slots=256,
            num_writes=8,
            num_reads=8,
            initializer_range=0.1,
            shift_keys=shifted,
            tie_query_initialization=shifted,
        )
        block = induction(SDMForCausalLM(config).eval(), tokens)["blocks"]["1"]
        assert block["kind"] == "sdm"
        found[shifted] = lift(block["offsets"][0])
    assert found[True] > 2 > 1.5 > found[False]


def test_a_run_is_measured_on_its_test_documents(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(text_run(tmp_path, "rows"), folder)
    measurement = Induction(documents=3, length=16)
    (found,) = evaluate("induction", measurement, [(open_model(folder), tmp_path / "results")])
    assert found.complete
    summary = found.summary
    assert summary is not None
    assert summary["documents"] == len(found.units) <= 3
    for block in summary["blocks"].values():
        for head in block["heads"]:
            assert 0 <= head["previous"] <= 1
    (table, *_) = measurement.report({"run": summary}).tables
    assert len(table.rows) == sum(len(block["heads"]) for block in summary["blocks"].values())
    with pytest.raises(DataError, match="no document has 4096 tokens"):
        Induction(length=4096).plan(open_model(folder))


def test_impossible_lengths_are_refused() -> None:
    for length in (2, 100_000):
        with pytest.raises(UserError, match="length must be from 8 to 4096"):
            Induction(length=length)


def test_the_strongest_heads_around_the_long_range_block() -> None:
    """Blocks above it do not count, nor does local attention whatever its lift."""

    def block(kind: str, *heads: tuple[float, float]) -> dict[str, Any]:
        return {"kind": kind, "heads": [{"previous": previous, "lift": lift} for previous, lift in heads]}

    local = "sliding_attention"
    blocks = {"0": block(local, (0.3, 9.0), (0.1, 1.0)), "2": block("sdm", (0.9, 2.0), (0.0, 3.0))}
    summary = {"blocks": {**blocks, "10": block(local, (0.8, 7.0))}}
    assert previous_share(summary) == 0.3
    assert successor_lift(summary) == 3.0
