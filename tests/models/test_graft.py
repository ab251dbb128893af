"""Memories grafted onto transformers' models: no change until trained, every way of decoding, files, bad input."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import sdm
from grafted_bases import (
    HEADS,
    SIZES,
    gemma3,
    gpt2,
    llama,
    mamba,
    mistral,
    mixtral,
    opt,
    qwen3,
    qwen3_next,
    tokens,
    trained,
)
from sdm.errors import UserError
from sdm.models.graft import default_sizes
from sdm.models.grafted_mixer import GraftLayerCache

MODELS: list[Callable[[], PreTrainedModel]] = [
    *(llama, mistral, qwen3, gemma3, gpt2, opt, mixtral, mamba, qwen3_next),
]
ATTENTION = MODELS[:7]
every_model = pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def brute_force(model: Any, ids: Tensor, count: int = 8) -> Tensor:
    for _ in range(count):
        ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    return ids


GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def test_defaults_are_the_middle_block_and_readings_that_keep_their_size() -> None:
    model: Any = sdm.graft(llama())
    assert model.graft_config.layers == (1,)  # of three
    memory = model.memories()[1].layer
    reading = torch.full((1, memory.num_heads, memory.head_dim), 1e-3)
    assert torch.allclose(memory.output_norm(reading), reading, rtol=1e-5)
    as_a_layer: Any = sdm.graft(llama(), norm_eps=1e-6)
    assert as_a_layer.memories()[1].layer.output_norm(reading).mean() > 0.7


@pytest.mark.parametrize("kind", ["sdm", "gdn"])
def test_norm_of_readings_is_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    model: Any = sdm.graft(llama(), kind=kind, norm_eps=0.25)
    model.save_pretrained(tmp_path)
    loaded: Any = sdm.load_grafted(tmp_path)
    assert [memory.layer.output_norm.eps for memory in loaded.memories().values()] == [0.25]
    # A file that does not name it holds a memory that was trained with the norm of a layer of its own.
    config = json.loads((tmp_path / "config.json").read_text())
    del config["graft"]["norm_eps"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert sdm.load_grafted(tmp_path).graft_config.norm_eps == 1e-6


@every_model
@torch.no_grad()
def test_untrained_graft_changes_no_bit(build: Callable[[], PreTrainedModel]) -> None:
    model, ids = build().eval(), tokens()
    free = model(ids).logits
    assert torch.equal(sdm.graft(copy.deepcopy(model), layers=[0, 2], freeze_base=False)(ids).logits, free)
    # torch computes a convolution of Mamba by another kernel when no weight needs a gradient.
    before, kind = copy.deepcopy(model).requires_grad_(False)(ids).logits, type(model)
    grafted: Any = sdm.graft(model, layers=[0, 2])
    assert torch.equal(grafted(ids).logits, before)
    assert grafted is model
    assert isinstance(model, kind)
    assert {name for name, x in model.named_parameters() if x.requires_grad} == {
        name for name, x in model.named_parameters() if ".memory." in name
    }
    cost = grafted.graft_cost
    assert cost.parameters == sum(x.numel() for x in model.parameters() if x.requires_grad)
    assert cost.flops > 0
    # A trained graft does change the logits, and the base comes back as it was.
    for memory in grafted.memories().values():
        nn.init.normal_(memory.layer.out_proj.weight)
    assert not torch.allclose(model(ids).logits, before)
    names = set(build().state_dict())
    assert sdm.ungraft(model) is model
    assert type(model) is kind
    assert set(model.state_dict()) == names
    assert torch.equal(model(ids).logits, free)
    assert all(x.requires_grad for x in model.parameters())


@every_model
@torch.no_grad()
def test_generate_equals_decoding_without_a_cache(build: Callable[[], PreTrainedModel]) -> None:
    model, ids = trained(build()), tokens()
    expected = brute_force(model, ids)
    assert torch.equal(model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY), expected)
    beams = {"num_beams": 3, "attention_mask": torch.ones_like(ids), **GREEDY}
    assert torch.equal(model.generate(ids, **beams), model.generate(ids, use_cache=False, **beams))


@every_model
@torch.no_grad()
def test_left_padding_changes_nothing(build: Callable[[], PreTrainedModel]) -> None:
    model, ids = trained(build()), tokens()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    padded = model.generate(ids.where(mask == 1, 0), attention_mask=mask, **GREEDY)
    alone = model.generate(ids[:1, 5:], attention_mask=mask[:1, 5:], **GREEDY)
    assert torch.equal(padded[0, 18:], alone[0, 13:])


@pytest.mark.parametrize("build", [llama, gemma3, opt, qwen3_next], ids=lambda build: build.__name__)
@torch.no_grad()
def test_pieces_and_steps_equal_the_whole(build: Callable[[], PreTrainedModel]) -> None:
    model, ids = trained(build()), tokens(length=12)
    whole = model(ids, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    pieces = [model(piece, past_key_values=cache, use_cache=True).logits for piece in ids.split([5, 1, 1, 4, 1], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=2e-5, rtol=1e-4)
    assert [layer.block for layer in cache.layers if isinstance(layer, GraftLayerCache)] == [0, 1]


@torch.no_grad()
def test_a_cache_without_config_is_served() -> None:
    model, ids = trained(llama()), tokens(length=9)
    cache = DynamicCache()
    parts = [model(part, past_key_values=cache).logits for part in ids.split([6, 3], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids, use_cache=False).logits, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("build", ATTENTION, ids=lambda build: build.__name__)
@torch.no_grad()
def test_prompt_lookup_takes_drafts_back(build: Callable[[], PreTrainedModel]) -> None:
    model = trained(build())
    ids = tokens(1, 6).repeat(1, 4)
    options = {**GREEDY, "attention_mask": torch.ones_like(ids), "max_new_tokens": 12}
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=4, **options), brute_force(model, ids, 12))


@torch.no_grad()
def test_crop_without_a_record_is_an_error_and_ends_the_cache() -> None:
    model, ids = trained(llama()), tokens()
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-2)
    with pytest.raises(RuntimeError, match="unusable"):
        model(ids[:, :1], past_key_values=cache)
    cache = model.prepare_cache(DynamicCache(config=model.config))
    cache.activate_past_recording()
    model(ids[:, :10], past_key_values=cache)
    model(ids[:, 10:], past_key_values=cache)
    cache.crop(-3)
    again = model(ids[:, 15:], past_key_values=cache).logits
    torch.testing.assert_close(again, model(ids, use_cache=False).logits[:, 15:], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("build", [llama, gpt2, gemma3], ids=lambda build: build.__name__)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_packed_documents_do_not_see_each_other(build: Callable[[], PreTrainedModel], attention: str) -> None:
    model = build()
    model.set_attn_implementation(attention)
    model, ids = trained(model), tokens(1, 14)
    positions = torch.cat((torch.arange(5), torch.arange(9)))[None]
    packed = model(ids, position_ids=positions, use_cache=False).logits
    alone = [model(part, use_cache=False).logits for part in ids.split([5, 9], dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("build", [llama, gpt2, mixtral], ids=lambda build: build.__name__)
def test_gradient_checkpointing_gives_the_same_gradients(build: Callable[[], PreTrainedModel]) -> None:
    model, ids = trained(build()).train(), tokens()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    other = tokens()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        loss = model(ids, attention_mask=mask, labels=ids, use_cache=False).loss
        # Another forward pass before the backward pass: the recomputation must not take its mask.
        (loss + model(other, labels=other, use_cache=False).loss).backward()
        gradients.append({n: x.grad.clone() for n, x in model.named_parameters() if x.grad is not None})
    assert gradients[0]
    assert all(".memory." in name for name in gradients[0])
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-4)


@every_model
@torch.no_grad()
def test_folder_loads_with_the_memories(build: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    model, ids = trained(build()), tokens()
    expected = model(ids).logits
    model.save_pretrained(tmp_path / "grafted")
    for loaded in (
        sdm.load_grafted(tmp_path / "grafted"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "grafted", trust_remote_code=True),
    ):
        assert torch.equal(loaded(ids).logits, expected)
        assert loaded.graft_config == model.graft_config
        assert type(loaded).__name__ == type(model).__name__
        assert {n for n, x in loaded.named_parameters() if x.requires_grad} == {
            n for n, x in model.named_parameters() if x.requires_grad
        }
    with pytest.raises(Exception, match=r"sdm\.load_grafted"):
        type(model).base_class.from_pretrained(tmp_path / "grafted")
    assert not [file for file in (tmp_path / "grafted").iterdir() if file.name.startswith(".")]
    assert type(sdm.ungraft(loaded)) is type(model).base_class


HIDE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name == "sdm":
            raise ModuleNotFoundError("No module named 'sdm'", name="sdm")
sys.meta_path.insert(0, Hide())
"""


@pytest.mark.parametrize("trust", [False, True])
def test_without_the_package_loading_fails(trust: bool, tmp_path: Path) -> None:
    trained(llama()).save_pretrained(tmp_path / "grafted")
    code = (
        f"{HIDE if trust else ''}from transformers import AutoModelForCausalLM\n"
        f"AutoModelForCausalLM.from_pretrained({str(tmp_path / 'grafted')!r}, trust_remote_code={trust})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert result.returncode != 0
    assert ("sparse-delta-memory" if trust else "trust_remote_code=True") in result.stderr


@torch.no_grad()
def test_graft_alone_goes_onto_the_same_base_only(tmp_path: Path) -> None:
    base = llama().eval()
    same, other, ids = copy.deepcopy(base), llama().eval(), tokens()
    model = trained(base, learned_initial_state=False)
    model.save_graft(tmp_path / "memory.safetensors")
    before = other(ids).logits
    with pytest.raises(UserError, match="another base"):
        sdm.load_grafted(tmp_path / "memory.safetensors", base=other)
    assert torch.equal(other(ids).logits, before)
    assert type(other) is transformers.LlamaForCausalLM
    with pytest.raises(UserError, match="base=model"):
        sdm.load_grafted(tmp_path / "memory.safetensors")
    loaded = sdm.load_grafted(tmp_path / "memory.safetensors", base=same)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    (tmp_path / "broken.safetensors").write_bytes((tmp_path / "memory.safetensors").read_bytes()[:-40])
    with pytest.raises(UserError, match="damaged"):
        sdm.load_grafted(tmp_path / "broken.safetensors", base=llama())
    everything: Any = sdm.graft(llama(), freeze_base=False)
    assert all(x.requires_grad for x in everything.parameters())
    with pytest.raises(UserError, match="save_pretrained"):
        everything.save_graft(tmp_path / "all.safetensors")


def test_damaged_folder_is_refused(tmp_path: Path) -> None:
    model = trained(llama())
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["graft"]["layers"] = [0, 2]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="do not fit"):
        sdm.load_grafted(tmp_path)
    llama().save_pretrained(tmp_path / "plain")
    with pytest.raises(UserError, match="does not hold a grafted model"):
        sdm.load_grafted(tmp_path / "plain")


def encoder() -> Any:
    sizes = {**SIZES, "intermediate_size": 48}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes))


def bidirectional() -> Any:
    sizes = {**SIZES, "intermediate_size": 48}
    return transformers.BertLMHeadModel(transformers.BertConfig(**sizes))


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (llama, {"layers": [3]}, "0 ... 2, got 3"),
        (llama, {"layers": []}, "at least one"),
        (llama, {"layers": [0, 0]}, "more than once"),
        (llama, {"layers": 0}, "list of indices"),
        (llama, {"layers": "0"}, "list of indices"),
        (llama, {"layers": [-1]}, "0 ... 2, got -1"),
        (llama, {"layers": [True]}, "0 ... 2, got True"),
        (llama, {"num_heads": 0}, "num_heads"),
        (llama, {"num_heads": 5}, "divi"),
        (llama, {"num_writes": 2000}, "num_writes"),
        (llama, {"num_reads": 0}, "num_reads"),
        (llama, {"key_convolution": -1}, "key_convolution"),
        (llama, {"norm_eps": 0.0}, "norm_eps must be a positive number, got 0.0"),
        (llama, {"norm_eps": float("nan")}, "norm_eps"),
        (llama, {"attention_window": 0}, "attention_window"),
        (llama, {"attention_window": 4, "attention_sinks": -1}, "attention_sinks"),
        (mamba, {"attention_window": 4}, "none to limit"),
        (lambda: llama(attn_implementation="flex_attention"), {"attention_window": 4}, "sdpa"),
        (llama, {"kind": "rnn"}, "kind must be one of"),
        (llama, {"num_slots": 1000}, "perfect square"),
        (llama, {"attention_sinks": 2}, "needs an attention_window"),
        (mistral, {"attention_window": 4}, "none to limit"),
        (encoder, {}, "must be a causal LM"),
        (bidirectional, {}, "causal"),
        (lambda: nn.Linear(2, 2), {}, "causal LM of transformers, got Linear"),
        (
            lambda: sdm.SDMForCausalLM(sdm.SDMConfig(vocab_size=64, hidden_size=32, num_hidden_layers=4)),
            {},
            "layer_types",
        ),
    ],
)
def test_unsuitable_input_changes_nothing(build: Any, options: dict[str, Any], message: str) -> None:
    model = build()
    names, kind = list(model.state_dict()), type(model)
    with pytest.raises(ValueError, match=message):
        sdm.graft(model, **options)
    assert list(model.state_dict()) == names
    assert type(model) is kind
    assert all(x.requires_grad for x in model.parameters())


def test_models_that_are_not_whole_are_refused() -> None:
    with torch.device("meta"):
        model = llama()
    with pytest.raises(UserError, match="one device"):
        sdm.graft(model)
    model = llama()
    model.is_quantized = True
    with pytest.raises(UserError, match="quantised"):
        sdm.graft(model)
    model = llama()
    add_hook_to_module(model.model.layers[1], ModelHook())  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="offloaded"):
        sdm.graft(model)
    model = llama()
    linear: Any = model.model.layers[1].self_attn.q_proj  # type: ignore[attr-defined]
    linear.weight = nn.Parameter(linear.weight.detach().to(torch.int8), requires_grad=False)
    before = list(model.state_dict())
    with pytest.raises(UserError, match="quantised weights"):
        sdm.graft(model)
    assert list(model.state_dict()) == before
    model = llama()
    model.peft_config = {}
    with pytest.raises(UserError, match="PEFT adapters"):
        sdm.graft(model)
    model = llama()
    model._tp_size = 2
    with pytest.raises(UserError, match="tensor-parallel"):
        sdm.graft(model)
    model = llama()
    layers: Any = model.model.layers
    layers[1].self_attn = layers[0].self_attn
    with pytest.raises(UserError, match="shares its mixer"):
        sdm.graft(model)
    model = sdm.graft(llama())
    with pytest.raises(UserError, match="grafted already"):
        sdm.graft(model)
    with pytest.raises(UserError, match="not grafted"):
        sdm.ungraft(llama())


@torch.no_grad()
def test_caches_of_another_kind_are_refused() -> None:
    model, ids = trained(llama()), tokens()
    with pytest.raises(TypeError, match="DynamicCache"):
        model.generate(ids, cache_implementation="static", **GREEDY)
    base_cache = llama().eval()(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="has not seen"):
        model(ids[:, :1], past_key_values=base_cache)


@pytest.mark.parametrize(
    ("width", "sizes"),
    [
        (32, (1, 1024, 16)),
        (96, (1, 1024, 16)),
        (768, (3, 4096, 32)),
        (4096, (16, 4096, 32)),
        (1000, (4, 62**2, 31)),
    ],
)
def test_sizes_follow_from_the_width(width: int, sizes: tuple[int, int, int]) -> None:
    assert tuple(default_sizes(width, None, None).values()) == sizes


@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("build", [llama, gpt2, gemma3], ids=lambda build: build.__name__)
@torch.no_grad()
def test_attention_window_is_the_same_in_pieces(build: Callable[[], PreTrainedModel], sinks: int) -> None:
    plain = build().eval()
    model, ids = trained(copy.deepcopy(plain), attention_window=5, attention_sinks=sinks), tokens(length=16)
    whole = model(ids, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    pieces = [model(piece, past_key_values=cache).logits for piece in ids.split([7, 1, 1, 5, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=2e-5, rtol=1e-4)
    windowed = [layer for layer in cache.layers if type(layer).__name__ == "WindowLayer"]
    assert windowed
    assert all(layer.kept == 4 + sinks and layer.get_seq_length() == 16 for layer in windowed)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    if not sinks:  # sinks are the first columns of a row, which padding takes
        padded = model.generate(ids.where(mask == 1, 0), attention_mask=mask, **GREEDY)
        alone = model.generate(ids[:1, 3:], attention_mask=mask[:1, 3:], **GREEDY)
        assert torch.equal(padded[0, 16:], alone[0, 13:])


@torch.no_grad()
def test_attention_window_is_that_of_mistral(tmp_path: Path) -> None:
    """A Llama with a window is the Mistral that has its weights."""
    model: Any = llama().eval()
    reference = transformers.MistralForCausalLM(transformers.MistralConfig(**HEADS, sliding_window=5)).eval()
    reference.load_state_dict(model.state_dict())
    ids = tokens()
    sdm.graft(model, attention_window=5)
    torch.testing.assert_close(model(ids).logits, reference(ids).logits)
    model.save_pretrained(tmp_path)
    assert torch.equal(sdm.load_grafted(tmp_path)(ids).logits, model(ids).logits)
    assert type(sdm.ungraft(model).model.layers[2].self_attn).__name__ == "LlamaAttention"


def test_trainer_resumes_and_lora_trains_beside_the_memory(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model: Any = sdm.graft(llama())
    rows = [{"input_ids": row, "labels": row} for row in tokens(8, 16)]
    options = {"per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "save_steps": 2}

    def trainer(steps: int) -> Any:
        settings = transformers.TrainingArguments(str(tmp_path), max_steps=steps, disable_tqdm=True, **options)
        return transformers.Trainer(model, settings, train_dataset=rows)

    trainer(2).train()
    resumed = trainer(4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4
    ids = tokens()
    loaded = sdm.load_grafted(tmp_path / "checkpoint-4").eval()
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["memory"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    adapted(input_ids=ids, labels=ids).loss.backward()
    changed = {name for name, x in adapted.named_parameters() if x.grad is not None}
    assert any("lora_B" in name for name in changed)
    assert any("memory" in name for name in changed)
    generated = adapted.eval().generate(input_ids=ids, attention_mask=torch.ones_like(ids), **GREEDY)
    assert generated.shape == (2, 26)


@pytest.mark.filterwarnings("ignore")
def test_trl_trains_a_graft(tmp_path: Path) -> None:
    """The trainer of docs/grafting.md, on rows of tokens."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from tiny_tokenizer import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    model: Any = sdm.graft(llama(vocab_size=len(tokenizer)))
    before = {name: x.clone() for name, x in model.named_parameters()}
    settings = trl.SFTConfig(
        str(tmp_path),
        max_steps=2,
        max_length=16,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    rows = datasets.Dataset.from_list([{"text": "the memory holds what was written"}] * 4)
    trl.SFTTrainer(model=model, args=settings, train_dataset=rows, processing_class=tokenizer).train()
    changed = {name for name, x in model.named_parameters() if not torch.equal(x, before[name])}
    assert changed
    assert all(".memory." in name for name in changed)
    loaded: Any = sdm.load_grafted(tmp_path / "checkpoint-2")
    assert loaded.graft_config == model.graft_config
