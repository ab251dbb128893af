"""Schedule and optimizer groups."""

from __future__ import annotations

from typing import Any

import pytest

from sdm.run.config import (
    OptimConfig,
    ScheduleConfig,
)
from sdm.training.optimizer import learning_rate_factor, make_optimizer, set_learning_rate
from tiny_models import tiny_model


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
