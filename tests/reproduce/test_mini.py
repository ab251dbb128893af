"""The paper in miniature: which runs there are, and the page that is made of whatever they have left."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from sdm.errors import UserError
from sdm.evaluation.speed import Speed
from sdm.evaluation.statistics import weighted_mean
from sdm.files import write_json
from sdm.models import cost
from sdm.ops.triton.availability import missing_because, version
from sdm.reproduce.jobs import describe
from sdm.reproduce.recipes.mini import TOKENS_PER_PARAMETER, VOCABULARY, WIDTHS, mini, tokens
from sdm.reproduce.studies.mini import costs, reproduce
from sdm.reproduce.studies.mini.cells import (
    RECALL_RATES,
    SLOTS,
    Experiment,
    Variant,
    experiments,
    jobs_of,
    ladder_variant,
    rounds,
)
from sdm.reproduce.studies.mini.page import mini_page
from sdm.reproduce.studies.mini.recall import recall_finding
from sdm.reproduce.studies.mini.reproduce import reproduce_mini
from sdm.reproduce.studies.mini.results import Cells, above_zero, below_zero, late, shown
from sdm.reproduce.studies.mini.showing import verdict
from sdm.run import Run
from sdm.run.config import ScheduleConfig, TrainConfig
from sdm.run.errors import TrainingError
from training.runs import text_run

QUIET = Console(file=io.StringIO())


def tiny(folder: Path, seeds: Mapping[str, int], **sections: object) -> dict[str, Experiment]:
    """All experiments, of which the runs of a few variants exist and take a second; of the others there are none."""

    def shrunk(config: TrainConfig) -> TrainConfig:
        data = replace(text_run(folder).data, layout="rows", sequence_length=64, batch_size=1)
        fields = {"data": data, "schedule": ScheduleConfig(steps=4, warmup=1)} | sections
        return replace(config, monitor=replace(config.monitor, memory_every=2, validation_batches=1), **fields)

    def small(variant: Variant) -> Variant:
        return replace(
            variant,
            recipe=lambda seed: shrunk(variant.recipe(seed)),
            measurements={name: one for name, one in variant.measurements.items() if name == "position"},
            seeds=seeds.get(variant.key, 0),
        )

    return {
        name: {key: small(variant) for key, variant in experiment.items()} for name, experiment in experiments().items()
    }


@pytest.fixture(autouse=True)
def small_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured beside the runs, in a moment."""
    monkeypatch.setattr(costs, "SPEED", Speed(lengths=(32, 64), repeats=1, new_tokens=2))
    monkeypatch.setattr(reproduce, "measure_snapshots", lambda folder: None)


def test_the_same_runs_serve_several_experiments() -> None:
    planned = experiments()
    names = [job.name for jobs in rounds(planned) for job in jobs]
    assert len(names) == len(set(names))
    assert set(names) == {job.name for experiment in planned.values() for job in jobs_of(experiment)}
    sdm = ladder_variant("sdm", 5).key
    assert (
        planned["memory size"][256].key
        == planned["aids"][True, True].key
        == planned["initial state"]["sdm", True].key
        == sdm
    )
    assert all(
        len(variant.jobs()) >= 3 for name in planned if name != "learning rates" for variant in planned[name].values()
    )
    for jobs in rounds(planned)[1:]:
        assert {job.name[-5:] for job in jobs} < {"seed1", "seed2"}
        assert len({job.name[-1] for job in jobs}) == 1


def test_architectures_of_a_level_cost_the_same() -> None:
    """The same tokens and, but for a percent, the same parameters; SDM and GDN also the same FLOPs."""
    for level in WIDTHS:
        configs = {kind: mini(level, kind) for kind in ("sdm", "gdn", "full_attention", "mixed")}
        costs = {kind: cost(config.model.build(VOCABULARY)) for kind, config in configs.items()}
        base = costs["sdm"]
        assert len({config.schedule.steps for config in configs.values()}) == 1
        for one in costs.values():
            assert one.non_embedding_parameters == pytest.approx(base.non_embedding_parameters, rel=0.01)
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
    for one in (sdm, gdn):
        assert not one.shift_keys
        assert not one.tie_query_initialization
        assert one.initializer_range == 0.02
    assert gdn.short_convolution == 4


def test_statistics() -> None:
    assert shown(None) == "missing"
    assert shown(weighted_mean([1.0])) == "1.000 (one seed)"
    assert shown(weighted_mean([0.9, 1.1]), 1, sign=True) == "+1.0 ± 1.3"
    assert below_zero(weighted_mean([-1.0, -1.1, -0.9])) is True
    assert above_zero(weighted_mean([-1.0, -1.1, -0.9])) is False
    assert below_zero(weighted_mean([-1.0, 1.1, -0.9])) is None
    assert verdict([], []) == "missing"
    assert verdict([True, True], []) == "agrees"
    assert verdict([True, None], []) == "unclear"
    assert verdict([True, True], ["a seed"]) == "unclear"
    assert verdict([False, None], ["a seed"]) == "differs"


@pytest.mark.parametrize(
    ("sdm", "drawn"),
    [
        # SDM minus GDN, of which all are zero: by seed, then by document.
        ({0: {"a": 1.0, "b": 3.0}, 1: {"a": 1.1, "b": 3.1}}, [1.05, 3.05]),  # documents differ more than seeds
        ({0: {"a": 1.0, "b": 1.1}, 1: {"a": 3.0, "b": 3.1}}, [1.05, 3.05]),  # seeds differ more than documents
        ({0: {"a": 1.0, "b": 3.0}}, [1.0, 3.0]),  # one seed
        ({0: {"a": 1.0, "b": 3.0, "c": 7.0}, 4: {"a": 9.0, "b": 9.0}}, [1.0, 3.0]),  # without a partner
    ],
)
def test_differences_are_as_uncertain_as_documents_and_seeds_make_them(
    sdm: dict[int, dict[str, float]], drawn: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = {seed: {"a": 0.0, "b": 0.0} for seed in (0, 1)}
    made = {"sdm-5": sdm, "gdn-5": zeros, "sdm-1": {}}
    monkeypatch.setattr(Cells, "_by_seed", lambda self, variant, late: made[variant.key])
    cells, one, other = Cells(Path()), ladder_variant("sdm", 5), ladder_variant("gdn", 5)
    assert cells.difference(one, other) == pytest.approx(weighted_mean(drawn))
    assert cells.difference(one, ladder_variant("sdm", 1)) is None


def test_a_page_of_some_runs(tmp_path: Path) -> None:
    """Trained, measured and shown; what is not there is said to be missing; nothing is done twice."""
    planned = tiny(tmp_path, {"sdm-5": 2, "gdn-5": 2, "slots-64": 1})
    output = tmp_path / "mini"
    page = reproduce_mini(output, 2, QUIET, planned)
    cells = Cells(output)
    sdm, gdn = ladder_variant("sdm", 5), ladder_variant("gdn", 5)
    difference = cells.difference(sdm, gdn)
    mine, theirs = (
        [outcome.measured["position"]["nll"] for outcome in cells.outcomes(variant, "position")]
        for variant in (sdm, gdn)
    )
    assert len(mine) == len(theirs) == 2
    assert difference is not None
    assert difference.value == pytest.approx((sum(mine) - sum(theirs)) / 2, abs=1e-6), "documents have the same length"
    assert cells.difference(sdm, gdn, late=True) == difference, "there is one stretch of positions"
    assert late(cells.summaries(sdm)[0]) == pytest.approx(mine[0])
    assert cells.mean(ladder_variant("sdm", 1)) is None

    findings = {finding.key: finding for finding in page.findings}
    assert "sdm-5: 2 of 3 seeds" in findings["position"].why
    assert findings["memory-size"].verdict in ("differs", "unclear")
    assert findings["writes-and-reads"].verdict == findings["recall"].verdict == "missing"
    assert findings["utilisation"].illustrations
    assert findings["speed"].tables
    assert findings["speed"].verdict == "missing", "there is no attention to compare with"
    text = (output / "report.html").read_text()
    assert "5 of 5 runs are finished" in text

    before = {path: path.stat().st_mtime_ns for path in output.glob("*/*.json")}
    again = reproduce_mini(output, 2, QUIET, planned, report_only=True)
    assert [one.found for one in again.findings] == [one.found for one in page.findings]
    assert before == {path: path.stat().st_mtime_ns for path in output.glob("*/*.json")}


def test_a_run_that_fails_is_shown(tmp_path: Path) -> None:
    """The rest is made, the page has its log, and the command fails."""
    planned = tiny(tmp_path, {"sdm-1": 1})
    broken = tiny(tmp_path, {"gdn-1": 1}, init_from=tmp_path / "nothing")
    planned["ladder"] = {**planned["ladder"], ("gdn", 1): broken["ladder"]["gdn", 1]}
    output = tmp_path / "mini"
    with pytest.raises(UserError, match="1 of 2 failed: gdn-1-seed0"):
        reproduce_mini(output, 2, QUIET, planned)
    assert Run(output / "sdm-1-seed0").is_finished()
    text = (output / "report.html").read_text()
    assert "1 failed" in text
    assert "nothing" in text, "the end of its log"
    with pytest.raises(UserError, match="1 of 2 failed"):
        reproduce_mini(output, 2, QUIET, planned, report_only=True)


def test_an_empty_folder_gives_a_page_of_what_is_missing(tmp_path: Path) -> None:
    page = mini_page(Cells(tmp_path), experiments())
    verdicts = {finding.verdict for finding in page.findings}
    assert verdicts == {"missing"}, {finding.key: finding.verdict for finding in page.findings}
    with pytest.raises(UserError, match="--output"):
        reproduce_mini(tmp_path / "none", 2, QUIET, experiments(), report_only=True)
    assert {*SLOTS} == {*experiments()["memory size"]}


def test_recall_is_shown_at_each_models_best_rate(tmp_path: Path) -> None:
    """Which is chosen on other rows than those of the accuracy that is shown."""
    recalls = experiments()["recall"]
    states = {"SDM, N = 64": 8192, "SDM, N = 256": 32768, "SDM, N = 1,024": 131072}
    states |= {"GDN, 4x16": 2048, "GDN, 2x32": 4096, "GDN, 1x64": 8192, "full attention": 262144}
    best = {"SDM, N = 1,024": 0.99, "GDN, 1x64": 0.8, "SDM, N = 64": 0.5}
    for (kind, form, lr), variant in recalls.items():
        chosen = lr == (1.2e-2 if form == "SDM, N = 64" else RECALL_RATES[kind][1])
        facts = {"state_elements": states[form], "flops_per_token": 100}
        for seed, job in enumerate(variant.jobs()):
            accuracy = best.get(form, 0.3) + seed / 1000 if chosen else 1.0  # the luckier rate is not taken
            accuracies = {
                "recall": {"256": accuracy, "512": accuracy - 0.25},
                "choice": {"256": accuracy if chosen else 0.1},
            }
            measured = {
                name: {"measurement": describe(one), "summary": {"accuracy": accuracies[name]}}
                for name, one in job.measurements.items()
            }
            (tmp_path / job.name).mkdir()
            write_json(tmp_path / job.name / "evaluation.json", {"facts": facts, "measured": measured})
    finding = recall_finding(Cells(tmp_path), recalls)
    assert finding.verdict == "agrees"
    assert finding.found == (
        "at 256 pairs: SDM, N = 1,024 99.1 ± 0.2%; GDN, 1x64 80.1 ± 0.2%; full attention 30.1 ± 0.2%; "
        "with an equal state of 8,192 numbers: SDM, N = 64 50.1 ± 0.2%, GDN, 1x64 80.1 ± 0.2%"
    )
    rows = {row[0]: row for row in finding.tables[0].rows}
    assert list(rows) == sorted(states, key=lambda form: (states[form], not form.startswith("SDM")))
    assert rows["SDM, N = 64"][4] == "0.012 (edge)"
    assert rows["GDN, 1x64"][4:] == ("0.003", "80.1 ± 0.2%", "55.1 ± 0.2%")
    assert rows["full attention"][1] == "262,144 (grows)"
    assert [one.name for one in finding.illustrations] == ["recall-state", "recall-pairs"]


@pytest.mark.slow
def test_snapshots(tmp_path: Path) -> None:
    """Measured in a process of its own, by Triton's interpreter; missing where there is no Triton."""
    costs.measure_snapshots(tmp_path)
    finding = costs.snapshot_finding(Cells(tmp_path))
    if missing_because(version()):
        assert finding.verdict == "missing"
        assert "Triton" in finding.why
    else:
        assert finding.verdict == "agrees"
        assert finding.tables[0].rows[0][0] == "inverted by plan (ours)"
