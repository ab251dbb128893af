"""The pool of states, the budget and the versions: what the plugin does without vLLM."""

from __future__ import annotations

import importlib.metadata
import logging

import pytest
import torch
from torch import nn

from sdm.integrations import vllm as plugin
from sdm.integrations.vllm.pool import Span, StatePool, neighbours, rows_within, spans_of
from sdm.layers.attention import GatedAttention
from tiny_models import STACKS, tiny_model


def recurrent_layers(stack: str) -> list[nn.Module]:
    mixers = [block.mixer for block in tiny_model(stack).model.layers]
    return [mixer for mixer in mixers if not isinstance(mixer, GatedAttention)]


@pytest.mark.parametrize("stack", [name for name in STACKS if name not in ("full_attention",)])
@torch.no_grad()
def test_sequences_in_turn_equal_each_by_itself(stack: str) -> None:
    """Three sequences join, pause, leave and hand on their rows; each gives what the layer gives it alone."""
    for layer in recurrent_layers(stack):
        pool = StatePool(layer, 3)  # type: ignore[arg-type]
        streams = {name: torch.randn(12, layer.hidden_size) for name in "abcd"}  # type: ignore[arg-type]
        done = dict.fromkeys(streams, 0)
        got: dict[str, list[torch.Tensor]] = {name: [] for name in streams}
        rows = {"a": 2, "b": 0, "c": 1, "d": 2}
        # d takes over the row of a.
        steps = [
            {"a": 5},
            {"a": 1, "b": 1},
            {"c": 4, "a": 6, "b": 1},
            {"b": 1, "c": 1, "d": 1},
            {"d": 11, "c": 7, "b": 9},
        ]
        for step in steps:
            spans, inputs, start = [], [], 0
            for name, count in step.items():
                spans.append(Span(start, start + count, rows[name], rows[name] if done[name] else None))
                inputs.append(streams[name][done[name] : done[name] + count])
                start, done[name] = start + count, done[name] + count
            padding = torch.randn(2, layer.hidden_size)  # type: ignore[arg-type]
            y = pool.mix(torch.cat((*inputs, padding)), spans)
            assert not y[start:].any()
            for name, span in zip(step, spans, strict=True):
                got[name].append(y[span.start : span.end])
        for name, x in streams.items():
            assert done[name] == 12
            torch.testing.assert_close(torch.cat(got[name]), layer(x[None])[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_states_of_prefixes_are_forked_and_stay() -> None:
    """A sequence leaves its state behind eight tokens; two others continue it, one of them in the same step."""
    layer = recurrent_layers("shifted")[1]
    pool = StatePool(layer, 3)  # type: ignore[arg-type]
    x = torch.randn(20, layer.hidden_size)  # type: ignore[arg-type]
    other = torch.cat((x[:8], torch.randn(5, layer.hidden_size)))  # type: ignore[arg-type]
    y = pool.mix(x, [Span(0, 8, 0, None)])
    pool.mix(x, [Span(8, 20, 1, 0)], y)
    torch.testing.assert_close(y, layer(x[None])[0], rtol=1e-4, atol=1e-5)
    again = pool.mix(other, [Span(8, 13, 2, 0)])
    torch.testing.assert_close(again[8:], layer(other[None])[0, 8:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pool.mix(x, [Span(8, 20, 2, 0)])[8:], y[8:], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("tokens", "length", "table", "spans"),
    [
        (3, 3, [5], [(10, 13, 5, None)]),  # fresh
        (1, 4, [5, 0], [(10, 11, 5, 5)]),  # decodes
        (1, 9, [0, 5, 6], [(10, 11, 6, 5)]),  # the first token of a block: the state behind the last one is kept
        (10, 10, [0, 5, 6], [(10, 18, 5, None), (18, 20, 6, 5)]),  # a prompt that leaves a state
        (10, 10, [0, 0, 6], [(10, 20, 6, None)]),  # and one that does not
        (6, 18, [0, 0, 5, 0, 6], [(10, 16, 6, 5)]),  # continues the state of a prefix
        (6, 12, [0, 5, 6], [(10, 12, 5, 5), (12, 16, 6, 5)]),  # fills its block, which is kept, and goes on in another
        (9, 15, [0, 5, 6, 5], [(10, 16, 6, 5), (16, 19, 5, 6)]),  # leaves a state, and goes on in its own row
    ],
)
def test_spans_of_a_sequence(tokens: int, length: int, table: list[int], spans: list[tuple[int, ...]]) -> None:
    got = spans_of(10, 10 + tokens, length, table, block_size=4)
    assert [(span.start, span.end, span.row, span.source) for span in got] == spans


def test_a_table_is_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only small tensors are copied into the pool."""
    layer = recurrent_layers("sdm")[0]
    pool = StatePool(layer, 2)  # type: ignore[arg-type]
    pool.mix(torch.randn(3, layer.hidden_size), [Span(0, 3, 1, None)])  # type: ignore[arg-type]
    copied: list[int] = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda own, other: copied.append(own.numel()) or copy(own, other))
    pool.mix(torch.randn(4, layer.hidden_size), [Span(0, 3, 1, 1), Span(3, 4, 0, 0)])  # type: ignore[arg-type]
    assert max(copied, default=0) < pool.start.tensors()["memory"].numel()


def test_neighbouring_rows_are_stepped_together() -> None:
    runs = neighbours(Span(place, place + 1, row, row) for place, row in enumerate((4, 0, 5, 2, 1)))
    assert [[span.row for span in run] for run in runs] == [[0, 1, 2], [4, 5]]


def test_budget() -> None:
    assert rows_within(budget=1000, bytes_per_sequence=100, most=64) == 9  # and the initial state
    assert rows_within(budget=1000, bytes_per_sequence=100, most=4) == 4
    assert rows_within(budget=1, bytes_per_sequence=0, most=4) == 4
    with pytest.raises(ValueError, match=r"sdm_state_gib = 1 holds no sequence.*give at least 2 in additional_config"):
        rows_within(budget=2**30, bytes_per_sequence=2**30, most=4)


def test_other_versions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The log names both versions, and vLLM is not imported."""
    assert plugin.is_supported("0.32.0")
    assert plugin.is_supported("0.32.1+cpu")
    assert not plugin.is_supported("0.3.2")
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.99.1")
    with caplog.at_level(logging.ERROR):
        plugin.register()
    assert "vLLM 0.32, and this is vLLM 0.99.1" in caplog.text


def test_vllm_finds_the_plugin() -> None:
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert any(point.value == "sdm.integrations.vllm:register" for point in points)
