"""The probe says what a memory did, and leaves nothing behind."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import sdm
from sdm.evaluation.memory_access import memory_stats, probe_access, quantile
from sdm.layers.memory_statistics import sdm_layers
from sdm.training.monitor import MemoryMonitor
from tiny_models import tiny_model, tokens


def shown(model: nn.Module, ids: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """The weights of writes and reads of each layer, as it shows them."""
    found = {}
    for name, layer in sdm_layers(model).items():
        layer.observer = lambda seen, name=name: found.update({name: (seen.write_weight, seen.read_weight)})
    with torch.no_grad():
        model(ids)
    for layer in sdm_layers(model).values():
        layer.observer = None
    return found


def is_quantile(found: Tensor, values: Tensor, share: float) -> Tensor:
    """No more than the share lies below, and no less at or below, but for the width of a bin."""
    below, at_most = ((values < found + width).double().mean(0) for width in (-2e-3, 2e-3))
    return (below <= share) & (share <= at_most)


def test_curves_and_effective_keys_are_the_papers() -> None:
    """Computed anew from all weights at once, with torch's quantiles."""
    model, ids = tiny_model("all_recurrent"), tokens(2, 300)
    probe, weights = probe_access(model, ids), shown(model, ids)
    assert [layer.name for layer in probe.layers] == list(weights)
    assert probe.tokens == 600
    for layer in probe.layers:
        for side, weight in zip(("write", "read"), weights[layer.name], strict=True):
            for head in range(2):
                use, p = layer.heads[head][side], weight[:, :, head].flatten(0, 1).double()
                p, keys = p / p.sum(-1, keepdim=True), p.shape[-1]  # float32 sums to one but for rounding
                mass = p.sort(descending=True).values.cumsum(-1)
                assert (use.keys, use.count) == (keys, 600)
                assert use.mass == pytest.approx(mass.mean(0).numpy(), abs=1e-9)
                for found, share in ((use.mass_low, 0.1), (use.mass_high, 0.9)):
                    assert all(is_quantile(torch.tensor(found), mass, share))
                effective = -(p * p.log()).sum(-1)
                effective = effective.exp() / keys
                assert use.effective_mean == pytest.approx(float(effective.mean()), abs=1e-9)
                assert is_quantile(torch.tensor(use.effective_median), effective, 0.5)
                assert use.effective_counts.sum() == 600
            pooled = getattr(layer, side)
            assert pooled.count == 1200
            assert pooled.mass == pytest.approx(sum(head[side].mass for head in layer.heads) / 2)
    assert probe.write.count == 2400
    assert probe.write.keys == 4
    assert probe.read.keys == 6
    assert probe.read.effective_mean == pytest.approx(sum(layer.read.effective_mean for layer in probe.layers) / 2)
    assert json.loads(json.dumps(probe.describe()))["read"]["keys"] == 6


@pytest.mark.parametrize("stack", ["all_recurrent", "mixed", "shifted"])
def test_long_texts_in_pieces(stack: str) -> None:
    """The state is carried on: as one pass. A last piece of one token would not be shown."""
    model, ids = tiny_model(stack), tokens(2, 29)
    whole = probe_access(model, ids)
    for piece in (2, 7, 28):
        split = probe_access(model, ids, piece=piece)
        assert split.tokens == whole.tokens == 58
        assert split.write.mass == pytest.approx(whole.write.mass, abs=1e-5)
        assert split.read.effective_mean == pytest.approx(whole.read.effective_mean, abs=1e-5)
        assert memory_stats(model, ids, piece=piece).mean == pytest.approx(memory_stats(model, ids).mean, abs=1e-5)
    one_by_one = probe_access(model, [row.unsqueeze(0) for row in ids])
    assert one_by_one.write.mass == pytest.approx(whole.write.mass, abs=1e-5)


def test_two_ends_of_the_scale() -> None:
    """All keys alike, and one key that has everything."""
    layer = sdm.SparseDeltaMemory(16, num_slots=16, num_writes=4, num_reads=4)
    with torch.no_grad():
        layer.query_proj.weight.zero_()
        layer.key_proj.weight.zero_()
        layer.key_proj.weight[0, 0] = layer.key_proj.weight[4, 0] = 500.0
    x = torch.zeros(1, 5, 16)
    x[..., 0] = 1
    probe = probe_access(layer, x)
    assert probe.read.effective_mean == pytest.approx(1.0)
    assert probe.read.mass == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert probe.write.effective_mean == pytest.approx(0.25)
    assert probe.write.mass == pytest.approx([1.0] * 4)


class Own(nn.Module):
    """Somebody's own model."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_layers_in_somebodys_own_module() -> None:
    model = Own(sdm.SparseDeltaMemory(16, num_slots=16, num_writes=4, num_reads=4), nn.Linear(16, 16))
    x = torch.randn(2, 9, 16)
    probe = probe_access(model, x)
    assert (probe.tokens, probe.layers[0].name) == (18, "layers.0")
    assert probe_access(model, x, forward=lambda x: model(x[:, :4])).tokens == 8
    assert memory_stats(model, x).layers["layers.0"]["tokens"] == 18


def test_weights_that_are_no_distribution_count_by_their_shares() -> None:
    layer = sdm.SparseDeltaMemory(16, num_slots=16, num_writes=4, num_reads=4, weighting="l2")
    probe = probe_access(layer, torch.randn(1, 50, 16))
    assert probe.write.mass[-1] == pytest.approx(1)
    assert 0.25 <= probe.write.effective_mean <= 1


def test_nothing_is_left_behind() -> None:
    model = tiny_model("all_recurrent", query_batch_norm=True).train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    before = {name: x.clone() for name, x in model.state_dict().items()}
    random = torch.get_rng_state()
    ids = torch.arange(20).unsqueeze(0)
    probe_access(model, ids)
    memory_stats(model, ids)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(layer.observer is None for layer in sdm_layers(model).values())


def test_an_observer_that_was_there_stays() -> None:
    layer = sdm.SparseDeltaMemory(16, num_slots=16, num_writes=4, num_reads=4)
    seen: list[int] = []
    layer.observer = lambda shown: seen.append(1)
    probe_access(layer, torch.randn(1, 3, 16))
    assert seen == []
    layer(torch.randn(1, 3, 16))
    assert seen == [1]


def test_statistics_are_those_of_training() -> None:
    model, ids = tiny_model("all_recurrent"), tokens(2, 40)
    statistics = MemoryMonitor(1000)
    with statistics.watch(model):
        model(ids)
    assert {f"memory/{name}": x for name, x in memory_stats(model, ids).mean.items()} == pytest.approx(
        statistics.take(), abs=1e-6
    )


def test_what_cannot_be_probed() -> None:
    with pytest.raises(ValueError, match="model has no SDM layer"):
        probe_access(tiny_model("gdn"), tokens(1, 5))
    with pytest.raises(ValueError, match="model has no SDM layer"):
        memory_stats(nn.Linear(3, 3), torch.ones(1, 3))
    with pytest.raises(ValueError, match="input_ids has no tokens"):
        probe_access(tiny_model("sdm"), [])
    with pytest.raises(ValueError, match="piece must be at least 2"):
        probe_access(tiny_model("sdm"), tokens(1, 5), piece=1)
    unequal = Own(*(sdm.SparseDeltaMemory(16, num_slots=16, num_writes=w, num_reads=4) for w in (2, 4)))
    with pytest.raises(ValueError, match="the layers write 2 and 4 keys a token"):
        probe_access(unequal, torch.randn(1, 5, 16))


def test_memory_does_not_grow_with_the_text() -> None:
    """What is kept of a side is histograms of a fixed size."""
    model = tiny_model("sdm")

    def texts() -> Iterator[Tensor]:
        for _ in range(5):
            yield tokens(1, 64)

    assert probe_access(model, texts()).tokens == 320, "texts are read one by one"


def test_quantiles_of_counts() -> None:
    counts = torch.zeros(1000, dtype=torch.int64)
    counts[[100, 900]] = torch.tensor([3, 1])
    assert quantile(counts.numpy(), 0.5) == pytest.approx(0.1, abs=1e-3)
    assert quantile(counts.numpy(), 0.9) == pytest.approx(0.9, abs=1e-3)
    assert math.isclose(quantile(torch.ones(1000, dtype=torch.int64).numpy(), 0.3), 0.3, rel_tol=1e-9)
