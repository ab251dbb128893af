"""One function computes likelihoods: whole, packed, carried and in segments, summed and of every token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from helpers import assert_close
from sdm.models.likelihood import IGNORED, nll
from tiny_models import VOCABULARY, tiny_model


def random_tokens(rows: int, time: int, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and targets of a share of them."""
    ids = torch.randint(0, VOCABULARY, (rows, time + 1))
    targets = ids[:, 1:].clone()
    targets[torch.rand(targets.shape) > share] = IGNORED
    return ids[:, :-1], targets


@pytest.mark.parametrize("share", [1.0, 0.2])
@pytest.mark.parametrize("segment_length", [None, 5])
@torch.no_grad()
def test_tokens_sum_up(share: float, segment_length: int | None) -> None:
    model = tiny_model("sdm", loss_chunk_size=4).double()
    ids, targets = random_tokens(2, 13, share)
    expected = F.cross_entropy(model(ids).logits.transpose(1, 2), targets, reduction="none")
    each, states = nll(model, ids, targets, segment_length=segment_length, reduction="none")
    assert (states is None) == (segment_length is None)
    total, _ = nll(model, ids, targets, segment_length=segment_length)
    assert_close([each, total], [expected, expected.sum()], 1e-6)
    loss = model(ids, shift_labels=targets).loss
    assert_close([loss], [expected.sum() / (targets != IGNORED).sum()], 1e-6)


@torch.no_grad()
def test_packed_documents_and_carried_states() -> None:
    model = tiny_model("sdm").double()
    ids, targets = random_tokens(1, 12, 1.0)
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    packed, _ = nll(model, ids, targets, bounds, reduction="none")
    apart = [nll(model, ids[:, a:b], targets[:, a:b], reduction="none")[0] for a, b in ((0, 5), (5, 12))]
    assert_close([packed], [torch.cat(apart, 1)], 1e-6)
    first, states = nll(model, ids[:, :5], targets[:, :5], carry=True, reduction="none")
    second, _ = nll(model, ids[:, 5:], targets[:, 5:], states=states, reduction="none")
    assert_close([torch.cat((first, second), 1)], [nll(model, ids, targets, reduction="none")[0]], 1e-6)
    with pytest.raises(ValueError, match="cu_seqlens: packed documents have no states"):
        nll(model, ids, targets, bounds, segment_length=4)
