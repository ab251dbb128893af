"""Shared prefixes and batches give what each continuation gets by itself."""

from __future__ import annotations

import pytest
import torch

from sdm.evaluation.inference import score_continuations
from tiny_models import STACKS, VOCABULARY, tiny_model


def words(count: int) -> list[int]:
    return torch.randint(0, VOCABULARY, (count,)).tolist()


@pytest.mark.parametrize("stack", STACKS)
def test_shared_prefixes(stack: str) -> None:
    """Of contexts with the same beginning, with none, and one that is the beginning of the others."""
    model, examples = tiny_model(stack), words(9)
    likeliest = [int(model(torch.tensor([examples])).logits[0, -1].argmax())]
    cases = [
        (
            [*([*examples, *words(n)] for n in (12, 3, 7, 1)), examples],
            [0, 0, 1, 2, 2, 3, 4, 4, 4],
            (1, 4, 2, 3, 1, 6, 2, 5),
        ),
        ([words(5), words(11)], [1, 0], (3,)),
        ([words(4)], [0, 0], (2,)),
    ]
    for contexts, owner, lengths in cases:
        continuations = [*map(words, lengths), likeliest]
        found = score_continuations(model, contexts, owner, continuations)
        for (value, greedy), place, continuation in zip(found, owner, continuations, strict=True):
            ids = torch.tensor([contexts[place] + continuation])
            with torch.no_grad():
                logits = model(ids[:, :-1]).logits[0, len(contexts[place]) - 1 :].double()
            expected = logits.log_softmax(-1).gather(1, ids[:, -len(continuation) :].T).sum()
            assert value == pytest.approx(float(expected), abs=2e-5)
            assert greedy == (logits.argmax(-1).tolist() == continuation)
    assert score_continuations(model, [examples], [0], [likeliest])[0][1]
