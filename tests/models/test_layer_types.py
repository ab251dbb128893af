"""A layer type that somebody registers from outside is a layer type like any other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import sdm
from sdm.cli import main
from sdm.layers import LayerState
from sdm.layers.state import check_state
from sdm.models.layer_types import LAYER_TYPES, LayerType, register
from sdm.models.layer_types.base import LayerCost
from sdm.models.layer_types.token_shift import NoFields
from sdm.models.model_config import ModelConfig
from sdm.training import Trainer
from tiny_models import tiny_config, tokens
from training.runs import recall_run, text_run


@dataclasses.dataclass
class RunningSum(LayerState):
    total: Tensor  # [S,C]


class Summing(nn.Module):
    """y = W (sum of the tokens so far), scaled; a stream begins with a learned sum."""

    def __init__(self, hidden_size: int, scale: float) -> None:
        super().__init__()
        self.hidden_size, self.scale = hidden_size, scale
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.initial_state = nn.Parameter(torch.zeros(hidden_size))

    def forward(
        self,
        x: Tensor,
        state: RunningSum | None = None,
        return_state: bool = False,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Any:
        assert cu_seqlens is None
        if attention_mask is not None:
            x = x * attention_mask.unsqueeze(-1)
        state = self.start_state(len(x), learn=True) if state is None else state
        check_state(state, RunningSum, len(x), x.device, total=(self.hidden_size,))
        sums = state.total.unsqueeze(1) + x.cumsum(1)
        y = self.out_proj(self.scale * sums)
        return (y, RunningSum(sums[:, -1])) if return_state else y

    @torch.no_grad()
    def step_(self, x: Tensor, state: RunningSum) -> Tensor:
        state.total += x
        return self.out_proj(self.scale * state.total)

    def start_state(self, batch_size: int, learn: bool = False) -> RunningSum:
        total = self.initial_state.expand(batch_size, -1)
        return RunningSum(total if learn else total.detach().clone())


@dataclasses.dataclass(frozen=True)
class SummingFields:
    """Of the toy."""

    summing_scale: float = 0.1
    """What the sums are multiplied with."""


class SummingType(LayerType):
    name = "summing"
    scope = "global"
    fields = SummingFields

    def derive(self, config: Any) -> None:
        if not config.summing_scale > 0:
            raise ValueError(f"summing_scale must be positive, got {config.summing_scale}")

    def build(self, config: Any) -> nn.Module:
        return Summing(config.hidden_size, config.summing_scale)

    def cost(self, config: Any) -> LayerCost:
        width = config.hidden_size
        return LayerCost(self.name, weights=width * width, vectors=width, state=width, state_moved=2 * width)


@pytest.fixture(autouse=True)
def summing() -> Iterator[LayerType]:
    yield register(SummingType())
    del LAYER_TYPES["summing"]


def test_it_is_configured_built_and_counted() -> None:
    config = tiny_config(global_layer="summing", summing_scale=0.5)
    model = sdm.SDMForCausalLM(config)
    assert model.model.layers[3].mixer.scale == 0.5
    assert sdm.cost(config).parameters == sum(x.numel() for x in model.parameters())
    assert sdm.cost(config).state_elements == 32
    with pytest.raises(ValueError, match="summing_scale must be positive, got -1"):
        tiny_config(global_layer="summing", summing_scale=-1.0)
    with pytest.raises(TypeError, match="summing_scale"):
        tiny_config(global_layer="summing", summing_scale="much")
    assert tiny_config(summing_scale=0.3).summing_scale == 0.3  # a field of every model, used or not


def test_it_is_saved_loaded_generated_from_and_forked(tmp_path: Path) -> None:
    model = sdm.SDMForCausalLM(tiny_config(global_layer="summing", summing_scale=0.5)).eval()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.config.summing_scale == 0.5
    prompt = torch.randint(0, 97, (1, 9))
    with torch.no_grad():
        assert torch.equal(again(prompt).logits, model(prompt).logits)
        long = model.generate(prompt, max_new_tokens=6, do_sample=False)
        assert torch.equal(again.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=False), long)
        cache = model(prompt).past_key_values
        state = sdm.MemoryState.from_cache(model, cache)
        state.save(tmp_path / "state.sdm")
        loaded = sdm.MemoryState.load(tmp_path / "state.sdm", model)
        for one in (state.fork(), loaded):
            logits = model(long[:, 9:10], past_key_values=one.cache(model)).logits
            torch.testing.assert_close(logits[0, -1], model(long[:, :10]).logits[0, -1])


def test_it_is_trained_and_carried_from_step_to_step(tmp_path: Path) -> None:
    stack = ("token_shift", "summing")
    model = ModelConfig(hidden_size=16, num_hidden_layers=2, layer_types=stack, summing_scale=0.2)
    trainer = Trainer(recall_run(model=model), tmp_path / "recall")
    trainer.run()
    assert trainer.model.model.layers[1].mixer.initial_state.abs().sum() > 0
    Trainer(text_run(tmp_path, "stream", model=model), tmp_path / "stream").run()


def test_the_command_line_knows_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "recall", "--model.summing-scale", "0.7", "--print-config"])
    assert '"summing_scale": 0.7' in capsys.readouterr().out


def test_what_cannot_be_registered() -> None:
    with pytest.raises(ValueError, match="there is a layer type 'summing' already"):
        register(SummingType())

    @dataclasses.dataclass(frozen=True)
    class Undocumented:
        other_scale: float = 0.1

    other = SummingType()
    other.name, other.fields = "other", Undocumented
    with pytest.raises(TypeError, match=r"Undocumented\.other_scale must have a default and"):
        register(other)

    @dataclasses.dataclass(frozen=True)
    class Contradiction:
        """Says of a known field something else."""

        summing_scale: float = 0.2
        """Another default."""

    other.fields = Contradiction
    with pytest.raises(ValueError, match="field 'summing_scale' of layer type 'other' has another meaning elsewhere"):
        register(other)
    other.fields, other.scope = NoFields, "everywhere"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="must be 'local' or 'global', got 'everywhere'"):
        register(other)
    assert "other" not in LAYER_TYPES


@pytest.mark.parametrize("kind", ["sdm", "gdn", "kda", "raven"])
def test_layer_types_initialize_their_layers(tmp_path: Path, kind: str) -> None:
    """Queries begin equal to keys, unless a checkpoint brings others: without this, small models learn no recall."""
    for shifted in (False, True):
        model = sdm.SDMForCausalLM(tiny_config(kind, tie_query_initialization=True, shift_keys=shifted))
        mixer = model.model.layers[-1].mixer
        memory = mixer.layer if shifted else mixer
        assert torch.equal(memory.query_proj.weight, memory.key_proj.weight)
    with torch.no_grad():
        memory.query_proj.weight.mul_(2)
    model.save_pretrained(tmp_path)
    loaded = sdm.SDMForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.layers[-1].mixer.layer.query_proj.weight, memory.query_proj.weight)


@pytest.mark.parametrize("kind", ["sdm", "gdn", "deltanet", "kda", "raven"])
def test_a_key_convolution_starts_as_the_shift_and_learns(kind: str) -> None:
    shifted = sdm.SDMForCausalLM(tiny_config(kind, shift_keys=True))
    model = sdm.SDMForCausalLM(tiny_config(kind, key_convolution=4))
    missing, unexpected = model.load_state_dict(shifted.state_dict(), strict=False)
    assert not unexpected
    assert {name.rpartition("mixer.")[2] for name in missing} == {"conv.weight"}
    ids = tokens(2, 19)
    loss = model(ids, labels=ids).loss
    torch.testing.assert_close(loss, shifted(ids, labels=ids).loss)
    loss.backward()
    gradient = model.model.layers[-1].mixer.conv.weight.grad
    assert bool((gradient.abs().sum(0) > 0).all())  # of every tap
    costs = sdm.cost(model.config)
    assert costs.parameters + costs.initial_state_parameters == sum(x.numel() for x in model.parameters())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"key_convolution": 1}, "key_convolution must be 0 or at least 2 taps, to see the token before, got 1"),
        ({"key_convolution": -4}, "key_convolution must be 0 or at least 2 taps, to see the token before, got -4"),
        ({"key_convolution": 4, "shift_keys": True}, "give one of them"),
    ],
)
def test_key_convolutions_that_cannot_work(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(**fields)


@pytest.mark.parametrize("kind", ["gdn", "deltanet", "kda"])
def test_short_convolutions_that_start_as_a_shift(tmp_path: Path, kind: str) -> None:
    """Keys start at the token before and W_q = W_k: the key of a token is the query of the one before."""
    config = tiny_config(kind, shift_convolution=True, tie_query_initialization=True)
    model = sdm.SDMForCausalLM(config)
    mixer = model.model.layers[-1].mixer
    heads = config.num_attention_heads * config.recurrent_key_dim
    expected = torch.zeros_like(mixer.conv.weight)
    expected[:, -1] = 1
    expected[heads : 2 * heads] = torch.tensor([0.0, 0.0, 1.0, 0.0])
    assert torch.equal(mixer.conv.weight, expected)
    assert torch.equal(mixer.query_proj.weight, mixer.key_proj.weight)
    with torch.no_grad():
        mixer.conv.weight.mul_(2)
    model.save_pretrained(tmp_path)  # an initialisation: a saved model keeps what it has learned
    loaded = sdm.SDMForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.layers[-1].mixer.conv.weight, mixer.conv.weight)
    with pytest.raises(ValueError, match="shift_convolution needs a short_convolution of at least 2 taps"):
        tiny_config(kind, shift_convolution=True, short_convolution=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"raven_slots": 4, "raven_writes": 5}, "raven_writes = 5 exceeds raven_slots = 4"),
        ({"fwpkm_slots": 24}, "fwpkm_slots must be a perfect square"),
        ({"fwpkm_reads": 26}, "fwpkm_reads = 26 exceeds fwpkm_slots = 25"),
        ({"fwpkm_key_dim": 5}, "fwpkm_key_dim must be even"),
        ({"fwpkm_chunk": 0}, "fwpkm_chunk must be a positive integer"),
        ({"kda_decay_rank": 0}, "kda_decay_rank must be a positive integer"),
    ],
)
def test_sizes_of_rivals_that_cannot_work(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(**fields)


@pytest.mark.parametrize("layer", ["sdm", "gdn"])
def test_slow_decay_starts_slowly(layer: str) -> None:
    config = tiny_config(layer_types=[layer] * 4, global_layer=None, largest_decay_rate=0.16)
    rates = [
        parameter.exp()
        for name, parameter in sdm.SDMForCausalLM(config).named_parameters()
        if name.endswith("decay_log_rate")
    ]
    assert len(rates) == 4
    assert 0 < torch.cat(rates).max() <= 0.16
