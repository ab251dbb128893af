"""The study of `sdm reproduce facts`: what is compared, what is said about it, and a tiny version end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from reproduce.made import outcome, run_twice, small, study_results
from sdm.data import FactsConfig
from sdm.evaluation.recall import Recall
from sdm.reproduce import facts as facts_module
from sdm.reproduce.facts import COUNTS, LEARNED, MODELS, NULL, WIDE, facts_study
from sdm.reproduce.recipes.tasks import facts
from sdm.reproduce.run_study import study_page
from sdm.reproduce.study import Study


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


@pytest.mark.slow
def test_facts_from_rows_to_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "COUNTS", (64,))
    curves = {name: {64: small(group[64])} for name, group in facts_module.variants().items()}
    assert all(isinstance(kind, Recall) for kind in facts_module.MEASUREMENTS.values())
    groups = {"facts": [variant for group in curves.values() for variant in group.values()]}
    run_twice(Study("facts", "Facts", "", groups, (facts_module._section(curves),)), tmp_path)
    assert (tmp_path / "figures" / "facts.png").is_file()
