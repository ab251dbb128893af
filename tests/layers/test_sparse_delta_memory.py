"""The SDM layer: shapes and initialisation, and that time may be cut, padded and packed in any way."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import sdm
from helpers import assert_close, assert_identical
from same_slots import on_the_same_slots

OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_heads": 2, "num_slots": 25, "num_writes": 12, "num_reads": 5},
    {"learned_initial_state": False},
    {"update": "slot"},
    {"weighting": "l2"},
    {"temperature": 0.3, "decay_per_write": True, "output_gate": "silu"},
    {"normalize_scores": True, "query_batch_norm": True},
]


def make(dtype: torch.dtype = torch.float64, **options: Any) -> sdm.SparseDeltaMemory:
    options = {"num_writes": 6, "num_reads": 7, "initial_state_std": 0.5, **options}
    return sdm.SparseDeltaMemory(32, **options).to(dtype).eval()


@pytest.mark.parametrize("options", OPTIONS)
def test_whole_split_and_stepwise_agree(options: dict[str, Any]) -> None:
    layer = make(**options)
    x = torch.randn(2, 70, 32, dtype=torch.float64)
    whole, final = layer(x, return_state=True)
    for cuts in ([0, 1, 33, 70], [0, 64, 70]):
        pieces, state = [], None
        for start, end in itertools.pairwise(cuts):
            y, state = layer(x[:, start:end], state=state, return_state=True)
            pieces.append(y)
        assert_close([torch.cat(pieces, 1), state.memory], [whole, final.memory], 1e-10)
    with torch.no_grad():
        state = layer.start_state(2)
        stepwise = torch.stack([layer.step_(x[:, t], state) for t in range(70)], dim=1)
    assert_close([stepwise, state.memory], [whole, final.memory], 1e-10)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_padding_changes_nothing(options: dict[str, Any], side: str) -> None:
    layer = make(**options)
    x = torch.randn(1, 20, 32, dtype=torch.float64)
    y, final = layer(x, return_state=True)
    rows = {"left": range(12, 32), "right": range(20), "middle": [*range(7), *range(19, 32)]}[side]
    padded, mask = 100 * torch.randn(2, 32, 32, dtype=torch.float64), torch.zeros(2, 32, dtype=torch.long)
    padded[0, rows], mask[0, rows] = x[0], 1
    mask[1] = 1
    y_padded, final_padded = layer(padded, attention_mask=mask, return_state=True)
    assert_close([y_padded[:1, rows], final_padded.memory[:1]], [y, final.memory], 1e-10)
    assert_identical([y_padded[0][mask[0] == 0]], [torch.zeros(12, 32, dtype=torch.float64)])


@pytest.mark.parametrize("options", OPTIONS)
def test_packed_documents_equal_separate_ones(options: dict[str, Any]) -> None:
    layer = make(**options)
    bounds = [0, 3, 3, 40, 41]
    x = torch.randn(1, 41, 32, dtype=torch.float64)
    y, final = layer(x, cu_seqlens=torch.tensor(bounds), return_state=True)
    for document, (start, end) in enumerate(itertools.pairwise(bounds)):
        alone, after = layer(x[:, start:end], return_state=True)
        assert_close([y[:, start:end], final.memory[document : document + 1]], [alone, after.memory], 1e-10)


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_reach_every_parameter(options: dict[str, Any]) -> None:
    layer = make(torch.float32, **options).train()
    layer(torch.randn(2, 30, 32)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_a_fresh_state_is_the_learned_one() -> None:
    layer = make()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    assert_close([layer(x, state=layer.start_state(2))], [layer(x)], 1e-12)
    assert layer.initial_state is not None
    assert_identical([layer.start_state(3).memory], [layer.initial_state.expand(3, -1, -1, -1)])
    null = make(learned_initial_state=False)
    assert null.start_state(1).memory.abs().sum() == 0


def test_the_given_state_is_not_changed() -> None:
    layer = make()
    state = layer.start_state(1)
    before = state.memory.clone()
    layer(torch.randn(1, 9, 32, dtype=torch.float64), state=state, return_state=True)
    assert_identical([state.memory], [before])


def test_training_mode_changes_nothing() -> None:
    layer = make()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    assert_identical([layer.train()(x)], [layer.eval()(x)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    layer, x = make(dtype), torch.randn(2, 50, 32).to(dtype)
    exact = copy.deepcopy(layer).float()
    (y, state), (expected, expected_state) = on_the_same_slots(
        lambda: layer(x, return_state=True), lambda: exact(x.float(), return_state=True)
    )
    assert (y.dtype, state.memory.dtype) == (dtype, torch.float32)
    for a, e in ((y, expected), (state.memory, expected_state.memory)):
        assert (a.float() - e).norm() / e.norm() < 2 * torch.finfo(dtype).eps


def test_gates_stay_in_float32() -> None:
    layer, seen = make(torch.float32), []
    layer.observer = seen.append
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(torch.randn(2, 5, 32))
    layer.bfloat16()(torch.randn(2, 5, 32).bfloat16())
    assert len(seen) == 2
    for tokens in seen:
        assert tokens.beta.dtype == tokens.log_decay.dtype == torch.float32
        assert tokens.value.dtype == torch.bfloat16


def test_initialisation() -> None:
    layer = sdm.SparseDeltaMemory(4096, num_heads=1024, num_slots=4, num_writes=1, num_reads=1)
    rate, step = layer.decay_log_rate.exp(), torch.nn.functional.softplus(layer.decay_bias)
    assert rate.min() > 0
    assert 15 < rate.max() <= 16
    assert abs(rate.mean() - 8) < 1
    assert step.min() * 1.001 >= 0.001
    assert step.max() <= 0.1001
    # Log-uniform: the median is the geometric mean of the bounds.
    assert 0.007 < step.median() < 0.014
    assert abs(layer.initial_state.std() - 0.002) < 2e-4


@pytest.mark.parametrize(("width", "heads", "slots"), [(768, 1, 36864), (1920, 2, 57600), (3840, 2, 230400)])
def test_sizes_of_the_paper(width: int, heads: int, slots: int) -> None:
    with torch.device("meta"):
        layer = sdm.SparseDeltaMemory(width, num_heads=heads)
    assert layer.num_slots == slots
    assert layer.initial_state.numel() == heads * slots * (width // heads)
    projections = sum(p.numel() for n, p in layer.named_parameters() if n.split(".")[0] in
                      ("query_proj", "key_proj", "value_proj", "gate_proj", "out_proj"))  # fmt: skip
    assert projections == 4 * width * width


def test_state_dict_round_trip_and_compile() -> None:
    layer, other = make(torch.float32), make(torch.float32)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(2, 11, 32)
    expected = layer(x)
    assert_identical([other(x)], [expected])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_close([compiled(x)], [expected], 1e-6)


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    layer = make(torch.float32)
    x = torch.randn(2, 20, 32, requires_grad=True)
    plain = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    assert_identical(torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]), plain)


@pytest.mark.usefixtures("restore_threads")
def test_bit_identical_for_any_thread_count() -> None:
    layer = sdm.SparseDeltaMemory(64, num_slots=256, num_writes=16, num_reads=16)
    x = torch.randn(3, 100, 64, requires_grad=True)
    results = []
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)
        y = layer(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    assert_identical(results[1], results[0])
    assert_identical(results[2], results[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be a positive integer"),
        ({"hidden_size": 30}, "num_writes = 64 exceeds num_slots = 49"),
        ({"hidden_size": 64, "num_heads": 3}, "divisible by num_heads = 3"),
        ({"hidden_size": 64, "num_slots": 1000}, "num_slots must be a perfect square .* 961 and 1024"),
        ({"hidden_size": 64, "num_slots": 36}, "num_writes = 64 exceeds num_slots = 36"),
        ({"hidden_size": 64, "num_reads": 0}, "num_reads must be a positive integer"),
        ({"hidden_size": 64, "update": "add"}, "update must be one of"),
        ({"hidden_size": 64, "weighting": "sigmoid"}, "weighting must be one of"),
        ({"hidden_size": 64, "output_gate": "tanh"}, "output_gate must be one of"),
        ({"hidden_size": 64, "temperature": 0.0}, "temperature must be positive"),
        ({"hidden_size": 64, "initial_state_std": -1.0}, "initial_state_std must not be negative"),
        ({"hidden_size": 64, "largest_decay_rate": 0.0}, "largest_decay_rate must be positive, got 0.0"),
        ({"hidden_size": 64, "backend": "gpu"}, "backend must be one of"),
    ],
)
def test_bad_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sdm.SparseDeltaMemory(**arguments)


def test_bad_calls() -> None:
    layer = make(torch.float32)
    x = torch.randn(2, 5, 32)
    wrong: list[tuple[dict[str, Tensor], str]] = [
        ({"x": torch.randn(2, 5, 31)}, "x must be"),
        ({"x": torch.randn(5, 32)}, "x must be"),
        ({"x": x, "attention_mask": torch.ones(2, 6)}, "attention_mask must be"),
        ({"x": x, "state": torch.zeros(2, 1, 81, 32)}, "num_slots = 64, but initial_state has 81"),
        ({"x": x, "state": torch.zeros(3, 1, 64, 32)}, "initial_state must be"),
        ({"x": x[:1], "attention_mask": torch.ones(1, 5), "cu_seqlens": torch.tensor([0, 5])}, "exclude each other"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            layer(**arguments)
    with pytest.raises(ValueError, match="x must be"):
        layer.step_(x, layer.start_state(2))


def test_padding_of_the_key_input_does_not_count() -> None:
    layer = sdm.SparseDeltaMemory(16, num_slots=16, num_writes=3, num_reads=3)
    x, keys = torch.randn(2, 2, 5, 16).unbind()
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    expected = layer(x, attention_mask=mask, key_input=keys)
    spoiled = keys.masked_fill(mask.unsqueeze(-1) == 0, torch.nan)
    assert_identical([layer(x, attention_mask=mask, key_input=spoiled)], [expected])
    with pytest.raises(ValueError, match="key_input must be the shape of x"):
        layer(x, key_input=keys[:, :3])


def test_a_step_refuses_the_state_of_another_layer() -> None:
    layer = sdm.SparseDeltaMemory(16, num_slots=16, num_writes=3, num_reads=3)
    other = sdm.SparseDeltaMemory(16, num_slots=25, num_writes=3, num_reads=3)
    with pytest.raises(ValueError, match=r"state\.memory must be .*got shape \[2, 1, 25, 16\]"):
        layer.step_(torch.randn(2, 16), other.start_state(2))
    with pytest.raises(TypeError, match="state must be a MemoryTable, a tensor or None, got NoneType"):
        layer.step_(torch.randn(2, 16), None)  # type: ignore[arg-type]
