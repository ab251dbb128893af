"""Schedule, optimizer groups, guards, pre-flight, configuration."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdm.data import open_data
from sdm.errors import UserError
from sdm.models import SDMForCausalLM, cost
from sdm.models.configuration import model_fields
from sdm.models.model_config import ModelConfig
from sdm.run.config import (
    CheckpointConfig,
    ComputeConfig,
    GuardConfig,
    MonitorConfig,
    OptimConfig,
    ScheduleConfig,
    TrainConfig,
)
from sdm.run.config_file import differences, from_json, read_config, to_json, write_config
from sdm.run.errors import TrainingError, TrainingStopped
from sdm.run.mesh import Mesh
from sdm.training import Trainer, calibration, preflight
from sdm.training.guards import Guard
from sdm.training.optimizer import make_optimizer, set_learning_rate
from sdm.training.schedule import learning_rate_factor
from tiny_models import tiny_model
from training.runs import MODEL, assert_same, recall_run, text_run, train


@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
def test_warmup_stable_decay(shape: Any) -> None:
    schedule = ScheduleConfig(steps=100, warmup=10, decay=20, shape=shape, final=0.1)
    factors = [learning_rate_factor(schedule, step) for step in range(100)]
    assert factors[0] == 0.1
    assert factors[9:81] == [1.0] * 72
    assert factors[80:] == sorted(factors[80:], reverse=True)
    assert 0.1 < factors[-1] < 0.2
    assert all(factor > 0 for factor in factors)


def test_warmup_and_decay_are_shares_of_the_steps_unless_given() -> None:
    assert ScheduleConfig(steps=60).resolved() == ScheduleConfig(steps=60, warmup=3, decay=12)
    assert ScheduleConfig(steps=1).resolved() == ScheduleConfig(steps=1, warmup=0, decay=0)
    assert ScheduleConfig(steps=600, warmup=50, decay=240).scaled(60) == ScheduleConfig(steps=60, warmup=5, decay=24)
    assert ScheduleConfig(steps=600).scaled(60) == ScheduleConfig(steps=60)


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


def test_optimizer_groups() -> None:
    model = tiny_model("all_recurrent", gdn_learned_initial_state=True)
    optimizer = make_optimizer(model, OptimConfig(lr=1e-2, weight_decay=0.3, initial_state_lr=5e-2))
    groups = {group["name"]: group for group in optimizer.param_groups}
    names = {id(x): name for name, x in model.named_parameters()}
    members = {name: {names[id(x)] for x in group["params"]} for name, group in groups.items()}
    assert groups["decayed"]["weight_decay"] == 0.3
    assert groups["exempt"]["weight_decay"] == groups["initial_state"]["weight_decay"] == 0.0
    assert groups["initial_state"]["lr"] == 5e-2
    assert sum(map(len, members.values())) == len(names)
    assert all(name.endswith("initial_state") for name in members["initial_state"])
    for part in ("norm", "decay_log_rate", "decay_bias", "beta_proj", "decay_proj"):
        assert not any(part in name for name in members["decayed"]), part
    assert any("value_proj" in name for name in members["decayed"])
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [5e-3, 5e-3, 2.5e-2]


def test_guard_stops_at_what_is_not_finite() -> None:
    model = tiny_model()
    for x in model.parameters():
        x.grad = torch.zeros_like(x)
    model.model.layers[1].mlp.up_proj.weight.grad[0, 0] = math.nan
    with pytest.raises(TrainingStopped, match=r"step 5: .*nan.*layers.1.mlp.up_proj.weight\. ask"):
        Guard(GuardConfig()).check(5, 1.0, math.nan, model, lambda: "ask")
    model.model.norm.weight.data[0] = math.inf
    with pytest.raises(TrainingStopped, match=r"Weights that are not finite: model.norm.weight"):
        Guard(GuardConfig()).check(5, math.inf, 1.0, model, lambda: "ask")


def test_guard_stops_at_a_lasting_spike_only() -> None:
    guard, model = Guard(GuardConfig(patience=3)), torch.nn.Linear(1, 1)
    for step in range(40):
        guard.check(step, 2.0 + 0.1 * (step % 3), 1.0, model, str)
    for _ in range(5):
        guard.check(40, 9.0, 1.0, model, str)
        guard.check(41, 2.0, 1.0, model, str)
    again = Guard(guard.config)
    again.take(json.loads(json.dumps(guard.note())), {})
    for one in (guard, again):
        one.check(42, 9.0, 1.0, model, str)
        one.check(43, 9.0, 1.0, model, str)
        with pytest.raises(TrainingStopped, match=r"for 3 steps and is 9\.000"):
            one.check(44, 9.0, 1.0, model, str)


def test_a_run_with_nan_stops_with_good_weights(tmp_path: Path) -> None:
    trainer = Trainer(recall_run(), tmp_path)
    for _ in range(3):
        trainer.train_step()
    trainer.save()
    before = trainer.model.lm_head.weight.detach().clone()
    trainer.model.model.layers[0].mlp.up_proj.weight.register_hook(lambda grad: grad * math.nan)
    named = r"gradients that are not: model.layers.0.mlp.up_proj.weight\. The last good checkpoint is .*step-00000003;"
    with pytest.raises(TrainingStopped, match=named):
        trainer.train_step()
    assert torch.equal(trainer.model.lm_head.weight, before)
    trainer.close()


@pytest.mark.parametrize("every", [1, 1000])
@pytest.mark.parametrize("kind", ["gdn", "sdm", "mamba2"])
def test_ops_that_refuse_what_is_not_finite(tmp_path: Path, kind: str, every: int) -> None:
    """They see it before the loss is known, in training or in validation; the diagnosis is the same."""
    model = replace(MODEL, layer_types=("token_shift", kind))
    monitor = MonitorConfig(display="none", validate_every=every, validation_batches=1)
    trainer = Trainer(recall_run(model=model, monitor=monitor), tmp_path)
    trainer.train_step()
    trainer.save()

    def overflow(*arguments: Any) -> None:
        with torch.no_grad():
            trainer.model.model.layers[1].mixer.decay_bias.fill_(math.nan)

    hook = trainer.optimizer.register_step_post_hook(overflow)
    with pytest.raises(TrainingStopped, match=r"step [23].*not finite: model.layers.1.mixer.*step-00000001; a lower"):
        trainer.run()
    hook.remove()
    assert trainer.store.steps() == [1]


def test_what_is_not_finite_is_found_between_finite_weights(tmp_path: Path) -> None:
    trainer = Trainer(recall_run(model=replace(MODEL, layer_types=("token_shift", "gdn"))), tmp_path)
    with torch.no_grad():
        trainer.model.model.layers[1].mixer.decay_proj.weight.fill_(3e38)
    found = r"step 1: log_decay .*nan\. The weights are finite; the output of model.layers.1.mixer.decay_proj is not"
    with pytest.raises(TrainingStopped, match=found):
        trainer.run()
    again = Trainer(recall_run(), tmp_path / "other")
    again._loss = lambda *arguments: torch.zeros(2) @ torch.zeros(3)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        again.run()


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    trainer = Trainer(recall_run(), tmp_path)
    trainer.train_step()
    trainer.save()
    trainer.step += 1
    trainer.model.lm_head.weight.data[0] = math.inf
    with pytest.raises(TrainingStopped, match=r"step 2 is not saved.*lm_head.weight.*step-00000001"):
        trainer.save()
    assert trainer.store.steps() == [1]
    trainer.close()


def test_diverged_weights_do_not_push_out_good_ones(tmp_path: Path) -> None:
    """The advice names the last checkpoint from before the spikes."""
    config = recall_run(
        schedule=ScheduleConfig(steps=100, warmup=2),
        checkpoint=CheckpointConfig(every=2, keep=2),
        guard=GuardConfig(patience=7),
    )
    trainer = Trainer(config, tmp_path)

    def diverge(batch: Any, num_targets: int, place: int) -> torch.Tensor:
        return loss(batch, num_targets, place) * (100 if trainer.step >= 30 else 1)

    loss = trainer._loss
    trainer._loss = diverge  # type: ignore[method-assign]
    with pytest.raises(TrainingStopped, match=r"for 7 steps .* last good checkpoint is .*step-00000030;"):
        trainer.run()
    assert trainer.store.steps() == [28, 30, 32, 34, 36]


def test_preflight_refuses_what_cannot_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = recall_run(model=ModelConfig(hidden_size=4096, num_hidden_layers=400))
    with pytest.raises(TrainingError, match=r"needs about \d+.* GB .*Lower data.batch_size"):
        Trainer(large, tmp_path)
    monkeypatch.setattr(preflight, "available_memory", lambda device: 1e6)
    with pytest.raises(TrainingError, match="free memory"):
        Trainer(recall_run(), tmp_path / "small")
    Trainer(recall_run(guard=GuardConfig(check_memory=False)), tmp_path / "forced").close()


@pytest.mark.parametrize("layout", ["recall", "packed", "rows", "stream"])
def test_the_time_is_said_before_a_run_and_changes_nothing(
    tmp_path: Path, layout: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recall_run() if layout == "recall" else text_run(tmp_path, layout)
    config = replace(config, model=replace(config.model, normalize_scores=True))
    expected = train(config, tmp_path / "silent")
    for flops in (1e11, 1.0):  # whole pieces, and cut ones
        monkeypatch.setattr(calibration, "FLOPS", flops)
        folder = tmp_path / f"said-{flops}"
        assert_same(train(replace(config, monitor=replace(config.monitor, display="plain")), folder), expected)
        assert re.search(r"about \d+ seconds for 8 steps", capsys.readouterr().out)


def test_durations_in_words() -> None:
    seconds = [0.2, 45, 150, 5900, 7200, 86400 * 3, 86400 * 365 * 20]
    words = ["1 seconds", "45 seconds", "2.5 minutes", "1.6 hours", "2 hours", "3 days", "7,300 days"]
    assert [calibration.about(value) for value in seconds] == [f"about {value}" for value in words]


def test_preflight_knows_what_checkpointing_saves(tmp_path: Path) -> None:
    def activations(mode: Any) -> float:
        config = text_run(tmp_path, "rows", compute=ComputeConfig(checkpointing=mode, segment_length=8))
        data = open_data(config.data)
        return preflight.estimate(config, config.model.build(257), data, torch.device("cpu")).activations

    assert activations("segment") < activations("block") < activations("none")


def test_preflight_knows_what_ranks_share(tmp_path: Path) -> None:
    """A run that fits on a mesh is not refused for what one process would need."""
    config = text_run(tmp_path, "rows")
    data, model = open_data(config.data), config.model.build(257)

    def needs(**degrees: int) -> preflight.Estimate:
        return preflight.estimate(config, model, data, torch.device("cpu"), Mesh(**degrees))

    costs, one = cost(model), needs()
    logits = 4 * 3 * (model.loss_chunk_size or 0) * model.vocab_size
    assert needs(context=4).activations - logits == pytest.approx((one.activations - logits) / 4)
    assert needs(context=4).weights == one.weights / 4
    assert one.weights - needs(channel=2).weights == 16 * costs.initial_state_parameters / 2
    tables = 16 * data.batch_size * costs.state_elements
    assert one.activations - needs(channel=2).activations == pytest.approx(tables / 2)


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
