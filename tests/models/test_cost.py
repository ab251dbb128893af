"""The ladder holds to the digit, and the formulas count what the real models have and do."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import sdm
from sdm.models.cost import LEVELS
from sdm.models.layer_types import LAYER_TYPES
from sdm.models.layer_types.base import Flops
from tiny_models import STACKS, tiny_config, tiny_model, tokens

# level: SDM state, GDN state, millions of parameters in matrices and embeddings
TABLE = {
    1: (56_623_104, 98_304, 264.8),
    2: (56_623_104, 98_304, 280.2),
    3: (134_217_728, 131_072, 422.1),
    4: (201_326_592, 196_608, 465.0),
    5: (393_216_000, 245_760, 658.3),
    6: (679_477_248, 294_912, 847.0),
    8: (552_960_000, 614_400, 1480.5),
    13: (7_962_624_000, 2_211_840, 8136.6),
}


def real_parameters(config: sdm.SDMConfig) -> int:
    with torch.device("meta"):
        model = sdm.SDMForCausalLM(config)
    return sum(x.numel() for x in model.parameters())


@pytest.mark.parametrize("level", LEVELS)
def test_ladder_holds_to_the_digit(level: int) -> None:
    sdm_state, gdn_state, millions = TABLE[level]
    config = sdm.ladder(level)
    costs = sdm.cost(config)
    assert costs.state_elements == sdm_state
    assert costs.initial_state_parameters == sdm_state
    assert sdm.cost(sdm.ladder(level, "gdn")).state_elements == gdn_state
    assert sdm.cost(sdm.ladder(level, "mamba2")).state_elements == gdn_state
    # The table counts matrices; norms, decay rates and the gates' projections are a few thousandths more.
    width, layers = config.hidden_size, config.num_hidden_layers
    gates = sum(layer.vectors + 2 * width * config.num_memory_heads for layer in costs.layers if layer.kind == "sdm")
    matrices = costs.parameters - gates - width * (2 * layers + 1)
    assert f"{matrices / 1e6:.1f}" == f"{millions:.1f}"
    assert costs.parameters < 1.001 * matrices
    assert config.layer_types.count("sdm") == layers // 4
    assert config.intermediate_size % 1024 == 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["sdm", "gdn", "mamba2", "full_attention"])
def test_formulas_agree_with_real_parameters(level: int, kind: str) -> None:
    config = sdm.ladder(level, kind)
    costs = sdm.cost(config)
    assert real_parameters(config) == costs.parameters + costs.initial_state_parameters
    assert costs.parameters - costs.non_embedding_parameters == 2 * 128_256 * config.hidden_size


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tie_word_embeddings": True, "learned_initial_state": False},
        {"normalize_scores": True, "query_batch_norm": True, "gdn_learned_initial_state": True},
        {"short_convolution": 2, "recurrent_key_dim": 3},
    ],
    ids=["default", "tied", "options", "shapes"],
)
def test_options_are_counted(stack: str, fields: dict[str, int]) -> None:
    config = tiny_config(stack, **fields)
    costs = sdm.cost(config)
    assert real_parameters(config) == costs.parameters + costs.initial_state_parameters


@pytest.mark.parametrize("stack", STACKS)
@torch.no_grad()
def test_state_is_what_the_cache_holds(stack: str) -> None:
    model = tiny_model(stack)
    cache = model(tokens(1, 7)).past_key_values
    held = 0
    for layer in cache.layers:
        state = layer.state
        tensors = state.tensors().values()
        held += sum(x.numel() for x in tensors if x.is_floating_point())
    assert sdm.cost(model.config).state_elements_at(7) == held


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("context", [3, 12])
@torch.no_grad()
def test_flops_agree_with_the_counter(stack: str, context: int) -> None:
    """The counter sees matrix products and attention; what it sees of one decoded token is exactly our count."""
    model = tiny_model(stack)
    cache = model(tokens(1, context)).past_key_values
    with FlopCounterMode(display=False) as counter:
        model(tokens(1, 1), past_key_values=cache)
    counts = counter.get_flop_counts()["Global"]
    products = {"mm", "addmm", "linear"}
    projected = sum(value for op, value in counts.items() if str(op).split(".")[-1] in products)
    flops = sdm.cost(model.config).flops_per_token(context)
    assert projected == flops.projections


def test_attention_flops_agree_with_the_counter() -> None:
    width, context = 32, 24
    query = torch.randn(1, 4, 1, width // 4)
    key = torch.randn(1, 4, context + 1, width // 4)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        torch.nn.functional.scaled_dot_product_attention(query, key, key)
    layer = LAYER_TYPES["full_attention"].cost(tiny_config("full_attention", num_attention_heads=4))
    assert counter.get_total_flops() == layer.flops(context).attention


def test_sdm_costs_what_gdn_costs() -> None:
    for level in LEVELS:
        memory, gdn = (LAYER_TYPES[kind].cost(sdm.ladder(level, kind)) for kind in ("sdm", "gdn"))
        assert memory.memory_flops == gdn.memory_flops
        assert memory.addressing_flops < 0.01 * memory.flops(0).total
        assert memory.state > 100 * gdn.state


def test_costs_as_functions_of_context() -> None:
    recurrent, attention = sdm.cost(sdm.ladder(1)), sdm.cost(sdm.ladder(1, "full_attention"))
    assert recurrent.flops_per_token(128) == recurrent.flops_per_token(10**6)
    assert recurrent.bytes_per_token(128) == recurrent.bytes_per_token(10**6)
    per_token = 2 * 4 * 768
    assert attention.flops_per_token(2000).total - attention.flops_per_token(1000).total == 1000 * per_token
    assert attention.kv_elements_per_token == 2 * 2 * 768 // 2
    moved = attention.bytes_per_token(2000, torch.float32) - attention.bytes_per_token(1000, torch.float32)
    assert moved == 1000 * attention.kv_elements_per_token * 4
    # The memory of level 13 equals the keys and values of 230,400 tokens.
    largest = sdm.cost(sdm.ladder(13, "full_attention"))
    assert sdm.cost(sdm.ladder(13)).state_elements == 230_400 * largest.kv_elements_per_token
    assert recurrent.state_bytes() == 4 * 56_623_104
    assert recurrent.state_bytes(torch.bfloat16) == 2 * 56_623_104
    with pytest.raises(ValueError, match="context"):
        recurrent.flops_per_token(-1)


def test_training_flops_average_over_the_sequence() -> None:
    for stack in ("sdm", "full_attention"):
        for length in (1, 3, 5, 6, 31):
            costs = sdm.cost(tiny_config(stack))
            mean = sum(costs.flops_per_token(place).total for place in range(length)) / length
            assert costs.training_flops_per_token(length) == pytest.approx(3 * mean, rel=1e-3)


def test_flops_add() -> None:
    assert (Flops(1, 2, 3, 4) + Flops(10, 20, 30, 40)).total == 110


def test_unknown_level() -> None:
    with pytest.raises(ValueError, match=r"level must be one of 1, 2, .*got 7"):
        sdm.ladder(7)


def test_lengths_that_cannot_be() -> None:
    costs = sdm.cost(sdm.ladder(1))
    for call in (costs.state_elements_at, costs.flops_per_token, lambda n: costs.state_bytes(context=n)):
        with pytest.raises(ValueError, match="context must not be negative"):
            call(-5)
    with pytest.raises(ValueError, match="length must be positive"):
        costs.training_flops_per_token(0)
