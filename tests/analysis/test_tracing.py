"""Traces of whole models: exact on every stack, onward from a state, and what removing a write changes."""

from __future__ import annotations

import pytest
import torch

import sdm
from sdm.analysis import tracing
from sdm.analysis.tracing import trace
from sdm.layers import SparseDeltaMemory

KINDS = ["sliding_attention", "sdm", "gdn", "mamba2", "full_attention"]


def small_model(kinds: list[str] = KINDS, **fields: object) -> sdm.SDMForCausalLM:
    torch.manual_seed(0)
    config = sdm.SDMConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        num_slots=64,
        num_writes=4,
        num_reads=4,
        sliding_window=7,
        **fields,
    )
    return sdm.SDMForCausalLM(config).eval()


@pytest.mark.parametrize("fields", [{}, {"shift_keys": True}], ids=["plain", "shifted keys"])
def test_every_mixer_is_traced(fields: dict[str, bool]) -> None:
    model, ids = small_model(**fields), torch.randint(0, 61, (40,))
    result = trace(model, ids)
    assert [layer.layer_type for layer in result.layers] == KINDS
    assert all(layer.error <= 1e-6 for layer in result.layers)
    expected = torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
    torch.testing.assert_close(result.nll[1:], expected)
    assert result.nll[0].isnan()


def test_a_state_is_traced_onward() -> None:
    """What was read before the cut is one source, and what is read after it is the same as without the cut."""
    model, ids = small_model(), torch.randint(0, 61, (1, 40))
    cache = sdm.SDMCache(model.config)
    with torch.no_grad():
        model(ids[:, :25], past_key_values=cache, use_cache=True)
    state = sdm.MemoryState.from_cache(model, cache)
    whole, onward = trace(model, ids), trace(model, ids[:, 25:], state=state)
    assert onward.past == 25
    assert len(onward) == 15
    for before, after in zip(whole.layers, onward.layers, strict=True):
        torch.testing.assert_close(
            after.reads.read_map.dense()[0], before.reads.read_map.dense()[0, :, 25:, 25:], rtol=1e-4, atol=1e-6
        )
    again = trace(model, ids[:, 25:], state=state)
    assert torch.equal(again.layers[1].reads.readings, onward.layers[1].reads.readings)


@pytest.mark.parametrize("hold", [False, True])
def test_a_write_that_is_left_out(hold: bool) -> None:
    result = trace(small_model(), torch.randint(0, 61, (30,)))
    for layer in result.layers:
        readings = layer.reads.readings[0]
        torch.testing.assert_close(layer.without([], hold=hold), readings, rtol=0, atol=1e-6)
        changed = (layer.without([12], hold=hold) - readings).abs().amax((1, 2)) > 1e-7
        reads_it = layer.reads.read_map.dense()[0, :, :, 12].abs().amax(0)
        assert not changed[:12].any()
        assert bool(changed[reads_it > 1e-4].all())
        assert bool((reads_it > 1e-4).any())
        assert not hold or not changed[reads_it == 0].any()


def test_a_left_out_write_equals_padding() -> None:
    """For the memory itself: the readings are those of a stream in which the token was padding."""
    model = small_model(["sdm"])
    result = trace(model, torch.randint(0, 61, (20,)))
    mixer = model.model.layers[0].mixer
    assert isinstance(mixer, SparseDeltaMemory)
    tokens = result.layers[0].reads.tokens
    assert tokens is not None
    kept = [t for t in range(20) if t != 5]
    readings, _ = sdm.ops.sparse_delta_rule(*(x[:, kept] for x in tokens), initial_state=mixer.initial_state)
    torch.testing.assert_close(result.layers[0].without([5])[kept], readings[0].detach(), rtol=0, atol=1e-6)


def test_sources_and_shares() -> None:
    result = trace(small_model(), torch.randint(0, 61, (30,)))
    for layer in result.layers:
        sources = layer.sources(20, head=0)
        weights = [abs(weight) for _, weight in sources]
        assert weights == sorted(weights, reverse=True)
        assert all(source <= 20 for source, _ in sources)
        assert layer.sources(20, 0, most=2) == sources[:2]
        reading, before = (x[0, 20, 0].double() for x in (layer.reads.readings, layer.reads.before))
        parts = layer.reading_shares(20)
        assert float(parts.sum() + before @ reading / reading.square().sum()) == pytest.approx(1, abs=1e-5)
        assert not parts[21:].any()
        share = layer.before_share()
        assert bool(((share >= 0) & (share <= 1)).all())
        distances, shares = layer.distances()
        assert int(distances.min()) >= 0
        rows_that_read = int((layer.reads.read_map.row_offsets.diff() > 0).sum())
        assert float(shares.sum()) == pytest.approx(rows_that_read)


def test_survival_of_writes() -> None:
    """What is left of a write is what the last reading of its own key finds; attention has no memory."""
    result = trace(small_model(), torch.randint(0, 61, (30,)))
    for layer in result.layers:
        if layer.layer_type.endswith("attention"):
            with pytest.raises(TypeError, match=f"block {layer.index} is {layer.layer_type}"):
                layer.survival()
            continue
        left = layer.survival()
        assert left.kept.shape == (30, layer.num_heads)
        torch.testing.assert_close(left.kept[-1], torch.ones(layer.num_heads, dtype=torch.float64))
        assert bool((left.decayed <= 1 + 1e-9).all())


def test_rounding_over_a_long_text_is_checked_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where float32 rounds too much, a memory is taken apart in float64; another deviation is an error as before."""
    model, ids = small_model(), torch.randint(0, 61, (40,))
    rounded = trace(model, ids, layers=[1, 2, 3]).layers
    monkeypatch.setattr(tracing, "TOLERANCE", 1e-10)
    exact = trace(model, ids, layers=[1, 2, 3], threshold=0.01).layers
    for before, after in zip(rounded, exact, strict=True):
        assert before.error > 1e-10 >= after.error
        assert after.reads.readings.dtype == torch.float64
        torch.testing.assert_close(after.reads.readings.float(), before.reads.readings, rtol=0, atol=1e-5)
        assert len(after.reads.read_map.source) < len(before.reads.read_map.source)
    with pytest.raises(ArithmeticError, match="deviate from the readings"):
        trace(model, ids, layers=[0])
    with pytest.raises(ArithmeticError, match="half precision"):
        trace(small_model(["sdm"]).bfloat16(), ids)


def test_threshold_reports_what_it_drops() -> None:
    model, ids = small_model(["sdm"]), torch.randint(0, 61, (30,))
    whole, cut = trace(model, ids).layers[0].reads.read_map, trace(model, ids, threshold=0.05).layers[0].reads.read_map
    assert len(cut.source) < len(whole.source)
    torch.testing.assert_close(whole.dense().abs().sum(-1), cut.dense().abs().sum(-1) + cut.dropped)


def test_bad_input() -> None:
    model = small_model()
    with pytest.raises(ValueError, match="one text"):
        trace(model, torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="layers must be blocks with a map"):
        trace(model, torch.zeros(3, dtype=torch.int64), layers=[7])
    with pytest.raises(ValueError, match="nothing to trace"):
        trace(small_model(["token_shift"]), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(TypeError, match="SDMForCausalLM"):
        trace(torch.nn.Linear(2, 2), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(IndexError, match="token must lie"):
        trace(model, torch.zeros(3, dtype=torch.int64)).layers[0].sources(3)
    with pytest.raises(ValueError, match="tokens fit into this machine"):
        trace(model, torch.zeros(10_000_000, dtype=torch.int64))
