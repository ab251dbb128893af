"""The studies of RULER, facts and heads: what is compared, what is said about it, and a tiny version end to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reproduce.made import outcome, study_results
from sdm.data import FactsConfig, RetrievalConfig
from sdm.evaluation.recall import Recall
from sdm.evaluation.ruler.measurement import Ruler
from sdm.reproduce import facts as facts_module
from sdm.reproduce import heads as heads_module
from sdm.reproduce import ruler as ruler_module
from sdm.reproduce.facts import COUNTS, LEARNED, MODELS, NULL, WIDE, facts_study
from sdm.reproduce.heads import FORMS, heads_study
from sdm.reproduce.recipes.tasks import facts, retrieval
from sdm.reproduce.ruler import GDN_BEST, GDN_LAYOUTS, GDN_RATES, SHORT, TASKS, Experiment, Lengths, ruler_study
from sdm.reproduce.run_study import run_study, study_page
from sdm.reproduce.study import Study, Variant


def ruler_summary(accuracy: float, lengths: tuple[int, ...], tasks: tuple[str, ...] = TASKS) -> dict[str, Any]:
    cells = {str(length): {"accuracy": accuracy, "low": 0.0, "high": 1.0, "samples": 10} for length in lengths}
    return {"tasks": {task: {"lengths": cells, "accuracy": accuracy, "comparable": False} for task in tasks}}


def test_models_of_ruler_differ_in_their_global_layer() -> None:
    models = ruler_module.models()
    configs = {name: variant.recipe(0) for name, variant in models.items()}
    assert {config.data for config in configs.values() if config.data.start_length == 128} == {RetrievalConfig()}
    for name in ("sdm", "gdn"):
        model = configs[name].model
        assert (model.shift_keys, model.tie_query_initialization, model.largest_decay_rate) == (True, True, 0.16)
        assert model.short_convolution == 0
    assert not configs["full_attention"].model.shift_keys, "attention gets no aid"
    assert configs["full_attention"].schedule.steps > configs["sdm"].schedule.steps
    assert retrieval("sdm", seed=1).data.seed == 1
    sizes = {name: variant.cost()[0] for name, variant in models.items()}
    assert sizes["sdm"].parameters <= 1.01 * sizes["gdn"].parameters, "GDN has at least SDM's parameters"
    assert sizes["sdm"].state_elements > 8 * sizes["gdn"].state_elements


def test_the_sweep_of_gdn_does_not_see_ruler() -> None:
    study = ruler_study()
    sweep = study.groups["GDN's layouts and rates"]
    assert len(sweep) == len(GDN_LAYOUTS) * len(GDN_RATES)
    measured = [variant for variant in sweep if variant.measurements]
    assert [variant.label for variant in measured] == [f"GDN, {GDN_BEST[0][0]}x{GDN_BEST[0][1]}"]
    assert measured[0].seeds == 3
    assert all(isinstance(kind, Ruler) and kind.seed == 43 for kind in measured[0].measurements.values())


def test_page_of_ruler() -> None:
    models = ruler_module.models()
    outcomes = {}
    for name, near, far in (("sdm", 0.95, 0.7), ("gdn", 0.5, 0.1)):
        for seed in range(3):
            summaries = {
                "ruler": ruler_summary(near, (512, 2048)),
                "ruler-far": ruler_summary(far + seed / 100, (8192,)),
            }
            run = models[name].run_name(seed)
            outcomes[run] = outcome(run, summaries, valid_loss=0.5)
    study = ruler_study()
    page = study_page(study, study_results(outcomes, study.variants()))
    ruler, sweep, wide = page.findings
    assert wide.verdict == "missing"
    claims, targets, sdm, gdn = ruler.tables
    assert [row[-1] for row in targets.rows] == ["reached", "reached", "missed", "missed"]
    assert sdm.columns[1] == f"{SHORT.trained} (trained)"
    assert sdm.rows[0][1:3] == ("95.0 ± 0.0%", "95.0 ± 0.0%")
    assert gdn.title == "RULER: GDN, 2x64"
    assert [row[-1] for row in claims.rows] == ["agrees"] * 3 + ["missing"] * 3
    assert "SDM - GDN, 2x64, accuracy on multikey_1 at 512 tokens (points)" in claims.rows[0][0]
    assert f"best of 1 of 12: 2x64 at {GDN_BEST[1]:g}" in sweep.found
    assert ruler.illustrations


def test_models_of_facts() -> None:
    sizes = {name: group[2048].cost()[0] for name, group in facts_module.variants().items()}
    learned, null, wide = (sizes[name] for name in (LEARNED, NULL, WIDE))
    assert learned.parameters == null.parameters
    assert learned.training_flops_per_token(96) == null.training_flops_per_token(96)
    assert wide.parameters - null.parameters == pytest.approx(learned.initial_state_parameters, rel=0.01)
    assert sizes["gdn-learned"].initial_state_parameters == sizes["gdn-learned"].state_elements
    assert sizes["gdn-null"].parameters == pytest.approx(null.parameters, rel=0.03)
    assert facts(num_facts=512, seed=2).data == FactsConfig(num_facts=512, seed=2)


def test_page_of_facts() -> None:
    shares = {LEARNED: 0.95, NULL: 0.4, WIDE: 0.6, "gdn-learned": 0.3, "gdn-null": 0.3}
    outcomes = {}
    for name, group in facts_module.variants().items():
        for count, variant in group.items():
            for seed in range(3):
                share = 1.0 if count < 2048 else shares[name] + seed / 100
                run = variant.run_name(seed)
                outcomes[run] = outcome(run, {"facts": {"accuracy": {str(count): share}}})
    study = facts_study()
    (finding,) = study_page(study, study_results(outcomes, study.variants())).findings
    assert finding.verdict == "agrees"
    assert "at 2,048 facts, where null M0 knows 41%, learned M0 knows 96% (target 90%: reached)" in finding.found
    table, capacity = finding.tables[1:]
    assert table.columns == ("model", *(f"F = {count:,}" for count in COUNTS))
    assert table.rows[1][0] == MODELS[NULL][0]
    assert capacity.rows[0][4] == f"{0.96 * COUNTS[-1]:,.0f}"


def test_forms_of_heads() -> None:
    sizes = {name: rates[3e-3].cost()[0] for name, rates in heads_module.variants("recall", (3e-3,)).items()}
    equal = [name for name in FORMS if name != "one-large"]
    assert len({sizes[name].state_elements for name in equal}) == 1
    assert FORMS["one-more"].accesses == FORMS["four"].heads * FORMS["four"].accesses
    assert FORMS["four-fewer"].heads * FORMS["four-fewer"].accesses == FORMS["one"].accesses
    large, four = sizes["one-large"], sizes["four"]
    assert large.training_flops_per_token(768) == pytest.approx(four.training_flops_per_token(768), rel=0.01)
    assert large.parameters == pytest.approx(four.parameters, rel=0.01)


def test_page_of_heads() -> None:
    accuracy = {"one": 0.3, "one-more": 0.35, "four": 0.85, "four-fewer": 0.8, "one-large": 0.99}
    outcomes = {}
    for name, rates in heads_module.variants("recall", (1.5e-3, 3e-3)).items():
        for lr, variant in rates.items():
            for seed in range(3):
                value = accuracy[name] + seed / 100 - (0.1 if lr < 3e-3 else 0.0)
                run, found = variant.run_name(seed), {"accuracy": {"256": value}}
                outcomes[run] = outcome(run, {"recall": found, "choice": found})
    study = heads_study((1.5e-3, 3e-3))
    recall, rebinding = study_page(study, study_results(outcomes, study.variants())).findings
    assert recall.tables[1].rows[0][-2:] == ("31.0 ± 2.5%", "0.003 (edge)")
    assert [row[-1] for row in recall.tables[0].rows] == ["agrees"] * 4
    assert rebinding.verdict == "missing"


def small(variant: Variant, **data: Any) -> Variant:
    """Two steps on few short rows."""
    config = variant.recipe(0)
    data = {"batch_size": 2, **data}
    short = replace(
        config, data=replace(config.data, **data), schedule=replace(config.schedule, steps=2, warmup=0, decay=1)
    )
    return replace(variant, recipe=lambda seed: replace(short, seed=seed), seeds=1)


def run_twice(study: Study, folder: Path) -> None:
    """The second time nothing is left to do."""
    for _ in range(2):
        report = run_study(study, folder, 1)
        report.check()
    assert f"{report.runs} of {report.runs} runs are finished" in report.page.lead


@pytest.mark.slow
def test_ruler_from_rows_to_the_figure(tmp_path: Path) -> None:
    tiny = Experiment(512, TASKS[:3], {"ruler": Lengths((512,), TASKS[:3])})
    models = {
        name: replace(small(ruler_module.models()[name], num_sentences=3000), measurements=tiny.measurements(1))
        for name in ("sdm", "gdn")
    }
    section = ruler_module.ruler_section("ruler", "RULER", tiny, models)
    run_twice(Study("ruler", "RULER", "", {"models": [models["sdm"], models["gdn"]]}, (section,)), tmp_path)
    assert (tmp_path / "figures" / "ruler.png").is_file()


@pytest.mark.slow
def test_facts_from_rows_to_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "COUNTS", (64,))
    curves = {name: {64: small(group[64])} for name, group in facts_module.variants().items()}
    assert all(isinstance(kind, Recall) for kind in facts_module.MEASUREMENTS.values())
    groups = {"facts": [variant for group in curves.values() for variant in group.values()]}
    run_twice(Study("facts", "Facts", "", groups, (facts_module._section(curves),)), tmp_path)
    assert (tmp_path / "figures" / "facts.png").is_file()
