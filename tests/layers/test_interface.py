"""What every layer promises: whole = split = token by token, padding and neighbours change nothing, and the rest."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import assert_close, assert_identical
from same_slots import on_the_same_slots
from sdm.layers import (
    FastWeightMemory,
    FullAttention,
    GatedDeltaNet,
    KeyValueState,
    KimiDeltaAttention,
    LayerState,
    Mamba2,
    ProductKeyMemory,
    Raven,
    ShiftedKeys,
    SlidingWindowAttention,
    SparseDeltaMemory,
    TokenShift,
)

SIZE = 16
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "sdm": lambda: SparseDeltaMemory(SIZE, 2, num_slots=16, num_writes=3, num_reads=4),
    "sdm-null": lambda: SparseDeltaMemory(SIZE, 1, 16, 5, 2, learned_initial_state=False),
    "swa": lambda: SlidingWindowAttention(SIZE, 2, window=5),
    "swa-wide": lambda: SlidingWindowAttention(SIZE, 2, window=40),
    "swa-one": lambda: SlidingWindowAttention(SIZE, 2, window=1),
    "full": lambda: FullAttention(SIZE, 4, 2),
    "gdn": lambda: GatedDeltaNet(SIZE, 2),
    "gdn-learned": lambda: GatedDeltaNet(SIZE, 2, 3, learned_initial_state=True, conv_size=0, output_gate="sigmoid"),
    "mamba2": lambda: Mamba2(SIZE, 4),
    "mamba2-groups": lambda: Mamba2(SIZE, 4, 5, num_groups=2, conv_size=3),
    "deltanet": lambda: GatedDeltaNet(SIZE, 2, decay=False),
    "linear-attention": lambda: GatedDeltaNet(SIZE, 2, decay=False, correction=False),
    "gdn-shift-convolution": lambda: GatedDeltaNet(SIZE, 2, shift_convolution=True),
    "kda": lambda: KimiDeltaAttention(SIZE, 2),
    "kda-learned": lambda: KimiDeltaAttention(SIZE, 2, 3, learned_initial_state=True, decay_rank=2, conv_size=0),
    "kda-shifted": lambda: ShiftedKeys(KimiDeltaAttention(SIZE, 2), taps=3),
    "raven": lambda: Raven(SIZE, 2),
    "raven-shifted": lambda: ShiftedKeys(Raven(SIZE, 2)),
    "raven-slots": lambda: Raven(SIZE, 4, key_dim=3, num_slots=9, num_writes=4),
    "fwpkm": lambda: FastWeightMemory(SIZE, 25, 4, chunk_size=5),
    "fwpkm-one": lambda: FastWeightMemory(SIZE, 16, 3, key_dim=6, chunk_size=1, lookahead=False),
    "fwpkm-long": lambda: FastWeightMemory(SIZE, 9, 4, key_dim=4, chunk_size=40),
    "pkm": lambda: ProductKeyMemory(SIZE, 2, 16, 3),
    "shift": lambda: TokenShift(SIZE),
    "sdm-shifted": lambda: ShiftedKeys(SparseDeltaMemory(SIZE, 2, num_slots=16, num_writes=3, num_reads=4)),
    "sdm-convolved": lambda: ShiftedKeys(SparseDeltaMemory(SIZE, 2, num_slots=16, num_writes=3, num_reads=4), taps=3),
    "gdn-shifted": lambda: ShiftedKeys(GatedDeltaNet(SIZE, 2, learned_initial_state=True)),
}
TIME = 23


@pytest.fixture(params=list(LAYERS))
def layer(request: pytest.FixtureRequest) -> nn.Module:
    return LAYERS[request.param]().double()


def tensors(state: LayerState) -> list[Tensor]:
    return list(state.tensors().values())


def same_state(layer: Any, actual: Any, expected: Any, tolerance: float = 1e-10) -> None:
    """Equal where it matters: a later token cannot tell the two apart. Buffers may differ in their spare places."""
    probe = torch.randn(expected.streams, 3, SIZE, dtype=torch.float64)
    assert_close([layer(probe, actual)], [layer(probe, expected)], tolerance)
    if not isinstance(expected, KeyValueState):
        assert_close(tensors(actual), tensors(expected), tolerance)


def stepwise(layer: Any, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    outputs = [layer.step_(x[:, t], state) for t in range(x.shape[1])]
    return torch.stack(outputs, dim=1), state


def test_splitting_changes_nothing(layer: Any) -> None:
    x = torch.randn(2, TIME, SIZE, dtype=torch.float64)
    with torch.no_grad():
        whole, final = layer(x, return_state=True)
        for cuts in ([0, 1, 9, TIME], [0, 7, 7, 8, TIME], [0, 20, TIME], list(range(TIME + 1))):
            pieces, state = [], None
            for start, end in itertools.pairwise(cuts):
                y, state = layer(x[:, start:end], state, return_state=True)
                pieces.append(y)
            assert_close([torch.cat(pieces, 1)], [whole], 1e-10)
            same_state(layer, state, final)


def test_stepping_changes_nothing(layer: Any) -> None:
    x = torch.randn(2, TIME, SIZE, dtype=torch.float64)
    with torch.no_grad():
        whole, final = layer(x, return_state=True)
        y, state = stepwise(layer, x, layer.start_state(2))
        assert_close([y], [whole], 1e-10)
        same_state(layer, state, final)
        # Steps, then several tokens at once, then steps again.
        first, state = stepwise(layer, x[:, :6], layer.start_state(2))
        second, state = layer(x[:, 6:15], state, return_state=True)
        third, state = stepwise(layer, x[:, 15:], state)
        assert_close([torch.cat((first, second, third), 1)], [whole], 1e-10)
        same_state(layer, state, final)


def test_steps_work_without_no_grad(layer: Any) -> None:
    y, state = stepwise(layer, torch.randn(1, 3, SIZE, dtype=torch.float64), layer.start_state(1))
    assert not y.requires_grad
    assert not any(x.requires_grad for x in tensors(state))


def test_a_given_state_is_not_changed(layer: Any) -> None:
    x = torch.randn(2, TIME, SIZE, dtype=torch.float64)
    _, state = layer(x, return_state=True)
    before = copy.deepcopy(state.map(Tensor.detach))
    layer(x, state, return_state=True)
    _, later = layer(x[:, :0], state, return_state=True)
    stepwise(layer, x, later.map(lambda x: x.detach().clone()))
    assert_identical(tensors(state), tensors(before))
    # The start of a stream is a fresh tensor each time.
    start = layer.start_state(2)
    stepwise(layer, x, start)
    assert_close([layer(x, layer.start_state(2))], [layer(x)], 1e-10)


LEFT, RIGHT, HOLES = "left", "right", "holes"


@pytest.mark.parametrize("side", [LEFT, RIGHT, HOLES])
@pytest.mark.parametrize("filled", [False, True])
def test_padding_changes_nothing(layer: Any, side: str, filled: bool) -> None:
    lengths = [TIME, 3, 11, 0]
    mask = torch.zeros(4, TIME, dtype=torch.int64)
    for row, length in enumerate(lengths):
        place = {LEFT: torch.arange(TIME - length, TIME), RIGHT: torch.arange(length)}.get(side)
        mask[row, torch.randperm(TIME)[:length] if place is None else place] = 1
    x = torch.randn(4, TIME, SIZE, dtype=torch.float64)
    x[mask == 0] = torch.nan
    with torch.no_grad():
        state = None
        if filled:
            _, state = layer(torch.randn(4, 9, SIZE, dtype=torch.float64), return_state=True)
        y, final = layer(x, state, return_state=True, attention_mask=mask)
        assert (y[mask == 0] == 0).all()
        # Once more: streams of different lengths go on, and are padded again.
        again, final_again = layer(x, final, return_state=True, attention_mask=mask)
        for row in range(4):
            alone, own = x[row : row + 1, mask[row] == 1], None
            if filled:
                own = state.map(lambda s, row=row: s[row : row + 1])
            for output in (y, again):
                expected, own = layer(alone, own, return_state=True)
                assert_close([output[row : row + 1, mask[row] == 1]], [expected], 1e-10)
            same_state(layer, final_again.map(lambda s, row=row: s[row : row + 1]), own)
        # Streams of different lengths step side by side.
        token = torch.randn(4, SIZE, dtype=torch.float64)
        expected = layer(token.unsqueeze(1), final_again).squeeze(1)
        assert_close([layer.step_(token, final_again)], [expected], 1e-10)


@pytest.mark.parametrize("filled", [False, True])
def test_packed_documents_are_separate(layer: Any, filled: bool) -> None:
    bounds = [0, 1, 8, 8, 21, TIME]
    x = torch.randn(1, TIME, SIZE, dtype=torch.float64)
    state = None
    if filled:
        _, state = layer(torch.randn(5, 4, SIZE, dtype=torch.float64), return_state=True)
    with torch.no_grad():
        y, final = layer(x, state, return_state=True, cu_seqlens=torch.tensor(bounds))
        for document, (start, end) in enumerate(itertools.pairwise(bounds)):
            one = slice(document, document + 1)
            own = state.map(lambda s, one=one: s[one]) if filled else None
            expected, own = layer(x[:, start:end], own, return_state=True)
            assert_close([y[:, start:end]], [expected], 1e-10)
            same_state(layer, final.map(lambda s, one=one: s[one]), own)


def test_rows_are_independent(layer: Any) -> None:
    x = torch.randn(3, TIME, SIZE, dtype=torch.float64)
    with torch.no_grad():
        y = layer(x)
        for row in range(3):
            assert_close([layer(x[row : row + 1])], [y[row : row + 1]], 1e-10)


def test_later_tokens_do_not_reach_back(layer: Any) -> None:
    x = torch.randn(1, TIME, SIZE, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x)[:, 9].sum(), x)
    assert (gradient[:, 10:] == 0).all()
    assert (gradient[:, 9] != 0).any()


def test_gradients_reach_everything(layer: Any) -> None:
    x = torch.randn(2, TIME, SIZE, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, TIME, dtype=torch.bool)
    mask[0, :4] = False
    y, state = layer(x, return_state=True, attention_mask=mask)
    y, _ = layer(x, state, return_state=True, attention_mask=mask)
    y.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert (parameter.grad != 0).any(), name
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert (x.grad[0, :4] == 0).all()


def test_gradients_pass_through_the_state(layer: Any) -> None:
    x = torch.randn(2, TIME, SIZE, dtype=torch.float64, requires_grad=True)
    (whole,) = torch.autograd.grad(layer(x)[:, -4:].square().sum(), x)
    _, state = layer(x[:, :-4], return_state=True)
    (split,) = torch.autograd.grad(layer(x[:, -4:], state).square().sum(), x)
    assert_close([split], [whole], 1e-10)


def test_training_mode_changes_nothing(layer: Any) -> None:
    x = torch.randn(2, TIME, SIZE, dtype=torch.float64)
    assert_identical([layer.train()(x)], [layer.eval()(x)])


def test_states_are_generic(layer: Any) -> None:
    """A cache may reorder, repeat and move a state without knowing the layer."""
    x, rows = torch.randn(3, TIME, SIZE, dtype=torch.float64), torch.tensor([2, 0, 0, 1])
    with torch.no_grad():
        _, state = layer(x[:, :9], return_state=True)
        assert isinstance(state, LayerState)
        assert state.streams == 3
        assert all(part.shape[0] == 3 for part in tensors(state))
        forked = state.map(lambda part: part.index_select(0, rows))
        expected = layer(x[:, 9:], state)[rows]
        assert_close([layer(x[rows, 9:], forked)], [expected], 1e-10)
        assert_close([stepwise(layer, x[rows, 9:], forked)[0]], [expected], 1e-10)


def is_rounded(layer: nn.Module, actual: Tensor, exact: Tensor) -> bool:
    """Half a unit for each of the half dozen roundings that a value passes; the memories with keys of unit length also
    divide by the length of short ones."""
    inner = getattr(layer, "layer", layer)
    units = 8 if isinstance(inner, GatedDeltaNet) else 4
    if not exact.any():
        return not bool(actual.any())
    error = (actual.float() - exact.float()).norm() / exact.float().norm()
    return bool(error < units * torch.finfo(torch.bfloat16).eps)


def test_bfloat16(layer: Any) -> None:
    """As float32 has it from the same rounded weights, tokens and slots."""
    x, low = torch.randn(2, TIME, SIZE).bfloat16(), layer.bfloat16()
    exact = copy.deepcopy(low).float()
    (y, state), (expected, expected_state) = on_the_same_slots(
        lambda: low(x, return_state=True), lambda: exact(x.float(), return_state=True)
    )
    (steps, _), (expected_steps, _) = on_the_same_slots(
        lambda: stepwise(low, x, low.start_state(2)), lambda: stepwise(exact, x.float(), exact.start_state(2))
    )
    assert y.dtype == steps.dtype == torch.bfloat16
    compared = [(y, expected), (steps, expected_steps)]
    for a, e in (*compared, *zip(tensors(state), tensors(expected_state), strict=True)):
        assert e.numel() == 0 or is_rounded(layer, a, e)
    low(x, state).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in low.parameters())


def test_autocast(layer: Any) -> None:
    layer, x = layer.float(), torch.randn(2, TIME, SIZE)

    def mixed() -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, state = layer(x, return_state=True)
            again, _ = layer(x, state, return_state=True)
            steps, _ = stepwise(layer, x, layer.start_state(2))
        return torch.cat((y, again), 1), steps

    def exact() -> tuple[Tensor, Tensor]:
        y, state = layer(x, return_state=True)
        again = layer(x, state)
        return torch.cat((y, again), 1), stepwise(layer, x, layer.start_state(2))[0]

    actual, expected = on_the_same_slots(mixed, exact)
    for a, e in zip(actual, expected, strict=True):
        assert is_rounded(layer, a, e)
    actual[0].float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("name", ["sdm", "swa", "full", "gdn", "kda", "mamba2", "raven", "fwpkm", "pkm"])
def test_compiles(name: str) -> None:
    layer: Any = LAYERS[name]()
    x = torch.randn(2, TIME, SIZE)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_close([compiled(x)], [layer(x)], 1e-5)
    expected, actual = layer(x, return_state=True), compiled(x, return_state=True)
    assert_close([actual[0], *tensors(actual[1])], [expected[0], *tensors(expected[1])], 1e-5)


def test_bad_input_is_named(layer: Any) -> None:
    layer = layer.float()
    x = torch.randn(2, 4, SIZE)
    with pytest.raises(ValueError, match=r"x must be \[B,T,hidden_size\] with hidden_size = 16, got shape \[2, 4, 5\]"):
        layer(torch.randn(2, 4, 5))
    with pytest.raises(ValueError, match=r"x must be \[B,hidden_size\]"):
        layer.step_(x, layer.start_state(2))
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, got list"):
        layer(x.tolist())
    with pytest.raises(ValueError, match=r"attention_mask must be \[B,T\] = \[2, 4\], got shape \[2, 3\]"):
        layer(x, attention_mask=torch.ones(2, 3))
    with pytest.raises(ValueError, match="exclude each other"):
        layer(x[:1], attention_mask=torch.ones(1, 4), cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="the batch must be 1, got 2"):
        layer(x, cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="cu_seqlens must start at 0 and end at T = 4, got 0 and 3"):
        layer(x[:1], cu_seqlens=torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="cu_seqlens must not decrease"):
        layer(x[:1], cu_seqlens=torch.tensor([0, 3, 2, 4]))
    with pytest.raises(TypeError, match="cu_seqlens must be an integer tensor"):
        layer(x[:1], cu_seqlens=torch.tensor([0.0, 4.0]))
    with pytest.raises(ValueError, match="state"):
        layer(x, layer.start_state(3))
    with pytest.raises(ValueError, match="state"):
        layer.step_(x[:, 0], layer.start_state(3))
    with pytest.raises(TypeError, match="state must be a"):
        layer(x, "nothing")


@pytest.mark.parametrize("name", LAYERS)
def test_vectors_gates_and_initial_states_are_not_decayed(name: str) -> None:
    layer = LAYERS[name]()
    exempt, shapes = layer.no_weight_decay(), {name: x.dim() for name, x in layer.named_parameters()}
    assert {name for name, dim in shapes.items() if dim < 2} <= exempt <= shapes.keys()
    last = {name.removeprefix("inner.").removeprefix("layer.") for name in exempt if shapes[name] >= 2}
    gates = {"beta_proj.weight", "decay_proj.weight", "decay_down_proj.weight", "decay_bias"}
    assert last <= {"initial_state", "initial_keys", *gates}
    if name == "kda-learned":
        assert last == {"initial_state", *gates}
    if name == "fwpkm":
        assert last == {"initial_keys", "beta_proj.weight"}
    if name in ("sdm", "gdn-learned"):
        assert last == {"initial_state", "beta_proj.weight", "decay_proj.weight"}
