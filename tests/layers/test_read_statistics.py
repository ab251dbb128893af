"""How long a write survives, against the memory itself; distances and shares of M0 in cases that can be counted."""

from __future__ import annotations

import pytest
import torch

from sdm.layers import SparseDeltaMemory
from sdm.layers.read_statistics import before_share, distances, half_life, write_survival
from sdm.layers.reads import layer_reads
from sdm.ops import sparse_delta_rule
from sdm.ops.sparse_delta_rule.inputs import Tokens


def random_tokens(time: int, update: str = "delta", decay_per_write: bool = False) -> Tokens:
    torch.manual_seed(0)
    layer = SparseDeltaMemory(
        32, 2, num_slots=25, num_writes=4, num_reads=6, update=update, decay_per_write=decay_per_write
    )
    tokens = layer_reads(layer, torch.randn(1, time, 32)).tokens
    assert tokens is not None
    return tokens


@pytest.mark.parametrize(("update", "decay_per_write"), [("delta", False), ("slot", True)])
@torch.no_grad()
def test_survival_is_the_difference_of_two_memories(update: str, decay_per_write: bool) -> None:
    """A memory is linear in the value of a write: two values of token 7 differ by what is left of it."""
    tokens = random_tokens(64, update, decay_per_write)
    survival = write_survival(tokens, 25, update)
    assert list(survival) == [1, 2, 4, 8, 16, 32]
    number, write = 1, 7  # every fourth token is followed, from token 3 on
    value = tokens.value.clone()
    value[:, write, :, 0] += 1
    for distance, (kept, decayed) in survival.items():
        cut = slice(0, write + distance + 1)
        tables = [
            sparse_delta_rule(
                *(x[:, cut] for x in tokens._replace(value=v)), num_slots=25, output_final_state=True, update=update
            )[1]
            for v in (tokens.value, value)
        ]
        assert tables[0] is not None
        size = tokens.beta[0, write] * tokens.write_weight[0, write].norm(dim=-1)
        left = (tables[1] - tables[0])[0, :, :, 0].norm(dim=-1) / size
        torch.testing.assert_close(kept[number].float(), left, rtol=1e-3, atol=1e-4)
        assert bool((kept <= 1 + 1e-6).all())  # float32
        assert bool((decayed <= 1 + 1e-9).all())


def test_survival_by_decay_alone() -> None:
    """Every token writes the same slot without overwriting anything that matters: what is left is the decay."""
    tokens = random_tokens(32)
    slots = torch.arange(4).expand_as(tokens.write_index)
    weight = torch.full_like(tokens.write_weight, 0.5)
    same = tokens._replace(
        write_index=slots,
        write_weight=weight,
        beta=torch.full_like(tokens.beta, 1e-3),
        log_decay=torch.full_like(tokens.log_decay, -0.1),
    )
    survival = write_survival(same, 25)
    for distance, (kept, decayed) in survival.items():
        expected = torch.tensor(-0.1 * distance).exp().double()
        torch.testing.assert_close(decayed, expected.expand_as(decayed), rtol=1e-5, atol=0)
        torch.testing.assert_close(kept, expected * (1 - 1e-3) ** distance * torch.ones_like(kept), rtol=1e-4, atol=0)
    after = list(survival)
    life = half_life(after, [float(decayed.mean()) for _, decayed in survival.values()])
    assert life == pytest.approx(6.93, rel=0.05)
    whole = same._replace(beta=torch.ones_like(tokens.beta), log_decay=torch.zeros_like(tokens.log_decay))
    assert all(float(kept.max()) < 1e-6 for kept, _ in write_survival(whole, 25).values())  # overwritten at once
    closed = write_survival(same._replace(beta=torch.zeros_like(tokens.beta)), 25)
    assert all(bool(kept.isnan().all()) for kept, _ in closed.values())


def test_short_texts_and_half_lives() -> None:
    assert write_survival(random_tokens(1), 25) == {}
    assert list(write_survival(random_tokens(3), 25)) == [1, 2]
    assert half_life([1, 2, 4], [0.9, 0.8, 0.7]) is None
    assert half_life([1, 2, 4], [0.9, 0.7, 0.3]) == pytest.approx(3.0)
    assert half_life([8], [0.0]) == pytest.approx(4.0)
    assert half_life([], []) is None


def test_distances_and_shares() -> None:
    layer = SparseDeltaMemory(32, num_slots=25, num_writes=4, num_reads=6, learned_initial_state=False)
    reads = layer_reads(layer, torch.randn(1, 20, 32))
    assert not before_share(reads, 0).any()
    distance, share = distances(reads, 0)
    rows = reads.read_map.row_offsets.diff() > 0
    assert float(share.sum()) == pytest.approx(float(rows.sum()))
    assert int(distance.min()) >= 0
    reads.delta.zero_()
    reads.before.fill_(1.0)
    assert bool((before_share(reads, 0) == 1).all())
