"""How long a write survives, against the memory itself; distances and shares of M0 in cases that can be counted."""

from __future__ import annotations

import pytest
import torch

from sdm.layers import GatedDeltaNet, Mamba2, SparseDeltaMemory, memory_statistics
from sdm.layers.memory_statistics import (
    before_share,
    distances,
    half_life,
    last_writes,
    normalized_entropy,
    write_survival,
    writes_left,
)
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


@pytest.mark.parametrize(("update", "decay_per_write"), [("delta", False), ("delta", True), ("slot", True)])
@torch.no_grad()
def test_left_of_every_write(update: str, decay_per_write: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By brute force: token by token over dense tables, with another value of one token at a time."""
    monkeypatch.setattr(memory_statistics, "FOLLOWED", 7)  # several blocks, the last one shorter
    tokens = random_tokens(30, update, decay_per_write)
    left = writes_left(tokens, 25, update)
    time, heads = tokens.beta.shape[1:]
    log_decay = tokens.log_decay if decay_per_write else tokens.log_decay.unsqueeze(-1).expand(tokens.write_index.shape)
    for write in range(time):
        for head in range(heads):
            table, alone = torch.zeros(25, dtype=torch.float64), torch.zeros(25, dtype=torch.float64)
            last = torch.full((25,), -1)
            for t in range(time):
                index, key = tokens.write_index[0, t, head].long(), tokens.write_weight[0, t, head].double()
                beta, value = float(tokens.beta[0, t, head]), float(t == write)
                decayed = log_decay[0, t, head].double().exp() * table[index]
                held = (key * decayed).sum() if update == "delta" else decayed
                table[index] = decayed + key * beta * (value - held)
                alone[index] = log_decay[0, t, head].double().exp() * alone[index] + key * beta * value
                last[index] = t
            size = float(tokens.beta[0, write, head]) * tokens.write_weight[0, write, head].double().norm()
            assert float(left.kept[write, head]) == pytest.approx(float(table.norm() / size), rel=1e-4, abs=1e-6)
            assert float(left.decayed[write, head]) == pytest.approx(float(alone.norm() / size), rel=1e-9)
            assert int(left.slots[write, head]) == int((last == write).sum())
            assert torch.equal(last_writes(tokens, 25)[head], last)


@torch.no_grad()
def test_left_of_writes_into_dense_memories() -> None:
    """Every token writes all slots of a gated delta net; Mamba2 overwrites nothing."""
    torch.manual_seed(0)
    x = torch.randn(1, 20, 32)
    for layer in (GatedDeltaNet(32, 2), Mamba2(32, 2)):
        reads = layer_reads(layer, x)
        assert reads.tokens is not None
        assert reads.initial_state is not None
        left = writes_left(reads.tokens, reads.initial_state.shape[-2], reads.update)
        gates = reads.gates["forget"][0].double()
        expected = torch.stack([gates[t + 1 :].prod(0) for t in range(20)])
        torch.testing.assert_close(left.decayed, expected)
        assert torch.equal(left.slots[:-1], torch.zeros_like(left.slots[:-1]))
        assert torch.equal(left.kept, left.decayed) == isinstance(layer, Mamba2)


def test_writes_with_closed_gates() -> None:
    tokens = random_tokens(9)
    closed = tokens._replace(beta=tokens.beta * (torch.arange(9) != 3).view(1, 9, 1))
    left = writes_left(closed, 25)
    assert left.kept[3].isnan().all()
    assert left.decayed[3].isnan().all()
    assert not left.kept[4:].isnan().any()
    assert writes_left(Tokens(*(x[:, :0] for x in tokens)), 25).kept.shape == (0, 2)


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


def test_entropy() -> None:
    assert normalized_entropy(torch.tensor([[1.0, 1, 1, 1]])) == pytest.approx(1.0)
    assert normalized_entropy(torch.tensor([[5.0, 0, 0, 0]])) == 0.0
    assert normalized_entropy(torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 1]])) == pytest.approx(0.75)
    assert normalized_entropy(torch.zeros(1, 4)) == 0.0
