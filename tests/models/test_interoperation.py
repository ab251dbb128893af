"""The model goes where transformers models go: pipelines, Trainer, peft, accelerate, lm-eval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
    pipeline,
)

import sdm
from helpers import assert_close, assert_identical
from sdm.run.config import OptimConfig
from sdm.training.optimizer import make_optimizer
from tiny_models import STACKS, tiny_model, tokens
from tiny_tokenizer import tiny_tokenizer

pytestmark = [
    # What the other libraries deprecate in each other is not ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


def test_pipeline() -> None:
    model = tiny_model("mixed")
    generator = pipeline("text-generation", model=model, tokenizer=tiny_tokenizer())
    (alone,) = generator("memory", max_new_tokens=5, do_sample=False)
    batch = generator(["memory", "a longer prompt"], batch_size=2, max_new_tokens=5, do_sample=False)
    assert alone["generated_text"].startswith("memory")
    assert batch[0][0]["generated_text"] == alone["generated_text"], "a row does not depend on its batch"


@pytest.mark.parametrize("accumulation", [1, 2])
def test_trainer(tmp_path: Path, accumulation: int) -> None:
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        gradient_checkpointing=True,
        learning_rate=3e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"input_ids": tokens(12)} for _ in range(4)]
    model = tiny_model("sdm")
    collator = DataCollatorForLanguageModeling(tiny_tokenizer(), mlm=False)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows, data_collator=collator)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    trainer.save_model(str(tmp_path / "saved"))
    ids = tokens(1, 6)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_identical([loaded(ids).logits], [model.eval()(ids).logits])


@pytest.mark.parametrize("kind", ["sdm", "gdn", "mamba2", "shifted"])
def test_trainer_resumes(kind: str, tmp_path: Path) -> None:
    def train(steps: int, resume: bool) -> Any:
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=steps, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
        )
        torch.manual_seed(0)
        model = tiny_model(kind)
        rows = [{"input_ids": tokens(8), "labels": tokens(8)} for _ in range(4)]
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.state

    train(2, resume=False)
    assert train(4, resume=True).global_step == 4


def test_flattened_batches() -> None:
    model, documents = tiny_model(), [tokens(5), tokens(3)]
    rows = [{"input_ids": ids.tolist()} for ids in documents]
    expected = model(**DataCollatorWithFlattening()(rows)).loss
    for option in ("return_flash_attn_kwargs", "return_seq_idx"):
        batch = DataCollatorWithFlattening(**{option: True})(rows)
        assert_identical([model(**batch).loss], [expected])


@pytest.mark.parametrize("kind", ["sdm", "gdn", "mamba2", "shifted"])
def test_an_offloaded_model_generates(kind: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, ids = tiny_model(kind), tokens(1, 6)
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    accelerate.cpu_offload(model, execution_device="cpu")
    assert_identical([model.generate(ids, max_new_tokens=4, do_sample=False)], [expected])


@pytest.mark.parametrize("kind", ["sdm", "gdn", "mamba2"])
def test_lora(kind: str, tmp_path: Path) -> None:
    """Every projection is adapted, those of the gates too, and each counts."""
    peft = pytest.importorskip("peft")
    base = tiny_model(kind)
    projections = ["query_proj", "key_proj", "value_proj", "beta_proj", "decay_proj", "gate_proj", "out_proj"]
    config = peft.LoraConfig(r=2, target_modules=projections, task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    ids = tokens(2, 9)
    model(input_ids=ids, labels=ids).loss.backward()
    trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
    assert trained
    assert all("lora" in name and x.grad is not None and x.grad.abs().sum() > 0 for name, x in trained.items())
    generated = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    cache = sdm.SDMCache(base.config)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    assert len(sdm.MemoryState.from_cache(model, cache, row=1)) == 9
    model.save_pretrained(tmp_path)
    merged = model.merge_and_unload()
    assert_identical([merged.generate(input_ids=ids, max_new_tokens=4, do_sample=False)], [generated])


@pytest.mark.parametrize("stack", STACKS)
def test_the_documented_lora(stack: str) -> None:
    """The recipe of docs/models.md adapts every block, and peft knows the names without being told the model."""
    peft = pytest.importorskip("peft")
    text = (Path(__file__).parents[2] / "docs/models.md").read_text()
    source = next(block for block in text.split("```python\n") if "LoraConfig(" in block).split("```")[0]
    names: dict[str, Any] = {"model": tiny_model(stack)}
    exec(source, names)
    model = names["model"]
    assert isinstance(model, peft.PeftModel)
    adapted = {name.split(".lora_A")[0] for name, x in model.named_parameters() if ".lora_A" in name}
    for place, kind in enumerate(model.config.layer_types):
        inside = {name for name in adapted if f".layers.{place}." in name}
        assert sum(".mlp." in name for name in inside) == 3
        projections = {f"{name}_proj" for name in ("query", "key", "value", "gate", "out")}
        mixer = tiny_model(stack).model.layers[place].mixer
        present = projections & {name.split(".")[-1] for name, _ in mixer.named_modules()}
        assert sum(".mixer." in name for name in inside) == len(present), kind
    ids = tokens(2, 6)
    model(input_ids=ids, labels=ids).loss.backward()


def test_accelerate_loads(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model, ids = tiny_model("mixed"), tokens(1, 9)
    model.save_pretrained(tmp_path, max_shard_size="20kB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"})
    assert_identical([loaded(ids).logits], [model(ids).logits])
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert_identical([loaded.generate(ids, max_new_tokens=4, do_sample=False)], [expected])


def test_lm_eval_takes_the_model_as_it_is() -> None:
    """Runs where the extra `eval` is installed."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    instance = pytest.importorskip("lm_eval.api.instance")
    model = tiny_model("sdm")
    harness = huggingface.HFLM(pretrained=model, tokenizer=tiny_tokenizer(), batch_size=2, device="cpu")

    def request(context: str, continuation: str) -> Any:
        return instance.Instance("loglikelihood", {}, (context, continuation), 0)

    (long, _), (short, _) = harness.loglikelihood([request("a longer context", " yes"), request("no", "ne")])
    ((alone, _),) = harness.loglikelihood([request("no", "ne")])
    assert short == pytest.approx(alone, abs=1e-4), "a row does not depend on its batch"
    ids = torch.tensor([tiny_tokenizer()("none")["input_ids"]])
    with torch.no_grad():
        expected = model(ids).logits.log_softmax(-1)[0, [1, 2], ids[0, 2:]].sum()
    assert short == pytest.approx(float(expected), abs=1e-4)
    assert long < 0


def test_registration_needs_no_attribute_when_models_are_imported() -> None:
    assert AutoModelForCausalLM.from_config(tiny_model("sdm").config).__class__ is sdm.SDMForCausalLM


def trainer_of(model: Any, folder: Path, rows: list[Any] | None = None, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder), report_to=[], use_cpu=True, disable_tqdm=True, weight_decay=0.1, max_steps=1
    )
    return Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows, **options)


@pytest.mark.parametrize("stack", STACKS)
def test_trainer_decays_what_our_optimizer_decays(stack: str, tmp_path: Path) -> None:
    model = tiny_model(stack, normalize_scores=True, query_batch_norm=True, gdn_learned_initial_state=True)
    names = {id(x): name for name, x in model.named_parameters()}

    def decayed(optimizer: torch.optim.Optimizer) -> set[str]:
        return {names[id(x)] for group in optimizer.param_groups if group["weight_decay"] for x in group["params"]}

    theirs = decayed(trainer_of(model, tmp_path).create_optimizer())
    assert theirs == decayed(make_optimizer(model, OptimConfig(weight_decay=0.1)))
    assert theirs == set(names.values()) - model.no_weight_decay()
    harmed = ("initial_state", "log_rate", "skip", "bias", "norm.weight", "beta_proj.weight", "decay_proj.weight")
    assert not [name for name in theirs if name.endswith(harmed)]
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight"} <= theirs


def test_trainer_decays_other_models_and_adapters_as_before(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(tiny_model(), peft.LoraConfig(target_modules=["value_proj", "decay_proj"]))
    for name, x in adapted.named_parameters():
        x.requires_grad_(x.requires_grad or name.endswith("initial_state"))
    names = {id(x): name for name, x in adapted.named_parameters()}
    groups = trainer_of(adapted, tmp_path).create_optimizer().param_groups
    decayed = {names[id(x)] for group in groups if group["weight_decay"] for x in group["params"]}
    assert decayed
    assert all("lora" in name for name in decayed)
    other = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert trainer_of(other, tmp_path).get_decay_parameter_names(other) == ["0.weight"]


def test_compute_metrics_gets_the_logits(tmp_path: Path) -> None:
    model = tiny_model(loss_chunk_size=4)
    rows = [{"input_ids": ids, "labels": ids} for ids in tokens(3, 8)]
    seen = []
    trainer = trainer_of(model, tmp_path, rows, compute_metrics=lambda prediction: seen.append(prediction) or {})
    trainer.evaluate()
    ids = torch.stack([row["input_ids"] for row in rows])
    assert_close([torch.from_numpy(seen[0].predictions)], [model(ids).logits], 1e-5)
