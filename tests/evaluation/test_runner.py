"""Units are measured once, kept whatever happens, and put together in the order of the plan."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sdm.errors import UserError
from sdm.evaluation.eval_model import EvalModel, open_model
from sdm.evaluation.measurement import Measurement, Pairs, Plan, Result, Unit
from sdm.evaluation.report import Report, Table
from sdm.evaluation.results import read_results
from sdm.evaluation.runner import evaluate

measured: list[str] = []


@dataclass(frozen=True)
class Squares(Measurement):
    """Squares of numbers."""

    count: int = 5
    """How many."""
    fails_at: int = -1
    """Where it fails."""

    def plan(self, lm: EvalModel) -> Plan:
        groups = ("even", "odd")
        units = [Unit(f"number {i}", groups[i % 2], i) for i in range(self.count)]

        def measure(batch: Sequence[Unit]) -> Iterator[Result]:
            for unit in batch:
                if unit.payload == self.fails_at:
                    raise UserError("this number is too hard")
                measured.append(unit.key)
                yield {"square": unit.payload**2}

        return Plan(units, measure, {"numbers": "natural"}, batch=2)

    def summary(self, results: Mapping[str, Result]) -> dict[str, Any]:
        return {"sum": sum(one["square"] for one in results.values())}

    def report(self, summaries: Mapping[str, dict[str, Any]]) -> Report:
        return Report(
            [Table("Squares", ("model", "sum"), [(name, str(one["sum"])) for name, one in summaries.items()])]
        )

    def pairs(self, results: Mapping[str, Result]) -> Pairs:
        return {"square": {key: (one["square"], 1.0) for key, one in results.items()}}


@pytest.fixture
def lm(folders: dict[str, Path]) -> EvalModel:
    measured.clear()
    return open_model(folders["sdm"])


def test_units_are_measured_once(lm: EvalModel, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    first = evaluate("squares", Squares(), [(lm, folder)], limit=1)[0]
    assert measured == ["number 0", "number 1"]
    assert not first.complete
    assert first.planned == 5
    results = evaluate("squares", Squares(), [(lm, folder)])[0]
    assert sorted(measured) == [f"number {i}" for i in range(5)]
    assert results.complete
    assert results.summary == {"sum": 30}
    assert list(results.units) == [f"number {i}" for i in range(5)]
    written = json.loads((folder / "results.json").read_text())
    assert written["format"] == 1
    assert written["model"]["fingerprint"]["architecture"] == "sdm"
    assert [file.name for file in folder.iterdir()] == ["results.json"]


def test_what_is_done_is_kept(lm: EvalModel, tmp_path: Path) -> None:
    """Also when the process is killed: a line that was cut off is measured again."""
    folder = tmp_path / "results"
    with pytest.raises(UserError, match="too hard"):
        evaluate("squares", Squares(fails_at=3), [(lm, folder)])
    partial = read_results(folder)
    assert partial.complete is False
    assert partial.units == {"number 0": {"square": 0}, "number 1": {"square": 1}, "number 2": {"square": 4}}
    (folder / "units-0.jsonl").write_bytes(b'{"key": "number 3", "result": {"square": 9}}\n{"key": "numb')
    measured.clear()
    content = json.loads((folder / "results.json").read_text())
    assert len(read_results(folder).units) == 4
    with pytest.raises(UserError, match=r"settings\.fails_at was 3 and is -1"):
        evaluate("squares", Squares(), [(lm, folder)])
    assert json.loads((folder / "results.json").read_text()) == content
    results = evaluate("squares", Squares(fails_at=3), [(lm, folder)])[0]
    assert results.complete
    assert measured == ["number 4"]


def test_results_of_another_model_are_left_alone(lm: EvalModel, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "results"
    evaluate("squares", Squares(), [(lm, folder)])
    before = (folder / "results.json").read_bytes()
    with pytest.raises(UserError, match=r"are of another model: fingerprint.architecture was \"sdm\" and is \"llama\""):
        evaluate("squares", Squares(), [(open_model(folders["llama"]), folder)])
    with pytest.raises(UserError, match="are of another measurement"):
        evaluate("cubes", Squares(), [(lm, folder)])
    assert (folder / "results.json").read_bytes() == before
    assert [file.name for file in folder.iterdir()] == ["results.json"]
    with pytest.raises(UserError, match=r"holds other files and no results\.json"):
        evaluate("squares", Squares(), [(lm, folders["llama"])])
