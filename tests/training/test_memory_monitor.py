"""What is said of gates and slots is what the memory did, and on how many tokens it rests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdm.layers import ShiftedKeys, SparseDeltaMemory
from sdm.run import Run
from sdm.run.config import ComputeConfig, MonitorConfig, ScheduleConfig
from sdm.training import Trainer
from sdm.training.monitor import MemoryMonitor
from tiny_models import VOCABULARY, tiny_model
from training.runs import recall_run, text_run


def test_names_and_ranges() -> None:
    model, statistics = tiny_model("all_recurrent"), MemoryMonitor(1000)
    with statistics.watch(model):
        model(torch.randint(0, VOCABULARY, (2, 40)))
    found = statistics.take()
    assert found.pop("memory/tokens") == 80
    assert set(found) == {
        f"memory/{name}"
        for gate in ("forget_gate", "input_gate")
        for name in (f"{gate}_min", f"{gate}_mean", f"{gate}_max")
    } | {f"memory/{kind}_{use}" for kind in ("slots", "entropy") for use in ("written", "read")}
    assert all(0 <= value <= 1 for value in found.values())
    assert found["memory/forget_gate_min"] <= found["memory/forget_gate_mean"] <= found["memory/forget_gate_max"]
    model(torch.randint(0, VOCABULARY, (2, 40)))
    assert statistics.take() == {}


@pytest.mark.parametrize("shift", [False, True])
def test_slots_are_those_that_are_written(shift: bool) -> None:
    """Seen in the memory itself, which was zero before; keys may come from the token before."""
    torch.manual_seed(0)
    memory = SparseDeltaMemory(16, num_slots=256, num_writes=4, num_reads=4, learned_initial_state=False)
    layer = ShiftedKeys(memory) if shift else memory
    x, statistics = torch.randn(1, 6, 16), MemoryMonitor(1000)
    with statistics.watch(layer):
        _, state = layer(x, return_state=True)
    after = state.inner.memory if shift else state.memory
    assert statistics.take()["memory/slots_written"] == int(after[0, 0].any(-1).sum()) / 256


def test_counts_go_on_to_the_number_of_tokens() -> None:
    """Over several passes, and no further: as one pass over the first tokens."""
    model, ids = tiny_model("all_recurrent"), torch.randint(0, VOCABULARY, (3, 20))
    split, whole = MemoryMonitor(50), MemoryMonitor(50)
    for row in ids:
        with split.watch(model):
            model(row.unsqueeze(0))
    with whole.watch(model):
        model(ids)
    expected = whole.take()
    assert expected["memory/tokens"] == 50
    assert split.take() == pytest.approx(expected, rel=1e-6)


def test_accesses_by_their_strength() -> None:
    """A write of one slot at full strength and one at none: no doubt where the memory was written."""
    layer = SparseDeltaMemory(16, num_slots=16, num_writes=2, num_reads=2)
    with torch.no_grad():
        layer.key_proj.weight.zero_()
        layer.key_proj.weight[0, 0] = layer.key_proj.weight[4, 0] = 50.0
    x = torch.zeros(1, 5, 16)
    x[..., 0] = 1
    found = {}
    for weighted in (False, True):
        statistics = MemoryMonitor(100, weighted)
        with statistics.watch(layer):
            layer(x)
        found[weighted] = statistics.take()
    assert found[False]["memory/entropy_written"] == pytest.approx(0.25)
    assert found[True]["memory/entropy_written"] == pytest.approx(0, abs=1e-6)
    assert found[True]["memory/slots_written"] == found[False]["memory/slots_written"] == 2 / 16


@pytest.mark.parametrize("checkpointing", ["none", "block", "segment"])
def test_tokens_of_several_steps(tmp_path: Path, checkpointing: Any) -> None:
    """The steps before a measurement count as well, each token once, also where backward computes it again."""
    config = text_run(
        tmp_path,
        "rows",
        schedule=ScheduleConfig(steps=6, warmup=1),
        compute=ComputeConfig(threads=1, accumulation=2, checkpointing=checkpointing, segment_length=16),
        monitor=MonitorConfig(memory_every=3, memory_tokens=250, validation_batches=0, display="none"),
    )
    Trainer(config, tmp_path / "run").run()
    measured = [line for line in Run(tmp_path / "run").metrics() if "memory/tokens" in line]
    assert [(line["step"], line["memory/tokens"]) for line in measured] == [(3, 250), (6, 250)]


def test_a_run_says_on_how_many_tokens_its_statistics_rest(tmp_path: Path) -> None:
    Trainer(recall_run(), tmp_path).run()
    measured = [line for line in Run(tmp_path).metrics() if "memory/slots_read" in line]
    assert [line["step"] for line in measured] == [4, 8]
    assert measured[-1]["memory/tokens"] == 4 * 12, "of one step, unless more are asked for"


def test_statistics_do_not_change_a_run(tmp_path: Path) -> None:
    config = recall_run()
    often = replace(config, monitor=replace(config.monitor, memory_every=1, memory_weighted=True))
    weights = []
    for name, one in (("seldom", config), ("often", often)):
        trainer = Trainer(one, tmp_path / name)
        trainer.run()
        weights.append(trainer.model.state_dict())
    assert all(torch.equal(weights[0][name], x) for name, x in weights[1].items())
