"""The study of `sdm reproduce heads`: what is compared, and what is said about it."""

from __future__ import annotations

import pytest

from reproduce.made import outcome, study_results
from sdm.reproduce.forms import form_runs
from sdm.reproduce.heads import FORMS, TASKS, heads_study
from sdm.reproduce.run_study import study_page


@pytest.mark.parametrize("task", TASKS)
def test_forms_of_heads(task: str) -> None:
    runs = form_runs(task, TASKS[task])
    sizes = {form: by_rate[TASKS[task].best[form]].cost() for form, by_rate in runs.items()}
    equal = [form for form in FORMS if form != "one-large"]
    assert len({sizes[form][0].state_elements for form in equal}) == 1
    accesses = {name: form.model["num_memory_heads"] * form.model["num_writes"] for name, form in FORMS.items()}
    assert accesses["one-more"] == accesses["four"]
    assert accesses["four-fewer"] == accesses["one"]
    large, four = (cost.training_flops_per_token(length) for cost, length in (sizes["one-large"], sizes["four"]))
    assert large == pytest.approx(four, rel=0.01)
    assert sizes["one-large"][0].parameters == pytest.approx(sizes["four"][0].parameters, rel=0.01)


@pytest.mark.parametrize("task", TASKS)
def test_several_seeds_at_one_rate(task: str) -> None:
    for form, by_rate in form_runs(task, TASKS[task]).items():
        assert {lr: variant.seeds for lr, variant in by_rate.items() if variant.seeds > 1} == {
            TASKS[task].best[form]: 3
        }
        assert {variant.recipe(0).optim.lr for variant in by_rate.values()} == {*TASKS[task].rates}


def test_page_of_heads() -> None:
    accuracy = {"one": 0.3, "one-more": 0.35, "four": 0.85, "four-fewer": 0.8, "one-large": 0.99}
    outcomes = {}
    for form, by_rate in form_runs("recall", TASKS["recall"]).items():
        for lr, variant in by_rate.items():
            for seed in range(variant.seeds):
                value = accuracy[form] + seed / 100 - (0.1 if lr != TASKS["recall"].best[form] else 0.0)
                run, found = variant.run_name(seed), {"accuracy": {"256": value}}
                outcomes[run] = outcome(run, {"recall": found, "choice": found})
    study = heads_study()
    recall, rebinding, code = study_page(study, study_results(outcomes, study.variants())).findings
    claims, means, rates = recall.tables
    best = TASKS["recall"].best["one"]
    assert means.rows[0][-2:] == ("31.0 ± 2.5%", f"{best:g}")
    assert rates.rows[0][-1].startswith(f"{best:g}")
    assert sorted(rates.rows[0][1:-1]) == ["0.200"] * 4 + ["0.300"], "the first seed decides"
    assert [row[1:] for row in claims.rows] == [("not reported", "-", "measured")] * 5
    assert claims.rows[0][0].endswith("(points): +55.0% (95% interval +55.0% to +55.0% over 3 seeds)")
    assert {rebinding.verdict, code.verdict} == {"missing"}
