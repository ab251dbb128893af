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


def test_split_by_rows_keeps_the_flags_with_their_rows() -> None:
    ids = torch.arange(12).view(4, 3)
    reset = torch.tensor([True, False, False, True])
    parts = Batch(ids, ids, reset=reset).split(2)
    assert torch.equal(torch.cat([part.input_ids for part in parts]), ids)
    assert [part.reset.tolist() for part in parts if part.reset is not None] == [[True, False], [False, True]]


def test_split_of_packed_documents() -> None:
    ids = torch.arange(12).view(1, 12)
    first, second = Batch(ids, ids, torch.tensor([0, 2, 6, 7, 12], dtype=torch.int32)).split(2)
    assert torch.equal(second.input_ids, ids[:, 6:])
    assert first.cu_seqlens is not None
    assert first.cu_seqlens.tolist() == [0, 2, 6]
    assert second.cu_seqlens is not None
    assert second.cu_seqlens.tolist() == [0, 1, 6]


def test_split_never_cuts_a_document() -> None:
    ids = torch.arange(12).view(1, 12)
    with pytest.raises(DataError, match="only be split between its rows"):
        Batch(ids, ids, torch.tensor([0, 5, 12])).split(2)
    with pytest.raises(DataError, match="3 rows does not split into 2"):
        Batch(torch.zeros(3, 1), torch.zeros(3, 1)).split(2)


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
