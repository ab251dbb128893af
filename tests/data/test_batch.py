from __future__ import annotations

import pytest
import torch

from sdm.data import IGNORED, Batch, DataError
from sdm.models.likelihood import nll
from tiny_models import tiny_model


def test_counts() -> None:
    batch = Batch(torch.zeros(2, 3, dtype=torch.int64), torch.tensor([[1, IGNORED, 2], [IGNORED, IGNORED, 3]]))
    assert (batch.num_tokens, batch.num_targets) == (6, 3)


def test_targets_cannot_be_taken_for_labels_that_the_model_shifts() -> None:
    model = tiny_model()
    ids = torch.arange(10).view(1, 10)
    batch = Batch(ids[:, :-1], ids[:, 1:])
    assert not hasattr(batch, "labels")
    with torch.no_grad():
        loss = model(batch.input_ids, shift_labels=batch.targets).loss
        assert torch.equal(loss, nll(model, batch.input_ids, batch.targets)[0] / batch.num_targets)


def test_to_moves_everything() -> None:
    ids = torch.zeros(1, 2, dtype=torch.int64)
    moved = Batch(ids, ids, torch.tensor([0, 2]), torch.tensor([True])).to("meta")
    assert {x.device.type for x in (moved.input_ids, moved.targets, moved.cu_seqlens, moved.reset)} == {"meta"}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 3), torch.zeros(2, 4)), "must both be"),
        ((torch.zeros(2, 3), torch.zeros(2, 3), torch.tensor([0, 3])), "one row"),
        ((torch.zeros(2, 3), torch.zeros(2, 3), None, torch.tensor([True])), "reset must be"),
    ],
)
def test_shapes_are_checked(arguments: tuple[torch.Tensor, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Batch(*arguments)
