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
from sdm.evaluation.measurement import Measurement, Pairs, Plan, Result, Unit, evaluate
from sdm.evaluation.report import Report, Table
from sdm.evaluation.results import ResultsFolder, read_results, results_folder
from sdm.files import write_checked_json

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
    assert measured == ["number 0", "number 1", "number 2"]
    results = evaluate("squares", Squares(fails_at=3), [(lm, folder)], limit=1)[0]
    assert measured == ["number 0", "number 1", "number 2"]
    assert len(results.units) == 3


def killed(lm: EvalModel, folder: Path) -> bytes:
    """Measure five units, and leave the folder as a session that was killed after four of them."""
    journals = []
    add = ResultsFolder.add

    def remember(self: ResultsFolder, key: str, result: dict[str, Any]) -> None:
        add(self, key, result)
        journals.append((folder / "units-0.jsonl").read_bytes())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResultsFolder, "add", remember)
        evaluate("squares", Squares(), [(lm, folder)])
    results = read_results(folder)
    results.units, results.complete, results.summary = {}, False, None
    write_checked_json(folder / "results.json", vars(results))
    (folder / "units-0.jsonl").write_bytes(journals[3])
    measured.clear()
    return journals[3]


DAMAGE = {
    "cut off": lambda line: line[: len(line) // 2],
    "another number": lambda line: line.replace(b'"square": 9', b'"square": 8'),
    "not a number": lambda line: line.replace(b'"square": 9', b'"square": NaN'),
    "a damaged name": lambda line: line.replace(b'"square"', b'"sqvare"'),
    "another unit": lambda line: line.replace(b"number 3", b"number 4"),
    "no checksum": lambda line: b'{"key": "number 3", "result": {"square": 9}}',
    "no object": lambda line: b'["key", "result", "sha256"]',
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_lines_are_measured_again(damage: str, lm: EvalModel, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    *lines, last = killed(lm, folder).splitlines()
    assert b'"number 3"' in last
    assert DAMAGE[damage](last) != last
    (folder / "units-0.jsonl").write_bytes(b"\n".join([*lines, DAMAGE[damage](last)]) + b"\n")
    assert len(read_results(folder).units) == 3
    results = evaluate("squares", Squares(), [(lm, folder)])[0]
    assert measured == ["number 3", "number 4"]
    assert results.summary == {"sum": 30}
    assert evaluate("squares", Squares(), [(lm, folder)])[0].units == results.units


def test_whole_lines_are_kept(lm: EvalModel, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    killed(lm, folder)
    assert evaluate("squares", Squares(), [(lm, folder)])[0].summary == {"sum": 30}
    assert measured == ["number 4"]


def test_other_results_stay_and_new_ones_go_beside(lm: EvalModel, folders: dict[str, Path], tmp_path: Path) -> None:
    """Whatever differs: the settings, the model, the measurement. Each is found again by the same call."""
    folder = tmp_path / "results"
    evaluate("squares", Squares(), [(lm, folder)])
    before = (folder / "results.json").read_bytes()
    others = {
        "settings": ("squares", Squares(count=3), lm),
        "model": ("squares", Squares(), open_model(folders["llama"])),
        "measurement": ("cubes", Squares(), lm),
    }
    for name, measurement, model in others.values():
        measured.clear()
        results = evaluate(name, measurement, [(model, folder)])[0]
        assert len(measured) == measurement.count
        place = results_folder(folder, results.identity())
        assert place.name.startswith("results-")
        assert read_results(place).identity() == results.identity()
        measured.clear()
        evaluate(name, measurement, [(model, folder)])
        assert measured == []
    assert (folder / "results.json").read_bytes() == before
    assert [file.name for file in folder.iterdir()] == ["results.json"]
    assert len(list(tmp_path.glob("results-*"))) == 3
    with pytest.raises(UserError, match=r"holds other files and no results\.json"):
        evaluate("squares", Squares(), [(lm, folders["llama"])])


EDITS = [
    ("llama", "rms_norm_eps", 0.1),
    ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": 77.0}),
    ("llama", "sliding_window", 7),
    ("llama", "eos_token_id", 5),
    ("sdm", "rope_parameters", {"rope_type": "default", "rope_theta": 77.0}),
    ("sdm", "rms_norm_eps", 0.1),
    ("sdm", "sliding_window", 7),
    ("sdm", "memory_temperature", 0.5),
]


@pytest.mark.parametrize(("kind", "field", "value"), EDITS)
def test_units_of_another_configuration_are_never_mixed(
    kind: str, field: str, value: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "results"
    evaluate("squares", Squares(), [(open_model(folders[kind]), folder)], limit=1)
    file = folders[kind] / "config.json"
    config = json.loads(file.read_text())
    assert config.get(field) != value
    file.write_text(json.dumps(config | {field: value}))
    for manifest in folders[kind].glob("*manifest*"):
        manifest.unlink()
    measured.clear()
    results = evaluate("squares", Squares(), [(open_model(folders[kind]), folder)])[0]
    assert len(measured) == 5
    assert results_folder(folder, results.identity()) != folder
    assert len(read_results(folder).units) == 2


WRONG = {
    "units": [1, 2],
    "summary": "none",
    "settings": None,
    "model": "sdm",
    "planned": "five",
    "measurement": 3,
    "seconds": {},
}


@pytest.mark.parametrize("field", WRONG)
def test_content_of_the_wrong_type(field: str, lm: EvalModel, tmp_path: Path) -> None:
    results = evaluate("squares", Squares(), [(lm, tmp_path / "results")])[0]
    write_checked_json(tmp_path / "results" / "results.json", vars(results) | {field: WRONG[field]})
    with pytest.raises(UserError, match=rf"results\.json is damaged: {field} is of the wrong type"):
        read_results(tmp_path / "results")
