"""Meshes that cannot work are refused by arithmetic, before any process meets another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sdm.errors import TrainingError, UserError
from sdm.run.config import ComputeConfig, TrainConfig
from sdm.run.mesh import Mesh, MeshConfig, resolve, valid_meshes
from training.runs import MODEL, recall_run


def run_on(rows: int = 8, **degrees: int) -> TrainConfig:
    config = recall_run(compute=ComputeConfig(mesh=MeshConfig(**degrees)))
    return replace(config, data=replace(config.data, batch_size=rows))


def test_data_takes_what_is_left() -> None:
    assert resolve(run_on(), 1) == Mesh(1, 1, 1)
    assert resolve(run_on(), 6) == Mesh(6, 1, 1)  # rows need not divide: a rank may be lost
    assert resolve(run_on(data=4), 4) == Mesh(4, 1, 1)
    assert Mesh(4, 3, 2).size == 24
    assert Mesh(4, 3, 2).shards == 12


@pytest.mark.parametrize(
    ("config", "world_size", "message"),
    [
        (run_on(data=3), 4, r"data 3 x .* takes 3, but there are 4 processes; .*on 4: data 4 x context 1 x channel 1"),
        (run_on(data=8), 4, r"takes 8, but there are 4 processes; torchrun --nproc-per-node 8 .*on 4: data 4 x"),
        (run_on(data=2), 1, r"takes 2, but there is 1 process; .*on 1: data 1 x context 1 x channel 1"),
        (run_on(rows=4), 8, r"batch_size = 4 rows are too few for 8 ranks. .*on 8: data 4 x context 1 x channel 2; "),
        (run_on(rows=1), 32, r"1 rows are too few for 32 ranks. .*with 16 there is one"),
        (
            run_on(channel=3),
            3,
            r"channel = 3 must divide the 16 value channels .*nearest that do are 1, 2, 4.*on 3: data 3 x",
        ),
        (run_on(context=5), 5, r"context = 5 must divide the 16 value channels .*: data 5 x context 1"),
    ],
)
def test_refusals_name_the_nearest(config: TrainConfig, world_size: int, message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        resolve(config, world_size)


@pytest.mark.parametrize("field", ["data", "context", "channel"])
def test_degrees_are_positive(field: str) -> None:
    with pytest.raises(UserError, match=rf"compute\.mesh\.{field} must be a positive integer, got 0"):
        MeshConfig(**{field: 0})


def test_rows_that_depend_on_each_other_stay_together() -> None:
    config = replace(run_on(), model=replace(MODEL, query_batch_norm=True))
    assert valid_meshes(config, 2) == [Mesh(channel=2)]
    with pytest.raises(TrainingError, match="query_batch_norm takes the mean over all tokens"):
        resolve(config, 2)
    assert resolve(config, 1) == Mesh()
