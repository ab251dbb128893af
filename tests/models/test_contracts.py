"""What transformers expects of every model, for every stack of layers."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, set_seed

import sdm
from helpers import assert_close, assert_identical
from tiny_models import STACKS, VOCABULARY, tiny_config, tiny_model, tokens

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(params=STACKS)
def stack(request: pytest.FixtureRequest) -> str:
    return request.param


def ragged(side: str, lengths: tuple[int, ...] = (9, 4, 1)) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and the mask of rows that are padded on this side."""
    place = torch.arange(max(lengths)).expand(len(lengths), -1)
    length = torch.tensor(lengths).unsqueeze(1)
    mask = place >= max(lengths) - length if side == "left" else place < length
    return tokens(*mask.shape), mask.long()


@pytest.mark.parametrize("side", ["left", "right", None])
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_eager_is_sdpa(stack: str, dtype: str, side: str | None, tmp_path: Path) -> None:
    tiny_model(stack).save_pretrained(tmp_path)
    eager, sdpa = (
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=name, dtype=DTYPES[dtype])
        for name in ("eager", "sdpa")
    )
    ids, mask = ragged(side or "left")
    mask = mask if side else torch.ones_like(mask)
    expected, actual = (model(ids, attention_mask=mask).logits for model in (eager, sdpa))
    assert expected.dtype == DTYPES[dtype]
    assert_identical([actual], [expected])
    assert actual.isfinite().all()
    other = torch.where(mask == 1, ids, (ids + 1) % VOCABULARY)
    assert_identical([sdpa(other, attention_mask=mask).logits[mask == 1]], [actual[mask == 1]])


@torch.no_grad()
def test_embeddings_instead_of_tokens(stack: str) -> None:
    model, ids = tiny_model(stack), tokens(2, 9)
    embeddings = model.get_input_embeddings()(ids)
    assert_identical([model(inputs_embeds=embeddings).logits], [model(ids).logits])
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    generated = model.generate(inputs_embeds=embeddings, max_new_tokens=5, do_sample=False)
    assert_identical([generated], [expected[:, 9:]])
    # Behind a cache: tokens, then embeddings, then tokens again.
    cache = sdm.SDMCache(model.config)
    pieces = [
        model(ids[:, :3], past_key_values=cache).logits,
        model(inputs_embeds=embeddings[:, 3:7], past_key_values=cache).logits,
        model(ids[:, 7:], past_key_values=cache).logits,
    ]
    assert_close([torch.cat(pieces, dim=1)], [model(ids).logits], 1e-5)


@torch.no_grad()
def test_generation_continues(stack: str) -> None:
    """All at once, in two calls from a returned cache, and in two calls from embeddings of what there is."""
    model, ids = tiny_model(stack), tokens(2, 5)
    options: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    whole = model.generate(ids, max_new_tokens=8, **options)
    first = model.generate(ids, max_new_tokens=3, **options)
    cache = copy.deepcopy(first.past_key_values)
    second = model.generate(first.sequences, past_key_values=cache, max_new_tokens=5, **options)
    assert_identical([second.sequences], [whole.sequences])
    assert_close([*first.logits, *second.logits], whole.logits, 1e-5)
    embeddings = model.get_input_embeddings()(first.sequences)
    third = model.generate(inputs_embeds=embeddings, max_new_tokens=5, **options)
    assert_identical([third.sequences], [whole.sequences[:, 8:]])


@pytest.mark.parametrize("tied", [False, True])
def test_resized_embeddings(stack: str, tied: bool, tmp_path: Path) -> None:
    model, ids = tiny_model(stack, tie_word_embeddings=tied), tokens(2, 9)
    before = model(ids).logits.detach()
    model.resize_token_embeddings(VOCABULARY + 11)
    assert model.config.vocab_size == VOCABULARY + 11
    assert_close([model(ids).logits.detach()[..., :VOCABULARY]], [before], 1e-6)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    new = ids + 11
    model(new, labels=new).loss.backward()
    model.save_pretrained(tmp_path)
    assert_identical([AutoModelForCausalLM.from_pretrained(tmp_path)(new).logits], [model(new).logits])
    model.resize_token_embeddings(VOCABULARY)
    assert_close([model(ids).logits], [before], 1e-6)
    with pytest.raises(ValueError, match="input_ids"):
        model(torch.full_like(ids, VOCABULARY))


@pytest.mark.parametrize("tied", [False, True])
def test_saved_in_shards(stack: str, tied: bool, tmp_path: Path) -> None:
    model, ids = tiny_model(stack, tie_word_embeddings=tied), tokens(2, 9)
    model.save_pretrained(tmp_path, max_shard_size="20kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied
    assert_identical([loaded(ids).logits], [model(ids).logits])
    base = sdm.SDMModel.from_pretrained(tmp_path)
    assert_identical([base(ids).last_hidden_state], [model.model(ids).last_hidden_state])


def test_base_and_head_load_each_other(stack: str, tmp_path: Path) -> None:
    model = tiny_model(stack)
    model.model.save_pretrained(tmp_path)
    loaded, report = sdm.SDMForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == {"lm_head.weight"}
    ids = tokens(1, 5)
    assert_identical([loaded.model(ids).last_hidden_state], [model.model(ids).last_hidden_state])


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(stack: str, reentrant: bool) -> None:
    """Within what callers do: embeddings that need gradients, and a cache that a training step does not want."""
    model, ids = tiny_model(stack).train(), tokens(2, 9)
    model.enable_input_require_grads()
    gradients = []
    for enabled in (False, True):
        if enabled:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            assert model.is_gradient_checkpointing
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([x.grad for x in model.parameters()])
    assert_close(gradients[1], gradients[0], 1e-5)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


def test_overfits_a_batch(stack: str) -> None:
    """What was learned by heart comes out of `generate`."""
    model, ids = tiny_model(stack).train(), tokens(2, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(40):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05
    assert_identical([model.eval().generate(ids[:, :2], max_new_tokens=8, do_sample=False)], [ids])


def test_packed_loss_is_padded_loss(stack: str) -> None:
    """As TRL's packing and padding-free batches do it."""
    model = tiny_model(stack)
    documents = [tokens(n) for n in (7, 2, 5)]
    ids, mask = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 7, dtype=torch.long)
    for row, document in enumerate(documents):
        ids[row, : len(document)], mask[row, : len(document)] = document, 1
    padded = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    rows = [{"input_ids": document.tolist()} for document in documents]
    for options in ({}, {"return_flash_attn_kwargs": True}, {"return_seq_idx": True}):
        packed = model(**DataCollatorWithFlattening(**options)(rows))
        assert_close([packed.loss], [padded.loss], 1e-5)


def test_hidden_states(stack: str) -> None:
    model, ids = tiny_model(stack), tokens(2, 7)
    output = model(ids, output_hidden_states=True)
    assert [x.shape for x in output.hidden_states] == [(2, 7, 32)] * 5
    for x in output.hidden_states:
        x.retain_grad()
    output.logits.sum().backward()
    assert all(x.grad is not None for x in output.hidden_states)
    as_tuple = model(ids, output_hidden_states=True, return_dict=False)
    assert_identical([as_tuple[0], *as_tuple[-1]], [output.logits, *output.hidden_states])


def test_copies_and_seeds(stack: str) -> None:
    ids = tokens(1, 7)
    set_seed(5)
    model = tiny_model(stack)
    set_seed(5)
    again = tiny_model(stack)
    assert_identical(list(again.state_dict().values()), list(model.state_dict().values()))
    assert_identical([copy.deepcopy(model)(ids).logits], [model(ids).logits])
    assert list(inspect.signature(model.forward).parameters)[:2] == ["input_ids", "attention_mask"]
    assert all(x.isfinite().all() for x in model.state_dict().values())
    config = tiny_config(stack)
    assert sdm.SDMConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    assert sdm.SDMConfig(**config.to_diff_dict()).to_dict() == config.to_dict()


OPTIONS: dict[str, dict[str, Any]] = {
    "min_max_new": {"min_new_tokens": 3, "eos_token_id": list(range(40))},
    "min_max_length": {"min_length": 9, "max_length": 12, "max_new_tokens": None, "eos_token_id": list(range(40))},
    "repetition": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
    "banned": {"bad_words_ids": [[3], [5, 7]], "suppress_tokens": [1, 2], "begin_suppress_tokens": [4]},
    "bias": {"sequence_bias": {(11,): 4.0}, "forced_eos_token_id": 9},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "sampling_more": {"do_sample": True, "min_p": 0.01, "typical_p": 0.9, "epsilon_cutoff": 1e-3},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": True},
    "beam_sampling": {"num_beams": 2, "do_sample": True, "top_k": 10},
    "length_decay": {"exponential_decay_length_penalty": (2, 1.3), "eos_token_id": 5},
    "guidance": {"guidance_scale": 1.5},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_generate_options(stack: str, name: str) -> None:
    """A batch of padded prompts gives the same tokens and scores with and without the cache."""
    model = tiny_model(stack, pad_token_id=0)
    ids, mask = ragged("left")
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, **OPTIONS[name]}
    results = []
    for use_cache in (True, False):
        set_seed(3)
        results.append(
            model.generate(
                ids,
                **options,
                use_cache=use_cache,
                output_scores=True,
                output_logits=True,
                output_hidden_states=True,
                return_dict_in_generate=True,
            )
        )
    cached, uncached = results
    rows = 3 * OPTIONS[name].get("num_return_sequences", 1)
    assert cached.sequences.shape[0] == rows
    assert cached.sequences.shape[1] <= 14
    assert len(cached.hidden_states) == len(cached.logits) == len(cached.scores)
    assert_identical([cached.sequences], [uncached.sequences])
    assert_close(cached.logits, uncached.logits, 1e-4)
    finite = [x.nan_to_num(neginf=0.0, posinf=0.0) for x in (*cached.scores, *uncached.scores)]
    assert_close(finite[: len(cached.scores)], finite[len(cached.scores) :], 1e-4)


def test_scores_are_those_of_the_beams(stack: str) -> None:
    model, ids = tiny_model(stack, pad_token_id=0), tokens(2, 5)
    output = model.generate(
        ids, max_new_tokens=4, num_beams=3, do_sample=False, output_scores=True, return_dict_in_generate=True
    )
    steps = model.compute_transition_scores(output.sequences, output.scores, output.beam_indices)
    assert_close([steps.sum(1) / 4], [output.sequences_scores], 1e-4)
    with torch.no_grad():
        likely = model(output.sequences).logits.log_softmax(-1)[:, 4:-1]
    expected = likely.gather(-1, output.sequences[:, 5:, None]).squeeze(-1)
    assert_close([steps], [expected], 1e-4)
