"""Configurations: invalid values and combinations are refused by name."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdm.data.config import open_data
from sdm.errors import TrainingError, UserError
from sdm.models import SDMForCausalLM
from sdm.models.configuration import model_fields
from sdm.models.model_config import ModelConfig
from sdm.run.config import (
    ComputeConfig,
    OptimConfig,
    ScheduleConfig,
    TrainConfig,
)
from sdm.run.config_file import differences, from_json, read_config, to_json, write_config
from sdm.training import Trainer
from training.runs import recall_run, text_run


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimConfig(lr=-1), "optim.lr"),
        (lambda: OptimConfig(betas=(0.9, 1.0)), "optim.betas"),
        (lambda: ScheduleConfig(steps=10, warmup=8, decay=5), "schedule.warmup"),
        (lambda: ComputeConfig(accumulation=0), "compute.accumulation"),
        (lambda: recall_run(compute=ComputeConfig(accumulation=3)), "data.batch_size"),
        (lambda: ModelConfig(num_slots=5), "num_slots must be a perfect square"),
        (lambda: ModelConfig(hidden_size=0), "hidden_size"),
        (lambda: recall_run(model=ModelConfig(vocab_size=4)).model.build(12), "does not match the model"),
        (lambda: TrainConfig(seed=-1), "seed"),
        (lambda: TrainConfig(seed=2**64), "seed"),
    ],
)
def test_impossible_values_name_the_field(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize("device", ["cuda", "cuda:9", "foo", "meta"])
def test_devices_that_are_not_there(tmp_path: Path, device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("it is there")
    with pytest.raises(TrainingError, match=rf"compute.device = '{device}' cannot be used here: "):
        Trainer(recall_run(compute=ComputeConfig(device=device)), tmp_path)


def test_combinations_that_cannot_work(tmp_path: Path) -> None:
    segment = ComputeConfig(checkpointing="segment")
    with pytest.raises(TrainingError, match="packed"):
        text_run(tmp_path, "packed", compute=segment)
    attention = ModelConfig(hidden_size=16, num_hidden_layers=1, layer_types=("full_attention",))
    with pytest.raises(TrainingError, match="full_attention"):
        text_run(tmp_path, "rows", compute=segment, model=attention)
    with pytest.raises(TrainingError, match="full_attention"):
        text_run(tmp_path, "stream", model=attention)
    with pytest.raises(TrainingError, match='got "block"'):
        text_run(tmp_path, "stream", compute=ComputeConfig(checkpointing="block"))


def test_model_fields_are_those_of_the_model() -> None:
    """Same names, same defaults; sizes aside, which are a laptop's."""
    own, of_a_run = model_fields(), {field.name: field for field in dataclasses.fields(ModelConfig())}
    ids = {"pad_token_id", "bos_token_id", "eos_token_id"}
    assert of_a_run.keys() == own.keys() - ids - {"hidden_act", "use_cache"}
    for name in of_a_run.keys() - {"vocab_size", "hidden_size", "num_hidden_layers", "global_layer"}:
        assert of_a_run[name].default == own[name].default, name
    config = ModelConfig(hidden_size=16, rope_parameters={"rope_theta": 1e4}, rms_norm_eps=1e-5).build(11)
    assert isinstance(SDMForCausalLM(config), SDMForCausalLM)
    assert config.rope_parameters["rope_theta"] == 1e4
    assert ModelConfig.of(config).build(11).to_dict() == config.to_dict()


def test_configuration_file(tmp_path: Path) -> None:
    for config in (recall_run(), text_run(tmp_path), replace(recall_run(), init_from=tmp_path)):
        write_config(tmp_path / "config.json", config)
        assert read_config(tmp_path / "config.json") == config
    values = to_json(recall_run())
    values["optim"]["learning_rate"] = 1
    with pytest.raises(TrainingError, match=r"config.optim has no field 'learning_rate'"):
        from_json(TrainConfig, values)
    values = to_json(recall_run())
    values["data"]["kind"] = "OtherConfig"
    with pytest.raises(TrainingError, match=r"config.data.kind must be one of CorpusConfig, .*'OtherConfig'"):
        from_json(TrainConfig, values)
    other = replace(recall_run(), seed=3)
    assert differences(to_json(recall_run()), to_json(other)) == [("seed", 0, 3)]
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(TrainingError, match="damaged"):
        read_config(tmp_path / "config.json")


def test_a_run_with_its_warmup_written_out_is_continued(tmp_path: Path) -> None:
    """As the versions did that derived the decay alone."""
    open_one = recall_run(schedule=ScheduleConfig(steps=40))
    trainer = Trainer(recall_run(schedule=ScheduleConfig(steps=40, warmup=2)), tmp_path)
    trainer.train_step()
    trainer.save()
    trainer.close()
    Trainer(open_one, tmp_path).close()
    with pytest.raises(TrainingError, match=r"schedule.warmup was 2 and is 3"):
        Trainer(recall_run(schedule=ScheduleConfig(steps=40, warmup=3)), tmp_path)


def test_sizes_of_data_are_known_before_its_text_is_read(tmp_path: Path) -> None:
    """A task says them; of text the vocabulary is the model's, or a guess."""
    task = recall_run()
    opened = open_data(task.data, "train", task.schedule.steps)
    assert task.data_sizes() == (opened.sequence_length, opened.vocab_size)
    text = text_run(tmp_path)
    missing = replace(text, data=replace(text.data, sources=(str(tmp_path / "nowhere"),)))
    assert missing.data_sizes() == (32, 1024)
    known = replace(missing, model=replace(missing.model, vocab_size=300))
    assert known.data_sizes() == (32, 300)
    trained = replace(missing, data=replace(missing.data, tokenizer="bpe:777"))
    assert trained.data_sizes() == (32, 777), "the size of a tokenizer that is trained is known before"
