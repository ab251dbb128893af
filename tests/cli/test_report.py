"""`sdm scaling`, called as a user calls it, on ladders of tiny runs."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest

from cli.test_commands import refusal
from sdm.analysis.ladder_laws import ladders, trained_run
from sdm.cli import main
from sdm.errors import UserError
from sdm.evaluation.eval_model import open_model
from sdm.evaluation.results import FILE, Results
from sdm.files import write_checked_json
from sdm.models import cost
from sdm.run import Run
from sdm.run.config import TrainConfig
from sdm.run.model import SavedModel
from sdm.training import Trainer
from training.runs import MODEL, recall_run, text_run

WIDTHS = (8, 16, 24, 32)


def level(width: int, kind: str = "sdm", seed: int = 0, **fields: object) -> TrainConfig:
    """A size of a ladder; the loss that it is given below is none that it has learned."""
    model = replace(MODEL, hidden_size=width, layer_types=("token_shift", kind), recurrent_key_dim=8, **fields)
    return recall_run(model=model, seed=seed)


def trained(folder: Path, config: TrainConfig, loss: float) -> Path:
    """A finished run whose metrics say that it reached `loss`."""
    Trainer(config, folder).run()
    return reached(folder, loss)


def reached(folder: Path, loss: float) -> Path:
    lines = Run(folder).metrics()
    lines[-1]["valid/loss"] = loss
    Run(folder).metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two architectures of four sizes, two seeds, with losses that follow power laws to a thousandth."""
    folder, found = tmp_path_factory.mktemp("ladder"), []
    for kind, a, b in (("sdm", 9.0, 0.1), ("gdn", 8.0, 0.08)):
        for place, width in enumerate(WIDTHS):
            for seed in (0, 1):
                path = folder / f"{kind}-{width}-{seed}"
                trained(path, level(width, kind, seed), 1.0)
                flops = trained_run(path).flops
                wobble = 1 + 1e-3 * ((-1) ** place + (-1) ** seed)
                found.append(reached(path, a * flops**-b * wobble))
    return found


def test_laws_of_two_architectures(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main(["scaling", *map(str, runs), "--hold-out", "last", "--output", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    table = printed[: printed.index(str(tmp_path))]
    assert max(map(len, table.splitlines())) <= 80
    found = json.loads((tmp_path / "out" / "scaling.json").read_text())["models"]
    assert list(found) == ["SDM", "GDN"]
    for name, b in (("SDM", 0.1), ("GDN", 0.08)):
        law, held_out = found[name]["law"], found[name]["held_out"]
        assert law["b"] == pytest.approx(b, abs=0.005)
        assert law["intervals"]["b"][0] < b < law["intervals"]["b"][1]
        assert law["r_squared"] > 0.99
        assert (len(law["levels"]), law["runs"]) == (3, [2, 2, 2])
        assert held_out["inside"]
        assert [run["name"] for run in held_out["runs"]] == [f"{name.lower()}-32-0", f"{name.lower()}-32-1"]
        assert f"{held_out['predicted']:.4f}" in table
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".json", ".png", ".svg"}


def test_compute_is_that_of_all_tokens(runs: list[Path]) -> None:
    run, config = trained_run(runs[0]), Run(runs[0]).config()
    tokens = config.schedule.steps * 4 * 12
    assert (run.tokens, run.architecture) == (tokens, "SDM")
    assert run.flops == cost(SavedModel(runs[0]).config()).training_flops_per_token(12) * tokens


def test_what_can_be_held_out(runs: list[Path], tmp_path: Path) -> None:
    output = ["--output", str(tmp_path / "out")]

    def held_out(what: str) -> dict[str, list[str]]:
        main(["scaling", *map(str, runs), "--hold-out", what, *output])
        found = json.loads((tmp_path / "out" / "scaling.json").read_text())["models"]
        return {
            name: [run["name"] for run in one["held_out"]["runs"]] for name, one in found.items() if "held_out" in one
        }

    assert held_out("1") == {"SDM": ["sdm-8-0", "sdm-8-1"], "GDN": ["gdn-8-0", "gdn-8-1"]}
    assert held_out("gdn-16-1") == {"GDN": ["gdn-16-0", "gdn-16-1"]}
    assert held_out(str(runs[-1])) == {"GDN": ["gdn-32-0", "gdn-32-1"]}
    assert "GDN has levels 1 to 4, got 9" in refusal("scaling", *runs[8:], "--hold-out", "9", *output)
    assert "--hold-out must be the number of a level" in refusal("scaling", *runs, "--hold-out", "first", *output)


def test_losses(runs: list[Path]) -> None:
    lines = Run(runs[0]).metrics()
    assert trained_run(runs[0]).loss == lines[-1]["valid/loss"]
    training = [line["loss"] for line in lines if "loss" in line][-10:]
    assert trained_run(runs[0], "train").loss == pytest.approx(sum(training) / len(training))
    assert "`sdm eval nll" in refusal("scaling", *runs, "--loss", "test")


def test_the_test_loss_is_of_the_weights_at_hand(tmp_path: Path) -> None:
    """Results of other weights or settings are beside each other; that of the run as it is now counts."""
    path = trained(tmp_path / "run", level(8), 1.0)
    weights = open_model(path).fingerprint["weights"]

    def measured(name: str, nll: float, weights: str, complete: bool = True) -> None:
        folder = path / "evaluations" / name
        folder.mkdir(parents=True)
        result = Results("nll", {}, {"fingerprint": {"weights": weights}}, {}, summary={"nll": nll}, complete=complete)
        write_checked_json(folder / FILE, dataclasses.asdict(result))

    measured("nll", 4.0, "of the run before it was extended")
    with pytest.raises(UserError, match="other weights than the run has now; `sdm eval nll"):
        trained_run(path, "test")
    measured("nll-1", 3.5, weights, complete=False)
    measured("nll-2", 3.0, weights)
    assert trained_run(path, "test").loss == 3.0


def test_options_make_ladders_of_their_own(runs: list[Path], tmp_path: Path) -> None:
    trained(tmp_path / "null", level(8, learned_initial_state=False), 2.0)
    found = ladders([trained_run(path) for path in (*runs[:8], tmp_path / "null")])
    assert {name: len(group) for name, group in found.items()} == {
        "SDM, learned_initial_state = true": 8,
        "SDM, learned_initial_state = false": 1,
    }


def test_what_cannot_be_fitted(runs: list[Path], tmp_path: Path) -> None:
    assert "SDM has 2 levels to fit (sizes of different compute), but --form power" in refusal("scaling", *runs[:4])
    assert "or hold none out" in refusal("scaling", *runs[:6], "--hold-out", "1")
    assert "--form irreducible takes at least 4" in refusal("scaling", *runs[:6], "--form", "irreducible")
    assert "name the folders of runs" in refusal("scaling")
    assert "--bootstrap must be at least 100" in refusal("scaling", *runs, "--bootstrap", "5")
    assert "is not a run's folder" in refusal("scaling", *runs, tmp_path)
    assert "is given twice" in refusal("scaling", *runs, runs[0])

    trainer = Trainer(level(40), tmp_path / "unfinished")
    trainer.train_step()
    trainer.save()
    trainer.close()
    assert "unfinished is not finished" in refusal("scaling", *runs, tmp_path / "unfinished")

    Trainer(text_run(tmp_path), tmp_path / "text").run()
    assert "were trained on different data" in refusal("scaling", *runs, tmp_path / "text")

    trained(tmp_path / "slots", level(8, num_slots=25), 2.0)
    said = refusal("scaling", *runs, tmp_path / "slots")
    assert "sdm-8-0 and slots have the same width and depth but not the same cost (num_slots is 16 and 25)" in said

    config = level(8, seed=3)
    trained(tmp_path / "rate", replace(config, optim=replace(config.optim, lr=0.5)), 2.0)
    said = refusal("scaling", *runs, tmp_path / "rate")
    assert "were not trained alike, as seeds of one level are: optim.lr is 0.001 and 0.5" in said

    trained(tmp_path / "diverged", level(40), float("nan"))
    assert "SDM: y must be positive and finite" in refusal("scaling", *runs, tmp_path / "diverged")

    (tmp_path / "file").write_text("in the way")
    assert "cannot write --output" in refusal("scaling", *runs, "--output", tmp_path / "file")
