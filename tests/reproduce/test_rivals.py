"""The study of rivals: models that cost about the same, one page from what was measured."""

from __future__ import annotations

import pytest

from reproduce.made import losses, outcome, study_results
from sdm.models import cost
from sdm.reproduce.forms import SEEDS, form_runs
from sdm.reproduce.rivals import CODE_FORMS, PAIRS, RECALL_FORMS, TASKS, rivals_study
from sdm.reproduce.run_study import study_page


def test_models_of_recall_cost_about_the_same() -> None:
    models = {form.label: TASKS["recall"].recipe(form.model, 3e-3, 0).model for form in RECALL_FORMS.values()}
    costs = {label: cost(model.build(576)) for label, model in models.items()}
    gdn = costs["GDN, 1x64"]
    for label, ours in costs.items():
        assert ours.flops_per_token(512).total == pytest.approx(gdn.flops_per_token(512).total, rel=0.12), label
        assert ours.parameters == pytest.approx(gdn.parameters, rel=0.06), label
    assert costs["SDM, N = 1,024"].state_elements == 16 * gdn.state_elements
    for model in models.values():
        assert (model.shift_keys, model.tie_query_initialization) == (True, True), "the aids are given to all"


def test_models_of_code_differ_in_their_global_layers_alone() -> None:
    configs = [TASKS["code"].recipe(form.model, 5e-3, 0) for form in CODE_FORMS.values()]
    assert len({config.schedule for config in configs}) == 1, "the same number of tokens for all"
    assert {config.model.build(1024).layer_types[1] for config in configs} == {"sdm", "gdn", "kda", "raven", "fwpkm"}


@pytest.mark.parametrize("task", TASKS)
def test_every_form_has_seeds_at_a_rate_inside_its_sweep(task: str) -> None:
    rates = sorted(TASKS[task].rates)
    for name, by_rate in form_runs(task, TASKS[task]).items():
        assert [lr for lr, variant in by_rate.items() if variant.seeds == SEEDS] == [TASKS[task].best[name]]
        assert TASKS[task].best[name] not in (rates[0], rates[-1]), "a sweep does not end at its edge"


def test_page() -> None:
    study, outcomes = rivals_study(), {}
    for place, variant in enumerate(study.variants()):
        for seed in range(variant.seeds):
            name = variant.run_name(seed)
            accuracy = {"accuracy": {"64": 0.9, "128": 0.8, str(PAIRS): 0.01 * place + seed / 1000}}
            if name.startswith("recall"):
                outcomes[name] = outcome(name, {"recall": accuracy, "choice": accuracy})
            else:
                outcomes[name] = losses(name, {f"code:{n}": (3.0 + 0.1 * place, 2.0) for n in range(3)})
    page = study_page(study, study_results(outcomes, study.variants()))
    recalled, code = page.findings
    _, accuracies, rates = recalled.tables
    assert [row[0] for row in accuracies.rows] == [form.label for form in RECALL_FORMS.values()]
    assert accuracies.rows[0][4:7] == ("90.0 ± 0.0%", "80.0 ± 0.0%", "1.1 ± 0.2%")
    assert [row[0] for row in code.tables[1].rows] == [form.label for form in CODE_FORMS.values()]
    assert rates.rows[0][-1] == "0.024 (edge)"
    assert recalled.verdict == code.verdict == "measured", "the paper has nothing to compare with"
    (state,) = recalled.illustrations
    assert {row[0] for row in state.rows} == {"SDM", "GDN", "KDA", "Raven", "FwPKM"}
