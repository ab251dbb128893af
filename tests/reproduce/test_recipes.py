"""Every recipe is a complete configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sdm.data import CorpusConfig, MADTaskConfig, MQARTaskConfig, RecallConfig
from sdm.errors import TrainingError
from sdm.models import cost, ladder
from sdm.models.cost import LEVELS
from sdm.reproduce.recipes.code import small_code
from sdm.reproduce.recipes.paper import paper_steps
from sdm.reproduce.recipes.registry import RECIPES, SHORT_NAMES, describe, recipe
from sdm.reproduce.recipes.tasks import recall
from sdm.run.config import TrainConfig
from sdm.run.config_file import from_json, to_json
from training.runs import MODEL


@pytest.mark.parametrize("name", [*RECIPES, *SHORT_NAMES])
def test_recipes_are_complete(name: str) -> None:
    config = recipe(name)
    assert from_json(TrainConfig, json.loads(json.dumps(to_json(config)))) == config
    assert describe(name)


@pytest.mark.parametrize("level", LEVELS)
def test_ladder_recipes_are_the_paper_s(level: int) -> None:
    config, row = recipe(f"ladder-{level}"), LEVELS[level]
    built, paper = config.model.build(128_256), ladder(level)
    assert cost(built) == cost(paper)
    assert config.optim.lr == row.learning_rate
    assert config.optim.betas == (0.9, 0.95)
    assert config.optim.clip == 1.0
    assert isinstance(config.data, CorpusConfig)
    tokens = config.schedule.steps * config.data.batch_size * config.data.sequence_length
    assert tokens == pytest.approx(row.tokens, rel=1e-3)
    assert config.data.batch_size * config.data.sequence_length == 2**21, "10 steps are the paper's 21M tokens"
    assert config.monitor.memory_tokens == 10 * 2**21


@pytest.mark.parametrize("layer", ["sdm", "gdn"])
def test_the_ladder_has_no_aids(layer: str) -> None:
    model = recipe("ladder", level=1, global_layer=layer).model
    assert not model.shift_keys
    assert not model.tie_query_initialization


def test_published_tasks_are_trained_as_published() -> None:
    mqar, mad, memorization = recipe("mqar"), recipe("mad-fuzzy-in-context-recall"), recipe("mad-memorization")
    assert mqar.data == MQARTaskConfig()
    assert mqar.schedule.steps == 32 * (390 + 4 * 78)
    assert mad.data == MADTaskConfig("fuzzy-in-context-recall")
    assert (mad.schedule.steps, memorization.schedule.steps) == (200 * 100, 200 * 2)
    assert mad.optim.lr * mad.schedule.final == pytest.approx(1e-6)
    assert isinstance(recipe("recall").data, RecallConfig)


def test_long_context_names_the_paper_s_budget() -> None:
    assert (paper_steps(8), paper_steps(13), paper_steps(8, batch_size=16)) == (30_518, 122_071, 1_908)
    with pytest.raises(TrainingError, match="level must be one of 8, 13"):
        paper_steps(6)
    docs = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    for text in ("4B and 16B\ntokens", "30,518 and 122,071 steps", f"{50 * 131_072 / 1e6:.1f}M tokens"):
        assert text in docs


def test_recall_models_are_equal() -> None:
    """SDM and GDN in parameters and FLOPs, not in state; attention in parameters."""
    costs = {kind: cost(recall(kind).model.build(576)) for kind in ("sdm", "gdn", "full_attention")}
    sizes = [one.parameters for one in costs.values()]
    assert max(sizes) / min(sizes) < 1.02
    flops = {kind: one.training_flops_per_token(768) // 3 for kind, one in costs.items()}
    assert max(flops["sdm"], flops["gdn"]) / min(flops["sdm"], flops["gdn"]) < 1.002
    assert costs["sdm"].state_elements == 64 * costs["gdn"].state_elements
    more = f"{flops['full_attention'] / flops['sdm'] - 1:.0%} more"
    root = Path(__file__).parents[2]
    for path in ("README.md", "docs/reproduce.md", "src/sdm/reproduce/recipes/tasks.py"):
        text = " ".join((root / path).read_text().split())
        assert more in text, path
        assert "full attention at equal parameters and FLOPs" not in text, path


def test_a_wider_key_of_recall_has_a_larger_state_and_equal_parameters() -> None:
    """Nearly equal FLOPs too; the widest has the state of SDM with 64 slots."""
    layouts = {key_dim: cost(recall("gdn", key_dim=key_dim).model.build(576)) for key_dim in (8, 16, 32, 64)}
    assert [one.state_elements for one in layouts.values()] == [1024, 2048, 4096, 8192]
    sizes = [one.parameters for one in layouts.values()]
    assert max(sizes) / min(sizes) < 1.005
    flops = [one.training_flops_per_token(768) for one in layouts.values()]
    assert max(flops) / min(flops) < 1.065
    assert cost(recall("sdm", num_slots=64).model.build(576)).state_elements == 8192


@pytest.mark.parametrize("aided", [True, False])
def test_pair_differs_in_its_global_layer_alone(aided: bool) -> None:
    """The proportions are the paper's: W = R = d_qk, keys half as wide as heads."""
    configs = {kind: small_code(kind, aided=aided).model.build(1024) for kind in ("sdm", "gdn")}
    sdm, gdn = map(cost, configs.values())
    assert max(sdm.parameters, gdn.parameters) / min(sdm.parameters, gdn.parameters) < 1.003
    flops = [one.training_flops_per_token(2048) for one in (sdm, gdn)]
    assert max(flops) / min(flops) < 1.001
    config = configs["gdn"]
    assert config.num_writes == config.num_reads == config.recurrent_key_dim == config.head_dim // 2 == 16


def test_model_of_the_tests_is_small() -> None:
    assert cost(MODEL.build(12)).parameters < 10_000
