"""The study of `sdm reproduce ruler`: what is compared, what is said about it, and a tiny version end to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reproduce.made import outcome, run_twice, small, study_results
from sdm.data import RetrievalConfig
from sdm.evaluation.ruler.measurement import Ruler
from sdm.reproduce import ruler as ruler_module
from sdm.reproduce.recipes.tasks import retrieval
from sdm.reproduce.ruler import DENSE, LAYOUTS, RATES, TASKS, Experiment, Lengths, ruler_study
from sdm.reproduce.run_study import study_page
from sdm.reproduce.study import Study


def ruler_summary(accuracy: float, lengths: tuple[int, ...], tasks: tuple[str, ...] = TASKS) -> dict[str, Any]:
    cells = {str(length): {"accuracy": accuracy, "low": 0.0, "high": 1.0, "samples": 10} for length in lengths}
    return {"tasks": {task: {"lengths": cells, "accuracy": accuracy, "comparable": False} for task in tasks}}


def test_models_of_ruler_differ_in_their_global_layer() -> None:
    models = ruler_module.models()
    configs = {name: variant.recipe(0) for name, variant in models.items()}
    rows = RetrievalConfig(dense=0.3)
    assert {config.data for config in configs.values()} == {rows, replace(rows, start_length=64)}
    assert configs["sdm"].data == configs["gdn"].data == rows
    for name in ("sdm", "gdn"):
        model = configs[name].model
        assert (model.shift_keys, model.tie_query_initialization, model.largest_decay_rate) == (True, True, 0.016)
        assert model.short_convolution == 0
    assert not configs["full_attention"].model.shift_keys, "attention gets no aid"
    assert configs["sdm"].schedule == configs["gdn"].schedule
    for name in ("sdm-64", "sdm-4096"):
        assert replace(configs[name].model, num_slots=1024) == configs["sdm"].model
    assert retrieval("sdm", seed=1).data.seed == 1
    sizes = {name: variant.cost()[0] for name, variant in models.items()}
    assert sizes["sdm"].parameters <= 1.01 * sizes["gdn"].parameters, "GDN has at least SDM's parameters"
    assert sizes["sdm-4096"].flops_per_token(512).total <= sizes["gdn"].flops_per_token(512).total
    assert sizes["sdm"].state_elements >= 8 * sizes["gdn"].state_elements


def test_models_with_numbers_in_pairs_differ_in_nothing_else() -> None:
    compared, pairs = ruler_module.models(), ruler_module.pairs_models()
    for name, variant in pairs.items():
        ours = compared[name].recipe(1)
        assert variant.recipe(1) == replace(ours, data=replace(ours.data, digits=2, tokenizer="bpe:1152"))


def test_the_sweeps_do_not_see_ruler() -> None:
    sweep = ruler_study().groups["rates"]
    assert len(sweep) == len(LAYOUTS) * len(RATES)
    assert len({variant.name for variant in sweep}) == len(sweep)
    assert not any(variant.measurements for variant in sweep)
    compared = [kind for kind in ruler_module.models()["sdm"].measurements.values() if isinstance(kind, Ruler)]
    assert {kind.seed for kind in compared} == {45}, "nobody looked at these before"


def test_the_decay_is_chosen_on_rows_of_the_generator() -> None:
    models = ruler_module.decay_models(ruler_module.models())
    for name in ("sdm", "gdn"):
        slow, fast = models[name], models[f"{name}-fast"]
        assert [list(kind.measurements) for kind in (fast,)] == [["choice"]], "RULER decides nothing"
        assert slow.measurements["choice"] == fast.measurements["choice"]
        ours, theirs = slow.recipe(2), fast.recipe(2)
        assert replace(ours, model=replace(ours.model, largest_decay_rate=0.16)) == theirs


def test_page_of_ruler() -> None:
    models = ruler_module.models()
    outcomes = {}
    for name, near, far in (("sdm", 0.95, 0.7), ("gdn", 0.5, 0.1)):
        for seed in range(3):
            summaries = {
                "ruler": ruler_summary(near, (512, 2048)),
                "ruler-far": ruler_summary(far + seed / 100, (8192,)),
                "ruler-dense": ruler_summary(far, (512, 1024, 2048, 4096), (DENSE,)),
                "ruler-dense-far": ruler_summary(far, (8192,), (DENSE,)),
                "choice": {"accuracy": {"512": near, "8192": far}},
            }
            run = models[name].run_name(seed)
            outcomes[run] = outcome(run, summaries, valid_loss=0.5)
    study = ruler_study()
    page = study_page(study, study_results(outcomes, study.variants()))
    ruler, sweep, decay, pairs, wide = page.findings
    assert {sweep.verdict, pairs.verdict, wide.verdict} == {"missing"}
    assert decay.tables[0].rows[1] == ("SDM", "0.016", "3", "95.0 ± 0.0%", "70.0 ± 0.0%", "70% 70% 70%")
    claims, targets, accuracies, costs = ruler.tables
    assert [row[-1] for row in targets.rows] == ["reached", "reached", "missed", "missed"]
    assert accuracies.columns == ("task, tokens", "SDM (3 seeds)", "GDN, 1x128 (3 seeds)")
    assert accuracies.rows[0] == ("single_1, 512 (trained)", "95.0 ± 0.0%", "50.0 ± 0.0%")
    assert accuracies.rows[-1] == ("multikey_2, 8,192", "70.0 ± 0.0%", "10.0 ± 0.0%")
    assert [row[1] for row in costs.rows[:3]] == ["0.500 ± 0.000", "0.500 ± 0.000", "missing"]
    assert [row[-1] for row in claims.rows] == ["agrees"] * 6 + ["missing"] * (6 + 4)
    assert "SDM - GDN, 1x128, accuracy on multikey_1 at 512 tokens (points)" in claims.rows[0][0]
    assert ruler.illustrations


@pytest.mark.slow
def test_ruler_from_rows_to_the_figure(tmp_path: Path) -> None:
    tiny = Experiment(512, TASKS[:3], {"ruler": Lengths((512,), TASKS[:3])}, (((TASKS[2],), 512),))
    models = {
        name: replace(small(ruler_module.models()[name], num_sentences=3000), measurements=tiny.measurements(1))
        for name in ("sdm", "gdn")
    }
    section = ruler_module.ruler_section("ruler", "RULER", tiny, models)
    run_twice(Study("ruler", "RULER", "", {"models": [models["sdm"], models["gdn"]]}, (section,)), tmp_path)
    assert (tmp_path / "figures" / "ruler.png").is_file()
