"""What transformers and the libraries around it expect of a model, beyond what the model itself needs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorWithFlattening,
    DynamicCache,
    StaticCache,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.models.auto import modeling_auto
from transformers.utils import import_utils

import sdm.models
from helpers import assert_close, assert_identical
from tiny_models import STACKS, tiny_config, tiny_model, tokens
from tiny_tokenizer import tiny_tokenizer

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


class TestNames:
    def test_label_smoothing_learns_the_next_token(self, tmp_path: Path) -> None:
        """Counting rows: after 5 ... 9 comes 10. With labels that nobody shifted, 9 would come again."""
        torch.manual_seed(0)
        model = tiny_model("sdm")
        rows = [{"input_ids": x, "labels": x} for x in ((torch.arange(8) + start) % 16 for start in range(16))]
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=40,
            per_device_train_batch_size=16,
            learning_rate=1e-2,
            label_smoothing_factor=0.1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        Trainer(model=model, args=arguments, train_dataset=rows).train()
        with torch.no_grad():
            assert model.eval()(torch.tensor([[5, 6, 7, 8, 9]])).logits[0, -1].argmax() == 10

    def test_transformers_lists_the_classes(self) -> None:
        assert modeling_auto.MODEL_MAPPING_NAMES["sdm"] == "SDMModel"
        assert modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["sdm"] == "SDMForCausalLM"
        assert modeling_auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES["sdm"] == "SDMForCausalLM"
        # The Auto classes still go through all of their models.
        assert sdm.SDMForCausalLM in list(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.values())
        assert "SDMConfig" in {config.__name__ for config in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING}


class TestExtraArguments:
    def test_stop_strings(self) -> None:
        model, tokenizer, ids = tiny_model(), tiny_tokenizer(), tokens(1, 6)
        whole = model.generate(ids, max_new_tokens=8, do_sample=False)
        stop = tokenizer.decode(whole[0, 8:9])
        stopped = model.generate(ids, max_new_tokens=8, do_sample=False, stop_strings=[stop], tokenizer=tokenizer)
        first = tokenizer.convert_tokens_to_ids(stop)
        length = 6 + whole[0, 6:].tolist().index(first) + 1
        assert_identical([stopped], [whole[:, :length]])

    def test_pipeline_with_a_stop_sequence(self) -> None:
        generator = pipeline("text-generation", model=tiny_model(), tokenizer=tiny_tokenizer())
        (plain,) = generator("memory", max_new_tokens=8, do_sample=False)
        new = plain["generated_text"].removeprefix("memory")
        (stopped,) = generator("memory", max_new_tokens=8, do_sample=False, stop_sequence=new[2])
        assert stopped["generated_text"] == "memory" + new[: new.index(new[2]) + 1]

    @pytest.mark.parametrize("base", [False, True])
    def test_what_other_models_ignore(self, base: bool) -> None:
        model, ids = tiny_model(), tokens(2, 7)
        model = model.model if base else model
        extras: dict[str, Any] = {
            "cache_position": torch.arange(7),
            "is_causal": True,
            "output_router_logits": False,
            "token_type_ids": torch.zeros_like(ids),
            "tokenizer": None,
            "mm_token_type_ids": None,
        }
        assert_identical([model(ids, **extras)[0]], [model(ids)[0]])
        assert isinstance(model(ids, return_dict=False, **extras), tuple)

    @pytest.mark.parametrize(
        ("name", "nearest"),
        [
            ("label", "labels"),
            ("attention_masks", "attention_mask"),
            ("past_key_value", "past_key_values"),
            ("cu_seqlen", "cu_seqlens"),
            ("inputs_embed", "inputs_embeds"),
            ("output_hidden_state", "output_hidden_states"),
        ],
    )
    def test_a_misspelt_argument_is_not_ignored(self, name: str, nearest: str) -> None:
        model = tiny_model()
        models = [model] if nearest == "labels" else [model, model.model]
        for each in models:
            with pytest.raises(TypeError, match=f"no argument '{name}'; did you mean '{nearest}'"):
                each(tokens(1, 3), **{name: None})
        with pytest.raises(ValueError, match="max_new_token"):
            model.generate(tokens(1, 3), max_new_token=2)


@pytest.mark.parametrize("stack", STACKS)
def test_the_base_model_takes_flattened_batches(stack: str) -> None:
    """TRL calls the base model and computes the loss itself, of packed and of padded rows alike."""
    model, documents = tiny_model(stack), [tokens(5), tokens(1), tokens(9)]
    rows = [{"input_ids": ids.tolist()} for ids in documents]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = {name: x for name, x in collator(rows).items() if name != "labels"}
    padded, mask = torch.zeros(3, 9, dtype=torch.long), torch.zeros(3, 9, dtype=torch.long)
    for row, ids in enumerate(documents):
        padded[row, : len(ids)], mask[row, : len(ids)] = ids, 1
    hidden = model.model(padded, attention_mask=mask).last_hidden_state[mask.bool()]
    without_positions = {name: x for name, x in batch.items() if name != "position_ids"}
    for arguments in (batch, without_positions):
        packed = model.model(**arguments).last_hidden_state[0]
        assert_close([packed], [hidden], 3e-6)


class TestUnknownFields:
    def test_are_kept_by_a_round_trip(self, tmp_path: Path) -> None:
        model = tiny_model()
        model.config.reward_scale = 0.5
        model.config.num_slot = 3
        model.save_pretrained(tmp_path)
        with pytest.warns(UserWarning, match=r"'num_slot' \(did you mean 'num_slots'\?\), 'reward_scale'") as caught:
            loaded = sdm.SDMForCausalLM.from_pretrained(tmp_path)
        assert len(caught) == 1
        assert (loaded.config.reward_scale, loaded.config.num_slot) == (0.5, 3)
        assert loaded.config.num_slots == model.config.num_slots
        loaded.save_pretrained(tmp_path / "again")
        written = json.loads((tmp_path / "again/config.json").read_text())
        assert (written["reward_scale"], written["num_slot"]) == (0.5, 3)
        with pytest.warns(UserWarning, match="reward_scale"):
            again = sdm.SDMConfig.from_json_file(tmp_path / "again/config.json")
        assert again.reward_scale == 0.5

    def test_are_refused_by_the_constructor(self) -> None:
        with pytest.raises(TypeError, match=r"no field 'num_slot' \(did you mean 'num_slots'\?\)"):
            tiny_config(num_slot=3)


class TestGeneration:
    @torch.no_grad()
    def test_a_cache_says_whether_it_has_begun(self) -> None:
        model = tiny_model("mixed")
        cache = sdm.SDMCache(model.config)
        assert not cache.is_initialized
        model(tokens(1, 3), past_key_values=cache)
        assert cache.is_initialized
        assert all(layer.is_initialized for layer in cache.layers)
        assert sdm.MemoryState.from_cache(model, cache).cache(model).is_initialized
        cache.reset()
        assert not cache.is_initialized

    @pytest.mark.parametrize("stack", ["sdm", "gdn", "mamba2", "shifted"])
    def test_caches_of_transformers_are_refused(self, stack: str) -> None:
        config = tiny_config(stack)
        with pytest.raises(TypeError, match=r"use sdm\.SDMCache\(config\)"):
            DynamicCache(config=config)
        with pytest.raises(TypeError, match=r"use sdm\.SDMCache\(config\)"):
            StaticCache(config=config, max_cache_len=8)

    def test_a_cache_of_transformers_with_attention_alone(self) -> None:
        model = tiny_model("full_attention")
        with pytest.raises(TypeError, match=r"got DynamicCache; make one with sdm\.SDMCache\(model\.config\)"):
            model(tokens(1, 3), past_key_values=DynamicCache(config=model.config))

    def test_continuous_batching_is_refused(self) -> None:
        model = tiny_model("full_attention")
        with pytest.raises(NotImplementedError, match="continuous batching"):
            model.generate_batch([[1, 2, 3]], max_new_tokens=2)
        with (
            pytest.raises(NotImplementedError, match="continuous batching"),
            model.continuous_batching_context_manager(),
        ):
            pass
        with pytest.raises((ValueError, NotImplementedError), match=r"continuous batching|cache_implementation"):
            model.generate(tokens(1, 3), cache_implementation="paged", max_new_tokens=2)


class TestPlans:
    @pytest.mark.parametrize("stack", STACKS)
    def test_plans_name_modules(self, stack: str) -> None:
        fsdp = pytest.importorskip("transformers.distributed.fsdp")
        model = tiny_model(stack)
        names = {name for name, _ in model.named_modules()}
        assert model.tp_plan["lm_head"] == "colwise_gather_output"
        for pattern, split in model.tp_plan.items():
            found = [name for name in names if _fits(pattern, name)]
            assert len(found) == (4 if "*" in pattern else 1), pattern
            assert split in ("colwise", "rowwise", "colwise_gather_output", "embedding_rowwise")
        fsdp.verify_fsdp_plan(sorted(names), model.fsdp_plan)
        freed, kept = fsdp.expand_fsdp_plan(model, model.fsdp_plan)
        assert len(freed) + len(kept) == 4 + 3, "every block, the embedding, the norm, the head"


def _fits(pattern: str, name: str) -> bool:
    parts, names = pattern.split("."), name.split(".")
    return len(parts) == len(names) and all(part in ("*", piece) for part, piece in zip(parts, names, strict=True))


class TestHeads:
    """Classification heads are transformers' own mixins over our base model."""

    def test_sequences_are_classified_by_their_last_token(self) -> None:
        config = tiny_config("mixed", num_labels=3, pad_token_id=0)
        model = AutoModelForSequenceClassification.from_config(config).eval()
        assert type(model).__name__ == "SDMForSequenceClassification"
        ids = tokens(2, 7).clamp(min=1)
        ids[1, 4:] = 0
        output = model(ids, attention_mask=(ids != 0).long(), labels=torch.tensor([0, 2]))
        hidden = model.model(ids, attention_mask=(ids != 0).long()).last_hidden_state
        assert_close([output.logits], [model.score(hidden[[0, 1], [6, 3]])], 1e-6)
        output.loss.backward()
        assert model.model.embed_tokens.weight.grad.abs().sum() > 0

    def test_tokens_are_classified(self) -> None:
        model = AutoModelForTokenClassification.from_config(tiny_config(num_labels=5)).eval()
        assert type(model).__name__ == "SDMForTokenClassification"
        ids = tokens(2, 7)
        output = model(ids, labels=ids % 5)
        assert output.logits.shape == (2, 7, 5)
        output.loss.backward()
        assert model.score.weight.grad.abs().sum() > 0

    def test_a_head_on_a_trained_model(self, tmp_path: Path) -> None:
        trained = tiny_model("sdm")
        trained.save_pretrained(tmp_path / "language")
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "language", num_labels=2).eval()
        assert_identical(list(model.model.parameters()), list(trained.model.parameters()))
        model.save_pretrained(tmp_path / "classifier")
        loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
        ids = tokens(1, 5)
        assert_identical([loaded(ids).logits], [model(ids).logits])
        assert "score.weight" not in model.no_weight_decay()


class TestDefaultTargetModules:
    """PEFT knows what to adapt, whichever package is imported first."""

    @pytest.mark.filterwarnings("ignore:Unsupported layer type")  # PEFT says so of every RMS norm
    @pytest.mark.parametrize("kind", ["LoraConfig", "IA3Config", "LNTuningConfig"])
    @pytest.mark.parametrize("stack", ["sdm", "gdn", "mixed"])
    def test_without_target_modules(self, kind: str, stack: str, monkeypatch: pytest.MonkeyPatch) -> None:
        peft = pytest.importorskip("peft")
        constants = pytest.importorskip("peft.utils.constants")
        for name, table in vars(constants).items():  # as if PEFT were imported after the model
            if name.endswith("_MODULES_MAPPING") and isinstance(table, dict):
                monkeypatch.setattr(constants, name, table)
                table.pop("sdm", None)
        model = peft.get_peft_model(tiny_model(stack), getattr(peft, kind)(task_type="CAUSAL_LM"))
        trained = [name for name, x in model.named_parameters() if x.requires_grad]
        assert all(any(f".layers.{layer}." in name for name in trained) for layer in range(4))
        ids = tokens(2, 6)
        model(input_ids=ids, labels=ids).loss.backward()


class TestServing:
    def test_transformers_has_the_classes_as_attributes(self) -> None:
        """`transformers serve` looks a model up there, in one of two lazy modules of that name."""
        for name in ("SDMConfig", "SDMForCausalLM", "SDMModel", "SDMForSequenceClassification"):
            assert getattr(transformers, name) is getattr(sdm.models, name)
        path = Path(transformers.__file__).parent
        kept = sys.modules["transformers"]
        try:
            again = import_utils.direct_transformers_import(str(path))
            assert again.SDMForCausalLM is sdm.SDMForCausalLM
        finally:
            sys.modules["transformers"] = kept
