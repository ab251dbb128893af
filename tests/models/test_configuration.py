"""Few fields are enough, everything else follows, and what cannot work is refused by name."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

import sdm
from sdm import SDMConfig, layers
from sdm.errors import UserError
from sdm.models.configuration import model_fields
from sdm.models.fields import documented_fields
from sdm.models.layer_types import LAYER_TYPES
from tiny_models import tiny_config, tokens


def test_four_fields_make_a_working_model() -> None:
    config = sdm.SDMConfig(vocab_size=97, hidden_size=128, num_hidden_layers=4, global_layer="sdm")
    assert config.layer_types == ["sliding_attention"] * 3 + ["sdm"]
    logits = sdm.SDMForCausalLM(config)(tokens(2, 7)).logits
    assert logits.shape == (2, 7, 97)
    assert logits.isfinite().all()


def test_mlp_sizes_of_the_paper() -> None:
    sizes = {768: 2048, 1024: 3072, 1280: 4096, 1536: 4096, 1920: 5120, 3840: 10240}
    for width, size in sizes.items():
        assert SDMConfig(hidden_size=width, intermediate_multiple=1024).intermediate_size == size
    assert SDMConfig(hidden_size=128).intermediate_size == 384


@pytest.mark.parametrize("width", [8, 16, 24, 64, 96, 128, 384, 768, 1920])
@pytest.mark.parametrize("heads", [1, 2])
def test_derived_sizes_fit_each_other(width: int, heads: int) -> None:
    config = sdm.SDMConfig(vocab_size=11, hidden_size=width, num_hidden_layers=4, num_memory_heads=heads)
    assert config.num_attention_heads * config.head_dim == width
    assert config.num_attention_heads % config.num_key_value_heads == 0
    assert config.num_writes <= config.num_slots
    assert config.intermediate_size >= 8 * width / 3
    with torch.device("meta"):
        sdm.SDMForCausalLM(config)


@pytest.mark.parametrize("width", [8, 24, 64, 96, 256, 384, 512, 768, 1920])
def test_a_layer_alone_has_the_sizes_of_one_in_a_model(width: int) -> None:
    """What is not given follows from the width by the same rule: FullAttention(256) is that of SDMConfig(256)."""
    kinds = {"full_attention": layers.FullAttention, "gdn": layers.GatedDeltaNet, "mamba2": layers.Mamba2}
    kinds |= {"sliding_attention": layers.SlidingWindowAttention}
    if width >= 32:  # 64 slots
        kinds |= {"sdm": layers.SparseDeltaMemory, "pkm": layers.ProductKeyMemory}
    config = sdm.SDMConfig(vocab_size=11, hidden_size=width, num_hidden_layers=len(kinds), layer_types=list(kinds))
    with torch.device("meta"):
        blocks = sdm.SDMModel(config).layers
        for block, kind in zip(blocks, kinds.values(), strict=True):
            alone, inside = kind(width), block.mixer
            assert alone.extra_repr() == inside.extra_repr()
            assert alone.num_heads == inside.num_heads
            shapes = [{name: x.shape for name, x in layer.named_parameters()} for layer in (alone, inside)]
            assert shapes[0] == shapes[1]


def test_heads_have_at_most_128_channels_and_small_models_four_heads() -> None:
    derived = {width: width // layers.FullAttention(width).num_heads for width in (8, 24, 64, 96, 256, 512)}
    assert derived == {8: 2, 24: 4, 64: 16, 96: 16, 256: 64, 512: 128}


def test_global_layers_come_every_fourth() -> None:
    for count in range(4, 22):
        config = tiny_config(num_hidden_layers=count)
        assert [place for place, kind in enumerate(config.layer_types) if kind == "sdm"] == list(range(3, count, 4))
        assert config.layer_types.count("sdm") == count // 4


def test_mixed_hybrid_alternates() -> None:
    config = sdm.SDMConfig(num_hidden_layers=21, global_layer=["full_attention", "sdm"])
    found = [kind for kind in config.layer_types if kind != "sliding_attention"]
    assert found == ["full_attention", "sdm", "full_attention", "sdm", "full_attention"]


def test_round_trip(tmp_path: Path) -> None:
    for stack in ("sdm", "mixed", "all_recurrent"):
        config = tiny_config(stack, rope_theta=1e4, tie_word_embeddings=True)
        config.save_pretrained(tmp_path)
        again = sdm.SDMConfig.from_pretrained(tmp_path)
        assert again.to_dict() == config.to_dict() | {"transformers_version": again.transformers_version}
        assert again.rope_parameters["rope_theta"] == 1e4


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"hiden_size": 64}, ["hiden_size", "hidden_size"]),
        ({"num_experts": 8}, ["num_experts"]),
        ({"hidden_size": 0}, ["hidden_size"]),
        ({"hidden_size": 33}, ["hidden_size", "33"]),
        ({"vocab_size": -1}, ["vocab_size", "-1"]),
        ({"num_hidden_layers": 3}, ["num_hidden_layers = 3", "global_layer_interval"]),
        ({"global_layer": "lstm"}, ["global_layer", "lstm", "mamba2"]),
        ({"global_layer": ["sdm", "lstm"]}, ["global_layer", "lstm"]),
        ({"global_layer": []}, ["global_layer", "empty"]),
        ({"global_layer": ["sdm", "gdn"]}, ["global_layer", "needs at least 2"]),
        ({"layer_types": ["sdm"] * 3}, ["layer_types", "num_hidden_layers = 4"]),
        ({"layer_types": ["sdm"] * 3 + ["rwkv"]}, ["layer_types", "rwkv"]),
        ({"layer_types": ["sdm"] * 4, "global_layer": "gdn"}, ["global_layer", "contradicts"]),
        ({"num_attention_heads": 5}, ["hidden_size", "num_attention_heads = 5"]),
        ({"num_attention_heads": 4, "head_dim": 16}, ["num_attention_heads", "head_dim", "hidden_size"]),
        ({"num_attention_heads": 32}, ["head_dim must be even"]),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, ["num_key_value_heads = 3"]),
        ({"num_memory_heads": 3}, ["hidden_size", "num_memory_heads = 3"]),
        ({"num_slots": 26}, ["num_slots", "26", "25", "36"]),
        ({"num_writes": 26}, ["num_writes = 26", "num_slots = 25"]),
        ({"num_reads": 26}, ["num_reads = 26", "num_slots = 25"]),
        ({"memory_update": "add"}, ["memory_update", "add"]),
        ({"memory_temperature": 0.0}, ["memory_temperature"]),
        ({"initial_state_std": -1.0}, ["initial_state_std"]),
        ({"largest_decay_rate": 0.0}, ["largest_decay_rate"]),
        ({"hidden_act": "relu"}, ["hidden_act", "relu"]),
        ({"sliding_window": 0}, ["sliding_window"]),
        ({"short_convolution": -1}, ["short_convolution"]),
        ({"loss_chunk_size": 0}, ["loss_chunk_size"]),
        ({"rope_theta": 0.0}, ["rope_theta"]),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, ["rope_type", "dynamic"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_impossible_values_name_the_field(fields: dict[str, Any], names: list[str]) -> None:
    with pytest.raises((ValueError, TypeError, StrictDataclassError)) as caught:
        tiny_config(**fields)
    for name in names:
        assert name in str(caught.value)


def test_the_class_declares_the_fields_of_the_layer_types() -> None:
    """Typed and documented, for readers, editors and `help()`."""
    declared, documentation = {field.name: field for field in dataclasses.fields(SDMConfig)}, inspect.getdoc(SDMConfig)
    for kind in LAYER_TYPES.values():
        for field in documented_fields(kind.fields):
            assert (declared[field.name].default, declared[field.name].type) == (field.default, field.type), field.name
    for name, field in model_fields().items():
        entry = re.search(rf"^ +{name} \(.*(?:\n {{8}}.*)*", documentation or "", re.MULTILINE)
        assert entry is not None, name
        assert " ".join(entry[0].split()).endswith(field.doc), name


def test_wrong_types_name_the_field() -> None:
    with pytest.raises(Exception, match="backend"):
        tiny_config(backend=3)


@pytest.mark.parametrize(
    ("fields", "op"),
    [
        ({"global_layer": "mamba2", "backend": "native"}, "state_space"),
        ({"global_layer": "deltanet", "deltanet_correction": False, "backend": "native"}, "state_space"),
        ({"global_layer": "sdm", "backend": "fla"}, "sparse_delta_rule"),
        ({"global_layer": "pkm", "backend": "fla"}, "product_key_topk"),
    ],
)
def test_a_backend_that_a_layer_does_not_have(fields: dict[str, Any], op: str) -> None:
    with pytest.raises(ValueError, match=f"backend must be one of .*chunked.* for {op}.*, got '{fields['backend']}'"):
        tiny_config(**fields)
    tiny_config(**fields | {"backend": "chunked"})


def test_one_field_swaps_the_layer_of_a_saved_configuration(tmp_path: Path) -> None:
    tiny_config().save_pretrained(tmp_path)
    config = sdm.SDMConfig.from_pretrained(tmp_path, global_layer="gdn")
    assert config.layer_types == ["sliding_attention"] * 3 + ["gdn"]
    assert sdm.SDMConfig.from_pretrained(tmp_path, num_hidden_layers=8).layer_types[3::4] == ["sdm", "sdm"]
    for field, value in (("num_slots", 7), ("sliding_window", 0)):
        with pytest.raises(Exception, match=field):
            sdm.SDMConfig.from_pretrained(tmp_path, **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("initial_state_std", float("nan")),
        ("initializer_range", float("inf")),
        ("rms_norm_eps", float("inf")),
        ("rope_theta", True),
        ("rope_theta", float("inf")),
        ("backend", "none-such"),
        ("head_dim", 64),
    ],
)
def test_numbers_that_are_none(field: str, value: Any) -> None:
    with pytest.raises(Exception, match=field):
        tiny_config("full_attention", **{field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_slots": 0}, "num_slots must be a positive integer, got 0"),
        ({"num_writes": 2**70}, "num_writes must be at most 1099511627776, got a number of 71 bits"),
        ({"hidden_size": 2**30}, "hidden_size must be at most 1048576, got 1073741824"),
        ({"initial_state_std": -1.0}, "initial_state_std must not be negative, got -1.0"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be positive and finite, got 0.0"),
        ({"local_layer": "swa"}, "local_layer must be one of sliding_attention, .*got 'swa'"),
    ],
)
def test_impossible_fields_are_user_errors(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SDMConfig(**fields)
