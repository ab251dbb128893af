"""How the rows of a batch are dealt, and that one process is a special case of many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sdm.ranks import Ranks
from sdm.run.config import ComputeConfig
from sdm.run.mesh import Mesh
from sdm.training import Trainer
from sdm.training.parallel import Parallel
from training.runs import text_run


@pytest.mark.parametrize("batch_size", [1, 4, 5, 8, 12])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_every_row_is_computed_once(batch_size: int, size: int, accumulation: int) -> None:
    dealt = [Parallel(Mesh(size), Ranks(rank, size)).pieces(batch_size, accumulation) for rank in range(size)]
    assert [row for pieces in dealt for rows in pieces for row in rows] == list(range(batch_size))
    # The ranks go step by step, and none takes more memory than one process would.
    assert len({len(pieces) for pieces in dealt}) == 1
    assert max(len(rows) for pieces in dealt for rows in pieces) <= -(-batch_size // accumulation)
    # As torch deals a tensor, so that states can be stored as one.
    chunks = [x.tolist() for x in torch.arange(batch_size).chunk(size)]
    assert [[row for rows in pieces for row in rows] for pieces in dealt][: len(chunks)] == chunks


def test_one_process_accumulates_equal_pieces() -> None:
    assert Parallel().pieces(8, 4) == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert Parallel().pieces(8) == [range(8)]


def test_a_rank_without_rows_predicts_nothing(tmp_path: Path) -> None:
    trainer = Trainer(text_run(tmp_path, "stream"), tmp_path / "run")
    batch = trainer.parallel.draw(trainer.data, 3, range(4, 4))
    assert batch.num_targets == 0
    assert batch.num_tokens == 32
    trainer.close()


@pytest.mark.parametrize("accumulation", [(1, 2), (4, 1), (2, 4)])
def test_carried_states_move_with_their_rows(tmp_path: Path, accumulation: tuple[int, int]) -> None:
    """A checkpoint written with one number of pieces is continued with another."""

    def trainer(pieces: int, folder: Path) -> Trainer:
        config: Any = text_run(tmp_path, "stream", compute=ComputeConfig(threads=1, accumulation=pieces))
        return Trainer(config, folder)

    before, after = (trainer(pieces, tmp_path / str(pieces)) for pieces in accumulation)
    for _ in range(3):
        before.train_step()
    path = before.save()
    after.store.folder.mkdir()
    path.rename(after.store.path(3))
    after.resume()
    expected, found = before.streams.state_dict(), after.streams.state_dict()
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(found[name], x) if isinstance(x, torch.Tensor) else found[name] == x, name
    assert before.train_step()["loss"] == pytest.approx(after.train_step()["loss"], rel=1e-6)
    before.close()
    after.close()
