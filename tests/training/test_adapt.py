"""Runs that train a causal LM of transformers: from random weights, whole, with LoRA, and grafted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

import sdm
from sdm.cli.generate import Generate
from sdm.cli.train_options import parse
from sdm.data.config import CorpusConfig
from sdm.data.recall import RecallConfig
from sdm.errors import TrainingError
from sdm.evaluation.eval_model import open_model
from sdm.models.attention_window import BANDED
from sdm.models.causal_lm import causal_nll, memories_off
from sdm.run import Run
from sdm.run.config import (
    AdaptConfig,
    CheckpointConfig,
    ComputeConfig,
    MonitorConfig,
    OptimConfig,
    ScheduleConfig,
    TrainConfig,
)
from sdm.run.config_file import from_json, to_json
from sdm.run.model import SavedModel
from sdm.signals import TrainingStopped
from sdm.training import Trainer

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 8,
}
DATA = CorpusConfig(sources=("text",), tokenizer="byte", layout="rows", sequence_length=48, batch_size=2)
TASK = RecallConfig(num_pairs=4, start_pairs=4, num_keys=16, num_values=16, batch_size=2)


def run_config(adapt: AdaptConfig, data: Any = DATA, steps: int = 3, lr: float = 1e-2) -> TrainConfig:
    return TrainConfig(
        data=data,
        optim=OptimConfig(lr=lr, weight_decay=0.0),
        schedule=ScheduleConfig(steps=steps, warmup=0, decay=0),
        compute=ComputeConfig(device="cpu", threads=1),
        checkpoint=CheckpointConfig(every=1, keep=8),
        monitor=MonitorConfig(log_every=1, memory_every=0, validate_every=0, validation_batches=1, display="none"),
        adapt=adapt,
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trained a small Mistral from random weights."""
    folder = tmp_path_factory.mktemp("base") / "run"
    Trainer(run_config(AdaptConfig(scratch={"model_type": "mistral", **SIZES}, method="full")), folder).run()
    return folder


def test_a_base_is_trained_from_random_weights_and_loads_with_transformers(base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base / "export")
    assert isinstance(model, MistralForCausalLM)
    assert model.config.sliding_window == 8
    assert open_model(base).model.config.model_type == "mistral"
    assert Run(base).metrics()[-1]["step"] == 3


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, "GraftedMistralForCausalLM"),
        ({"memory": "gdn", "learned_initial_state": False}, "GraftedMistralForCausalLM"),
        ({"freeze_base": False, "base_lr": 1e-3}, "GraftedMistralForCausalLM"),
        ({"method": "lora", "lora_rank": 2}, "MistralForCausalLM"),
        ({"method": "full"}, "MistralForCausalLM"),
    ],
)
def test_every_method_trains_what_it_says_and_exports(
    base: Path, tmp_path: Path, fields: dict[str, Any], kind: str
) -> None:
    if fields.get("method") == "lora":
        pytest.importorskip("peft")
    folder = tmp_path / "run"
    config = run_config(AdaptConfig(base=base, **fields))
    assert from_json(TrainConfig, to_json(config)) == config
    Trainer(config, folder).run()
    model = SavedModel(folder).load()
    assert type(model).__name__ == kind
    before = AutoModelForCausalLM.from_pretrained(base / "export").state_dict()
    after = {name.replace(".self_attn.mixer.", ".self_attn."): x for name, x in model.state_dict().items()}
    same = all(torch.equal(x, after[name]) for name, x in before.items())
    assert same == (fields.get("method", "graft") == "graft" and fields.get("freeze_base", True))
    ids = torch.arange(40)[None]
    assert not torch.equal(model(ids).logits, AutoModelForCausalLM.from_pretrained(base / "export")(ids).logits)


@pytest.mark.parametrize("layout", ["rows", "packed", "stream"])
def test_a_stopped_graft_continues_bit_for_bit(base: Path, tmp_path: Path, layout: Any) -> None:
    adapt = AdaptConfig(base=base, freeze_base=False, distill=0.5, distill_tokens=8)
    config = run_config(adapt, replace(DATA, layout=layout), steps=4)
    whole = Trainer(config, tmp_path / "whole")
    whole.run()
    stopped = Trainer(config, tmp_path / "parts")
    for _ in range(2):
        stopped._advance()
    stopped.save()
    stopped.close()
    restored = SavedModel(tmp_path / "parts").load()
    again = Trainer(config, tmp_path / "parts")
    again.run()
    for (name, x), y in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(x, y), name
    differences = [not torch.equal(x, y) for x, y in zip(restored.parameters(), whole.model.parameters(), strict=True)]
    assert any(differences)  # of an unfinished run, the newest checkpoint is loaded


def test_a_stream_carries_the_states_of_memories(base: Path) -> None:
    torch.manual_seed(0)
    model: Any = sdm.graft(AutoModelForCausalLM.from_pretrained(base / "export")).train()
    torch.nn.init.normal_(model.memories()[1].layer.out_proj.weight)
    ids = torch.randint(256, (2, 12))
    with torch.no_grad():
        alone, _ = causal_nll(model, ids[:, 6:], ids[:, 6:])
        _, states = causal_nll(model, ids[:, :6], ids[:, :6], carry=True)
        behind, _ = causal_nll(model, ids[:, 6:], ids[:, 6:], states=states)
        reset, _ = causal_nll(model, ids[:, 6:], ids[:, 6:], states=states, begins=torch.tensor([True, True]))
    assert abs(alone - behind) > 1e-3
    torch.testing.assert_close(alone, reset)


def test_distillation_adds_the_divergence_from_the_base(base: Path) -> None:
    torch.manual_seed(0)
    model: Any = sdm.graft(AutoModelForCausalLM.from_pretrained(base / "export"))
    ids = torch.randint(256, (2, 12))
    plain, _ = causal_nll(model, ids, ids)
    equal, _ = causal_nll(model, ids, ids, distill=3.0, distill_tokens=5)
    torch.testing.assert_close(plain, equal)  # the untrained graft is the base
    torch.nn.init.normal_(model.memories()[1].layer.out_proj.weight)
    plain, _ = causal_nll(model, ids, ids)
    more, _ = causal_nll(model, ids, ids, distill=3.0, distill_tokens=5)
    with memories_off(model):
        wanted = model(ids[:, :5]).logits.log_softmax(-1)
    ours = model(ids).logits[:, :5].log_softmax(-1)
    torch.testing.assert_close(more - plain, 3 * (wanted.exp() * (wanted - ours)).sum())


def test_packed_documents_are_kept_apart(base: Path) -> None:
    torch.manual_seed(0)
    model: Any = sdm.graft(AutoModelForCausalLM.from_pretrained(base / "export"))
    torch.nn.init.normal_(model.memories()[1].layer.out_proj.weight)
    ids = torch.randint(256, (1, 20))
    packed, _ = causal_nll(model, ids, ids, cu_seqlens=torch.tensor([0, 7, 20]))
    parts = sum(causal_nll(model, part, part)[0] for part in (ids[:, :7], ids[:, 7:]))
    torch.testing.assert_close(packed, parts)


@pytest.mark.parametrize("grafted", [False, True])
def test_banded_attention_equals_sdpa(grafted: bool) -> None:
    torch.manual_seed(0)
    model: Any = MistralForCausalLM(MistralConfig(vocab_size=64, **SIZES | {"num_key_value_heads": 1})).eval()
    ids, mask = torch.randint(64, (2, 45)), torch.ones(2, 45, dtype=torch.int64)
    mask[1, :9] = 0
    if grafted:
        model.config.sliding_window = None
        model = MistralForCausalLM(model.config)
        model = sdm.graft(model, attention_window=8).eval()
    expected, padded = model(ids).logits, model(ids, attention_mask=mask).logits
    generated = model.generate(ids[:1], max_new_tokens=5, do_sample=False)
    model.set_attn_implementation(BANDED)
    torch.testing.assert_close(model(ids).logits, expected)
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[0], padded[0])
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[1, 9:], padded[1, 9:])
    assert torch.equal(model.generate(ids[:1], max_new_tokens=5, do_sample=False), generated)


def test_a_task_without_tokenizer_can_be_trained(base: Path, tmp_path: Path) -> None:
    Trainer(run_config(AdaptConfig(base=base), TASK), tmp_path / "run").run()


@pytest.mark.parametrize(
    ("fields", "data", "message"),
    [
        ({"base": Path("nowhere")}, DATA, "neither a model's folder"),
        ({}, DATA, "name the folder of the pretrained model"),
        ({"layers": (7,)}, DATA, "indices of blocks"),
        ({"layers": (0, 0)}, DATA, "more than once"),
        ({}, replace(DATA, tokenizer="bpe:300"), "not that of this run's data"),
    ],
)
def test_what_cannot_work_fails_before_the_first_step(
    base: Path, tmp_path: Path, fields: dict[str, Any], data: Any, message: str
) -> None:
    given = fields if message.startswith(("neither", "name")) else {"base": base, **fields}
    with pytest.raises(TrainingError, match=message):
        Trainer(run_config(AdaptConfig(**given), data), tmp_path / "run")


def test_settings_that_exclude_each_other() -> None:
    with pytest.raises(TrainingError, match="exclude each other"):
        AdaptConfig(base=Path("x"), scratch={"model_type": "gpt2"})
    with pytest.raises(TrainingError, match=r"adapt\.distill"):
        AdaptConfig(method="full", distill=1.0)
    with pytest.raises(TrainingError, match="stream"):
        run_config(AdaptConfig(method="lora"), replace(DATA, layout="stream"))
    with pytest.raises(TrainingError, match="segment"):
        replace(run_config(AdaptConfig()), compute=ComputeConfig(checkpointing="segment"))


def test_a_loss_that_is_not_finite_stops_the_run(base: Path, tmp_path: Path) -> None:
    trainer = Trainer(run_config(AdaptConfig(base=base)), tmp_path / "run")
    with torch.no_grad():
        trainer.model.memories()[1].layer.out_proj.weight.fill_(float("nan"))
    with pytest.raises(TrainingStopped, match=r"self_attn\.memory"):
        trainer.run()


def test_the_command_trains_a_graft_and_generates(base: Path, tmp_path: Path) -> None:
    given = ["--base", str(base), "--data.sources", "text", "--data.sequence-length", "32", "--data.batch-size", "2"]
    folder = ["--run-dir", str(tmp_path / "run"), "--schedule.steps", "2", "--monitor.validation-batches", "1"]
    parse(["graft", *given, *folder]).run()
    assert SavedModel(tmp_path / "run").load().graft_config.layers == (1,)
    state = tmp_path / "state.sdm"
    for _ in range(2):  # the second goes on where the first stopped
        Generate(tmp_path / "run", prompt="a ", max_new_tokens=3, state=state).run()
    assert state.is_file()
    with pytest.raises(TrainingError, match="--base FOLDER"):
        parse(["graft", *folder])
