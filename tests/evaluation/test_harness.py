"""Tasks of lm-evaluation-harness give the harness's own numbers. Runs where the extra `eval` is installed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sdm.cli import main
from sdm.errors import UserError
from sdm.evaluation.harness.programs import runs_well
from sdm.evaluation.results import read_results

pytestmark = [
    # What the other libraries deprecate in each other is not ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def test_programs() -> None:
    """One that ends well, and those that fail, leave early or never end."""
    assert runs_well("x = 1\nassert x == 1")
    assert not runs_well("assert False")
    assert not runs_well("import sys\nsys.exit(0)"), "before the tests"
    assert not runs_well("import os\nos._exit(0)")
    assert not runs_well("def f(:")
    assert not runs_well("while True: pass", seconds=1.0)


def write(folder: Path, split: str, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{split}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def tasks() -> Any:
    pytest.importorskip("lm_eval")
    from sdm.evaluation.harness import tasks

    return tasks


@pytest.mark.parametrize("kind", ["sdm", "llama"])
@pytest.mark.parametrize("shots", [None, 2])
def test_metrics_are_those_of_the_harness(
    kind: str, shots: int | None, folders: dict[str, Path], tmp_path: Path, tasks: Any
) -> None:
    """Multiple choice, likelihood and generated answers, with and without examples, by batches of other sizes."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    from sdm.evaluation.eval_model import open_model

    options = [] if shots is None else ["--shots", str(shots)]
    main(["eval", "harness", str(folders[kind]), "--tasks", "small", *options, "--output", str(tmp_path / "out")])
    found = read_results(tmp_path / "out").summary
    assert found is not None

    lm = open_model(folders[kind])
    model = HFLM(
        pretrained=lm.model,
        tokenizer=AutoTokenizer.from_pretrained(folders[kind]),
        batch_size=1,
        max_length=lm.context_limit or 2**20,
    )
    parts = tasks.load(["small"], None, shots=shots)[0].parts
    expected = lm_eval.simple_evaluate(
        model, tasks=list(parts.values()), num_fewshot=shots, bootstrap_iters=0, fewshot_random_seed=tasks.SEED
    )["results"]
    compared = 0
    for task, metrics in expected.items():
        for name, value in metrics.items():
            metric, _, how = name.partition(",")
            if not how or metric.endswith("_stderr"):
                continue
            one = found["tasks"]["small"]["parts"][task]["metrics"][metric if how == "none" else name]
            tolerance = 1e-5 if metric == "perplexity" else 0
            assert one["value"] == pytest.approx(value, rel=tolerance, abs=0), name
            compared += 1
    assert compared == 5
    assert found["tasks"]["small"]["questions"] == 24 + 16 + 12


def test_resumption(folders: dict[str, Path], tmp_path: Path, tasks: Any) -> None:
    """What is done stays; examples do not depend on where a session began."""
    arguments = ["eval", "harness", str(folders["sdm"]), "--tasks", "small_choice", "small_copy", "--shots", "1"]
    for limit in (["--limit", "3"], ["--limit", "17"], []):
        main([*arguments, *limit, "--output", str(tmp_path / "parts")])
    main([*arguments, "--output", str(tmp_path / "whole")])
    parts, whole = (read_results(tmp_path / name) for name in ("parts", "whole"))
    assert parts.complete
    assert parts.units.keys() == whole.units.keys()
    for key, one in whole.units.items():
        assert parts.units[key]["metrics"] == one["metrics"], key
        if one["task"] == "small_choice":
            likelihoods = [answer[0] for answer in one["answers"]]
            assert [answer[0] for answer in parts.units[key]["answers"]] == pytest.approx(likelihoods, abs=1e-4)


def test_the_paper_s_tasks_from_local_files(tmp_path: Path, tasks: Any) -> None:
    """Each in the columns that it is published with, as the harness loads it."""
    choices = {"text": ["a", "b", "c", "d", "e"], "label": list("ABCDE")}
    question = {"question": "Which?", "choices": choices, "answerKey": "B"}
    problem = {"question": "What?", "options": ["w", "x", "y", "z"], "answer": "C"}
    rows: dict[str, tuple[str, list[dict[str, Any]]]] = {
        "hellaswag": (
            "validation",
            [{"ctx_a": "A man", "ctx_b": "he", "activity_label": "Run", "endings": ["a", "b", "c", "d"], "label": "1"}],
        ),
        "winogrande": ("validation", [{"sentence": "It _ is.", "option1": "a", "option2": "b", "answer": "1"}]),
        "arc_easy": ("test", [question]),
        "arc_challenge": ("test", [question]),
        "piqa": ("validation", [{"goal": "g", "sol1": "a", "sol2": "b", "label": 0}]),
        "openbookqa": ("test", [{"question_stem": "q", "choices": choices, "answerKey": "A"}]),
        # As published, a row per question.
        "race_middle": ("test", [{"article": "text", **problem}, {"article": "text", **problem, "question": "Who?"}]),
        "race": ("test", [{"article": "text", "problems": repr([problem])}]),
        "commonsense_qa": ("validation", [question]),
        "boolq": ("validation", [{"question": "is it", "passage": "It is.", "answer": True}]),
        "triviaqa": ("validation", [{"question": "who", "answer": {"aliases": ["me"], "value": "me"}}]),
        "humaneval_plus": ("test", [{"prompt": "def f():\n", "test": "def check(f): pass", "entry_point": "f"}]),
        "nq_open": ("validation", [{"question": "who", "answer": ["me", "I"]}]),
        "gsm8k": ("test", [{"question": "1 + 1?", "answer": "It is 2. #### 2"}]),
    }
    for task, (split, content) in rows.items():
        write(tmp_path / task, split, content)
        if task in ("triviaqa", "nq_open", "gsm8k"):
            write(tmp_path / task, "train", [content[0] | {"question": f"who {number}"} for number in range(6)])
    for split, count in (("dev", 5), ("test", 1)):
        subjects = sorted(path.stem[5:] for path in (Path(_root()) / "mmlu" / "default").glob("mmlu_*.yaml"))
        one = {"question": "q", "choices": ["a", "b", "c", "d"], "answer": 2}
        write(tmp_path / "cais" / "mmlu", split, [one | {"subject": name} for name in subjects for _ in range(count)])
    loaded = {one.name: one for one in tasks.load(list(tasks.PAPER), tmp_path)}
    assert list(loaded) == list(tasks.PAPER)
    assert len(loaded["mmlu"].parts) == 57
    from sdm.evaluation.harness.measurement import Questions

    for name, one in loaded.items():
        for part, task in one.parts.items():
            requests = Questions(task)[0]
            assert requests, part
            assert task.config.num_fewshot == tasks.PAPER[name].shots
    race = loaded["race_middle"].parts["race_middle"]
    assert len(race.eval_docs) == 1
    assert [request.args[1] for request in Questions(race)[0]] == [" w", " x", " y", " z"]
    assert Questions(race)[0][0].args[0] == "Article: text\n\nQuestion: What?\nAnswer: y\nWho?"
    assert Questions(loaded["boolq"].parts["boolq"]).judged is not None
    assert loaded["boolq"].parts["boolq"].doc_to_target(loaded["boolq"].parts["boolq"].eval_docs[0]) == 1


def _root() -> str:
    import lm_eval.tasks

    return str(Path(lm_eval.tasks.__file__).parent)


def test_datasets_in_other_forms(tmp_path: Path, tasks: Any) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"goal": "g", "sol1": "a", "sol2": "b", "label": 0}] * 3)
    places = [tmp_path / name for name in ("parquet", "split", "whole")]
    (places[0] / "baber" / "piqa" / "data").mkdir(parents=True)
    rows.to_parquet(str(places[0] / "baber" / "piqa" / "data" / "validation-00000-of-00001.parquet"))
    rows.to_parquet(str(places[0] / "baber" / "piqa" / "data" / "train-00000-of-00001.parquet"))
    for split in ("train", "validation"):
        rows.save_to_disk(str(places[1] / "piqa" / split))
    datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(str(places[2] / "piqa"))
    for place in places:
        (one,) = tasks.load(["piqa"], place)
        assert len(one.parts["piqa"].eval_docs) == 3


def test_what_is_absent_or_wrong(tmp_path: Path, tasks: Any) -> None:
    with pytest.raises(
        UserError, match=r"(?s)of 2 tasks are absent.*hellaswag: Rowan/hellaswag.*piqa: .*--tasks small"
    ):
        tasks.load(["hellaswag", "piqa", "small"], tmp_path)
    with pytest.raises(UserError, match="there is no task 'helaswag'; did you mean hellaswag"):
        tasks.load(["helaswag"], None)
    path = write(tmp_path / "piqa", "validation", [{"goal": "g", "sol1": "a", "sol2": "b", "label": 0}] * 2)
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(UserError, match=re.escape(f"{path}, line 3 is not JSON")):
        tasks.load(["piqa"], tmp_path)
    path.write_text('{"goal": "g"}\n{"gaol": "g"}\n')
    with pytest.raises(UserError, match=r"line 2 (has|lacks) the field"):
        tasks.load(["piqa"], tmp_path)
    path.write_text('{"goal": "g", "solution": "s"}\n')
    with pytest.raises(UserError, match=r"piqa in .* has no sol1, sol2, label; its columns are goal, solution"):
        tasks.load(["piqa"], tmp_path)
    path.write_text('{"goal": "g", "sol1": "a", "sol2": "b", "label": 0}\n')
    with pytest.raises(UserError, match="piqa is asked behind 2 examples, and the split that they are from has no"):
        tasks.load(["piqa"], tmp_path, shots=2)
    path.rename(path.with_name("train.jsonl"))
    with pytest.raises(UserError, match="piqa: the split that its questions are from has no rows"):
        tasks.load(["piqa"], tmp_path)
    path.with_name("train.jsonl").unlink()
    path.write_text("\n")
    with pytest.raises(UserError, match="has no rows"):
        tasks.load(["piqa"], tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "humaneval_plus"], "runs programs that the model writes, .* --run-code"),
        (["--data-dir", "nowhere"], "--data-dir: nowhere is not a folder"),
        (["--shots", "-1"], "shots must not be negative"),
        (["--tasks", "hellaswag"], "Rowan/hellaswag: give --data-dir"),
    ],
)
def test_the_command_says_what_is_wrong(
    folders: dict[str, Path], tmp_path: Path, tasks: Any, options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["eval", "harness", str(folders["sdm"]), *options, "--output", str(tmp_path / "out")])
    assert re.search(message, str(ended.value))
    assert not (tmp_path / "out").exists()
