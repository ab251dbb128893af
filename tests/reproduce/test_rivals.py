"""The study of rivals: models that cost about the same, one page from what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reproduce.made import losses, outcome, study_results
from sdm.models import cost
from sdm.reproduce.rivals import CODE_RATES, LABELS, PAIRS, RATES, RECALL, code_variants, recall_forms, rivals_study
from sdm.reproduce.run_study import study_page


def test_models_of_recall_cost_about_the_same() -> None:
    forms = recall_forms(RATES, 450, 1)
    models = {label: rates[RATES[0]].recipe(0).model for group in forms.values() for label, rates in group.items()}
    costs = {label: cost(model.build(576)) for label, model in models.items()}
    gdn = costs["GDN, 1x64"]
    for label, ours in costs.items():
        assert ours.flops_per_token(512).total == pytest.approx(gdn.flops_per_token(512).total, rel=0.12), label
        assert ours.parameters == pytest.approx(gdn.parameters, rel=0.06), label
    assert costs["SDM, N = 1,024"].state_elements == 16 * gdn.state_elements
    for model in models.values():
        assert (model.shift_keys, model.tie_query_initialization) == (True, True), "the aids are given to all"


def test_models_of_code_differ_in_their_global_layers_alone() -> None:
    variants = code_variants(CODE_RATES, 2)
    assert len(variants) == len(LABELS) * len(CODE_RATES)
    steps = {variant.recipe(0).schedule.steps for variant in variants}
    assert len(steps) == 1, "the same number of tokens for all"
    kinds = {variant.recipe(0).model.build(1024).layer_types[1] for variant in variants}
    assert kinds == set(LABELS)


def test_runs_and_page() -> None:
    every = rivals_study(seeds=1)
    assert len(every.runs()) == sum(map(len, RECALL.values())) * len(RATES) + len(LABELS) * len(CODE_RATES)
    study = rivals_study(seeds=1, rates=(3e-3,), code_rates=(5e-3,), every_form=False)
    outcomes = {}
    for place, variant in enumerate(study.variants()):
        name = variant.run_name(0)
        accuracy = {"accuracy": {"64": 0.9, "128": 0.8, str(PAIRS): 0.1 * place}}
        if name.startswith("recall"):
            outcomes[name] = outcome(name, {"recall": accuracy, "choice": accuracy})
        else:
            made = losses(name, {f"code:{n}": (3.0 + 0.1 * place, 2.0) for n in range(3)})
            outcomes[name] = replace(made, results={**made.results, "valid": made.results["position"]})
    page = study_page(study, study_results(outcomes, study.variants()))
    recalled, code = page.findings
    assert [row[0] for row in recalled.tables[0].rows] == [
        *("SDM, N = 1,024", "GDN, 1x64", "KDA, 1x64", "Raven, M = 64", "FwPKM, N = 1,024")
    ]
    assert recalled.verdict == code.verdict == "measured", "the paper has nothing to compare with"
    assert len(code.tables[0].rows) == len(LABELS)
