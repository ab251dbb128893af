"""The study of `sdm reproduce mini`: which runs it has, what they cost, and what is said about them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from reproduce.made import losses, outcome, study_results
from sdm.errors import TrainingError
from sdm.models import cost
from sdm.reproduce.jobs import Outcome
from sdm.reproduce.mini import RECALL_RATES, mini_study
from sdm.reproduce.recipes.mini import TOKENS_PER_PARAMETER, VOCABULARY, WIDTHS, mini, tokens
from sdm.reproduce.run_study import study_page
from sdm.reproduce.study import Study, StudyResults


def section(key: str) -> Study:
    """The study with one section."""
    study = mini_study()
    return replace(study, sections=[one for one in study.sections if one.key == key])


def test_the_same_runs_serve_several_experiments() -> None:
    study = mini_study()
    runs = [(variant.run_name(seed), seed) for variant, seed in study.runs()]
    assert len(runs) == len({name for name, _ in runs}) == 201
    assert [seed for _, seed in runs] == sorted(seed for _, seed in runs), "seed by seed"
    shared = "sdm-5-seed{seed}"
    for group in ("ladder", "memory size", "initial state", "aids"):
        assert shared in {variant.name for variant in study.groups[group]}
    assert all(
        variant.seeds == 3 for name, group in study.groups.items() if name != "learning rates" for variant in group
    )


def test_architectures_of_a_level_cost_the_same() -> None:
    """The same tokens and, but for a percent, the same parameters; SDM and GDN also the same FLOPs."""
    for level in WIDTHS:
        configs = {kind: mini(level, kind) for kind in ("sdm", "gdn", "full_attention", "mixed")}
        costs = {kind: cost(config.model.build(VOCABULARY)) for kind, config in configs.items()}
        base = costs["sdm"]
        assert len({config.schedule.steps for config in configs.values()}) == 1
        for sizes in costs.values():
            assert sizes.non_embedding_parameters == pytest.approx(base.non_embedding_parameters, rel=0.01)
        assert costs["gdn"].training_flops_per_token(2048) == pytest.approx(
            base.training_flops_per_token(2048), rel=0.002
        )
        assert tokens(level) == TOKENS_PER_PARAMETER * base.non_embedding_parameters
        sdm, gdn = (configs[kind].model.build(VOCABULARY) for kind in ("sdm", "gdn"))
        assert sdm.num_writes == sdm.num_reads == gdn.recurrent_key_dim, "the paper's W = R = d_qk"
        assert sdm.num_slots == (sdm.hidden_size // 4) ** 2, "the paper's N"
    with pytest.raises(TrainingError, match="level must be one of 1, 2, 3, 4, 5, got 6"):
        mini(6)


def test_the_plain_recipe_has_no_aids() -> None:
    sdm, gdn = (mini(5, kind, plain=True).model.build(VOCABULARY) for kind in ("sdm", "gdn"))
    for config in (sdm, gdn):
        assert not config.shift_keys
        assert not config.tie_query_initialization
        assert config.initializer_range == 0.02
    assert gdn.short_convolution == 4


def test_an_empty_folder_gives_a_page_of_what_is_missing(tmp_path: Path) -> None:
    page = study_page(mini_study(), StudyResults(tmp_path))
    assert {finding.key: finding.verdict for finding in page.findings} == {
        finding.key: "missing" for finding in page.findings
    }
    assert len(page.findings) == 14
    assert "0 of 201 runs are finished" in page.lead


def test_recall_is_shown_at_each_models_best_rate() -> None:
    """Which is chosen on other rows than those of the accuracy that is shown."""
    study = section("recall")
    states = {"SDM, N = 64": 8192, "SDM, N = 256": 32768, "SDM, N = 1,024": 131072}
    states |= {"GDN, 4x16": 2048, "GDN, 2x32": 4096, "GDN, 1x64": 8192, "full attention": 262144}
    best = {"SDM, N = 1,024": 0.99, "GDN, 1x64": 0.8, "SDM, N = 64": 0.5}
    outcomes: dict[str, Outcome] = {}
    for variant in study.groups["recall"]:
        lr = variant.recipe(0).optim.lr
        right = 1.5e-3 if variant.label == "full attention" else RECALL_RATES[1]
        chosen = lr == (1.2e-2 if variant.label == "SDM, N = 64" else right)
        for seed in range(3):
            accuracy = best.get(variant.label, 0.3) + seed / 1000 if chosen else 1.0  # the luckier rate is not taken
            summaries = {
                "recall": {"accuracy": {"256": accuracy, "512": accuracy - 0.25}},
                "choice": {"accuracy": {"256": accuracy if chosen else 0.1}},
            }
            name = variant.run_name(seed)
            outcomes[name] = outcome(name, summaries, state_elements=states[variant.label])
    results = study_results(outcomes, study.variants())
    finding = study_page(study, results).findings[0]
    assert finding.verdict == "agrees"
    assert finding.found.startswith(
        "accuracy at 256 pairs: SDM, N = 1,024 99.1 ± 0.2% (131,072 numbers of state), GDN, 1x64 80.1 ± 0.2%"
    )
    rows = {row[0]: row for row in finding.tables[1].rows}
    assert rows["SDM, N = 64"][3] == "0.012 (edge)"
    assert rows["GDN, 1x64"][1:4] == ("80.1 ± 0.2%", "55.1 ± 0.2%", "0.003")
    sizes = {row[0]: row for row in finding.tables[2].rows}
    assert list(sizes) == sorted(states, key=lambda form: (states[form], not form.startswith("SDM")))
    assert sizes["full attention"][1] == "262,144 (grows)"
    assert any(
        "equal state of 8,192 numbers: SDM, N = 64 50.1 ± 0.2%, GDN, 1x64 80.1 ± 0.2%" in n for n in finding.notes
    )


def test_a_learned_initial_state_is_compared_with_what_it_does_for_gdn() -> None:
    """Learning helps both alike here, so that the claim about their difference is open."""
    study = section("initial-state")
    gains = {"sdm-5": 0.0, "sdm-null": 0.2, "gdn-learned": 0.5, "gdn-5": 0.7}
    outcomes = {
        f"{name}-seed{seed}": losses(name, {f"d{n}": (2 + gain + n + (n - 1) * (seed - 1) / 50,) * 2 for n in range(3)})
        for name, gain in gains.items()
        for seed in range(3)
    }
    finding = study_page(study, study_results(outcomes, study.variants())).findings[0]
    assert [row[-1] for row in finding.tables[0].rows] == ["agrees", "unclear"]
    assert "SDM, learned M0 - SDM, null M0, nats per token: -0.200" in finding.found
    assert [chart.name for chart in finding.illustrations] == ["initial-state"]


def test_laws_predict_the_level_that_was_held_out() -> None:
    study = section("ladder")
    outcomes = {}
    for variant in study.groups["ladder"]:
        kind, level = variant.run_name(0).removesuffix("-seed0").split("-")
        flops = cost(variant.recipe(0).model.build(VOCABULARY)).training_flops_per_token(2048)
        base = (variant.recipe(0).schedule.steps * flops) ** -0.1 * (9.0 if kind == "sdm" else 10.0)
        for seed in range(3):
            documents = {f"d{n}": (base * (1 + (n - 1 + seed - 1) / 1000),) * 2 for n in range(3)}
            outcomes[variant.run_name(seed)] = losses(f"{kind}-{level}", documents)
    finding = study_page(study, study_results(outcomes, study.variants())).findings[0]
    verdicts = [row[-1] for row in finding.tables[0].rows]
    assert verdicts[:5] == ["agrees"] * 5, "SDM is below GDN at every level"
    assert verdicts[5:] == ["agrees"] * 4, "the last level is inside the interval of each law"
    assert finding.verdict == "agrees"
    assert "R² of 4 power laws: at least 1.000" in finding.found
