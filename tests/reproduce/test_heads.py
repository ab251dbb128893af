"""The study of `sdm reproduce heads`: what is compared, and what is said about it."""

from __future__ import annotations

import pytest

from reproduce.made import outcome, study_results
from sdm.reproduce import heads as heads_module
from sdm.reproduce.heads import FORMS, heads_study
from sdm.reproduce.run_study import study_page


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
