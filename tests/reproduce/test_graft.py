"""The study of grafts: its runs and their order, that all methods see the same rows, and what its page says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reproduce.made import outcome, study_results
from sdm.errors import UserError
from sdm.reproduce.graft import DOCUMENTS, GRIDS, METHODS, PLACE_RATE, PLACES, RATES, base_runs, gain, graft_study
from sdm.reproduce.run_study import study_page

EDGES = [0, 128, 256, 512, 1024, 2048]
FOLDER = Path("study")


def unit(near: float, far: float, withheld: float = 0.0) -> dict[str, Any]:
    """A document with these nats per token up to 128 and from 1,024 on; `withheld` more there without its context."""
    nll = [128 * near, 128 * 3.0, 256 * 3.0, 512 * 3.0, 1024 * far]
    return {"edges": EDGES, "nll": nll, "withheld": [*nll[:4], 1024 * (far + withheld)]}


def measured(name: str, near: float, far: float, withheld: float = 0.0) -> Any:
    units = {f"code:{n}": unit(near + n, far + n, withheld) for n in range(3)}
    valid = {"nll": near, "positions": [{"nll": near}, *[{"nll": 3.0}] * 3, {"nll": far}]}
    return outcome(name, {"position": {"nll": 3.0}, "valid": valid}, units)


def test_runs_start_from_a_base_of_their_own_settings() -> None:
    study = graft_study(FOLDER, 64, 8, 3, ("mistral", "qwen3"))
    runs = {variant.run_name(seed): (variant, seed) for variant, seed in study.runs()}
    assert {
        "mistral-64",
        "qwen3-64",
        f"mistral-64-sdm-8-{RATES['mistral']['sdm']:g}-s2",
        f"qwen3-64-w64-gdn-all-8-{RATES['qwen3']['gdn']:g}-s2",
    } <= set(runs)
    for variant, seed in runs.values():
        adapt = variant.recipe(seed).adapt
        assert adapt is not None
        if study.round_of(variant, seed):
            assert adapt.base == FOLDER / variant.name[: variant.name.index("-64") + 3]
            assert adapt.scratch is None
        else:
            assert adapt.base is None
    assert [variant.name for variant, seed in study.runs() if not study.round_of(variant, seed)] == [
        "mistral-64",
        "qwen3-64",
    ]


def test_methods_of_a_base_see_the_same_rows() -> None:
    for architecture in ("mistral", "qwen3"):
        runs = base_runs(architecture, FOLDER, 64, 8, 3, first=False)
        assert len({variant.recipe(1).data for variant in runs.methods.values()}) == 1
        assert len({variant.recipe(seed).data for variant in runs.methods.values() for seed in (0, 1)}) == 2


def test_every_rate_is_one_that_was_tried() -> None:
    assert {method.kin for method in METHODS.values()} == GRIDS.keys()
    for rates in RATES.values():
        assert rates.keys() == GRIDS.keys()
        assert all(rate in GRIDS[method] for method, rate in rates.items())


def test_places_share_a_run_with_the_rates() -> None:
    runs = base_runs("mistral", FOLDER, 64, 8, 3)
    assert runs.places.keys() == PLACES.keys()
    assert runs.places["block2"].run_name(0) == runs.rates["sdm"][PLACE_RATE].run_name(0)
    configs = [variant.recipe(0) for variant in runs.places.values()]
    assert all(configs.count(config) == 1 for config in configs)
    assert "position" not in runs.places["block0"].measurements


def test_only_grafts_limit_the_attention_of_qwen3() -> None:
    runs = base_runs("qwen3", FOLDER, 64, 8, 1, first=False)
    windows = {name: variant.recipe(0).adapt.attention_window for name, variant in runs.methods.items()}  # type: ignore[union-attr]
    assert {name for name, window in windows.items() if window is None} == {"full", "lora-4", "lora-16"}
    assert runs.start is not runs.base
    assert base_runs("mistral", FOLDER, 64, 8, 1, first=False).start.name == "mistral-64"


def test_unknown_bases_are_refused() -> None:
    with pytest.raises(UserError, match="--bases"):
        graft_study(FOLDER, 64, 8, 3, ("bert",))


def test_gain() -> None:
    assert gain(unit(3.0, 2.0, 0.25)) == pytest.approx(0.25)


def test_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """SDM is better far back than the base and GDN, and worse near the start; documents differ by more than that."""
    monkeypatch.setattr("sdm.reproduce.graft.read_shapes", lambda folder: {"a.memory.b": (2, 3), "c": (4, 5)})
    study = graft_study(FOLDER, 64, 8, 3, ("mistral",))
    outcomes = {"mistral-64": measured("mistral-64", 3.0, 3.0)}
    for seed in range(3):
        for method, near, far in (("sdm", 3.02, 2.8), ("gdn", 3.0, 2.95), ("full", 2.99, 2.9)):
            name = f"mistral-64-{method}-8-{RATES['mistral'][method]:g}-s{seed}"
            outcomes[name] = measured(name, near, far - 0.01 * seed, 0.1)
    page = study_page(study, study_results(outcomes, study.variants()))
    methods, recall, choices = page.findings
    assert methods.verdict == "measured", "the paper grafts nothing"
    signs = [row[0].rpartition(": ")[2][0] for row in methods.tables[0].rows]
    assert signs == ["-", "-", "-", "+", "-"], "the graft is worse near the start, and fine-tuning better"
    rows = {row[0]: row for row in methods.tables[1].rows}
    assert rows["base"][4:9] == ("4.000", "3.000", "3.000", "3.000", "4.000")
    graft = rows["SDM graft, base frozen"]
    assert graft[1:4] == ("6", f"{RATES['mistral']['sdm']:g}", "3")
    assert graft[9].startswith("+0.020")
    assert graft[10].startswith("-0.210")
    assert graft[11].startswith("+0.100")
    assert rows["full fine-tuning"][1] == "26"
    assert recall.verdict == "missing"
    assert f"{RATES['mistral']['sdm']:g}: 3.020" in str(choices.tables[0].rows)
    where = {row[0]: row[1:] for row in choices.tables[1].rows}
    assert where["base"] == ("3.000", "3.000", "3.000", "3.000", "3.000", "3.000")
    assert where["in block 2, the default"] == ("missing",) * 6, "at another rate than the method"
    assert where["in block 0"] == ("missing",) * 6
    assert str(DOCUMENTS) in methods.tables[1].caption
