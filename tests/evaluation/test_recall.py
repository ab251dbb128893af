"""Recall is measured on a model that recalls, and on the same one with a part taken out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evaluation.conftest import other_model, save_model
from sdm.cli import main
from sdm.data import (
    IGNORED,
    FactsConfig,
    MADTaskConfig,
    MQARTaskConfig,
    NeedleConfig,
    RebindingConfig,
    RecallConfig,
    RetrievalConfig,
)
from sdm.data.config import TaskConfig
from sdm.errors import UserError
from sdm.evaluation.eval_model import EvalModel, open_model
from sdm.evaluation.measurement import evaluate
from sdm.evaluation.recall import Recall, ask
from sdm.evaluation.recall_tasks import default_config, name_of, task_of, text_needle
from sdm.evaluation.results import read_results
from sdm.evaluation.statistics import proportion, wilson
from sdm.models import SDMCache, SDMForCausalLM
from sdm.training import Trainer
from tiny_models import STACKS, recalling_model, tiny_model
from training.runs import recall_run

RECALL = RecallConfig(num_pairs=16, num_keys=40, num_values=20)
MQAR = MQARTaskConfig(
    vocab_size=64, train_segments=((16, 2, 8),), test_segments=((32, 4), (96, 24)), batch_size=8, random_filler=False
)
REBINDING = RebindingConfig(num_pairs=8, num_bindings=3, num_keys=40, num_values=20)
NEEDLE = NeedleConfig(sequence_length=64, start_length=16, num_needles=3, num_keys=9, num_values=7, num_fillers=40)
ALL = {RECALL: (2, 40), MQAR: (), REBINDING: (2, 40), NEEDLE: (9, 64)}


def model_of(model: Any) -> EvalModel:
    return EvalModel("model", Path(), model, Path("nowhere"), None)


def accuracy(model: Any, config: TaskConfig, sizes: tuple[int, ...], rows: int = 8) -> list[float]:
    task, found = task_of(config, sizes, 1), []
    for size in task.sizes:
        answers = ask(model_of(model), task, size, range(rows))
        found.append(sum(one["right"] for one in answers) / sum(one["asked"] for one in answers))
    return found


@pytest.fixture
def model() -> SDMForCausalLM:
    with torch.no_grad():
        return recalling_model(64)


@torch.no_grad()
@pytest.mark.parametrize("config", ALL, ids=name_of)
def test_a_model_that_recalls(model: SDMForCausalLM, config: TaskConfig) -> None:
    assert accuracy(model, config, ALL[config]) == [1.0, 1.0]
    model.model.layers[0].mixer.layer.beta_proj.weight.neg_()  # nothing is written any more
    assert accuracy(model, config, ALL[config]) == [0.0, 0.0]


@torch.no_grad()
def test_as_many_pairs_as_slots_are_kept_apart(model: SDMForCausalLM) -> None:
    """With eight addresses, two pairs sometimes collide (their values are written to as well) and forty always do."""
    memory = model.model.layers[0].mixer.layer
    for proj in (memory.query_proj, memory.key_proj):
        proj.weight[:8] = 0
    few, many = accuracy(model, RECALL, (2, 40), rows=100)
    assert 0.6 < few < 0.9
    assert many < 0.3


class Answering:
    """In the place of a model: answers by a function of the rows."""

    def __init__(self, answers: Any) -> None:
        self.predict = answers


def test_former_values_are_told_apart() -> None:
    """Of a reader that keeps the first value of a key, or makes one up."""
    task = task_of(REBINDING, (8,), 1)

    def first_value(ids: Tensor, wanted: Tensor) -> Tensor:
        answers = []
        for row in ids.tolist():
            value: dict[int, int] = {}
            for place in range(0, 48, 2):
                value.setdefault(row[place], row[place + 1])
            answers += [value[key] for key in row[48:]]
        return torch.tensor(answers)

    (one,) = ask(Answering(first_value), task, task.sizes[0], [0])  # type: ignore[arg-type]
    assert (one["right"], one["asked"], one["former"]) == (0, 8, 8)
    nonsense = Answering(lambda ids, wanted: torch.zeros(int(wanted.sum()), dtype=torch.int64))
    (one,) = ask(nonsense, task, task.sizes[0], [0])  # type: ignore[arg-type]
    assert (one["right"], one["former"]) == (0, 0)


def test_needles_by_their_place() -> None:
    """Of a reader that remembers the second half alone."""
    task = task_of(NEEDLE, (63,), 1)

    def late(ids: Tensor, wanted: Tensor) -> Tensor:
        answers = []
        for row in ids.tolist():
            value = {row[place]: row[place + 1] for place in range(30, 60, 2)}
            answers += [value.get(key, 0) for key in row[60:]]
        return torch.tensor(answers)

    rows = ask(Answering(late), task, task.sizes[0], range(200))  # type: ignore[arg-type]
    fixed = {"task": "needle", "title": "", "axis": "tokens of a row", "trained_on": None, "size": 63, "state": 1}
    summary = Recall().summary({str(place): fixed | row for place, row in enumerate(rows)})
    depths = [one["accuracy"] for one in summary["sizes"]["63"]["depths"].values()]
    assert depths[:2] == [0.0, 0.0]
    assert 0.2 < depths[2] < 0.8
    assert depths[3:] == [1.0, 1.0]


@pytest.mark.parametrize(
    "config",
    [MADTaskConfig("memorization"), MADTaskConfig("fuzzy-in-context-recall"), MADTaskConfig("selective-copying")],
    ids=name_of,
)
def test_tasks_of_one_size(config: MADTaskConfig) -> None:
    task = task_of(config, (), 1)
    (size,) = task.sizes
    row, again = task.row(size, 3), task.row(size, 3)
    assert torch.equal(row.batch.input_ids, again.batch.input_ids)
    assert not torch.equal(row.batch.input_ids, task.row(size, 4).batch.input_ids)
    assert row.batch.input_ids.shape == (1, size.length)
    assert 0 <= accuracy(tiny_model(vocab_size=task.vocab_size), config, (), rows=4)[0] < 0.5
    with pytest.raises(UserError, match=r"--sizes: .* has one size"):
        task_of(config, (4,), 1)


def test_shares() -> None:
    assert wilson(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(1.0, 50)[0] == pytest.approx(0.9287, abs=1e-4)
    alike, alone = proportion([4] * 20, [8] * 20), proportion([8, 0] * 10, [8] * 20)
    assert alike.value == alone.value == 0.5
    assert (alike.low, alike.high) == pytest.approx(wilson(0.5, 160))
    assert (alone.low, alone.high) == pytest.approx(wilson(0.5, 160 / (8 * 20 / 19))), "a row counts as one draw"
    sure = proportion([8] * 20, [8] * 20)
    assert (sure.value, sure.high) == (1.0, 1.0)
    assert sure.low == pytest.approx(wilson(1.0, 160)[0])


@pytest.mark.parametrize("stack", STACKS)
def test_state_is_what_a_cache_holds(stack: str) -> None:
    model = tiny_model(stack)
    cache = SDMCache(model.config)
    with torch.no_grad():
        model(torch.zeros(1, 12, dtype=torch.int64), past_key_values=cache)
    kept: list[Tensor] = []
    for layer in cache.layers:
        assert layer.state is not None
        layer.state.map(lambda x: kept.append(x) or x)  # type: ignore[func-returns-value]
    assert model_of(model).state_elements(12) == sum(x.numel() for x in kept if x.is_floating_point())


def test_state_of_others() -> None:
    llama = model_of(other_model("llama"))
    assert [llama.state_elements(length) for length in (5, 50)] == [2 * 2 * 2 * 8 * length for length in (5, 50)]
    mamba = model_of(other_model("mamba"))
    sizes = [mamba.state_elements(length) for length in (10, 50)]
    assert sizes[0] == sizes[1] is not None


def test_a_number_told_in_a_text(folders: dict[str, Path], texts: Path) -> None:
    """A program that reads the text finds the answer, where the depth says."""
    lm = open_model(folders["llama"])
    task = text_needle(lm, str(texts), (), 1)
    assert [size.number for size in task.sizes] == [256, 512, 1024], "the texts are no longer"
    depths = []
    for number in range(20):
        row = task.row(task.sizes[0], number)
        ids, targets = row.batch.input_ids[0].tolist(), row.batch.targets[0]
        assert len(ids) == 255
        answer = lm.decode(targets[targets != IGNORED].tolist())
        text = lm.decode([*ids[1:], *targets[-1:].tolist()])
        assert text.endswith(f" is{answer}")
        told = text.index(f"The secret number of the {text.rsplit(' is', 1)[0].rsplit(' ', 1)[1]} is{answer}.")
        assert row.depth is not None
        depths.append(float(row.depth[0]))
        room = 255 - 2 * len("The secret number of the harbour is") - 9
        assert told / room == pytest.approx(depths[-1], abs=0.05)
    assert min(depths) < 0.2
    assert max(depths) > 0.8
    with pytest.raises(UserError, match=r"--sizes: needle and question take a text of \d+ tokens at least, got 40"):
        text_needle(lm, str(texts), (40,), 1)
    with pytest.raises(UserError, match=r"--haystack: .* fewer than a row of 100000"):
        text_needle(lm, str(texts), (100_000,), 1)


class Oracle:
    """Predicts every target, but for some of those that are asked for."""

    def __init__(self, targets: Tensor, wrong: tuple[int, ...] = ()) -> None:
        self.targets, self.wrong = targets, wrong

    def predict(self, ids: Tensor, wanted: Tensor) -> Tensor:
        answers = self.targets[wanted].clone()
        answers[list(self.wrong)] += 1
        return answers


def test_an_answer_about_a_needle_is_right_if_all_of_its_tokens_are(texts: Path, tmp_path: Path) -> None:
    text = " ".join(f"The {word} harbour was measured {count} times." for count, word in enumerate(["old", "new"] * 40))
    (tmp_path / "sentences.txt").write_text(text)
    config = RetrievalConfig(
        source=str(tmp_path),
        num_sentences=50,
        tokenizer="bpe:400",
        digits=2,
        cache_dir=tmp_path / "cache",
        sequence_length=128,
    )
    task = task_of(config, (), 1)
    assert [size.length for size in task.sizes] == [128, 512, 2048], "beyond the trained length too"
    for size in task.sizes:
        row, again = task.row(size, 5), task.row(size, 5)
        assert row.batch.input_ids.shape == (1, size.length)
        assert torch.equal(row.batch.input_ids, again.batch.input_ids)
        places = (row.batch.targets[0] != IGNORED).nonzero().squeeze(1).tolist()
        starts = [number for number, place in enumerate(places) if number == 0 or place > places[number - 1] + 1]
        assert len(places) >= 4 * len(starts), "keys are restated before their values"
        counts = {"right": len(starts), "asked": len(starts)}
        (result,) = ask(Oracle(row.batch.targets), task, size, [5])  # type: ignore[arg-type]
        assert result == {**counts, "tokens": 1.0}
        for number, start in enumerate(starts):
            stop = [*starts, len(places)][number + 1]
            for wrong in ((start,), (stop - 1,), (start, stop - 1)):
                (result,) = ask(Oracle(row.batch.targets, wrong), task, size, [5])  # type: ignore[arg-type]
                assert result["right"] == len(starts) - 1
        (result,) = ask(Oracle(row.batch.targets, tuple(range(len(places)))), task, size, [5])  # type: ignore[arg-type]
        assert (result["right"], result["tokens"]) == (0, 0.0)
    with pytest.raises(UserError, match="--sizes: a row of retrieval has at least 32 tokens, got 31"):
        task_of(config, (128, 31), 1)
    with pytest.raises(UserError, match="--task retrieval asks what a run of `sdm train retrieval` was trained on"):
        default_config("retrieval")
    other = task_of(config, (128,), 2)
    assert not torch.equal(other.row(other.sizes[0], 5).batch.input_ids, task.row(task.sizes[0], 5).batch.input_ids)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "recall"
    Trainer(recall_run(), folder).run()
    return folder


def test_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run is measured on what it was trained on, with figures; what is done is not done again."""
    main(["eval", "recall", str(run), "--rows", "6", "--sizes", "2", "4", "--limit", "2"])
    assert "accuracy (%) by the number of pairs K" in " ".join(capsys.readouterr().out.split())
    results = read_results(run / "evaluations" / "recall")
    assert results.data["task"] == results.summary["task"] == results.summary["trained_on"] == "recall"  # type: ignore[index]
    assert not results.complete
    assert len(results.units) == 4
    main(["eval", "recall", str(run), "--rows", "6", "--sizes", "2", "4"])
    results = read_results(run / "evaluations" / "recall")
    assert results.complete
    assert {key: one["rows"] for key, one in results.summary["sizes"].items()} == {"2": 6, "4": 6}  # type: ignore[index]
    assert (run / "evaluations" / "recall" / "figures" / "recall-accuracy.png").is_file()
    whole = evaluate("recall", Recall(rows=6, sizes=(2, 4)), [(open_model(run), tmp_path / "again")])[0]
    assert whole.units == results.units, "in batches of other sizes"


def test_several_models_have_a_figure_of_their_states(run: Path, tmp_path: Path, folders: dict[str, Path]) -> None:
    arguments = [str(run), *map(str, folders.values())]
    options = ["--task", "rebinding", "--rows", "2", "--sizes", "4", "8", "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as ended:
        main(["eval", "recall", *arguments, *options])
    assert "rebinding has 576 tokens, but recall takes" in str(ended.value)
    options[1] = "mad-in-context-recall"
    main(["eval", "recall", *arguments[1:], *options[:4], "--output", str(tmp_path / "out")])
    assert {path.name for path in (tmp_path / "out" / "figures").iterdir()} == {
        "mad-in-context-recall-accuracy.png",
        "mad-in-context-recall-state.png",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "rebindin"], "there is no task 'rebindin'; did you mean rebinding"),
        (["--task", "mqar"], r"mqar has 8192 tokens, but \w+ takes \d+; it was trained on recall"),
        (["--sizes", "999"], "--sizes: recall has between 1 and num_keys"),
        (["--rows", "0"], "rows must be a positive integer"),
        (["--task", "text-needle"], "has no tokenizer"),
    ],
)
def test_what_cannot_be_measured(run: Path, tmp_path: Path, options: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["eval", "recall", str(run), *options, "--output", str(tmp_path / "out")])
    assert re.search(message, str(ended.value))
    assert not (tmp_path / "out").exists()


def test_a_model_of_text(tmp_path: Path, texts: Path) -> None:
    """By default a number that is told in a text; and a limit of the model is respected."""
    folder = save_model(other_model("gpt2"), tmp_path / "gpt2")
    options = ["--haystack", str(texts), "--rows", "3", "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as ended:
        main(["eval", "recall", str(folder), "--sizes", "250", *options])
    assert "gpt2 takes at most 128 tokens" in str(ended.value)
    llama = save_model(other_model("llama"), tmp_path / "llama")
    main(["eval", "recall", str(llama), "--sizes", "250", *options])
    found = read_results(tmp_path / "out").summary
    assert found is not None
    assert found["sizes"]["250"]["asked"] == 3
    assert found["trained_on"] is None


def test_every_fact_of_training_is_asked_once() -> None:
    config = FactsConfig(num_facts=50, num_relations=4, num_names=5, num_values=9, num_fillers=3, asked=5, batch_size=3)
    task = task_of(config, (), 1)
    (size,) = task.sizes
    assert (size.number, task.rows) == (50, 10)
    asked = []
    for number in range(10):
        batch = task.row(size, number).batch
        for place in (batch.targets[0] != IGNORED).nonzero().flatten().tolist():
            asked.append(tuple(batch.input_ids[0, place - 2 : place + 2].tolist()))
    assert len(asked) == len(set(asked)) == 50
    with pytest.raises(UserError, match="trained on num_facts = 50 facts, got 20"):
        task_of(config, (20,), 1)
