"""Checks of transformers' common model tests that no other file of ours has.

transformers does not ship its tests. `test_contracts.py` covers embeddings, resizing, sharded weights, gradient
checkpointing, hidden states and the options of `generate` for every stack; this file covers the rest for four of them.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, pipeline, set_seed

import sdm
from helpers import assert_close, assert_identical
from tiny_models import VOCABULARY, tiny_config, tiny_model, tokens
from tiny_tokenizer import tiny_tokenizer


@pytest.fixture(params=["sdm", "gdn", "mixed", "full_attention"])
def stack(request: pytest.FixtureRequest) -> str:
    return request.param


class TestConfiguration:
    def test_copies_are_equal_and_independent(self, stack: str, tmp_path: Path) -> None:
        config = tiny_config(stack, architectures=["SDMForCausalLM"], num_labels=3)
        config.save_pretrained(tmp_path)
        copies = [
            copy.deepcopy(config),
            pickle.loads(pickle.dumps(config)),
            sdm.SDMConfig.from_dict(config.to_dict()),
            AutoConfig.from_pretrained(tmp_path),
        ]
        before = copy.deepcopy(config.to_dict())
        for other in copies:
            assert type(other) is sdm.SDMConfig
            assert other.to_dict() | {"_name_or_path": ""} == before
            assert other.num_labels == 3
            assert other.layer_types is not config.layer_types
            other.layer_types[0] = "sliding_attention" if other.layer_types[0] == "sdm" else "sdm"
            other.rope_parameters["rope_theta"] = 7.0
        assert config.to_dict() == before

    def test_common_attributes(self, stack: str) -> None:
        config = tiny_config(stack)
        for name, value in {"hidden_size": 48, "vocab_size": 11, "num_hidden_layers": 4}.items():
            assert getattr(tiny_config(stack, **{name: value}), name) == value
            setattr(config, name, value)
            assert getattr(config, name) == value
        assert config.get_text_config() is config
        assert config.is_encoder_decoder is False


class TestWeights:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("tied", [False, True])
    def test_round_trip_keeps_dtype_and_ties(self, stack: str, tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
        model = tiny_model(stack, tie_word_embeddings=tied).to(dtype)
        model.save_pretrained(tmp_path)
        loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
        assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        assert loaded.dtype == loaded.config.dtype == dtype
        expected = model.state_dict()
        assert {name: x.dtype for name, x in loaded.state_dict().items()} == {
            name: x.dtype for name, x in expected.items()
        }
        assert_identical([loaded.state_dict()[name] for name in expected], list(expected.values()))

    def test_get_and_set_embeddings(self, stack: str) -> None:
        model, ids = tiny_model(stack), tokens(2, 5)
        assert model.get_input_embeddings() is model.model.embed_tokens
        assert model.get_output_embeddings() is model.lm_head
        embeddings, head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY, bias=False)
        model.set_input_embeddings(embeddings)
        model.set_output_embeddings(head)
        output = model(ids, output_hidden_states=True)
        assert_identical([output.hidden_states[0]], [embeddings(ids)])
        assert_identical([output.logits], [head(output.hidden_states[-1])])

    def test_another_number_of_labels(self, stack: str, tmp_path: Path) -> None:
        sdm.models.SDMForSequenceClassification(tiny_config(stack, num_labels=2)).save_pretrained(tmp_path)
        kind = sdm.models.SDMForSequenceClassification
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            kind.from_pretrained(tmp_path, num_labels=5)
        loaded = kind.from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
        assert loaded.score.weight.shape == (5, 32)
        assert loaded.score.weight.isfinite().all()

    def test_a_model_on_the_meta_device_can_be_filled(self, stack: str) -> None:
        model, ids = tiny_model(stack), tokens(1, 6)
        with torch.device("meta"):
            empty = sdm.SDMForCausalLM(copy.deepcopy(model.config)).eval()
        assert all(x.is_meta for x in empty.parameters())
        empty.load_state_dict(model.state_dict(), assign=True)
        assert not any(x.is_meta for x in (*empty.parameters(), *empty.buffers()))
        assert_identical([empty(ids).logits], [model(ids).logits])


class TestForward:
    def test_a_mask_of_ones_changes_nothing(self, stack: str) -> None:
        model, ids = tiny_model(stack), tokens(2, 9)
        expected = model(ids).logits
        for mask in (torch.ones_like(ids), torch.ones(2, 9), torch.ones(2, 9, dtype=torch.bool)):
            assert_close([model(ids, attention_mask=mask).logits], [expected], 1e-6)

    def test_rows_of_a_batch_do_not_depend_on_each_other(self, stack: str) -> None:
        model, ids = tiny_model(stack), tokens(4, 9)
        alone = torch.cat([model(row[None], output_hidden_states=True).logits for row in ids])
        assert_close([model(ids).logits], [alone], 1e-5)

    def test_evaluation_is_deterministic(self, stack: str) -> None:
        model, ids = tiny_model(stack), tokens(2, 9)
        assert_identical([model(ids).logits], [model(ids).logits])

    def test_every_parameter_is_trained(self, stack: str) -> None:
        model, ids = tiny_model(stack).train(), tokens(2, 12)
        model(ids, labels=ids).loss.backward()
        assert [name for name, x in model.named_parameters() if x.grad is None] == []

    def test_frozen_weights_get_no_gradient(self, stack: str) -> None:
        model, ids = tiny_model(stack).train(), tokens(2, 9)
        for x in model.model.layers[:2].parameters():
            x.requires_grad_(False)
        model(ids, labels=ids).loss.backward()
        assert all(x.grad is None for x in model.model.layers[:2].parameters())
        assert model.model.embed_tokens.weight.grad is not None


class TestGeneration:
    def test_left_padding(self, stack: str) -> None:
        model, ids = tiny_model(stack, pad_token_id=0), tokens(1, 6)
        padded = torch.cat((torch.zeros(1, 4, dtype=torch.long), ids), dim=1)
        mask = torch.cat((torch.zeros(1, 4, dtype=torch.long), torch.ones_like(ids)), dim=1)
        expected = model.generate(ids, max_new_tokens=8, do_sample=False)
        generated = model.generate(padded, attention_mask=mask, max_new_tokens=8, do_sample=False)
        assert_identical([generated[:, 4:]], [expected])

    @pytest.mark.parametrize("options", [{"top_k": 10}, {"num_beams": 3}], ids=str)
    def test_sampling_follows_the_seed(self, stack: str, options: dict[str, Any]) -> None:
        model, ids = tiny_model(stack), tokens(2, 5)
        draws = []
        for seed in (1, 1, 2):
            set_seed(seed)
            draws.append(model.generate(ids, max_new_tokens=10, do_sample=True, **options))
        assert_identical([draws[1]], [draws[0]])
        assert not draws[2].equal(draws[0])

    def test_drafts_change_no_token(self, stack: str) -> None:
        model, assistant = tiny_model(stack), tiny_model(stack)
        ids = tokens(1, 4).repeat(1, 4)
        expected = model.generate(ids, max_new_tokens=10, do_sample=False)
        for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
            assert_identical([model.generate(ids, max_new_tokens=10, do_sample=False, **options)], [expected])

    def test_one_beam_is_greedy_and_more_are_likelier(self, stack: str) -> None:
        model, ids = tiny_model(stack), tokens(2, 5)
        options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
        greedy = model.generate(ids, **options)
        assert_identical([model.generate(ids, num_beams=1, **options)], [greedy])
        # As many beams as there are tokens for the second step: the search is exhaustive there.
        beams = model.generate(ids, num_beams=VOCABULARY, max_new_tokens=2, do_sample=False)
        assert (_likelihood(model, beams, 5) >= _likelihood(model, greedy[:, :7], 5) - 1e-5).all()

    def test_pipeline(self, stack: str) -> None:
        model, tokenizer = tiny_model(stack, pad_token_id=0), tiny_tokenizer()
        generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
        texts = ["memory", "a", "delta rule"]
        batched = generator(texts, max_new_tokens=5, do_sample=False, batch_size=3, return_full_text=False)
        alone = [generator(x, max_new_tokens=5, do_sample=False, return_full_text=False) for x in texts]
        assert batched == alone


@torch.no_grad()
def _likelihood(model: sdm.SDMForCausalLM, ids: torch.Tensor, start: int) -> torch.Tensor:
    """Log-likelihood of the tokens from `start` on, [B]."""
    likely = model(ids).logits.log_softmax(-1)[:, start - 1 : -1]
    return likely.gather(-1, ids[:, start:, None]).sum((1, 2))
